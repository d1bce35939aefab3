/* moe_calls.h - calls of the experts' gated unit with its tensors in a row. */
#ifndef BST_TEST_MOE_CALLS_H
#define BST_TEST_MOE_CALLS_H

#include "bastile.h"

static inline bst_status moe_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *h,
                                          const DLTensor *bias, const DLTensor *ends, const DLTensor *order,
                                          const DLTensor *weights, const DLTensor *dots, const bst_glu_options *options,
                                          DLTensor *dh, DLTensor *wy, DLTensor *dweights, DLTensor *dbias) {
    bst_moe_glu_backward_tensors t = {.size = sizeof t, .dy = dy, .h = h, .bias = bias, .ends = ends, .order = order};
    t.weights = weights, t.dots = dots, t.dh = dh, t.wy = wy, t.dweights = dweights, t.dbias = dbias;
    return bst_moe_glu_backward(exec, &t, options);
}

#endif
