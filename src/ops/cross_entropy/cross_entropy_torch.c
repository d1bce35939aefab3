/* cross_entropy_torch.c - cross-entropy, and the scaling of its gradient, as PyTorch operators. */
#include "torch/call.h"

/* The options, in the order of every schema here. */
#define OPTIONS \
    "int ignore_index, int reduction, float label_smoothing, float softcap, float logit_scale, float lse_square_scale"

static bst_cross_entropy_options options_of(const bst_torch_value *at) {
    return (bst_cross_entropy_options){.ignore_index = (int64_t)at[0],
                                       .reduction = (bst_reduction)at[1],
                                       .label_smoothing = bst__call_double(at[2]),
                                       .softcap = bst__call_double(at[3]),
                                       .logit_scale = bst__call_double(at[4]),
                                       .lse_square_scale = bst__call_double(at[5])};
}

static int64_t rows_of(const DLTensor *logits) {
    int64_t rows = 1;
    for (int i = 0; i < logits->ndim - 1; i++) rows *= logits->shape[i];
    return rows;
}

/* A scalar, or one element a row. */
static DLTensor *new_loss(bst_call *call, const DLTensor *logits, bst_reduction reduction) {
    int64_t rows = rows_of(logits);
    return bst__call_empty(call, reduction == BST_REDUCTION_NONE, &rows, NULL, bst_type_f32);
}

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *logits = bst__call_rows(&call, stack[0]), *target = bst__call_labels(&call, stack[1]);
    DLTensor *class_weight = bst__call_optional(&call, stack[2]), *num_items = bst__call_optional(&call, stack[3]);
    bst_cross_entropy_options options = options_of(stack + 4);
    DLTensor *loss = new_loss(&call, logits, options.reduction);
    int64_t kept[] = {rows_of(logits), 2};
    DLTensor *lse = bst__call_empty(&call, 2, kept, NULL, bst_type_f32);
    BST_RUN(&call,
            bst_cross_entropy_forward(&call.exec, logits, target, class_weight, num_items, &options, loss, lse, NULL));
    bst__call_end(&call, stack, 2, (DLTensor *[]){loss, lse});
}

/* The gradient takes the place of the logits. */
static void forward_inplace(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *logits = bst__call_in_place(&call, stack[0]), *target = bst__call_labels(&call, stack[1]);
    DLTensor *class_weight = bst__call_optional(&call, stack[2]), *num_items = bst__call_optional(&call, stack[3]);
    bst_cross_entropy_options options = options_of(stack + 4);
    DLTensor *loss = new_loss(&call, logits, options.reduction);
    BST_RUN(&call, bst_cross_entropy_forward(&call.exec, logits, target, class_weight, num_items, &options, loss, NULL,
                                             logits));
    bst__call_end(&call, stack, 1, (DLTensor *[]){loss});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *grad_loss = bst__call_tensor(&call, stack[0]), *logits = bst__call_rows(&call, stack[1]);
    DLTensor *target = bst__call_labels(&call, stack[2]);
    DLTensor *class_weight = bst__call_optional(&call, stack[3]), *num_items = bst__call_optional(&call, stack[4]);
    DLTensor *lse = bst__call_tensor(&call, stack[5]);
    bst_cross_entropy_options options = options_of(stack + 6);
    DLTensor *dlogits = bst__call_empty_like(&call, logits);
    BST_RUN(&call, bst_cross_entropy_backward(&call.exec, grad_loss, logits, target, class_weight, num_items, lse,
                                              &options, dlogits));
    bst__call_end(&call, stack, 1, (DLTensor *[]){dlogits});
}

static void scale(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *tensor = bst__call_in_place(&call, stack[0]), *factor = bst__call_tensor(&call, stack[1]);
    BST_RUN(&call, bst_scale(&call.exec, tensor, factor));
    bst__call_end(&call, stack, 0, NULL);
}

const bst_torch_function bst__cross_entropy_torch[] = {
    {"cross_entropy_forward",
     "(Tensor logits, Tensor target, Tensor? class_weight, Tensor? num_items, " OPTIONS ") -> (Tensor, Tensor)",
     forward},
    {"cross_entropy_forward_inplace",
     "(Tensor(a!) logits, Tensor target, Tensor? class_weight, Tensor? num_items, " OPTIONS ") -> Tensor",
     forward_inplace},
    {"cross_entropy_backward",
     "(Tensor grad_loss, Tensor logits, Tensor target, Tensor? class_weight, Tensor? num_items, Tensor lse, " OPTIONS
     ") -> Tensor",
     backward},
    {"scale_", "(Tensor(a!) tensor, Tensor scale) -> ()", scale},
    {NULL, NULL, NULL},
};
