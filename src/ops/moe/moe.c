/* moe.c - a mixture of experts around its grouped products: checks, then the configuration, then the kernels of the
 * tensors' device. */
#include <assert.h>
#include <inttypes.h>

#include "cuda/cuda.h"
#include "ops/moe/moe_args.h"
#include "ops/moe/moe_cpu.h"

/* One thread an expert and one for the pairs of no expert, in a block of the sort. */
enum { MOST_EXPERTS = 1023 };

#define I32 (1u << BST_I32)
#define I64 (1u << BST_I64)

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* A contiguous tensor of `dims` dimensions, on the device of `beside` (NULL: any). */
static bst_status take(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor, int dims,
                       const bst_view *beside, const char *beside_name, bst_view *out) {
    BST_TRY(bst__view(op, name, dtypes, tensor, out));
    BST_TRY(bst__need_dims(op, name, out, dims));
    BST_TRY(bst__need_contiguous(op, name, out));
    return beside ? bst__need_device(op, name, out, beside, beside_name) : BST_OK;
}

/* As `take`, with these sizes (-1: any). */
static bst_status take_sized(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor,
                             const bst_view *beside, const char *beside_name, int dims, int64_t rows, int64_t columns,
                             const char *why, bst_view *out) {
    BST_TRY(take(op, name, dtypes, tensor, dims, beside, beside_name, out));
    if (rows >= 0) BST_TRY(bst__need_size(op, name, out, 0, rows, why));
    return dims > 1 && columns >= 0 ? bst__need_size(op, name, out, 1, columns, why) : BST_OK;
}

/* [T, K] with as many elements as there are rows. */
static bst_status take_pairs(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor,
                             const bst_view *beside, const char *beside_name, int64_t rows, bst_view *out) {
    BST_TRY(take(op, name, dtypes, tensor, 2, beside, beside_name, out));
    if (out->count == rows) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, one a sorted row, are needed", op, name,
                      bst__shape_text(out), rows);
}

static bst_status take_ends(const char *op, const DLTensor *ends, const bst_view *beside, const char *beside_name,
                            bst_view *out) {
    BST_TRY(take(op, "ends", I32, ends, 1, beside, beside_name, out));
    if (out->count >= 1 && out->count <= MOST_EXPERTS) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: ends has %" PRId64 " elements, one an expert; 1 to %d are supported", op,
                      out->count, MOST_EXPERTS);
}

/* The matrix [T, H] that rows are gathered from, and how many rows a token has. */
static bst_status take_tokens(const char *op, const char *name, const DLTensor *tensor, bst_view *out) {
    bst_rows rows;
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, out));
    BST_TRY(bst__need_dims(op, name, out, 2));
    return bst__rows(op, name, out, &rows);
}

static bst_status take_order(const char *op, const DLTensor *order, const bst_view *tokens, const char *name,
                             bst_view *out) {
    BST_TRY(take(op, "order", I32, order, 1, tokens, name, out));
    if (tokens->size[0] ? out->count % tokens->size[0] == 0 : !out->count) return BST_OK;
    return bst__error(BST_INVALID,
                      "%s: order has %" PRId64 " elements; a multiple of the rows of %s, %" PRId64 ", is needed", op,
                      out->count, name, tokens->size[0]);
}

