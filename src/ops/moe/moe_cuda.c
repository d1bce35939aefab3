/* moe_cuda.c - a mixture of experts around its grouped products, on CUDA: the configuration of each kernel, a function
 * of shape and alignment, and its launch. */
#include "cuda/cuda.h"
#include "ops/moe/moe.h"

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* One list of macros serves all kernels of the file. */
/* clang-format off */
#define MACROS(X)                                                                                  \
    X(TYPE) X(W_TYPE) X(COLUMNS) X(VEC) X(BIAS_VEC) X(H_VEC) X(THREADS) X(CHOICES) X(BIAS) X(WEIGHTS) X(DH) X(WY) \
    X(DWEIGHTS) X(DBIAS) X(DOTS) X(UNIT) X(HALVES) X(LIMITED)
/* clang-format on */
#define PLACE(name) name,
#define NAME(name)  #name,
enum { MACROS(PLACE) };

static const bst_kernel count_kernel = {"moe.cu", "moe_sort_count", {MACROS(NAME) "COUNT"}};
static const bst_kernel place_kernel = {"moe.cu", "moe_sort_place", {MACROS(NAME) "PLACE"}};
static const bst_kernel gather_kernel = {"moe.cu", "moe_gather", {MACROS(NAME) "GATHER"}};
static const bst_kernel transpose_kernel = {"moe.cu", "moe_transpose", {MACROS(NAME) "TRANSPOSE"}};
static const bst_kernel glu_forward_kernel = {"moe.cu", "moe_glu_forward", {MACROS(NAME) "GLU_FORWARD"}};
static const bst_kernel glu_backward_kernel = {"moe.cu", "moe_glu_backward", {MACROS(NAME) "GLU_BACKWARD"}};
static const bst_kernel combine_forward_kernel = {"moe.cu", "moe_combine_forward", {MACROS(NAME) "COMBINE_FORWARD"}};
static const bst_kernel combine_backward_kernel = {"moe.cu", "moe_combine_backward", {MACROS(NAME) "COMBINE_BACKWARD"}};
static const bst_kernel bias_sum_kernel = {"moe.cu", "moe_bias_sum", {MACROS(NAME) "BIAS_SUM"}};

/* Threads of a block that works on one row, or on elements, at a time: many short blocks, so that the last ones do not
 * straggle. */
enum { SHORT_BLOCK = 128 };

/* The widest access, at most `most` elements, that rows of so many columns allow, of a matrix without gaps or, where
 * they are the matrix's own rows, with them. */
static int narrower_rows(int most, const bst_view *v, int64_t columns, int64_t stride) {
    int64_t count = v->count / columns;
    bst_rows rows = {.rows = count, .columns = columns, .inner = count, .inner_stride = stride};
    int allowed = bst__row_vector(v, &rows);
    return allowed < most ? allowed : most;
}

static int narrower(int most, const bst_view *v) { return narrower_rows(most, v, v->size[v->dims - 1], v->stride[0]); }

static unsigned blocks_for(int64_t work, int64_t each) { return (unsigned)((work + each - 1) / each); }

static int whole_warps(int64_t threads) { return (int)(threads + 31) / 32 * 32; }

/* Threads for all columns of a row, in as many rounds as `most` threads need: each round as wide as the others, so that
 * few threads idle. */
static int row_threads(int64_t vectors, int64_t most) {
    int64_t rounds = (vectors + most - 1) / most;
    return whole_warps((vectors + rounds - 1) / rounds);
}

/* Rows of a block that also sums over rows: many, so that its partial sums weigh little beside the rows (at 32 rows of
 * two-byte elements an eighth of one row's bytes, 4 written and 4 read a column), but enough blocks for the chip. */
static int row_chunk(int64_t rows) { return rows >= 4096 ? MOE_MOST_ROWS : 8; }

/* ---- sort and gather --------------------------------------------------------------------------------------------- */

/* Threads of a block of the sort, each a pair at a time, and the most pairs of a block. */
enum { SORT_THREADS = 512, MOST_PAIRS = 4096 };

bst_status bst__moe_sort_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    const bst_view *indices = &v[SORT_INDICES];
    int64_t experts = attributes[EXPERTS].i, pairs = indices->count;
    moe_sort_args args = {.indices = indices->data,
                          .order = v[SORT_ORDER].data,
                          .position = v[SORT_POSITION].data,
                          .ends = v[SORT_ENDS].data,
                          .pairs = pairs,
                          .experts = (int32_t)experts};
    /* A block reads all blocks' counts: so the more pairs, the more of them a block takes, in rounds. */
    args.chunk = SORT_THREADS;
    while (args.chunk < MOST_PAIRS && pairs > 256 * (int64_t)args.chunk) args.chunk *= 2;
    bst_launch l = {.kernel = &count_kernel, .overlap = true};
    l.values[THREADS] = l.block = SORT_THREADS;
    l.grid_x = blocks_for(pairs, args.chunk);
    void *counts;
    BST_TRY(bst__allocate(exec, op, indices->device, (size_t)l.grid_x * (size_t)(experts + 1) * 4, &counts));
    args.counts = counts;
    bst_status status = bst__cuda_launch(exec, op, indices->device.device_id, &l, &args, sizeof args);
    l.kernel = &place_kernel;
    if (status == BST_OK) status = bst__cuda_launch(exec, op, indices->device.device_id, &l, &args, sizeof args);
    bst__release(exec, indices->device, counts);
    return status;
}

