/* rope_torch.c - rotary position embedding as PyTorch operators. */
#include "torch/call.h"

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *q = bst__call_tensor(&call, stack[0]), *k = bst__call_tensor(&call, stack[1]);
    DLTensor *cos = bst__call_tensor(&call, stack[2]), *sin = bst__call_tensor(&call, stack[3]);
    DLDataType type = bst__same_type(q->dtype, cos->dtype) ? q->dtype : bst_type_f32;
    DLTensor *q_out = bst__call_heads(&call, q, stack[5] & 1, type),
             *k_out = bst__call_heads(&call, k, stack[6] & 1, type);
    BST_RUN(&call, bst_rope_forward(&call.exec, q, k, cos, sin, stack[4] & 1, q_out, k_out));
    bst__call_end(&call, stack, 2, (DLTensor *[]){q_out, k_out});
}

/* The gradients of q and k, or of one of them alone. `dtype`, a code of dtype.h, is their type: where the tables are
 * float32, that of the incoming gradients does not tell. */
static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    static const DLDataType types[] = {
        [BST_F32] = {kDLFloat, 32, 1}, [BST_BF16] = {kDLBfloat, 16, 1}, [BST_F16] = {kDLFloat, 16, 1}};
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dq_out = bst__call_tensor(&call, stack[0]), *dk_out = bst__call_optional(&call, stack[1]);
    DLTensor *cos = bst__call_tensor(&call, stack[2]), *sin = bst__call_tensor(&call, stack[3]), *dq = NULL, *dk = NULL;
    if (stack[7] > BST_F16) {
        BST_RUN(&call, bst__error(BST_INVALID,
                                  "rope_backward: dtype is %d; 0 (float32), 1 (bfloat16) or 2 (float16) is needed",
                                  (int)stack[7]));
    } else {
        dq = bst__call_heads(&call, dq_out, stack[5] & 1, types[stack[7]]);
        dk = bst__call_heads(&call, dk_out, stack[6] & 1, types[stack[7]]);
    }
    BST_RUN(&call, bst_rope_backward(&call.exec, dq_out, dk_out, cos, sin, stack[4] & 1, dq, dk));
    bst__call_end(&call, stack, 2, (DLTensor *[]){dq, dk});
}

const bst_torch_function bst__rope_torch[] = {
    {"rope_forward",
     "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool q_tokens_first, bool k_tokens_first) -> "
     "(Tensor, "
     "Tensor)",
     forward},
    {"rope_backward",
     "(Tensor dq_out, Tensor? dk_out, Tensor cos, Tensor sin, bool interleaved, bool q_tokens_first, bool "
     "k_tokens_first, "
     "int dtype) -> (Tensor, Tensor)",
     backward},
    {NULL, NULL, NULL},
};
