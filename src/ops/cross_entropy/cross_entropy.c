/* cross_entropy.c - softmax cross-entropy: descriptions, and what runs on the tensors' device. */
#include <assert.h>
#include <inttypes.h>

#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"

typedef bst_cross_entropy_options given_options;
static const char forward_op[] = "cross_entropy_forward", backward_op[] = "cross_entropy_backward";

/* ---- options and targets ----------------------------------------------------------------------------------------- */

bst_loss bst__loss_of(const bst_attribute *attributes) {
    return (bst_loss){.ignore_index = attributes[BST_LOSS_IGNORE_INDEX].i,
                      .reduction = (bst_reduction)attributes[BST_LOSS_REDUCTION].i,
                      .label_smoothing = attributes[BST_LOSS_SMOOTHING].d,
                      .softcap = attributes[BST_LOSS_SOFTCAP].d,
                      .logit_scale = attributes[BST_LOSS_SCALE].d,
                      .lse_square_scale = attributes[BST_LOSS_SQUARE].d};
}

bst_status bst__cross_entropy_check_targets(const char *op, DLDevice device, const int64_t *target, int64_t rows,
                                            int64_t vocabulary, int64_t ignore_index) {
    if (device.device_type != kDLCPU) return bst__cuda_need_rows(op, rows, 1);
    for (int64_t i = 0; i < rows; i++) {
        if ((target[i] >= 0 && target[i] < vocabulary) || target[i] == ignore_index) continue;
        return bst__error(BST_INVALID,
                          "%s: target[%" PRId64 "] is %" PRId64 "; 0 to %" PRId64 ", or ignore_index (%" PRId64
                          "), is needed",
                          op, i, target[i], vocabulary - 1, ignore_index);
    }
    return BST_OK;
}

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Backward reads the gradient of the loss, and the sums, in the places of forward's outputs. lse may be the two numbers
 * that it is made of, for each row (PAIRS). */
enum { LOGITS, TARGET, CLASS_WEIGHT, NUM_ITEMS, LOSS, PAIRS, LSE, DLOGITS, COUNT };

static bst_status check_classes(const char *op, const bst_view *v) {
    int64_t classes = v[LOGITS].rows.columns;
    if (classes >= 1 && classes <= BST_CROSS_ENTROPY_MOST_CLASSES) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: logits has rows of %" PRId64 " elements; 1 to %d are supported", op,
                      classes, BST_CROSS_ENTROPY_MOST_CLASSES);
}

/* dlogits is logits itself, or contiguous and apart from it. */
#define ARGUMENT(...) {__VA_ARGS__}
#define ARGUMENTS(loss, direction, dlogits_flags)                                                                  \
    [LOGITS] = ARGUMENT("logits", BST_IN, BST_FLOATS, "*V", BST_ROWS, .check = check_classes),                     \
    [TARGET] = ARGUMENT("target", BST_IN, 1u << BST_I64, "#", BST_CONTIGUOUS),                                     \
    [CLASS_WEIGHT] = BST_LOSS_FLOATS("class_weight", BST_IN | BST_OPTIONAL, "V"),                                  \
    [NUM_ITEMS] = BST_LOSS_FLOATS("num_items", BST_IN | BST_OPTIONAL, "."),                                        \
    [LOSS] = BST_LOSS_FLOATS(loss, direction, "#", BST_REDUCED(BST_LOSS_REDUCTION)),                               \
    [PAIRS] = BST_LOSS_FLOATS("lse", (direction) | BST_OPTIONAL, "#2"),                                            \
    [LSE] = BST_LOSS_FLOATS("lse", (direction) | BST_OPTIONAL, "#"),                                               \
    [DLOGITS] = ARGUMENT("dlogits", BST_OUT | (dlogits_flags), BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(LOGITS), \
                         BST_TYPE_OF(LOGITS, "the type of logits"), BST_MAY_BE(1u << LOGITS))

static const bst_argument forward_arguments[] = {ARGUMENTS("loss", BST_OUT, BST_OPTIONAL), {NULL}},
                          backward_arguments[] = {ARGUMENTS("grad_loss", BST_IN, 0), {NULL}};

static const bst_attribute_rule loss_rules[] = {BST_LOSS_ATTRIBUTES, {NULL}};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_rows *r = &v[LOGITS].rows;
    return bst__cross_entropy_check_targets(op, v[LOGITS].device, v[TARGET].data, r->rows, r->columns,
                                            attributes[BST_LOSS_IGNORE_INDEX].i);
}

static bst_status check_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    if (!bst__given(&v[PAIRS]) && !bst__given(&v[LSE]))
        return bst__error(BST_INVALID, "%s: lse is NULL; a tensor is needed", op);
    return check(op, v, attributes);
}

/* ---- the parts, for other operators too -------------------------------------------------------------------------- */

