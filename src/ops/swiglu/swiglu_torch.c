/* swiglu_torch.c - SwiGLU as PyTorch operators. */
#include "torch/call.h"

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *a = bst__call_rows(&call, stack[0]), *b = bst__call_rows(&call, stack[1]);
    DLTensor *y = bst__call_empty_like(&call, a);
    BST_RUN(&call, bst_swiglu_forward(&call.exec, a, b, y));
    bst__call_end(&call, stack, 1, (DLTensor *[]){y});
}

static void backward_and(bool want_y, bst_torch_value *stack) {
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_rows(&call, stack[0]);
    DLTensor *a = bst__call_rows(&call, stack[1]), *b = bst__call_rows(&call, stack[2]);
    DLTensor *da = (stack[3] & 1) ? bst__call_empty_like(&call, a) : NULL;
    DLTensor *db = (stack[4] & 1) ? bst__call_empty_like(&call, b) : NULL;
    DLTensor *y = want_y ? bst__call_empty_like(&call, a) : NULL;
    BST_RUN(&call, bst_swiglu_backward(&call.exec, dy, a, b, da, db, y));
    bst__call_end(&call, stack, want_y ? 3 : 2, (DLTensor *[]){da, db, y});
}

static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    backward_and(false, stack);
}

static void backward_with_y(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    backward_and(true, stack);
}

/* da takes the place of a, db that of b, and y that of dy. */
static void backward_inplace(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_in_place(&call, stack[0]);
    DLTensor *a = bst__call_in_place(&call, stack[1]), *b = bst__call_in_place(&call, stack[2]);
    DLTensor *da = (stack[3] & 1) ? a : NULL, *db = (stack[4] & 1) ? b : NULL, *y = (stack[5] & 1) ? dy : NULL;
    BST_RUN(&call, bst_swiglu_backward(&call.exec, dy, a, b, da, db, y));
    bst__call_end(&call, stack, 0, NULL);
}

const bst_torch_function bst__swiglu_torch[] = {
    {"swiglu_forward", "(Tensor a, Tensor b) -> Tensor", forward},
    {"swiglu_backward", "(Tensor dy, Tensor a, Tensor b, bool want_da, bool want_db) -> (Tensor, Tensor)", backward},
    {"swiglu_backward_with_y",
     "(Tensor dy, Tensor a, Tensor b, bool want_da, bool want_db) -> (Tensor, Tensor, Tensor)", backward_with_y},
    {"swiglu_backward_inplace",
     "(Tensor(a!) dy, Tensor(b!) a, Tensor(c!) b, bool want_da, bool want_db, bool want_y) -> ()", backward_inplace},
    {NULL, NULL, NULL},
};
