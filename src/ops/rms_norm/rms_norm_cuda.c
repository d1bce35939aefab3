/* rms_norm_cuda.c - RMSNorm on CUDA: the kernels' configuration, a function of shape, types and chip, and their launch.
 */
#include <assert.h>

#include "cuda/cuda.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rms_norm/rms_norm_args.h"

/* Macros in the order of their values; one list serves all kernels of the file. */
enum { HIDDEN, X_TYPE, W_TYPE, Y_TYPE, CASTING, HAS_WEIGHT, ADD, VEC, THREADS, ROWS, KEEP, FOLDED, DX, DW, STAGES };
#define MACROS(which)                                                                          \
    {"HIDDEN", "X_TYPE", "W_TYPE", "Y_TYPE", "CASTING", "HAS_WEIGHT", "ADD", "VEC", "THREADS", \
     "ROWS",   "KEEP",   "FOLDED", "DX",     "DW",      "STAGES",     which, NULL}

static const bst_kernel forward_kernel = {"rms_norm.cu", "rms_norm_forward", MACROS("FORWARD")};
static const bst_kernel backward_kernel = {"rms_norm.cu", "rms_norm_backward", MACROS("BACKWARD")};
static const bst_kernel rows_kernel = {"rms_norm.cu", "rms_norm_backward_rows", MACROS("BACKWARD_ROWS")};
static const bst_kernel wide_kernel = {"rms_norm.cu", "rms_norm_dweight_wide", MACROS("WIDE")};
static const bst_kernel reduce_kernel = {"rms_norm.cu", "rms_norm_dweight", MACROS("REDUCE")};

/* Rows of `wide_kernel`'s partial sums: enough blocks for the chip at H = 16384, few enough to add up quickly. */
enum { WIDE_SPLIT = 64, WIDE_THREADS = 256 };

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* Elements of an access: what the alignment of every tensor that is there allows, and 16 bytes hold. */
static void narrow(int *vec, const bst_view *v, const bst_rows *rows) {
    int most = v->data ? bst__row_vector(v, rows) : *vec;
    if (most < *vec) *vec = most;
}

/* The rows of a contiguous tensor. */
static bst_rows packed_rows(int64_t rows, int64_t columns) {
    return (bst_rows){.rows = rows, .columns = columns, .inner = rows, .inner_stride = columns};
}

/* The threads of a row, so that each holds about `vectors_each` vectors. */
static int row_threads(int64_t vectors, int vectors_each, int least, int most) {
    int threads = least;
    while (threads < most && (int64_t)threads * vectors_each < vectors) threads *= 2;
    return threads;
}

static int64_t vectors_of_thread(const bst_launch *l) {
    int64_t vectors = (l->values[HIDDEN] + l->values[VEC] - 1) / l->values[VEC];
    return (vectors + l->values[THREADS] - 1) / l->values[THREADS];
}

/* Geometry of a row-wise kernel. Rows stay on the chip while a thread's share, of `bytes` an element, is at most
 * `most_words` 32-bit words. */
static void shape_rows(bst_launch *l, int bytes, int vectors_each, int least, int most, int most_words) {
    int vec = (int)l->values[VEC];
    int threads = row_threads((l->values[HIDDEN] + vec - 1) / vec, vectors_each, least, most);
    l->values[THREADS] = threads;
    /* 128 threads: enough blocks a multiprocessor, cheap barriers */
    l->values[ROWS] = threads < 128 ? 128 / threads : 1;
    l->values[KEEP] = vectors_of_thread(l) * ((bytes * vec + 3) / 4) <= most_words;
    l->block = (unsigned)(threads * l->values[ROWS]);
}

static void shape_forward(bst_launch *l) {
    /* 2 vectors a thread: at H = 4096 in bf16 256 threads a row. On an H200, at 16384 rows: 66.8 us; with 4, 68.0,
     * with 1, 75.5. 1024 threads have 64 registers each; 32 words of x and residual leave room for the rest. */
    int inputs = l->values[ADD] ? 2 : 1;
    shape_rows(l, inputs * bst__dtype_size((bst_dtype)l->values[X_TYPE]), 2, 8, 1024, 32);
}

static void cover(bst_launch *l, int64_t rows) {
    l->grid_x = (unsigned)((rows + l->values[ROWS] - 1) / l->values[ROWS]);
    l->block = (unsigned)(l->values[THREADS] * l->values[ROWS]);
}

/* Static shared memory of the backward kernel, at most: the reductions' scratch, and the sums of rows in one block. */
static int64_t backward_static_bytes(const bst_launch *l) {
    return 64 * 4 + (l->values[DW] && l->values[ROWS] > 1 ? l->values[HIDDEN] * 4 : 0);
}

/* Rows that each take a whole block, where the chip has bulk copies: one block a multiprocessor, as many rows ahead as
 * there is room for, up to three: the more, the longer the last rows wait with nothing left to read. On an H200, with
 * the sum of dweight, at 2048, 4096 and 16384 x 4096: 22.2, 34.7, 107.3 us; six stages 22.8, 35.4, 107.9, three 22.1,
 * 34.5, 107.7; two blocks a multiprocessor 25, 37, 116; the ring of backward_kernel 116 without the sum at the largest.
 * False where that does not apply. */
