/* linear_logprobs_cuda.c - log-probabilities of rows of logits on CUDA: which kernel, and its launch. */
#include <assert.h>

#include "cuda/cuda.h"
#include "ops/linear_logprobs/linear_logprobs.h"
#include "ops/linear_logprobs/linear_logprobs_args.h"

/* Macros of the kernels, in the order of their values. */
enum { VOCAB, TYPE, VEC, SOFTCAP, NEGATIVE, ENTROPY, SQUARES, MEAN, TOP1 };
#define MACROS "VOCAB", "TYPE", "VEC", "SOFTCAP", "NEGATIVE", "ENTROPY"

static const bst_kernel forward_kernel = {
    "linear_logprobs.cu", "linear_logprobs_forward", {MACROS, "SQUARES", "MEAN", "TOP1", "FORWARD"}};
static const bst_kernel backward_kernel = {"linear_logprobs.cu", "linear_logprobs_backward", {MACROS, "BACKWARD"}};

bst_status bst__linear_logprobs_rows_cuda(const bst_exec *exec, const char *op, const linear_logprobs_rows *c) {
    int size = bst__dtype_size(c->dtype);
    bool aligned = (uintptr_t)c->logits % 16 == 0 && c->stride * size % 16 == 0;
    bst_launch l = {.kernel = c->backward ? &backward_kernel : &forward_kernel,
                    .block = LINEAR_LOGPROBS_THREADS,
                    .grid_x = (unsigned)c->rows,
                    .overlap = true};
    l.values[VOCAB] = c->vocabulary;
    l.values[TYPE] = c->dtype;
    l.values[VEC] = aligned ? 16 / size : 1;
    l.values[SOFTCAP] = c->z.softcap > 0;
    l.values[NEGATIVE] = c->z.logit_scale < 0;
    l.values[ENTROPY] = c->backward ? c->grad_entropy != NULL : c->entropy != NULL;
    l.values[SQUARES] = c->log_sum_sq_probs != NULL;
    l.values[MEAN] = c->mean_logits != NULL;
    l.values[TOP1] = c->is_top1 != NULL;
    bst_cross_entropy_rows_call rows = {.dtype = c->dtype, .rows = c->rows, .vocabulary = c->vocabulary};
    rows.logits = rows.dlogits = c->logits, rows.stride = c->stride;
    rows.target = c->target, rows.options = &c->z, rows.lse_pairs = c->pairs;
    linear_logprobs_args args = {.row = bst__cross_entropy_args(&rows),
                                 .log_probs = c->log_probs,
                                 .entropy = c->entropy,
                                 .lse = c->lse,
                                 .log_sum_sq_probs = c->log_sum_sq_probs,
                                 .mean_logits = c->mean_logits,
                                 .is_top1 = c->is_top1,
                                 .grad_log_probs = c->grad_log_probs,
                                 .grad_entropy = c->grad_entropy,
                                 .grad_lse = c->grad_lse,
                                 .entropy_was = c->entropy_was,
                                 .without = c->ones ? 1.0f : 0.0f};
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}
