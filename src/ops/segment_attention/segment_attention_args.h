/* segment_attention_args.h - arguments of segment_attention*.cu, as host and kernels see them. */
#ifndef BST_SEGMENT_ATTENTION_ARGS_H
#define BST_SEGMENT_ATTENTION_ARGS_H

#include "tensor_map.h"

#define ATTENTION_THREADS    384 /* a warp group that copies, and two that multiply */
#define ATTENTION_QUERIES    128 /* of a tile of queries */
#define ATTENTION_STEP       64  /* queries that a tile of keys takes at once */
#define ATTENTION_DIM(width) ((width) > 128 ? 256 : (width) > 64 ? 128 : 64)
#define ATTENTION_KEYS(dim)  ((dim) > 128 ? 64 : 128) /* of a tile of keys */
#define ATTENTION_SEGMENTS   1023

/* Bytes of so many rows of heads, of 16-bit numbers. */
#define ATTENTION_BYTES(rows, dim) ((rows) * (dim) * 2)

/* Stages in shared memory, beside the tile that a block is at: each is a tile of keys or of values, while there are
 * tiles of queries; or queries and their dy, while there are tiles of keys. */
#define ATTENTION_STAGES           4
#define ATTENTION_DQ_STAGES(dim)   ((dim) > 128 ? 2 : 4)
#define ATTENTION_STEP_STAGES(dim) ((dim) > 128 ? 2 : 3)
#define ATTENTION_FORWARD_SHARED(dim) \
    (ATTENTION_BYTES(ATTENTION_QUERIES, dim) + ATTENTION_STAGES * ATTENTION_BYTES(ATTENTION_KEYS(dim), dim) + 1024)
#define ATTENTION_DQ_SHARED(dim)                   \
    (2 * ATTENTION_BYTES(ATTENTION_QUERIES, dim) + \
     ATTENTION_DQ_STAGES(dim) * ATTENTION_BYTES(ATTENTION_KEYS(dim), dim) + 1024)
#define ATTENTION_DKV_SHARED(dim)                    \
    (2 * ATTENTION_BYTES(ATTENTION_KEYS(dim), dim) + \
     ATTENTION_STEP_STAGES(dim) * 2 * ATTENTION_BYTES(ATTENTION_STEP, dim) + 1024)

/* Where segments are, and the heads of queries and of keys. */
typedef struct attention_segments {
    const int32_t *cuts; /* [2, segments + 1], or NULL where all are as long */
    int32_t segments, queries, keys, heads, groups;
    int32_t window; /* with WINDOW */
    float scale;    /* of scores, in units of ln 2 */
    int32_t unused; /* what a struct's end would be filled with */
} attention_segments;

typedef struct attention_forward_args {
    bst_tensor_map q, k, v; /* boxes of a tile's rows */
    attention_segments of;
    void *y;    /* [queries, heads, WIDTH] */
    float *lse; /* [heads, queries] */
} attention_forward_args;

typedef struct attention_dq_args {
    bst_tensor_map q, k, v, dy;
    attention_segments of;
    const void *y, *rows;                       /* rows: dy, as its own threads read it */
    int64_t y_token, y_head, dy_token, dy_head; /* strides, in elements */
    const float *lse;
    float *delta; /* [heads, queries], out */
    void *dq;
    float dq_scale;
} attention_dq_args;

typedef struct attention_dkv_args {
    bst_tensor_map q, k, v, dy; /* q and dy in boxes of a step's rows */
    attention_segments of;
    const float *lse, *delta;
    void *dk, *dv; /* [keys, groups, WIDTH]; with parts, [parts, keys, groups, WIDTH] in float32 */
    int32_t parts; /* a group's heads are shared out among so many blocks */
    float dk_scale;
} attention_dkv_args;

typedef struct attention_sum_args {
    const float *partial; /* [parts, count] */
    void *y;
    int64_t count; /* a multiple of 4 */
    int32_t parts;
} attention_sum_args;
#define ATTENTION_SUM_THREADS 256

#define TOKEN_THREADS         128
#define TOKEN_HEADS           8   /* of queries that a block has at most, which share keys */
#define TOKEN_DIM             256 /* the widest heads */
#define TOKEN_PARTS           32  /* of a row's keys at most, a block each */

typedef struct token_attention_args {
    const void *q, *k, *v, *bias;
    void *y;
    float *sums;           /* of a part: [parts, B, H, D], weighted by its own largest score */
    float *top, *total;    /* [parts, B, H]: that score, and the sum of weights */
    int64_t q_row, q_head; /* strides, in elements */
    int64_t k_row, k_head, k_key;
    int64_t v_row, v_head, v_key;
    int64_t bias_row;
    int64_t keys, each;                  /* of a row, of a part */
    int32_t rows, heads, groups, shared; /* shared: heads of queries that share keys */
    int32_t chunks;                      /* blocks that these are shared out to */
    int32_t parts;
    float scale;
    int32_t unused;
} token_attention_args;

static_assert(sizeof(token_attention_args) == 184, "host and device must agree");
static_assert(sizeof(attention_segments) == 40, "host and device must agree");
static_assert(sizeof(attention_forward_args) == 448, "host and device must agree");
static_assert(sizeof(attention_dq_args) == 640, "host and device must agree");
static_assert(sizeof(attention_dkv_args) == 640, "host and device must agree");
static_assert(sizeof(attention_sum_args) == 32, "host and device must agree");

#endif
