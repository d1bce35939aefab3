/* gated_delta_rule.c - the gated delta rule: descriptions of its two functions, and what runs on CPU. */
#include <inttypes.h>
#include <math.h>

#include "core/describe.h"
#include "core/options.h"
#include "ops/gated_delta_rule/gated_delta_rule.h"
#include "ops/gated_delta_rule/gated_delta_rule_args.h"

typedef bst_gated_delta_rule_tensors given_tensors;
typedef bst_gated_delta_rule_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { Q, K, V, G, BETA, SKIP, INITIAL, CU_SEQLENS, Y, FINAL, DY = Y, DFINAL, DQ, DK, DV, DG, DBETA, DSKIP, DINITIAL };
enum { SCALE, ADDITIVE, WIDE, NORMALIZE, EPS };

static const char *const meanings[] = {"Bthe batch of q",
                                       "Tthe tokens of q",
                                       "Hthe heads of q",
                                       "Kthe size of q's heads",
                                       "Nthe heads of v",
                                       "Vthe size of v's heads",
                                       NULL};

static const bst_attribute_rule rules[] = {
    [SCALE] = BST_OPTION('d', scale),
    [ADDITIVE] = BST_OPTION('b', additive),
    [WIDE] = BST_OPTION('b', wide),
    [NORMALIZE] = BST_OPTION('b', normalize),
    [EPS] = BST_OPTION('d', eps, BST_EPS_BOUNDS, BST_USUAL(1e-6)),
    {NULL},
};

static bst_status check_sizes(const char *op, const bst_view *v) {
    const struct {
        const char *name;
        const bst_view *view;
        int most;
    } heads[] = {{"q", &v[Q], DELTA_MOST_KEY}, {"v", &v[V], DELTA_MOST_VALUE}};
    for (int i = 0; i < 2; i++) {
        int64_t size = heads[i].view->size[3];
        if (size < 1 || size > heads[i].most)
            return bst__error(size < 1 ? BST_INVALID : BST_UNSUPPORTED,
                              "%s: %s has heads of %" PRId64 " elements; 1 to %d are supported", op, heads[i].name,
                              size, heads[i].most);
    }
    int64_t of_q = v[Q].size[2], of_v = v[V].size[2];
    if (of_q ? of_v % of_q == 0 : !of_v) return BST_OK;
    return bst__error(BST_INVALID, "%s: v has %" PRId64 " heads and q %" PRId64 "; a multiple is needed", op, of_v,
                      of_q);
}

/* What can be said of sequences without their boundaries' values. */
static bst_status check_boundaries(const char *op, const bst_view *v) {
    int64_t rows = v[Q].size[0], count = v[CU_SEQLENS].count;
    if (rows != 1)
        return bst__error(BST_INVALID,
                          "%s: cu_seqlens is given and q has %" PRId64 " rows; one, of all sequences, is needed", op,
                          rows);
    if (count < 2)
        return bst__error(BST_INVALID, "%s: cu_seqlens has %" PRId64 " elements; two or more, 0 first, are needed", op,
                          count);
    if (bst__given(&v[INITIAL]))
        return bst__error(BST_UNSUPPORTED, "%s: cu_seqlens and initial are given; one of them alone is supported", op);
    return BST_OK;
}

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    return attributes[WIDE].i ? BST_F32 : v[Q].dtype;
}

#define HEADS(name, flags, shape, ...) {name, flags, BST_FLOATS, shape, BST_LAST, __VA_ARGS__}
#define OF_Q                           BST_TYPE_OF(Q, "the type of q")
#define STATE(name, flags, ...) {name, (flags) | BST_OPTIONAL, 1u << BST_F32, "BNKV", BST_CONTIGUOUS, __VA_ARGS__}
#define LIKE(name, of)                                                                                               \
    {#name,       BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), BST_TYPE_OF(of, "as the inputs have it"), \
     BST_AT(name)}
#define INPUTS                                                                                                   \
    HEADS("q", BST_IN, "BTHK", BST_AT(q)), HEADS("k", BST_IN, "BTHK", OF_Q, BST_AT(k)),                          \
        HEADS("v", BST_IN, "BTNV", OF_Q, BST_AT(v), .check = check_sizes), HEADS("g", BST_IN, "BTN", BST_AT(g)), \
        HEADS("beta", BST_IN, "BTN", BST_AT(beta)),                                                              \
        {"skip", BST_IN | BST_OPTIONAL, BST_FLOATS, "N", BST_CONTIGUOUS, BST_AT(skip)},                          \
        STATE("initial", BST_IN, BST_AT(initial)), {                                                             \
        "cu_seqlens", BST_IN | BST_OPTIONAL, 1u << BST_I32, "S", BST_CONTIGUOUS, BST_AT(cu_seqlens),             \
            .check = check_boundaries                                                                            \
    }

static const bst_argument forward_arguments[] = {
    INPUTS,
    [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(V),
           BST_TYPE_RULE(y_type, "the type of q, or with wide float32"), BST_AT(y)},
    [FINAL] = STATE("final", BST_OUT, BST_AT(final)),
    {NULL},
};

static const bst_argument backward_arguments[] = {
    INPUTS,
    [DY] = HEADS("dy", BST_IN, NULL, BST_LIKE(V), BST_TYPE_RULE(y_type, "the type of y"), BST_AT(dy)),
    [DFINAL] = STATE("dfinal", BST_IN, BST_AT(dfinal)),
    [DQ] = LIKE(dq, Q),
    [DK] = LIKE(dk, K),
    [DV] = LIKE(dv, V),
    [DG] = LIKE(dg, G),
    [DBETA] = LIKE(dbeta, BETA),
    [DSKIP] = {"dskip", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(SKIP),
               BST_TYPE_OF(SKIP, "as the inputs have it"), BST_AT(dskip)},
    [DINITIAL] = STATE("dinitial", BST_OUT, BST_AT(dinitial)),
    {NULL},
};

