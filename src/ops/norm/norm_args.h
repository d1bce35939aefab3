/* norm_args.h - what host and device share of the norm's kernels: constants and arguments. */
#ifndef BST_NORM_ARGS_H
#define BST_NORM_ARGS_H

#include "row_map.h"

/* CASTING, as bst_casting has them. */
#define NORM_LLAMA 0
#define NORM_GEMMA 1

/* SOURCE: where a row is between its two uses. */
#define NORM_AGAIN 0 /* nowhere on the chip: it is read again, from the L2 where that still has it */
#define NORM_HELD  1 /* in registers */
#define NORM_BULK  2 /* backward: in registers, out of a ring of shared memory that bulk copies fill with whole rows */

/* The inputs that have rows: forward x, with ADD the residual, with AFTER what is added to y; backward x, dy and, with
 * ADD, dsum. */
#define NORM_X        0
#define NORM_RESIDUAL 1
#define NORM_DY       1
#define NORM_AFTER    2
#define NORM_DSUM     2

typedef struct norm_forward_args {
    const void *in[3];
    bst_row_map map[3];
    const void *weight;
    void *y, *sum; /* sum: with ADD, x + residual */
    float *rstd;   /* NULL: not wanted */
    int64_t rows;
    float eps;
    int32_t unused;
    const void *bias;
    float *mean; /* with CENTRE; NULL: not wanted */
} norm_forward_args;

typedef struct norm_backward_args {
    const void *in[3];
    bst_row_map map[3];
    const void *weight;
    const float *rstd;
    void *dx;
    float *partial; /* [parts, sums, H]: dweight and dbias, or one of them */
    int64_t rows;
    const float *mean; /* with CENTRE */
} norm_backward_args;

static_assert(sizeof(norm_forward_args) == 160, "host and device must agree");
static_assert(sizeof(norm_backward_args) == 144, "host and device must agree");

#endif
