/* low_rank.h - what low_rank.c, low_rank_glu.c and low_rank_linear.c share, and what they hand to low_rank_cpu.c. */
#ifndef BST_LOW_RANK_H
#define BST_LOW_RANK_H

#include "core/cpu_kernel.h"
#include "core/describe.h"

/* Whether rows of a multiple of 8 elements begin at multiples of 16 bytes, as the kernels need them. */
bool bst__low_rank_aligned(const bst_view *v);
/* Elements from a matrix' row to the next. */
static inline int64_t low_rank_stride(const bst_view *matrix) { return matrix->rows.inner_stride; }
extern const bst_function bst__low_rank_linear, bst__low_rank_dx, bst__low_rank_glu_backward;

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

#endif
