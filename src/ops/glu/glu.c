/* glu.c - gated units: checks, then the configuration, then the kernels of the tensors' device. */
#include "core/activation.h"
#include "core/describe.h"
#include "core/options.h"
#include "cuda/cuda.h"
#include "ops/glu/glu_args.h"
#include "ops/glu/glu_cpu.h"

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

static const char forward_op[] = "glu_forward", backward_op[] = "glu_backward";

enum { ACTIVATION };
static const bst_attribute_rule rules[] = {[ACTIVATION] = BST_ACTIVATION_RULE, {NULL}};

static bst_status read_options(const char *op, const bst_glu_options *given, bst_attribute *attributes) {
    bst_glu_options options;
    BST_TRY(bst__options(op, "options", given, &options, sizeof options));
    attributes[ACTIVATION].i = options.activation;
    return BST_OK;
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { TYPE, KIND, VEC, THREADS, FLAT, COLUMNS, CHUNKS, FOLDED, DGATE, DUP, WITH_Y };
#define MACROS(which) \
    {"TYPE", "ACTIVATION", "VEC", "THREADS", "FLAT", "COLUMNS", "CHUNKS", "FOLDED", "DGATE", "DUP", "Y", which, NULL}

static const bst_kernel forward_kernel = {"glu.cu", "glu_forward", MACROS("FORWARD")};
static const bst_kernel backward_kernel = {"glu.cu", "glu_backward", MACROS("BACKWARD")};

/* One access a thread to each of two or three tensors: 32 to 48 bytes in flight, which at 2048 threads is more than a
 * multiprocessor's share of the bandwidth needs, and short blocks, so that the last ones do not straggle. On an H200 at
 * 16384 x 12288 in bf16: 292 + 467 us; two accesses 294 + 469, four 309 + 479; 256 threads instead of 128: the same. */
enum { MOST_THREADS = 128 };

/* Everything that depends on the tensors' layout; `operands` ends with NULL. */
static bst_status shape(const char *op, bst_launch *l, const bst_view *const operands[],
                        const bst_attribute *attributes) {
    const bst_view *a = operands[0];
    bool flat = true, one_stride = true;
    int vec = 8, threads = MOST_THREADS;
    for (int i = 0; operands[i]; i++) {
        int allowed = bst__row_vector(operands[i], &operands[i]->rows);
        if (allowed < vec) vec = allowed;
        flat = flat && bst__rows_packed(&operands[i]->rows);
        one_stride = one_stride && bst__rows_folded(&operands[i]->rows);
    }
    int64_t columns = flat ? a->count : a->rows.columns;
    while (!flat && threads > 32 && threads / 2 * vec >= columns) threads /= 2;
    int64_t chunks = (columns + threads * vec - 1) / (threads * vec);
    l->values[TYPE] = a->dtype;
    l->values[KIND] = attributes[ACTIVATION].i;
    l->values[VEC] = vec;
    l->values[THREADS] = threads;
    l->values[FLAT] = flat;
    l->values[COLUMNS] = flat ? 0 : columns;
    l->values[CHUNKS] = flat ? 1 : chunks;
    l->values[FOLDED] = one_stride;
    l->grid_x = (unsigned)(flat ? chunks : chunks * a->rows.rows);
    l->block = (unsigned)threads;
    /* Without gaps there are elements in place of rows: memory ends before they fill a grid. */
    return flat ? BST_OK : bst__cuda_need_rows(op, a->rows.rows, chunks);
}

/* For the CPU: without gaps anywhere, all is one row. */
static glu_matrix matrix(const bst_view *o, bool flat) {
    int64_t count = o->count;
    bst_rows one = {.rows = 1, .columns = count, .inner = 1, .inner_stride = count, .outer_stride = count};
    return (glu_matrix){o->data, flat ? one : o->rows};
}

static bool packed(const bst_view *const operands[]) {
    for (int i = 0; operands[i]; i++)
        if (!bst__rows_packed(&operands[i]->rows)) return false;
    return true;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *operands[] = {&v[A], &v[B], &v[Y], NULL};
    if (!v[A].count) return BST_OK;
    if (v[A].device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &forward_kernel};
        BST_TRY(shape(forward_op, &l, operands, attributes));
        glu_forward_args args = {
            v[A].data, v[B].data, v[Y].data, v[A].count, bst__row_map(&v[A].rows), bst__row_map(&v[B].rows)};
        return bst__cuda_launch(exec, forward_op, v[A].device.device_id, &l, &args, sizeof args);
    }
    bool flat = packed(operands);
    glu_cpu call = {v[A].dtype, (int)attributes[ACTIVATION].i, matrix(&v[A], flat), matrix(&v[B], flat),
                    matrix(&v[Y], flat)};
    bst__parallel_for(exec, v[A].count, bst__grain(1), BST_CPU_SELECT(bst__glu_forward_cpu), &call);
    return BST_OK;
}

