/* linear_cross_entropy_torch.c - the fused output head and loss as PyTorch operators. */
#include "torch/call.h"

enum { OPTIONS = 6 }; /* ignore_index, reduction, label_smoothing, softcap, logit_scale, lse_square_scale */

static bst_cross_entropy_options options_of(const bst_torch_value *v) {
    return (bst_cross_entropy_options){
        .ignore_index = (int64_t)v[0],
        .reduction = (bst_reduction)v[1],
        .label_smoothing = bst__call_double(v[2]),
        .softcap = bst__call_double(v[3]),
        .logit_scale = bst__call_double(v[4]),
        .lse_square_scale = bst__call_double(v[5]),
    };
}

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *hidden = bst__call_rows(&call, stack[0]), *weight = bst__call_rows(&call, stack[1]);
    DLTensor *target = bst__call_labels(&call, stack[2]);
    DLTensor *bias = bst__call_optional_rows(&call, stack[3]), *class_weight = bst__call_optional_rows(&call, stack[4]);
    DLTensor *num_items = bst__call_optional(&call, stack[5]);
    bst_cross_entropy_options options = options_of(stack + 6);
    const bst_torch_value *rest = stack + 6 + OPTIONS; /* chunk_bytes, keep, want_dhidden, want_dweight, want_dbias */
    DLTensor *loss = NULL, *lse = NULL, *dlogits = NULL, *dhidden = NULL, *dweight = NULL, *dbias = NULL;
    if (hidden->ndim == 2 && weight->ndim == 2) {
        int64_t tokens = hidden->shape[0], vocabulary = weight->shape[0], columns = (vocabulary + 7) / 8 * 8;
        loss = bst__call_empty(&call, options.reduction == BST_REDUCTION_NONE, &tokens, NULL, bst_type_f32);
        lse = bst__call_empty(&call, 1, &tokens, NULL, bst_type_f32);
        if (rest[1] & 1) dlogits = bst__call_empty(&call, 2, (int64_t[]){tokens, columns}, NULL, hidden->dtype);
        if (rest[2] & 1) dhidden = bst__call_empty_like(&call, hidden);
        if (rest[3] & 1) dweight = bst__call_empty_like(&call, weight);
        if (rest[4] & 1) dbias = bst__call_empty_like(&call, bias);
    }
    if (call.status == BST_OK) {
        /* The operator sees the logits without their padding. */
        DLTensor narrow, *columns_used = NULL;
        int64_t shape[2], strides[2];
        if (dlogits) {
            shape[0] = dlogits->shape[0], shape[1] = weight->shape[0];
            strides[0] = dlogits->shape[1], strides[1] = 1;
            narrow = *dlogits;
            narrow.shape = shape;
            narrow.strides = strides;
            columns_used = &narrow;
        }
        call.status = bst_linear_cross_entropy_forward(&call.exec, hidden, weight, target, bias, class_weight,
                                                       num_items, &options, (int64_t)rest[0], loss, lse, columns_used,
                                                       dhidden, dweight, dbias);
    }
    bst__call_end(&call, stack, 6, (DLTensor *[]){loss, lse, dlogits, dhidden, dweight, dbias});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *hidden = bst__call_rows(&call, stack[1]), *grad_loss = bst__call_rows(&call, stack[0]);
    DLTensor *weight = bst__call_rows(&call, stack[2]), *target = bst__call_labels(&call, stack[3]);
    DLTensor *bias = bst__call_optional_rows(&call, stack[4]), *class_weight = bst__call_optional_rows(&call, stack[5]);
    DLTensor *num_items = bst__call_optional(&call, stack[6]), *lse = bst__call_tensor(&call, stack[7]);
    DLTensor *dlogits = bst__call_optional(&call, stack[8]);
    bst_cross_entropy_options options = options_of(stack + 9);
    const bst_torch_value *rest = stack + 9 + OPTIONS; /* chunk_bytes, want_dhidden, want_dweight, want_dbias */
    DLTensor *dhidden = (rest[1] & 1) ? bst__call_empty_like(&call, hidden) : NULL;
    DLTensor *dweight = (rest[2] & 1) ? bst__call_empty_like(&call, weight) : NULL;
    DLTensor *dbias = (rest[3] & 1) ? bst__call_empty_like(&call, bias) : NULL;
    if (call.status == BST_OK) {
        int64_t shape[2];
        /* Without the padding that forward gave them. What is no such matrix goes as it is, to be refused. */
        if (dlogits && dlogits->ndim == 2 && weight->ndim == 2 && dlogits->shape[1] >= weight->shape[0]) {
            shape[0] = dlogits->shape[0], shape[1] = weight->shape[0];
            dlogits->shape = shape;
        }
        call.status = bst_linear_cross_entropy_backward(&call.exec, grad_loss, hidden, weight, target, bias,
                                                        class_weight, num_items, lse, dlogits, &options,
                                                        (int64_t)rest[0], dhidden, dweight, dbias);
    }
    bst__call_end(&call, stack, 3, (DLTensor *[]){dhidden, dweight, dbias});
}

#define OPTION_SCHEMA                                                                                  \
    "int ignore_index, int reduction, float label_smoothing, float softcap, float logit_scale, float " \
    "lse_square_scale, "

const bst_torch_function bst__linear_cross_entropy_torch[] = {
    {"linear_cross_entropy_forward",
     "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? "
     "num_items, " OPTION_SCHEMA "int chunk_bytes, bool keep, bool want_dhidden, bool want_dweight, bool want_dbias)"
     " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
     forward},
    {"linear_cross_entropy_backward",
     "(Tensor grad_loss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, "
     "Tensor? num_items, Tensor lse, Tensor? dlogits, " OPTION_SCHEMA
     "int chunk_bytes, bool want_dhidden, bool want_dweight, bool want_dbias) -> (Tensor, Tensor, Tensor)",
     backward},
    {NULL, NULL, NULL},
};
