/* linear_cross_entropy.c - the output head and its loss, a chunk of rows at a time.
 *
 * A chunk is: logits by the head (linear_cross_entropy_head.h), their cross-entropy in place (src/ops/cross_entropy),
 * and the head's gradients from what that leaves. Nothing waits for the device. */
#include <assert.h>
#include <inttypes.h>

#include "core/options.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_head.h"

typedef bst_linear_cross_entropy_tensors given_tensors;
typedef bst_cross_entropy_options given_options;
static const char forward_op[] = "linear_cross_entropy_forward", backward_op[] = "linear_cross_entropy_backward";

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Backward reads the gradient of the loss, lse and dlogits in the places of forward's outputs. */
enum { HIDDEN, WEIGHT, TARGET, BIAS, CLASS_WEIGHT, NUM_ITEMS, LOSS, PAIRS, DLOGITS, DHIDDEN, DWEIGHT, DBIAS };
enum { CHUNK_BYTES = BST_LOSS_COUNT, FLOAT32_DWEIGHT, ATTRIBUTES };

#define GRADIENT(name, of) BST_HEAD_GRADIENT(name, of, BST_AS_INPUTS(of))
#define WIDE               BST_TYPE_RULE(dweight_type, "as weight has it, or float32")
#define ARGUMENTS(loss, direction, lse_flags)                                                                          \
    [CLASS_WEIGHT] = BST_HEAD_FLOATS(class_weight, BST_IN | BST_OPTIONAL, "V"),                                        \
    [NUM_ITEMS] = BST_HEAD_FLOATS(num_items, BST_IN | BST_OPTIONAL, "."),                                              \
    [LOSS] = BST_HEAD_FLOATS(loss, direction, "T", BST_REDUCED(BST_LOSS_REDUCTION)),                                   \
    [PAIRS] = BST_HEAD_FLOATS(lse, lse_flags, "T2"), [DLOGITS] = BST_HEAD_LOGITS(dlogits, (direction) | BST_OPTIONAL), \
    [DHIDDEN] = GRADIENT(dhidden, HIDDEN), [DWEIGHT] = BST_HEAD_GRADIENT(dweight, WEIGHT, WIDE),                       \
    [DBIAS] = GRADIENT(dbias, BIAS)

static bst_dtype dweight_type(const bst_view *v, const bst_attribute *attributes) {
    return attributes[FLOAT32_DWEIGHT].i ? BST_F32 : v[WEIGHT].dtype;
}

static const bst_argument forward_arguments[] = {BST_HEAD,
                                                 BST_HEAD_TARGET,
                                                 ARGUMENTS(loss, BST_OUT, BST_OUT | BST_OPTIONAL),
                                                 {NULL}},
                          backward_arguments[] = {
                              BST_HEAD, BST_HEAD_TARGET, ARGUMENTS(grad_loss, BST_IN, BST_IN), {NULL}};

static const char *const meanings[] = {BST_HEAD_MEANINGS, NULL};

static const bst_attribute_rule rules[] = {
    BST_LOSS_ATTRIBUTES,
    [CHUNK_BYTES] = {"chunk_bytes", 'i', BST_CHUNK_BOUNDS},
    [FLOAT32_DWEIGHT] = {"float32_dweight", 'b'},
    {NULL},
};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *w = &v[WEIGHT];
    BST_TRY(bst__head_check_weight(op, w));
    return bst__cross_entropy_check_targets(op, w->device, v[TARGET].data, v[HIDDEN].size[0], w->size[0],
                                            attributes[BST_LOSS_IGNORE_INDEX].i);
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

