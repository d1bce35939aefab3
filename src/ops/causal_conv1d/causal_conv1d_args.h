/* causal_conv1d_args.h - the arguments of the kernels of causal convolutions, as host and device see them. */
#ifndef BST_CAUSAL_CONV1D_ARGS_H
#define BST_CAUSAL_CONV1D_ARGS_H

#include "row_map.h"

/* The longest window: a thread has the weights of all its taps in registers. */
#define CAUSAL_CONV1D_MOST_TAPS 8

typedef struct causal_conv1d_args {
    const void *x, *weight, *bias, *dy;
    void *y;        /* backward: dx */
    float *partial; /* backward: a row for each run of tokens, of dweight and then dbias */
    bst_row_map x_map, dy_map;
    int64_t tokens;   /* of a sequence */
    int64_t run;      /* tokens that a thread takes */
    int64_t runs;     /* of a sequence */
    int64_t all_runs; /* of all sequences */
    const int32_t *seq_idx;
} causal_conv1d_args;

static_assert(sizeof(causal_conv1d_args) == 136, "host and device must agree");

#endif
