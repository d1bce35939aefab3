/* low_rank.h - what the files of this room share, and what they hand to low_rank_cpu.c. */
#ifndef BST_LOW_RANK_H
#define BST_LOW_RANK_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "core/describe.h"
#include "ops/low_rank/low_rank_args.h"

/* Whether rows of a multiple of 8 elements begin at multiples of 16 bytes, as the kernels need them. */
bool bst__low_rank_aligned(const bst_view *v);
/* Elements from a matrix' row to the next. */
static inline int64_t low_rank_stride(const bst_view *matrix) { return matrix->rows.inner_stride; }
extern const bst_function bst__low_rank_linear, bst__low_rank_dx, bst__low_rank_glu_backward, bst__low_rank_add,
    bst__low_rank_split, bst__low_rank_layers;
/* y = x weight^T + bias, or NULL, as one product. */
bst_status bst__low_rank_one(const bst_exec *exec, const char *op, const bst_view *x, const bst_view *weight,
                             const bst_view *bias, const bst_view *y);

/* out [m, R] = scale x y, y [k, R] in float32 in a workspace: x is dy, or dy transposed, of 16 bits. */
typedef struct low_rank_cpu {
    bst_dtype dtype, out_type; /* of dy, and of out: the same, or float32 */
    const void *dy;
    const float *y;
    void *out;
    int64_t dy_stride, out_stride;
    int64_t k, rank;
    float scale;
} low_rank_cpu;

BST_CPU_DECLARE(bst__low_rank_cpu);            /* over rows of dy */
BST_CPU_DECLARE(bst__low_rank_transposed_cpu); /* over columns of dy */

/* Rows of x, and columns of y, that a thread has at a time. */
enum { LOW_RANK_CPU_ROWS = 8, LOW_RANK_CPU_COLUMNS = 64 };

/* A layer that an adapter adds to. */
typedef struct low_rank_layer {
    const void *a, *b, *y;
    void *out; /* y, or elsewhere */
    int64_t y_stride, out_stride;
    int64_t columns, rank, first; /* first: its first column of thin */
    float scale;
} low_rank_layer;

/* thin [rows, ranks] = x a^T of all layers, in float32 in a workspace; then out = y + scale thin b^T of each. Layers
 * that are not given have no columns and no ranks. */
typedef struct low_rank_sums {
    low_rank_layer layer[LOW_RANK_LAYERS];
    bst_dtype dtype, factor_type; /* of x and y, of a and b */
    const void *x;
    float *thin;
    int64_t x_stride, rows, width, ranks;
} low_rank_sums;

/* y, which becomes out, of a layer with an adapter, whose first column of thin is `first`. */
low_rank_layer bst__low_rank_adapter(const bst_view *a, const bst_view *b, const bst_view *y, const bst_view *out,
                                     float scale, int64_t first);
/* Rows of x that a block of thin's kernel has of so many, and what its launch is told of up to three layers: a grid of
 * so many blocks. */
int64_t bst__low_rank_thin_rows(int64_t rows);
low_rank_thin_args bst__low_rank_thin_args(const low_rank_sums *s, int64_t *blocks);
/* On CUDA; thin is made first, or has been. */
bst_status bst__low_rank_add_sums(const bst_exec *exec, const char *op, int device, const low_rank_sums *s,
                                  bool has_thin);
/* All of it, without memory for thin, on CPU or CUDA. */
bst_status bst__low_rank_add_all(const bst_exec *exec, const char *op, DLDevice device, low_rank_sums *s);

BST_CPU_DECLARE(bst__low_rank_thin_cpu);   /* over tiles of rows, of each all ranks */
BST_CPU_DECLARE(bst__low_rank_expand_cpu); /* over tiles of columns, of all layers */
/* A low_rank_split_args, over tiles of the ranks of each group. */
BST_CPU_DECLARE(bst__low_rank_split_cpu);

#endif