static bool shape_rows_backward(bst_launch *l, const bst_chip *chip) {
    const int64_t vectors = l->values[HIDDEN] / l->values[VEC], most = 2 * 512, least = 256;
    int bytes = bst__dtype_size((bst_dtype)l->values[X_TYPE]), dy_bytes = bst__dtype_size((bst_dtype)l->values[Y_TYPE]);
    if (chip->arch < 90 || !l->values[DX] || l->values[HIDDEN] % l->values[VEC] || vectors < least || vectors > most ||
        l->values[VEC] * bytes != 16 || l->values[VEC] * dy_bytes != 16)
        return false;
    int64_t row = vectors * 16 * (l->values[ADD] ? 3 : 2), stages = (chip->shared_memory - 1024) / row;
    if (stages < 2) return false;
    if (stages > 4) stages = 4;
    l->kernel = &rows_kernel;
    l->values[THREADS] = row_threads(vectors, 2, 128, 512);
    l->values[ROWS] = l->values[KEEP] = 1;
    l->values[STAGES] = stages;
    l->block = (unsigned)l->values[THREADS];
    l->shared = (unsigned)(stages * row);
    return true;
}

/* Geometry of the backward kernel; returns the blocks to launch at most. */
static int shape_backward(bst_launch *l, const bst_chip *chip, bool want_dw) {
    int bytes = bst__dtype_size((bst_dtype)l->values[X_TYPE]), dy_bytes = bst__dtype_size((bst_dtype)l->values[Y_TYPE]);
    if (shape_rows_backward(l, chip)) {
        l->values[DW] = want_dw;
        return chip->processors;
    }
    /* 2 vectors a thread, up to 4 in wide rows: their share of dweight takes 16 to 32 float registers in bf16. On an
     * H200 at H = 4096: 38.3 us at 4096 rows (4 vectors: 41.3), 116 at 16384 (113). Wider rows get dweight from a
     * kernel of its own. */
    shape_rows(l, bytes, 2, 16, 512, 16);
    l->values[DW] = want_dw && l->values[KEEP];
    if (!l->values[KEEP]) {
        shape_rows(l, bytes, 8, 16, 512, 0);
    } else if (l->values[VEC] * bytes == 16 && l->values[VEC] * dy_bytes == 16) {
        /* Two stages keep a row's copy under way while the row before it is worked on: 124 to 116 us. Where a chip has
         * no room for them (H = 16384, outside the data-centre chips), the row comes straight into registers. */
        const int stages = 2;
        int64_t ring = stages * vectors_of_thread(l) * (l->values[ADD] ? 3 : 2) * 16 * l->block;
        if (ring + backward_static_bytes(l) <= chip->shared_memory) {
            l->values[STAGES] = stages;
            l->shared = (unsigned)ring;
        }
    }
    /* Rows of a whole block: few blocks, so that few partial rows are left to add up. Rows that share a block are added
     * up in it, and more blocks hide more latency. */
    return chip->processors * (l->values[ROWS] > 1 ? 8 : 2);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

bst_status bst__rms_norm_forward_cuda(const bst_exec *exec, const rms_norm_forward_call *c) {
    int64_t rows = c->x.rows.rows, columns = c->x.rows.columns;
    bst_rows packed = packed_rows(rows, columns), one = packed_rows(1, columns);
    bool add = c->residual.data != NULL;
    int vec = bst__row_vector(&c->x, &c->x.rows);
    narrow(&vec, &c->residual, &c->residual.rows);
    narrow(&vec, &c->weight, &one);
    narrow(&vec, &c->y, &packed);
    narrow(&vec, &c->sum, &packed);
    bst_launch l = {.kernel = &forward_kernel};
    l.values[HIDDEN] = columns;
    l.values[X_TYPE] = c->x.dtype;
    l.values[W_TYPE] = c->weight.dtype;
    l.values[Y_TYPE] = c->y.dtype;
    l.values[CASTING] = c->casting;
    l.values[HAS_WEIGHT] = c->weight.data != NULL;
    l.values[ADD] = add ? c->residual.dtype + 1 : 0;
    l.values[VEC] = vec;
    l.values[FOLDED] = bst__rows_folded(&c->x.rows) && (!add || bst__rows_folded(&c->residual.rows));
    shape_forward(&l);
    cover(&l, rows);
    rms_norm_forward_args args = {.x = c->x.data,
                                  .weight = c->weight.data,
                                  .y = c->y.data,
                                  .rstd = c->rstd,
                                  .rows = rows,
                                  .x_map = bst__row_map(&c->x.rows),
                                  .eps = c->eps,
                                  .residual = c->residual.data,
                                  .sum = c->sum.data,
                                  .residual_map = bst__row_map(&c->residual.rows)};
    return bst__cuda_launch(exec, RMS_NORM_FORWARD, c->x.device.device_id, &l, &args, sizeof args);
}

static bst_status reduce(const bst_exec *exec, int device, bst_launch l, const float *partial, int64_t parts,
                         const bst_view *dweight) {
    l.kernel = &reduce_kernel;
    l.values[W_TYPE] = dweight->dtype;
    /* What this kernel does not depend on must not make new kernels of it. */
    l.values[X_TYPE] = l.values[Y_TYPE] = l.values[CASTING] = l.values[FOLDED] = l.values[HAS_WEIGHT] = 0;
    l.values[VEC] = l.values[THREADS] = l.values[ROWS] = l.values[KEEP] = l.values[DX] = l.values[DW] = 1;
    l.values[STAGES] = 1;
    l.values[ADD] = 0;
    l.shared = 0;
    l.overlap = true;
    l.grid_x = (unsigned)((l.values[HIDDEN] + 31) / 32);
    l.grid_y = 1;
    l.block = 1024;
    rms_norm_dweight_args args = {partial, dweight->data, parts};
    return bst__cuda_launch(exec, RMS_NORM_BACKWARD, device, &l, &args, sizeof args);
}

/* dweight of rows that are too wide for registers: `split` partial rows. */
static bst_status wide_partials(const bst_exec *exec, int device, bst_launch l, const rms_norm_backward_args *args,
                                int64_t split) {
    int64_t columns_of_block = WIDE_THREADS * l.values[VEC];
    l.kernel = &wide_kernel;
    l.values[THREADS] = l.block = WIDE_THREADS;
    l.values[ROWS] = l.values[KEEP] = l.values[DX] = l.values[DW] = l.values[STAGES] = 1;
    l.values[ADD] = 0;
    l.shared = 0;
    l.grid_x = (unsigned)((l.values[HIDDEN] + columns_of_block - 1) / columns_of_block);
    l.grid_y = (unsigned)split;
    return bst__cuda_launch(exec, RMS_NORM_BACKWARD, device, &l, args, sizeof *args);
}

bst_status bst__rms_norm_backward_cuda(const bst_exec *exec, const rms_norm_backward_call *c) {
    int device = c->x.device.device_id;
    int64_t rows = c->x.rows.rows, columns = c->x.rows.columns;
    bool want_dx = c->dx.data, want_dw = c->dweight.data, add = want_dx && c->dsum.data;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(RMS_NORM_BACKWARD, device, &chip));
    bst_rows packed = packed_rows(rows, columns), one = packed_rows(1, columns);
    int vec = bst__row_vector(&c->x, &c->x.rows);
    narrow(&vec, &c->dy, &c->dy.rows);
    narrow(&vec, &c->weight, &one);
    narrow(&vec, &c->dx, &packed);
    if (add) narrow(&vec, &c->dsum, &c->dsum.rows);
    bst_launch l = {.kernel = &backward_kernel};
    l.values[HIDDEN] = columns;
    l.values[X_TYPE] = c->x.dtype;
    l.values[W_TYPE] = c->weight.dtype;
    l.values[Y_TYPE] = c->dy.dtype;
    l.values[CASTING] = c->casting;
    l.values[HAS_WEIGHT] = c->weight.data != NULL;
    l.values[ADD] = add;
    l.values[VEC] = vec;
    l.values[FOLDED] =
        bst__rows_folded(&c->x.rows) && bst__rows_folded(&c->dy.rows) && (!add || bst__rows_folded(&c->dsum.rows));
    l.values[DX] = want_dx;
    int resident = shape_backward(&l, &chip, want_dw);
    int64_t groups = (rows + l.values[ROWS] - 1) / l.values[ROWS];
    l.grid_x = (unsigned)(groups < resident ? groups : resident);
    bool wide = want_dw && !l.values[DW];
    int64_t split = rows < WIDE_SPLIT ? rows : WIDE_SPLIT, parts = wide ? split : (int64_t)l.grid_x;
    void *partial = NULL;
    if (want_dw)
        BST_TRY(
            bst__allocate(exec, RMS_NORM_BACKWARD, c->x.device, (size_t)(parts * columns) * sizeof(float), &partial));
    rms_norm_backward_args args = {.dy = c->dy.data,
                                   .x = c->x.data,
                                   .weight = c->weight.data,
                                   .rstd = c->rstd,
                                   .dx = c->dx.data,
                                   .partial = partial,
                                   .rows = rows,
                                   .x_map = bst__row_map(&c->x.rows),
                                   .dy_map = bst__row_map(&c->dy.rows),
                                   .dsum = c->dsum.data,
                                   .dsum_map = bst__row_map(&c->dsum.rows)};
    bst_status status = BST_OK;
    if (want_dx || !wide) status = bst__cuda_launch(exec, RMS_NORM_BACKWARD, device, &l, &args, sizeof args);
    if (status == BST_OK && wide) status = wide_partials(exec, device, l, &args, split);
    if (status == BST_OK && want_dw) status = reduce(exec, device, l, partial, parts, &c->dweight);
    bst__release(exec, c->x.device, partial);
    return status;
}
