/* rope_args.h - what host and device share of the rotary embedding: how pairs lie, where heads begin, the arguments of
 * the kernels. */
#ifndef BST_ROPE_ARGS_H
#define BST_ROPE_ARGS_H

/* bst_rope_layout */
#define ROPE_HALVES                0
#define ROPE_INTERLEAVED           1
#define ROPE_INTERLEAVED_TO_HALVES 2

/* Where the heads of a tensor [B, heads, S, D] begin: strides in elements; within a head elements lie side by side. */
typedef struct rope_map {
    int64_t batch, head, position;
} rope_map;

/* NORM: none, or one whose factor is the weight, or 1 + weight. */
#define ROPE_PLAIN  0
#define ROPE_WEIGHT 1
#define ROPE_GEMMA  2

/* Heads of q, or of k, that a group of threads takes of a token in the backward pass: of each a thread has a place in
 * shared memory, so they decide how much is in flight. On an H200, 16384 tokens of 32 + 8 heads of 128 in bf16: of two
 * pieces 8: 142 us, 4: 140, 2: 129; of one (rope_pieces.cuh) 4: 130, 2: 143. */
#define ROPE_BACKWARD_EACH(pieces) (4 / (pieces))

/* What of q or k is wanted of the backward pass; k's bits are those of q, shifted by ROPE_OF_K. */
#define ROPE_DX      1
#define ROPE_DWEIGHT 2
#define ROPE_OF_K    2

/* cos and sin, with strides, and how many tokens there are of all batches and of one. */
typedef struct rope_tables {
    const void *cos, *sin;
    int64_t cos_batch, cos_position, sin_batch, sin_position;
    uint32_t tokens, positions;
} rope_tables;

/* q, or k; TRANSPOSED: the gradients, x that comes in and y that goes out. K_HEADS is 0 where there is no k. */
typedef struct rope_forward_heads {
    const void *x, *weight;
    void *y;
    rope_map x_map, y_map;
} rope_forward_heads;

typedef struct rope_args {
    rope_forward_heads q, k;
    rope_tables tables;
    float eps;
    int32_t unused;
} rope_args;

typedef struct rope_norm_backward_heads {
    const void *x, *weight, *dy;
    void *dx;
    rope_map x_map, dy_map, dx_map;
} rope_norm_backward_heads;

typedef struct rope_norm_backward_args {
    rope_norm_backward_heads q, k;
    rope_tables tables;
    float *partial; /* [blocks, 2, DIM] */
    float eps;
    int32_t unused;
} rope_norm_backward_args;

static_assert(sizeof(rope_map) == 24, "host and device must agree");
static_assert(sizeof(rope_tables) == 56, "host and device must agree");
static_assert(sizeof(rope_args) == 208, "host and device must agree");
static_assert(sizeof(rope_norm_backward_args) == 280, "host and device must agree");

#endif
