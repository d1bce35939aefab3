/* swiglu.c - SwiGLU: checks, then the configuration, then the kernels of the tensors' device. */
#include <assert.h>

#include "cuda/cuda.h"
#include "ops/swiglu/swiglu_args.h"
#include "ops/swiglu/swiglu_cpu.h"

static const char forward_op[] = "swiglu_forward", backward_op[] = "swiglu_backward";

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* A tensor and how its rows lie. */
typedef struct operand {
    const char *name;
    bst_view view;
    bst_rows rows;
} operand;

static bst_status check_first(const char *op, const char *name, const DLTensor *tensor, operand *out) {
    out->name = name;
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, &out->view));
    return bst__rows(op, name, &out->view, &out->rows);
}

/* One that matches a. */
static bst_status check_like(const char *op, const char *name, const DLTensor *tensor, const operand *a, operand *out) {
    BST_TRY(check_first(op, name, tensor, out));
    BST_TRY(bst__need_same_shape(op, name, &out->view, a->name, &a->view));
    BST_TRY(bst__need_dtype(op, name, &out->view, a->view.dtype, "the type of a"));
    return bst__need_device(op, name, &out->view, &a->view, a->name);
}

/* A result of the backward pass may take the place of an input, element for element, but not lie across one. */
static bst_status check_result(const char *name, const DLTensor *tensor, const operand *const inputs[3], operand *out) {
    BST_TRY(check_like(backward_op, name, tensor, inputs[0], out));
    BST_TRY(bst__need_distinct(backward_op, name, &out->view));
    for (int i = 0; i < 3; i++) {
        if (bst__same_memory(&out->view, &inputs[i]->view)) continue;
        BST_TRY(bst__need_apart(backward_op, name, &out->view, inputs[i]->name, &inputs[i]->view));
    }
    return BST_OK;
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { TYPE, VEC, THREADS, EACH, FLAT, COLUMNS, CHUNKS, FOLDED, DGATE, DUP, Y };
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

static bool alternative(bst_launch *l, int number, int64_t count) {
    static const struct {
        int threads, each;
    } others[] = {{256, 1}, {128, 2}, {256, 4}};
    if (number > (int)(sizeof others / sizeof *others)) return false;
    arrange(l, count, others[number - 1].threads, others[number - 1].each);
    return true;
}

/* Everything that depends on the tensors' layout; `operands` ends with NULL. */
static bst_alternatives shape(bst_launch *l, const operand *const operands[]) {
    const operand *a = operands[0];
    bool flat = true, one_stride = true;
    int vec = 8;
    for (int i = 0; operands[i]; i++) {
        int allowed = bst__row_vector(&operands[i]->view, &operands[i]->rows);
        if (allowed < vec) vec = allowed;
        flat = flat && bst__rows_packed(&operands[i]->rows);
        one_stride = one_stride && bst__rows_folded(&operands[i]->rows);
    }
    l->values[TYPE] = a->view.dtype;
    l->values[VEC] = vec;
    l->values[FLAT] = flat;
    l->values[COLUMNS] = flat ? 0 : a->rows.columns;
    l->values[FOLDED] = one_stride;
    bst_alternatives alternatives = {alternative, flat ? a->view.count : a->rows.rows, false};
    arrange(l, alternatives.count, MOST_THREADS, ACCESSES);
    return alternatives;
}

/* Without gaps there are elements in place of rows: memory ends before they fill a grid. */
static bst_status need_grid(const char *op, const bst_launch *l, const bst_alternatives *a) {
    return l->values[FLAT] ? BST_OK : bst__cuda_need_rows(op, a->count, l->values[CHUNKS]);
}

/* For the CPU: without gaps anywhere, all is one row. */
static swiglu_matrix matrix(const operand *o, bool flat) {
    int64_t count = o->view.count;
    bst_rows one = {.rows = 1, .columns = count, .inner = 1, .inner_stride = count, .outer_stride = count};
    return (swiglu_matrix){o->view.data, flat ? one : o->rows};
}

static bool packed(const operand *const operands[]) {
    for (int i = 0; operands[i]; i++)
        if (!bst__rows_packed(&operands[i]->rows)) return false;
    return true;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

bst_status bst_swiglu_forward(const bst_exec *exec, const DLTensor *a, const DLTensor *b, DLTensor *y) {
    operand av, bv, yv;
    BST_TRY(check_first(forward_op, "a", a, &av));
    BST_TRY(check_like(forward_op, "b", b, &av, &bv));
    BST_TRY(check_like(forward_op, "y", y, &av, &yv));
    BST_TRY(bst__need_contiguous(forward_op, "y", &yv.view));
    BST_TRY(bst__need_apart(forward_op, "y", &yv.view, "a", &av.view));
    BST_TRY(bst__need_apart(forward_op, "y", &yv.view, "b", &bv.view));
    if (!av.view.count) return BST_OK;
    const operand *operands[] = {&av, &bv, &yv, NULL};
    if (av.view.device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &forward_kernel};
        bst_alternatives alternatives = shape(&l, operands);
        BST_TRY(need_grid(forward_op, &l, &alternatives));
        swiglu_forward_args args = {av.view.data,  bv.view.data,           yv.view.data,
                                    av.view.count, bst__row_map(&av.rows), bst__row_map(&bv.rows)};
        return bst__cuda_launch_tuned(exec, forward_op, av.view.device.device_id, &l, &alternatives, &args,
                                      sizeof args);
    }
    bool flat = packed(operands);
    swiglu_cpu call = {av.view.dtype, .gate = matrix(&av, flat), .up = matrix(&bv, flat), .y = matrix(&yv, flat)};
    bst__parallel_for(exec, av.view.count, bst__grain(1), BST_CPU_SELECT(bst__swiglu_forward_cpu), &call);
    return BST_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status backward_cuda(const bst_exec *exec, const operand *dy, const operand *a, const operand *b,
                                const operand *da, const operand *db, const operand *y) {
    const operand *operands[7] = {a, dy, b}, *const results[] = {da, db, y}; /* the rest NULL */
    bool in_place = false;
    for (int i = 0, count = 3; i < 3; i++) {
        const void *data = results[i]->view.data;
        if (!data) continue;
        operands[count++] = results[i];
        in_place = in_place || data == a->view.data || data == b->view.data || data == dy->view.data;
    }
    bst_launch l = {.kernel = &backward_kernel};
    bst_alternatives alternatives = shape(&l, operands);
    BST_TRY(need_grid(backward_op, &l, &alternatives));
    alternatives.once = in_place;
    l.values[DGATE] = da->view.data != NULL;
    l.values[DUP] = db->view.data != NULL;
    l.values[Y] = y->view.data != NULL;
    swiglu_backward_args args = {.dy = dy->view.data,
                                 .gate = a->view.data,
                                 .up = b->view.data,
                                 .dgate = da->view.data,
                                 .dup = db->view.data,
                                 .y = y->view.data,
                                 .count = a->view.count,
                                 .dy_map = bst__row_map(&dy->rows),
                                 .gate_map = bst__row_map(&a->rows),
                                 .up_map = bst__row_map(&b->rows),
                                 .dgate_map = bst__row_map(&da->rows),
                                 .dup_map = bst__row_map(&db->rows),
                                 .y_map = bst__row_map(&y->rows)};
    return bst__cuda_launch_tuned(exec, backward_op, a->view.device.device_id, &l, &alternatives, &args, sizeof args);
}

bst_status bst_swiglu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *a, const DLTensor *b,
                               DLTensor *da, DLTensor *db, DLTensor *y) {
    operand av, bv, dyv, dav = {0}, dbv = {0}, yv = {0};
    BST_TRY(check_first(backward_op, "a", a, &av));
    BST_TRY(check_like(backward_op, "b", b, &av, &bv));
    BST_TRY(check_like(backward_op, "dy", dy, &av, &dyv));
    const operand *inputs[] = {&av, &bv, &dyv};
    if (da) BST_TRY(check_result("da", da, inputs, &dav));
    if (db) BST_TRY(check_result("db", db, inputs, &dbv));
    if (y) BST_TRY(check_result("y", y, inputs, &yv));
    if (da && db) BST_TRY(bst__need_apart(backward_op, "da", &dav.view, "db", &dbv.view));
    if (y && da) BST_TRY(bst__need_apart(backward_op, "y", &yv.view, "da", &dav.view));
    if (y && db) BST_TRY(bst__need_apart(backward_op, "y", &yv.view, "db", &dbv.view));
    if (!av.view.count || (!da && !db && !y)) return BST_OK;
    if (av.view.device.device_type == kDLCUDA) return backward_cuda(exec, &dyv, &av, &bv, &dav, &dbv, &yv);
    /* A result that is not wanted has no rows: it is left out of the question. */
    const operand *operands[] = {&av, &bv, &dyv, da ? &dav : &av, db ? &dbv : &av, y ? &yv : &av, NULL};
    bool flat = packed(operands);
    swiglu_cpu call = {av.view.dtype,
                       .gate = matrix(&av, flat),
                       .up = matrix(&bv, flat),
                       .y = matrix(&yv, flat),
                       .dy = matrix(&dyv, flat),
                       .dgate = matrix(&dav, flat),
                       .dup = matrix(&dbv, flat)};
    bst__parallel_for(exec, av.view.count, bst__grain(1), BST_CPU_SELECT(bst__swiglu_backward_cpu), &call);
    return BST_OK;
}
