/* swiglu_torch.c - SwiGLU as PyTorch operators. */
#include "torch/call.h"

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *a = bst__call_rows(&call, stack[0]), *b = bst__call_rows(&call, stack[1]);
    DLTensor *y = bst__call_empty_like(&call, a);
    if (call.status == BST_OK) call.status = bst_swiglu_forward(&call.exec, a, b, y);
    bst__call_end(&call, stack, 1, (DLTensor *[]){y});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_rows(&call, stack[0]);
    DLTensor *a = bst__call_rows(&call, stack[1]), *b = bst__call_rows(&call, stack[2]);
    DLTensor *da = (stack[3] & 1) ? bst__call_empty_like(&call, a) : NULL;
    DLTensor *db = (stack[4] & 1) ? bst__call_empty_like(&call, b) : NULL;
    if (call.status == BST_OK) call.status = bst_swiglu_backward(&call.exec, dy, a, b, da, db);
    bst__call_end(&call, stack, 2, (DLTensor *[]){da, db});
}

const bst_torch_function bst__swiglu_torch[] = {
    {"swiglu_forward", "(Tensor a, Tensor b) -> Tensor", forward},
    {"swiglu_backward", "(Tensor dy, Tensor a, Tensor b, bool want_da, bool want_db) -> (Tensor, Tensor)", backward},
    {NULL, NULL, NULL},
};
