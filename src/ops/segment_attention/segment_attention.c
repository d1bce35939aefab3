/* segment_attention.c - attention within segments: descriptions of its two functions, and what runs on CPU. */
#include <inttypes.h>
#include <math.h>

#include "core/describe.h"
#include "core/options.h"
#include "ops/segment_attention/segment_attention.h"

typedef bst_segment_attention_tensors given_tensors;
typedef bst_segment_attention_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { Q, K, V, CUTS, Y, LSE, DY, DQ, DK, DV };
enum { SCALE, CAUSAL, ROWS, WINDOW };

static const char *const meanings[] = {"Tthe tokens of q",
                                       "Hthe heads of q",
                                       "Dthe size of q's heads",
                                       "Sthe tokens of k",
                                       "Gthe heads of k",
                                       "Cthe columns of cuts",
                                       NULL};

static const bst_attribute_rule rules[] = {
    [SCALE] = BST_OPTION('d', scale, 0, FLT_MAX, "a finite number, 0 or above,"),
    [CAUSAL] = BST_OPTION('b', causal),
    [ROWS] = BST_OPTION('i', rows, 0, INT32_MAX, "0 or above"),
    [WINDOW] = BST_OPTION('i', window, 0, INT32_MAX, "0 or above"),
    {NULL},
};

bst_status bst__attention_heads(const char *op, const bst_view *v) {
    int64_t heads = v[Q].size[1], groups = v[K].size[1];
    if (v[Q].size[2] < 1) return bst__error(BST_INVALID, "%s: q has heads of 0 elements; 1 or more are needed", op);
    if (groups ? heads % groups == 0 : !heads) return BST_OK;
    return bst__error(BST_INVALID, "%s: q has %" PRId64 " heads and k %" PRId64 "; a multiple is needed", op, heads,
                      groups);
}

/* What can be said of cuts without their values. */
static bst_status check_cuts(const char *op, const bst_view *v) {
    int64_t columns = v[CUTS].size[1];
    if (columns >= 2 || !v[CUTS].dims) return BST_OK;
    return bst__error(BST_INVALID, "%s: cuts has rows of %" PRId64 " elements; two or more, 0 first, are needed", op,
                      columns);
}

#define OF_Q BST_TYPE_OF(Q, "the type of q")
#define INPUTS                                                                                                      \
    [Q] = {"q", BST_IN, BST_FLOATS, "THD", BST_LAST, BST_AT(q)}, [K] = {"k",        BST_IN,                         \
                                                                        BST_FLOATS, "SGD",                          \
                                                                        BST_LAST,   OF_Q,                           \
                                                                        BST_AT(k),  .check = bst__attention_heads}, \
    [V] = {"v", BST_IN, BST_FLOATS, "SGD", BST_LAST, OF_Q, BST_AT(v)}, [CUTS] = {"cuts",                            \
                                                                                 BST_IN | BST_OPTIONAL,             \
                                                                                 1u << BST_I32,                     \
                                                                                 "2C",                              \
                                                                                 BST_CONTIGUOUS,                    \
                                                                                 BST_AT(cuts),                      \
                                                                                 .check = check_cuts}
#define OF_QUERIES(name, flags, layout, ...) {name, flags, BST_FLOATS, NULL, layout, BST_LIKE(Q), OF_Q, __VA_ARGS__}
#define OF_KEYS(name, of, ...) {name, BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), OF_Q, __VA_ARGS__}
#define SUMS(flags)            {"lse", flags, 1u << BST_F32, "HT", BST_CONTIGUOUS, BST_AT(lse)}

static const bst_argument forward_arguments[] = {
    INPUTS,
    [Y] = OF_QUERIES("y", BST_OUT, BST_CONTIGUOUS, BST_AT(y)),
    [LSE] = SUMS(BST_OUT),
    {NULL},
};

static const bst_argument backward_arguments[] = {
    INPUTS,
    [Y] = OF_QUERIES("y", BST_IN, BST_LAST, BST_AT(y)),
    [LSE] = SUMS(BST_IN),
    [DY] = OF_QUERIES("dy", BST_IN, BST_LAST, BST_AT(dy)),
    [DQ] = OF_QUERIES("dq", BST_OUT, BST_CONTIGUOUS, BST_AT(dq)),
    [DK] = OF_KEYS("dk", K, BST_AT(dk)),
    [DV] = OF_KEYS("dv", V, BST_AT(dv)),
    {NULL},
};

/* ---- what runs --------------------------------------------------------------------------------------------------- */

