/* qk_norm_rope_torch.c - QK-norm and rotary embedding as PyTorch operators. */
#include "torch/call.h"

static DLDataType promoted(DLDataType a, DLDataType b) { return bst__same_type(a, b) ? a : bst_type_f32; }

static void forward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *q = bst__call_tensor(&call, stack[0]), *k = bst__call_tensor(&call, stack[1]);
    DLTensor *q_weight = bst__call_rows(&call, stack[2]), *k_weight = bst__call_rows(&call, stack[3]);
    DLTensor *cos = bst__call_tensor(&call, stack[4]), *sin = bst__call_tensor(&call, stack[5]);
    double eps = bst__call_double(stack[6]);
    bst_casting casting = (bst_casting)stack[7];
    DLDataType normed = casting == BST_CASTING_LLAMA ? promoted(q->dtype, q_weight->dtype) : q->dtype;
    DLDataType type = promoted(normed, cos->dtype);
    DLTensor *q_out = bst__call_heads(&call, q, stack[9] & 1, type);
    DLTensor *k_out = bst__call_heads(&call, k, stack[10] & 1, type);
    BST_RUN(&call, bst_qk_norm_rope_forward(&call.exec, q, k, q_weight, k_weight, cos, sin, eps, casting, stack[8] & 1,
                                            q_out, k_out));
    bst__call_end(&call, stack, 2, (DLTensor *[]){q_out, k_out});
}

/* wants: 1 dq, 2 dk, 4 dq_weight, 8 dk_weight. */
static void backward(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    bst__call_begin(&call);
    DLTensor *dq_out = bst__call_optional(&call, stack[0]), *dk_out = bst__call_optional(&call, stack[1]);
    DLTensor *q = bst__call_tensor(&call, stack[2]), *k = bst__call_tensor(&call, stack[3]);
    DLTensor *q_weight = bst__call_rows(&call, stack[4]), *k_weight = bst__call_rows(&call, stack[5]);
    DLTensor *cos = bst__call_tensor(&call, stack[6]), *sin = bst__call_tensor(&call, stack[7]);
    double eps = bst__call_double(stack[8]);
    uint64_t wants = stack[13];
    DLTensor *dq = wants & 1 ? bst__call_heads(&call, q, stack[11] & 1, q->dtype) : NULL;
    DLTensor *dk = wants & 2 ? bst__call_heads(&call, k, stack[12] & 1, k->dtype) : NULL;
    DLTensor *dq_weight = wants & 4 ? bst__call_empty_like(&call, q_weight) : NULL;
    DLTensor *dk_weight = wants & 8 ? bst__call_empty_like(&call, k_weight) : NULL;
    BST_RUN(&call, bst_qk_norm_rope_backward(&call.exec, dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, eps,
                                             (bst_casting)stack[9], stack[10] & 1, dq, dk, dq_weight, dk_weight));
    bst__call_end(&call, stack, 4, (DLTensor *[]){dq, dk, dq_weight, dk_weight});
}

const bst_torch_function bst__qk_norm_rope_torch[] = {
    {"qk_norm_rope_forward",
     "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps, int casting, bool "
     "interleaved, bool q_tokens_first, bool k_tokens_first) -> (Tensor, Tensor)",
     forward},
    {"qk_norm_rope_backward",
     "(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, "
     "float eps, int casting, bool interleaved, bool q_tokens_first, bool k_tokens_first, int wants) -> (Tensor, "
     "Tensor, Tensor, Tensor)",
     backward},
    {NULL, NULL, NULL},
};
