/* rope_args.h - the arguments of the rotary embedding's kernel, as host and device see them. */
#ifndef BST_ROPE_ARGS_H
#define BST_ROPE_ARGS_H

#include "head_map.h"

/* q and k are what turns: the gradients, in the backward pass. */
typedef struct rope_args {
    const void *q, *k, *cos, *sin; /* k: NULL where K_HEADS is 0 */
    void *q_out, *k_out;
    bst_head_map q_strides, k_strides, q_out_strides, k_out_strides;
    int64_t cos_batch, cos_position, sin_batch, sin_position; /* strides */
    uint32_t tokens, positions;                               /* of all batches, of one */
} rope_args;

static_assert(sizeof(rope_args) == 184, "host and device must agree");

#endif