static bst_status check_gate(const char *op, double alpha, double limit) {
    if (limit > 0 && alpha == alpha) return BST_OK;
    return bst__error(BST_INVALID, "%s: alpha is %g and limit %g; numbers, and a limit above 0, are needed", op, alpha,
                      limit);
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* Macros in the order of their values; one list serves all kernels of the file. */
enum { TYPE, W_TYPE, COLUMNS, VEC, BIAS_VEC, THREADS, CHOICES, CHUNK, BIAS, WEIGHTS, DH, WY, DWEIGHTS, DBIAS, DOTS };
#define MACROS(which)                                                                               \
    {"TYPE",    "W_TYPE", "COLUMNS", "VEC",      "BIAS_VEC", "THREADS", "CHOICES", "CHUNK", "BIAS", \
     "WEIGHTS", "DH",     "WY",      "DWEIGHTS", "DBIAS",    "DOTS",    which,     NULL}

static const bst_kernel count_kernel = {"moe.cu", "moe_sort_count", MACROS("COUNT")};
static const bst_kernel place_kernel = {"moe.cu", "moe_sort_place", MACROS("PLACE")};
static const bst_kernel gather_kernel = {"moe.cu", "moe_gather", MACROS("GATHER")};
static const bst_kernel glu_forward_kernel = {"moe.cu", "moe_glu_forward", MACROS("GLU_FORWARD")};
static const bst_kernel glu_backward_kernel = {"moe.cu", "moe_glu_backward", MACROS("GLU_BACKWARD")};
static const bst_kernel combine_forward_kernel = {"moe.cu", "moe_combine_forward", MACROS("COMBINE_FORWARD")};
static const bst_kernel combine_backward_kernel = {"moe.cu", "moe_combine_backward", MACROS("COMBINE_BACKWARD")};
static const bst_kernel bias_sum_kernel = {"moe.cu", "moe_bias_sum", MACROS("BIAS_SUM")};

/* The widest access, at most `most` elements, that this matrix allows. */
static int narrower(int most, const bst_view *v) {
    int64_t columns = v->size[v->dims - 1], stride = v->dims > 1 ? v->stride[0] : columns;
    bst_rows rows = {
        .rows = v->count / columns, .columns = columns, .inner = v->count / columns, .inner_stride = stride};
    int allowed = bst__row_vector(v, &rows);
    return allowed < most ? allowed : most;
}

static unsigned blocks_for(int64_t work, int64_t each) { return (unsigned)((work + each - 1) / each); }

/* Threads for all columns of a row, in as many turns as 512 threads need: each turn as wide as the others, so that few
 * threads idle. */
static int row_threads(int64_t vectors) {
    int64_t turns = (vectors + 511) / 512, each = (vectors + turns - 1) / turns;
    return (int)(each + 31) / 32 * 32;
}

/* Rows of a block that also sums over rows: many, so that its partial sums are few beside the rows (1/8 of a row's bytes
 * at 32 rows of two-byte elements, 4 written and 4 read a column), but enough blocks for the chip. */
static int row_chunk(int64_t rows) { return rows >= 4096 ? 32 : 8; }

/* ---- sort -------------------------------------------------------------------------------------------------------- */

static const char sort_op[] = "moe_sort";

static bst_status sort_cuda(const bst_exec *exec, const bst_view *indices, moe_sort_args args) {
    /* A thread walks over a block's pairs: few of them, but not so few that reading the blocks' counts takes longer. */
    int chunk = args.pairs <= 65536 ? 256 : args.pairs <= 262144 ? 1024 : 4096;
    bst_launch l = {.kernel = &count_kernel};
    l.values[THREADS] = args.experts < 64 ? 64 : (args.experts + 32) / 32 * 32;
    l.values[CHUNK] = chunk;
    l.grid_x = blocks_for(args.pairs, chunk);
    l.block = (unsigned)l.values[THREADS];
    void *counts;
    BST_TRY(bst__allocate(exec, sort_op, indices->device, (size_t)l.grid_x * (size_t)(args.experts + 1) * 4, &counts));
    args.counts = counts;
    bst_status status = bst__cuda_launch(exec, sort_op, indices->device.device_id, &l, &args, sizeof args);
    l.kernel = &place_kernel;
    l.overlap = true;
    if (status == BST_OK) status = bst__cuda_launch(exec, sort_op, indices->device.device_id, &l, &args, sizeof args);
    bst__release(exec, indices->device, counts);
    return status;
}

static bst_status sort_cpu(const bst_view *indices, moe_sort_args a) {
    for (int64_t i = 0; i < a.pairs; i++)
        if (a.indices[i] < 0 || a.indices[i] >= a.experts)
            return bst__error(BST_INVALID,
                              "%s: indices, of shape %s, has %" PRId64 "; 0 to %d, the experts, are needed", sort_op,
                              bst__shape_text(indices), a.indices[i], (int)a.experts - 1);
    int32_t next[MOST_EXPERTS + 1] = {0}; /* where the next pair of an expert goes, one place further on */
    for (int64_t i = 0; i < a.pairs; i++) next[a.indices[i] + 1]++;
    for (int32_t e = 0; e < a.experts; e++) a.ends[e] = next[e + 1] += next[e];
    for (int32_t i = 0; i < (int32_t)a.pairs; i++) {
        int32_t row = next[a.indices[i]]++;
        a.order[row] = i;
        a.position[i] = row;
    }
    return BST_OK;
}

bst_status bst_moe_sort(const bst_exec *exec, const DLTensor *indices, DLTensor *order, DLTensor *position,
                        DLTensor *ends) {
    bst_view iv, ov, pv, ev;
    BST_TRY(take(sort_op, "indices", I64, indices, 2, NULL, NULL, &iv));
    if (iv.count > INT32_MAX)
        return bst__error(BST_UNSUPPORTED, "%s: indices has %" PRId64 " elements; at most %d are supported", sort_op,
                          iv.count, INT32_MAX);
    const char *why = "the elements of indices";
    BST_TRY(take_sized(sort_op, "order", I32, order, &iv, "indices", 1, iv.count, -1, why, &ov));
    BST_TRY(take_pairs(sort_op, "position", I32, position, &iv, "indices", iv.count, &pv));
    BST_TRY(take_ends(sort_op, ends, &iv, "indices", &ev));
    if (!iv.count) return bst__zero(exec, sort_op, &ev);
    moe_sort_args args = {iv.data, NULL, ov.data, pv.data, ev.data, iv.count, (int32_t)ev.count, 0};
    return iv.device.device_type == kDLCUDA ? sort_cuda(exec, &iv, args) : sort_cpu(&iv, args);
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

static const char gather_op[] = "moe_gather";

bst_status bst_moe_gather(const bst_exec *exec, const DLTensor *x, const DLTensor *order, DLTensor *rows) {
    bst_view xv, ov, rv;
    BST_TRY(take_tokens(gather_op, "x", x, &xv));
    BST_TRY(take_order(gather_op, order, &xv, "x", &ov));
    BST_TRY(take_sized(gather_op, "rows", 1u << xv.dtype, rows, &xv, "x", 2, ov.count, xv.size[1],
                       "the elements of order, and the columns of x", &rv));
    BST_TRY(bst__need_apart(gather_op, "rows", &rv, "x", &xv));
    if (!rv.count) return BST_OK;
    int64_t choices = ov.count / xv.size[0];
    if (xv.device.device_type == kDLCUDA) {
        enum { EACH = 4, MOST_THREADS = 128 };
        bst_launch l = {.kernel = &gather_kernel};
        int vec = narrower(narrower(8, &xv), &rv);
        moe_gather_args args = {xv.data, ov.data, rv.data, xv.stride[0], rv.count / vec};
        l.values[TYPE] = xv.dtype;
        l.values[COLUMNS] = xv.size[1];
        l.values[VEC] = vec;
        l.values[THREADS] = l.block = MOST_THREADS;
        l.values[CHOICES] = choices;
        l.grid_x = blocks_for(args.count, EACH * MOST_THREADS);
        return bst__cuda_launch(exec, gather_op, xv.device.device_id, &l, &args, sizeof args);
    }
    moe_cpu call = {.dtype = xv.dtype,
                    .rows = ov.count,
                    .columns = xv.size[1],
                    .choices = choices,
                    .order = ov.data,
                    .x = xv.data,
                    .x_stride = xv.stride[0],
                    .out = rv.data};
    bst__parallel_for(exec, ov.count, bst__grain(xv.size[1]), BST_CPU_SELECT(bst__moe_gather_cpu), &call);
    return BST_OK;
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

/* Workspace for the partial sums of `chunk` rows each; NULL where no gradient is wanted. */
static bst_status partial_sums(const bst_exec *exec, const char *op, const bst_view *dbias, int64_t rows, int chunk,
                               void **out) {
    *out = NULL;
    if (!dbias->data) return BST_OK;
    size_t slots = (size_t)(blocks_for(rows, chunk) + dbias->size[0]);
    return bst__allocate(exec, op, dbias->device, slots * (size_t)dbias->size[1] * sizeof(float), out);
}

static bst_status add_up_cuda(const bst_exec *exec, const char *op, const float *partial, const int32_t *ends,
                              int chunk, const bst_view *dbias) {
    bst_launch l = {.kernel = &bias_sum_kernel};
    l.values[TYPE] = dbias->dtype;
    l.values[COLUMNS] = dbias->size[1];
    l.values[VEC] = l.values[BIAS_VEC] = l.values[CHOICES] = 1;
    l.values[THREADS] = l.block = 256;
    l.values[CHUNK] = chunk;
    l.grid_x = blocks_for(dbias->size[1], 32);
    l.grid_y = (unsigned)dbias->size[0];
    l.overlap = true;
    moe_bias_args args = {partial, ends, dbias->data};
    return bst__cuda_launch(exec, op, dbias->device.device_id, &l, &args, sizeof args);
}

/* The CPU's way through the chunks of a backward pass. */
static bst_status chunks_cpu(const bst_exec *exec, const char *op, moe_cpu *call, const bst_view *dbias,
                             bst_body body) {
    void *partial;
    BST_TRY(partial_sums(exec, op, dbias, call->rows, MOE_CHUNK, &partial));
    call->partial = partial;
    call->dbias = dbias->data;
    bst__parallel_for(exec, blocks_for(call->rows, MOE_CHUNK), bst__grain(MOE_CHUNK * call->columns), body, call);
    if (partial) {
        bst__parallel_for(exec, call->experts, 1, BST_CPU_SELECT(bst__moe_bias_sum_cpu), call);
        bst__release(exec, dbias->device, partial);
    }
    return BST_OK;
}

/* ---- the clamped gate -------------------------------------------------------------------------------------------- */

static const char glu_forward_op[] = "moe_glu_forward", glu_backward_op[] = "moe_glu_backward";

/* h, bias and ends. */
static bst_status check_glu(const char *op, const DLTensor *h, const DLTensor *bias, const DLTensor *ends, double alpha,
                            double limit, bst_view *hv, bst_view *bv, bst_view *ev) {
    BST_TRY(check_gate(op, alpha, limit));
    BST_TRY(take(op, "h", BST_FLOATS, h, 2, NULL, NULL, hv));
    if (hv->size[1] % 2)
        return bst__error(BST_INVALID, "%s: h has shape %s; columns in pairs, gate and up, are needed", op,
                          bst__shape_text(hv));
    if (((uintptr_t)hv->data) % (2 * (uintptr_t)bst__dtype_size(hv->dtype)))
        return bst__error(BST_UNSUPPORTED, "%s: h is not aligned to a pair of its elements", op);
    BST_TRY(take_ends(op, ends, hv, "h", ev));
    *bv = (bst_view){.data = NULL};
    if (!bias) return BST_OK;
    return take_sized(op, "bias", 1u << hv->dtype, bias, hv, "h", 2, ev->count, hv->size[1],
                      "the experts, and the columns of h", bv);
}

/* A matrix of half h's columns. */
static bst_status take_half(const char *op, const char *name, const DLTensor *tensor, const bst_view *h,
                            bst_view *out) {
    return take_sized(op, name, 1u << h->dtype, tensor, h, "h", 2, h->size[0], h->size[1] / 2,
                      "the rows of h, and half its columns", out);
}

/* What both directions have in common. `vec`: elements of h in an access. */
static void shape_glu(bst_launch *l, const bst_view *h, const bst_view *bias, int vec) {
    l->values[TYPE] = h->dtype;
    l->values[COLUMNS] = h->size[1];
    l->values[VEC] = vec;
    l->values[BIAS] = bias->data != NULL;
    l->values[BIAS_VEC] = bias->data ? narrower(vec, bias) : 1;
    l->values[CHOICES] = 1;
}

/* An access to h goes with one of half as many elements to y and its like. */
static int glu_vector(int most, const bst_view *half) { return half->data ? 2 * narrower(most / 2, half) : most; }

bst_status bst_moe_glu_forward(const bst_exec *exec, const DLTensor *h, const DLTensor *bias, const DLTensor *ends,
                               double alpha, double limit, DLTensor *y) {
    bst_view hv, bv, ev, yv;
    BST_TRY(check_glu(glu_forward_op, h, bias, ends, alpha, limit, &hv, &bv, &ev));
    BST_TRY(take_half(glu_forward_op, "y", y, &hv, &yv));
    BST_TRY(bst__need_apart(glu_forward_op, "y", &yv, "h", &hv));
    if (!yv.count) return BST_OK;
    if (hv.device.device_type == kDLCUDA) {
        enum { MOST_THREADS = 128, ROWS = 16 };
        bst_launch l = {.kernel = &glu_forward_kernel};
        shape_glu(&l, &hv, &bv, glu_vector(narrower(8, &hv), &yv));
        int64_t vectors = (hv.size[1] + l.values[VEC] - 1) / l.values[VEC];
        l.values[THREADS] = l.block = vectors < MOST_THREADS ? (unsigned)(vectors + 31) / 32 * 32 : MOST_THREADS;
        l.values[CHUNK] = ROWS;
        l.grid_x = blocks_for(hv.size[0], ROWS);
        l.grid_y = blocks_for(vectors, l.block);
        moe_glu_args args = {.h = hv.data,
                             .bias = bv.data,
                             .ends = ev.data,
                             .y = yv.data,
                             .rows = hv.size[0],
                             .alpha = (float)alpha,
                             .limit = (float)limit,
                             .experts = (int32_t)ev.count};
        return bst__cuda_launch(exec, glu_forward_op, hv.device.device_id, &l, &args, sizeof args);
    }
    moe_cpu call = {.dtype = hv.dtype,
                    .rows = hv.size[0],
                    .columns = hv.size[1],
                    .experts = ev.count,
                    .ends = ev.data,
                    .h = hv.data,
                    .bias = bv.data,
                    .out = yv.data,
                    .alpha = (float)alpha,
                    .limit = (float)limit};
    bst__parallel_for(exec, hv.size[0], bst__grain(hv.size[1]), BST_CPU_SELECT(bst__moe_glu_forward_cpu), &call);
    return BST_OK;
}

typedef struct glu_gradients {
    bst_view dh, wy, dweights, dbias;
} glu_gradients;

static bst_status glu_backward_cuda(const bst_exec *exec, const bst_view *h, const bst_view *bias, const bst_view *dy,
                                    const bst_view *weights, const glu_gradients *g, moe_glu_args args) {
    bst_launch l = {.kernel = &glu_backward_kernel};
    int vec = glu_vector(glu_vector(narrower(8, h), dy), &g->wy);
    if (g->dh.data) vec = narrower(vec, &g->dh);
    shape_glu(&l, h, bias, vec);
    l.values[W_TYPE] = weights->dtype;
    l.values[THREADS] = row_threads((h->size[1] + vec - 1) / vec);
    l.values[CHUNK] = row_chunk(args.rows);
    l.values[DH] = g->dh.data != NULL;
    l.values[WY] = g->wy.data != NULL;
    l.values[DWEIGHTS] = g->dweights.data != NULL;
    l.values[DBIAS] = g->dbias.data != NULL;
    l.grid_x = blocks_for(args.rows, l.values[CHUNK]);
    l.block = (unsigned)l.values[THREADS];
    void *partial;
    BST_TRY(partial_sums(exec, glu_backward_op, &g->dbias, args.rows, (int)l.values[CHUNK], &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, glu_backward_op, h->device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && partial)
        status = add_up_cuda(exec, glu_backward_op, partial, args.ends, (int)l.values[CHUNK], &g->dbias);
    bst__release(exec, h->device, partial);
    return status;
}

bst_status bst_moe_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *h, const DLTensor *bias,
                                const DLTensor *ends, const DLTensor *order, const DLTensor *weights,
                                const DLTensor *dots, double alpha, double limit, DLTensor *dh, DLTensor *wy,
                                DLTensor *dweights, DLTensor *dbias) {
    const char *op = glu_backward_op;
    bst_view hv, bv, ev, dyv, ov, wv, dv = {0};
    glu_gradients g = {0};
    BST_TRY(check_glu(op, h, bias, ends, alpha, limit, &hv, &bv, &ev));
    BST_TRY(take_half(op, "dy", dy, &hv, &dyv));
    int64_t rows = hv.size[0];
    BST_TRY(take_sized(op, "order", I32, order, &hv, "h", 1, rows, -1, "the rows of h", &ov));
    BST_TRY(take_pairs(op, "weights", BST_FLOATS, weights, &hv, "h", rows, &wv));
    if (dots) BST_TRY(take_sized(op, "dots", 1u << BST_F32, dots, &hv, "h", 1, rows, -1, "the rows of h", &dv));
    if (dh) BST_TRY(bst__output(op, "dh", dh, &hv, "h", hv.dtype, &g.dh));
    if (wy) BST_TRY(take_half(op, "wy", wy, &hv, &g.wy));
    if (dweights) BST_TRY(bst__output(op, "dweights", dweights, &wv, "weights", wv.dtype, &g.dweights));
    if (dbias && !bias) return bst__error(BST_INVALID, "%s: dbias is wanted, but bias is NULL", op);
    if (dbias) BST_TRY(bst__output(op, "dbias", dbias, &bv, "bias", bv.dtype, &g.dbias));
    const bst_view *outputs[] = {&g.dh, &g.wy};
    for (int i = 0; i < 2; i++) {
        BST_TRY(bst__need_apart(op, i ? "wy" : "dh", outputs[i], "h", &hv));
        BST_TRY(bst__need_apart(op, i ? "wy" : "dh", outputs[i], "dy", &dyv));
    }
    if (!hv.count) { /* sums of nothing */
        if (dweights) BST_TRY(bst__zero(exec, op, &g.dweights));
        return dbias ? bst__zero(exec, op, &g.dbias) : BST_OK;
    }
    if (hv.device.device_type == kDLCUDA) {
        moe_glu_args args = {.h = hv.data,
                             .bias = bv.data,
                             .ends = ev.data,
                             .dy = dyv.data,
                             .weights = wv.data,
                             .order = ov.data,
                             .dots = dv.data,
                             .dh = g.dh.data,
                             .wy = g.wy.data,
                             .dweights = g.dweights.data,
                             .rows = rows,
                             .alpha = (float)alpha,
                             .limit = (float)limit,
                             .experts = (int32_t)ev.count};
        return glu_backward_cuda(exec, &hv, &bv, &dyv, &wv, &g, args);
    }
    moe_cpu call = {.dtype = hv.dtype,
                    .w_dtype = wv.dtype,
                    .rows = rows,
                    .columns = hv.size[1],
                    .experts = ev.count,
                    .order = ov.data,
                    .ends = ev.data,
                    .h = hv.data,
                    .dy = dyv.data,
                    .bias = bv.data,
                    .weights = wv.data,
                    .dots_in = dv.data,
                    .dh = g.dh.data,
                    .wy = g.wy.data,
                    .dweights = g.dweights.data,
                    .alpha = (float)alpha,
                    .limit = (float)limit};
    return chunks_cpu(exec, op, &call, &g.dbias, BST_CPU_SELECT(bst__moe_glu_backward_cpu));
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

static const char combine_forward_op[] = "moe_combine_forward", combine_backward_op[] = "moe_combine_backward";

bst_status bst_moe_combine_forward(const bst_exec *exec, const DLTensor *y, const DLTensor *position,
                                   const DLTensor *weights, const DLTensor *bias, const DLTensor *indices,
                                   DLTensor *out) {
    const char *op = combine_forward_op;
    bst_view yv, pv, wv = {0}, bv = {0}, iv = {0}, ov;
    BST_TRY(take(op, "y", BST_FLOATS, y, 2, NULL, NULL, &yv));
    BST_TRY(take_pairs(op, "position", I32, position, &yv, "y", yv.size[0], &pv));
    if (weights) {
        BST_TRY(take_pairs(op, "weights", BST_FLOATS, weights, &yv, "y", yv.size[0], &wv));
        BST_TRY(bst__need_same_shape(op, "weights", &wv, "position", &pv));
    }
    if (bias) {
        BST_TRY(take_sized(op, "bias", 1u << yv.dtype, bias, &yv, "y", 2, -1, yv.size[1], "the columns of y", &bv));
        BST_TRY(take_pairs(op, "indices", I64, indices, &yv, "y", yv.size[0], &iv));
    }
    BST_TRY(take_sized(op, "out", 1u << yv.dtype, out, &yv, "y", 2, pv.size[0], yv.size[1],
                       "the rows of position, and the columns of y", &ov));
    BST_TRY(bst__need_apart(op, "out", &ov, "y", &yv));
    if (!ov.count) return BST_OK;
    if (!yv.count) return bst__zero(exec, op, &ov);
    if (yv.device.device_type == kDLCUDA) {
        enum { MOST_THREADS = 128 };
        bst_launch l = {.kernel = &combine_forward_kernel};
        int vec = narrower(narrower(8, &yv), &ov);
        if (bias) vec = narrower(vec, &bv);
        l.values[TYPE] = yv.dtype;
        l.values[W_TYPE] = wv.dtype;
        l.values[COLUMNS] = yv.size[1];
        l.values[VEC] = vec;
        l.values[THREADS] = l.block = MOST_THREADS;
        l.values[CHOICES] = pv.size[1];
        l.values[BIAS] = bias != NULL;
        l.values[WEIGHTS] = weights != NULL;
        l.grid_x = blocks_for(ov.count / vec, MOST_THREADS);
        moe_combine_args args = {yv.data, wv.data, bv.data, pv.data, iv.data, ov.data, pv.size[0]};
        return bst__cuda_launch(exec, op, yv.device.device_id, &l, &args, sizeof args);
    }
    moe_cpu call = {.dtype = yv.dtype,
                    .w_dtype = wv.dtype,
                    .columns = yv.size[1],
                    .choices = pv.size[1],
                    .position = pv.data,
                    .indices = iv.data,
                    .y = yv.data,
                    .bias = bv.data,
                    .weights = wv.data,
                    .out = ov.data};
    bst__parallel_for(exec, pv.size[0], bst__grain(pv.size[1] * yv.size[1]),
                      BST_CPU_SELECT(bst__moe_combine_forward_cpu), &call);
    return BST_OK;
}

static bst_status combine_backward_cuda(const bst_exec *exec, const bst_view *dout, const bst_view *weights,
                                        const bst_view *bias, const bst_view *rows, const bst_view *dbias,
                                        int64_t choices, moe_combine_backward_args args) {
    bst_launch l = {.kernel = &combine_backward_kernel};
    int vec = narrower(narrower(8, dout), rows);
    if (args.dots) vec = narrower(vec, bias);
    l.values[TYPE] = dout->dtype;
    l.values[W_TYPE] = weights->dtype;
    l.values[COLUMNS] = dout->size[1];
    l.values[VEC] = vec;
    l.values[THREADS] = row_threads((dout->size[1] + vec - 1) / vec);
    l.values[CHOICES] = choices;
    l.values[CHUNK] = row_chunk(args.count);
    l.values[DBIAS] = dbias->data != NULL;
    l.values[DOTS] = args.dots != NULL;
    l.grid_x = blocks_for(args.count, l.values[CHUNK]);
    l.block = (unsigned)l.values[THREADS];
    void *partial;
    BST_TRY(partial_sums(exec, combine_backward_op, dbias, args.count, (int)l.values[CHUNK], &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, combine_backward_op, dout->device.device_id, &l, &args, sizeof args);
    if (status == BST_OK && partial)
        status = add_up_cuda(exec, combine_backward_op, partial, args.ends, (int)l.values[CHUNK], dbias);
    bst__release(exec, dout->device, partial);
    return status;
}

bst_status bst_moe_combine_backward(const bst_exec *exec, const DLTensor *dout, const DLTensor *order,
                                    const DLTensor *ends, const DLTensor *weights, const DLTensor *bias, DLTensor *rows,
                                    DLTensor *dots, DLTensor *dbias) {
    const char *op = combine_backward_op;
    bst_view xv, ov, ev, wv, bv = {0}, rv, dv = {0}, dbv = {0};
    BST_TRY(take_tokens(op, "dout", dout, &xv));
    BST_TRY(take_order(op, order, &xv, "dout", &ov));
    BST_TRY(take_ends(op, ends, &xv, "dout", &ev));
    BST_TRY(take_pairs(op, "weights", BST_FLOATS, weights, &xv, "dout", ov.count, &wv));
    if (bias)
        BST_TRY(take_sized(op, "bias", 1u << xv.dtype, bias, &xv, "dout", 2, ev.count, xv.size[1],
                           "the experts, and the columns of dout", &bv));
    if (!bias && (dots || dbias)) return bst__error(BST_INVALID, "%s: dots or dbias is wanted, but bias is NULL", op);
    BST_TRY(take_sized(op, "rows", 1u << xv.dtype, rows, &xv, "dout", 2, ov.count, xv.size[1],
                       "the elements of order, and the columns of dout", &rv));
    BST_TRY(bst__need_apart(op, "rows", &rv, "dout", &xv));
    if (dots)
        BST_TRY(
            take_sized(op, "dots", 1u << BST_F32, dots, &xv, "dout", 1, ov.count, -1, "the elements of order", &dv));
    if (dbias) BST_TRY(bst__output(op, "dbias", dbias, &bv, "bias", bv.dtype, &dbv));
    if (!rv.count) {
        if (dots) BST_TRY(bst__zero(exec, op, &dv));
        return dbias ? bst__zero(exec, op, &dbv) : BST_OK;
    }
    int64_t choices = ov.count / xv.size[0];
    if (xv.device.device_type == kDLCUDA) {
        moe_combine_backward_args args = {xv.data, wv.data, bv.data,      ov.data,  ev.data,           rv.data,
                                          dv.data, NULL,    xv.stride[0], ov.count, (int32_t)ev.count, 0};
        return combine_backward_cuda(exec, &xv, &wv, &bv, &rv, &dbv, choices, args);
    }
    moe_cpu call = {.dtype = xv.dtype,
                    .w_dtype = wv.dtype,
                    .rows = ov.count,
                    .columns = xv.size[1],
                    .choices = choices,
                    .experts = ev.count,
                    .order = ov.data,
                    .ends = ev.data,
                    .x = xv.data,
                    .x_stride = xv.stride[0],
                    .bias = bv.data,
                    .weights = wv.data,
                    .out = rv.data,
                    .dots = dv.data};
    return chunks_cpu(exec, op, &call, &dbv, BST_CPU_SELECT(bst__moe_combine_backward_cpu));
}