bst_status bst__moe_gather_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *x = &v[GATHER_X], *position = &v[GATHER_POSITION], *rows = &v[GATHER_ROWS];
    bst_launch l = {.kernel = &gather_kernel, .overlap = true};
    int vec = narrower(narrower(8, x), rows);
    l.values[TYPE] = x->dtype;
    l.values[COLUMNS] = x->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = l.block = SHORT_BLOCK;
    l.values[CHOICES] = position->count / x->size[0];
    moe_gather_args args = {x->data, position->data, rows->data, x->stride[0], x->size[0], position->count};
    l.grid_x = blocks_for(x->count / vec, SHORT_BLOCK);
    return bst__cuda_launch(exec, op, x->device.device_id, &l, &args, sizeof args);
}

bst_status bst__moe_transpose_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                   const bst_attribute *attributes) {
    (void)attributes;
    enum { THREADS_OF_TILE = 256 };
    const bst_view *x = &v[TURN_X];
    const bst_rows *r = &x->rows;
    int64_t across = bst__divided_up(r->columns, MOE_TRANSPOSE_SIDE),
            down = bst__divided_up(r->rows, MOE_TRANSPOSE_SIDE);
    BST_TRY(bst__moe_need_countable(op, "x", "rows", r->rows));
    BST_TRY(bst__moe_need_countable(op, "x", "columns", r->columns));
    BST_TRY(bst__cuda_need_rows(op, down, across));
    moe_transpose_args args = {.x = x->data,
                               .y = v[TURN_Y].data,
                               .outer_stride = r->outer_stride,
                               .inner_stride = r->inner_stride,
                               .rows = (int32_t)r->rows,
                               .columns = (int32_t)r->columns,
                               .inner = (int32_t)r->inner};
    bst_launch l = {.kernel = &transpose_kernel, .overlap = true};
    l.values[TYPE] = x->dtype;
    l.values[W_TYPE] = v[TURN_Y].dtype;
    l.values[THREADS] = l.block = THREADS_OF_TILE;
    l.grid_x = (unsigned)(across * down);
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

/* ---- the gated unit ---------------------------------------------------------------------------------------------- */

/* What both directions have in common: everything but threads and grid. `operands`: the matrices of half h's columns,
 * y, or dy and wy; `dh` may be NULL. Interleaved, an access to h has pairs, and goes with one of half as many elements
 * elsewhere; also where h allows no access to a pair, a thread has pairs. In halves each part of a row is a row of its
 * own. */
static moe_glu_args shape_glu(bst_launch *l, const bst_view *v, const bst_attribute *attributes,
                              const bst_view *const operands[2], const bst_view *dh) {
    const bst_view *h = &v[GLU_H], *bias = &v[GLU_BIAS];
    const bst_unit unit = bst__glu_unit(attributes);
    bool halves = !unit.interleaved;
    int64_t columns = h->size[1], part = halves ? columns / 2 : columns;
    int vec = halves ? 8 : 4;
    for (int i = 0; i < 2; i++)
        if (operands[i] && operands[i]->data) vec = narrower(vec, operands[i]);
    if (!halves) vec *= 2;
    vec = narrower_rows(vec, h, part, part);
    if (dh && dh->data) vec = narrower_rows(vec, dh, part, part);
    l->values[TYPE] = h->dtype;
    l->values[COLUMNS] = columns;
    l->values[H_VEC] = vec;
    l->values[VEC] = vec < 2 && !halves ? 2 : vec;
    l->values[BIAS] = bias->data != NULL;
    l->values[BIAS_VEC] = bias->data ? narrower_rows((int)l->values[VEC], bias, part, part) : 1;
    l->values[CHOICES] = 1;
    l->values[UNIT] = unit.activation;
    l->values[HALVES] = halves;
    l->values[LIMITED] = unit.limited;
    return (moe_glu_args){.h = h->data,
                          .bias = bias->data,
                          .ends = v[GLU_ENDS].data,
                          .rows = h->size[0],
                          .alpha = unit.alpha,
                          .limit = unit.limit,
                          .experts = (int32_t)v[GLU_ENDS].count};
}

/* Accesses of a row: a thread's are VEC elements of h together, or as many of each half. */
static int64_t glu_vectors(const bst_launch *l) {
    return l->values[COLUMNS] / l->values[VEC] / (l->values[HALVES] ? 2 : 1);
}

bst_status bst__moe_glu_forward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                     const bst_attribute *attributes) {
    enum { ROWS = 16 }; /* four times what a thread reads at once, so that the biases are read seldom */
    bst_launch l = {.kernel = &glu_forward_kernel, .overlap = true};
    moe_glu_args args = shape_glu(&l, v, attributes, (const bst_view *[2]){&v[GLU_Y]}, NULL);
    int64_t vectors = glu_vectors(&l);
    args.y = v[GLU_Y].data;
    l.values[THREADS] = vectors < SHORT_BLOCK ? whole_warps(vectors) : SHORT_BLOCK;
    args.chunk = ROWS;
    l.block = (unsigned)l.values[THREADS];
    l.grid_x = blocks_for(args.rows, ROWS);
    l.grid_y = blocks_for(vectors, l.block);
    return bst__cuda_launch(exec, op, v[GLU_H].device.device_id, &l, &args, sizeof args);
}

