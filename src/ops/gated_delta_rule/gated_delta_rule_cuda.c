/* gated_delta_rule_cuda.c - the gated delta rule on CUDA: workspace, the launches' geometry and arguments. */
#include <assert.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"
#include "ops/gated_delta_rule/gated_delta_rule.h"
#include "ops/gated_delta_rule/gated_delta_rule_args.h"

enum { TYPE, G_TYPE, BETA_TYPE, SKIP_TYPE, Y_TYPE, DK, DV, VEC, PAIRED, ADDITIVE, NORMALIZE, PACKED, BV, SLICES, OWN };
#define MACROS \
    "TYPE", "G_TYPE", "BETA_TYPE", "SKIP_TYPE", "Y_TYPE", "DK", "DV", "VEC", "PAIRED", "ADDITIVE", "NORMALIZE", "PACKED"
static const bst_kernel prepare = {"gated_delta_rule.cu", "delta_prepare", {MACROS, NULL}};
static const bst_kernel scan = {"gated_delta_rule.cu", "delta_scan", {MACROS, "BV", "SLICES", "MAKE_Y", NULL}};
static const bst_kernel scan_back = {
    "gated_delta_rule_backward.cu", "delta_scan_back", {MACROS, "BV", "SLICES", "DSCAN", NULL}};
static const bst_kernel gradients = {"gated_delta_rule_backward.cu", "delta_gradients", {MACROS, "BV", "SLICES", NULL}};

/* A block's shared memory that is not dynamic, at most. */
enum { STATIC_SHARED = 5120 };

typedef struct plan {
    bst_launch launch;
    int64_t planes, key;    /* the latter padded */
    unsigned rows, square;  /* bytes of a chunk of keys, and of a matrix of tokens */
    int most;               /* bytes a block may use */
    int64_t slots;          /* of a head's chunks in a row, or of those of all sequences */
    int64_t chunks, states; /* of all heads of values; bytes of the states before each of them */
} plan;

static delta_map map_of(const bst_view *v) {
    return (delta_map){v->stride[0], v->stride[1], v->size[2] > 1 ? v->stride[2] : 0};
}
static delta_input input_of(const bst_view *v) { return (delta_input){v->data, map_of(v)}; }

/* Bytes of tiles: of states, and beside them of values and of what came in. */
static unsigned state_tile(const plan *p) {
    return (unsigned)DELTA_TILE_BYTES(p->planes, p->key, p->launch.values[BV]);
}
static unsigned value_tile(const plan *p, int64_t planes) {
    return (unsigned)DELTA_TILE_BYTES(planes, DELTA_CHUNK, p->launch.values[BV]);
}

static int64_t input_planes(const delta_call *c, const plan *p) { return c->dy.dtype == BST_BF16 ? 1 : p->planes; }

static unsigned scan_bytes(const delta_call *c, const plan *p, bool backward) {
    return p->rows + state_tile(p) + p->square + value_tile(p, p->planes) +
           (backward ? value_tile(p, input_planes(c, p)) : 0);
}
static unsigned gradient_bytes(const plan *p) {
    return p->rows + 2 * state_tile(p) + p->square + 3 * value_tile(p, p->planes);
}

static bst_status make_plan(const delta_call *c, bool backward, plan *p) {
    const bst_view *views[] = {&c->v, &c->y, &c->final, &c->dy, &c->dq, &c->dk, &c->dv, &c->dinitial};
    bst_chip chip;
    BST_TRY(bst__cuda_chip(c->op, c->q.device.device_id, &chip));
    int64_t *values = p->launch.values, vec = 16 / bst__dtype_size(c->q.dtype);
    vec = bst__alignment(&c->k, bst__alignment(&c->q, vec));
    while (c->key % vec) vec /= 2;
    values[TYPE] = c->q.dtype, values[G_TYPE] = c->g.dtype, values[BETA_TYPE] = c->beta.dtype;
    values[DK] = c->key, values[DV] = c->value, values[VEC] = vec;
    values[ADDITIVE] = c->additive, values[NORMALIZE] = c->normalize, values[SKIP_TYPE] = c->skip.dtype;
    values[Y_TYPE] = backward ? c->dy.dtype : c->y.dtype;
    values[PAIRED] = c->value % 2 == 0 && (!backward || c->key % 2 == 0);
    for (size_t i = 0; i < sizeof views / sizeof *views; i++)
        if (bst__alignment(views[i], 2) < 2) values[PAIRED] = 0;
    p->launch.overlap = true;
    p->planes = DELTA_PLANES(c->q.dtype), p->key = DELTA_PADDED(c->key);
    p->rows = (unsigned)DELTA_TILE_BYTES(p->planes, DELTA_CHUNK, p->key);
    p->square = (unsigned)DELTA_TILE_BYTES(p->planes, DELTA_CHUNK, DELTA_CHUNK);
    p->most = chip.shared_memory - STATIC_SHARED;
    values[PACKED] = c->boundaries != NULL;
    /* Of packed sequences the host knows the number alone: gated_delta_rule_args.h says how many slots serve them. */
    p->slots = c->boundaries ? c->tokens / DELTA_CHUNK + c->sequences : c->chunks;
    p->chunks = c->batches * c->heads * p->slots;
    for (values[BV] = c->value > 16 ? 32 : 16; values[BV] >= 16; values[BV] -= 16)
        if ((int)(backward ? gradient_bytes(p) : scan_bytes(c, p, false)) <= p->most) break;
    if (!values[BV])
        return bst__error(BST_UNSUPPORTED,
                          "%s: heads of %d elements of this type take more shared memory than this GPU has", c->op,
                          (int)c->key);
    values[SLICES] = bst__divided_up(c->value, values[BV]);
    p->states = p->chunks * p->planes * p->key * values[BV] * values[SLICES] * 2;
    return bst__cuda_need_rows(c->op, p->chunks, values[SLICES]);
}

