/* rope.c - rotary position embedding, with and without a norm of each head before it: its descriptions, then what runs
 * on the tensors' device. Without a norm, forward and backward are one computation with other factors. */
#include <inttypes.h>

#include "core/describe.h"
#include "core/options.h"
#include "ops/rope/rope.h"

typedef bst_rope_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Places of tensors: of all three functions, of two, of each. Backward without a norm reads the gradients of forward's
 * outputs in the places of q and k. */
enum { Q, K, COS, SIN, DQ_TURNED, DK_TURNED, Q_WEIGHT = DQ_TURNED, K_WEIGHT, Q_OUT, K_OUT };
enum { DQ_OUT = Q_OUT, DK_OUT, DQ, DK, DQ_WEIGHT, DK_WEIGHT, PLACES };
enum { PAIRS, HALF_TABLES, KEEP_TYPE, EPS, CASTING, Q_TOKENS_FIRST, K_TOKENS_FIRST, DTYPE, ATTRIBUTES };

static const bst_attribute_rule rules[] = {
    [PAIRS] = BST_OPTION('i', layout, BST_ROPE_HALVES, BST_ROPE_INTERLEAVED_TO_HALVES,
                         "0 (halves), 1 (interleaved) or 2 (interleaved to halves)"),
    [HALF_TABLES] = BST_OPTION('b', half_tables),
    [KEEP_TYPE] = BST_OPTION('b', keep_type),
    [EPS] = BST_OPTION('d', eps, BST_EPS_BOUNDS, BST_USUAL(1e-6)),
    [CASTING] = BST_OPTION('i', casting, BST_CASTING_LLAMA, BST_CASTING_NONE, "0 (llama), 1 (gemma) or 2 (none)"),
    [Q_TOKENS_FIRST] = {"q_tokens_first", 'b'},
    [K_TOKENS_FIRST] = {"k_tokens_first", 'b'},
    [DTYPE] = {"dtype", 'i', BST_F32, BST_F16, "0 (float32), 1 (bfloat16) or 2 (float16)"},
    {NULL},
};

static const char *const meanings[] = {"Bthe batch of q", "Sthe positions of q", "Dthe size of a head", "Rthat of cos",
                                       NULL};

static bst_status check_dim(const char *op, const bst_view *v) {
    if (v[Q].size[3] <= ROPE_MOST_DIM) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: q has heads of %" PRId64 " elements; at most %d are supported", op,
                      v[Q].size[3], ROPE_MOST_DIM);
}

static bst_status check_rotary(const char *op, const bst_view *v, bool right, bool half) {
    if (right) return BST_OK;
    return bst__error(BST_INVALID, "%s: cos has shape %s; %sdimension 2 must be %s and at most %" PRId64 ", %s", op,
                      bst__shape_text(&v[COS]), half ? "with half_tables " : "",
                      half ? "at least 1" : "even, at least 2", v[Q].size[3] / (half ? 2 : 1),
                      half ? "half the size of a head" : "the size of a head");
}

/* What holds of tables of either width; then the rest. */
static bst_status check_table(const char *op, const bst_view *v) {
    return check_rotary(op, v, v[COS].size[2] >= 1 && v[COS].size[2] <= v[Q].size[3], false);
}

static bst_status check_inputs(const char *op, const bst_view *v, const bst_attribute *attributes) {
    int64_t size = v[COS].size[2];
    bool half = attributes[HALF_TABLES].i;
    return check_rotary(op, v, half ? 2 * size <= v[Q].size[3] : size % 2 == 0, half);
}

static bst_status check_weights(const char *op, const bst_view *v, const bst_attribute *attributes) {
    bool given = bst__given(&v[K_WEIGHT]);
    BST_TRY(check_inputs(op, v, attributes));
    if (given == (bst__given(&v[Q_WEIGHT]) && bst__given(&v[K]))) return BST_OK;
    return bst__error(BST_INVALID, "%s: k_weight is %s; it goes with q_weight and k", op, given ? "given" : "NULL");
}

/* The gradients of a call without a norm are those of another function. */
static bst_status check_normed(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(check_weights(op, v, attributes));
    if (bst__given(&v[Q_WEIGHT])) return BST_OK;
    return bst__error(BST_INVALID, "%s: q_weight is NULL; with q the norm's weight is needed", op);
}

static bst_dtype promoted(bst_dtype a, bst_dtype b) { return a == b ? a : BST_F32; }

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    bool of_weight = attributes[CASTING].i == BST_CASTING_LLAMA && bst__given(&v[Q_WEIGHT]);
    if (attributes[KEEP_TYPE].i) return v[Q].dtype;
    return promoted(of_weight ? promoted(v[Q].dtype, v[Q_WEIGHT].dtype) : v[Q].dtype, v[COS].dtype);
}

