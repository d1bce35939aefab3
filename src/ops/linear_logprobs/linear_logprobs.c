/* linear_logprobs.c - log-probabilities of targets under the output head, a chunk of rows at a time.
 *
 * A chunk is: logits by the head (linear_cross_entropy_head.h), one pass over them, by which forward reads what is
 * asked of each row, and backward replaces them by their gradient, all upstream gradients at once. Of rows whose logits
 * forward saves, backward has its pass and two products; else it makes them again. Asked for the jacobian, forward has
 * both passes over a chunk, and one product more: so a frozen head takes two, and keeps no logits. Nothing waits for
 * the device. */
#include <inttypes.h>

#include "core/options.h"
#include "cuda/cuda.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_head.h"
#include "ops/linear_logprobs/linear_logprobs.h"

typedef bst_linear_logprobs_tensors given_tensors;
typedef bst_linear_logprobs_options given_options;
static const char forward_op[] = "linear_logprobs_forward", backward_op[] = "linear_logprobs_backward";

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { HIDDEN, WEIGHT, TARGET, BIAS, INPUTS };
/* Forward's others. */
enum { LOG_PROBS = INPUTS, PAIRS, ENTROPY, LSE, SQUARES, MEAN, TOP1, LOGITS, JACOBIAN };
/* Backward's. */
enum {
    GRAD_LOG_PROBS = INPUTS,
    GRAD_ENTROPY,
    GRAD_LSE,
    PAIRS_WERE,
    ENTROPY_WAS,
    LOGITS_WERE,
    DLOGITS,
    DHIDDEN,
    DWEIGHT,
    DBIAS
};
enum { IGNORE_INDEX, TEMPERATURE, LOGIT_SCALE, SOFTCAP_AT, CHUNK_BYTES, KEPT_ROWS, FLOAT32_DWEIGHT, ATTRIBUTES };

#define PER_ROW(name, flags) BST_HEAD_FLOATS(name, flags, "T")
/* Of the last kept_rows rows. */
#define KEPT_LOGITS(name, flags) \
    BST_HEAD_ARGUMENT(name, flags, BST_FLOATS, "kV", BST_ROWS, BST_AS_HIDDEN, BST_PADDED(8))

static const bst_argument forward_arguments[] = {
    BST_HEAD,
    BST_HEAD_TARGET,
    [LOG_PROBS] = PER_ROW(log_probs, BST_OUT),
    [PAIRS] = BST_HEAD_FLOATS(pairs, BST_OUT | BST_OPTIONAL, "T2"),
    [ENTROPY] = PER_ROW(entropy, BST_OUT | BST_OPTIONAL),
    [LSE] = PER_ROW(lse, BST_OUT | BST_OPTIONAL),
    [SQUARES] = PER_ROW(log_sum_sq_probs, BST_OUT | BST_OPTIONAL),
    [MEAN] = PER_ROW(mean_logits, BST_OUT | BST_OPTIONAL),
    [TOP1] = BST_HEAD_ARGUMENT(is_top1, BST_OUT | BST_OPTIONAL, 1u << BST_I32, "T", BST_CONTIGUOUS),
    [LOGITS] = KEPT_LOGITS(logits, BST_OUT | BST_OPTIONAL),
    [JACOBIAN] = BST_HEAD_FLOATS(jacobian, BST_OUT | BST_OPTIONAL, "TH"),
    {NULL},
};

static bst_dtype dweight_type(const bst_view *v, const bst_attribute *attributes) {
    return attributes[FLOAT32_DWEIGHT].i == 2 ? BST_F32 : v[WEIGHT].dtype;
}

static bst_status check_dlogits(const char *op, const bst_view *v) {
    if (v[DLOGITS].data == v[LOGITS_WERE].data) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: dlogits is to be written elsewhere; it takes the place of logits", op);
}

static const bst_argument backward_arguments[] = {
    BST_HEAD,
    BST_HEAD_TARGET,
    [GRAD_LOG_PROBS] = PER_ROW(grad_log_probs, BST_IN | BST_OPTIONAL),
    [GRAD_ENTROPY] = PER_ROW(grad_entropy, BST_IN | BST_OPTIONAL),
    [GRAD_LSE] = PER_ROW(grad_lse, BST_IN | BST_OPTIONAL),
    [PAIRS_WERE] = BST_HEAD_FLOATS(pairs, BST_IN, "T2"),
    [ENTROPY_WAS] = PER_ROW(entropy, BST_IN | BST_OPTIONAL),
    [LOGITS_WERE] = KEPT_LOGITS(logits, BST_IN | BST_OPTIONAL),
    /* An output for the sake of the checks: the logits' own place. */
    [DLOGITS] = {"dlogits", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(LOGITS_WERE),
                 BST_TYPE_OF(LOGITS_WERE, "its own"), BST_WITH(LOGITS_WERE), BST_MAY_BE(1u << LOGITS_WERE),
                 .check = check_dlogits, BST_AT(logits)},
    [DHIDDEN] = BST_HEAD_GRADIENT(dhidden, HIDDEN, BST_AS_INPUTS(HIDDEN)),
    [DWEIGHT] =
        BST_HEAD_GRADIENT(dweight, WEIGHT, BST_TYPE_RULE(dweight_type, "as weight has it, or the one asked for")),
    [DBIAS] = BST_HEAD_GRADIENT(dbias, BIAS, BST_AS_INPUTS(BIAS)),
    {NULL},
};

