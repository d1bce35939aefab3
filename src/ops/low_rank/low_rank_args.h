/* low_rank_args.h - the arguments of low_rank's kernels, as host and device see them, and their tiles. */
#ifndef BST_LOW_RANK_ARGS_H
#define BST_LOW_RANK_ARGS_H

#include "tile_product.h"

/* A tile of dy: rows and columns. Each of eight warps has 16 rows of it for g, 16 columns for db. */
#define LOW_RANK_TILE    128
#define LOW_RANK_THREADS 256
#define LOW_RANK_MOST    32 /* the largest rank that the kernels have, of multiples of 8 */
#define LOW_RANK_STEP    16 /* a product's rows or columns */

/* Bytes of a row of `rank` 16-bit elements in shared memory: a power of two, so that pieces of 16 bytes can change
 * places within it. */
#define LOW_RANK_PITCH(rank) ((rank) == 24 ? 64 : 2 * (rank))

typedef struct low_rank_args {
    const void *dy, *thin, *b;
    float *g_parts;  /* [column parts, rows, rank] */
    float *db_parts; /* [row parts, columns, rank] */
    int64_t dy_stride, thin_stride;
    int64_t rows, columns;
} low_rank_args;

typedef struct low_rank_sum_args {
    const float *g_parts, *db_parts;
    void *g;
    float *db;
    int64_t g_stride;
    int64_t rows, columns;
    int32_t column_parts, row_parts;
    float scale;
    int32_t unused;
} low_rank_sum_args;

/* A tile's rows of gate, up and dy, for all of a block's threads; its columns are half as many as these. */
#define LOW_RANK_GLU_ROWS   32
#define LOW_RANK_GLU_STAGES 3

typedef struct low_rank_glu_args {
    const void *in[3]; /* gate, up, dy */
    void *out[3];      /* dgate, dup, y or NULL */
    const void *b_gate, *b_up, *a_down;
    const void *thin[3]; /* of gate's, of up's, and g_down or NULL */
    float *g_parts;      /* [2, or 3 with thin_down, column parts, rows, rank] */
    float *db_parts;     /* [2, or 3 with da_down, row parts, columns, rank] */
    int64_t in_stride[3], out_stride[3], thin_stride[3];
    int64_t rows, columns;
    float alpha, limit;
} low_rank_glu_args;

typedef struct low_rank_glu_sum_args {
    const float *g_parts, *db_parts;
    void *g[3];   /* g of gate, of up; thin_down */
    float *db[3]; /* db_gate, db_up; da_down */
    int64_t g_stride[3];
    int64_t rows, columns;
    int32_t column_parts, row_parts;
    float scale[2];
} low_rank_glu_sum_args;

/* Rows of y as a bias. */
typedef struct low_rank_bias_args {
    void *y;
    const void *bias;
    int64_t y_stride, columns;
} low_rank_bias_args;

/* Layers that low_rank_add has at most; rows that a block has of x, and of y. */
#define LOW_RANK_LAYERS   3
#define LOW_RANK_ADD_ROWS 8

/* thin [rows, ranks] = x a^T of all layers. Of those that there are not: no ranks, here and below no columns. */
typedef struct low_rank_thin_args {
    const void *x, *a[LOW_RANK_LAYERS];
    float *thin;
    int64_t x_stride, rows, width;
    int32_t first[LOW_RANK_LAYERS], ranks; /* first: a layer's first column of thin */
} low_rank_thin_args;

/* out = y + scale thin b^T of each. */
typedef struct low_rank_expand_args {
    const void *b[LOW_RANK_LAYERS], *y[LOW_RANK_LAYERS];
    void *out[LOW_RANK_LAYERS];
    const float *thin;
    int64_t y_stride[LOW_RANK_LAYERS], out_stride[LOW_RANK_LAYERS];
    int64_t columns[LOW_RANK_LAYERS], rows;
    int32_t first[LOW_RANK_LAYERS], rank[LOW_RANK_LAYERS];
    int32_t first_block[LOW_RANK_LAYERS], blocks; /* of a tile of rows: a layer's first, all */
    int32_t ranks;
    float scale[LOW_RANK_LAYERS];
} low_rank_expand_args;

/* Rows that low_rank_layers' kernel has at most. */
#define LOW_RANK_LAYERS_ROWS 32

/* y = x weight^T + bias of each layer; of those that there are not no blocks. */
typedef struct low_rank_layers_args {
    const void *x, *weight[LOW_RANK_LAYERS], *bias[LOW_RANK_LAYERS];
    void *y[LOW_RANK_LAYERS];
    int64_t x_stride, weight_stride[LOW_RANK_LAYERS], y_stride[LOW_RANK_LAYERS];
    int64_t width, columns[LOW_RANK_LAYERS];
    int32_t first_block[LOW_RANK_LAYERS], blocks; /* a layer's first, all */
    int32_t rows, thin_blocks;                    /* before all others: which make thin of adapters */
    low_rank_thin_args thin;
} low_rank_layers_args;

/* Pieces of bfloat16 that are a number of float32; numbers that a thread of low_rank_split has at most. */
#define LOW_RANK_PIECES       3
#define LOW_RANK_SPLIT_VECTOR 4

/* x [T, groups, parts, ranks], sum [T, groups, ranks], pieces and repeated [T, groups, LOW_RANK_PIECES, ranks]; of the
 * results NULL: not wanted. Strides: of all dimensions but the last. */
typedef struct low_rank_split_args {
    const float *x;
    float *sum;
    void *pieces, *repeated;
    int64_t x_stride[3], sum_stride[2], pieces_stride[3], repeated_stride[3];
    int64_t count, groups, ranks; /* count: numbers of sum */
    int32_t parts;
    float scale;
} low_rank_split_args;

#define LOW_RANK_PRODUCTS 4 /* large ones that are summed up */

/* Sums of products in tiles of tile_product.h. */
typedef struct low_rank_tiles_args {
    bst_tensor_map thin, b, x[LOW_RANK_PRODUCTS], weight[LOW_RANK_PRODUCTS];
    void *y;
    const void *bias; /* NULL: none */
    int64_t y_stride;
    int32_t rows, columns;
    int32_t thin_steps, steps[LOW_RANK_PRODUCTS], all_steps; /* boxes that a row of thin, of each x, and of all takes */
    bst_tiles tiles;
    float scale;
} low_rank_tiles_args;

static_assert(sizeof(low_rank_args) == 72, "host and device must agree");
static_assert(sizeof(low_rank_sum_args) == 72, "host and device must agree");
static_assert(sizeof(low_rank_glu_args) == 208, "host and device must agree");
static_assert(sizeof(low_rank_tiles_args) == 1408, "host and device must agree");
static_assert(sizeof(low_rank_bias_args) == 32, "host and device must agree");
static_assert(sizeof(low_rank_thin_args) == 80, "host and device must agree");
static_assert(sizeof(low_rank_expand_args) == 216, "host and device must agree");
static_assert(sizeof(low_rank_layers_args) == 272, "host and device must agree");
static_assert(sizeof(low_rank_split_args) == 152, "host and device must agree");
static_assert(sizeof(low_rank_glu_sum_args) == 120, "host and device must agree");

#endif