bst_status bst__cross_entropy_rows(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *call) {
    if (!call->rows) return BST_OK;
    if (call->device.device_type == kDLCUDA) return bst__cross_entropy_rows_cuda(exec, op, call);
    return BST_CPU_RUN(exec, call->rows, call->vocabulary, bst__cross_entropy_rows_cpu, (void *)(uintptr_t)call);
}

static bst_cross_entropy_divisors divisors_cpu(const bst_cross_entropy_rows_call *c, const float *num_items,
                                               const float *upstream) {
    const float *w = c->class_weight;
    double weights = 0, count = 0, all = w ? 0 : (double)c->vocabulary;
    for (int64_t i = 0; i < c->rows; i++) {
        int64_t t = c->target[i];
        if (t == c->options->ignore_index || t < 0 || t >= c->vocabulary) continue;
        count += 1;
        weights += w ? (double)w[t] : 1;
    }
    for (int64_t i = 0; w && i < c->vocabulary; i++) all += (double)w[i];
    bst_cross_entropy_divisors d = {1, 1, (float)all, 0};
    if (num_items)
        d.inverse_weight_sum = d.inverse_count = 1.0f / *num_items;
    else if (c->options->reduction == BST_REDUCTION_MEAN)
        d.inverse_weight_sum = (float)(1 / weights), d.inverse_count = (float)(1 / count);
    /* Of nothing, the loss is NaN and the gradient zero. */
    d.gradient = isfinite(d.inverse_weight_sum) ? d.inverse_weight_sum * (upstream ? *upstream : 1) : 0;
    return d;
}

bst_status bst__cross_entropy_begin(const bst_exec *exec, const char *op, bst_cross_entropy_rows_call *c,
                                    const float *num_items, const float *upstream, int64_t chunks, size_t more,
                                    void **memory) {
    bool cuda = c->device.device_type == kDLCUDA;
    if (c->options->reduction == BST_REDUCTION_NONE) num_items = NULL;
    /* On CUDA the tickets are cleared by the kernel that computes the divisors. */
    bool divides = c->options->reduction == BST_REDUCTION_MEAN || num_items ||
                   (c->class_weight && c->options->label_smoothing > 0) ||
                   (cuda && c->mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT);
    size_t bytes = divides ? sizeof *c->divisors + (size_t)chunks * sizeof *c->tickets : 0;
    BST_TRY(bst__allocate(exec, op, c->device, bytes + more, memory));
    if (!divides) return BST_OK;
    bst_cross_entropy_divisors *divisors = *memory;
    c->divisors = divisors;
    c->tickets = (uint32_t *)(void *)(divisors + 1);
    if (cuda) return bst__cross_entropy_divisors_cuda(exec, op, c, num_items, upstream, chunks, divisors);
    *divisors = divisors_cpu(c, num_items, upstream);
    return BST_OK;
}

bst_status bst__cross_entropy_reduce(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *c,
                                     float *loss) {
    if (c->device.device_type == kDLCUDA) return bst__cross_entropy_reduce_cuda(exec, op, c, loss);
    double sum = 0;
    for (int64_t i = 0; i < c->rows; i++) sum += (double)c->loss_rows[i];
    /* Nothing left to divide: 0 * (1 / 0) is NaN, as torch has it. */
    *loss = (float)(sum == 0 && c->divisors ? sum * (double)c->divisors->inverse_weight_sum : sum);
    return BST_OK;
}

/* ---- the operators ----------------------------------------------------------------------------------------------- */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    bst_loss options = bst__loss_of(attributes);
    const bst_rows *r = &v[LOGITS].rows;
    bool backward = op == backward_op, none = options.reduction == BST_REDUCTION_NONE, reduce = !backward && !none;
    if (!backward && none && bst__given(&v[DLOGITS]))
        return bst__error(BST_INVALID, "%s: dlogits is wanted with reduction none; mean or sum is needed", op);
    bst_cross_entropy_rows_call c = {.device = v[LOGITS].device, .dtype = v[LOGITS].dtype, .options = &options};
    c.mode = backward                  ? BST_CROSS_ENTROPY_GRADIENT
             : bst__given(&v[DLOGITS]) ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT
                                       : BST_CROSS_ENTROPY_LOSS;
    c.rows = r->rows, c.vocabulary = r->columns;
    c.logits = v[LOGITS].data, c.stride = r->inner_stride;
    c.inner = r->inner < r->rows ? r->inner : 0, c.outer_stride = r->outer_stride;
    c.target = v[TARGET].data, c.class_weight = v[CLASS_WEIGHT].data;
    c.upstream = backward ? v[LOSS].data : NULL, c.upstream_stride = none;
    c.loss_rows = backward ? NULL : v[LOSS].data, c.lse = v[LSE].data, c.lse_pairs = v[PAIRS].data;
    c.dlogits = v[DLOGITS].data, c.dlogits_stride = r->columns;
    size_t loss_bytes = reduce ? (size_t)c.rows * sizeof(float) : 0;
    void *memory;
    bst_status status = bst__cross_entropy_begin(exec, op, &c, v[NUM_ITEMS].data, NULL, 1, loss_bytes, &memory);
    if (reduce) c.loss_rows = c.tickets ? (float *)(void *)(c.tickets + 1) : memory;
    if (status == BST_OK) status = bst__cross_entropy_rows(exec, op, &c);
    if (status == BST_OK && reduce) status = bst__cross_entropy_reduce(exec, op, &c, v[LOSS].data);
    bst__release(exec, c.device, memory);
    return status;
}

