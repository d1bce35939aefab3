/* low_rank_args.h - the arguments of low_rank's kernels, as host and device see them, and their tiles. */
#ifndef BST_LOW_RANK_ARGS_H
#define BST_LOW_RANK_ARGS_H

/* A tile of dy: rows and columns. Each of eight warps has 16 rows of it for g, 16 columns for db. */
#define LOW_RANK_TILE    128
#define LOW_RANK_THREADS 256
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

static_assert(sizeof(low_rank_args) == 72, "host and device must agree");
static_assert(sizeof(low_rank_sum_args) == 72, "host and device must agree");

#endif
