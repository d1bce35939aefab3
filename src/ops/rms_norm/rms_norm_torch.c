/* rms_norm_torch.c - RMSNorm as PyTorch operators. */
#include "torch/call.h"

/* The number of rows: all dimensions but the last. */
static int64_t rows_of(const DLTensor *x) {
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    return rows;
}

static bool same_type(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits; }

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *x = bst__call_rows(&call, stack[0]), *weight = bst__call_optional(&call, stack[1]), *y = NULL,
             *rstd = NULL;
    double eps = bst__call_double(stack[2]);
    bst_casting casting = (bst_casting)stack[3];
    if (call.status == BST_OK) {
        bool promote = casting == BST_CASTING_LLAMA && weight && !same_type(weight->dtype, x->dtype);
        int64_t rows = rows_of(x);
        y = bst__call_empty(&call, x->ndim, x->shape, NULL, promote ? bst_type_f32 : x->dtype);
        rstd = bst__call_empty(&call, 1, &rows, NULL, bst_type_f32);
    }
    if (call.status == BST_OK) call.status = bst_rms_norm_forward(&call.exec, x, weight, eps, casting, y, rstd);
    bst__call_end(&call, stack, 2, (DLTensor *[]){y, rstd});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_rows(&call, stack[0]), *x = bst__call_rows(&call, stack[1]);
    DLTensor *weight = bst__call_optional(&call, stack[2]), *rstd = bst__call_tensor(&call, stack[3]);
    bst_casting casting = (bst_casting)stack[4];
    DLTensor *dx = (stack[5] & 1) ? bst__call_empty_like(&call, x) : NULL;
    DLTensor *dweight = (stack[6] & 1) ? bst__call_empty_like(&call, weight) : NULL;
    if (call.status == BST_OK)
        call.status = bst_rms_norm_backward(&call.exec, dy, x, weight, rstd, casting, dx, dweight);
    bst__call_end(&call, stack, 2, (DLTensor *[]){dx, dweight});
}

const bst_torch_function bst__rms_norm_torch[] = {
    {"rms_norm_forward", "(Tensor x, Tensor? weight, float eps, int casting) -> (Tensor, Tensor)", forward},
    {"rms_norm_backward",
     "(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, int casting, bool want_dx, bool want_dweight) -> (Tensor, "
     "Tensor)",
     backward},
    {NULL, NULL, NULL},
};
