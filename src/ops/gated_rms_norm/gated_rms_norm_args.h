/* gated_rms_norm_args.h - what host and device share of the gated norm's kernels: constants and arguments. */
#ifndef BST_GATED_RMS_NORM_ARGS_H
#define BST_GATED_RMS_NORM_ARGS_H

#include "row_map.h"

/* ACTIVATION, as bst_norm_gate has them. */
#define GATE_SILU    0
#define GATE_SIGMOID 1

/* The inputs that have rows; dy in the backward pass alone. */
#define GATED_X      0
#define GATED_GATE   1
#define GATED_DY     2
#define GATED_INPUTS 3

typedef struct gated_rms_norm_args {
    const void *in[GATED_INPUTS];
    bst_row_map map[GATED_INPUTS];
    const void *weight;
    void *y;          /* forward */
    void *dx, *dgate; /* backward, as are the partial sums of dweight, [parts, columns] */
    float *partial;
    int64_t rows;
    float eps;
    int32_t unused;
} gated_rms_norm_args;

static_assert(sizeof(gated_rms_norm_args) == 152, "host and device must agree");

#endif
