/* cross_entropy.h - the cross-entropy of rows of logits, as other operators may use it: a chunk at a time.
 *
 * A whole problem of T rows is: bst__cross_entropy_begin over all targets, bst__cross_entropy_rows over each chunk of
 * logits, bst__cross_entropy_reduce over all loss rows. Nothing here checks shapes: the calling operator has done so
 * (its description, and bst__cross_entropy_check_targets). `op` is the name that messages carry. */
#ifndef BST_CROSS_ENTROPY_H
#define BST_CROSS_ENTROPY_H

#include <assert.h>
#include <float.h>

#include "core/cpu_kernel.h"
#include "core/describe.h"
#include "ops/cross_entropy/cross_entropy_args.h"

/* The widest row: its columns, and what a kernel's loops add to them, fit 32 bits. */
#define BST_CROSS_ENTROPY_MOST_CLASSES (INT32_MAX / 2)

/* The options of a loss as they are, whoever gave them. */
typedef struct bst_loss {
    int64_t ignore_index;
    bst_reduction reduction;
    double label_smoothing, softcap, logit_scale, lse_square_scale;
} bst_loss;

/* One chunk of rows. Its pointers are at the chunk's first row. */
typedef struct bst_cross_entropy_rows_call {
    DLDevice device;
    bst_cross_entropy_mode mode;
    bst_dtype dtype; /* of logits and dlogits */
    int64_t rows, vocabulary;
    const void *logits; /* [rows, vocabulary], `stride` elements between rows */
    int64_t stride;
    int64_t inner,
        outer_stride;      /* inner > 0: `stride` holds within groups of `inner` rows, outer_stride between groups */
    const int64_t *target; /* [rows] */
    const float *class_weight; /* [vocabulary], or NULL */
    const bst_loss *options;
    /* All three may be NULL: the factor is then one (no division, an upstream gradient of one). `divisors` is needed
     * where class weights meet label smoothing, and where options->reduction or num_items divide. */
    const bst_cross_entropy_divisors *divisors; /* multiplies loss rows and gradients */
    bool undivided;        /* gradients are left for the caller to multiply by divisors->gradient, once they are sums */
    const float *upstream; /* multiplies gradients only */
    int64_t upstream_stride; /* 0: one factor for all rows; 1: one a row */
    uint32_t *tickets; /* LOSS_AND_GRADIENT: one zero on the device, for this call alone; or NULL, which is slower */
    float *loss_rows;  /* [rows], divided already; or NULL */
    float *lse;        /* [rows], or NULL; 0 on rows whose target is not in the vocabulary */
    /* [rows, 2], or NULL: the reference of a row's exponentials and their sum but for the target's, as the kernels have
     * them. GRADIENT with it repeats the bits of LOSS_AND_GRADIENT; lse alone rounds away 2^-25 |lse|, and a confident
     * target's gradient. */
    float *lse_pairs;
    void *dlogits; /* [rows, vocabulary]; logits itself, laid out as it is, or apart from it with dlogits_stride */
    int64_t dlogits_stride; /* elements between rows; not looked at where dlogits is logits */
} bst_cross_entropy_rows_call;

/* The options among a description's attributes, where they come first, in this order; members of given_options. */
enum {
    BST_LOSS_IGNORE_INDEX,
    BST_LOSS_REDUCTION,
    BST_LOSS_SMOOTHING,
    BST_LOSS_SOFTCAP,
    BST_LOSS_SCALE,
    BST_LOSS_SQUARE,
    BST_LOSS_COUNT
};
#define BST_IGNORE_INDEX      BST_OPTION('i', ignore_index, .pointed = true, BST_USUAL(-100))
#define BST_SOFTCAP(name)     BST_OPTION('d', name, 0, DBL_MAX, "a positive number, or 0 for none,")
#define BST_LOGIT_SCALE(name) BST_OPTION('d', name, -DBL_MAX, DBL_MAX, "a finite number", BST_USUAL(1))
#define BST_LOSS_ATTRIBUTES                                                                                  \
    BST_IGNORE_INDEX,                                                                                        \
        BST_OPTION('i', reduction, BST_REDUCTION_MEAN, BST_REDUCTION_NONE, "0 (mean), 1 (sum) or 2 (none)"), \
        BST_OPTION('d', label_smoothing, 0, 1, "a number from 0 to 1"), BST_SOFTCAP(softcap),                \
        BST_LOGIT_SCALE(logit_scale), BST_OPTION('d', lse_square_scale, -DBL_MAX, DBL_MAX, "a finite number")
/* An argument of float32, contiguous. */
#define BST_LOSS_FLOATS(name, flags, shape, ...) {name, flags, 1u << BST_F32, shape, BST_CONTIGUOUS, ##__VA_ARGS__}
bst_loss bst__loss_of(const bst_attribute *attributes);
/* CPU: BST_INVALID, naming index and value, where a target is neither in [0, vocabulary) nor ignore_index. On CUDA,
 * where that would wait for the device, the kernels make such a row's loss NaN and its gradient zero; BST_UNSUPPORTED
 * where there are more rows than a grid has blocks. */
bst_status bst__cross_entropy_check_targets(const char *op, DLDevice device, const int64_t *target, int64_t rows,
                                            int64_t vocabulary, int64_t ignore_index);
/* Begins a whole problem, `whole`: allocates *memory, for the caller to release whatever is returned, computes in it
 * what the terms are divided by, where that is not one, and sets whole->divisors and, for each of the chunks,
 * whole->tickets. Behind them are `more` bytes. num_items: one float32 on the device, or NULL; upstream: likewise, for
 * divisors->gradient. */
bst_status bst__cross_entropy_begin(const bst_exec *exec, const char *op, bst_cross_entropy_rows_call *whole,
                                    const float *num_items, const float *upstream, int64_t chunks, size_t more,
                                    void **memory);
bst_status bst__cross_entropy_rows(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *call);
/* *loss = the sum of the whole problem's loss rows, in a fixed order. */
bst_status bst__cross_entropy_reduce(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *whole,
                                     float *loss);

typedef struct scale_cpu {
    bst_view tensor;
    float scale;
} scale_cpu;

BST_CPU_DECLARE(bst__cross_entropy_rows_cpu); /* over rows; the context is a bst_cross_entropy_rows_call */
BST_CPU_DECLARE(bst__scale_cpu);              /* over elements; a scale_cpu */

/* The parts that CUDA has of its own (cross_entropy_cuda.c). */
/* What the kernels get of a call. */
cross_entropy_rows_args bst__cross_entropy_args(const bst_cross_entropy_rows_call *call);
bst_status bst__cross_entropy_rows_cuda(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *call);
bst_status bst__cross_entropy_divisors_cuda(const bst_exec *exec, const char *op,
                                            const bst_cross_entropy_rows_call *whole, const float *num_items,
                                            const float *upstream, int64_t chunks, bst_cross_entropy_divisors *out);
bst_status bst__cross_entropy_reduce_cuda(const bst_exec *exec, const char *op,
                                          const bst_cross_entropy_rows_call *whole, float *loss);
bst_status bst__scale_cuda(const bst_exec *exec, const char *op, const bst_view *tensor, const float *factor);

#endif
