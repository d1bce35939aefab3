/* low_rank_layers.c - linear layers of one input, for few rows: checks, then a kernel that reads all weights in one
 * launch, or a product a layer where it does not serve. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_layers_tensors given_tensors;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Of each layer weight, bias, and in PyTorch's way where y is to be; then each y. */
enum { X, WEIGHT_0, OUT_0 = WEIGHT_0 + 3 * LOW_RANK_LAYERS };
#define WEIGHT(i) (WEIGHT_0 + 3 * (i))
#define BIAS(i)   (WEIGHT(i) + 1)
#define INTO(i)   (WEIGHT(i) + 2)

static const char *const meanings[] = {"Tthe rows of x",        "Kthe columns of x",     "Nthe rows of weight_0",
                                       "Mthe rows of weight_1", "Pthe rows of weight_2", NULL};

#define LIKE_X BST_TYPE_OF(X, "the type of x")
#define LAYER(i, flags, columns)                                                                                   \
    [WEIGHT(i)] = {"weight_" #i, BST_IN | (flags), BST_FLOATS, columns "K", BST_ROWS, LIKE_X, BST_AT(weight[i])},  \
    [BIAS(i)] = {"bias_" #i, BST_IN | BST_OPTIONAL, BST_FLOATS, columns, BST_CONTIGUOUS, LIKE_X, BST_AT(bias[i])}, \
    [INTO(i)] = {"into_" #i, BST_IN | BST_OPTIONAL, BST_FLOATS, "T" columns, BST_ROWS, LIKE_X}
#define RESULT(i, flags, columns)         \
    [OUT_0 + (i)] = {"y_" #i,             \
                     BST_OUT | (flags),   \
                     BST_FLOATS,          \
                     "T" columns,         \
                     BST_ROWS,            \
                     LIKE_X,              \
                     BST_AT(y[i]),        \
                     BST_WITH(WEIGHT(i)), \
                     BST_MAY_BE(1u << INTO(i))}

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "TK", BST_ROWS, BST_AT(x)},
    LAYER(0, 0, "N"),
    LAYER(1, BST_OPTIONAL, "M"),
    LAYER(2, BST_OPTIONAL, "P"),
    RESULT(0, 0, "N"),
    RESULT(1, BST_OPTIONAL, "M"),
    RESULT(2, BST_OPTIONAL, "P"),
    {NULL},
};

/* Products of the framework or of a library take no rows that overlap. */
static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    for (int i = X; i < OUT_0; i++)
        if (v[i].dims == 2) BST_TRY(bst__need_rows_apart(op, arguments[i].name, &v[i]));
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (bst__given(&v[BIAS(i)]) && !bst__given(&v[WEIGHT(i)]))
            return bst__error(BST_INVALID, "%s: bias_%d is given, but weight_%d is NULL", op, i, i);
    return BST_OK;
}

/* ---- in one launch ----------------------------------------------------------------------------------------------- */

static const bst_kernel kernel = {"low_rank_layers.cu", "low_rank_layers", {"TYPE", "TILES", "AHEAD", NULL}};

static bool serves(const bst_view *v) {
    const bool served = v[X].dtype != BST_F32 && v[X].size[0] <= LOW_RANK_LAYERS_ROWS;
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (v[WEIGHT(i)].count && !bst__low_rank_aligned(&v[WEIGHT(i)])) return false;
    return served && v[X].size[1] && bst__low_rank_aligned(&v[X]);
}

static bst_status launch(const bst_exec *exec, const char *op, const bst_view *v) {
    low_rank_layers_args a = {
        .x = v[X].data, .x_stride = low_rank_stride(&v[X]), .rows = (int32_t)v[X].size[0], .width = v[X].size[1]};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        const bst_view *weight = &v[WEIGHT(i)], *y = &v[OUT_0 + i];
        a.first_block[i] = a.blocks;
        if (!weight->count) continue;
        BST_TRY(bst__cuda_need_rows(op, weight->size[0], LOW_RANK_LAYERS));
        a.weight[i] = weight->data, a.bias[i] = v[BIAS(i)].data, a.y[i] = y->data;
        a.weight_stride[i] = low_rank_stride(weight), a.y_stride[i] = low_rank_stride(y);
        a.columns[i] = weight->size[0];
        a.blocks += (int32_t)bst__divided_up(weight->size[0], LOW_RANK_STEP);
    }
    int64_t tiles = 1; /* of eight rows */
    while (8 * tiles < a.rows) tiles *= 2;
    bst_launch l = {.kernel = &kernel,
                    .values = {v[X].dtype, tiles, tiles > 2 ? 2 : 4},
                    .grid_x = (unsigned)a.blocks,
                    .block = LOW_RANK_THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op, v[X].device.device_id, &l, &a, sizeof a);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    if (!v[X].size[0]) return BST_OK;
    if (v[X].device.device_type == kDLCUDA && serves(v)) return launch(exec, op, v);
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (v[OUT_0 + i].count)
            BST_TRY(bst__low_rank_one(exec, op, &v[X], &v[WEIGHT(i)], bst__given(&v[BIAS(i)]) ? &v[BIAS(i)] : NULL,
                                      &v[OUT_0 + i]));
    return BST_OK;
}

const bst_function bst__low_rank_layers = {
    .name = "low_rank_layers",
    .meanings = meanings,
    .arguments = arguments,
    .check = check,
    .run = run,
    .tensors = BST_FITS(given_tensors),
    BST_TORCH("low_rank_layers: x weight_0 bias_0 into_0! weight_1 bias_1 into_1 weight_2 bias_2 into_2 -> y_0=into_0 "
              "y_1=into_1 y_2=into_2"),
};

bst_status bst_low_rank_layers(const bst_exec *exec, const bst_low_rank_layers_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_layers, exec, tensors, NULL, NULL);
}