bst_status bst__moe_glu_backward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                      const bst_attribute *attributes) {
    const bst_view *dbias = &v[GLU_DBIAS];
    bst_launch l = {.kernel = &glu_backward_kernel, .overlap = true};
    moe_glu_args args = shape_glu(&l, v, attributes, (const bst_view *[2]){&v[GLU_DY], &v[GLU_WY]}, &v[GLU_DH]);
    args.dy = v[GLU_DY].data;
    args.weights = v[GLU_WEIGHTS].data;
    args.order = v[GLU_ORDER].data;
    args.dots = v[GLU_DOTS].data;
    args.dh = v[GLU_DH].data;
    args.wy = v[GLU_WY].data;
    args.dweights = v[GLU_DWEIGHTS].data;
    l.values[W_TYPE] = v[GLU_WEIGHTS].dtype;
    /* Without sums over rows there is nothing to carry from one to the next: short blocks of few rows, as forward.
     * Interleaved, dweight's order of additions is what it was before there were halves. */
    bool is_short = l.values[HALVES] && !dbias->data;
    l.values[THREADS] = row_threads(glu_vectors(&l), is_short ? SHORT_BLOCK : 512);
    args.chunk = is_short ? 8 : row_chunk(args.rows);
    l.values[DH] = args.dh != NULL;
    l.values[WY] = args.wy != NULL;
    l.values[DWEIGHTS] = args.dweights != NULL;
    l.values[DBIAS] = dbias->data != NULL;
    l.grid_x = blocks_for(args.rows, args.chunk);
    l.block = (unsigned)l.values[THREADS];
    void *partial;
    BST_TRY(bst__moe_partial_sums(exec, op, dbias, args.rows, args.chunk, &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, op, v[GLU_H].device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && partial) status = add_up(exec, op, partial, args.ends, args.rows, args.chunk, dbias);
    bst__release(exec, v[GLU_H].device, partial);
    return status;
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

bst_status bst__moe_combine_forward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                         const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *y = &v[SUM_Y], *position = &v[SUM_POSITION], *weights = &v[SUM_WEIGHTS], *bias = &v[SUM_BIAS],
                   *out = &v[SUM_OUT];
    moe_combine_args args = {.y = y->data,
                             .weights = weights->data,
                             .bias = bias->data,
                             .position = position->data,
                             .indices = v[SUM_INDICES].data,
                             .out = out->data,
                             .tokens = position->size[0],
                             .experts = bias->data ? bias->size[0] : 0};
    bst_launch l = {.kernel = &combine_forward_kernel, .overlap = true};
    int vec = narrower(narrower(8, y), out);
    if (bias->data) vec = narrower(vec, bias);
    l.values[TYPE] = y->dtype;
    l.values[W_TYPE] = weights->dtype;
    l.values[COLUMNS] = y->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = l.block = SHORT_BLOCK;
    l.values[CHOICES] = position->size[1];
    l.values[BIAS] = bias->data != NULL;
    l.values[WEIGHTS] = weights->data != NULL;
    l.grid_x = blocks_for(out->count / vec, SHORT_BLOCK);
    return bst__cuda_launch(exec, op, y->device.device_id, &l, &args, sizeof args);
}

bst_status bst__moe_combine_backward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                          const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *dout = &v[BACK_DOUT], *order = &v[BACK_ORDER], *bias = &v[BACK_BIAS], *dbias = &v[BACK_DBIAS];
    moe_combine_backward_args args = {.dout = dout->data,
                                      .weights = v[BACK_WEIGHTS].data,
                                      .bias = bias->data,
                                      .order = order->data,
                                      .ends = v[BACK_ENDS].data,
                                      .rows = v[BACK_ROWS].data,
                                      .dots = v[BACK_DOTS].data,
                                      .dout_stride = dout->stride[0],
                                      .count = order->count,
                                      .experts = (int32_t)v[BACK_ENDS].count};
    bst_launch l = {.kernel = &combine_backward_kernel, .overlap = true};
    int vec = narrower(narrower(8, dout), &v[BACK_ROWS]);
    if (args.dots) vec = narrower(vec, bias);
    l.values[TYPE] = dout->dtype;
    l.values[W_TYPE] = v[BACK_WEIGHTS].dtype;
    l.values[COLUMNS] = dout->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = row_threads((dout->size[1] + vec - 1) / vec, 512);
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
