/* rms_norm_cpu.h - what rms_norm.c hands to rms_norm_cpu.c. */
#ifndef BST_RMS_NORM_CPU_H
#define BST_RMS_NORM_CPU_H

#include "core/cpu_kernel.h"
#include "ops/rms_norm/rms_norm.h"

/* Row chunks of the backward pass, each with its own partial dweight: a fixed number, so that the order of the sum, and
 * with it the result, does not depend on the number of threads. */
enum { RMS_NORM_CHUNKS = 32 };

typedef struct rms_norm_backward_cpu {
    const rms_norm_backward_call *call;
    float *partial; /* [chunks, H]; NULL: dweight is not wanted */
    int64_t chunks;
} rms_norm_backward_cpu;

BST_CPU_DECLARE(bst__rms_norm_forward_cpu);  /* a rms_norm_forward_call, over rows */
BST_CPU_DECLARE(bst__rms_norm_backward_cpu); /* a rms_norm_backward_cpu, over chunks of rows */
BST_CPU_DECLARE(bst__rms_norm_dweight_cpu);  /* the same, over columns: sums the partial rows */

#endif
