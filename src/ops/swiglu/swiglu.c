/* swiglu.c - SwiGLU: checks, then the configuration, then the kernels of the tensors' device. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/swiglu/swiglu_args.h"
#include "ops/swiglu/swiglu_cpu.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { A, B, Y, DY, DA, DB };

#define INPUT(name) {name, BST_IN, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(A), BST_TYPE_OF(A, "the type of a")}
/* A result of the backward pass may take the place of an input, element for element, but not lie across one. */
#define RESULT(name)                  \
    {name,                            \
     BST_OUT | BST_OPTIONAL,          \
     BST_FLOATS,                      \
     NULL,                            \
     BST_ROWS,                        \
     BST_LIKE(A),                     \
     BST_TYPE_OF(A, "the type of a"), \
     BST_MAY_BE(1u << A | 1u << B | 1u << DY)}

static const bst_argument forward_arguments[] = {
    [A] = {"a", BST_IN, BST_FLOATS, "*I", BST_ROWS},
    [B] = INPUT("b"),
    [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(A), BST_TYPE_OF(A, "the type of a")},
    {NULL},
};

static const bst_argument backward_arguments[] = {
    [A] = {"a", BST_IN, BST_FLOATS, "*I", BST_ROWS},
    [B] = INPUT("b"),
    [Y] = RESULT("y"),
    [DY] = INPUT("dy"),
    [DA] = RESULT("da"),
    [DB] = RESULT("db"),
    {NULL},
};

static const char forward_op[] = "swiglu_forward", backward_op[] = "swiglu_backward";

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { TYPE, VEC, THREADS, EACH, FLAT, COLUMNS, CHUNKS, FOLDED, DGATE, DUP, WITH_Y };
#define MACROS(which) \
    {"TYPE", "VEC", "THREADS", "EACH", "FLAT", "COLUMNS", "CHUNKS", "FOLDED", "DGATE", "DUP", "Y", which, NULL}

static const bst_kernel forward_kernel = {"swiglu.cu", "swiglu_forward", MACROS("FORWARD")};
static const bst_kernel backward_kernel = {"swiglu.cu", "swiglu_backward", MACROS("BACKWARD")};

/* One access a thread to each of two or three tensors: 32 to 48 bytes under way, which at 2048 threads is more than a
 * multiprocessor's share of the bandwidth needs, and short blocks, so that the last ones do not straggle. On an H200 at
 * 16384 x 12288 in bf16: 292 + 467 us; two accesses 294 + 469, four 309 + 479; 256 threads instead of 128: the same. */
enum { ACCESSES = 1, MOST_THREADS = 128 };

/* Geometry; `count`: the rows, or, FLAT, the elements. */
static void arrange(bst_launch *l, int64_t count, int threads, int each) {
    int64_t vec = l->values[VEC], columns = l->values[FLAT] ? count : l->values[COLUMNS];
    while (!l->values[FLAT] && threads > 32 && threads / 2 * vec * each >= columns) threads /= 2;
    int64_t chunk = threads * vec * each, chunks = (columns + chunk - 1) / chunk;
    l->values[THREADS] = threads;
    l->values[EACH] = each;
    l->values[CHUNKS] = l->values[FLAT] ? 1 : chunks;
    l->grid_x = (unsigned)(l->values[FLAT] ? chunks : chunks * count);
    l->block = (unsigned)threads;
}

/* Everything that depends on the tensors' layout; `operands` ends with NULL. Gives what the grid is made for: rows, or
 * elements without gaps, whose memory ends before they fill a grid. */
static int64_t shape(bst_launch *l, const bst_view *const operands[]) {
    const bst_view *a = operands[0];
    bool flat = true, one_stride = true;
    int vec = 8;
    for (int i = 0; operands[i]; i++) {
        int allowed = bst__row_vector(operands[i], &operands[i]->rows);
        if (allowed < vec) vec = allowed;
        flat = flat && bst__rows_packed(&operands[i]->rows);
        one_stride = one_stride && bst__rows_folded(&operands[i]->rows);
    }
    l->values[TYPE] = a->dtype;
    l->values[VEC] = vec;
    l->values[FLAT] = flat;
    l->values[COLUMNS] = flat ? 0 : a->rows.columns;
    l->values[FOLDED] = one_stride;
    int64_t count = flat ? a->count : a->rows.rows;
    arrange(l, count, MOST_THREADS, ACCESSES);
    return count;
}

static bst_status need_grid(const char *op, const bst_launch *l, int64_t count) {
    return l->values[FLAT] ? BST_OK : bst__cuda_need_rows(op, count, l->values[CHUNKS]);
}

/* For the CPU: without gaps anywhere, all is one row. */
static swiglu_matrix matrix(const bst_view *o, bool flat) {
    int64_t count = o->count;
    bst_rows one = {.rows = 1, .columns = count, .inner = 1, .inner_stride = count, .outer_stride = count};
    return (swiglu_matrix){o->data, flat ? one : o->rows};
}

