/* optim.h - what the files of this room share: lists of tensors after their checks. */
#ifndef BST_OPTIM_H
#define BST_OPTIM_H

#include "core/core.h"
#include "ops/optim/optim_args.h"

/* A parameter's tensors with what decides about its kernel, and its count of steps. */
typedef struct optim_item {
    optim_tensor tensor;
    bst_dtype type;
    int moments; /* a code of dtype.h: that of uint8 too */
    float *step;
} optim_item;

/* One step of all. */
typedef struct optim_step {
    const char *op;
    DLDevice device;
    const optim_item *items; /* none of them without elements, but for their counts of steps */
    int64_t count;
    double lr, beta1, beta2, eps, weight_decay;
    float *device_lr, *grad_scale, *found_inf, *clip; /* on the device, read; NULL: not given */
    uint64_t seed;
    uint32_t first_number;
    bool maximize, stochastic;
} optim_step;

/* Gradients of one list. */
typedef struct optim_list_item {
    optim_gradient gradient;
    bst_dtype type;
} optim_list_item;

typedef struct optim_list {
    const char *op;
    DLDevice device;
    const optim_list_item *items;
    int64_t count;
} optim_list;

bst_status bst__optim_adamw_cuda(const bst_exec *exec, const optim_step *s);
bst_status bst__optim_norm_cuda(const bst_exec *exec, const optim_list *l, const float *grad_scale, double max_norm,
                                float *norm, float *coefficient);
bst_status bst__optim_scale_cuda(const bst_exec *exec, const optim_list *l, const float *coefficient);

/* Blocks of `chunk` elements that a tensor takes. */
static inline int64_t optim_blocks(int64_t count, int64_t chunk) { return (count + chunk - 1) / chunk; }

#endif
