/* rope_cuda.c - rotary embedding on CUDA, with and without a norm: the launches' geometry and arguments. */
#include <assert.h>
#include <inttypes.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_args.h"

static_assert(ROPE_HALVES == BST_ROPE_HALVES && ROPE_INTERLEAVED == BST_ROPE_INTERLEAVED &&
                  ROPE_INTERLEAVED_TO_HALVES == BST_ROPE_INTERLEAVED_TO_HALVES,
              "kernels know the layouts by their numbers");

/* ---- how the elements of a head are shared out, see rope_pieces.cuh ---------------------------------------------- */

/* The kernels' macros: these both have, and one and two more of the first and the second. */
enum { DIM, ROTARY, Q_HEADS, K_HEADS, IN_TYPE, OUT_TYPE, TABLE_TYPE, LAYOUT, HALF_TABLES, VEC, PIECES, W_TYPE };
enum { NORM = W_TYPE + 1, GROUP, THREADS, OWN, EACH = OWN, TRANSPOSED, WANTS = OWN, BLOCKS };
#define MACROS(...)                                                                                       \
    {"DIM", "ROTARY", "Q_HEADS", "K_HEADS", "IN_TYPE", "OUT_TYPE", "TABLE_TYPE", "LAYOUT", "HALF_TABLES", \
     "VEC", "PIECES", "W_TYPE",  "NORM",    "GROUP",   "THREADS",  __VA_ARGS__,  NULL}
static const bst_kernel kernel = {"rope.cu", "rope", MACROS("EACH", "TRANSPOSED", "ROPE")};
static const bst_kernel backward_kernel = {"rope.cu", "rope_norm_backward", MACROS("WANTS", "BLOCKS", "BACKWARD")};

/* Elements of an access, such that pieces of that size cover a head. */
static int64_t vector(const rope_call *c, bst_dtype y_type) {
    const rope_heads *q = &c->of[0];
    int64_t dim = q->x.size[3];
    bool wide = q->x.dtype == BST_F32 || y_type == BST_F32 || c->cos.dtype == BST_F32 ||
                (c->normed && q->weight.dtype == BST_F32);
    int64_t vec = wide ? 4 : 8;
    while (c->rotary / 2 % vec || (dim > c->rotary && dim % vec)) vec /= 2;
    vec = bst__alignment(&c->sin, bst__alignment(&c->cos, vec));
    for (int i = 0; i < 2; i++) {
        const rope_heads *h = &c->of[i];
        const bst_view *const views[] = {&h->weight, &h->dx, &h->y, &h->x};
        for (int j = 0; j < 4; j++) vec = bst__alignment(views[j], vec);
    }
    return vec;
}

/* Sets what both kernels have of a call, for blocks of `threads`, or more where a head takes more; returns the groups
 * of a block. */
static int64_t share_out(bst_launch *l, const rope_call *c, bst_dtype y_type, int64_t threads) {
    const bst_view *x = &c->of[0].x;
    int64_t dim = x->size[3], rotary = c->rotary, vec = vector(c, y_type), whole = dim / vec;
    bool in_a_warp = whole <= 32 && !(whole & (whole - 1));
    int64_t pieces = in_a_warp && rotary == dim && c->layout == BST_ROPE_HALVES ? 1 : 2;
    int64_t lanes = rotary / pieces / vec + bst__divided_up(dim - rotary, 2 * vec), group = 1;
    while (group < lanes) group *= 2;
    if (threads < group) threads = group;
    const int64_t values[W_TYPE] = {dim,    rotary,       x->size[1], c->of[1].x.size[1], x->dtype,
                                    y_type, c->cos.dtype, c->layout,  c->half_tables,     vec,
                                    pieces};
    for (int i = 0; i < W_TYPE; i++) l->values[i] = values[i];
    l->values[W_TYPE] = c->of[0].weight.dtype;
    l->values[NORM] = !c->normed ? ROPE_PLAIN : c->gemma ? ROPE_GEMMA : ROPE_WEIGHT;
    l->values[GROUP] = group;
    l->values[THREADS] = threads;
    l->block = (unsigned)threads;
    return threads / group;
}

/* Slots of all tokens are counted in 32 bits. */
static bst_status check_slots(const rope_call *c, int64_t slots) {
    if (c->tokens <= INT32_MAX / slots) return BST_OK;
    return bst__error(BST_UNSUPPORTED,
                      "%s: %" PRId64 " tokens are given; with this many heads, at most %" PRId64 " are supported",
                      c->op, c->tokens, INT32_MAX / slots);
}

static rope_map map_of(const bst_view *v) { return (rope_map){v->stride[0], v->stride[1], v->stride[2]}; }

static rope_tables tables_of(const rope_call *c) {
    return (rope_tables){c->cos.data,      c->sin.data,      c->cos.stride[0],    c->cos.stride[1],
                         c->sin.stride[0], c->sin.stride[1], (uint32_t)c->tokens, (uint32_t)c->positions};
}

/* ---- rope, and its transpose ------------------------------------------------------------------------------------- */

enum { FORWARD_THREADS = 64, BACKWARD_THREADS = 128 };

/* Heads of a group, `most` or half as many. With a norm many, for they share a read of the weight and of the tables, in
 * small blocks. On an H200, 16384 tokens of 32 + 8 heads of 128 in bf16: eight 84 us, in blocks of 128 threads 85, four
 * 88. Without one few: two 85.9, four 86.2, eight 86.2; at 512 tokens 4.8, 4.9, 5.1; but four of two pieces, where two
 * take 1.07 to 1.1 of the time at 32 + 32 heads of 96. A slot that is not full reads a head again for each place that
 * is empty: where that leaves a quarter of them empty or more, half as many are taken, if that leaves fewer. With a
 * norm 9 + 3 heads of 64 (12 places of 24 empty, then 4 of 16) take 0.79 to 0.82 of the time at 512 to 16384 tokens,
 * 8 + 4 of 256 (4 of 16, then none) 0.85 to 0.92. */
