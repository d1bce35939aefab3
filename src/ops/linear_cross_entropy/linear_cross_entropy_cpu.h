/* linear_cross_entropy_cpu.h - what linear_cross_entropy.c hands to linear_cross_entropy_cpu.c. */
#ifndef BST_LINEAR_CROSS_ENTROPY_CPU_H
#define BST_LINEAR_CROSS_ENTROPY_CPU_H

#include "core/cpu_kernel.h"

typedef struct linear_cross_entropy_spread_cpu {
    const void *row; /* [columns] */
    void *out;       /* [rows, columns], rows `stride` elements apart */
    int64_t columns, stride;
    bst_dtype dtype;
} linear_cross_entropy_spread_cpu;

typedef struct linear_cross_entropy_sum_cpu {
    const void *in; /* [count] of `dtype` */
    float *sum;     /* [count] */
    void *out;      /* round: [count] of `dtype` */
    bst_dtype dtype;
} linear_cross_entropy_sum_cpu;

typedef struct linear_cross_entropy_columns_cpu {
    const void *in; /* add: [rows, columns], rows `stride` elements apart */
    double *sum;    /* [columns] */
    void *out;      /* round: [columns] */
    int64_t rows, stride;
    double scale; /* round */
    bst_dtype dtype;
} linear_cross_entropy_columns_cpu;

BST_CPU_DECLARE(bst__linear_cross_entropy_spread_cpu);        /* over rows: writes one row over each */
BST_CPU_DECLARE(bst__linear_cross_entropy_add_cpu);           /* over elements: sum += in */
BST_CPU_DECLARE(bst__linear_cross_entropy_round_cpu);         /* over elements: out = sum */
BST_CPU_DECLARE(bst__linear_cross_entropy_add_columns_cpu);   /* over columns: sum += each row of in */
BST_CPU_DECLARE(bst__linear_cross_entropy_round_columns_cpu); /* over columns: out = scale sum */

#endif
