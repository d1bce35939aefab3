/* rms_norm_torch.c - RMSNorm as PyTorch operators. */
#include "torch/call.h"

/* The number of rows: all dimensions but the last. */
static int64_t rows_of(const DLTensor *x) {
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    return rows;
}

/* y, of the type that the casting gives it. */
static DLTensor *empty_y(bst_call *call, const DLTensor *x, const DLTensor *weight, bst_casting casting) {
    bool promote = casting == BST_CASTING_LLAMA && weight && !bst__same_type(weight->dtype, x->dtype);
    return bst__call_empty(call, x->ndim, x->shape, NULL, promote ? bst_type_f32 : x->dtype);
}

static DLTensor *empty_rstd(bst_call *call, const DLTensor *x) {
    int64_t rows = rows_of(x);
    return bst__call_empty(call, 1, &rows, NULL, bst_type_f32);
}

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *x = bst__call_rows(&call, stack[0]), *weight = bst__call_optional_rows(&call, stack[1]);
    double eps = bst__call_double(stack[2]);
    bst_casting casting = (bst_casting)stack[3];
    DLTensor *y = empty_y(&call, x, weight, casting), *rstd = empty_rstd(&call, x);
    BST_RUN(&call, bst_rms_norm_forward(&call.exec, x, NULL, weight, eps, casting, y, NULL, rstd));
    bst__call_end(&call, stack, 2, (DLTensor *[]){y, rstd});
}

static void add_forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *x = bst__call_rows(&call, stack[0]), *residual = bst__call_rows(&call, stack[1]);
    DLTensor *weight = bst__call_optional_rows(&call, stack[2]);
    double eps = bst__call_double(stack[3]);
    bst_casting casting = (bst_casting)stack[4];
    DLTensor *y = empty_y(&call, x, weight, casting), *sum = bst__call_empty_like(&call, x);
    DLTensor *rstd = empty_rstd(&call, x);
    BST_RUN(&call, bst_rms_norm_forward(&call.exec, x, residual, weight, eps, casting, y, sum, rstd));
    bst__call_end(&call, stack, 3, (DLTensor *[]){y, sum, rstd});
}

/* What both backward operators do, with the arguments from `stack` on. */
static void finish_backward(bst_call *call, bst_torch_value *results, const bst_torch_value *stack, const DLTensor *dy,
                            const DLTensor *dsum) {
    DLTensor *x = bst__call_rows(call, stack[0]), *weight = bst__call_optional_rows(call, stack[1]);
    DLTensor *rstd = bst__call_tensor(call, stack[2]);
    bst_casting casting = (bst_casting)stack[3];
    DLTensor *dx = (stack[4] & 1) ? bst__call_empty_like(call, x) : NULL;
    DLTensor *dweight = (stack[5] & 1) ? bst__call_empty_like(call, weight) : NULL;
    BST_RUN(call, bst_rms_norm_backward(&call->exec, dy, dsum, x, weight, rstd, casting, dx, dweight));
    bst__call_end(call, results, 2, (DLTensor *[]){dx, dweight});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_rows(&call, stack[0]);
    finish_backward(&call, stack, stack + 1, dy, NULL);
}

static void add_backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_rows(&call, stack[0]), *dsum = bst__call_rows(&call, stack[1]);
    finish_backward(&call, stack, stack + 2, dy, dsum);
}

const bst_torch_function bst__rms_norm_torch[] = {
    {"rms_norm_forward", "(Tensor x, Tensor? weight, float eps, int casting) -> (Tensor, Tensor)", forward},
    {"add_rms_norm_forward",
     "(Tensor x, Tensor residual, Tensor? weight, float eps, int casting) -> (Tensor, Tensor, Tensor)", add_forward},
    {"rms_norm_backward",
     "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, int casting, bool want_dx, bool want_dweight) -> (Tensor, "
     "Tensor)",
     backward},
    {"add_rms_norm_backward",
     "(Tensor dy, Tensor dsum, Tensor x, Tensor? weight, Tensor rstd, int casting, bool want_dx, bool want_dweight) -> "
     "(Tensor, Tensor)",
     add_backward},
    {NULL, NULL, NULL},
};
