/* rope_calls.h - the rotary embedding with and without a norm as plain calls, for the tests: options and the struct of
 * the backward pass filled in. */
#ifndef BST_TEST_ROPE_CALLS_H
#define BST_TEST_ROPE_CALLS_H

#include <string.h>

#include "cuda/cuda.h"
#include "tensors.h"

/* Beside a layout: tables of an element a pair. */
enum { HALF_TABLES = 8 };

static inline bst_rope_options rope_options(int layout) {
    return (bst_rope_options){.size = sizeof(bst_rope_options),
                              .layout = (bst_rope_layout)(layout % HALF_TABLES),
                              .half_tables = layout & HALF_TABLES};
}

static inline bst_status rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                                      const DLTensor *sin, int layout, DLTensor *q_out, DLTensor *k_out) {
    bst_rope_options options = rope_options(layout);
    return bst_rope_forward(exec, q, k, cos, sin, NULL, NULL, &options, q_out, k_out);
}

static inline bst_status rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                       const DLTensor *cos, const DLTensor *sin, int layout, DLTensor *dq,
                                       DLTensor *dk) {
    bst_rope_options options = rope_options(layout);
    bst_rope_backward_tensors t = {sizeof t, dq_out, dk_out, .cos = cos, .sin = sin, .dq = dq, .dk = dk};
    return bst_rope_backward(exec, &t, &options);
}

static inline bst_status normed_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k,
                                        const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos,
                                        const DLTensor *sin, double eps, bst_casting casting, int layout,
                                        DLTensor *q_out, DLTensor *k_out) {
    bst_rope_options options = rope_options(layout);
    options.casting = casting, options.eps = eps;
    return bst_rope_forward(exec, q, k, cos, sin, q_weight, k_weight, &options, q_out, k_out);
}

static inline bst_status normed_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                         const DLTensor *q, const DLTensor *k, const DLTensor *q_weight,
                                         const DLTensor *k_weight, const DLTensor *cos, const DLTensor *sin, double eps,
                                         bst_casting casting, int layout, DLTensor *dq, DLTensor *dk,
                                         DLTensor *dq_weight, DLTensor *dk_weight) {
    bst_rope_options options = rope_options(layout);
    options.casting = casting, options.eps = eps;
    bst_rope_backward_tensors t = {sizeof t, dq_out,   dk_out, q,  k,         cos,      sin,
                                   q_weight, k_weight, dq,     dk, dq_weight, dk_weight};
    return bst_rope_backward(exec, &t, &options);
}

/* Where pair `i` of R / 2 lies: its members in x and in y, and their places in a table. Backward is told by
 * exchanging x and y. */
typedef struct rope_pair {
    int x[2], y[2], table[2];
} rope_pair;

static inline rope_pair rope_pair_at(int i, int half, int layout) {
    rope_pair p;
    int kind = layout % HALF_TABLES;
    for (int member = 0; member < 2; member++) {
        int near = 2 * i + member, far = i + member * half;
        p.x[member] = kind ? near : far;
        p.y[member] = kind == 1 ? near : far;
        p.table[member] = layout & HALF_TABLES ? i : p.y[member];
    }
    return p;
}

/* The launches of calls that compile for an H100 or H200 and run nothing, nor compile: kernels are said to be known. */
enum { ROPE_MOST_LAUNCHES = 8 };
typedef struct rope_launches {
    int count;
    bst_launch launch[ROPE_MOST_LAUNCHES];
} rope_launches;

static inline bool rope_note_launch(void *context, const bst_launch *launch) {
    rope_launches *l = context;
    l->launch[l->count++ % ROPE_MOST_LAUNCHES] = *launch;
    return true;
}

static inline int64_t rope_macro(const bst_launch *l, const char *name) {
    for (int i = 0; l->kernel->macros[i]; i++)
        if (strcmp(l->kernel->macros[i], name) == 0) return l->values[i];
    return -1;
}

#endif
