/* linear_cross_entropy_args.h - the arguments of the kernels beside the products, as host and device see them. */
#ifndef BST_LINEAR_CROSS_ENTROPY_ARGS_H
#define BST_LINEAR_CROSS_ENTROPY_ARGS_H

typedef struct linear_cross_entropy_spread_args {
    const void *row; /* [columns] */
    void *out;       /* [rows, columns], rows `stride` elements apart */
    int64_t rows, columns, stride;
} linear_cross_entropy_spread_args;

typedef struct linear_cross_entropy_round_args {
    const float *in;
    void *out;
    int64_t count;
} linear_cross_entropy_round_args;

typedef struct linear_cross_entropy_columns_args {
    const void *in;  /* [rows, columns], rows `stride` elements apart */
    double *partial; /* [LINEAR_CROSS_ENTROPY_PARTS, columns] */
    int64_t rows, columns, stride, first;
} linear_cross_entropy_columns_args;

typedef struct linear_cross_entropy_bias_args {
    const double *partial;
    void *out;          /* [columns] */
    const float *alpha; /* NULL: 1 */
    int64_t columns;
} linear_cross_entropy_bias_args;

#define LINEAR_CROSS_ENTROPY_BLOCK 256 /* threads */
#define LINEAR_CROSS_ENTROPY_VEC   4   /* elements that a thread of `round` takes at a time, and of `columns` at most */
/* Sums of as many parts of the rows: blocks enough for a large chip from one vocabulary. */
#define LINEAR_CROSS_ENTROPY_PARTS 8

static_assert(sizeof(linear_cross_entropy_columns_args) == 48, "host and device must agree");
static_assert(sizeof(linear_cross_entropy_bias_args) == 32, "host and device must agree");
static_assert(sizeof(linear_cross_entropy_spread_args) == 40, "host and device must agree");
static_assert(sizeof(linear_cross_entropy_round_args) == 24, "host and device must agree");

#endif
