/* linear_cross_entropy_args.h - the arguments of the kernels beside the products, as host and device see them. */
#ifndef BST_LINEAR_CROSS_ENTROPY_ARGS_H
#define BST_LINEAR_CROSS_ENTROPY_ARGS_H

typedef struct linear_cross_entropy_spread_args {
    const void *row; /* [columns], or NULL for ones */
    void *out;       /* [rows, columns], rows `stride` elements apart */
    int64_t rows, columns, stride;
} linear_cross_entropy_spread_args;

typedef struct linear_cross_entropy_round_args {
    const float *in;
    void *out;
    int64_t count;
} linear_cross_entropy_round_args;

static_assert(sizeof(linear_cross_entropy_spread_args) == 40, "host and device must agree");
static_assert(sizeof(linear_cross_entropy_round_args) == 24, "host and device must agree");

#endif
