/* moe_cuda.c - a mixture of experts around its grouped products, on CUDA: the configuration of each kernel, a function
 * of shape and alignment, and its launch. */
#include "cuda/cuda.h"
#include "ops/moe/moe.h"

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* Macros in the order of their values; one list serves all kernels of the file. */
enum { TYPE, W_TYPE, COLUMNS, VEC, BIAS_VEC, H_VEC, THREADS, CHOICES, BIAS, WEIGHTS, DH, WY, DWEIGHTS, DBIAS, DOTS };
#define MACROS(which)                                                                               \
    {"TYPE",    "W_TYPE", "COLUMNS", "VEC",      "BIAS_VEC", "H_VEC", "THREADS", "CHOICES", "BIAS", \
     "WEIGHTS", "DH",     "WY",      "DWEIGHTS", "DBIAS",    "DOTS",  which,     NULL}

static const bst_kernel count_kernel = {"moe.cu", "moe_sort_count", MACROS("COUNT")};
static const bst_kernel place_kernel = {"moe.cu", "moe_sort_place", MACROS("PLACE")};
static const bst_kernel gather_kernel = {"moe.cu", "moe_gather", MACROS("GATHER")};
static const bst_kernel glu_forward_kernel = {"moe.cu", "moe_glu_forward", MACROS("GLU_FORWARD")};
static const bst_kernel glu_backward_kernel = {"moe.cu", "moe_glu_backward", MACROS("GLU_BACKWARD")};
static const bst_kernel combine_forward_kernel = {"moe.cu", "moe_combine_forward", MACROS("COMBINE_FORWARD")};
static const bst_kernel combine_backward_kernel = {"moe.cu", "moe_combine_backward", MACROS("COMBINE_BACKWARD")};
static const bst_kernel bias_sum_kernel = {"moe.cu", "moe_bias_sum", MACROS("BIAS_SUM")};

/* Threads of a block that works on one row, or on elements, at a time: many short blocks, so that the last ones do not
 * straggle. */
enum { SHORT_BLOCK = 128 };

/* The widest access, at most `most` elements, that this matrix allows. */
static int narrower(int most, const bst_view *v) {
    int64_t columns = v->size[v->dims - 1], count = v->count / columns;
    bst_rows rows = {.rows = count, .columns = columns, .inner = count, .inner_stride = v->stride[0]};
    int allowed = bst__row_vector(v, &rows);
    return allowed < most ? allowed : most;
}

static unsigned blocks_for(int64_t work, int64_t each) { return (unsigned)((work + each - 1) / each); }

static int whole_warps(int64_t threads) { return (int)(threads + 31) / 32 * 32; }

/* Threads for all columns of a row, in as many turns as 512 threads need: each turn as wide as the others, so that few
 * threads idle. */
static int row_threads(int64_t vectors) {
    int64_t turns = (vectors + 511) / 512;
    return whole_warps((vectors + turns - 1) / turns);
}

/* Rows of a block that also sums over rows: many, so that its partial sums weigh little beside the rows (at 32 rows of
 * two-byte elements an eighth of one row's bytes, 4 written and 4 read a column), but enough blocks for the chip. */
static int row_chunk(int64_t rows) { return rows >= 4096 ? MOE_MOST_ROWS : 8; }

/* ---- sort and gather --------------------------------------------------------------------------------------------- */

