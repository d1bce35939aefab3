/* moe_torch.c - a mixture of experts around its grouped products, as PyTorch operators. */
#include "torch/call.h"

static int64_t size_of(const DLTensor *t, int dim) { return t && t->ndim > dim ? t->shape[dim] : 0; }

static DLTensor *matrix(bst_call *call, int64_t rows, int64_t columns, const DLTensor *model) {
    int64_t sizes[] = {rows, columns};
    return model ? bst__call_empty(call, 2, sizes, NULL, model->dtype) : NULL;
}

static void sort(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *indices = bst__call_tensor(&call, stack[0]), *order = NULL, *position = NULL, *ends = NULL;
    int64_t experts = (int64_t)stack[1], pairs = size_of(indices, 0) * size_of(indices, 1);
    if (call.status == BST_OK) {
        order = bst__call_empty(&call, 1, &pairs, NULL, bst_type_i32);
        position = bst__call_empty(&call, indices->ndim, indices->shape, NULL, bst_type_i32);
        ends = bst__call_empty(&call, 1, &experts, NULL, bst_type_i32);
    }
    BST_RUN(&call, bst_moe_sort(&call.exec, indices, order, position, ends));
    bst__call_end(&call, stack, 3, (DLTensor *[]){order, position, ends});
}

static void gather(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *x = bst__call_rows(&call, stack[0]), *order = bst__call_tensor(&call, stack[1]);
    DLTensor *rows = matrix(&call, size_of(order, 0), size_of(x, 1), x);
    BST_RUN(&call, bst_moe_gather(&call.exec, x, order, rows));
    bst__call_end(&call, stack, 1, (DLTensor *[]){rows});
}

static void glu_forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *h = bst__call_tensor(&call, stack[0]), *bias = bst__call_optional(&call, stack[1]);
    DLTensor *ends = bst__call_tensor(&call, stack[2]);
    double alpha = bst__call_double(stack[3]), limit = bst__call_double(stack[4]);
    DLTensor *y = matrix(&call, size_of(h, 0), size_of(h, 1) / 2, h);
    BST_RUN(&call, bst_moe_glu_forward(&call.exec, h, bias, ends, alpha, limit, y));
    bst__call_end(&call, stack, 1, (DLTensor *[]){y});
}

static void glu_backward_into(bst_torch_value *stack, bool in_place) {
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dy = bst__call_in_place(&call, stack[0]), *h = bst__call_in_place(&call, stack[1]);
    DLTensor *bias = bst__call_optional(&call, stack[2]), *ends = bst__call_tensor(&call, stack[3]);
    DLTensor *order = bst__call_tensor(&call, stack[4]), *weights = bst__call_tensor(&call, stack[5]);
    DLTensor *dots = bst__call_optional(&call, stack[6]);
    double alpha = bst__call_double(stack[7]), limit = bst__call_double(stack[8]);
    DLTensor *dh = !(stack[9] & 1) ? NULL : in_place ? h : bst__call_empty_like(&call, h);
    DLTensor *wy = !(stack[10] & 1) ? NULL : in_place ? dy : bst__call_empty_like(&call, dy);
    DLTensor *dweights = (stack[11] & 1) ? bst__call_empty_like(&call, weights) : NULL;
    DLTensor *dbias = (stack[12] & 1) ? bst__call_empty_like(&call, bias) : NULL;
    BST_RUN(&call, bst_moe_glu_backward(&call.exec, dy, h, bias, ends, order, weights, dots, alpha, limit, dh, wy,
                                        dweights, dbias));
    DLTensor *results[] = {dh, wy, dweights, dbias};
    bst__call_end(&call, stack, in_place ? 2 : 4, in_place ? results + 2 : results);
}

static void glu_backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    glu_backward_into(stack, false);
}

/* dh takes the place of h, and wy that of dy. */
static void glu_backward_inplace(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    glu_backward_into(stack, true);
}

static void combine_forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *y = bst__call_tensor(&call, stack[0]), *position = bst__call_tensor(&call, stack[1]);
    DLTensor *weights = bst__call_optional(&call, stack[2]), *bias = bst__call_optional(&call, stack[3]);
    DLTensor *indices = bst__call_optional(&call, stack[4]);
    DLTensor *out = matrix(&call, size_of(position, 0), size_of(y, 1), y);
    BST_RUN(&call, bst_moe_combine_forward(&call.exec, y, position, weights, bias, indices, out));
    bst__call_end(&call, stack, 1, (DLTensor *[]){out});
}

static void combine_backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dout = bst__call_rows(&call, stack[0]), *order = bst__call_tensor(&call, stack[1]);
    DLTensor *ends = bst__call_tensor(&call, stack[2]), *weights = bst__call_tensor(&call, stack[3]);
    DLTensor *bias = bst__call_optional(&call, stack[4]), *dots = NULL;
    int64_t pairs = size_of(order, 0);
    DLTensor *rows = matrix(&call, pairs, size_of(dout, 1), dout);
    if (stack[5] & 1) dots = bst__call_empty(&call, 1, &pairs, NULL, bst_type_f32);
    DLTensor *dbias = (stack[6] & 1) ? bst__call_empty_like(&call, bias) : NULL;
    BST_RUN(&call, bst_moe_combine_backward(&call.exec, dout, order, ends, weights, bias, rows, dots, dbias));
    bst__call_end(&call, stack, 3, (DLTensor *[]){rows, dots, dbias});
}

/* What both ways of the gate's backward pass take besides dy and h. */
#define GLU_BACKWARD                                                                                                  \
    "Tensor? bias, Tensor ends, Tensor order, Tensor weights, Tensor? dots, float alpha, float limit, bool want_dh, " \
    "bool want_wy, bool want_dweights, bool want_dbias"

const bst_torch_function bst__moe_torch[] = {
    {"moe_sort", "(Tensor indices, int experts) -> (Tensor, Tensor, Tensor)", sort},
    {"moe_gather", "(Tensor x, Tensor order) -> Tensor", gather},
    {"moe_glu_forward", "(Tensor h, Tensor? bias, Tensor ends, float alpha, float limit) -> Tensor", glu_forward},
    {"moe_glu_backward", "(Tensor dy, Tensor h, " GLU_BACKWARD ") -> (Tensor, Tensor, Tensor, Tensor)", glu_backward},
    {"moe_glu_backward_inplace", "(Tensor(a!) dy, Tensor(b!) h, " GLU_BACKWARD ") -> (Tensor, Tensor)",
     glu_backward_inplace},
    {"moe_combine_forward", "(Tensor y, Tensor position, Tensor? weights, Tensor? bias, Tensor? indices) -> Tensor",
     combine_forward},
    {"moe_combine_backward",
     "(Tensor dout, Tensor order, Tensor ends, Tensor weights, Tensor? bias, bool want_dots, bool want_dbias) -> "
     "(Tensor, Tensor, Tensor)",
     combine_backward},
    {NULL, NULL, NULL},
};
