/* moe.c - a mixture of experts around its grouped products: checks, then the launches of moe_cuda.c or the CPU's
 * kernels. */
#include <inttypes.h>

#include "ops/moe/moe.h"
#include "ops/moe/moe_cpu.h"

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

/* Pairs and rows are counted in 32 bits. */
static bst_status need_countable(const char *op, const char *name, const char *what, int64_t count) {
    if (count <= INT32_MAX) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: %s has %" PRId64 " %s; at most %d are supported", op, name, count, what,
                      INT32_MAX);
}

/* [T, K] with as many elements as there are rows. */
static bst_status take_pairs(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor,
                             const bst_view *beside, const char *beside_name, int64_t rows, bst_view *out) {
    BST_TRY(take(op, name, dtypes, tensor, 2, beside, beside_name, out));
    BST_TRY(need_countable(op, name, "elements", out->count));
    if (out->count == rows) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, one a sorted row, are needed", op, name,
                      bst__shape_text(out), rows);
}

static bst_status take_ends(const char *op, const DLTensor *ends, const bst_view *beside, const char *beside_name,
                            bst_view *out) {
    BST_TRY(take(op, "ends", I32, ends, 1, beside, beside_name, out));
    if (out->count >= 1 && out->count <= BST_MOE_MOST_EXPERTS) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: ends has %" PRId64 " elements, one an expert; 1 to %d are supported", op,
                      out->count, BST_MOE_MOST_EXPERTS);
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
    BST_TRY(need_countable(op, "order", "elements", out->count));
    if (tokens->size[0] ? out->count % tokens->size[0] == 0 : !out->count) return BST_OK;
    return bst__error(BST_INVALID,
                      "%s: order has %" PRId64 " elements; a multiple of the rows of %s, %" PRId64 ", is needed", op,
                      out->count, name, tokens->size[0]);
}

/* On CPU: every entry lies in [0, most). On CUDA, where looking would wait for the device, the kernels look. */
static bst_status check_entries(const char *op, const char *name, const bst_view *v, int64_t most, const char *what) {
    if (v->device.device_type != kDLCPU) return BST_OK;
    const int32_t *narrow = v->data;
    const int64_t *wide = v->data;
    for (int64_t i = 0; i < v->count; i++) {
        int64_t entry = v->dtype == BST_I64 ? wide[i] : narrow[i];
        if (entry < 0 || entry >= most)
            return bst__error(BST_INVALID, "%s: %s, of shape %s, has %" PRId64 "; 0 to %" PRId64 ", %s, are needed", op,
                              name, bst__shape_text(v), entry, most - 1, what);
    }
    return BST_OK;
}

/* Likewise: the ends of the experts' rows do not fall, and the last expert's is the last row's. */
static bst_status check_ends(const char *op, const bst_view *v, int64_t rows) {
    if (v->device.device_type != kDLCPU) return BST_OK;
    const int32_t *ends = v->data;
    for (int64_t e = 0; e < v->count; e++) {
        int64_t least = e ? ends[e - 1] : 0;
        if (ends[e] < least || ends[e] > rows || (e == v->count - 1 && ends[e] != rows))
            return bst__error(BST_INVALID,
                              "%s: ends, of shape %s, has %" PRId32 " at %" PRId64
                              "; numbers that do not fall, from 0 to %" PRId64
                              ", the rows, which the last is, are needed",
                              op, bst__shape_text(v), ends[e], e, rows);
    }
    return BST_OK;
}

static bst_status check_gate(const char *op, double alpha, double limit) {
    if (limit > 0 && alpha == alpha) return BST_OK;
    return bst__error(BST_INVALID, "%s: alpha is %g and limit %g; numbers, and a limit above 0, are needed", op, alpha,
                      limit);
}

/* ---- sort -------------------------------------------------------------------------------------------------------- */

static const char sort_op[] = "moe_sort";

