/* rope.h - what rope.c hands to the kernels of a device. */
#ifndef BST_ROPE_H
#define BST_ROPE_H

#include "core/cpu_kernel.h"

/* The widest head: a block of 1024 threads then has one for each pair, and a tile of the CPU's holds one. */
enum { ROPE_MOST_DIM = 2048 };

/* Token chunks of the backward pass with a norm on CPU, each with its own partial sums of the weights' gradients: a
 * fixed number, so that the order of the sum, and with it the result, does not depend on the number of threads. */
enum { ROPE_CHUNKS = 32 };

/* q, or k: [B, heads, S, D] but for the weight [D]. data NULL: not there, or not wanted. */
typedef struct rope_heads {
    bst_view x, y;                /* y: the result; with a norm, in the backward pass, its gradient */
    bst_view weight, dx, dweight; /* with a norm */
} rope_heads;

typedef struct rope_call {
    const char *op;
    rope_heads of[2];  /* q and k */
    bst_view cos, sin; /* [B, S, R], or half as wide */
    int64_t tokens, positions, rotary;
    bst_rope_layout layout;
    bool half_tables;
    bool transposed; /* the backward pass: without a norm x is the gradient that comes in, y the one that goes out */
    bool normed, gemma;
    float eps;
    int64_t chunks;
    float *partial; /* on CPU [chunks, 2, D] partial sums of dweight, or NULL */
} rope_call;

BST_CPU_DECLARE(bst__rope_cpu);               /* over tokens, batch * S + position: all but the next */
BST_CPU_DECLARE(bst__rope_norm_backward_cpu); /* over chunks of tokens */
BST_CPU_DECLARE(bst__rope_norm_dweight_cpu);  /* over q and k: sums the partial rows */

/* All need a token and a head at least, the last a gradient that is wanted; y_type: that of the forward result. */
bst_status bst__rope_cuda(const bst_exec *exec, const rope_call *call);
bst_status bst__rope_norm_backward_cuda(const bst_exec *exec, const rope_call *call, bst_dtype y_type);

#endif