/* Without a norm the backward pass has no q, and the type of its gradient does not tell q's. */
static bst_dtype as_told(const bst_view *v, const bst_attribute *attributes) {
    (void)v;
    return (bst_dtype)attributes[DTYPE].i;
}

static bst_status check_turned(const char *op, const bst_view *v, const bst_attribute *attributes) {
    bst_dtype q = as_told(v, attributes), y = attributes[KEEP_TYPE].i ? q : promoted(q, v[COS].dtype);
    BST_TRY(check_inputs(op, v, attributes));
    return bst__need_dtype(op, "dq_out", &v[Q], y, "the type of the forward result");
}

#define HEADS(name, flags, shape, ...)      {name, flags, BST_FLOATS, shape, BST_LAST, __VA_ARGS__}
#define HEADS_LIKE(name, flags, heads, ...) HEADS(name, flags, NULL, BST_LIKE(heads), __VA_ARGS__)
#define WEIGHT(name, flags, shape, ...) {name, (flags) | BST_OPTIONAL, BST_FLOATS, shape, BST_CONTIGUOUS, __VA_ARGS__}
#define INPUTS(q, k)                                                          \
    HEADS(q, BST_IN, "BHSD", .check = check_dim),                             \
        HEADS(k, BST_IN | BST_OPTIONAL, "BKSD", BST_TYPE_OF(Q, "as for " q)), \
        HEADS("cos", BST_IN, "~BSR", .check = check_table),                   \
        HEADS("sin", BST_IN, "~BSR", BST_TYPE_OF(COS, "the type of cos"))
#define WEIGHTS \
    WEIGHT("q_weight", BST_IN, "D"), WEIGHT("k_weight", BST_IN, "D", BST_TYPE_OF(Q_WEIGHT, "as for q_weight"))
/* A result; without a norm it may be its own input, but share no memory with anything else. */
#define Y_TYPE               BST_TYPE_RULE(y_type, "the promoted type of the inputs, or with keep_type that of q")
#define OUT_OF(heads, order) BST_MAY_BE(1u << (heads)), BST_EXCHANGED(order)
#define DX(name, heads, order) \
    HEADS_LIKE(name, BST_OUT | BST_OPTIONAL, heads, BST_TYPE_OF(Q, "that of q and k"), BST_EXCHANGED(order))
#define DWEIGHT(name, weight) \
    WEIGHT(name, BST_OUT, NULL, BST_LIKE(weight), BST_TYPE_OF(weight, "as the inputs have it"))

static const bst_argument forward_arguments[] = {
    INPUTS("q", "k"),
    WEIGHTS,
    [Q_OUT] = HEADS_LIKE("q_out", BST_OUT, Q, Y_TYPE, OUT_OF(Q, Q_TOKENS_FIRST)),
    [K_OUT] = HEADS_LIKE("k_out", BST_OUT | BST_OPTIONAL, K, Y_TYPE, BST_WITH(K), OUT_OF(K, K_TOKENS_FIRST)),
    {NULL},
};

#define AS_TOLD BST_TYPE_RULE(as_told, "that of q and k")
static const bst_argument turned_back_arguments[] = {
    INPUTS("dq_out", "dk_out"),
    [DQ_TURNED] = HEADS_LIKE("dq", BST_OUT, Q, AS_TOLD, OUT_OF(Q, Q_TOKENS_FIRST)),
    [DK_TURNED] = HEADS_LIKE("dk", BST_OUT | BST_OPTIONAL, K, AS_TOLD, BST_WITH(K), OUT_OF(K, K_TOKENS_FIRST)),
    {NULL},
};

#define DY_TYPE BST_TYPE_RULE(y_type, "the type of the forward result")
static const bst_argument backward_arguments[] = {
    INPUTS("q", "k"),
    WEIGHTS,
    [DQ_OUT] = HEADS_LIKE("dq_out", BST_IN | BST_OPTIONAL, Q, DY_TYPE),
    [DK_OUT] = HEADS_LIKE("dk_out", BST_IN | BST_OPTIONAL, K, DY_TYPE),
    [DQ] = DX("dq", Q, Q_TOKENS_FIRST),
    [DK] = DX("dk", K, K_TOKENS_FIRST),
    [DQ_WEIGHT] = DWEIGHT("dq_weight", Q_WEIGHT),
    [DK_WEIGHT] = DWEIGHT("dk_weight", K_WEIGHT),
    {NULL},
};

/* ---- what runs --------------------------------------------------------------------------------------------------- */

