/* rms_norm.c - RMSNorm: checks, then the configuration, then the kernels of the tensors' device. */
#include <assert.h>
#include <inttypes.h>

#include "cuda/cuda.h"
#include "ops/rms_norm/rms_norm_args.h"
#include "ops/rms_norm/rms_norm_cpu.h"

static const char forward_op[] = "rms_norm_forward", backward_op[] = "rms_norm_backward";

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

static bst_status check_rstd(const char *op, const DLTensor *tensor, const bst_view *x, int64_t rows, bst_view *out) {
    BST_TRY(bst__view(op, "rstd", 1u << BST_F32, tensor, out));
    if (out->count != rows)
        return bst__error(BST_INVALID, "%s: rstd has shape %s; %" PRId64 " elements, one a row of x, are needed", op,
                          bst__shape_text(out), rows);
    BST_TRY(bst__need_contiguous(op, "rstd", out));
    return bst__need_device(op, "rstd", out, x, "x");
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* Macros in the order of their values; one list serves all kernels of the file. */
enum { HIDDEN, X_TYPE, W_TYPE, Y_TYPE, CASTING, HAS_WEIGHT, VEC, THREADS, ROWS, KEEP, FOLDED, DX, DW, STAGES };
#define MACROS(which)                                                                   \
    {"HIDDEN", "X_TYPE", "W_TYPE", "Y_TYPE", "CASTING", "HAS_WEIGHT", "VEC", "THREADS", \
     "ROWS",   "KEEP",   "FOLDED", "DX",     "DW",      "STAGES",     which, NULL}

static const bst_kernel forward_kernel = {"rms_norm.cu", "rms_norm_forward", MACROS("FORWARD")};
static const bst_kernel backward_kernel = {"rms_norm.cu", "rms_norm_backward", MACROS("BACKWARD")};
static const bst_kernel wide_kernel = {"rms_norm.cu", "rms_norm_dweight_wide", MACROS("WIDE")};
static const bst_kernel reduce_kernel = {"rms_norm.cu", "rms_norm_dweight", MACROS("REDUCE")};

/* Rows of `wide_kernel`'s partial sums: enough blocks for the chip at H = 16384, few enough to add up quickly. */
enum { WIDE_SPLIT = 64, WIDE_THREADS = 256 };

/* Elements of an access: what every tensor's alignment allows and 16 bytes hold. */
static int narrower(int a, int b) { return a < b ? a : b; }

/* The threads of a row, so that each holds about `vectors_each` vectors. */
static int row_threads(int64_t vectors, int vectors_each, int least, int most) {
    int threads = least;
    while (threads < most && (int64_t)threads * vectors_each < vectors) threads *= 2;
    return threads;
}

/* Geometry of a row-wise kernel. Rows stay in registers while a thread's share is at most `most_words` 32-bit words. */
static void shape_rows(bst_launch *l, int64_t columns, int vec, int bytes, int vectors_each, int least, int most,
                       int most_words) {
    int64_t vectors = (columns + vec - 1) / vec;
    int threads = row_threads(vectors, vectors_each, least, most);
    int64_t per_thread = (vectors + threads - 1) / threads;
    l->values[HIDDEN] = columns;
    l->values[VEC] = vec;
    l->values[THREADS] = threads;
    l->values[ROWS] =
        threads < 128 ? 128 / threads : 1; /* 128 threads: enough blocks a multiprocessor, cheap barriers */
    l->values[KEEP] = per_thread * ((bytes * vec + 3) / 4) <= most_words;
    l->block = (unsigned)(threads * l->values[ROWS]);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static bst_status forward_cuda(const bst_exec *exec, const bst_view *x, const bst_rows *rows, const bst_view *w,
                               float eps, bst_casting casting, const bst_view *y, float *rstd) {
    bst_rows y_rows = {
        .rows = rows->rows, .columns = rows->columns, .inner = rows->rows, .inner_stride = rows->columns};
    int vec = narrower(bst__row_vector(x, rows), bst__row_vector(y, &y_rows));
    bst_launch l = {.kernel = &forward_kernel};
    l.values[X_TYPE] = x->dtype;
    l.values[W_TYPE] = w->dtype;
    l.values[Y_TYPE] = y->dtype;
    l.values[CASTING] = casting;
    l.values[HAS_WEIGHT] = w->data != NULL;
    l.values[FOLDED] = bst__rows_folded(rows);
    if (w->data) {
        bst_rows w_rows = {.rows = 1, .columns = rows->columns, .inner = 1};
        vec = narrower(vec, bst__row_vector(w, &w_rows));
    }
    /* 4 vectors a thread: at H = 4096 in bf16 128 threads a row. On an H200 as fast as 8 at 16384 rows (68 us), faster
     * at 4096 (19.0 against 19.8). 1024 threads have 64 registers each; 32 words of row leave room for the rest. */
    shape_rows(&l, rows->columns, vec, bst__dtype_size(x->dtype), 4, 8, 1024, 32);
    l.grid_x = (unsigned)((rows->rows + l.values[ROWS] - 1) / l.values[ROWS]);
    rms_norm_forward_args args = {x->data, w->data, y->data, rstd, rows->rows, bst__row_map(rows), eps, 0};
    return bst__cuda_launch(exec, forward_op, x->device.device_id, &l, &args, sizeof args);
}

bst_status bst_rms_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *weight, double eps,
                                bst_casting casting, DLTensor *y, DLTensor *rstd) {
    bst_view xv, wv, yv, rv = {0};
    bst_rows rows;
    bst_dtype y_dtype = BST_F32;
    BST_TRY(check_input(forward_op, x, weight, casting, &xv, &wv, &rows, &y_dtype));
    BST_TRY(bst__output(forward_op, "y", y, &xv, "x", y_dtype, &yv));
    BST_TRY(bst__need_apart(forward_op, "y", &yv, "x", &xv));
    if (rstd) BST_TRY(check_rstd(forward_op, rstd, &xv, rows.rows, &rv));
    if (!rows.rows) return BST_OK;
    if (xv.device.device_type == kDLCUDA) return forward_cuda(exec, &xv, &rows, &wv, (float)eps, casting, &yv, rv.data);
    rms_norm_cpu call = {
        .x = xv, .weight = wv, .y = yv, .x_rows = rows, .casting = casting, .eps = (float)eps, .rstd = rv.data};
    bst__parallel_for(exec, rows.rows, bst__grain(rows.columns), BST_CPU_SELECT(bst__rms_norm_forward_cpu), &call);
    return BST_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status reduce_cuda(const bst_exec *exec, int device, bst_launch l, const float *partial, int64_t parts,
                              const bst_view *dw) {
    l.kernel = &reduce_kernel;
    l.values[W_TYPE] = dw->dtype;
    /* What this kernel does not depend on must not make new kernels of it. */
    l.values[X_TYPE] = l.values[Y_TYPE] = l.values[CASTING] = l.values[FOLDED] = l.values[HAS_WEIGHT] = 0;
    l.values[VEC] = l.values[THREADS] = l.values[ROWS] = l.values[KEEP] = l.values[DX] = l.values[DW] = 1;
    l.values[STAGES] = 1;
    l.shared = 0;
    l.overlap = true;
    l.grid_x = (unsigned)((l.values[HIDDEN] + 31) / 32);
    l.grid_y = 1;
    l.block = 1024;
    rms_norm_dweight_args args = {partial, dw->data, parts};
    return bst__cuda_launch(exec, backward_op, device, &l, &args, sizeof args);
}

/* Geometry of the backward kernel; returns the blocks to launch at most. */
static int shape_backward(bst_launch *l, const bst_chip *chip, int vec, bool want_dx, bool want_dw) {
    int bytes = bst__dtype_size((bst_dtype)l->values[X_TYPE]), dy_bytes = bst__dtype_size((bst_dtype)l->values[Y_TYPE]);
    int64_t columns = l->values[HIDDEN];
    /* 2 vectors a thread, up to 4 in wide rows: their share of dweight takes 16 to 32 float registers in bf16. On an
     * H200 at H = 4096: 38.3 us at 4096 rows (4 vectors: 41.3), 116 at 16384 (113). Wider rows get dweight from a
     * kernel of its own. */
    shape_rows(l, columns, vec, bytes, 2, 16, 512, 16);
    l->values[DX] = want_dx;
    l->values[DW] = want_dw && l->values[KEEP];
    if (!l->values[KEEP]) {
        shape_rows(l, columns, vec, bytes, 8, 16, 512, 0);
    } else if (vec * bytes == 16 && vec * dy_bytes == 16) {
        /* Two stages keep a row's copy under way while the row before it is worked on: 124 to 116 us. */
        int64_t vectors = columns / vec, per_thread = (vectors + l->values[THREADS] - 1) / l->values[THREADS];
        l->values[STAGES] = 2;
        l->shared = (unsigned)(l->values[STAGES] * per_thread * 2 * 16 * l->block);
    }
    /* Rows of a whole block: few blocks, so that few partial rows are left to add up. Rows that share a block are added
     * up in it, and more blocks hide more latency. */
    return chip->processors * (l->values[ROWS] > 1 ? 8 : 2);
}

static bst_status backward_cuda(const bst_exec *exec, rms_norm_backward_args args, bst_launch l, const bst_view *x,
                                const bst_view *dx, const bst_view *dw, int vec) {
    int device = x->device.device_id;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(backward_op, device, &chip));
    int64_t columns = l.values[HIDDEN];
    bool want_dx = dx->data, want_dw = dw->data;
    int resident = shape_backward(&l, &chip, vec, want_dx, want_dw);
    bool wide = want_dw && !l.values[DW];
    int64_t groups = (args.rows + l.values[ROWS] - 1) / l.values[ROWS];
    l.grid_x = (unsigned)(groups < resident ? groups : resident);
    int64_t split = args.rows < WIDE_SPLIT ? args.rows : WIDE_SPLIT, parts = wide ? split : (int64_t)l.grid_x;
    void *partial = NULL;
    if (want_dw)
        BST_TRY(bst__allocate(exec, backward_op, x->device, (size_t)(parts * columns) * sizeof(float), &partial));
    args.partial = partial;
    bst_status status = BST_OK;
    if (want_dx || !wide) status = bst__cuda_launch(exec, backward_op, device, &l, &args, sizeof args);
    if (status == BST_OK && wide) {
        bst_launch w = l;
        w.kernel = &wide_kernel;
        w.values[THREADS] = w.block = WIDE_THREADS;
        w.values[ROWS] = w.values[KEEP] = w.values[DX] = w.values[DW] = w.values[STAGES] = 1;
        w.shared = 0;
        w.grid_x = (unsigned)((columns + WIDE_THREADS * vec - 1) / (WIDE_THREADS * vec));
        w.grid_y = (unsigned)split;
        status = bst__cuda_launch(exec, backward_op, device, &w, &args, sizeof args);
    }
    if (status == BST_OK && want_dw) status = reduce_cuda(exec, device, l, partial, parts, dw);
    bst__release(exec, x->device, partial);
    return status;
}

static bst_status backward_cpu(const bst_exec *exec, rms_norm_cpu call) {
    int64_t rows = call.x_rows.rows, columns = call.x_rows.columns;
    call.chunks = rows < RMS_NORM_CHUNKS ? rows : RMS_NORM_CHUNKS;
    void *partial = NULL;
    if (call.dweight_out.data)
        BST_TRY(
            bst__allocate(exec, backward_op, call.x.device, (size_t)(call.chunks * columns) * sizeof(float), &partial));
    call.dweight = partial;
    bst__parallel_for(exec, call.chunks, bst__grain(columns * (rows / call.chunks)),
                      BST_CPU_SELECT(bst__rms_norm_backward_cpu), &call);
    if (partial)
        bst__parallel_for(exec, columns, bst__grain(call.chunks), BST_CPU_SELECT(bst__rms_norm_dweight_cpu), &call);
    bst__release(exec, call.x.device, partial);
    return BST_OK;
}

bst_status bst_rms_norm_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *x, const DLTensor *weight,
                                 const DLTensor *rstd, bst_casting casting, DLTensor *dx, DLTensor *dweight) {
    bst_view xv, wv, dyv, rv, dxv = {0}, dwv = {0};
    bst_rows rows, dy_rows;
    bst_dtype y_dtype = BST_F32;
    BST_TRY(check_input(backward_op, x, weight, casting, &xv, &wv, &rows, &y_dtype));
    BST_TRY(bst__view(backward_op, "dy", BST_FLOATS, dy, &dyv));
    BST_TRY(bst__need_same_shape(backward_op, "dy", &dyv, "x", &xv));
    BST_TRY(bst__need_dtype(backward_op, "dy", &dyv, y_dtype, "the type of the forward output"));
    BST_TRY(bst__need_device(backward_op, "dy", &dyv, &xv, "x"));
    BST_TRY(bst__rows(backward_op, "dy", &dyv, &dy_rows));
    BST_TRY(check_rstd(backward_op, rstd, &xv, rows.rows, &rv));
    if (dx) {
        BST_TRY(bst__output(backward_op, "dx", dx, &xv, "x", xv.dtype, &dxv));
        BST_TRY(bst__need_apart(backward_op, "dx", &dxv, "x", &xv));
        BST_TRY(bst__need_apart(backward_op, "dx", &dxv, "dy", &dyv));
    }
    if (dweight) {
        if (!weight) return bst__error(BST_INVALID, "%s: dweight is wanted, but weight is NULL", backward_op);
        BST_TRY(bst__output(backward_op, "dweight", dweight, &wv, "weight", wv.dtype, &dwv));
    }
    if (!dx && !dweight) return BST_OK;
    if (xv.device.device_type == kDLCPU) {
        rms_norm_cpu call = {.x = xv,
                             .weight = wv,
                             .dy = dyv,
                             .dx = dxv,
                             .x_rows = rows,
                             .dy_rows = dy_rows,
                             .casting = casting,
                             .rstd = rv.data,
                             .dweight_out = dwv};
        if (!rows.rows) return dweight ? bst__zero(exec, backward_op, &dwv) : BST_OK;
        return backward_cpu(exec, call);
    }
    if (!rows.rows) return dweight ? bst__zero(exec, backward_op, &dwv) : BST_OK;
    int vec = narrower(bst__row_vector(&xv, &rows), bst__row_vector(&dyv, &dy_rows));
    if (dx) {
        bst_rows packed = {
            .rows = rows.rows, .columns = rows.columns, .inner = rows.rows, .inner_stride = rows.columns};
        vec = narrower(vec, bst__row_vector(&dxv, &packed));
    }
    if (weight) {
        bst_rows one = {.rows = 1, .columns = rows.columns, .inner = 1};
        vec = narrower(vec, bst__row_vector(&wv, &one));
    }
    bst_launch l = {.kernel = &backward_kernel};
    l.values[X_TYPE] = xv.dtype;
    l.values[W_TYPE] = wv.dtype;
    l.values[Y_TYPE] = dyv.dtype;
    l.values[CASTING] = casting;
    l.values[HAS_WEIGHT] = weight != NULL;
    l.values[FOLDED] = bst__rows_folded(&rows) && bst__rows_folded(&dy_rows);
    l.values[HIDDEN] = rows.columns;
    rms_norm_backward_args args = {
        dyv.data, xv.data, wv.data, rv.data, dxv.data, NULL, rows.rows, bst__row_map(&rows), bst__row_map(&dy_rows)};
    return backward_cuda(exec, args, l, &xv, &dxv, &dwv, vec);
}
