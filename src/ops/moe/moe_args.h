/* moe_args.h - the arguments of the mixture-of-experts kernels, as host and device see them.
 *
 * A pair is a token and one of its experts: pair = token * choices + choice. A row is a pair's place after sorting. */
#ifndef BST_MOE_ARGS_H
#define BST_MOE_ARGS_H

#include "tensor_map.h"

/* The most experts, for whom the sort has room, and the most rows of a block that also sums over rows. */
#define BST_MOE_MOST_EXPERTS 1023
#define MOE_MOST_ROWS        32

/* The expert of a row: the first whose rows end behind it. */
BST_INLINE int expert_of(const int32_t *ends, int experts, int64_t row) {
    int low = 0, high = experts;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ends[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

typedef struct moe_sort_args {
    const int64_t *indices; /* [pairs] */
    int32_t *counts;        /* [blocks, experts + 1]; the last: pairs of no expert */
    int32_t *order;         /* [pairs]: the pair of a row */
    int32_t *position;      /* [pairs]: the row of a pair; -1: of no expert */
    int32_t *ends;          /* [experts]: where an expert's rows end */
    int64_t pairs;
    int32_t experts, chunk; /* chunk: pairs of a block, a multiple of its threads */
} moe_sort_args;

typedef struct moe_gather_args {
    const void *x;
    const int32_t *position;
    void *rows;
    int64_t x_stride, tokens, pairs;
} moe_gather_args;

/* y [columns, rows] of x [rows, columns], row r of which begins at r / inner * outer_stride + r % inner *
 * inner_stride. */
#define MOE_TRANSPOSE_SIDE 64 /* of a block's tile */

typedef struct moe_transpose_args {
    const void *x;
    void *y;
    int64_t outer_stride, inner_stride;
    int32_t rows, columns, inner, unused;
} moe_transpose_args;

/* Backward, but for y. */
typedef struct moe_glu_args {
    const void *h, *bias;
    const int32_t *ends;
    void *y;
    const void *dy, *weights;
    const int32_t *order;
    const float *dots; /* NULL: zeros */
    void *dh, *wy, *dweights;
    float *partial; /* [blocks + experts, 2I] */
    int64_t rows;
    float alpha, limit;
    int32_t experts, chunk; /* chunk: rows of a block */
} moe_glu_args;

typedef struct moe_combine_args {
    const void *y, *weights, *bias;
    const int32_t *position;
    const int64_t *indices;
    void *out;
    int64_t tokens, experts; /* experts: with a bias only */
} moe_combine_args;

typedef struct moe_combine_backward_args {
    const void *dout, *weights, *bias;
    const int32_t *order, *ends;
    void *rows;
    float *dots;    /* [rows] */
    float *partial; /* [blocks + experts, H] */
    int64_t dout_stride, count;
    int32_t experts, chunk;
} moe_combine_backward_args;

typedef struct moe_bias_args {
    const float *partial;
    const int32_t *ends;
    void *dbias;
    int64_t rows, chunk; /* chunk: rows that a partial sum comes from */
} moe_bias_args;

/* The experts' linear layers, in tiles of tile_product.h. */
typedef struct moe_linear_args {
    bst_tensor_map thin, b, x, matrices;
    void *y;
    const int32_t *ends;
    int32_t rows, columns, experts;
    int32_t tile_columns, group; /* tiles of columns; of rows, that stay in the L2 while all columns pass */
    int32_t steps;               /* boxes that a row of x takes */
    float scale;
    int32_t unused;
} moe_linear_args;

static_assert(sizeof(moe_sort_args) == 56, "host and device must agree");
static_assert(sizeof(moe_gather_args) == 48, "host and device must agree");
static_assert(sizeof(moe_transpose_args) == 48, "host and device must agree");
static_assert(sizeof(moe_glu_args) == 120, "host and device must agree");
static_assert(sizeof(moe_combine_args) == 64, "host and device must agree");
static_assert(sizeof(moe_combine_backward_args) == 88, "host and device must agree");
static_assert(sizeof(moe_bias_args) == 40, "host and device must agree");
static_assert(sizeof(moe_linear_args) == 576, "host and device must agree");

#endif
