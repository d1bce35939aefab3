/* head_map.h - where the heads of a tensor [B, heads, S, D] begin. Shared by host and kernels. */
#ifndef BST_HEAD_MAP_H
#define BST_HEAD_MAP_H

/* Strides in elements; within a head elements lie side by side. */
typedef struct bst_head_map {
    int64_t batch, head, position;
} bst_head_map;

static_assert(sizeof(bst_head_map) == 24, "host and device must agree");

#ifdef BST_DEVICE
typedef struct bst_token_place {
    int64_t batch, position;
} bst_token_place;

/* Where a token is, of `tokens` in batches of `positions`. A division takes some twenty instructions, which the usual
 * single batch is spared. */
BST_DEVICE bst_token_place bst_place_of_token(uint32_t token, uint32_t tokens, uint32_t positions) {
    bst_token_place place = {0, token};
    if (tokens != positions) place.batch = token / positions, place.position = token % positions;
    return place;
}

/* The first head of a token. */
BST_DEVICE int64_t bst_token_start(bst_head_map m, int64_t batch, int64_t position) {
    return batch * m.batch + position * m.position;
}
#else
#include "core/core.h"

static inline bst_head_map bst__head_map(const bst_view *v) {
    return (bst_head_map){v->stride[0], v->stride[1], v->stride[2]};
}
#endif

#endif