static segment_attention_call call_of(const char *op, const bst_view *v, const bst_attribute *attributes) {
    double scale = attributes[SCALE].d;
    int64_t dim = v[Q].size[2], rows = attributes[ROWS].i, window = attributes[WINDOW].i;
    int64_t queries = v[Q].size[0], keys = v[K].size[0];
    bool has_cuts = v[CUTS].dims > 0;
    return (segment_attention_call){.op = op,
                                    .q = v[Q],
                                    .k = v[K],
                                    .v = v[V],
                                    .cuts = v[CUTS],
                                    .y = v[Y],
                                    .lse = v[LSE],
                                    .queries = queries,
                                    .keys = keys,
                                    .heads = v[Q].size[1],
                                    .groups = v[K].size[1],
                                    .dim = dim,
                                    .segments = has_cuts ? v[CUTS].size[1] - 1
                                                : rows   ? rows
                                                         : 1,
                                    .window = window < queries || window < keys ? window : 0, /* else it is of all */
                                    .scale = (float)(scale != 0 ? scale : 1 / sqrt((double)dim)),
                                    .causal = attributes[CAUSAL].i};
}

/* Rows, or what the values of cuts say where the host has them. */
static bst_status check_segments(const segment_attention_call *c, int64_t rows) {
    if (!c->cuts.dims) {
        if (c->queries % c->segments == 0 && c->keys % c->segments == 0) return BST_OK;
        return bst__error(BST_INVALID,
                          "%s: q has %" PRId64 " tokens and k %" PRId64 ", and rows is %" PRId64
                          "; multiples of it are needed",
                          c->op, c->queries, c->keys, c->segments);
    }
    if (rows) return bst__error(BST_INVALID, "%s: cuts is given, and rows; one of both is needed", c->op);
    if (c->cuts.device.device_type == kDLCUDA) return BST_OK;
    const int32_t *queries = c->cuts.data, *keys = queries + c->segments + 1;
    BST_TRY(bst__need_boundaries(c->op, "cuts[0]", queries, c->segments, c->queries));
    return bst__need_boundaries(c->op, "cuts[1]", keys, c->segments, c->keys);
}

/* Blocks of queries or of keys, each with a head, are shared out to strips. */
static int64_t blocks_of(const segment_attention_call *c) {
    const int64_t of_queries = bst__divided_up(c->queries, SEGMENT_CPU_QUERIES) * c->heads;
    const int64_t of_keys = bst__divided_up(c->keys, SEGMENT_CPU_KEYS) * c->groups;
    return of_queries > of_keys ? of_queries : of_keys;
}

static bst_status run_cpu(const bst_exec *exec, const segment_attention_call *c, bool backward) {
    void *memory;
    segment_attention_tiles unused;
    segment_attention_work work = {.call = c, .strips = bst__lesser(blocks_of(c), bst__processors())};
    work.floats = bst__segment_attention_share_out(c, NULL, &unused);
    const int64_t floats = work.strips * work.floats + (backward ? c->heads * c->queries : 0);
    BST_TRY(bst__allocate(exec, c->op, c->q.device, (size_t)floats * sizeof(float), &memory));
    work.work = memory;
    work.delta = work.work + work.strips * work.floats;
    if (backward) {
        bst__parallel_for(exec, work.strips, 1, BST_CPU_SELECT(bst__segment_attention_queries_cpu), &work);
        bst__parallel_for(exec, work.strips, 1, BST_CPU_SELECT(bst__segment_attention_keys_cpu), &work);
    } else {
        bst__parallel_for(exec, work.strips, 1, BST_CPU_SELECT(bst__segment_attention_forward_cpu), &work);
    }
    bst__release(exec, c->q.device, memory);
    return BST_OK;
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    const segment_attention_call c = call_of(op, v, attributes);
    BST_TRY(check_segments(&c, attributes[ROWS].i));
    if (!c.queries || !c.heads) return BST_OK;
    if (c.q.device.device_type == kDLCUDA) return bst__segment_attention_forward_cuda(exec, &c);
    return run_cpu(exec, &c, false);
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    segment_attention_call c = call_of(op, v, attributes);
    c.dy = v[DY], c.dq = v[DQ], c.dk = v[DK], c.dv = v[DV];
    BST_TRY(check_segments(&c, attributes[ROWS].i));
    if (!c.queries || !c.heads) { /* keys that nobody sees */
        BST_TRY(bst__zero(exec, op, &c.dk));
        return bst__zero(exec, op, &c.dv);
    }
    if (c.q.device.device_type == kDLCUDA) return bst__segment_attention_backward_cuda(exec, &c);
    return run_cpu(exec, &c, true);
}

static const bst_function forward = {
    .name = "segment_attention_forward",
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_GIVEN,
    BST_TORCH("segment_attention_forward: q k v cuts scale causal rows window -> y lse"),
};

static const bst_function backward = {
    .name = "segment_attention_backward",
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH("segment_attention_backward: dy q k v cuts y lse scale causal rows window -> dq dk dv"),
};

const bst_function *const bst__segment_attention[] = {&forward, &backward, &bst__token_attention, NULL};

bst_status bst_segment_attention_forward(const bst_exec *exec, const bst_segment_attention_tensors *tensors,
                                         const bst_segment_attention_options *options) {
    return bst__call_struct(&forward, exec, tensors, options, NULL);
}

bst_status bst_segment_attention_backward(const bst_exec *exec, const bst_segment_attention_tensors *tensors,
                                          const bst_segment_attention_options *options) {
    return bst__call_struct(&backward, exec, tensors, options, NULL);
}