static bst_status run(const bst_exec *exec, const delta_call *c, plan *p, const bst_kernel *kernel, int64_t blocks,
                      unsigned shared, int64_t own, const void *args, size_t bytes) {
    p->launch.kernel = kernel;
    p->launch.grid_x = (unsigned)blocks;
    p->launch.shared = shared;
    p->launch.block = DELTA_THREADS;
    p->launch.values[OWN] = own;
    return bst__cuda_launch(exec, c->op, c->q.device.device_id, &p->launch, args, bytes);
}

/* The inputs, with memory for what each chunk has by itself, and that made. */
static bst_status begin(const bst_exec *exec, const delta_call *c, plan *p, delta_args *of, void **work) {
    size_t square = (size_t)(p->chunks * p->planes * DELTA_CHUNK * DELTA_CHUNK * 2);
    size_t sums = (size_t)(p->chunks * DELTA_CHUNK) * sizeof(float);
    *of = (delta_args){.q = input_of(&c->q),
                       .k = input_of(&c->k),
                       .v = input_of(&c->v),
                       .g = input_of(&c->g),
                       .beta = input_of(&c->beta),
                       .skip = c->skip.data,
                       .tokens = c->tokens,
                       .heads = (int32_t)c->heads,
                       .key_heads = (int32_t)c->key_heads,
                       .chunks = (int32_t)p->slots,
                       .scale = c->scale,
                       .eps = c->eps,
                       .sequences = (int32_t)c->sequences,
                       .boundaries = c->boundaries};
    BST_TRY(bst__allocate(exec, c->op, c->q.device, sums + (c->additive ? square : 2 * square), work));
    of->sums = *work, of->scores = (char *)*work + sums;
    if (!c->additive) of->inverse = (char *)of->scores + square;
    enum { MATRICES = 2 * DELTA_CHUNK * DELTA_SYSTEM_PITCH * sizeof(float) }; /* over the keys */
    unsigned shared = 2 * p->rows < MATRICES ? MATRICES : 2 * p->rows;
    return run(exec, c, p, &prepare, p->chunks, shared, 0, of, sizeof *of);
}

bst_status bst__delta_forward_cuda(const bst_exec *exec, const delta_call *c) {
    plan p = {0};
    delta_scan_args args = {.initial = c->initial.data, .y = c->y.data, .final = c->final.data};
    void *work = NULL;
    BST_TRY(make_plan(c, false, &p));
    bst_status status = begin(exec, c, &p, &args.of, &work);
    int64_t blocks = c->sequences * c->heads * p.launch.values[SLICES];
    if (status == BST_OK) status = run(exec, c, &p, &scan, blocks, scan_bytes(c, &p, false), 1, &args, sizeof args);
    bst__release(exec, c->q.device, work);
    return status;
}

bst_status bst__delta_backward_cuda(const bst_exec *exec, const delta_call *c) {
    plan p = {0};
    delta_backward_args args = {.dy = input_of(&c->dy),
                                .dfinal = c->dfinal.data,
                                .dv = c->dv.data,
                                .dinitial = c->dinitial.data,
                                .dq = c->dq.data,
                                .dk = c->dk.data,
                                .dg = c->dg.data,
                                .dbeta = c->dbeta.data};
    void *work = NULL, *states = NULL, *skipped = NULL;
    BST_TRY(make_plan(c, true, &p));
    bst_status status = begin(exec, c, &p, &args.of, &work);
    int64_t blocks = c->sequences * c->heads * p.launch.values[SLICES];
    if (status == BST_OK) status = bst__allocate(exec, c->op, c->q.device, 2 * (size_t)p.states, &states);
    if (status == BST_OK && c->dskip.data)
        status = bst__allocate(exec, c->op, c->q.device, (size_t)blocks * sizeof(float), &skipped);
    args.dskip = skipped;
    args.states = states, args.dstates = (char *)states + p.states;
    delta_scan_args before = {.of = args.of, .initial = c->initial.data, .states = states};
    if (status == BST_OK)
        status = run(exec, c, &p, &scan, p.slots ? blocks : 0, scan_bytes(c, &p, false), 0, &before, sizeof before);
    if (status == BST_OK) status = run(exec, c, &p, &scan_back, blocks, scan_bytes(c, &p, true), 1, &args, sizeof args);
    if (status == BST_OK)
        status = run(exec, c, &p, &gradients, c->batches * c->key_heads * p.slots, gradient_bytes(&p), 0, &args,
                     sizeof args);
    if (status == BST_OK && skipped) {
        int64_t rows = c->sequences * p.launch.values[SLICES];
        status = bst__column_sums(exec, c->op, c->q.device.device_id, skipped, rows, c->heads, c->heads, c->dskip.dtype,
                                  (void *[]){c->dskip.data, NULL});
    }
    bst__release(exec, c->q.device, skipped);
    bst__release(exec, c->q.device, states);
    bst__release(exec, c->q.device, work);
    return status;
}
