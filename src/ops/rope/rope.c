/* rope.c - rotary position embedding: its description, then the configuration, then the kernel of the tensors' device. Forward
 * and backward are one computation with other factors. */
#include <assert.h>
#include <inttypes.h>

#include "core/describe.h"
#include "core/heads.h"
#include "cuda/cuda.h"
#include "ops/rope/rope_args.h"
#include "ops/rope/rope_cpu.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Backward reads the gradients of forward's outputs in the places of q and k, and writes those of q and k. */
enum { Q, K, COS, SIN, Q_OUT, K_OUT };
enum { INTERLEAVED_PAIRS, Q_TOKENS_FIRST, K_TOKENS_FIRST, DTYPE };

static bst_status check_table(const char *op, const bst_view *v) { return bst__need_rotary(op, &v[Q], &v[COS]); }

#define Q_HEADS_OF(name) {name, BST_IN, BST_FLOATS, "BHSD", BST_LAST, .check = bst__need_heads}
#define K_HEADS_OF(name) {name, BST_IN | BST_OPTIONAL, BST_FLOATS, "BKSD", BST_LAST, BST_TYPE_OF(Q, "as for q")}
#define COSINES          {"cos", BST_IN, BST_FLOATS, "~BSR", BST_LAST, .check = check_table}
#define SINES            {"sin", BST_IN, BST_FLOATS, "~BSR", BST_LAST, BST_TYPE_OF(COS, "the type of cos")}
#define PROMOTED         "the promoted type of the heads and the tables"
/* An output may be its own input, but share no memory with anything else. */
#define RESULT(name, flags, heads, rule, order) \
    {name,                                      \
     BST_OUT | (flags),                         \
     BST_FLOATS,                                \
     NULL,                                      \
     BST_LAST,                                  \
     BST_LIKE(heads),                           \
     BST_TYPE_RULE(rule, PROMOTED),             \
     BST_WITH(heads),                           \
     BST_MAY_BE(1u << (heads)),                 \
     BST_EXCHANGED(order)}

static bst_dtype promoted(const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return v[Q].dtype == v[COS].dtype ? v[Q].dtype : BST_F32;
}

/* Where the tables are float32, the type of the incoming gradients does not tell that of q. */
static bst_dtype as_told(const bst_view *v, const bst_attribute *attributes) {
    (void)v;
    return (bst_dtype)attributes[DTYPE].i;
}

static bst_status check_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    bst_dtype turned = as_told(v, attributes) == v[COS].dtype ? v[COS].dtype : BST_F32;
    return bst__need_dtype(op, "dq_out", &v[Q], turned, PROMOTED);
}

static bst_status run(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes, bool backward);
static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    return run(exec, v, attributes, false);
}
static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    return run(exec, v, attributes, true);
}

static const bst_argument forward_arguments[] = {
    [Q] = Q_HEADS_OF("q"),
    [K] = K_HEADS_OF("k"),
    [COS] = COSINES,
    [SIN] = SINES,
    [Q_OUT] = RESULT("q_out", 0, Q, promoted, Q_TOKENS_FIRST),
    [K_OUT] = RESULT("k_out", BST_OPTIONAL, K, promoted, K_TOKENS_FIRST),
    {NULL},
};

static const bst_argument backward_arguments[] = {
    [Q] = Q_HEADS_OF("dq_out"),
    [K] = K_HEADS_OF("dk_out"),
    [COS] = COSINES,
    [SIN] = SINES,
    [Q_OUT] = RESULT("dq", 0, Q, as_told, Q_TOKENS_FIRST),
    [K_OUT] = RESULT("dk", BST_OPTIONAL, K, as_told, K_TOKENS_FIRST),
    {NULL},
};

static const bst_attribute_rule rules[] = {
    [INTERLEAVED_PAIRS] = {"interleaved", 'b'},
    [Q_TOKENS_FIRST] = {"q_tokens_first", 'b'},
    [K_TOKENS_FIRST] = {"k_tokens_first", 'b'},
    [DTYPE] = {"dtype", 'i', BST_F32, BST_F16, "0 (float32), 1 (bfloat16) or 2 (float16)"},
    {NULL},
};

static const bst_function forward = {
    .name = "rope_forward",
    .meanings = bst__head_symbols,
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_TORCH("rope_forward: q k! cos sin interleaved q_tokens_first k_tokens_first -> q_out k_out"),
};

static const bst_function backward = {
    .name = "rope_backward",
    .meanings = bst__head_symbols,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check_backward,
    .run = run_backward,
    BST_TORCH("rope_backward: dq_out dk_out cos sin interleaved q_tokens_first k_tokens_first dtype -> dq dk"),
};

const bst_function *const bst__rope[] = {&forward, &backward, NULL};

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum {
    DIM,
    ROTARY,
    Q_HEADS,
    K_HEADS,
    IN_TYPE,
    OUT_TYPE,
    TABLE_TYPE,
    INTERLEAVED,
    BACKWARD,
    VEC,
    PIECES,
    SLOTS,
    EACH,
    TOKENS
};
static const bst_kernel kernel = {"rope.cu",
                                  "rope",
                                  {"DIM", "ROTARY", "Q_HEADS", "K_HEADS", "IN_TYPE", "OUT_TYPE", "TABLE_TYPE",
                                   "INTERLEAVED", "BACKWARD", "VEC", "PIECES", "SLOTS", "EACH", "TOKENS", NULL}};

/* Four heads a thread: four accesses of each of its pieces under way, and one read of the tables for four heads, within
 * 128 registers. A block of 256 threads or less, so that a multiprocessor holds several. */
