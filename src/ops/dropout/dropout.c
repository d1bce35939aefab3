/* dropout.c - dropout whose mask is a function of a seed: checks, then the configuration, then the kernel of the
 * tensors' device. */
#include <assert.h>
#include <math.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/dropout/dropout_args.h"
#include "ops/dropout/dropout_cpu.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { X, SEED, ADDEND, Y };
enum { P };

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "*C", BST_ROWS},
    [SEED] = {"seed", BST_IN, 1u << BST_I64, "2", BST_CONTIGUOUS},
    [ADDEND] = {"addend", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                BST_TYPE_OF(X, "the type of x")},
    [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X), BST_TYPE_OF(X, "the type of x"),
           BST_MAY_BE(1u << X | 1u << ADDEND)},
    {NULL},
};

static const bst_attribute_rule rules[] = {[P] = {"p", 'd', 0, 1, "a probability, 0 to 1,"}, {NULL}};

/* ---- what is lost, and what the rest is multiplied with ---------------------------------------------------------- */

/* Of 2^32 numbers: 1 does not fit, but then the scale is 0. */
static uint32_t threshold_of(double p) { return (uint32_t)fmin(floor(p * 0x1p32 + 0.5), 0x1p32 - 1); }

static float scale_of(double p) { return p < 1 ? (float)(1 / (1 - p)) : 0.0f; }

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { M_TYPE, M_PER, M_VEC, M_EACH, M_THREADS, M_FLAT, M_COLUMNS, M_CHUNKS, M_FOLDED, M_ADD };
static const bst_kernel kernel = {
    "dropout.cu",
    "dropout",
    {"TYPE", "PER", "VEC", "EACH", "THREADS", "FLAT", "COLUMNS", "CHUNKS", "FOLDED", "ADD", NULL}};

/* Two accesses in flight a thread, short blocks. On an H200 at 8192 x 4096 in bf16 and float32: 33.5 and 64.4 us; one
 * access 34.6 and 64.4, four 34.2 and 66.2; 256 threads with two accesses 34.8 and 65.3, 512 36.0 and 66.9. */
enum { MOST_THREADS = 128, FLAT_EACH = 2 };

/* The tensors of a call, in the order of dropout_args.h; NULL: no addend. */
typedef const bst_view *dropout_views[DROPOUT_TENSORS];

static bool all_packed(const dropout_views of) {
    for (int i = 0; i < DROPOUT_TENSORS; i++)
        if (of[i] && !bst__rows_packed(&of[i]->rows)) return false;
    return true;
}

/* The widest access that one block of memory allows. */
static int flat_vector(const bst_view *v) {
    int size = bst__dtype_size(v->dtype), vec = 16 / size;
    while (vec > 1 && (uintptr_t)v->data % (unsigned)(vec * size)) vec /= 2;
    return vec;
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const dropout_views of, const bst_view *seed,
                           double p) {
    const bst_view *x = of[DROPOUT_X];
    bool flat = all_packed(of), one_stride = true;
    dropout_args args = {.seed = seed->data, .count = x->count, .threshold = threshold_of(p), .scale = scale_of(p)};
    int64_t columns = flat ? x->count : x->rows.columns;
    int per = 16 / bst__dtype_size(x->dtype), each = flat ? FLAT_EACH : 1, threads = MOST_THREADS;
    if (!flat && columns % per) per = columns % DROPOUT_FOUR ? 1 : DROPOUT_FOUR;
    int vec = per;
    for (int i = 0; i < DROPOUT_TENSORS; i++) {
        if (!of[i]) continue;
        int allowed = flat ? flat_vector(of[i]) : bst__row_vector(of[i], &of[i]->rows);
        if (allowed < vec) vec = allowed;
        one_stride = one_stride && bst__rows_folded(&of[i]->rows);
        args.at[i] = of[i]->data;
        args.map[i] = bst__row_map(&of[i]->rows);
    }
    while (!flat && threads > 32 && threads / 2 * per >= columns) threads /= 2;
    int64_t of_block = (int64_t)threads * each * per, chunks = columns / of_block + (columns % of_block != 0);
    bst_launch l = {.kernel = &kernel,
                    .values = {[M_TYPE] = x->dtype,
                               [M_PER] = per,
                               [M_VEC] = vec,
                               [M_EACH] = each,
                               [M_THREADS] = threads,
                               [M_FLAT] = flat,
                               [M_COLUMNS] = flat ? 0 : columns,
                               [M_CHUNKS] = flat ? 1 : chunks,
                               [M_FOLDED] = one_stride,
                               [M_ADD] = of[DROPOUT_ADDEND] != NULL},
                    .block = (unsigned)threads,
                    .overlap = true};
    BST_TRY(bst__cuda_need_rows(op, flat ? 1 : x->rows.rows, chunks));
    l.grid_x = (unsigned)(flat ? chunks : chunks * x->rows.rows);
    return bst__cuda_launch(exec, op, x->device.device_id, &l, &args, sizeof args);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run_cpu(const bst_exec *exec, const dropout_views of, const bst_view *seed, double p) {
    const bst_view *x = of[DROPOUT_X];
    const uint64_t *words = seed->data;
    bool flat = all_packed(of); /* then all is one row */
    dropout_cpu call = {.dtype = x->dtype,
                        .columns = flat ? x->count : x->rows.columns,
                        .key = words[0],
                        .offset = words[1],
                        .threshold = threshold_of(p),
                        .scale = scale_of(p)};
    for (int i = 0; i < DROPOUT_TENSORS; i++) {
        if (!of[i]) continue;
        int64_t n = of[i]->count;
        bst_rows one = {.rows = 1, .columns = n, .inner = 1, .inner_stride = n, .outer_stride = n};
        call.of[i] = (dropout_matrix){of[i]->data, flat ? one : of[i]->rows};
    }
    return BST_CPU_RUN(exec, x->count, 4, bst__dropout_cpu, &call);
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const dropout_views of = {
        [DROPOUT_X] = &v[X], [DROPOUT_ADDEND] = bst__given(&v[ADDEND]) ? &v[ADDEND] : NULL, [DROPOUT_Y] = &v[Y]};
    if (!v[X].count) return BST_OK;
    if (v[X].device.device_type == kDLCUDA) return run_cuda(exec, op, of, &v[SEED], attributes[P].d);
    return run_cpu(exec, of, &v[SEED], attributes[P].d);
}

static const bst_function dropout = {
    .name = "dropout",
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_TORCH("dropout: x seed p -> y", "dropout_add: x seed addend! p -> y", "dropout_inplace: x seed p -> y=x",
              "dropout_add_inplace: x seed addend! p -> y=addend"),
};

bst_status bst_dropout(const bst_exec *exec, const DLTensor *x, const DLTensor *seed, const DLTensor *addend, double p,
                       DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [SEED] = seed, [ADDEND] = addend, [Y] = y};
    return bst__run(&dropout, exec, tensors, (bst_attribute[]){[P] = {.d = p}});
}

const bst_function *const bst__dropout[] = {&dropout, NULL};