/* ---- what runs --------------------------------------------------------------------------------------------------- */

static delta_call call_of(const char *op, const bst_view *v, const bst_attribute *attributes) {
    double scale = attributes[SCALE].d;
    const bst_view *boundaries = bst__given(&v[CU_SEQLENS]) ? &v[CU_SEQLENS] : NULL;
    return (delta_call){.op = op,
                        .q = v[Q],
                        .k = v[K],
                        .v = v[V],
                        .g = v[G],
                        .beta = v[BETA],
                        .skip = v[SKIP],
                        .initial = v[INITIAL],
                        .batches = v[Q].size[0],
                        .tokens = v[Q].size[1],
                        .heads = v[V].size[2],
                        .key_heads = v[Q].size[2],
                        .key = v[Q].size[3],
                        .value = v[V].size[3],
                        .chunks = bst__divided_up(v[Q].size[1], DELTA_CHUNK),
                        .boundaries = boundaries ? boundaries->data : NULL,
                        .sequences = boundaries ? boundaries->count - 1 : v[Q].size[0],
                        .scale = scale != 0 ? (float)scale : (float)(1 / sqrt((double)v[Q].size[3])),
                        .eps = (float)attributes[EPS].d,
                        .additive = attributes[ADDITIVE].i,
                        .normalize = attributes[NORMALIZE].i};
}

/* What the views of states and, on CPU, the boundaries' values say. */
static bst_status check_sequences(const delta_call *c) {
    const struct {
        const char *name;
        const bst_view *view;
    } states[] = {{"final", &c->final}, {"dfinal", &c->dfinal}, {"dinitial", &c->dinitial}};
    if (!c->boundaries) return BST_OK;
    for (int i = 0; i < 3; i++)
        if (bst__given(states[i].view))
            return bst__error(BST_UNSUPPORTED, "%s: cu_seqlens and %s are given; one of them alone is supported", c->op,
                              states[i].name);
    if (c->q.device.device_type == kDLCUDA) return BST_OK;
    return bst__need_boundaries(c->op, "cu_seqlens", c->boundaries, c->sequences, c->tokens);
}

static bst_status run_cpu(const bst_exec *exec, delta_call *c, bst_body body, bool backward) {
    void *work;
    delta_workspace unused;
    c->strips = bst__lesser(c->sequences * c->key_heads, bst__processors());
    c->floats = bst__delta_share_out(c, backward, NULL, &unused);
    BST_TRY(bst__allocate(exec, c->op, c->q.device,
                          (size_t)(c->strips * c->floats + c->sequences * c->heads) * sizeof(float), &work));
    c->work = work;
    c->skipped = (float *)work + c->strips * c->floats;
    bst__parallel_for(exec, c->strips, 1, body, c);
    if (backward && c->dskip.data) BST_CPU_SELECT(bst__delta_skip_cpu)(c, 0, 1);
    bst__release(exec, c->q.device, work);
    return BST_OK;
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    delta_call c = call_of(op, v, attributes);
    c.y = v[Y], c.final = v[FINAL];
    BST_TRY(check_sequences(&c));
    if (!c.batches || !c.heads) return BST_OK;
    if (c.q.device.device_type == kDLCUDA) return bst__delta_forward_cuda(exec, &c);
    return run_cpu(exec, &c, BST_CPU_SELECT(bst__delta_forward_cpu), false);
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    delta_call c = call_of(op, v, attributes);
    c.dy = v[DY], c.dfinal = v[DFINAL], c.dq = v[DQ], c.dk = v[DK], c.dv = v[DV];
    c.dg = v[DG], c.dbeta = v[DBETA], c.dskip = v[DSKIP], c.dinitial = v[DINITIAL];
    BST_TRY(check_sequences(&c));
    if (!c.batches || !c.heads) { /* heads of keys that no value belongs to */
        BST_TRY(bst__zero(exec, op, &c.dq));
        BST_TRY(bst__zero(exec, op, &c.dskip));
        return bst__zero(exec, op, &c.dk);
    }
    if (c.q.device.device_type == kDLCUDA) return bst__delta_backward_cuda(exec, &c);
    return run_cpu(exec, &c, BST_CPU_SELECT(bst__delta_backward_cpu), true);
}

static const bst_function forward = {
    .name = "gated_delta_rule_forward",
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_GIVEN,
    BST_TORCH(
        "gated_delta_rule_forward: q k v g beta skip initial cu_seqlens scale additive wide normalize eps -> y final?"),
};

static const bst_function backward = {
    .name = "gated_delta_rule_backward",
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH("gated_delta_rule_backward: dy dfinal q k v g beta skip initial cu_seqlens scale additive wide normalize "
              "eps -> dq dk dv dg dbeta dskip? dinitial?"),
};

const bst_function *const bst__gated_delta_rule[] = {&forward, &backward, NULL};

bst_status bst_gated_delta_rule_forward(const bst_exec *exec, const bst_gated_delta_rule_tensors *tensors,
                                        const bst_gated_delta_rule_options *options) {
    return bst__call_struct(&forward, exec, tensors, options, NULL);
}

bst_status bst_gated_delta_rule_backward(const bst_exec *exec, const bst_gated_delta_rule_tensors *tensors,
                                         const bst_gated_delta_rule_options *options) {
    return bst__call_struct(&backward, exec, tensors, options, NULL);
}
