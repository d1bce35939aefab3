/* segment_attention.h - what segment_attention.c hands to the kernels of a device. */
#ifndef BST_SEGMENT_ATTENTION_H
#define BST_SEGMENT_ATTENTION_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "ops/segment_attention/segment_attention_args.h"

/* q, dy [T, H, D], k, v [S, G, D], of any strides but their last; y [T, H, D], in a backward pass of any strides
 * likewise; cuts [2, N + 1], lse [H, T] and gradients contiguous. What the backward pass alone has is empty in a
 * forward pass. There are queries, and heads of them; keys there may be none. */
typedef struct segment_attention_call {
    const char *op;
    bst_view q, k, v, cuts, y, lse; /* of a forward pass y and lse are outputs */
    bst_view dy, dq, dk, dv;
    int64_t queries, keys, heads, groups, dim, segments; /* T, S, H, G, D, N */
    float scale;
    bool causal;
} segment_attention_call;

/* On CPU. */
typedef struct segment_attention_work {
    const segment_attention_call *call;
    int64_t strips, floats; /* work lies in so many strips, each with so many floats */
    float *work;
    float *delta; /* [H, T]: of each query dy . y */
} segment_attention_work;

/* Over strips. */
BST_CPU_DECLARE(bst__segment_attention_forward_cpu);
BST_CPU_DECLARE(bst__segment_attention_queries_cpu); /* delta and dq */
BST_CPU_DECLARE(bst__segment_attention_keys_cpu);    /* dk and dv, by delta */

bst_status bst__segment_attention_forward_cuda(const bst_exec *exec, const segment_attention_call *call);
bst_status bst__segment_attention_backward_cuda(const bst_exec *exec, const segment_attention_call *call);

#endif
