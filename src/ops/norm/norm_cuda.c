/* norm_cuda.c - norms on CUDA: the kernels' configuration, a function of shape, types and chip, and their launch. */
#include <assert.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"
#include "ops/norm/norm.h"
#include "ops/norm/norm_args.h"

static_assert(NORM_LLAMA == BST_CASTING_LLAMA && NORM_GEMMA == BST_CASTING_GEMMA, "bastile.h and kernels must agree");

/* One list of macros serves all kernels of the file. */
/* clang-format off */
#define MACROS(X)                                                                                  \
    X(HIDDEN) X(X_TYPE) X(W_TYPE) X(Y_TYPE) X(CASTING) X(HAS_WEIGHT) X(ADD) X(VEC) X(THREADS) X(ROWS) \
    X(SOURCE) X(FOLDED) X(DX) X(DW) X(STAGES) X(HAS_BIAS) X(DB) \
    X(CENTRE) X(AFTER)
/* clang-format on */
#define PLACE(name) M_##name,
#define NAME(name)  #name,
enum { MACROS(PLACE) };

static const bst_kernel forward_kernel = {"norm.cu", "norm_forward", {MACROS(NAME) "FORWARD"}};
static const bst_kernel backward_kernel = {"norm.cu", "norm_backward", {MACROS(NAME) "BACKWARD"}};
static const bst_kernel wide_kernel = {"norm.cu", "norm_dweight_wide", {MACROS(NAME) "WIDE"}};

/* Rows of `wide_kernel`'s partial sums: enough blocks for the chip at H = 16384, few enough to add up quickly. */
enum { WIDE_SPLIT = 64, WIDE_THREADS = 256 };

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* What a launch has from its tensors, at `places` (ended by -1), y's or dy's type among them: types, and the widest
 * accesses that each of them allows. */
static bst_launch launch_of(const bst_kernel *kernel, const bst_view *v, const int *places, bst_dtype y_type,
                            const bst_attribute *attributes) {
    bst_launch l = {.kernel = kernel};
    l.values[M_HIDDEN] = v[X].rows.columns;
    l.values[M_X_TYPE] = v[X].dtype;
    l.values[M_W_TYPE] = v[WEIGHT].dtype;
    l.values[M_Y_TYPE] = y_type;
    int64_t casting = attributes[CASTING].i; /* y's type alone tells kernels FLOAT32 */
    l.values[M_CASTING] = casting == BST_CASTING_FLOAT32 ? BST_CASTING_NONE : casting;
    l.values[M_HAS_WEIGHT] = v[WEIGHT].data != NULL;
    l.values[M_CENTRE] = attributes[KIND].i == BST_NORM_LAYER;
    l.values[M_VEC] = 8;
    l.values[M_FOLDED] = true;
    for (; *places >= 0; places++) {
        const bst_view *tensor = &v[*places];
        if (!tensor->data) continue;
        int vec = bst__row_vector(tensor, &tensor->rows);
        if (vec < l.values[M_VEC]) l.values[M_VEC] = vec;
        if (!bst__rows_folded(&tensor->rows)) l.values[M_FOLDED] = false;
    }
    return l;
}

static int64_t vectors_of_row(const bst_launch *l) {
    return (l->values[M_HIDDEN] + l->values[M_VEC] - 1) / l->values[M_VEC];
}

static int64_t vectors_of_thread(const bst_launch *l) {
    return (vectors_of_row(l) + l->values[M_THREADS] - 1) / l->values[M_THREADS];
}

/* Bytes of an access to x, and to y or dy. */
static int x_access(const bst_launch *l) {
    return (int)l->values[M_VEC] * bst__dtype_size((bst_dtype)l->values[M_X_TYPE]);
}
static int y_access(const bst_launch *l) {
    return (int)l->values[M_VEC] * bst__dtype_size((bst_dtype)l->values[M_Y_TYPE]);
}

/* Threads, so that each holds about `vectors_each` vectors of a row, and rows of a block. */
static void shape_rows(bst_launch *l, int vectors_each, int least, int most) {
    int threads = least;
    while (threads < most && threads * vectors_each < vectors_of_row(l)) threads *= 2;
    l->values[M_THREADS] = threads;
    /* 128 threads: enough blocks a multiprocessor, cheap barriers */
    l->values[M_ROWS] = threads < 128 ? 128 / threads : 1;
    l->block = (unsigned)(threads * l->values[M_ROWS]);
}

/* Whether a thread's share of a row, `bytes` an access, is at most so many 32-bit words. */
static bool fits(const bst_launch *l, int bytes, int words) {
    return vectors_of_thread(l) * ((bytes + 3) / 4) <= words;
}