/* The loss of rows [first, first + rows), and the gradient of their logits in these' place. */
static bst_status lose_rows(const bst_head *h, void *context, int64_t first, int64_t rows, void *logits,
                            int64_t stride) {
    bst_cross_entropy_rows_call c = *(const bst_cross_entropy_rows_call *)context;
    c.rows = rows;
    c.logits = logits;
    c.dlogits = c.mode == BST_CROSS_ENTROPY_LOSS ? NULL : logits;
    c.stride = c.dlogits_stride = stride;
    c.target += first;
    if (c.tickets) c.tickets += first / h->chunk_rows;
    if (c.upstream) c.upstream += first;
    if (c.loss_rows) c.loss_rows += first;
    if (c.lse_pairs) c.lse_pairs += 2 * first;
    return bst__cross_entropy_rows(h->exec, h->op, &c);
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    bst_loss options = bst__loss_of(attributes);
    bool backward = op == backward_op, none = options.reduction == BST_REDUCTION_NONE, reduce = !backward && !none;
    bool save = bst__given(&v[DLOGITS]);
    bool now = !backward && (bst__given(&v[DHIDDEN]) || bst__given(&v[DWEIGHT]) || bst__given(&v[DBIAS]));
    const float *upstream = backward ? v[LOSS].data : NULL;
    bst_head h = BST_HEAD_OF(exec, op, v, DHIDDEN, DWEIGHT, DBIAS);
    BST_TRY(bst__head_begin(&h, &v[HIDDEN], &v[WEIGHT]));
    BST_TRY(bst__head_choose_chunks(&h, &v[DLOGITS], "dlogits", attributes[CHUNK_BYTES].i));
    if (save && none)
        return bst__error(BST_INVALID, "%s: dlogits cannot be kept for reduction none; mean or sum is needed", op);
    if (save && now)
        return bst__error(BST_INVALID,
                          "%s: dlogits and other gradients are both given; keep the one or make the others", op);
    if (now && none) return bst__error(BST_INVALID, "%s: reduction none has no gradients before the backward pass", op);
    bst_cross_entropy_rows_call c = {.device = h.device, .dtype = h.dtype, .options = &options, .undivided = !none};
    c.mode = backward      ? BST_CROSS_ENTROPY_GRADIENT
             : now || save ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT
                           : BST_CROSS_ENTROPY_LOSS;
    c.rows = h.rows, c.vocabulary = h.vocabulary;
    c.target = v[TARGET].data, c.class_weight = v[CLASS_WEIGHT].data;
    c.upstream = none ? upstream : NULL, c.upstream_stride = 1;
    c.loss_rows = backward ? NULL : v[LOSS].data, c.lse_pairs = v[PAIRS].data;
    void *divisors, *loss_rows = NULL;
    bst_status status =
        bst__cross_entropy_begin(exec, op, &c, v[NUM_ITEMS].data, none ? NULL : upstream, h.chunks, 0, &divisors);
    if (!none) h.alpha = c.divisors ? &c.divisors->gradient : upstream;
    if (status == BST_OK && reduce)
        status = bst__allocate(exec, op, c.device, (size_t)c.rows * sizeof(float), &loss_rows);
    if (reduce) c.loss_rows = loss_rows;
    bool made = backward && save; /* forward has made the logits' gradients */
    if (status == BST_OK)
        status = bst__head_run(&h, made, made ? NULL : lose_rows, &c, c.mode != BST_CROSS_ENTROPY_LOSS);
    if (status == BST_OK && reduce) status = bst__cross_entropy_reduce(exec, op, &c, v[LOSS].data);
    bst__release(exec, c.device, loss_rows);
    bst__release(exec, c.device, divisors);
    return status;
}

#define OPTIONS \
    "ignore_index reduction label_smoothing softcap logit_scale lse_square_scale chunk_bytes float32_dweight"
static const bst_function forward = {
    .name = forward_op,
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_GIVEN,
    BST_TORCH("linear_cross_entropy_forward: hidden weight target bias class_weight num_items " OPTIONS
              " -> loss lse dlogits? dhidden? dweight? dbias?"),
};

static const bst_function backward = {
    .name = backward_op,
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_GIVEN,
    BST_TORCH("linear_cross_entropy_backward: grad_loss hidden weight target bias class_weight num_items lse "
              "dlogits " OPTIONS " -> dhidden? dweight? dbias?"),
};

const bst_function *const bst__linear_cross_entropy[] = {&forward, &backward, NULL};

static bst_status call(const bst_function *function, const bst_exec *exec, const given_tensors *tensors,
                       const given_options *options, int64_t chunk_bytes) {
    given_tensors t;
    BST_TRY(bst__options(function->name, "tensors", tensors, &t, sizeof t));
    bool wide = t.dweight && t.dweight->dtype.code == kDLFloat && t.dweight->dtype.bits == 32;
    bst_attribute attributes[ATTRIBUTES] = {[CHUNK_BYTES].i = chunk_bytes, [FLOAT32_DWEIGHT].i = wide};
    return bst__call_struct(function, exec, &t, options, attributes);
}

bst_status bst_linear_cross_entropy_forward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                            const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&forward, exec, tensors, options, chunk_bytes);
}

bst_status bst_linear_cross_entropy_backward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                             const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&backward, exec, tensors, options, chunk_bytes);
}
