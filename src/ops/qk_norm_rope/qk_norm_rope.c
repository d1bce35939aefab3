/* qk_norm_rope.c - QK-norm and rotary embedding: its description, then the configuration, then the kernels of the tensors'
 * device. */
#include <assert.h>
#include <inttypes.h>

#include "core/describe.h"
#include "core/heads.h"
#include "cuda/cuda.h"
#include "ops/qk_norm_rope/qk_norm_rope_args.h"
#include "ops/qk_norm_rope/qk_norm_rope_cpu.h"

static const char forward_op[] = "qk_norm_rope_forward", backward_op[] = "qk_norm_rope_backward";

/* ---- what forward and backward have in common -------------------------------------------------------------------- */

/* Places of tensors: of both, of forward, of backward; and of attributes. */
enum { Q, K, COS, SIN, Q_WEIGHT, K_WEIGHT, BOTH, Q_OUT = BOTH, K_OUT };
enum { DQ_OUT = BOTH, DK_OUT, DQ, DK, DQ_WEIGHT, DK_WEIGHT };
enum { EPS, CASTING, PAIRS, Q_TOKENS_FIRST, K_TOKENS_FIRST };

static bst_status check_table(const char *op, const bst_view *v) { return bst__need_rotary(op, &v[Q], &v[COS]); }

#define HEADS(name, flags, shape, ...)      {name, flags, BST_FLOATS, shape, BST_LAST, __VA_ARGS__}
#define HEADS_LIKE(name, flags, heads, ...) HEADS(name, flags, NULL, BST_LIKE(heads), __VA_ARGS__)
#define WEIGHT(name, flags, ...)            {name, flags, BST_FLOATS, "D", BST_CONTIGUOUS, __VA_ARGS__}
#define DWEIGHT(name, weight) \
    {name,                    \
     BST_OUT | BST_OPTIONAL,  \
     BST_FLOATS,              \
     NULL,                    \
     BST_CONTIGUOUS,          \
     BST_LIKE(weight),        \
     BST_TYPE_OF(weight, "as the inputs have it")}
#define INPUTS                                                                                         \
    HEADS("q", BST_IN, "BHSD", .check = bst__need_heads),                                              \
        HEADS("k", BST_IN | BST_OPTIONAL, "BKSD", BST_TYPE_OF(Q, "as for q")),                         \
        HEADS("cos", BST_IN, "~BSR", .check = check_table),                                            \
        HEADS("sin", BST_IN, "~BSR", BST_TYPE_OF(COS, "the type of cos")), WEIGHT("q_weight", BST_IN), \
        WEIGHT("k_weight", BST_IN | BST_OPTIONAL, BST_TYPE_OF(Q_WEIGHT, "as for q_weight"), BST_WITH(K))

static const bst_attribute_rule rules[] = {
    [EPS] = BST_EPS,
    [CASTING] = {"casting", 'i', BST_CASTING_LLAMA, BST_CASTING_NONE, "0 (llama), 1 (gemma) or 2 (none)"},
    [PAIRS] = {"interleaved", 'b'},
    [Q_TOKENS_FIRST] = {"q_tokens_first", 'b'},
    [K_TOKENS_FIRST] = {"k_tokens_first", 'b'},
    {NULL},
};

static bst_dtype promoted(bst_dtype a, bst_dtype b) { return a == b ? a : BST_F32; }

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    bool of_weight = attributes[CASTING].i == BST_CASTING_LLAMA;
    return promoted(of_weight ? promoted(v[Q].dtype, v[Q_WEIGHT].dtype) : v[Q].dtype, v[COS].dtype);
}

