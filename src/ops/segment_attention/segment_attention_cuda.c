/* segment_attention_cuda.c - attention within segments on CUDA, which has no kernels yet. */
#include "ops/segment_attention/segment_attention.h"

static bst_status missing(const segment_attention_call *call) {
    return bst__error(BST_UNSUPPORTED, "%s: CUDA is not there yet", call->op);
}

bst_status bst__segment_attention_forward_cuda(const bst_exec *exec, const segment_attention_call *call) {
    (void)exec;
    return missing(call);
}

bst_status bst__segment_attention_backward_cuda(const bst_exec *exec, const segment_attention_call *call) {
    (void)exec;
    return missing(call);
}
