/* gated_rms_norm.h - what the files of this room share: the places of the description's tensors and attributes, and the
 * kernels. */
#ifndef BST_GATED_RMS_NORM_H
#define BST_GATED_RMS_NORM_H

#include "core/cpu_kernel.h"
#include "core/describe.h"

/* Places of tensors: of both passes, of forward, of backward; and of attributes. */
enum { X, GATE, WEIGHT, BOTH, Y = BOTH };
enum { DY = BOTH, DX, DGATE, DWEIGHT };
enum { ACTIVATION, GATE_FIRST, GROUP, PROMOTE, EPS };

/* Columns that are normed together. */
static inline int64_t group_of(const bst_view *v, const bst_attribute *attributes) {
    return attributes[GROUP].i ? attributes[GROUP].i : v[X].rows.columns;
}

/* Whether one of a pass's results is so exact that float32's own roundings show: of the backward pass dweight too. */
static inline bool is_exact(const bst_view *v, bst_dtype y_type, bool backward) {
    bool rows = v[X].dtype == BST_F32 || v[GATE].dtype == BST_F32 || y_type == BST_F32;
    return rows || (backward && v[WEIGHT].dtype == BST_F32);
}

/* Both need at least one row; backward: at least one gradient that is wanted. */
bst_run bst__gated_rms_norm_forward_cuda, bst__gated_rms_norm_backward_cuda;

typedef struct gated_rms_norm_cpu {
    const bst_view *v;
    const bst_attribute *attributes;
    int64_t chunks; /* backward: of rows, each with its own partial sums */
    float *partial; /* [chunks, H], of dweight; NULL: not wanted */
} gated_rms_norm_cpu;

BST_CPU_DECLARE(bst__gated_rms_norm_forward_cpu);  /* a gated_rms_norm_cpu, over rows */
BST_CPU_DECLARE(bst__gated_rms_norm_backward_cpu); /* over chunks of rows */
BST_CPU_DECLARE(bst__gated_rms_norm_sums_cpu);     /* over columns: sums the partial rows */

#endif