static const bst_function forward = {
    .name = forward_op,
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_TORCH("swiglu_forward: a b -> y", "glu_forward: activation a b -> y"),
};

bst_status bst_glu_forward(const bst_exec *exec, const DLTensor *a, const DLTensor *b, const bst_glu_options *options,
                           DLTensor *y) {
    bst_attribute attributes[1];
    BST_TRY(read_options(forward_op, options, attributes));
    return bst__run(&forward, exec, (const DLTensor *[]){[A] = a, [B] = b, [Y] = y}, attributes);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status backward_cuda(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *operands[7] = {&v[A], &v[DY], &v[B]}; /* the rest NULL */
    for (int i = 0, count = 3; i < 3; i++) {
        const bst_view *result = &v[(int[]){DA, DB, Y}[i]];
        if (result->data) operands[count++] = result;
    }
    bst_launch l = {.kernel = &backward_kernel};
    BST_TRY(shape(backward_op, &l, operands, attributes));
    l.values[DGATE] = v[DA].data != NULL;
    l.values[DUP] = v[DB].data != NULL;
    l.values[WITH_Y] = v[Y].data != NULL;
    glu_backward_args args = {.dy = v[DY].data,
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
    bool da = v[DA].data, db = v[DB].data, y = v[Y].data;
    if (!v[A].count || (!da && !db && !y)) return BST_OK;
    if (v[A].device.device_type == kDLCUDA) return backward_cuda(exec, v, attributes);
    /* A result that is not wanted has no rows: it is left out of the question. */
    const bst_view *operands[] = {&v[A], &v[B], &v[DY], &v[da ? DA : A], &v[db ? DB : A], &v[y ? Y : A], NULL};
    bool flat = packed(operands);
    glu_cpu call = {v[A].dtype,
                    (int)attributes[ACTIVATION].i,
                    .gate = matrix(&v[A], flat),
                    .up = matrix(&v[B], flat),
                    .y = matrix(&v[Y], flat),
                    .dy = matrix(&v[DY], flat),
                    .dgate = matrix(&v[DA], flat),
                    .dup = matrix(&v[DB], flat)};
    bst__parallel_for(exec, v[A].count, bst__grain(1), BST_CPU_SELECT(bst__glu_backward_cpu), &call);
    return BST_OK;
}

/* swiglu_*: the usual activation, without an argument that says so. */
static const bst_function backward = {
    .name = backward_op,
    .arguments = backward_arguments,
    .attributes = rules,
    .run = run_backward,
    BST_TORCH("swiglu_backward: dy a b -> da? db?", "swiglu_backward_with_y: dy a b -> da? db? y",
              "swiglu_backward_inplace: dy a b -> da?=a db?=b y?=dy", "glu_backward: activation dy a b -> da? db?",
              "glu_backward_with_y: activation dy a b -> da? db? y",
              "glu_backward_inplace: activation dy a b -> da?=a db?=b y?=dy"),
};

bst_status bst_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *a, const DLTensor *b,
                            const bst_glu_options *options, DLTensor *da, DLTensor *db, DLTensor *y) {
    const DLTensor *tensors[] = {[A] = a, [B] = b, [Y] = y, [DY] = dy, [DA] = da, [DB] = db};
    bst_attribute attributes[1];
    BST_TRY(read_options(backward_op, options, attributes));
    return bst__run(&backward, exec, tensors, attributes);
}

const bst_function *const bst__glu[] = {&forward, &backward, NULL};
