/* qk_norm_rope.c - QK-norm and rotary embedding: checks, then the configuration, then the kernels of the tensors'
 * device. */
#include <assert.h>
#include <inttypes.h>

#include "core/heads.h"
#include "cuda/cuda.h"
#include "ops/qk_norm_rope/qk_norm_rope_args.h"
#include "ops/qk_norm_rope/qk_norm_rope_cpu.h"

static const char forward_op[] = "qk_norm_rope_forward", backward_op[] = "qk_norm_rope_backward";

/* What the messages call the tensors of q and of k. */
static const struct {
    const char *x, *weight, *y, *dy, *dx, *dweight;
} names[] = {{"q", "q_weight", "q_out", "dq_out", "dq", "dq_weight"},
             {"k", "k_weight", "k_out", "dk_out", "dk", "dk_weight"}};

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static bst_dtype promoted(bst_dtype a, bst_dtype b) { return a == b ? a : BST_F32; }

static bst_status check_weight(const char *op, int which, const DLTensor *weight, qk_norm_rope_heads *h) {
    BST_TRY(bst__view(op, names[which].weight, BST_FLOATS, weight, &h->weight));
    BST_TRY(bst__need_dims(op, names[which].weight, &h->weight, 1));
    BST_TRY(bst__need_size(op, names[which].weight, &h->weight, 0, h->x.size[3], "the size of a head"));
    BST_TRY(bst__need_contiguous(op, names[which].weight, &h->weight));
    return bst__need_device(op, names[which].weight, &h->weight, &h->x, names[which].x);
}

/* What forward and backward have in common; and the type of the result. */
static bst_status check_inputs(const char *op, const DLTensor *const x[2], const DLTensor *const weight[2],
                               const DLTensor *cos, const DLTensor *sin, double eps, bst_casting casting,
                               qk_norm_rope_cpu *c, bst_dtype *y_dtype) {
    qk_norm_rope_heads *q = &c->of[0], *k = &c->of[1];
    BST_TRY(bst__need_eps(op, eps));
    c->eps = (float)eps;
    if (casting < BST_CASTING_LLAMA || casting > BST_CASTING_NONE)
        return bst__error(BST_INVALID, "%s: casting is %d; 0 (llama), 1 (gemma) or 2 (none) is needed", op,
                          (int)casting);
    BST_TRY(bst__heads(op, "q", x[0], &q->x));
    BST_TRY(bst__rotary_table(op, "cos", cos, &q->x, "q", &c->cos));
    BST_TRY(bst__rotary_table(op, "sin", sin, &q->x, "q", &c->sin));
    BST_TRY(bst__need_size(op, "sin", &c->sin, 2, c->cos.size[2], "that of cos"));
    BST_TRY(bst__need_dtype(op, "sin", &c->sin, c->cos.dtype, "the type of cos"));
    BST_TRY(check_weight(op, 0, weight[0], q));
    BST_TRY(bst__heads_beside(op, "k", x[1], &q->x, "q", &k->x));
    if (x[1]) {
        BST_TRY(bst__need_dtype(op, "k", &k->x, q->x.dtype, "as for q"));
        BST_TRY(check_weight(op, 1, weight[1], k));
        BST_TRY(bst__need_dtype(op, "k_weight", &k->weight, q->weight.dtype, "as for q_weight"));
    }
    bst_dtype normed = casting == BST_CASTING_LLAMA ? promoted(q->x.dtype, q->weight.dtype) : q->x.dtype;
    *y_dtype = promoted(normed, c->cos.dtype);
    c->tokens = q->x.size[0] * q->x.size[2];
    c->positions = q->x.size[2];
    c->gemma = casting == BST_CASTING_GEMMA;
    return BST_OK;
}