static const char *const meanings[] = {BST_HEAD_MEANINGS, NULL};

static const bst_attribute_rule rules[] = {
    [IGNORE_INDEX] = BST_IGNORE_INDEX,
    [TEMPERATURE] = BST_TEMPERATURE,
    [LOGIT_SCALE] = BST_LOGIT_SCALE(logit_scale),
    [SOFTCAP_AT] = BST_SOFTCAP(softcap),
    [CHUNK_BYTES] = BST_CHUNK_BYTES,
    [KEPT_ROWS] = {"kept_rows", 'i', 0, (double)INT64_MAX, "0 or a positive number"},
    [FLOAT32_DWEIGHT] = BST_FLOAT32_DWEIGHT,
    {NULL},
};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *w = &v[WEIGHT];
    int64_t rows = v[HIDDEN].size[0], kept = attributes[KEPT_ROWS].i;
    BST_TRY(bst__head_check_weight(op, w));
    if (kept > rows)
        return bst__error(BST_INVALID,
                          "%s: logits has %" PRId64 " rows; no more than the %" PRId64 " of hidden are needed", op,
                          kept, rows);
    if (op == backward_op && bst__given(&v[GRAD_ENTROPY]) && !bst__given(&v[ENTROPY_WAS]))
        return bst__error(BST_INVALID, "%s: entropy is NULL; it is needed where grad_entropy is given", op);
    return bst__cross_entropy_check_targets(op, w->device, v[TARGET].data, rows, w->size[0],
                                            attributes[IGNORE_INDEX].i);
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

linear_logprobs_rows bst__linear_logprobs_part(const linear_logprobs_rows *call, int64_t first, int64_t rows) {
    linear_logprobs_rows c = *call;
    linear_logprobs_args *a = &c.args;
    c.rows = rows;
    c.target += first;
    if (c.pairs) c.pairs += 2 * first;
    float **made[] = {&a->log_probs, &a->entropy, &a->lse, &a->log_sum_sq_probs, &a->mean_logits};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (*made[i]) *made[i] += first;
    if (a->is_top1) a->is_top1 += first;
    const float **read[] = {&a->grad_log_probs, &a->grad_entropy, &a->grad_lse, &a->entropy_was};
    for (size_t i = 0; i < sizeof read / sizeof *read; i++)
        if (*read[i]) *read[i] += first;
    return c;
}

static bst_status run_rows(const bst_head *h, void *context, int64_t first, int64_t rows, void *logits,
                           int64_t stride) {
    linear_logprobs_rows c = bst__linear_logprobs_part(context, first, rows);
    c.logits = logits, c.stride = stride;
    if (c.device.device_type == kDLCUDA) return bst__linear_logprobs_rows_cuda(h->exec, h->op, &c);
    return BST_CPU_RUN(h->exec, rows, c.vocabulary, bst__linear_logprobs_rows_cpu, &c);
}

/* Forward's pass, and behind it the one that leaves in the logits' place what the jacobian is multiplied from. */
static bst_status run_rows_twice(const bst_head *h, void *context, int64_t first, int64_t rows, void *logits,
                                 int64_t stride) {
    const linear_logprobs_rows *c = context;
    linear_logprobs_rows back = {.device = c->device,
                                 .dtype = c->dtype,
                                 .vocabulary = c->vocabulary,
                                 .target = c->target,
                                 .z = c->z,
                                 .pairs = c->pairs,
                                 .backward = true,
                                 .args = {.without = 1}};
    BST_TRY(run_rows(h, context, first, rows, logits, stride));
    return run_rows(h, &back, first, rows, logits, stride);
}

static linear_logprobs_rows rows_of(const bst_head *h, const bst_view *v, const bst_attribute *attributes) {
    double t = attributes[TEMPERATURE].d;
    return (linear_logprobs_rows){.device = h->device,
                                  .dtype = h->dtype,
                                  .vocabulary = h->vocabulary,
                                  .target = v[TARGET].data,
                                  .z = {.ignore_index = attributes[IGNORE_INDEX].i,
                                        .softcap = attributes[SOFTCAP_AT].d / t,
                                        .logit_scale = attributes[LOGIT_SCALE].d / t}};
}

static bst_status check_jacobian(const char *op, const bst_view *v) {
    if (!bst__given(&v[JACOBIAN])) return BST_OK;
    if (!bst__given(&v[PAIRS]))
        return bst__error(BST_INVALID, "%s: pairs is NULL; it is needed where jacobian is given", op);
    if (!bst__given(&v[LOGITS])) return BST_OK;
    return bst__error(BST_INVALID, "%s: logits and jacobian are both given; keep the one or make the other", op);
}

