/* low_rank_add.c - what adapters add to the results of layers of one input: checks, then x a^T of all layers, and then
 * what of it each layer's columns get, on CPU and by two kernels on CUDA. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_add_tensors given_tensors;
/* The scales lie in the same struct. */
typedef bst_low_rank_add_tensors given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Of each layer y, a, b, one layer behind another; then what becomes of each y. */
enum { X, Y_0, A_0, B_0, OUT_0 = Y_0 + 3 * LOW_RANK_LAYERS };
#define Y(i) (Y_0 + 3 * (i))
#define A(i) (A_0 + 3 * (i))
#define B(i) (B_0 + 3 * (i))

static const char *const meanings[] = {"Tthe rows of x",      "Kthe columns of x",   "Nthe columns of y_0",
                                       "Mthe columns of y_1", "Pthe columns of y_2", "Rthe rows of a_0",
                                       "Qthe rows of a_1",    "Sthe rows of a_2",    NULL};

static bst_status check_a(const char *op, const bst_view *v) {
    if (v[A_0].dtype == BST_F32) return BST_OK;
    return bst__need_dtype(op, "a_0", &v[A_0], v[X].dtype, "the type of x, or float32");
}

#define LIKE_X   BST_TYPE_OF(X, "the type of x")
#define LIKE_A   BST_TYPE_OF(A_0, "the type of a_0")
#define OPTIONAL BST_OPTIONAL
/* a_0's type is asked for by a function; what comes last is said of the other layers' a alone. */
#define LAYER(i, flags, columns, ranks, of_a, ...)                                                                  \
    [Y(i)] = {"y_" #i, BST_IN | (flags), BST_FLOATS, "T" columns, BST_ROWS, LIKE_X, BST_AT(y[i])},                  \
    [A(i)] = {"a_" #i, BST_IN | (flags), BST_FLOATS, ranks "K", BST_CONTIGUOUS, of_a, BST_AT(a[i]), ##__VA_ARGS__}, \
    [B(i)] = {"b_" #i,        BST_IN | (flags), BST_FLOATS,   columns ranks,                                        \
              BST_CONTIGUOUS, LIKE_A,           BST_AT(b[i]), BST_WITH(Y(i))}
#define RESULT(i, flags, columns)                                                                 \
    [OUT_0 + (i)] = {"y_" #i, BST_OUT | (flags), BST_FLOATS,     "T" columns,           BST_ROWS, \
                     LIKE_X,  BST_AT(y[i]),      BST_WITH(Y(i)), BST_MAY_BE(1u << Y(i))}

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "TK", BST_ROWS, BST_AT(x)},
    LAYER(0, 0, "N", "R", .check = check_a),
    LAYER(1, OPTIONAL, "M", "Q", LIKE_A, BST_WITH(Y(1))),
    LAYER(2, OPTIONAL, "P", "S", LIKE_A, BST_WITH(Y(2))),
    RESULT(0, 0, "N"),
    RESULT(1, OPTIONAL, "M"),
    RESULT(2, OPTIONAL, "P"),
    {NULL},
};

#define SCALE(i) {"scale_" #i, 'd', .at = offsetof(given_options, scale[i]), .bytes = sizeof(double)}

static const bst_attribute_rule rules[] = {SCALE(0), SCALE(1), SCALE(2), {NULL}};

static low_rank_sums read_call(const bst_view *v, const bst_attribute *attributes) {
    low_rank_sums s = {.dtype = v[X].dtype,
                       .factor_type = v[A_0].dtype,
                       .x = v[X].data,
                       .x_stride = low_rank_stride(&v[X]),
                       .rows = v[X].size[0],
                       .width = v[X].size[1]};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        low_rank_layer *layer = &s.layer[i];
        layer->first = s.ranks;
        if (!bst__given(&v[Y(i)])) continue;
        *layer = (low_rank_layer){.a = v[A(i)].data,
                                  .b = v[B(i)].data,
                                  .y = v[Y(i)].data,
                                  .out = v[OUT_0 + i].data,
                                  .y_stride = low_rank_stride(&v[Y(i)]),
                                  .out_stride = low_rank_stride(&v[OUT_0 + i]),
                                  .columns = v[Y(i)].size[1],
                                  .rank = v[A(i)].size[0],
                                  .first = s.ranks,
                                  .scale = (float)attributes[i].d};
        s.ranks += layer->rank;
    }
    return s;
}

/* ---- on CPU ------------------------------------------------------------------------------------------------------ */

static bst_status run_cpu(const bst_exec *exec, low_rank_sums *s) {
    int64_t row_tiles = bst__divided_up(s->rows, LOW_RANK_CPU_ROWS), column_tiles = 0;
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        column_tiles += bst__divided_up(s->layer[i].columns, LOW_RANK_CPU_COLUMNS);
    int64_t most = bst__lesser(s->rows, LOW_RANK_CPU_ROWS);
    BST_TRY(BST_CPU_RUN(exec, row_tiles * s->ranks, most * s->width, bst__low_rank_thin_cpu, s));
    int64_t work = s->rows * (1 + s->ranks / LOW_RANK_LAYERS) * LOW_RANK_CPU_COLUMNS;
    return BST_CPU_RUN(exec, column_tiles, work, bst__low_rank_expand_cpu, s);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    low_rank_sums s = read_call(v, attributes);
    DLDevice device = v[X].device;
    void *thin = NULL;
    if (!s.rows) return BST_OK;
    if (device.device_type == kDLCUDA) return bst__error(BST_UNSUPPORTED, "%s: x is on CUDA; CPU is needed", op);
    BST_TRY(bst__allocate(exec, op, device, (size_t)(s.rows * s.ranks) * sizeof(float), &thin));
    s.thin = thin;
    bst_status status = run_cpu(exec, &s);
    bst__release(exec, device, thin);
    return status;
}

const bst_function bst__low_rank_add = {
    .name = "low_rank_add",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_GIVEN,
    BST_TORCH("low_rank_add: x y_0 a_0 b_0 y_1 a_1 b_1 y_2 a_2 b_2 scale_0 scale_1 scale_2 -> y_0=y_0 y_1=y_1 "
              "y_2=y_2"),
};

bst_status bst_low_rank_add(const bst_exec *exec, const bst_low_rank_add_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_add, exec, tensors, tensors, NULL);
}
