/* linear_cross_entropy.h - how many rows of logits exist at a time, and what the head calls on CPU beside products. */
#ifndef BST_LINEAR_CROSS_ENTROPY_H
#define BST_LINEAR_CROSS_ENTROPY_H

#include "core/cpu_kernel.h"

/* Chunks up to which dweight is rounded to its type at each: eight roundings of partial sums add less to its error than
 * the rounding of the logits does. Beyond, it is summed in float32. */
enum { LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS = 8 };

/* What the choice depends on. */
typedef struct linear_cross_entropy_chunks {
    int64_t rows, width; /* T, at least 1; H */
    int64_t row_bytes;   /* of a row of logits in memory */
    int64_t budget;      /* bytes of workspace; 0: the default */
    bool rounded;        /* dweight is wanted, and in 16 bits */
    bool hidden_alone;   /* dhidden is wanted, and no other gradient */
    bool forward_alone;  /* no gradient is wanted, or not yet */
    int processors;      /* multiprocessors; 0 on CPU */
    int64_t memory;      /* the GPU's; 0: not known */
} linear_cross_entropy_chunks;

/* Rows of a chunk; a pure function. */
int64_t bst__linear_cross_entropy_chunk_rows(const linear_cross_entropy_chunks *c);
/* For how many rows a chunk of `rows` has memory: by default on CUDA one of a few numbers. */
int64_t bst__linear_cross_entropy_memory_rows(const linear_cross_entropy_chunks *c, int64_t rows);

/* What one of the functions below works on: the members that it names. */
typedef struct linear_cross_entropy_cpu {
    const void *in;
    void *out;
    float *dweight; /* sums over chunks */
    double *dbias;
    int64_t rows, columns, stride; /* of a matrix; elements between its rows */
    double scale;
    bst_dtype dtype, out_type; /* of in and, but for `spread`, out; of the latter's */
} linear_cross_entropy_cpu;

BST_CPU_DECLARE(bst__linear_cross_entropy_spread_cpu);        /* over rows: out [, columns] = in [columns] */
BST_CPU_DECLARE(bst__linear_cross_entropy_widen_cpu);         /* over rows: out [, columns] float32 = in */
BST_CPU_DECLARE(bst__linear_cross_entropy_add_cpu);           /* over elements: dweight += in */
BST_CPU_DECLARE(bst__linear_cross_entropy_round_cpu);         /* over elements: out = dweight */
BST_CPU_DECLARE(bst__linear_cross_entropy_add_columns_cpu);   /* over columns: dbias += each row of in */
BST_CPU_DECLARE(bst__linear_cross_entropy_round_columns_cpu); /* over columns: out = scale dbias */

#endif
