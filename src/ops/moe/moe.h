/* moe.h - what moe.c and moe_cuda.c share: the places of arguments, and the launches, for views and attributes that
 * moe.c has checked and that are not empty. moe.c calls moe_cuda.c, never the other way. */
#ifndef BST_MOE_H
#define BST_MOE_H

#include "core/describe.h"
#include "ops/glu/glu.h"

/* A thread of a block of the sort is an expert, one more the pairs of no expert. */
enum { BST_MOE_MOST_EXPERTS = 1023 };

enum { SORT_INDICES, SORT_ORDER, SORT_POSITION, SORT_ENDS };
enum { GATHER_X, GATHER_POSITION, GATHER_ROWS };
enum { GLU_H, GLU_ENDS, GLU_BIAS, GLU_BOTH, GLU_Y = GLU_BOTH };
enum { GLU_DY = GLU_BOTH, GLU_ORDER, GLU_WEIGHTS, GLU_DOTS, GLU_WY, GLU_DH, GLU_DWEIGHTS, GLU_DBIAS };
enum { SUM_Y, SUM_POSITION, SUM_WEIGHTS, SUM_BIAS, SUM_INDICES, SUM_OUT };
enum { BACK_DOUT, BACK_ORDER, BACK_ENDS, BACK_WEIGHTS, BACK_BIAS, BACK_ROWS, BACK_DOTS, BACK_DBIAS };

/* The attribute of the sort. Those of the gated unit are glu's. */
enum { EXPERTS };

typedef bst_status bst_moe_launch(const bst_exec *exec, const char *op, const bst_view *v,
                                  const bst_attribute *attributes);
bst_moe_launch bst__moe_sort_cuda, bst__moe_gather_cuda, bst__moe_glu_forward_cuda, bst__moe_glu_backward_cuda,
    bst__moe_combine_forward_cuda, bst__moe_combine_backward_cuda;

/* Workspace for the partial sums of `chunk` rows each; NULL where no gradient of biases is wanted. */
static inline bst_status bst__moe_partial_sums(const bst_exec *exec, const char *op, const bst_view *dbias,
                                               int64_t rows, int64_t chunk, void **out) {
    *out = NULL;
    if (!dbias->data) return BST_OK;
    int64_t slots = (rows + chunk - 1) / chunk + dbias->size[0];
    return bst__allocate(exec, op, dbias->device, (size_t)(slots * dbias->size[1]) * sizeof(float), out);
}

#endif
