/* gated_rms_norm_cuda.c - the RMS norm with a gate on CUDA: the kernels' configuration, a function of shape, types and
 * chip, and their launch. */
#include <assert.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"
#include "ops/gated_rms_norm/gated_rms_norm.h"
#include "ops/gated_rms_norm/gated_rms_norm_args.h"

static_assert((int)GATE_SILU == BST_NORM_GATE_SILU && (int)GATE_SIGMOID == BST_NORM_GATE_SIGMOID,
              "bastile.h and kernels must agree");

/* One list of macros serves both kernels of the file. */
/* clang-format off */
#define MACROS(X)                                                                                                 \
    X(HIDDEN) X(GROUPS) X(X_TYPE) X(G_TYPE) X(W_TYPE) X(Y_TYPE) X(EXACT_TYPE) X(ACTIVATION) X(GATE_FIRST) X(VEC)  \
    X(THREADS) X(ROWS) X(HELD) X(FOLDED) X(AHEAD) X(RESIDENT) X(DX) X(DGATE) X(DW)
/* clang-format on */
#define PLACE(name) M_##name,
#define NAME(name)  #name,
enum { MACROS(PLACE) };

static const bst_kernel forward_kernel = {"gated_rms_norm.cu", "gated_rms_norm_forward", {MACROS(NAME) "FORWARD"}};
static const bst_kernel backward_kernel = {"gated_rms_norm.cu", "gated_rms_norm_backward", {MACROS(NAME) "BACKWARD"}};

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* What a launch has from its tensors, at `places` (ended by -1), y's or dy's type among them: types, and the widest
 * accesses that each of them and each group of columns allows. */
static bst_launch launch_of(const bst_kernel *kernel, const bst_view *v, const int *places, bst_dtype y_type,
                            const bst_attribute *attributes) {
    bst_launch l = {.kernel = kernel};
    const int64_t group = group_of(v, attributes);
    l.values[M_HIDDEN] = group;
    l.values[M_GROUPS] = v[X].rows.columns / group;
    l.values[M_X_TYPE] = v[X].dtype;
    l.values[M_G_TYPE] = v[GATE].dtype;
    l.values[M_W_TYPE] = v[WEIGHT].dtype;
    l.values[M_Y_TYPE] = y_type;
    l.values[M_EXACT_TYPE] = is_exact(v, y_type, kernel == &backward_kernel) ? BST_F32 : BST_BF16;
    l.values[M_ACTIVATION] = attributes[ACTIVATION].i;
    l.values[M_GATE_FIRST] = attributes[GATE_FIRST].i;
    l.values[M_VEC] = 8;
    l.values[M_FOLDED] = true;
    for (; *places >= 0; places++) {
        const bst_view *tensor = &v[*places];
        if (!tensor->data) continue;
        int vec = bst__row_vector(tensor, &tensor->rows);
        if (vec < l.values[M_VEC]) l.values[M_VEC] = vec;
        if (!bst__rows_folded(&tensor->rows)) l.values[M_FOLDED] = false;
    }
    while (group % l.values[M_VEC]) l.values[M_VEC] /= 2;
    return l;
}

static int64_t vectors_of_row(const bst_launch *l) { return l->values[M_HIDDEN] / l->values[M_VEC]; }

static int64_t vectors_of_thread(const bst_launch *l) {
    return (vectors_of_row(l) + l->values[M_THREADS] - 1) / l->values[M_THREADS];
}

/* Words of 32 bits of an access to a tensor of the type that this macro names. */
static int64_t words(const bst_launch *l, int macro) {
    return (l->values[M_VEC] * bst__dtype_size((bst_dtype)l->values[macro]) + 3) / 4;
}

/* Threads, so that each holds about two vectors of a row, and rows of a block: 128 threads, for enough blocks a
 * multiprocessor and cheap barriers. */
static void shape_rows(bst_launch *l, int least, int most) {
    int threads = least;
    while (threads < most && 2 * threads < vectors_of_row(l)) threads *= 2;
    l->values[M_THREADS] = threads;
    l->values[M_ROWS] = threads < 128 ? 128 / threads : 1;
    l->block = (unsigned)(threads * l->values[M_ROWS]);
}

/* 1024 threads have 64 registers each: what is normed, in float32, and the gate may take 32. */
static void shape_forward(bst_launch *l) {
    shape_rows(l, 8, 1024);
    l->values[M_HELD] = vectors_of_thread(l) * (l->values[M_VEC] + words(l, M_G_TYPE)) <= 32;
    l->values[M_RESIDENT] = 1;
}

