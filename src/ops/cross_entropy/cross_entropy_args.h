/* cross_entropy_args.h - the arguments of the cross-entropy kernels, as host and device see them. */
#ifndef BST_CROSS_ENTROPY_ARGS_H
#define BST_CROSS_ENTROPY_ARGS_H

#include "row_map.h"

/* What a pass over rows makes: loss, lse and its pairs; those and the gradient, in one pass over the logits where the
 * chip allows it; or the gradient out of the pairs or lse. */
typedef enum bst_cross_entropy_mode {
    BST_CROSS_ENTROPY_LOSS,
    BST_CROSS_ENTROPY_LOSS_AND_GRADIENT,
    BST_CROSS_ENTROPY_GRADIENT
} bst_cross_entropy_mode;

#define BST_CROSS_ENTROPY_BATCH 4    /* vectors that a thread of `rows` loads before it uses the first */
#define BST_CROSS_ENTROPY_BLOCK 1024 /* threads of `divisors` and of `reduce`, which have one block */
/* The ring's room for partials, which the host counts on: rows whose partials may be in flight, and the numbers that
 * the partials of a warp are, for a row. */
#define BST_CROSS_ENTROPY_IN_FLIGHT        4
#define BST_CROSS_ENTROPY_PARTIALS(smooth) ((smooth) ? 4 : 2)
/* Of all warps, and the target's logit, which is sent in a pair. */
#define BST_CROSS_ENTROPY_ROW_NUMBERS(warps, smooth) ((warps) * BST_CROSS_ENTROPY_PARTIALS(smooth) + 2)

/* What the terms of a loss are multiplied by. */
typedef struct bst_cross_entropy_divisors {
    float inverse_weight_sum; /* of the cross-entropy, smoothed or not */
    float inverse_count;      /* of lse_square_scale * lse^2 */
    float class_weight_sum;   /* over the vocabulary; V where there are no weights */
    float gradient;           /* inverse_weight_sum times an upstream gradient; 0 where there is nothing to divide */
} bst_cross_entropy_divisors;

typedef struct cross_entropy_rows_args {
    const void *logits;
    void *dlogits;
    const int64_t *target;
    const float *class_weight;
    const bst_cross_entropy_divisors *divisors; /* NULL: no division */
    const float *upstream;                      /* NULL: one */
    float *loss_rows, *lse, *lse_pairs;         /* NULL: not wanted */
    uint32_t *tickets;                          /* ring: zero before the launch */
    int64_t rows, ignore_index, upstream_stride;
    bst_row_map logits_map, dlogits_map;
    /* z = natural * u, u being the logit or, with a softcap, tanh(inner * logit); base2 * u = z, times log2(e) but for
     * float32. slope = dz/d(logit) where u has slope one. */
    float inner, natural, base2, slope;
    float smoothing, lse_square_scale;
    int32_t undivided, unused;
} cross_entropy_rows_args;

typedef struct cross_entropy_divisors_args {
    const int64_t *target;
    const float *class_weight, *num_items;
    const float *upstream; /* or NULL: one */
    bst_cross_entropy_divisors *out;
    uint32_t *tickets; /* [chunks]: cleared */
    int64_t rows, ignore_index;
    int32_t vocabulary, mean, chunks, unused; /* mean: divide by weights and count */
} cross_entropy_divisors_args;

typedef struct cross_entropy_reduce_args {
    const float *loss_rows;
    const bst_cross_entropy_divisors *divisors; /* or NULL */
    float *loss;
    int64_t rows;
} cross_entropy_reduce_args;

typedef struct scale_args {
    void *tensor;
    const float *scale;
    int64_t count;
} scale_args;

static_assert(sizeof(bst_cross_entropy_divisors) == 16, "host and device must agree");
static_assert(sizeof(cross_entropy_rows_args) == 184, "host and device must agree");
static_assert(sizeof(cross_entropy_divisors_args) == 80, "host and device must agree");
static_assert(sizeof(cross_entropy_reduce_args) == 32, "host and device must agree");
static_assert(sizeof(scale_args) == 24, "host and device must agree");

#endif
