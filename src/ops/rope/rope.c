/* rope.c - rotary position embedding: checks, then the configuration, then the kernel of the tensors' device. Forward
 * and backward are one computation with other factors. */
#include <assert.h>
#include <inttypes.h>

#include "core/heads.h"
#include "cuda/cuda.h"
#include "ops/rope/rope_args.h"
#include "ops/rope/rope_cpu.h"

/* What the messages call the arguments. */
typedef struct names {
    const char *op, *q, *k, *q_out, *k_out;
} names;

static const names forward_names = {"rope_forward", "q", "k", "q_out", "k_out"};
static const names backward_names = {"rope_backward", "dq_out", "dk_out", "dq", "dk"};

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* An output may be its own input, but share no memory with anything else. */
static bst_status check_apart(const names *n, const rope_cpu *c, int which) {
    const char *const in_name[] = {n->q, n->k}, *const out_name[] = {n->q_out, n->k_out};
    const bst_view *out = &c->pair[which].out;
    BST_TRY(bst__need_distinct(n->op, out_name[which], out));
    for (int i = 0; i < 2; i++) {
        if (i == which && bst__same_memory(out, &c->pair[i].in)) continue;
        BST_TRY(bst__need_apart(n->op, out_name[which], out, in_name[i], &c->pair[i].in));
    }
    BST_TRY(bst__need_apart(n->op, out_name[which], out, "cos", &c->cos));
    return bst__need_apart(n->op, out_name[which], out, "sin", &c->sin);
}

/* q's type and the tables' give the turned type: the same, or float32. Forward turns q's into that, backward back. */
static bst_status check_types(const names *n, const rope_cpu *c) {
    const bst_view *plain = c->backward ? &c->pair[0].out : &c->pair[0].in;
    const bst_view *turned = c->backward ? &c->pair[0].in : &c->pair[0].out;
    bst_dtype promoted = plain->dtype == c->cos.dtype ? plain->dtype : BST_F32;
    BST_TRY(bst__need_dtype(n->op, "sin", &c->sin, c->cos.dtype, "the type of cos"));
    BST_TRY(bst__need_dtype(n->op, c->backward ? n->q : n->q_out, turned, promoted,
                            "the promoted type of the heads and the tables"));
    if (!c->pair[1].in.data && !c->pair[1].in.count) return BST_OK;
    BST_TRY(bst__need_dtype(n->op, n->k, &c->pair[1].in, c->pair[0].in.dtype, "as for q"));
    return bst__need_dtype(n->op, n->k_out, &c->pair[1].out, c->pair[0].out.dtype, "as for q");
}

static bst_status check(const names *n, const DLTensor *q, const DLTensor *k, const DLTensor *cos, const DLTensor *sin,
                        DLTensor *q_out, DLTensor *k_out, rope_cpu *c) {
    bst_view *qv = &c->pair[0].in, *kv = &c->pair[1].in;
    BST_TRY(bst__heads(n->op, n->q, q, qv));
    BST_TRY(bst__rotary_table(n->op, "cos", cos, qv, n->q, &c->cos));
    BST_TRY(bst__rotary_table(n->op, "sin", sin, qv, n->q, &c->sin));
    BST_TRY(bst__need_size(n->op, "sin", &c->sin, 2, c->cos.size[2], "that of cos"));
    BST_TRY(bst__heads_like(n->op, n->q_out, q_out, qv, n->q, &c->pair[0].out));
    BST_TRY(bst__heads_beside(n->op, n->k, k, qv, n->q, kv));
    if (k)
        BST_TRY(bst__heads_like(n->op, n->k_out, k_out, kv, n->k, &c->pair[1].out));
    else if (k_out)
        return bst__error(BST_INVALID, "%s: %s is given, but %s is NULL", n->op, n->k_out, n->k);
    BST_TRY(check_types(n, c));
    BST_TRY(check_apart(n, c, 0));
    if (!k) return BST_OK;
    BST_TRY(check_apart(n, c, 1));
    return bst__need_apart(n->op, n->k_out, &c->pair[1].out, n->q_out, &c->pair[0].out);
}

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

static bool alternative(bst_launch *l, int number, int64_t tokens) {
    static const struct {
        int64_t each, block;
    } others[] = {{2, 256}, {4, 128}, {8, 256}};
    if (number > (int)(sizeof others / sizeof *others)) return false;
    arrange(l, tokens, others[number - 1].each, others[number - 1].block);
    return true;
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
    bool in_place = q->in.data == q->out.data || (k->in.data && k->in.data == k->out.data);
    bst_alternatives alternatives = {alternative, tokens, in_place};
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
    return bst__cuda_launch_tuned(exec, op, q->in.device.device_id, &l, &alternatives, &args, sizeof args);
}

static bst_status run(const bst_exec *exec, const names *n, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                      const DLTensor *sin, bool interleaved, bool backward, DLTensor *q_out, DLTensor *k_out) {
    rope_cpu call = {.interleaved = interleaved, .backward = backward};
    BST_TRY(check(n, q, k, cos, sin, q_out, k_out, &call));
    const bst_view *qv = &call.pair[0].in;
    int64_t tokens = qv->size[0] * qv->size[2], heads = qv->size[1] + call.pair[1].in.size[1];
    call.positions = qv->size[2];
    if (!tokens || !heads) return BST_OK;
    if (qv->device.device_type == kDLCUDA) return run_cuda(exec, n->op, &call, tokens);
    bst__parallel_for(exec, tokens, bst__grain(heads * qv->size[3]), BST_CPU_SELECT(bst__rope_cpu), &call);
    return BST_OK;
}

bst_status bst_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                            const DLTensor *sin, int interleaved, DLTensor *q_out, DLTensor *k_out) {
    return run(exec, &forward_names, q, k, cos, sin, interleaved, false, q_out, k_out);
}

bst_status bst_rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out, const DLTensor *cos,
                             const DLTensor *sin, int interleaved, DLTensor *dq, DLTensor *dk) {
    return run(exec, &backward_names, dq_out, dk_out, cos, sin, interleaved, true, dq, dk);
}
