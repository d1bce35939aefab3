/* rms_norm_args.h - the arguments of the RMSNorm kernels, as host and device see them. */
#ifndef BST_RMS_NORM_ARGS_H
#define BST_RMS_NORM_ARGS_H

#include "row_map.h"

typedef struct rms_norm_forward_args {
    const void *x, *weight;
    void *y;
    float *rstd; /* NULL: not wanted */
    int64_t rows;
    bst_row_map x_map;
    float eps;
    int32_t unused;
    const void *residual; /* with ADD: [rows, H] */
    void *sum;            /* with ADD: x + residual, contiguous */
    bst_row_map residual_map;
} rms_norm_forward_args;

typedef struct rms_norm_backward_args {
    const void *dy, *x, *weight;
    const float *rstd;
    void *dx;
    float *partial; /* [blocks, H] */
    int64_t rows;
    bst_row_map x_map, dy_map;
    const void *dsum; /* with ADD: [rows, H] */
    bst_row_map dsum_map;
} rms_norm_backward_args;

typedef struct rms_norm_dweight_args {
    const float *partial; /* [parts, H] */
    void *dweight;
    int64_t parts;
} rms_norm_dweight_args;

static_assert(sizeof(rms_norm_forward_args) == 112, "host and device must agree");
static_assert(sizeof(rms_norm_backward_args) == 136, "host and device must agree");
static_assert(sizeof(rms_norm_dweight_args) == 24, "host and device must agree");

#endif