static bool packed(const bst_view *const operands[]) {
    for (int i = 0; operands[i]; i++)
        if (!bst__rows_packed(&operands[i]->rows)) return false;
    return true;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *operands[] = {&v[A], &v[B], &v[Y], NULL};
    if (!v[A].count) return BST_OK;
    if (v[A].device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &forward_kernel};
        BST_TRY(need_grid(forward_op, &l, shape(&l, operands)));
        swiglu_forward_args args = {
            v[A].data, v[B].data, v[Y].data, v[A].count, bst__row_map(&v[A].rows), bst__row_map(&v[B].rows)};
        return bst__cuda_launch(exec, forward_op, v[A].device.device_id, &l, &args, sizeof args);
    }
    bool flat = packed(operands);
    swiglu_cpu call = {v[A].dtype, .gate = matrix(&v[A], flat), .up = matrix(&v[B], flat), .y = matrix(&v[Y], flat)};
    bst__parallel_for(exec, v[A].count, bst__grain(1), BST_CPU_SELECT(bst__swiglu_forward_cpu), &call);
    return BST_OK;
}

static const bst_function forward = {
    .name = forward_op, .arguments = forward_arguments, .run = run_forward, BST_TORCH("swiglu_forward: a b -> y")};

bst_status bst_swiglu_forward(const bst_exec *exec, const DLTensor *a, const DLTensor *b, DLTensor *y) {
    return bst__run(&forward, exec, (const DLTensor *[]){[A] = a, [B] = b, [Y] = y}, NULL);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status backward_cuda(const bst_exec *exec, const bst_view *v) {
    const bst_view *operands[7] = {&v[A], &v[DY], &v[B]}; /* the rest NULL */
    for (int i = 0, count = 3; i < 3; i++) {
        const bst_view *result = &v[(int[]){DA, DB, Y}[i]];
        if (result->data) operands[count++] = result;
    }
    bst_launch l = {.kernel = &backward_kernel};
    BST_TRY(need_grid(backward_op, &l, shape(&l, operands)));
    l.values[DGATE] = v[DA].data != NULL;
    l.values[DUP] = v[DB].data != NULL;
    l.values[WITH_Y] = v[Y].data != NULL;
    swiglu_backward_args args = {.dy = v[DY].data,
                                 .gate = v[A].data,
                                 .up = v[B].data,
                                 .dgate = v[DA].data,
                                 .dup = v[DB].data,
                                 .y = v[Y].data,
                                 .count = v[A].count,
                                 .dy_map = bst__row_map(&v[DY].rows),
                                 .gate_map = bst__row_map(&v[A].rows),
                                 .up_map = bst__row_map(&v[B].rows),
                                 .dgate_map = bst__row_map(&v[DA].rows),
                                 .dup_map = bst__row_map(&v[DB].rows),
                                 .y_map = bst__row_map(&v[Y].rows)};
    return bst__cuda_launch(exec, backward_op, v[A].device.device_id, &l, &args, sizeof args);
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    bool da = v[DA].data, db = v[DB].data, y = v[Y].data;
    if (!v[A].count || (!da && !db && !y)) return BST_OK;
    if (v[A].device.device_type == kDLCUDA) return backward_cuda(exec, v);
    /* A result that is not wanted has no rows: it is left out of the question. */
    const bst_view *operands[] = {&v[A], &v[B], &v[DY], &v[da ? DA : A], &v[db ? DB : A], &v[y ? Y : A], NULL};
    bool flat = packed(operands);
    swiglu_cpu call = {v[A].dtype,
                       .gate = matrix(&v[A], flat),
                       .up = matrix(&v[B], flat),
                       .y = matrix(&v[Y], flat),
                       .dy = matrix(&v[DY], flat),
                       .dgate = matrix(&v[DA], flat),
                       .dup = matrix(&v[DB], flat)};
    bst__parallel_for(exec, v[A].count, bst__grain(1), BST_CPU_SELECT(bst__swiglu_backward_cpu), &call);
    return BST_OK;
}

static const bst_function backward = {
    .name = backward_op,
    .arguments = backward_arguments,
    .run = run_backward,
    BST_TORCH("swiglu_backward: dy a b -> da? db?", "swiglu_backward_with_y: dy a b -> da? db? y",
              "swiglu_backward_inplace: dy a b -> da?=a db?=b y?=dy")};

bst_status bst_swiglu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *a, const DLTensor *b,
                               DLTensor *da, DLTensor *db, DLTensor *y) {
    const DLTensor *tensors[] = {[A] = a, [B] = b, [Y] = y, [DY] = dy, [DA] = da, [DB] = db};
    return bst__run(&backward, exec, tensors, NULL);
}

const bst_function *const bst__swiglu[] = {&forward, &backward, NULL};