enum { HEADS_EACH = 4, BLOCK = 256 };

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* Elements of an access. */
static int64_t vector(const rope_cpu *c) {
    int64_t dim = c->pair[0].in.size[3], rotary = c->cos.size[2];
    bool wide = c->pair[0].in.dtype == BST_F32 || c->pair[0].out.dtype == BST_F32 || c->cos.dtype == BST_F32;
    int64_t vec = bst__rotary_vector(dim, rotary, wide ? 4 : 8);
    vec = bst__aligned(&c->sin, bst__aligned(&c->cos, vec));
    for (int i = 0; i < 2; i++)
        if (c->pair[i].in.data) vec = bst__aligned(&c->pair[i].out, bst__aligned(&c->pair[i].in, vec));
    return vec;
}

/* Geometry, for at most `each` heads a thread and blocks of `block` threads. */
static void arrange(bst_launch *l, int64_t tokens, int64_t each, int64_t block) {
    int64_t lanes = bst__rotary_lanes(l->values[DIM], l->values[ROTARY], l->values[VEC], l->values[PIECES]);
    int64_t heads = l->values[Q_HEADS] + l->values[K_HEADS];
    int64_t slots = lesser((heads + each - 1) / each, lanes < block ? block / lanes : 1);
    /* Tokens of a block: as many as leave the fewest lanes of its warps idle. */
    int64_t best = 1, least = INT64_MAX, threads = lanes * slots;
    for (int64_t n = 1; n == 1 || n * threads <= block; n++) {
        int64_t idle = (32 - n * threads % 32) % 32 * block / n;
        if (idle <= least) least = idle, best = n;
    }
    l->values[SLOTS] = slots;
    l->values[EACH] = each;
    l->values[TOKENS] = best;
    l->grid_x = (unsigned)((tokens + best - 1) / best);
    l->block = (unsigned)((threads * best + 31) / 32 * 32);
}

static void shape(bst_launch *l, const rope_cpu *c, int64_t tokens) {
    l->values[DIM] = c->pair[0].in.size[3];
    l->values[ROTARY] = c->cos.size[2];
    l->values[Q_HEADS] = c->pair[0].in.size[1];
    l->values[K_HEADS] = c->pair[1].in.size[1];
    l->values[IN_TYPE] = c->pair[0].in.dtype;
    l->values[OUT_TYPE] = c->pair[0].out.dtype;
    l->values[TABLE_TYPE] = c->cos.dtype;
    l->values[INTERLEAVED] = c->interleaved;
    l->values[BACKWARD] = c->backward;
    l->values[VEC] = vector(c);
    l->values[PIECES] = bst__rotary_pieces(l->values[DIM], l->values[ROTARY], l->values[VEC], c->interleaved);
    arrange(l, tokens, HEADS_EACH, BLOCK);
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const rope_cpu *c, int64_t tokens) {
    const rope_pair *q = &c->pair[0], *k = &c->pair[1];
    if (tokens > UINT32_MAX)
        return bst__error(BST_UNSUPPORTED, "%s: %" PRId64 " tokens are given; at most 2^32 - 1 are supported", op,
                          tokens);
    bst_launch l = {.kernel = &kernel};
    shape(&l, c, tokens);
    rope_args args = {q->in.data,
                      k->in.data,
                      c->cos.data,
                      c->sin.data,
                      q->out.data,
                      k->out.data,
                      bst__head_map(&q->in),
                      bst__head_map(&k->in),
                      bst__head_map(&q->out),
                      bst__head_map(&k->out),
                      c->cos.stride[0],
                      c->cos.stride[1],
                      c->sin.stride[0],
                      c->sin.stride[1],
                      (uint32_t)tokens,
                      (uint32_t)c->positions};
    return bst__cuda_launch(exec, op, q->in.device.device_id, &l, &args, sizeof args);
}

static bst_status run(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes, bool is_backward) {
    rope_cpu call = {.pair = {{v[Q], v[Q_OUT]}, {v[K], v[K_OUT]}},
                     .cos = v[COS],
                     .sin = v[SIN],
                     .positions = v[Q].size[2],
                     .interleaved = attributes[INTERLEAVED_PAIRS].i,
                     .backward = is_backward};
    int64_t tokens = v[Q].size[0] * v[Q].size[2], heads = v[Q].size[1] + v[K].size[1];
    if (!tokens || !heads) return BST_OK;
    if (v[Q].device.device_type == kDLCUDA)
        return run_cuda(exec, is_backward ? backward.name : forward.name, &call, tokens);
    bst__parallel_for(exec, tokens, bst__grain(heads * v[Q].size[3]), BST_CPU_SELECT(bst__rope_cpu), &call);
    return BST_OK;
}

bst_status bst_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                            const DLTensor *sin, int interleaved, DLTensor *q_out, DLTensor *k_out) {
    const DLTensor *tensors[] = {[Q] = q, [K] = k, [COS] = cos, [SIN] = sin, [Q_OUT] = q_out, [K_OUT] = k_out};
    return bst__run(&forward, exec, tensors, (bst_attribute[4]){[INTERLEAVED_PAIRS].i = interleaved});
}

bst_status bst_rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out, const DLTensor *cos,
                             const DLTensor *sin, int interleaved, DLTensor *dq, DLTensor *dk) {
    const DLTensor *tensors[] = {[Q] = dq_out, [K] = dk_out, [COS] = cos, [SIN] = sin, [Q_OUT] = dq, [K_OUT] = dk};
    bst_view view; /* dq says itself of which type it is */
    if (dq) BST_TRY(bst__view(backward.name, "dq", BST_FLOATS, dq, &view));
    bst_attribute attributes[] = {[INTERLEAVED_PAIRS].i = interleaved, [DTYPE].i = dq ? (int64_t)view.dtype : BST_F32};
    return bst__run(&backward, exec, tensors, attributes);
}
