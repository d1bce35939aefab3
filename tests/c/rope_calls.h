/* rope_calls.h - the rotary embedding with and without a norm as plain calls, for the tests: options and the struct of the
 * backward pass filled in. */
#ifndef BST_TEST_ROPE_CALLS_H
#define BST_TEST_ROPE_CALLS_H

#include "tensors.h"

static inline bst_status rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                                      const DLTensor *sin, int layout, DLTensor *q_out, DLTensor *k_out) {
    bst_rope_options options = {.size = sizeof options, .layout = (bst_rope_layout)layout};
    return bst_rope_forward(exec, q, k, cos, sin, NULL, NULL, &options, q_out, k_out);
}

static inline bst_status rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                       const DLTensor *cos, const DLTensor *sin, int layout, DLTensor *dq,
                                       DLTensor *dk) {
    bst_rope_options options = {.size = sizeof options, .layout = (bst_rope_layout)layout};
    bst_rope_backward_tensors t = {sizeof t, dq_out, dk_out, .cos = cos, .sin = sin, .dq = dq, .dk = dk};
    return bst_rope_backward(exec, &t, &options);
}

static inline bst_status normed_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k,
                                        const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos,
                                        const DLTensor *sin, double eps, bst_casting casting, int layout,
                                        DLTensor *q_out, DLTensor *k_out) {
    bst_rope_options options = {
        .size = sizeof options, .layout = (bst_rope_layout)layout, .casting = casting, .eps = eps};
    return bst_rope_forward(exec, q, k, cos, sin, q_weight, k_weight, &options, q_out, k_out);
}

static inline bst_status normed_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                         const DLTensor *q, const DLTensor *k, const DLTensor *q_weight,
                                         const DLTensor *k_weight, const DLTensor *cos, const DLTensor *sin, double eps,
                                         bst_casting casting, int layout, DLTensor *dq, DLTensor *dk,
                                         DLTensor *dq_weight, DLTensor *dk_weight) {
    bst_rope_options options = {
        .size = sizeof options, .layout = (bst_rope_layout)layout, .casting = casting, .eps = eps};
    bst_rope_backward_tensors t = {sizeof t, dq_out,   dk_out, q,  k,         cos,      sin,
                                   q_weight, k_weight, dq,     dk, dq_weight, dk_weight};
    return bst_rope_backward(exec, &t, &options);
}

#endif