/* Of a chunk's logits beside the jacobian; 0: the default. */
static int64_t budget_beside(const bst_view *jacobian, int64_t budget) {
    int64_t beside = jacobian->count * (int64_t)sizeof(float);
    return !budget ? 0 : budget > beside ? budget - beside : 1;
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    BST_TRY(check_jacobian(op, v));
    bst_head h = {.exec = exec, .op = op, .bias = v[BIAS], .dhidden = v[JACOBIAN]};
    bst_view hidden = v[HIDDEN];
    bool makes = bst__given(&v[JACOBIAN]), done = false;
    BST_TRY(bst__head_begin(&h, &hidden, &v[WEIGHT]));
    int64_t budget = attributes[CHUNK_BYTES].i, without = h.rows - v[LOGITS].size[0];
    if (makes) budget = budget_beside(&v[JACOBIAN], budget);
    linear_logprobs_rows c = rows_of(&h, v, attributes);
    linear_logprobs_args *a = &c.args;
    a->log_probs = v[LOG_PROBS].data, c.pairs = v[PAIRS].data, a->entropy = v[ENTROPY].data, a->lse = v[LSE].data;
    a->log_sum_sq_probs = v[SQUARES].data, a->mean_logits = v[MEAN].data, a->is_top1 = v[TOP1].data;
    if (h.device.device_type == kDLCUDA && !makes && !bst__given(&v[BIAS])) {
        linear_logprobs_rows first = bst__linear_logprobs_part(&c, 0, without);
        BST_TRY(bst__linear_logprobs_tiles_cuda(exec, op, &h.hidden, &h.weight, &first, budget, &done));
    }
    if (done) { /* what is left to do are the rows whose logits are kept */
        if (without == h.rows) return BST_OK;
        hidden.data = bst_at(hidden.data, without * h.hidden.stride[0], h.dtype), hidden.size[0] -= without;
        c = bst__linear_logprobs_part(&c, without, hidden.size[0]);
        BST_TRY(bst__head_begin(&h, &hidden, &v[WEIGHT]));
    }
    BST_TRY(bst__head_choose_chunks(&h, &v[LOGITS], "logits", budget));
    return bst__head_run(&h, false, makes ? run_rows_twice : run_rows, &c, makes);
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    bst_head h = BST_HEAD_OF(exec, op, v, DHIDDEN, DWEIGHT, DBIAS);
    h.exact = attributes[FLOAT32_DWEIGHT].i || v[HIDDEN].device.device_type == kDLCPU;
    BST_TRY(bst__head_begin(&h, &v[HIDDEN], &v[WEIGHT]));
    BST_TRY(bst__head_choose_chunks(&h, &v[DLOGITS], "logits", attributes[CHUNK_BYTES].i));
    linear_logprobs_rows c = rows_of(&h, v, attributes);
    linear_logprobs_args *a = &c.args;
    c.backward = true, c.pairs = v[PAIRS_WERE].data, a->entropy_was = v[ENTROPY_WAS].data;
    a->grad_log_probs = v[GRAD_LOG_PROBS].data, a->grad_entropy = v[GRAD_ENTROPY].data, a->grad_lse = v[GRAD_LSE].data;
    return bst__head_run(&h, bst__given(&v[LOGITS_WERE]), run_rows, &c, true);
}

#define OPTIONS "ignore_index temperature logit_scale softcap chunk_bytes kept_rows"
static const bst_function forward = {
    .name = forward_op,
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_forward,
    BST_GIVEN,
    BST_TORCH("linear_logprobs_forward: hidden weight target bias " OPTIONS
              " -> log_probs pairs? entropy? lse? log_sum_sq_probs? mean_logits? is_top1? logits? jacobian?"),
};

static const bst_function backward = {
    .name = backward_op,
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH("linear_logprobs_backward: grad_log_probs grad_entropy grad_lse hidden weight target bias pairs "
              "entropy " OPTIONS " float32_dweight -> dhidden? dweight? dbias?",
              "linear_logprobs_backward_kept: grad_log_probs grad_entropy grad_lse hidden weight target bias pairs "
              "entropy logits! " OPTIONS " float32_dweight -> dlogits=logits dhidden? dweight? dbias?"),
};

const bst_function *const bst__linear_logprobs[] = {&forward, &backward, NULL};

static bst_status call(const bst_function *f, const bst_exec *exec, const bst_linear_logprobs_tensors *tensors,
                       const bst_linear_logprobs_options *options) {
    bst_linear_logprobs_tensors t;
    bst_attribute attributes[ATTRIBUTES] = {{0}};
    BST_TRY(bst__options(f->name, "tensors", tensors, &t, sizeof t));
    attributes[KEPT_ROWS].i = t.logits && t.logits->ndim ? t.logits->shape[0] : 0;
    return bst__call_struct(f, exec, &t, options, attributes);
}

bst_status bst_linear_logprobs_forward(const bst_exec *exec, const bst_linear_logprobs_tensors *tensors,
                                       const bst_linear_logprobs_options *options) {
    return call(&forward, exec, tensors, options);
}

bst_status bst_linear_logprobs_backward(const bst_exec *exec, const bst_linear_logprobs_tensors *tensors,
                                        const bst_linear_logprobs_options *options) {
    return call(&backward, exec, tensors, options);
}
