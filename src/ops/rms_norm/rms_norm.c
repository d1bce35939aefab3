/* rms_norm.c - RMSNorm, alone or after the addition of a residual: checks, then the kernels of the tensors' device. */
#include "ops/rms_norm/rms_norm.h"

#include <inttypes.h>

#include "ops/rms_norm/rms_norm_cpu.h"

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static bst_dtype promoted(bst_dtype a, bst_dtype b) { return a == b ? a : BST_F32; }

/* x, weight and the type of y; what forward and backward have in common. */
static bst_status check_input(const char *op, const DLTensor *x, const DLTensor *weight, bst_casting casting,
                              bst_view *xv, bst_view *wv, bst_rows *rows, bst_dtype *y_dtype) {
    BST_TRY(bst__view(op, "x", BST_FLOATS, x, xv));
    BST_TRY(bst__rows(op, "x", xv, rows));
    if (rows->columns < 1 || rows->columns > 65536)
        return bst__error(BST_UNSUPPORTED, "%s: x has rows of %" PRId64 " elements; 1 to 65536 are supported", op,
                          rows->columns);
    if (casting < BST_CASTING_LLAMA || casting > BST_CASTING_NONE)
        return bst__error(BST_INVALID, "%s: casting is %d; 0 (llama), 1 (gemma) or 2 (none) is needed", op,
                          (int)casting);
    *wv = (bst_view){.dtype = xv->dtype};
    if (weight) {
        BST_TRY(bst__view(op, "weight", BST_FLOATS, weight, wv));
        BST_TRY(bst__need_dims(op, "weight", wv, 1));
        BST_TRY(bst__need_size(op, "weight", wv, 0, rows->columns, "the last dimension of x"));
        BST_TRY(bst__need_contiguous(op, "weight", wv));
        BST_TRY(bst__need_device(op, "weight", wv, xv, "x"));
    }
    *y_dtype = casting == BST_CASTING_LLAMA ? promoted(xv->dtype, wv->dtype) : xv->dtype;
    return BST_OK;
}

/* Another input of x's shape, in rows. */
static bst_status check_like_x(const char *op, const char *name, const DLTensor *tensor, bst_dtype dtype,
                               const char *why, const bst_view *x, bst_view *out, bst_rows *rows) {
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, out));
    BST_TRY(bst__need_same_shape(op, name, out, "x", x));
    BST_TRY(bst__need_dtype(op, name, out, dtype, why));
    BST_TRY(bst__need_device(op, name, out, x, "x"));
    return bst__rows(op, name, out, rows);
}

static bst_status check_rstd(const char *op, const DLTensor *tensor, const bst_view *x, int64_t rows, bst_view *out) {
    BST_TRY(bst__view(op, "rstd", 1u << BST_F32, tensor, out));
    if (out->count != rows)
        return bst__error(BST_INVALID, "%s: rstd has shape %s; %" PRId64 " elements, one a row of x, are needed", op,
                          bst__shape_text(out), rows);
    BST_TRY(bst__need_contiguous(op, "rstd", out));
    return bst__need_device(op, "rstd", out, x, "x");
}

