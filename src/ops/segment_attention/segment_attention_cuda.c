/* segment_attention_cuda.c - attention within segments on CUDA: Hopper's tensor cores. */
#include <inttypes.h>

#include "cuda/cuda.h"
#include "ops/segment_attention/segment_attention.h"

#define MACROS {"WIDTH", "TYPE", "CAUSAL", "WINDOW", NULL}
static const bst_kernel forward = {"segment_attention.cu", "segment_attention_forward", MACROS};
static const bst_kernel dq = {"segment_attention_backward.cu", "segment_attention_dq", MACROS};
static const bst_kernel dkv = {"segment_attention_backward.cu", "segment_attention_dkv", MACROS};
static const bst_kernel sum = {"segment_attention_backward.cu", "segment_attention_sum", MACROS};

/* ---- what is served ---------------------------------------------------------------------------------------------- */

static bst_status need_chip(const segment_attention_call *c, bst_chip *chip) {
    BST_TRY(bst__cuda_chip(c->op, c->q.device.device_id, chip));
    if (!chip->warpgroups)
        return bst__error(BST_UNSUPPORTED,
                          "%s: GPUs of compute capability 9.0 are supported; this one's is %d.%d: use an attention of "
                          "the framework",
                          c->op, chip->arch / 10, chip->arch % 10);
    if (c->q.dtype == BST_F32 || c->dim > 256 || c->dim % 8)
        return bst__error(BST_UNSUPPORTED,
                          "%s: heads have %" PRId64
                          " elements of %s; on CUDA multiples of 8 up to 256 of bfloat16 or float16 are supported",
                          c->op, c->dim, bst__dtype_name(c->q.dtype));
    if (c->segments > ATTENTION_SEGMENTS)
        return bst__error(BST_UNSUPPORTED, "%s: there are %" PRId64 " segments; at most %d are supported on CUDA",
                          c->op, c->segments, ATTENTION_SEGMENTS);
    const int64_t tokens = c->queries > c->keys ? c->queries : c->keys;
    if ((tokens / ATTENTION_STEP + c->segments) * c->heads > INT32_MAX / 2 || tokens > INT32_MAX / 4)
        return bst__error(BST_UNSUPPORTED, "%s: %" PRId64 " tokens of %" PRId64 " heads are too many: split them",
                          c->op, tokens, c->heads);
    return BST_OK;
}

/* Of what is written, before anything is. */
static bst_status need_aligned(const segment_attention_call *c, const char *name, const bst_view *v) {
    if (!v->count || (uintptr_t)v->data % 16 == 0) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: %s does not begin at a multiple of 16 bytes", c->op, name);
}

/* How far tokens and heads are apart; that of one says nothing. */
static bst_status strides_of(const segment_attention_call *c, const char *name, const bst_view *v, int64_t strides[2]) {
    bool served = (uintptr_t)v->data % 16 == 0;
    for (int i = 0; i < 2; i++) {
        strides[i] = v->size[i] > 1 ? v->stride[i] : c->dim;
        served = served && strides[i] > 0 && strides[i] % 8 == 0;
    }
    if (served) return BST_OK;
    return bst__error(BST_UNSUPPORTED,
                      "%s: tokens or heads of %s do not lie multiples of 16 bytes apart; make it contiguous", c->op,
                      name);
}

/* A tensor's heads, in boxes of so many tokens. */
static bst_status map(const segment_attention_call *c, const char *name, const bst_view *v, uint32_t rows,
                      bst_tensor_map *out) {
    int64_t strides[2];
    BST_TRY(strides_of(c, name, v, strides));
    const bst_boxes boxes = {.data = v->data,
                             .dtype = v->dtype,
                             .dims = 3,
                             .rows = rows,
                             .sizes = {(uint64_t)c->dim, (uint64_t)v->size[0], (uint64_t)v->size[1]},
                             .strides = {(uint64_t)strides[0], (uint64_t)strides[1]}};
    return bst__cuda_map_boxes(c->op, v->device.device_id, &boxes, out);
}

static uint32_t key_rows(const segment_attention_call *c) { return ATTENTION_KEYS(ATTENTION_DIM(c->dim)); }

static bst_status map_inputs(const segment_attention_call *c, uint32_t query_rows, bst_tensor_map *q, bst_tensor_map *k,
                             bst_tensor_map *v) {
    BST_TRY(map(c, "q", &c->q, query_rows, q));
    if (!c->keys) return BST_OK; /* nothing is copied of them */
    BST_TRY(map(c, "k", &c->k, key_rows(c), k));
    return map(c, "v", &c->v, key_rows(c), v);
}

static attention_segments segments_of(const segment_attention_call *c) {
    return (attention_segments){.cuts = c->cuts.data,
                                .segments = (int32_t)c->segments,
                                .queries = (int32_t)c->queries,
                                .keys = (int32_t)c->keys,
                                .heads = (int32_t)c->heads,
                                .groups = (int32_t)(c->groups > 1 ? c->groups : 1),
                                .window = (int32_t)c->window,
                                .scale = c->scale * 1.4426950408889634f};
}

static bst_launch launch_of(const segment_attention_call *c, const bst_kernel *kernel, int64_t blocks,
                            unsigned shared) {
    return (bst_launch){.kernel = kernel,
                        .values = {c->dim, c->q.dtype, c->causal, c->window > 0},
                        .grid_x = (unsigned)blocks,
                        .block = ATTENTION_THREADS,
                        .shared = shared};
}

/* At most so many tiles: the host does not know where segments are. */
static int64_t most_tiles(const segment_attention_call *c, int64_t tokens, int64_t rows) {
    return tokens / rows + bst__lesser(c->segments, tokens);
}

#define SHARED(c, bytes) bytes(ATTENTION_DIM((c)->dim))

