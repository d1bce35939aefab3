/* gated_rms_norm.h - the RMS norm with a gate, of the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_GATED_RMS_NORM_H
#define BASTILE_GATED_RMS_NORM_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* act(gate): of the norm's gate, which is no unit's. */
typedef enum bst_norm_gate {
    BST_NORM_GATE_SILU = 0,   /* gate / (1 + exp(-gate)) */
    BST_NORM_GATE_SIGMOID = 1 /* 1 / (1 + exp(-gate)) */
} bst_norm_gate;

typedef struct bst_gated_rms_norm_options {
    size_t size; /* sizeof(bst_gated_rms_norm_options) */
    bst_norm_gate activation;
    int gate_first; /* not 0: x is multiplied with act(gate) before the norm, not its result */
    int64_t group;  /* the columns that are normed together, a divisor of H; 0: all H */
    int promote;    /* not 0: y has the promoted type of x and weight, not that of x */
} bst_gated_rms_norm_options;

/* With n(u) = u / sqrt(mean(u^2) + eps), the mean over each group of a row's columns:
 *   y = n(x) * weight * act(gate)      (Qwen3-Next, Kimi Linear)
 *   y = n(x * act(gate)) * weight      gate_first (Mamba-2)
 * in float32 and rounded once. x, gate, y [..., H], 1 <= H <= 65536, weight [H]; x, gate and weight each of any of the
 * three types. options NULL: all zero. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Dao and Gu,
 * "Transformers are SSMs", 2024. */
BST_API bst_status bst_gated_rms_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *gate,
                                              const DLTensor *weight, double eps,
                                              const bst_gated_rms_norm_options *options, DLTensor *y);
/* What the gradients of the above are made of: dy of y's type, and forward's inputs, all else being computed again. And
 * where they go, each NULL where not wanted: dx, dgate and dweight as x, gate and weight, dweight summed in float32 in
 * a fixed order. eps and options as for forward. */
typedef struct bst_gated_rms_norm_backward_tensors {
    size_t size; /* sizeof(bst_gated_rms_norm_backward_tensors) */
    const DLTensor *dy, *x, *gate, *weight;
    DLTensor *dx, *dgate, *dweight;
} bst_gated_rms_norm_backward_tensors;

BST_API bst_status bst_gated_rms_norm_backward(const bst_exec *exec, const bst_gated_rms_norm_backward_tensors *tensors,
                                               double eps, const bst_gated_rms_norm_options *options);

#ifdef __cplusplus
}
#endif

#endif