static void shape_forward(bst_launch *l) {
    /* 2 vectors a thread: at H = 4096 in bf16 256 threads a row. On an H200, at 16384 rows: 66.8 us; with 4, 68.0,
     * with 1, 75.5. 1024 threads have 64 registers each; 32 words of x and residual leave room for the rest. */
    int inputs = 1 + (l->values[M_ADD] != 0) + (l->values[M_AFTER] != 0);
    shape_rows(l, 2, 8, 1024);
    l->values[M_SOURCE] = fits(l, inputs * x_access(l), 32) ? NORM_HELD : NORM_AGAIN;
}

/* Words of 32 bits that a thread needs to hold its share of so many rows, and of the sums; 512 threads have 128
 * registers each, and some 30 are for what else there is. */
static int64_t held_words(const bst_launch *l, int64_t rows) {
    int64_t x = (x_access(l) + 3) / 4, y = (y_access(l) + 3) / 4, sums = l->values[M_DW] + l->values[M_DB];
    return vectors_of_thread(l) * (rows * (x + y + (l->values[M_ADD] ? x : 0)) + sums * l->values[M_VEC]);
}

/* Rows that each take a whole block, where the chip has bulk copies: one block a multiprocessor, as many rows ahead as
 * there is room for, up to three: the more, the longer the last rows wait with nothing left to read. On an H200, with
 * the sum of dweight, at 2048, 4096 and 16384 x 4096: 22.2, 34.7, 107.3 us; six stages 22.8, 35.4, 107.9, three 22.1,
 * 34.5, 107.7; two blocks a multiprocessor 25, 37, 116. False where that does not apply: in rows of up to 256 accesses
 * short blocks are better, for one waits while another has its row's sum (32768 x 2048: 110 us, bulk copies 135). */
static bool shape_bulk(bst_launch *l, const bst_chip *chip) {
    const int64_t vectors = vectors_of_row(l), most = 2 * 512, least = 257;
    if (chip->arch < 90 || !l->values[M_DX] || l->values[M_HIDDEN] % l->values[M_VEC] || vectors < least ||
        vectors > most || x_access(l) != 16 || y_access(l) != 16)
        return false;
    int64_t row = vectors * 16 * (l->values[M_ADD] ? 3 : 2), stages = (chip->shared_memory - 1024) / row;
    if (stages < 2) return false;
    if (stages > 4) stages = 4;
    shape_rows(l, 2, 128, 512);
    l->values[M_SOURCE] = NORM_BULK;
    l->values[M_STAGES] = stages;
    l->shared = (unsigned)(stages * row);
    return true;
}

/* Geometry of the backward kernel, which may sum dweight and dbias as it goes; returns the blocks to launch at most.
 *
 * On an H200, in bf16 with dweight, relative to a ring of shared memory into which each thread copied its own share of
 * the next row; first at 67 million elements, then at 8 million. In registers: with the next row ahead 0.97 and 0.99 at
 * H = 128, 0.84 to 0.90 and 0.95 to 1.00 from 256 to 1024, 0.78 and 0.99 at 1536, 0.75 and 0.99 at 2048, 1.04 and 0.98
 * at 12288; the row alone 1.00 and 0.95 at 64, 1.04 and 0.97 at 16384, in float32 0.98 to 1.01. Without bulk copies
 * ahead would be 1.02 and 1.00 at 4096 and 1.15 at 5120 there, where a multiprocessor has three to six times the
 * bandwidth of those on chips without them. */
static int shape_backward(bst_launch *l, const bst_chip *chip) {
    const int most_words = 96;
    if (shape_bulk(l, chip)) return chip->processors;
    shape_rows(l, 2, 16, 512);
    l->values[M_SOURCE] = NORM_HELD;
    l->values[M_STAGES] = l->values[M_VEC] == 8 && vectors_of_row(l) >= 16 && held_words(l, 2) < most_words ? 2 : 1;
    if (held_words(l, 1) > most_words) { /* dweight and dbias come from a kernel of their own */
        shape_rows(l, 8, 16, 512);
        l->values[M_SOURCE] = NORM_AGAIN;
        l->values[M_STAGES] = 1;
        l->values[M_DW] = l->values[M_DB] = false;
    }
    /* Fewer blocks leave fewer partial rows to add up, more hide more latency. */
    return chip->processors * (l->block > 128 ? 2 : l->values[M_HIDDEN] <= 1536 ? 8 : 4);
}

