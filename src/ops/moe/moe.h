/* moe.h - what moe.c and moe_cuda.c share: the launches, each for arguments that moe.c has checked. */
#ifndef BST_MOE_H
#define BST_MOE_H

#include <assert.h>

#include "core/core.h"
#include "ops/moe/moe_args.h"

/* A thread of a block of the sort is an expert, one more the pairs of no expert. */
enum { BST_MOE_MOST_EXPERTS = 1023 };

/* Where a gradient is not wanted, its data is NULL. */
typedef struct moe_glu_gradients {
    bst_view dh, wy, dweights, dbias;
} moe_glu_gradients;

bst_status bst__moe_sort_cuda(const bst_exec *exec, const char *op, const bst_view *indices, moe_sort_args args);
bst_status bst__moe_gather_cuda(const bst_exec *exec, const char *op, const bst_view *x, const bst_view *order,
                                const bst_view *rows);
bst_status bst__moe_glu_forward_cuda(const bst_exec *exec, const char *op, const bst_view *h, const bst_view *bias,
                                     const bst_view *y, moe_glu_args args);
bst_status bst__moe_glu_backward_cuda(const bst_exec *exec, const char *op, const bst_view *h, const bst_view *bias,
                                      const bst_view *dy, const bst_view *weights, const moe_glu_gradients *g,
                                      moe_glu_args args);
bst_status bst__moe_combine_forward_cuda(const bst_exec *exec, const char *op, const bst_view *y,
                                         const bst_view *weights, const bst_view *bias, const bst_view *out,
                                         int64_t choices, moe_combine_args args);
bst_status bst__moe_combine_backward_cuda(const bst_exec *exec, const char *op, const bst_view *dout,
                                          const bst_view *weights, const bst_view *bias, const bst_view *rows,
                                          const bst_view *dbias, moe_combine_backward_args args);

/* Workspace for the partial sums of `chunk` rows each; NULL where no gradient of biases is wanted. */
static inline bst_status bst__moe_partial_sums(const bst_exec *exec, const char *op, const bst_view *dbias,
                                               int64_t rows, int64_t chunk, void **out) {
    *out = NULL;
    if (!dbias->data) return BST_OK;
    int64_t slots = (rows + chunk - 1) / chunk + dbias->size[0];
    return bst__allocate(exec, op, dbias->device, (size_t)(slots * dbias->size[1]) * sizeof(float), out);
}

#endif
