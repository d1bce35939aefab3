/* linear_logprobs_args.h - the arguments of the log-probability kernels, as host and device see them.
 * To be included behind cross_entropy_args.h, which each of the two has elsewhere. */
#ifndef BST_LINEAR_LOGPROBS_ARGS_H
#define BST_LINEAR_LOGPROBS_ARGS_H

#include "tile_product.h"

typedef struct linear_logprobs_args {
    /* Of these: logits, dlogits, target, lse_pairs (backward reads them), ignore_index, the maps, and what makes z. */
    cross_entropy_rows_args row;
    /* [rows] each, forward; NULL: not wanted. */
    float *log_probs, *entropy, *lse, *log_sum_sq_probs, *mean_logits;
    int32_t *is_top1;
    /* [rows] each, backward; NULL: zeros. The entropy itself is read where it has a gradient. */
    const float *grad_log_probs, *grad_entropy, *grad_lse, *entropy_was;
    float without; /* what stands for grad_log_probs where that is NULL */
} linear_logprobs_args;

#define LINEAR_LOGPROBS_THREADS 512 /* of a block, which has a row */
#define LINEAR_LOGPROBS_BATCH   4   /* vectors that a thread loads before it uses the first */

/* Of a head whose logits stay in registers (tile_product.h). */
#define LINEAR_LOGPROBS_SLICES (LINEAR_LOGPROBS_THREADS / 32) /* of the tiles, where their sums are joined */

typedef struct linear_logprobs_tiles_args {
    bst_tensor_map hidden, weight;
    linear_logprobs_args all;
    /* Of each tile's rows, [numbers, tiles, stride]: the largest logit, the others' exponentials, and what else is
     * wanted, in the order of the macros. */
    float *sums;
    /* [2, stride]: the targets' logits, and the largest of those before it in its tile. */
    float *targets;
    int32_t rows, stride, steps; /* steps: boxes that a row of hidden takes */
    bst_tiles tiles;             /* their columns are classes */
} linear_logprobs_tiles_args;

static_assert(sizeof(linear_logprobs_tiles_args) == 576, "host and device must agree");
static_assert(sizeof(linear_logprobs_args) == 272, "host and device must agree");

#endif
