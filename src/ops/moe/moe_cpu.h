/* moe_cpu.h - what moe.c hands to moe_cpu.c. */
#ifndef BST_MOE_CPU_H
#define BST_MOE_CPU_H

#include "core/activation.h"
#include "core/cpu_kernel.h"

/* Rows that add up to one partial sum of the biases' gradients: a fixed number, so that the order of a sum does not
 * depend on the number of threads. */
enum { MOE_CHUNK = 32 };

/* A row is a pair's place after sorting by expert; a pair is token * choices + choice. What is NULL is not given, or
 * not wanted. */
typedef struct moe_cpu {
    bst_dtype dtype, w_dtype; /* of the rows, of the routing weights */
    int64_t rows, columns;    /* columns: H, or 2I */
    int64_t choices, experts;
    const int32_t *order, *position, *ends;
    const int64_t *indices;
    const void *x, *h, *y, *dy, *bias, *weights;
    int64_t x_stride;
    void *out, *dh, *wy, *dweights, *dbias;
    const float *dots_in;
    float *dots;
    float *partial; /* [chunks + experts, columns]: that of chunk c and expert e is row c + e */
    bst_unit unit;
} moe_cpu;

BST_CPU_DECLARE(bst__moe_gather_cpu);           /* over tokens: x to out */
BST_CPU_DECLARE(bst__moe_glu_forward_cpu);      /* over rows: h to out */
BST_CPU_DECLARE(bst__moe_glu_backward_cpu);     /* over chunks */
BST_CPU_DECLARE(bst__moe_combine_forward_cpu);  /* over tokens: y to out */
BST_CPU_DECLARE(bst__moe_combine_backward_cpu); /* over chunks: x to out */
BST_CPU_DECLARE(bst__moe_bias_sum_cpu);         /* over experts */

#endif