static bst_status sort_cpu(const bst_view *indices, moe_sort_args a) {
    BST_TRY(check_entries(sort_op, "indices", indices, a.experts, "the experts"));
    int32_t next[BST_MOE_MOST_EXPERTS + 1] = {0}; /* where the next pair of an expert goes, one place further on */
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
    BST_TRY(need_countable(sort_op, "indices", "elements", iv.count));
    const char *why = "the elements of indices";
    BST_TRY(take_sized(sort_op, "order", I32, order, &iv, "indices", 1, iv.count, -1, why, &ov));
    BST_TRY(take_pairs(sort_op, "position", I32, position, &iv, "indices", iv.count, &pv));
    BST_TRY(take_ends(sort_op, ends, &iv, "indices", &ev));
    BST_TRY(bst__need_all_apart(sort_op, (bst_named[]){{"order", &ov}, {"position", &pv}, {"ends", &ev}}, 3,
                                (bst_named[]){{"indices", &iv}}, 1));
    if (!iv.count) return bst__zero(exec, sort_op, &ev);
    moe_sort_args args = {iv.data, NULL, ov.data, pv.data, ev.data, iv.count, (int32_t)ev.count, 0};
    return iv.device.device_type == kDLCUDA ? bst__moe_sort_cuda(exec, sort_op, &iv, args) : sort_cpu(&iv, args);
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

static const char gather_op[] = "moe_gather";

bst_status bst_moe_gather(const bst_exec *exec, const DLTensor *x, const DLTensor *order, DLTensor *rows) {
    bst_view xv, ov, rv;
    BST_TRY(take_tokens(gather_op, "x", x, &xv));
    BST_TRY(take_order(gather_op, order, &xv, "x", &ov));
    BST_TRY(take_sized(gather_op, "rows", 1u << xv.dtype, rows, &xv, "x", 2, ov.count, xv.size[1],
                       "the elements of order, and the columns of x", &rv));
    BST_TRY(
        bst__need_all_apart(gather_op, (bst_named[]){{"rows", &rv}}, 1, (bst_named[]){{"x", &xv}, {"order", &ov}}, 2));
    if (!rv.count) return BST_OK;
    BST_TRY(check_entries(gather_op, "order", &ov, ov.count, "the pairs"));
    if (xv.device.device_type == kDLCUDA) return bst__moe_gather_cuda(exec, gather_op, &xv, &ov, &rv);
    moe_cpu call = {.dtype = xv.dtype,
                    .rows = ov.count,
                    .columns = xv.size[1],
                    .choices = ov.count / xv.size[0],
                    .order = ov.data,
                    .x = xv.data,
                    .x_stride = xv.stride[0],
                    .out = rv.data};
    bst__parallel_for(exec, ov.count, bst__grain(xv.size[1]), BST_CPU_SELECT(bst__moe_gather_cpu), &call);
    return BST_OK;
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

/* The CPU's way through the chunks of a backward pass. */
static bst_status chunks_cpu(const bst_exec *exec, const char *op, moe_cpu *call, const bst_view *dbias,
                             bst_body body) {
    void *partial;
    BST_TRY(bst__moe_partial_sums(exec, op, dbias, call->rows, MOE_CHUNK, &partial));
    call->partial = partial;
    call->dbias = dbias->data;
    bst__parallel_for(exec, (call->rows + MOE_CHUNK - 1) / MOE_CHUNK, bst__grain(MOE_CHUNK * call->columns), body,
                      call);
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
    BST_TRY(need_countable(op, "h", "rows", hv->size[0]));
    if (hv->size[1] % 2)
        return bst__error(BST_INVALID, "%s: h has shape %s; columns in pairs, gate and up, are needed", op,
                          bst__shape_text(hv));
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

bst_status bst_moe_glu_forward(const bst_exec *exec, const DLTensor *h, const DLTensor *bias, const DLTensor *ends,
                               double alpha, double limit, DLTensor *y) {
    bst_view hv, bv, ev, yv;
    BST_TRY(check_glu(glu_forward_op, h, bias, ends, alpha, limit, &hv, &bv, &ev));
    BST_TRY(take_half(glu_forward_op, "y", y, &hv, &yv));
    BST_TRY(bst__need_all_apart(glu_forward_op, (bst_named[]){{"y", &yv}}, 1,
                                (bst_named[]){{"h", &hv}, {"bias", &bv}, {"ends", &ev}}, 3));
    if (!yv.count) return BST_OK;
    BST_TRY(check_ends(glu_forward_op, &ev, hv.size[0]));
    if (hv.device.device_type == kDLCUDA) {
        moe_glu_args args = {.h = hv.data,
                             .bias = bv.data,
                             .ends = ev.data,
                             .y = yv.data,
                             .rows = hv.size[0],
                             .alpha = (float)alpha,
                             .limit = (float)limit,
                             .experts = (int32_t)ev.count};
        return bst__moe_glu_forward_cuda(exec, glu_forward_op, &hv, &bv, &yv, args);
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

/* An output that may take the place of an input of its shape: both contiguous, so that beginning together is enough. */
static bst_status need_itself_or_apart(const char *op, const char *name, const bst_view *v, const char *other_name,
                                       const bst_view *other) {
    if (v->data == other->data || !bst__overlap(v, other)) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s and %s share memory, but do not begin together", op, name, other_name);
}

bst_status bst_moe_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *h, const DLTensor *bias,
                                const DLTensor *ends, const DLTensor *order, const DLTensor *weights,
                                const DLTensor *dots, double alpha, double limit, DLTensor *dh, DLTensor *wy,
                                DLTensor *dweights, DLTensor *dbias) {
    const char *op = glu_backward_op;
    bst_view hv, bv, ev, dyv, ov, wv, dv = {0};
    moe_glu_gradients g = {0};
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
    BST_TRY(need_itself_or_apart(op, "dh", &g.dh, "h", &hv));
    BST_TRY(need_itself_or_apart(op, "wy", &g.wy, "dy", &dyv));
    BST_TRY(bst__need_apart(op, "dh", &g.dh, "dy", &dyv));
    BST_TRY(bst__need_apart(op, "wy", &g.wy, "h", &hv));
    const bst_named outputs[] = {{"wy", &g.wy}, {"dh", &g.dh}, {"dweights", &g.dweights}, {"dbias", &g.dbias}};
    const bst_named inputs[] = {{"bias", &bv}, {"ends", &ev}, {"order", &ov}, {"weights", &wv},
                                {"dots", &dv}, {"h", &hv},    {"dy", &dyv}};
    BST_TRY(bst__need_all_apart(op, outputs, 4, inputs, 5));
    BST_TRY(bst__need_all_apart(op, outputs + 2, 2, inputs + 5, 2));
    if (!hv.count) { /* sums of nothing */
        if (dweights) BST_TRY(bst__zero(exec, op, &g.dweights));
        return dbias ? bst__zero(exec, op, &g.dbias) : BST_OK;
    }
    BST_TRY(check_entries(op, "order", &ov, rows, "the pairs"));
    BST_TRY(check_ends(op, &ev, rows));
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
        return bst__moe_glu_backward_cuda(exec, op, &hv, &bv, &dyv, &wv, &g, args);
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
    const bst_named inputs[] = {{"y", &yv}, {"position", &pv}, {"weights", &wv}, {"bias", &bv}, {"indices", &iv}};
    BST_TRY(bst__need_all_apart(op, (bst_named[]){{"out", &ov}}, 1, inputs, 5));
    if (!ov.count) return BST_OK;
    if (!yv.count) return bst__zero(exec, op, &ov);
    BST_TRY(check_entries(op, "position", &pv, yv.size[0], "the rows of y"));
    if (bias) BST_TRY(check_entries(op, "indices", &iv, bv.size[0], "the experts"));
    if (yv.device.device_type == kDLCUDA) {
        moe_combine_args args = {.y = yv.data,
                                 .weights = wv.data,
                                 .bias = bv.data,
                                 .position = pv.data,
                                 .indices = iv.data,
                                 .out = ov.data,
                                 .tokens = pv.size[0],
                                 .experts = bias ? bv.size[0] : 0};
        return bst__moe_combine_forward_cuda(exec, op, &yv, &wv, &bv, &ov, pv.size[1], args);
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
    if (dots)
        BST_TRY(
            take_sized(op, "dots", 1u << BST_F32, dots, &xv, "dout", 1, ov.count, -1, "the elements of order", &dv));
    if (dbias) BST_TRY(bst__output(op, "dbias", dbias, &bv, "bias", bv.dtype, &dbv));
    const bst_named inputs[] = {{"dout", &xv}, {"order", &ov}, {"ends", &ev}, {"weights", &wv}, {"bias", &bv}};
    BST_TRY(bst__need_all_apart(op, (bst_named[]){{"rows", &rv}, {"dots", &dv}, {"dbias", &dbv}}, 3, inputs, 5));
    if (!rv.count) {
        if (dots) BST_TRY(bst__zero(exec, op, &dv));
        return dbias ? bst__zero(exec, op, &dbv) : BST_OK;
    }
    BST_TRY(check_entries(op, "order", &ov, ov.count, "the pairs"));
    BST_TRY(check_ends(op, &ev, ov.count));
    if (xv.device.device_type == kDLCUDA) {
        moe_combine_backward_args args = {xv.data, wv.data, bv.data,      ov.data,  ev.data,           rv.data,
                                          dv.data, NULL,    xv.stride[0], ov.count, (int32_t)ev.count, 0};
        return bst__moe_combine_backward_cuda(exec, op, &xv, &wv, &bv, &rv, &dbv, args);
    }
    moe_cpu call = {.dtype = xv.dtype,
                    .w_dtype = wv.dtype,
                    .rows = ov.count,
                    .columns = xv.size[1],
                    .choices = ov.count / xv.size[0],
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