/* The call, but for what each function has of its own. */
static rope_call call_of(const char *op, const bst_view *v, const bst_attribute *attributes) {
    return (rope_call){.op = op,
                       .of = {{.x = v[Q]}, {.x = v[K]}},
                       .cos = v[COS],
                       .sin = v[SIN],
                       .tokens = v[Q].size[0] * v[Q].size[2],
                       .positions = v[Q].size[2],
                       .rotary = v[COS].size[2] * (attributes[HALF_TABLES].i ? 2 : 1),
                       .layout = (bst_rope_layout)attributes[PAIRS].i,
                       .half_tables = attributes[HALF_TABLES].i,
                       .gemma = attributes[CASTING].i == BST_CASTING_GEMMA,
                       .eps = (float)attributes[EPS].d};
}

static void take_weights(rope_call *c, const bst_view *v) {
    c->normed = bst__given(&v[Q_WEIGHT]);
    for (int i = 0; i < 2; i++) c->of[i].weight = v[Q_WEIGHT + i];
}

/* All that goes over tokens alone. */
static bst_status run_tokens(const bst_exec *exec, rope_call *c) {
    int64_t elements = c->of[0].x.count + c->of[1].x.count;
    if (!elements) return BST_OK;
    if (c->cos.device.device_type == kDLCUDA) return bst__rope_cuda(exec, c);
    return BST_CPU_RUN(exec, c->tokens, elements / c->tokens, bst__rope_cpu, c);
}

/* What descriptions cannot say of memory: if pairs lie elsewhere in the result, threads write where others still read;
 * and nobody has asked for heads that are normed in place. */
static bst_status need_apart(const char *op, const bst_view *v, int out) {
    static const char *const names[] = {"q_out", "q", "k_out", "k"}, *const gradients[] = {"dq", "dq_out", "dk",
                                                                                           "dk_out"};
    const char *const *name = out == Q_OUT ? names : gradients;
    for (int i = 0; i < 2; i++)
        if (v[out + i].count) BST_TRY(bst__need_apart(op, name[2 * i], &v[out + i], name[2 * i + 1], &v[Q + i]));
    return BST_OK;
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    rope_call c = call_of(op, v, attributes);
    take_weights(&c, v);
    if (c.normed || c.layout == BST_ROPE_INTERLEAVED_TO_HALVES) BST_TRY(need_apart(op, v, Q_OUT));
    for (int i = 0; i < 2; i++) c.of[i].y = v[Q_OUT + i];
    return run_tokens(exec, &c);
}

static bst_status run_turned_back(const bst_exec *exec, const char *op, const bst_view *v,
                                  const bst_attribute *attributes) {
    rope_call c = call_of(op, v, attributes);
    if (c.layout == BST_ROPE_INTERLEAVED_TO_HALVES) BST_TRY(need_apart(op, v, DQ_TURNED));
    c.transposed = true;
    for (int i = 0; i < 2; i++) c.of[i].y = v[DQ_TURNED + i];
    return run_tokens(exec, &c);
}

static bst_status backward_cpu(const bst_exec *exec, rope_call *c) {
    int64_t work = (c->of[0].y.count + c->of[1].y.count) / c->tokens, dim = c->of[0].x.size[3];
    c->chunks = c->tokens < ROPE_CHUNKS ? c->tokens : ROPE_CHUNKS;
    void *partial = NULL;
    if (c->of[0].dweight.data || c->of[1].dweight.data) {
        size_t bytes = (size_t)(c->chunks * 2 * dim) * sizeof(float);
        BST_TRY(bst__allocate(exec, c->op, c->cos.device, bytes, &partial));
    }
    c->partial = partial;
    BST_CPU_RUN(exec, c->chunks, work * (c->tokens / c->chunks), bst__rope_norm_backward_cpu, c);
    if (partial) BST_CPU_SELECT(bst__rope_norm_dweight_cpu)(c, 0, 2);
    bst__release(exec, c->cos.device, partial);
    return BST_OK;
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    rope_call c = call_of(op, v, attributes);
    bool work = false;
    take_weights(&c, v);
    c.transposed = true;
    for (int i = 0; i < 2; i++) {
        rope_heads *h = &c.of[i];
        h->dx = v[DQ + i];
        h->dweight = v[DQ_WEIGHT + i];
        if (!bst__given(&h->dx) && !bst__given(&h->dweight)) continue; /* what comes in is not looked at */
        if (!bst__given(&v[DQ_OUT + i]))
            return bst__error(BST_INVALID, "%s: %s is NULL; a tensor is needed", op, i ? "dk_out" : "dq_out");
        h->y = v[DQ_OUT + i];
    }
    for (int i = 0; i < 2; i++) {
        rope_heads *h = &c.of[i];
        if (h->dweight.data && !h->x.count) {
            BST_TRY(bst__zero(exec, op, &h->dweight));
            h->dweight = (bst_view){0};
        }
        work |= h->x.count && (h->dx.data || h->dweight.data);
    }
    if (!work) return BST_OK;
    if (v[Q].device.device_type == kDLCUDA) return bst__rope_norm_backward_cuda(exec, &c, y_type(v, attributes));
    return backward_cpu(exec, &c);
}