/* residual and sum: both or neither. */
static bst_status check_residual(const char *op, const DLTensor *residual, const DLTensor *sum,
                                 rms_norm_forward_call *c) {
    if (!residual && sum)
        return bst__error(BST_INVALID, "%s: sum is given, but residual is NULL; without it the sum is x itself", op);
    if (!residual) return BST_OK;
    /* The sum of two types has the wider one, which x is to have. */
    bst_view given;
    BST_TRY(bst__view(op, "residual", BST_FLOATS, residual, &given));
    bst_dtype dtype = c->x.dtype == BST_F32 ? given.dtype : c->x.dtype;
    BST_TRY(check_like_x(op, "residual", residual, dtype, "as x has it", &c->x, &c->residual, &c->residual_rows));
    return bst__output(op, "sum", sum, &c->x, "x", c->x.dtype, &c->sum);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

bst_status bst_rms_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *residual,
                                const DLTensor *weight, double eps, bst_casting casting, DLTensor *y, DLTensor *sum,
                                DLTensor *rstd) {
    const char *op = RMS_NORM_FORWARD;
    rms_norm_forward_call c = {.casting = casting, .eps = (float)eps};
    bst_view rstd_view = {0};
    bst_dtype y_dtype = BST_F32;
    BST_TRY(bst__need_eps(op, eps));
    BST_TRY(check_input(op, x, weight, casting, &c.x, &c.weight, &c.x_rows, &y_dtype));
    BST_TRY(bst__output(op, "y", y, &c.x, "x", y_dtype, &c.y));
    BST_TRY(check_residual(op, residual, sum, &c));
    if (rstd) BST_TRY(check_rstd(op, rstd, &c.x, c.x_rows.rows, &rstd_view));
    BST_TRY(bst__need_all_apart(op, (bst_named[]){{"sum", &c.sum}, {"y", &c.y}, {"rstd", &rstd_view}}, 3,
                                (bst_named[]){{"x", &c.x}, {"residual", &c.residual}, {"weight", &c.weight}}, 3));
    c.rstd = rstd_view.data;
    if (!c.x_rows.rows) return BST_OK;
    if (c.x.device.device_type == kDLCUDA) return bst__rms_norm_forward_cuda(exec, &c);
    bst__parallel_for(exec, c.x_rows.rows, bst__grain(c.x_rows.columns), BST_CPU_SELECT(bst__rms_norm_forward_cpu), &c);
    return BST_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status backward_cpu(const bst_exec *exec, const rms_norm_backward_call *c) {
    int64_t rows = c->x_rows.rows, columns = c->x_rows.columns;
    rms_norm_backward_cpu work = {.call = c, .chunks = rows < RMS_NORM_CHUNKS ? rows : RMS_NORM_CHUNKS};
    void *partial = NULL;
    if (c->dweight.data)
        BST_TRY(bst__allocate(exec, RMS_NORM_BACKWARD, c->x.device, (size_t)(work.chunks * columns) * sizeof(float),
                              &partial));
    work.partial = partial;
    bst__parallel_for(exec, work.chunks, bst__grain(columns * (rows / work.chunks)),
                      BST_CPU_SELECT(bst__rms_norm_backward_cpu), &work);
    if (partial)
        bst__parallel_for(exec, columns, bst__grain(work.chunks), BST_CPU_SELECT(bst__rms_norm_dweight_cpu), &work);
    bst__release(exec, c->x.device, partial);
    return BST_OK;
}

bst_status bst_rms_norm_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *dsum, const DLTensor *x,
                                 const DLTensor *weight, const DLTensor *rstd, bst_casting casting, DLTensor *dx,
                                 DLTensor *dweight) {
    const char *op = RMS_NORM_BACKWARD;
    rms_norm_backward_call c = {.casting = casting};
    bst_view rstd_view;
    bst_dtype y_dtype = BST_F32;
    BST_TRY(check_input(op, x, weight, casting, &c.x, &c.weight, &c.x_rows, &y_dtype));
    BST_TRY(check_like_x(op, "dy", dy, y_dtype, "the type of the forward output", &c.x, &c.dy, &c.dy_rows));
    if (dsum) BST_TRY(check_like_x(op, "dsum", dsum, c.x.dtype, "as x has it", &c.x, &c.dsum, &c.dsum_rows));
    BST_TRY(check_rstd(op, rstd, &c.x, c.x_rows.rows, &rstd_view));
    c.rstd = rstd_view.data;
    if (dx) BST_TRY(bst__output(op, "dx", dx, &c.x, "x", c.x.dtype, &c.dx));
    if (dweight) {
        if (!weight) return bst__error(BST_INVALID, "%s: dweight is wanted, but weight is NULL", op);
        BST_TRY(bst__output(op, "dweight", dweight, &c.weight, "weight", c.weight.dtype, &c.dweight));
    }
    const bst_named inputs[] = {
        {"x", &c.x}, {"dy", &c.dy}, {"dsum", &c.dsum}, {"weight", &c.weight}, {"rstd", &rstd_view}};
    BST_TRY(bst__need_all_apart(op, (bst_named[]){{"dx", &c.dx}, {"dweight", &c.dweight}}, 2, inputs, 5));
    if (!dx && !dweight) return BST_OK;
    if (!c.x_rows.rows) return dweight ? bst__zero(exec, op, &c.dweight) : BST_OK;
    return c.x.device.device_type == kDLCPU ? backward_cpu(exec, &c) : bst__rms_norm_backward_cuda(exec, &c);
}
