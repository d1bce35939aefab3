/* qk_norm_rope_args.h - the arguments of the kernels of QK-norm and rotary embedding, as host and device see them. */
#ifndef BST_QK_NORM_ROPE_ARGS_H
#define BST_QK_NORM_ROPE_ARGS_H

#include "head_map.h"

/* Heads of q, or of k, that a group of threads takes of a token in the backward pass: of each a thread has a place in
 * shared memory, so they decide how much is under way. On an H200, 16384 tokens of 32 + 8 heads of 128 in bf16: of two
 * pieces 8: 142 us, 4: 140, 2: 129; of one (rotary.cuh) 4: 130, 2: 143. */
#define QK_BACKWARD_EACH(pieces) (4 / (pieces))

/* What of q or k is wanted of the backward pass; k's bits are those of q, shifted by QK_OF_K. */
#define QK_DX      1
#define QK_DWEIGHT 2
#define QK_OF_K    2

/* cos and sin, with strides, and how many tokens there are of all batches and of one. */
typedef struct qk_norm_rope_tables {
    const void *cos, *sin;
    int64_t cos_batch, cos_position, sin_batch, sin_position;
    uint32_t tokens, positions;
} qk_norm_rope_tables;

/* q, or k. */
typedef struct qk_norm_rope_forward_heads {
    const void *x, *weight;
    void *y;
    bst_head_map x_map, y_map;
} qk_norm_rope_forward_heads;

typedef struct qk_norm_rope_forward_args {
    qk_norm_rope_forward_heads q, k;
    qk_norm_rope_tables tables;
    float eps;
    int32_t unused;
} qk_norm_rope_forward_args;

typedef struct qk_norm_rope_backward_heads {
    const void *x, *weight, *dy;
    void *dx;
    bst_head_map x_map, dy_map, dx_map;
} qk_norm_rope_backward_heads;

typedef struct qk_norm_rope_backward_args {
    qk_norm_rope_backward_heads q, k;
    qk_norm_rope_tables tables;
    float *partial; /* [blocks, 2, DIM] */
    float eps;
    int32_t unused;
} qk_norm_rope_backward_args;

typedef struct qk_norm_rope_dweight_args {
    const float *partial;        /* [parts, 2, DIM] */
    void *dq_weight, *dk_weight; /* NULL: not wanted */
    int64_t parts;
} qk_norm_rope_dweight_args;

static_assert(sizeof(qk_norm_rope_tables) == 56, "host and device must agree");
static_assert(sizeof(qk_norm_rope_forward_args) == 208, "host and device must agree");
static_assert(sizeof(qk_norm_rope_backward_args) == 280, "host and device must agree");
static_assert(sizeof(qk_norm_rope_dweight_args) == 32, "host and device must agree");

#endif