static const bst_function forward = {
    .name = "rope_forward",
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .check = check_weights,
    .run = run_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("rope_forward: q k! cos sin layout half_tables keep_type q_tokens_first k_tokens_first -> q_out k_out",
              "qk_norm_rope_forward: q k! q_weight! k_weight! cos sin eps casting layout half_tables keep_type "
              "q_tokens_first k_tokens_first -> q_out k_out"),
};

static const bst_function turned_back = {
    .name = "rope_backward",
    .meanings = meanings,
    .arguments = turned_back_arguments,
    .attributes = rules,
    .check = check_turned,
    .run = run_turned_back,
    BST_GIVEN_OPTIONS,
    BST_TORCH(
        "rope_backward: dq_out dk_out cos sin layout half_tables keep_type q_tokens_first k_tokens_first dtype -> "
        "dq dk"),
};

static const bst_function backward = {
    .name = "rope_backward",
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check_normed,
    .run = run_backward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("qk_norm_rope_backward: dq_out dk_out q k! q_weight! k_weight! cos sin eps casting layout half_tables "
              "keep_type q_tokens_first k_tokens_first -> dq? dk? dq_weight? dk_weight?"),
};

const bst_function *const bst__rope[] = {&forward, &turned_back, &backward, NULL};

/* ---- the C API --------------------------------------------------------------------------------------------------- */

bst_status bst_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                            const DLTensor *sin, const DLTensor *q_weight, const DLTensor *k_weight,
                            const bst_rope_options *options, DLTensor *q_out, DLTensor *k_out) {
    const DLTensor *tensors[] = {
        [Q] = q,         [K] = k,        [COS] = cos, [SIN] = sin, [Q_WEIGHT] = q_weight, [K_WEIGHT] = k_weight,
        [Q_OUT] = q_out, [K_OUT] = k_out};
    return bst__call(&forward, exec, tensors, options, NULL);
}

bst_status bst_rope_backward(const bst_exec *exec, const bst_rope_backward_tensors *tensors,
                             const bst_rope_options *options) {
    bst_rope_backward_tensors t;
    BST_TRY(bst__options(backward.name, "tensors", tensors, &t, sizeof t));
    if (t.q_weight || t.k_weight || t.q || t.k || t.dq_weight || t.dk_weight) {
        if (!t.k && (t.dk || t.dk_weight))
            return bst__error(BST_INVALID, "%s: a gradient of k is wanted, but k is NULL", backward.name);
        if (!t.q_weight)
            return bst__error(BST_INVALID,
                              "%s: q_weight is NULL; without a norm neither q nor k nor the gradient of a "
                              "weight is given",
                              backward.name);
        const DLTensor *all[PLACES] = {[Q] = t.q,
                                       [K] = t.k,
                                       [COS] = t.cos,
                                       [SIN] = t.sin,
                                       [Q_WEIGHT] = t.q_weight,
                                       [K_WEIGHT] = t.k_weight,
                                       [DQ_OUT] = t.dq || t.dq_weight ? t.dq_out : NULL,
                                       [DK_OUT] = t.dk || t.dk_weight ? t.dk_out : NULL,
                                       [DQ] = t.dq,
                                       [DK] = t.dk,
                                       [DQ_WEIGHT] = t.dq_weight,
                                       [DK_WEIGHT] = t.dk_weight};
        return bst__call(&backward, exec, all, options, NULL);
    }
    bool k_alone = t.dk && !t.dq; /* it then takes q's places */
    const DLTensor *all[] = {
        [Q] = k_alone ? t.dk_out : t.dq_out, [K] = k_alone || !t.dk ? NULL : t.dk_out, [COS] = t.cos, [SIN] = t.sin,
        [DQ_TURNED] = k_alone ? t.dk : t.dq, [DK_TURNED] = k_alone ? NULL : t.dk};
    bst_attribute attributes[ATTRIBUTES] = {0};
    bst_view view; /* dq says itself of which type it is */
    if (all[DQ_TURNED]) {
        BST_TRY(bst__view(backward.name, k_alone ? "dk" : "dq", BST_FLOATS, all[DQ_TURNED], &view));
        attributes[DTYPE].i = view.dtype;
    }
    return bst__call(&turned_back, exec, all, options, attributes);
}