/* Words that a thread needs for so many rows and its share of dweight, and for where each vector is. */
static int64_t held_words(const bst_launch *l, int rows) {
    int64_t row = words(l, M_X_TYPE) + words(l, M_G_TYPE) + words(l, M_Y_TYPE);
    return vectors_of_thread(l) * (rows * row + l->values[M_DW] * l->values[M_VEC] + 1);
}

/* Returns the blocks to launch at most. Registers for 512 threads a multiprocessor, or where the arithmetic needs fewer
 * for 640, of which a thread has 128 or 96: with a row ahead these have 24 to 48 KiB on their way, where the bandwidth
 * needs some 20 (calculated, H100). */
static int shape_backward(bst_launch *l, const bst_chip *chip) {
    const int most_words = 68;
    shape_rows(l, 16, 512);
    l->values[M_HELD] = held_words(l, 1) <= most_words;
    l->values[M_AHEAD] = held_words(l, 2) <= most_words;
    l->values[M_RESIDENT] = (l->values[M_EXACT_TYPE] == BST_F32 ? 512 : 640) / l->block;
    return chip->processors * (int)l->values[M_RESIDENT];
}

/* The blocks of a group that rows take: all of them at once, or `most` of all groups. */
static int64_t blocks_of(const bst_launch *l, int64_t rows, int64_t most) {
    int64_t needed = (rows + l->values[M_ROWS] - 1) / l->values[M_ROWS], each = most / l->values[M_GROUPS];
    return needed < each ? needed : each > 1 ? each : 1;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static gated_rms_norm_args args_of(const bst_view *v, const bst_attribute *attributes) {
    return (gated_rms_norm_args){.in = {v[X].data, v[GATE].data},
                                 .map = {bst__row_map(&v[X].rows), bst__row_map(&v[GATE].rows)},
                                 .weight = v[WEIGHT].data,
                                 .rows = v[X].rows.rows,
                                 .eps = (float)attributes[EPS].d};
}

bst_status bst__gated_rms_norm_forward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                            const bst_attribute *attributes) {
    bst_launch l = launch_of(&forward_kernel, v, (int[]){X, GATE, WEIGHT, Y, -1}, v[Y].dtype, attributes);
    gated_rms_norm_args args = args_of(v, attributes);
    args.y = v[Y].data;
    shape_forward(&l);
    int64_t blocks = blocks_of(&l, args.rows, INT64_MAX);
    BST_TRY(bst__cuda_need_rows(op, blocks, l.values[M_GROUPS]));
    l.grid_x = (unsigned)(blocks * l.values[M_GROUPS]);
    return bst__cuda_launch(exec, op, v[X].device.device_id, &l, &args, sizeof args);
}

bst_status bst__gated_rms_norm_backward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                             const bst_attribute *attributes) {
    const int device = v[X].device.device_id;
    const int64_t columns = v[X].rows.columns;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    bst_launch l = launch_of(&backward_kernel, v, (int[]){X, GATE, WEIGHT, DY, DX, DGATE, -1}, v[DY].dtype, attributes);
    gated_rms_norm_args args = args_of(v, attributes);
    args.in[GATED_DY] = v[DY].data;
    args.map[GATED_DY] = bst__row_map(&v[DY].rows);
    args.dx = v[DX].data;
    args.dgate = v[DGATE].data;
    l.values[M_DX] = args.dx != NULL;
    l.values[M_DGATE] = args.dgate != NULL;
    l.values[M_DW] = v[DWEIGHT].data != NULL;
    int64_t parts = blocks_of(&l, args.rows, shape_backward(&l, &chip));
    l.grid_x = (unsigned)(parts * l.values[M_GROUPS]);
    void *partial;
    size_t bytes = l.values[M_DW] ? (size_t)(parts * columns) * sizeof(float) : 0;
    BST_TRY(bst__allocate(exec, op, v[X].device, bytes, &partial));
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, op, device, &l, &args, sizeof args);
    if (status == BST_OK && bytes)
        status = bst__column_sums(exec, op, device, partial, parts, columns, columns, v[WEIGHT].dtype,
                                  (void *[]){v[DWEIGHT].data, NULL});
    bst__release(exec, v[X].device, partial);
    return status;
}
