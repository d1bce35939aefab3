/* linear_cross_entropy_cpu.h - what linear_cross_entropy.c hands to linear_cross_entropy_cpu.c. */
#ifndef BST_LINEAR_CROSS_ENTROPY_CPU_H
#define BST_LINEAR_CROSS_ENTROPY_CPU_H

#include "core/cpu_kernel.h"

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