/* The blocks that rows take: all of them at once, or `most`. */
static unsigned blocks_of(const bst_launch *l, int64_t rows, int64_t most) {
    int64_t groups = (rows + l->values[M_ROWS] - 1) / l->values[M_ROWS];
    return (unsigned)(groups < most ? groups : most);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

bst_status bst__norm_forward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                  const bst_attribute *attributes) {
    const bst_view *x = &v[X], *residual = &v[RESIDUAL], *after = &v[AFTER];
    bst_launch l =
        launch_of(&forward_kernel, v, (int[]){X, RESIDUAL, WEIGHT, BIAS, AFTER, Y, SUM, -1}, v[Y].dtype, attributes);
    l.values[M_ADD] = residual->data ? residual->dtype + 1 : 0;
    l.values[M_AFTER] = after->data != NULL;
    l.values[M_HAS_BIAS] = v[BIAS].data != NULL;
    shape_forward(&l);
    l.grid_x = blocks_of(&l, x->rows.rows, INT64_MAX);
    norm_forward_args args = {
        .in = {x->data, residual->data, after->data},
        .map = {bst__row_map(&x->rows), bst__row_map(&residual->rows), bst__row_map(&after->rows)},
        .weight = v[WEIGHT].data,
        .y = v[Y].data,
        .sum = v[SUM].data,
        .rstd = v[NEW_RSTD].data,
        .rows = x->rows.rows,
        .eps = (float)attributes[EPS].d,
        .bias = v[BIAS].data,
        .mean = v[NEW_MEAN].data};
    return bst__cuda_launch(exec, op, x->device.device_id, &l, &args, sizeof args);
}

/* dweight and dbias of rows that are too wide for registers: `parts` partial rows. */
static bst_status wide_partials(const bst_exec *exec, const char *op, int device, bst_launch l,
                                const norm_backward_args *args, int64_t parts) {
    int64_t columns_of_block = WIDE_THREADS * l.values[M_VEC];
    l.kernel = &wide_kernel;
    l.values[M_THREADS] = l.block = WIDE_THREADS;
    /* What this kernel does not depend on must not make new kernels of it. */
    l.values[M_ROWS] = l.values[M_DX] = 1;
    l.values[M_SOURCE] = l.values[M_ADD] = 0;
    l.grid_x = (unsigned)((l.values[M_HIDDEN] + columns_of_block - 1) / columns_of_block);
    l.grid_y = (unsigned)parts;
    return bst__cuda_launch(exec, op, device, &l, args, sizeof *args);
}

bst_status bst__norm_backward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                   const bst_attribute *attributes) {
    const bst_view *x = &v[X], *dy = &v[DY], *dsum = &v[DSUM];
    int device = x->device.device_id;
    int64_t rows = x->rows.rows, columns = x->rows.columns;
    bool want_dx = v[DX].data, want_dw = v[DWEIGHT].data, want_db = v[DBIAS].data, add = want_dx && dsum->data;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    bst_launch l =
        launch_of(&backward_kernel, v, (int[]){X, WEIGHT, DY, DX, add ? DSUM : -1, -1}, dy->dtype, attributes);
    l.values[M_ADD] = add;
    l.values[M_DX] = want_dx;
    l.values[M_DW] = want_dw;
    l.values[M_DB] = want_db;
    int64_t sums = want_dw + want_db;
    int resident = shape_backward(&l, &chip);
    l.grid_x = blocks_of(&l, rows, resident);
    bool wide = sums > l.values[M_DW] + l.values[M_DB];
    int64_t parts = !wide ? (int64_t)l.grid_x : rows < WIDE_SPLIT ? rows : WIDE_SPLIT;
    void *partial = NULL;
    if (sums) BST_TRY(bst__allocate(exec, op, x->device, (size_t)(parts * sums * columns) * sizeof(float), &partial));
    norm_backward_args args = {
        .in = {x->data, dy->data, dsum->data},
        .map = {bst__row_map(&x->rows), bst__row_map(&dy->rows), bst__row_map(&dsum->rows)},
        .weight = v[WEIGHT].data,
        .rstd = v[RSTD].data,
        .dx = v[DX].data,
        .partial = partial,
        .rows = rows,
        .mean = v[MEAN].data,
    };
    bst_status status = BST_OK;
    if (want_dx || !wide) status = bst__cuda_launch(exec, op, device, &l, &args, sizeof args);
    l.values[M_DW] = want_dw;
    l.values[M_DB] = want_db;
    if (status == BST_OK && wide) status = wide_partials(exec, op, device, l, &args, parts);
    if (status == BST_OK && sums)
        status = bst__column_sums(exec, op, device, partial, parts, sums * columns, columns, v[WEIGHT].dtype,
                                  (void *[]){v[want_dw ? DWEIGHT : DBIAS].data, v[DBIAS].data});
    bst__release(exec, x->device, partial);
    return status;
}