/* Outputs share no memory with what is read, nor with each other. */
static bst_status check_apart(const char *op, const qk_norm_rope_cpu *c, const bst_named *outputs, int count) {
    const qk_norm_rope_heads *q = &c->of[0], *k = &c->of[1];
    const bst_named inputs[] = {{"q", &q->x},     {"k", &k->x},     {"q_weight", &q->weight}, {"k_weight", &k->weight},
                                {"cos", &c->cos}, {"sin", &c->sin}, {"dq_out", &q->y},        {"dk_out", &k->y}};
    /* y is read in the backward pass alone. */
    return bst__need_all_apart(op, outputs, count, inputs, op == backward_op ? 8 : 6);
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

static bool alternative_forward(bst_launch *l, int number, int64_t tokens) {
    static const struct {
        int64_t each, threads;
    } others[] = {{4, 64}, {4, 128}, {8, 128}};
    if (number > (int)(sizeof others / sizeof *others)) return false;
    bst_launch other = *l;
    set_threads(&other, others[number - 1].threads);
    if (tokens <= INT32_MAX / arrange_forward(&other, tokens, others[number - 1].each)) *l = other;
    return true;
}

static bst_status forward_cuda(const bst_exec *exec, const qk_norm_rope_cpu *c) {
    bst_launch l = {.kernel = &forward_kernel};
    shape(&l, c, c->of[0].y.dtype, FORWARD_THREADS);
    BST_TRY(check_count(forward_op, c, arrange_forward(&l, c->tokens, FORWARD_EACH)));
    bst_alternatives alternatives = {alternative_forward, c->tokens, false};
    qk_norm_rope_forward_args args = {.tables = tables_of(c), .eps = c->eps};
    qk_norm_rope_forward_heads *const to[] = {&args.q, &args.k};
    for (int i = 0; i < 2; i++) {
        const qk_norm_rope_heads *h = &c->of[i];
        *to[i] = (qk_norm_rope_forward_heads){h->x.data, h->weight.data, h->y.data, bst__head_map(&h->x),
                                              bst__head_map(&h->y)};
    }
    return bst__cuda_launch_tuned(exec, forward_op, c->of[0].x.device.device_id, &l, &alternatives, &args, sizeof args);
}

bst_status bst_qk_norm_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k,
                                    const DLTensor *q_weight, const DLTensor *k_weight, const DLTensor *cos,
                                    const DLTensor *sin, double eps, bst_casting casting, int interleaved,
                                    DLTensor *q_out, DLTensor *k_out) {
    const DLTensor *const x[] = {q, k}, *const weight[] = {q_weight, k_weight}, *const y[] = {q_out, k_out};
    qk_norm_rope_cpu c = {.interleaved = interleaved};
    bst_dtype y_dtype = BST_F32;
    BST_TRY(check_inputs(forward_op, x, weight, cos, sin, eps, casting, &c, &y_dtype));
    for (int i = 0; i < 2; i++) {
        qk_norm_rope_heads *h = &c.of[i];
        if (!x[i] && y[i])
            return bst__error(BST_INVALID, "%s: %s is given, but %s is NULL", forward_op, names[i].y, names[i].x);
        if (!x[i]) continue;
        BST_TRY(bst__heads_like(forward_op, names[i].y, y[i], &h->x, names[i].x, &h->y));
        BST_TRY(bst__need_distinct(forward_op, names[i].y, &h->y));
        BST_TRY(bst__need_dtype(forward_op, names[i].y, &h->y, y_dtype, "the promoted type of the inputs"));
    }
    BST_TRY(check_apart(forward_op, &c, (bst_named[]){{"q_out", &c.of[0].y}, {"k_out", &c.of[1].y}}, 2));
    if (!c.of[0].x.count && !c.of[1].x.count) return BST_OK;
    if (c.of[0].x.device.device_type == kDLCUDA) return forward_cuda(exec, &c);
    int64_t work = (c.of[0].x.count + c.of[1].x.count) / c.tokens;
    bst__parallel_for(exec, c.tokens, bst__grain(work), BST_CPU_SELECT(bst__qk_norm_rope_forward_cpu), &c);
    return BST_OK;
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

/* What is wanted of q or of k, and the gradient that comes in for it. */
static bst_status check_gradients(int which, const DLTensor *dy, DLTensor *dx, DLTensor *dweight, bst_dtype y_dtype,
                                  qk_norm_rope_heads *h) {
    const char *x_name = names[which].x, *dy_name = names[which].dy;
    if (!dx && !dweight) return BST_OK;
    if (!h->x.dims)
        return bst__error(BST_INVALID, "%s: a gradient of %s is wanted, but %s is NULL", backward_op, x_name, x_name);
    BST_TRY(bst__heads_like(backward_op, dy_name, dy, &h->x, x_name, &h->y));
    BST_TRY(bst__need_dtype(backward_op, dy_name, &h->y, y_dtype, "the type of the forward result"));
    if (dx) {
        BST_TRY(bst__heads_like(backward_op, names[which].dx, dx, &h->x, x_name, &h->dx));
        BST_TRY(bst__need_distinct(backward_op, names[which].dx, &h->dx));
        BST_TRY(bst__need_dtype(backward_op, names[which].dx, &h->dx, h->x.dtype, "that of q and k"));
    }
    if (!dweight) return BST_OK;
    return bst__output(backward_op, names[which].dweight, dweight, &h->weight, names[which].weight, h->weight.dtype,
                       &h->dweight);
}

bst_status bst_qk_norm_rope_backward(const bst_exec *exec, const DLTensor *dq_out, const DLTensor *dk_out,
                                     const DLTensor *q, const DLTensor *k, const DLTensor *q_weight,
                                     const DLTensor *k_weight, const DLTensor *cos, const DLTensor *sin, double eps,
                                     bst_casting casting, int interleaved, DLTensor *dq, DLTensor *dk,
                                     DLTensor *dq_weight, DLTensor *dk_weight) {
    const DLTensor *const x[] = {q, k}, *const weight[] = {q_weight, k_weight};
    qk_norm_rope_cpu c = {.interleaved = interleaved};
    bst_dtype y_dtype = BST_F32;
    BST_TRY(check_inputs(backward_op, x, weight, cos, sin, eps, casting, &c, &y_dtype));
    BST_TRY(check_gradients(0, dq_out, dq, dq_weight, y_dtype, &c.of[0]));
    BST_TRY(check_gradients(1, dk_out, dk, dk_weight, y_dtype, &c.of[1]));
    const bst_named outputs[] = {
        {"dq", &c.of[0].dx}, {"dk", &c.of[1].dx}, {"dq_weight", &c.of[0].dweight}, {"dk_weight", &c.of[1].dweight}};
    BST_TRY(check_apart(backward_op, &c, outputs, 4));
    bool work = false;
    for (int i = 0; i < 2; i++) {
        qk_norm_rope_heads *h = &c.of[i];
        if (h->dweight.data && !h->x.count) {
            BST_TRY(bst__zero(exec, backward_op, &h->dweight));
            h->dweight = (bst_view){0};
        }
        work |= h->x.count && (h->dx.data || h->dweight.data);
    }
    if (!work) return BST_OK;
    if (c.of[0].x.device.device_type == kDLCUDA) return backward_cuda(exec, &c, y_dtype);
    return backward_cpu(exec, &c);
}
