/* optim.h - the optimiser's part of the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_OPTIM_H
#define BASTILE_OPTIM_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lists of `count` tensors, which go together by their place; each may have its own type and shape. All are
 * on one device, gapless, in any order of dimensions that a parameter's own have in common, and share no memory. */
typedef struct bst_adamw_tensors {
    size_t size; /* sizeof(bst_adamw_tensors) */
    int64_t count;
    DLTensor *const *parameter; /* written */
    DLTensor *const *gradient;  /* of parameter's type; divided by grad_scale where that is given, else only read */
    /* Written. float32, bfloat16 or parameter's type; or uint8 [ceil(elements / 256), 256], beginning at a multiple of
     * 16 bytes, and then the scales, float32 [ceil(elements / 256)], are needed. Zeros are the beginning in each. */
    DLTensor *const *exp_avg, *const *exp_avg_sq;
    /* float32, written: what parameter is rounded of. NULL, which each of them may be too: there is none. */
    DLTensor *const *master;
    DLTensor *const *exp_avg_scale, *const *exp_avg_sq_scale;
    DLTensor *const *step; /* one float32 each: how many steps there were. The call adds one */
    /* One float32 each, on the device, or NULL: lr in place of the number; what gradients are divided by; not 0: the
     * call does nothing at all; what gradients are multiplied with. */
    const DLTensor *lr, *grad_scale, *found_inf, *clip;
} bst_adamw_tensors;

typedef struct bst_adamw_options {
    size_t size; /* sizeof(bst_adamw_options) */
    int maximize;
    /* Not 0: what is bfloat16, parameters without a master and moments, is rounded up or down by chance, so that the
     * mean is right. The random numbers are a function of the seed, the step, the tensor's number, which is its place
     * plus first_number, and the element. Moments of uint8 are always rounded so. */
    int stochastic;
    uint64_t seed;
    int64_t first_number;
} bst_adamw_options;

/* One step of AdamW for all tensors, in one pass, in float32: g the gradient, t the step, m and v the moments,
 *   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
 *   p = p - lr weight_decay p - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
 * 0 <= beta1, beta2 < 1; the others from 0 on. Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. */
BST_API bst_status bst_optim_adamw(const bst_exec *exec, const bst_adamw_tensors *tensors, double lr, double beta1,
                                   double beta2, double eps, double weight_decay, const bst_adamw_options *options);

/* norm, one float32: the root of the sum of squares of all gradients, divided by grad_scale where that is given;
 * coefficient, one float32 or NULL: min(1, max_norm / (norm + 1e-6)), which clips them. Summed in a fixed order. */
BST_API bst_status bst_optim_norm(const bst_exec *exec, int64_t count, const DLTensor *const *gradients,
                                  const DLTensor *grad_scale, double max_norm, DLTensor *norm, DLTensor *coefficient);
/* Gradients times coefficient, one float32 on their device, in place. Where that is 1 they are not touched. */
BST_API bst_status bst_optim_scale(const bst_exec *exec, int64_t count, DLTensor *const *gradients,
                                   const DLTensor *coefficient);

#ifdef __cplusplus
}
#endif
#endif