/* ---- the passes -------------------------------------------------------------------------------------------------- */

bst_status bst__segment_attention_forward_cuda(const bst_exec *exec, const segment_attention_call *c) {
    bst_chip chip;
    attention_forward_args args = {.of = segments_of(c), .y = c->y.data, .lse = c->lse.data};
    BST_TRY(need_chip(c, &chip));
    BST_TRY(need_aligned(c, "y", &c->y));
    BST_TRY(map_inputs(c, ATTENTION_QUERIES, &args.q, &args.k, &args.v));
    const int64_t tiles = most_tiles(c, c->queries, ATTENTION_QUERIES) * c->heads;
    const bst_launch l =
        launch_of(c, &forward, bst__lesser(tiles, chip.processors), SHARED(c, ATTENTION_FORWARD_SHARED));
    return bst__cuda_launch(exec, c->op, c->q.device.device_id, &l, &args, sizeof args);
}

static bst_status run_dq(const bst_exec *exec, const segment_attention_call *c, const bst_chip *chip, float *delta) {
    attention_dq_args args = {.of = segments_of(c),
                              .y = c->y.data,
                              .rows = c->dy.data,
                              .y_token = c->y.stride[0],
                              .y_head = c->y.stride[1],
                              .dy_token = c->dy.stride[0],
                              .dy_head = c->dy.stride[1],
                              .lse = c->lse.data,
                              .delta = delta,
                              .dq = c->dq.data,
                              .dq_scale = c->scale};
    int64_t of_y[2]; /* which threads read as boxes are */
    BST_TRY(map_inputs(c, ATTENTION_QUERIES, &args.q, &args.k, &args.v));
    BST_TRY(map(c, "dy", &c->dy, ATTENTION_QUERIES, &args.dy));
    BST_TRY(strides_of(c, "y", &c->y, of_y));
    const int64_t tiles = most_tiles(c, c->queries, ATTENTION_QUERIES) * c->heads;
    const bst_launch l = launch_of(c, &dq, bst__lesser(tiles, chip->processors), SHARED(c, ATTENTION_DQ_SHARED));
    return bst__cuda_launch(exec, c->op, c->q.device.device_id, &l, &args, sizeof args);
}

/* Among how many blocks a group's heads are shared out: so many that a multiprocessor has two, where tiles are not more
 * than one for each and some. Beneath a causal mask a segment's first tile has twice as much to do as the mean. */
static int64_t parts_of(const segment_attention_call *c, int64_t tiles, const bst_chip *chip) {
    const int64_t heads = c->heads / c->groups;
    int64_t parts = 1;
    if (4 * tiles >= 5 * (int64_t)chip->processors) return 1;
    while (parts < heads && (heads % parts || tiles * parts < 2 * chip->processors)) parts++;
    return parts;
}

static bst_status add_parts(const bst_exec *exec, const segment_attention_call *c, int32_t parts, const float *partial,
                            const bst_view *y) {
    const attention_sum_args args = {.partial = partial, .y = y->data, .count = y->count, .parts = parts};
    bst_launch l = launch_of(c, &sum, bst__divided_up(y->count / 4, ATTENTION_SUM_THREADS), 0);
    l.block = ATTENTION_SUM_THREADS;
    return bst__cuda_launch(exec, c->op, c->q.device.device_id, &l, &args, sizeof args);
}

static bst_status run_dkv(const bst_exec *exec, const segment_attention_call *c, const bst_chip *chip,
                          const float *delta) {
    if (!c->keys || !c->groups) return BST_OK;
    const int64_t tiles = most_tiles(c, c->keys, key_rows(c)) * c->groups, parts = parts_of(c, tiles, chip);
    const size_t bytes = (size_t)(parts * c->dk.count) * sizeof(float);
    attention_dkv_args args = {.of = segments_of(c),
                               .lse = c->lse.data,
                               .delta = delta,
                               .dk = c->dk.data,
                               .dv = c->dv.data,
                               .parts = (int32_t)parts,
                               .dk_scale = c->scale};
    void *partial = NULL;
    BST_TRY(map_inputs(c, ATTENTION_STEP, &args.q, &args.k, &args.v));
    BST_TRY(map(c, "dy", &c->dy, ATTENTION_STEP, &args.dy));
    if (parts > 1) {
        BST_TRY(bst__allocate(exec, c->op, c->q.device, 2 * bytes, &partial));
        args.dk = partial, args.dv = (char *)partial + bytes;
    }
    const bst_launch l = launch_of(c, &dkv, tiles * parts, SHARED(c, ATTENTION_DKV_SHARED));
    bst_status status = bst__cuda_launch(exec, c->op, c->q.device.device_id, &l, &args, sizeof args);
    if (parts > 1) {
        if (status == BST_OK) status = add_parts(exec, c, args.parts, args.dk, &c->dk);
        if (status == BST_OK) status = add_parts(exec, c, args.parts, args.dv, &c->dv);
        bst__release(exec, c->q.device, partial);
    }
    return status;
}

bst_status bst__segment_attention_backward_cuda(const bst_exec *exec, const segment_attention_call *c) {
    bst_chip chip;
    void *delta;
    BST_TRY(need_chip(c, &chip));
    BST_TRY(need_aligned(c, "dq", &c->dq));
    BST_TRY(need_aligned(c, "dk", &c->dk));
    BST_TRY(need_aligned(c, "dv", &c->dv));
    BST_TRY(bst__allocate(exec, c->op, c->q.device, (size_t)(c->heads * c->queries) * sizeof(float), &delta));
    bst_status status = run_dq(exec, c, &chip, delta);
    if (status == BST_OK) status = run_dkv(exec, c, &chip, delta);
    bst__release(exec, c->q.device, delta);
    return status;
}