bst_status bst__moe_sort_cuda(const bst_exec *exec, const char *op, const bst_view *indices, moe_sort_args args) {
    /* A thread walks over a block's pairs: few of them, but not so few that reading the blocks' counts takes longer. */
    args.chunk = args.pairs <= 65536 ? 256 : args.pairs <= 262144 ? 1024 : MOE_MOST_PAIRS;
    bst_launch l = {.kernel = &count_kernel};
    l.values[THREADS] = args.experts < 64 ? 64 : whole_warps(args.experts + 1);
    l.grid_x = blocks_for(args.pairs, args.chunk);
    l.block = (unsigned)l.values[THREADS];
    void *counts;
    BST_TRY(bst__allocate(exec, op, indices->device, (size_t)l.grid_x * (size_t)(args.experts + 1) * 4, &counts));
    args.counts = counts;
    bst_status status = bst__cuda_launch(exec, op, indices->device.device_id, &l, &args, sizeof args);
    l.kernel = &place_kernel;
    l.overlap = true;
    if (status == BST_OK) status = bst__cuda_launch(exec, op, indices->device.device_id, &l, &args, sizeof args);
    bst__release(exec, indices->device, counts);
    return status;
}

bst_status bst__moe_gather_cuda(const bst_exec *exec, const char *op, const bst_view *x, const bst_view *order,
                                const bst_view *rows) {
    enum { EACH = 4 }; /* accesses of a thread: as in the kernel */
    bst_launch l = {.kernel = &gather_kernel};
    int vec = narrower(narrower(8, x), rows);
    l.values[TYPE] = x->dtype;
    l.values[COLUMNS] = x->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = l.block = SHORT_BLOCK;
    l.values[CHOICES] = order->count / x->size[0];
    moe_gather_args args = {x->data, order->data, rows->data, x->stride[0], rows->count / vec, order->count};
    l.grid_x = blocks_for(args.count, EACH * SHORT_BLOCK);
    return bst__cuda_launch(exec, op, x->device.device_id, &l, &args, sizeof args);
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

static bst_status add_up(const bst_exec *exec, const char *op, const float *partial, const int32_t *ends, int64_t rows,
                         int64_t chunk, const bst_view *dbias) {
    bst_launch l = {.kernel = &bias_sum_kernel};
    l.values[TYPE] = dbias->dtype;
    l.values[COLUMNS] = dbias->size[1];
    l.values[VEC] = l.values[BIAS_VEC] = l.values[H_VEC] = l.values[CHOICES] = 1;
    l.values[THREADS] = l.block = 256;
    l.grid_x = blocks_for(dbias->size[1], 32);
    l.grid_y = (unsigned)dbias->size[0];
    l.overlap = true;
    moe_bias_args args = {partial, ends, dbias->data, rows, chunk};
    return bst__cuda_launch(exec, op, dbias->device.device_id, &l, &args, sizeof args);
}

/* ---- the clamped gate -------------------------------------------------------------------------------------------- */

/* What both directions have in common. `vec`: elements of h in an access; a thread has pairs of them, also where h and
 * dh allow no access to a pair. */
static void shape_glu(bst_launch *l, const bst_view *h, const bst_view *bias, int vec) {
    l->values[TYPE] = h->dtype;
    l->values[COLUMNS] = h->size[1];
    l->values[H_VEC] = vec;
    l->values[VEC] = vec < 2 ? 2 : vec;
    l->values[BIAS] = bias->data != NULL;
    l->values[BIAS_VEC] = bias->data ? narrower((int)l->values[VEC], bias) : 1;
    l->values[CHOICES] = 1;
}

/* As `narrower`, for a matrix of half h's columns: an access to h goes with one of half as many elements there. Never
 * less than a pair. */
static int glu_vector(int most, const bst_view *half) { return half->data ? 2 * narrower(most / 2, half) : most; }

bst_status bst__moe_glu_forward_cuda(const bst_exec *exec, const char *op, const bst_view *h, const bst_view *bias,
                                     const bst_view *y, moe_glu_args args) {
    enum { ROWS = 16 }; /* four times what a thread reads at once, so that the biases are read seldom */
    bst_launch l = {.kernel = &glu_forward_kernel};
    shape_glu(&l, h, bias, narrower(glu_vector(8, y), h));
    int64_t vectors = h->size[1] / l.values[VEC];
    l.values[THREADS] = vectors < SHORT_BLOCK ? whole_warps(vectors) : SHORT_BLOCK;
    args.chunk = ROWS;
    l.block = (unsigned)l.values[THREADS];
    l.grid_x = blocks_for(args.rows, ROWS);
    l.grid_y = blocks_for(vectors, l.block);
    return bst__cuda_launch(exec, op, h->device.device_id, &l, &args, sizeof args);
}

bst_status bst__moe_glu_backward_cuda(const bst_exec *exec, const char *op, const bst_view *h, const bst_view *bias,
                                      const bst_view *dy, const bst_view *weights, const moe_glu_gradients *g,
                                      moe_glu_args args) {
    bst_launch l = {.kernel = &glu_backward_kernel};
    int vec = narrower(glu_vector(glu_vector(8, dy), &g->wy), h);
    if (g->dh.data) vec = narrower(vec, &g->dh);
    shape_glu(&l, h, bias, vec);
    l.values[W_TYPE] = weights->dtype;
    l.values[THREADS] = row_threads(h->size[1] / l.values[VEC]);
    args.chunk = row_chunk(args.rows);
    l.values[DH] = g->dh.data != NULL;
    l.values[WY] = g->wy.data != NULL;
    l.values[DWEIGHTS] = g->dweights.data != NULL;
    l.values[DBIAS] = g->dbias.data != NULL;
    l.grid_x = blocks_for(args.rows, args.chunk);
    l.block = (unsigned)l.values[THREADS];
    void *partial;
    BST_TRY(bst__moe_partial_sums(exec, op, &g->dbias, args.rows, args.chunk, &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, op, h->device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && partial) status = add_up(exec, op, partial, args.ends, args.rows, args.chunk, &g->dbias);
    bst__release(exec, h->device, partial);
    return status;
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

bst_status bst__moe_combine_forward_cuda(const bst_exec *exec, const char *op, const bst_view *y,
                                         const bst_view *weights, const bst_view *bias, const bst_view *out,
                                         int64_t choices, moe_combine_args args) {
    bst_launch l = {.kernel = &combine_forward_kernel};
    int vec = narrower(narrower(8, y), out);
    if (bias->data) vec = narrower(vec, bias);
    l.values[TYPE] = y->dtype;
    l.values[W_TYPE] = weights->dtype;
    l.values[COLUMNS] = y->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = l.block = SHORT_BLOCK;
    l.values[CHOICES] = choices;
    l.values[BIAS] = bias->data != NULL;
    l.values[WEIGHTS] = weights->data != NULL;
    l.grid_x = blocks_for(out->count / vec, SHORT_BLOCK);
    return bst__cuda_launch(exec, op, y->device.device_id, &l, &args, sizeof args);
}

bst_status bst__moe_combine_backward_cuda(const bst_exec *exec, const char *op, const bst_view *dout,
                                          const bst_view *weights, const bst_view *bias, const bst_view *rows,
                                          const bst_view *dbias, moe_combine_backward_args args) {
    bst_launch l = {.kernel = &combine_backward_kernel};
    int vec = narrower(narrower(8, dout), rows);
    if (args.dots) vec = narrower(vec, bias);
    l.values[TYPE] = dout->dtype;
    l.values[W_TYPE] = weights->dtype;
    l.values[COLUMNS] = dout->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = row_threads((dout->size[1] + vec - 1) / vec);
    l.values[CHOICES] = args.count / dout->size[0];
    args.chunk = row_chunk(args.count);
    l.values[DBIAS] = dbias->data != NULL;
    l.values[DOTS] = args.dots != NULL;
    l.grid_x = blocks_for(args.count, args.chunk);
    l.block = (unsigned)l.values[THREADS];
    void *partial;
    BST_TRY(bst__moe_partial_sums(exec, op, dbias, args.count, args.chunk, &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, op, dout->device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && partial) status = add_up(exec, op, partial, args.ends, args.count, args.chunk, dbias);
    bst__release(exec, dout->device, partial);
    return status;
}