/* The call, but for what forward and backward each have of their own. */
static qk_norm_rope_cpu call_of(const bst_view *v, const bst_attribute *attributes) {
    return (qk_norm_rope_cpu){.of = {{.x = v[Q], .weight = v[Q_WEIGHT]}, {.x = v[K], .weight = v[K_WEIGHT]}},
                              .cos = v[COS],
                              .sin = v[SIN],
                              .tokens = v[Q].size[0] * v[Q].size[2],
                              .positions = v[Q].size[2],
                              .eps = (float)attributes[EPS].d,
                              .gemma = attributes[CASTING].i == BST_CASTING_GEMMA,
                              .interleaved = attributes[PAIRS].i};
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum {
    DIM,
    ROTARY,
    Q_HEADS,
    K_HEADS,
    IN_TYPE,
    W_TYPE,
    TABLE_TYPE,
    OUT_TYPE,
    INTERLEAVED,
    GEMMA,
    VEC,
    PIECES,
    GROUP,
    THREADS,
    WANTS,
    EACH = WANTS, /* forward */
    BLOCKS
};
#define MACROS(which, wants)                                                                                \
    {"DIM",   "ROTARY", "Q_HEADS", "K_HEADS", "IN_TYPE", "W_TYPE", "TABLE_TYPE", "OUT_TYPE", "INTERLEAVED", \
     "GEMMA", "VEC",    "PIECES",  "GROUP",   "THREADS", wants,    "BLOCKS",     which,      NULL}
static const bst_kernel forward_kernel = {"qk_norm_rope.cu", "qk_norm_rope_forward", MACROS("FORWARD", "EACH")};
static const bst_kernel backward_kernel = {"qk_norm_rope.cu", "qk_norm_rope_backward", MACROS("BACKWARD", "WANTS")};
static const bst_kernel reduce_kernel = {"qk_norm_rope.cu", "qk_norm_rope_dweight", MACROS("REDUCE", "WANTS")};

/* Forward: many heads of a token a group, for they share a read of the weight and of the tables, in small blocks. On an
 * H200, 16384 tokens of 32 + 8 heads of 128 in bf16: 84 us; blocks of 128 threads 85, four heads 88, and 89 in blocks of
 * 128. */
enum { FORWARD_THREADS = 64, FORWARD_EACH = 8, BACKWARD_THREADS = 128 };

static int64_t slots_of(int64_t heads, int64_t each) { return (heads + each - 1) / each; }

/* Elements of an access. */
static int64_t vector(const qk_norm_rope_cpu *c, bst_dtype y_dtype) {
    const bst_view *x = &c->of[0].x;
    /* y's type is float32 too where those of x and of the tables are not one. */
    bool wide = x->dtype == BST_F32 || y_dtype == BST_F32 || c->of[0].weight.dtype == BST_F32;
    int64_t vec = bst__rotary_vector(x->size[3], c->cos.size[2], wide ? 4 : 8);
    vec = bst__aligned(&c->sin, bst__aligned(&c->cos, vec));
    for (int i = 0; i < 2; i++) {
        const bst_view *heads[] = {&c->of[i].x, &c->of[i].y, &c->of[i].dx};
        for (int j = 0; j < 3; j++)
            if (heads[j]->data) vec = bst__aligned(heads[j], vec);
        if (c->of[i].weight.data) vec = bst__aligned(&c->of[i].weight, vec);
    }
    return vec;
}

static void set_threads(bst_launch *l, int64_t threads) {
    l->values[THREADS] = l->values[GROUP] > threads ? l->values[GROUP] : threads;
    l->block = (unsigned)l->values[THREADS];
}

static void shape(bst_launch *l, const qk_norm_rope_cpu *c, bst_dtype y_dtype, int64_t threads) {
    const bst_view *x = &c->of[0].x;
    int64_t dim = x->size[3], rotary = c->cos.size[2], vec = vector(c, y_dtype);
    int64_t pieces = bst__rotary_pieces(dim, rotary, vec, c->interleaved), group = 1;
    int64_t lanes = bst__rotary_lanes(dim, rotary, vec, pieces);
    while (group < lanes) group *= 2;
    l->values[DIM] = dim;
    l->values[ROTARY] = rotary;
    l->values[Q_HEADS] = x->size[1];
    l->values[K_HEADS] = c->of[1].x.size[1];
    l->values[IN_TYPE] = x->dtype;
    l->values[W_TYPE] = c->of[0].weight.dtype;
    l->values[TABLE_TYPE] = c->cos.dtype;
    l->values[OUT_TYPE] = y_dtype;
    l->values[INTERLEAVED] = c->interleaved;
    l->values[GEMMA] = c->gemma;
    l->values[VEC] = vec;
    l->values[PIECES] = pieces;
    l->values[GROUP] = group;
    set_threads(l, threads);
}

static bst_status check_count(const char *op, const qk_norm_rope_cpu *c, int64_t slots) {
    if (c->tokens <= INT32_MAX / slots) return BST_OK;
    return bst__error(BST_UNSUPPORTED,
                      "%s: %" PRId64 " tokens are given; with this many heads, at most %" PRId64 " are supported", op,
                      c->tokens, INT32_MAX / slots);
}

static qk_norm_rope_tables tables_of(const qk_norm_rope_cpu *c) {
    return (qk_norm_rope_tables){c->cos.data,      c->sin.data,      c->cos.stride[0],    c->cos.stride[1],
                                 c->sin.stride[0], c->sin.stride[1], (uint32_t)c->tokens, (uint32_t)c->positions};
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Geometry, for `each` heads a group; returns the slots of a token. */
static int64_t arrange_forward(bst_launch *l, int64_t tokens, int64_t each) {
    int64_t slots = slots_of(l->values[Q_HEADS], each) + slots_of(l->values[K_HEADS], each);
    int64_t groups = l->values[THREADS] / l->values[GROUP];
    l->values[EACH] = each;
    l->grid_x = (unsigned)((tokens * slots + groups - 1) / groups);
    return slots;
}

static bst_status forward_cuda(const bst_exec *exec, const qk_norm_rope_cpu *c) {
    bst_launch l = {.kernel = &forward_kernel};
    shape(&l, c, c->of[0].y.dtype, FORWARD_THREADS);
    BST_TRY(check_count(forward_op, c, arrange_forward(&l, c->tokens, FORWARD_EACH)));
    qk_norm_rope_forward_args args = {.tables = tables_of(c), .eps = c->eps};
    qk_norm_rope_forward_heads *const to[] = {&args.q, &args.k};
    for (int i = 0; i < 2; i++) {
        const qk_norm_rope_heads *h = &c->of[i];
        *to[i] = (qk_norm_rope_forward_heads){h->x.data, h->weight.data, h->y.data, bst__head_map(&h->x),
                                              bst__head_map(&h->y)};
    }
    return bst__cuda_launch(exec, forward_op, c->of[0].x.device.device_id, &l, &args, sizeof args);
}

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    qk_norm_rope_cpu c = call_of(v, attributes);
    c.of[0].y = v[Q_OUT];
    c.of[1].y = v[K_OUT];
    if (!v[Q].count && !v[K].count) return BST_OK;
    if (v[Q].device.device_type == kDLCUDA) return forward_cuda(exec, &c);
    int64_t work = (v[Q].count + v[K].count) / c.tokens;
    bst__parallel_for(exec, c.tokens, bst__grain(work), BST_CPU_SELECT(bst__qk_norm_rope_forward_cpu), &c);
    return BST_OK;
}

#define Y_TYPE BST_TYPE_RULE(y_type, "the promoted type of the inputs")
static const bst_argument forward_arguments[] = {
    INPUTS,
    [Q_OUT] = HEADS_LIKE("q_out", BST_OUT, Q, Y_TYPE, BST_EXCHANGED(Q_TOKENS_FIRST)),
    [K_OUT] = HEADS_LIKE("k_out", BST_OUT | BST_OPTIONAL, K, Y_TYPE, BST_EXCHANGED(K_TOKENS_FIRST), BST_WITH(K)),
    {NULL},
};

static const bst_function forward = {
    .name = forward_op,
    .meanings = bst__head_symbols,
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_TORCH("qk_norm_rope_forward: q k! q_weight k_weight! cos sin eps casting interleaved q_tokens_first "
              "k_tokens_first -> q_out k_out"),
};

bst_status bst_qk_norm_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k,
                                    const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos,
                                    const DLTensor *sin, double eps, bst_casting casting, int interleaved,
                                    DLTensor *q_out, DLTensor *k_out) {
    const DLTensor *tensors[] = {[Q] = q,
                                 [K] = k,
                                 [COS] = cos,
                                 [SIN] = sin,
                                 [Q_WEIGHT] = q_weight,
                                 [K_WEIGHT] = k ? k_weight : NULL,
                                 [Q_OUT] = q_out,
                                 [K_OUT] = k_out};
    bst_attribute attributes[] = {
        [EPS].d = eps, [CASTING].i = casting, [PAIRS].i = interleaved, [K_TOKENS_FIRST] = {0}};
    return bst__run(&forward, exec, tensors, attributes);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status reduce_cuda(const bst_exec *exec, const qk_norm_rope_cpu *c, bst_launch l) {
    qk_norm_rope_dweight_args args = {c->partial, c->of[0].dweight.data, c->of[1].dweight.data, l.grid_x};
    bst_launch r = {.kernel = &reduce_kernel, .grid_x = (unsigned)((2 * l.values[DIM] + 31) / 32), .block = 1024};
    r.overlap = true;
    r.values[DIM] = l.values[DIM];
    r.values[W_TYPE] = l.values[W_TYPE];
    /* What this kernel does not depend on must not make new kernels of it. */
    r.values[ROTARY] = r.values[VEC] = r.values[PIECES] = r.values[GROUP] = r.values[THREADS] = 1;
    return bst__cuda_launch(exec, backward_op, c->of[0].x.device.device_id, &r, &args, sizeof args);
}

static bst_status backward_cuda(const bst_exec *exec, qk_norm_rope_cpu *c, bst_dtype y_dtype) {
    bst_chip chip;
    bst_launch l = {.kernel = &backward_kernel};
    int device = c->of[0].x.device.device_id;
    BST_TRY(bst__cuda_chip(backward_op, device, &chip));
    shape(&l, c, y_dtype, BACKWARD_THREADS);
    int64_t slots = 0, threads = l.values[THREADS], groups = threads / l.values[GROUP], vec = l.values[VEC];
    int64_t pieces = l.values[PIECES], each = QK_BACKWARD_EACH(pieces);
    bool want_dweight = false;
    qk_norm_rope_backward_args args = {.tables = tables_of(c), .eps = c->eps};
    qk_norm_rope_backward_heads *const to[] = {&args.q, &args.k};
    for (int i = 0; i < 2; i++) {
        const qk_norm_rope_heads *h = &c->of[i];
        int wants = (h->dx.data ? QK_DX : 0) | (h->dweight.data ? QK_DWEIGHT : 0);
        l.values[WANTS] |= wants << i * QK_OF_K;
        slots += wants ? slots_of(h->x.size[1], each) : 0;
        want_dweight |= h->dweight.data != NULL;
        *to[i] = (qk_norm_rope_backward_heads){h->x.data,
                                               h->weight.data,
                                               h->y.data,
                                               h->dx.data,
                                               bst__head_map(&h->x),
                                               bst__head_map(&h->y),
                                               bst__head_map(&h->dx)};
    }
    BST_TRY(check_count(backward_op, c, slots));
    /* The pieces of both inputs, of 16 bytes, for each of a thread's heads; at the end a row of sums for each group. */
    bool ring = vec * bst__dtype_size(c->of[0].x.dtype) == 16 && vec * bst__dtype_size(y_dtype) == 16;
    int64_t sums = want_dweight ? groups * l.values[DIM] * 4 : 0, copies = ring ? threads * each * 2 * pieces * 16 : 0;
    l.shared = (unsigned)(copies > sums ? copies : sums);
    /* Blocks that a multiprocessor holds. Of one piece a thread: 640 threads of 96 registers. Of two: 512 of 128; 384 of
     * 168 where some threads of a head have less to do than others. */
    bool even = l.values[ROTARY] == l.values[DIM] && l.values[DIM] == 2 * vec * l.values[GROUP];
    int64_t fit = l.shared ? chip.shared_memory / (int64_t)l.shared : INT64_MAX;
    int64_t blocks = (pieces == 1 ? 640 : vec < 8 || even ? 512 : 384) / threads;
    if (blocks > fit) blocks = fit;
    if (blocks < 1) blocks = 1;
    l.values[BLOCKS] = blocks;
    /* The grid: as many as the chip holds, but a group for each slot at least, and none without work. */
    int64_t all = (c->tokens * slots + groups - 1) / groups, least = (slots + groups - 1) / groups;
    blocks *= chip.processors;
    if (blocks < least) blocks = least;
    l.grid_x = (unsigned)(all < blocks ? all : blocks);
    void *partial = NULL;
    if (want_dweight) {
        size_t bytes = (size_t)l.grid_x * 2 * (size_t)l.values[DIM] * sizeof(float);
        BST_TRY(bst__allocate(exec, backward_op, c->of[0].x.device, bytes, &partial));
    }
    args.partial = c->partial = partial;
    bst_status status = bst__cuda_launch(exec, backward_op, device, &l, &args, sizeof args);
    if (status == BST_OK && want_dweight) status = reduce_cuda(exec, c, l);
    bst__release(exec, c->of[0].x.device, partial);
    return status;
}

static bst_status backward_cpu(const bst_exec *exec, qk_norm_rope_cpu *c) {
    int64_t work = (c->of[0].y.count + c->of[1].y.count) / c->tokens, dim = c->of[0].x.size[3];
    c->chunks = c->tokens < QK_NORM_ROPE_CHUNKS ? c->tokens : QK_NORM_ROPE_CHUNKS;
    void *partial = NULL;
    if (c->of[0].dweight.data || c->of[1].dweight.data) {
        size_t bytes = (size_t)(c->chunks * 2 * dim) * sizeof(float);
        BST_TRY(bst__allocate(exec, backward_op, c->of[0].x.device, bytes, &partial));
    }
    c->partial = partial;
    bst__parallel_for(exec, c->chunks, bst__grain(work * (c->tokens / c->chunks)),
                      BST_CPU_SELECT(bst__qk_norm_rope_backward_cpu), c);
    if (partial) BST_CPU_SELECT(bst__qk_norm_rope_dweight_cpu)(c, 0, 2);
    bst__release(exec, c->of[0].x.device, partial);
    return BST_OK;
}

/* The gradient that comes in for a head is needed where one of its own is wanted. */
static bst_status need_gradient(const char *name, const bst_view *dy, const qk_norm_rope_heads *h) {
    if (bst__given(dy) || (!bst__given(&h->dx) && !bst__given(&h->dweight))) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is NULL; a tensor is needed", backward_op, name);
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    qk_norm_rope_cpu c = call_of(v, attributes);
    bool work = false;
    for (int i = 0; i < 2; i++) {
        qk_norm_rope_heads *h = &c.of[i];
        h->dx = v[DQ + i];
        h->dweight = v[DQ_WEIGHT + i];
        BST_TRY(need_gradient(i ? "dk_out" : "dq_out", &v[DQ_OUT + i], h));
        if (h->dx.data || h->dweight.data) h->y = v[DQ_OUT + i]; /* else it is not looked at */
    }
    for (int i = 0; i < 2; i++) {
        qk_norm_rope_heads *h = &c.of[i];
        if (h->dweight.data && !h->x.count) {
            BST_TRY(bst__zero(exec, backward_op, &h->dweight));
            h->dweight = (bst_view){0};
        }
        work |= h->x.count && (h->dx.data || h->dweight.data);
    }
    if (!work) return BST_OK;
    if (v[Q].device.device_type == kDLCUDA) return backward_cuda(exec, &c, y_type(v, attributes));
    return backward_cpu(exec, &c);
}

#define DY_TYPE BST_TYPE_RULE(y_type, "the type of the forward result")
static const bst_argument backward_arguments[] = {
    INPUTS,
    [DQ_OUT] = HEADS_LIKE("dq_out", BST_IN | BST_OPTIONAL, Q, DY_TYPE),
    [DK_OUT] = HEADS_LIKE("dk_out", BST_IN | BST_OPTIONAL, K, DY_TYPE),
    [DQ] =
        HEADS_LIKE("dq", BST_OUT | BST_OPTIONAL, Q, BST_TYPE_OF(Q, "that of q and k"), BST_EXCHANGED(Q_TOKENS_FIRST)),
    [DK] =
        HEADS_LIKE("dk", BST_OUT | BST_OPTIONAL, K, BST_TYPE_OF(Q, "that of q and k"), BST_EXCHANGED(K_TOKENS_FIRST)),
    [DQ_WEIGHT] = DWEIGHT("dq_weight", Q_WEIGHT),
    [DK_WEIGHT] = DWEIGHT("dk_weight", K_WEIGHT),
    {NULL},
};

static const bst_function backward = {
    .name = backward_op,
    .meanings = bst__head_symbols,
    .arguments = backward_arguments,
    .attributes = rules,
    .run = run_backward,
    BST_TORCH("qk_norm_rope_backward: dq_out dk_out q k! q_weight k_weight! cos sin eps casting interleaved "
              "q_tokens_first k_tokens_first -> dq? dk? dq_weight? dk_weight?"),
};

const bst_function *const bst__qk_norm_rope[] = {&forward, &backward, NULL};

bst_status bst_qk_norm_rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                     const DLTensor *q, const DLTensor *k, const DLTensor *q_weight,
                                     const DLTensor *k_weight, const DLTensor *cos, const DLTensor *sin, double eps,
                                     bst_casting casting, int interleaved, DLTensor *dq, DLTensor *dk,
                                     DLTensor *dq_weight, DLTensor *dk_weight) {
    if (!k && (dk || dk_weight))
        return bst__error(BST_INVALID, "%s: a gradient of k is wanted, but k is NULL", backward_op);
    const DLTensor *tensors[] = {[Q] = q,
                                 [K] = k,
                                 [COS] = cos,
                                 [SIN] = sin,
                                 [Q_WEIGHT] = q_weight,
                                 [K_WEIGHT] = k ? k_weight : NULL,
                                 [DQ_OUT] = dq || dq_weight ? dq_out : NULL,
                                 [DK_OUT] = dk || dk_weight ? dk_out : NULL,
                                 [DQ] = dq,
                                 [DK] = dk,
                                 [DQ_WEIGHT] = dq_weight,
                                 [DK_WEIGHT] = dk_weight};
    bst_attribute attributes[] = {
        [EPS].d = eps, [CASTING].i = casting, [PAIRS].i = interleaved, [K_TOKENS_FIRST] = {0}};
    return bst__run(&backward, exec, tensors, attributes);
}
