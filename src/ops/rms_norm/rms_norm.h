/* rms_norm.h - a checked call of RMSNorm, as rms_norm.c hands it to the device's side. */
#ifndef BST_RMS_NORM_H
#define BST_RMS_NORM_H

#include "core/core.h"

/* Views without data are absent. */
typedef struct rms_norm_forward_call {
    bst_view x, residual, weight, y, sum;
    bst_casting casting;
    float eps;
    float *rstd; /* [rows] or NULL */
} rms_norm_forward_call;

typedef struct rms_norm_backward_call {
    bst_view dy, dsum, x, weight, dx, dweight;
    bst_casting casting;
    const float *rstd; /* [rows] */
} rms_norm_backward_call;

/* What the sentences of errors begin with. */
#define RMS_NORM_FORWARD  "rms_norm_forward"
#define RMS_NORM_BACKWARD "rms_norm_backward"

/* Both need at least one row; backward: at least one of dx and dweight. */
bst_status bst__rms_norm_forward_cuda(const bst_exec *exec, const rms_norm_forward_call *call);
bst_status bst__rms_norm_backward_cuda(const bst_exec *exec, const rms_norm_backward_call *call);

#endif
