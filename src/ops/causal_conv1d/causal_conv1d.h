/* causal_conv1d.h - what the files of this room share: the places of tensors, and what causal_conv1d.c hands to the
 * kernels of a device. */
#ifndef BST_CAUSAL_CONV1D_H
#define BST_CAUSAL_CONV1D_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "core/describe.h"
#include "ops/causal_conv1d/causal_conv1d_args.h"

/* Places of tensors: of both functions, then of each. */
enum { X, WEIGHT, BIAS, SEQ_IDX, BOTH };
enum { Y = BOTH };
enum { DY = BOTH, DX, DWEIGHT, DBIAS };
/* The attributes. */
enum { SILU };

/* Whether results show what exp is short of: some tensor has float32. */
static inline bool causal_conv1d_is_exact(const bst_view *v) {
    return v[X].dtype == BST_F32 || v[WEIGHT].dtype == BST_F32;
}

/* Both need at least one token and one channel; backward: at least one gradient that is wanted. */
bst_run bst__causal_conv1d_forward_cuda, bst__causal_conv1d_backward_cuda;

typedef struct causal_conv1d_cpu {
    const bst_view *v;
    bool silu;
    int64_t chunks; /* backward: of tokens, each with its own partial sums */
    float *partial; /* [chunks, width]: of dweight and then dbias, those that are wanted */
    int64_t width;
} causal_conv1d_cpu;

BST_CPU_DECLARE(bst__causal_conv1d_forward_cpu);  /* over tokens of all sequences */
BST_CPU_DECLARE(bst__causal_conv1d_backward_cpu); /* over chunks of tokens */
BST_CPU_DECLARE(bst__causal_conv1d_sums_cpu);     /* over columns: sums the partial rows */

#endif