#define OPTIONS "ignore_index reduction label_smoothing softcap logit_scale lse_square_scale"
static const bst_function forward = {
    .name = forward_op,
    .arguments = forward_arguments,
    .attributes = loss_rules,
    .check = check,
    .run = run,
    BST_GIVEN_OPTIONS,
    BST_TORCH("cross_entropy_forward: logits target class_weight num_items " OPTIONS " -> loss lse",
              "cross_entropy_forward_inplace: logits target class_weight num_items " OPTIONS " -> loss dlogits=logits"),
};

static const bst_function backward = {
    .name = backward_op,
    .arguments = backward_arguments,
    .attributes = loss_rules,
    .check = check_backward,
    .run = run,
    BST_GIVEN_OPTIONS,
    BST_TORCH("cross_entropy_backward: grad_loss logits target class_weight num_items lse! " OPTIONS " -> dlogits"),
};

static bst_status call(const bst_function *function, const bst_exec *exec, const bst_cross_entropy_options *options,
                       const DLTensor *tensors[COUNT]) {
    const DLTensor *lse = tensors[LSE];
    if (lse && lse->ndim == 2 && lse->shape && lse->shape[1] == 2) tensors[PAIRS] = lse, tensors[LSE] = NULL;
    return bst__call(function, exec, tensors, options, NULL);
}

bst_status bst_cross_entropy_forward(const bst_exec *exec, const DLTensor *logits, const DLTensor *target,
                                     const DLTensor *class_weight, const DLTensor *num_items,
                                     const bst_cross_entropy_options *options, DLTensor *loss, DLTensor *lse,
                                     DLTensor *dlogits) {
    return call(&forward, exec, options,
                (const DLTensor *[COUNT]){logits, target, class_weight, num_items, loss, NULL, lse, dlogits});
}

bst_status bst_cross_entropy_backward(const bst_exec *exec, const DLTensor *grad_loss, const DLTensor *logits,
                                      const DLTensor *target, const DLTensor *class_weight, const DLTensor *num_items,
                                      const DLTensor *lse, const bst_cross_entropy_options *options,
                                      DLTensor *dlogits) {
    return call(&backward, exec, options,
                (const DLTensor *[COUNT]){logits, target, class_weight, num_items, grad_loss, NULL, lse, dlogits});
}

/* ---- scale ------------------------------------------------------------------------------------------------------- */

enum { TENSOR, FACTOR, SCALED };

static bst_status run_scale(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *t = &v[SCALED];
    if (!t->count) return BST_OK;
    if (t->device.device_type == kDLCUDA) return bst__scale_cuda(exec, op, t, v[FACTOR].data);
    scale_cpu context = {*t, *(const float *)v[FACTOR].data};
    if (context.scale != 1) BST_CPU_RUN(exec, t->count, 1, bst__scale_cpu, &context);
    return BST_OK;
}

/* It is an output for the sake of the checks, and has no place of its own. */
static bst_status check_scaled(const char *op, const bst_view *v) {
    if (v[SCALED].data == v[TENSOR].data) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: tensor is to be written elsewhere; it is scaled where it lies", op);
}

static const bst_argument scale_arguments[] = {
    [TENSOR] = {"tensor", BST_IN, BST_FLOATS, "*N", BST_CONTIGUOUS},
    [FACTOR] = BST_LOSS_FLOATS("scale", BST_IN, "."),
    [SCALED] = {"tensor", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(TENSOR), BST_TYPE_OF(TENSOR, "its own"),
                BST_MAY_BE(1u << TENSOR), .check = check_scaled},
    {NULL},
};

static const bst_function scale = {
    .name = "scale",
    .arguments = scale_arguments,
    .run = run_scale,
    BST_TORCH("scale_: tensor scale -> tensor=tensor"),
};

bst_status bst_scale(const bst_exec *exec, DLTensor *tensor, const DLTensor *factor) {
    return bst__run(&scale, exec, (const DLTensor *[]){[TENSOR] = tensor, [FACTOR] = factor, [SCALED] = tensor}, NULL);
}

const bst_function *const bst__cross_entropy[] = {&forward, &backward, &scale, NULL};
