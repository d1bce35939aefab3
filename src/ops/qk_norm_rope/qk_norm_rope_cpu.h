/* qk_norm_rope_cpu.h - what qk_norm_rope.c hands to qk_norm_rope_cpu.c. */
#ifndef BST_QK_NORM_ROPE_CPU_H
#define BST_QK_NORM_ROPE_CPU_H

#include "core/cpu_kernel.h"

/* Token chunks of the backward pass, each with its own partial sums of the weights' gradients: a fixed number, so that
 * the order of the sum, and with it the result, does not depend on the number of threads. */
enum { QK_NORM_ROPE_CHUNKS = 32 };

/* q, or k: [B, heads, S, D] but for the weight [D]. data NULL: not there, or not wanted. */
typedef struct qk_norm_rope_heads {
    bst_view x, weight, y; /* y: the result, or its gradient in the backward pass */
    bst_view dx, dweight;
} qk_norm_rope_heads;

typedef struct qk_norm_rope_cpu {
    qk_norm_rope_heads of[2]; /* q and k */
    bst_view cos, sin;        /* [B, S, R] */
    int64_t tokens, positions;
    float eps;
    bool gemma, interleaved;
    int64_t chunks;
    float *partial; /* backward: [chunks, 2, D] partial sums of dweight, or NULL */
} qk_norm_rope_cpu;

BST_CPU_DECLARE(bst__qk_norm_rope_forward_cpu);  /* over tokens: batch * S + position */
BST_CPU_DECLARE(bst__qk_norm_rope_backward_cpu); /* over chunks of tokens */
BST_CPU_DECLARE(bst__qk_norm_rope_dweight_cpu);  /* over q and k: sums the partial rows */

#endif