static int64_t heads_of_a_group(int64_t q, int64_t k, int64_t most) {
    int64_t half = most / 2, of_most = most * (bst__divided_up(q, most) + bst__divided_up(k, most)),
            of_half = half * (bst__divided_up(q, half) + bst__divided_up(k, half));
    return 4 * (of_most - q - k) >= of_most && of_half < of_most ? half : most;
}

bst_status bst__rope_cuda(const bst_exec *exec, const rope_call *c) {
    bst_launch l = {.kernel = &kernel};
    int64_t groups = share_out(&l, c, c->of[0].y.dtype, FORWARD_THREADS);
    int64_t q_heads = l.values[Q_HEADS], k_heads = l.values[K_HEADS];
    int64_t each = heads_of_a_group(q_heads, k_heads, c->normed ? 8 : 2 * l.values[PIECES]);
    int64_t slots = bst__divided_up(q_heads, each) + bst__divided_up(k_heads, each);
    BST_TRY(check_slots(c, slots));
    l.values[EACH] = each;
    l.values[TRANSPOSED] = c->transposed;
    l.grid_x = (unsigned)bst__divided_up(c->tokens * slots, groups);
    rope_args args = {.tables = tables_of(c), .eps = c->eps};
    rope_forward_heads *const to[] = {&args.q, &args.k};
    for (int i = 0; i < 2; i++) {
        const rope_heads *h = &c->of[i];
        *to[i] = (rope_forward_heads){h->x.data, h->weight.data, h->y.data, map_of(&h->x), map_of(&h->y)};
    }
    return bst__cuda_launch(exec, c->op, c->of[0].x.device.device_id, &l, &args, sizeof args);
}

/* ---- the backward pass with a norm ------------------------------------------------------------------------------- */

bst_status bst__rope_norm_backward_cuda(const bst_exec *exec, const rope_call *c, bst_dtype y_type) {
    bst_chip chip;
    bst_launch l = {.kernel = &backward_kernel};
    DLDevice device = c->of[0].x.device;
    BST_TRY(bst__cuda_chip(c->op, device.device_id, &chip));
    int64_t groups = share_out(&l, c, y_type, BACKWARD_THREADS), slots = 0, threads = l.values[THREADS];
    int64_t vec = l.values[VEC], pieces = l.values[PIECES], each = ROPE_BACKWARD_EACH(pieces);
    bool want_dweight = false;
    rope_norm_backward_args args = {.tables = tables_of(c), .eps = c->eps};
    rope_norm_backward_heads *const to[] = {&args.q, &args.k};
    for (int i = 0; i < 2; i++) {
        const rope_heads *h = &c->of[i];
        int wants = (h->dx.data ? ROPE_DX : 0) | (h->dweight.data ? ROPE_DWEIGHT : 0);
        l.values[WANTS] |= wants << i * ROPE_OF_K;
        slots += wants ? bst__divided_up(h->x.size[1], each) : 0;
        want_dweight |= h->dweight.data != NULL;
        *to[i] = (rope_norm_backward_heads){h->x.data,     h->weight.data, h->y.data,     h->dx.data,
                                            map_of(&h->x), map_of(&h->y),  map_of(&h->dx)};
    }
    BST_TRY(check_slots(c, slots));
    /* The pieces of both inputs, of 16 bytes, for each of a thread's heads; at the end a row of sums for each group. */
    bool ring = vec * bst__dtype_size(c->of[0].x.dtype) == 16 && vec * bst__dtype_size(y_type) == 16;
    int64_t sums = want_dweight ? groups * l.values[DIM] * 4 : 0, copies = ring ? threads * each * 2 * pieces * 16 : 0;
    l.shared = (unsigned)(copies > sums ? copies : sums);
    /* Blocks that a multiprocessor holds. Of one piece a thread: 640 threads of 96 registers. Of two: 512 of 128; 384
     * of 168 where some threads of a head have less to do than others. */
    bool even = l.values[ROTARY] == l.values[DIM] && l.values[DIM] == 2 * vec * l.values[GROUP];
    int64_t fit = l.shared ? chip.shared_memory / (int64_t)l.shared : INT64_MAX;
    int64_t blocks = bst__lesser((pieces == 1 ? 640 : vec < 8 || even ? 512 : 384) / threads, fit);
    if (blocks < 1) blocks = 1;
    l.values[BLOCKS] = blocks;
    /* The grid: as many as the chip holds, but a group for each slot at least, and none without work. */
    int64_t least = bst__divided_up(slots, groups);
    blocks *= chip.processors;
    l.grid_x = (unsigned)bst__lesser(bst__divided_up(c->tokens * slots, groups), blocks < least ? least : blocks);
    void *partial = NULL;
    if (want_dweight) {
        size_t bytes = (size_t)l.grid_x * 2 * (size_t)l.values[DIM] * sizeof(float);
        BST_TRY(bst__allocate(exec, c->op, device, bytes, &partial));
    }
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, c->op, device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && want_dweight)
        status = bst__column_sums(exec, c->op, device.device_id, partial, l.grid_x, 2 * l.values[DIM], l.values[DIM],
                                  c->of[0].weight.dtype, (void *[]){c->of[0].dweight.data, c->of[1].dweight.data});
    bst__release(exec, device, partial);
    return status;
}
