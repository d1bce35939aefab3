/* rms_norm_cpu.h - what rms_norm.c hands to rms_norm_cpu.c. */
#ifndef BST_RMS_NORM_CPU_H
#define BST_RMS_NORM_CPU_H

#include "core/cpu_kernel.h"

/* Row chunks of the backward pass, each with its own partial dweight: a fixed number, so that the order of the sum, and
 * with it the result, does not depend on the number of threads. */
enum { RMS_NORM_CHUNKS = 32 };

typedef struct rms_norm_cpu {
    bst_view x, weight, y, dy, dx; /* weight.data, dx.data may be NULL; forward: y, backward: dy and dx */
    bst_rows x_rows, dy_rows;
    bst_casting casting;
    float eps;
    float *rstd;    /* [rows]; forward: may be NULL */
    float *dweight; /* [RMS_NORM_CHUNKS, H] partial sums, or NULL */
    int64_t chunks;
    bst_view dweight_out;
} rms_norm_cpu;

BST_CPU_DECLARE(bst__rms_norm_forward_cpu);  /* over rows */
BST_CPU_DECLARE(bst__rms_norm_backward_cpu); /* over chunks of rows */
BST_CPU_DECLARE(bst__rms_norm_dweight_cpu);  /* over columns: sums the partial rows */

#endif
