/* low_rank_layers.c - linear layers of one input, with adapters or without, for few rows: checks, then a kernel that
 * reads all weights in one launch, or a product a layer where it does not serve, and low_rank_add. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_layers_tensors given_tensors;
/* The scales lie in the same struct. */
typedef bst_low_rank_layers_tensors given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Of each layer weight, bias, in PyTorch's way where y is to be, and its adapter; then each y. */
enum { X, WEIGHT_0, EACH = 5, OUT_0 = WEIGHT_0 + EACH * LOW_RANK_LAYERS };
#define WEIGHT(i) (WEIGHT_0 + EACH * (i))
#define BIAS(i)   (WEIGHT(i) + 1)
#define INTO(i)   (WEIGHT(i) + 2)
#define A(i)      (WEIGHT(i) + 3)
#define B(i)      (WEIGHT(i) + 4)

static const char *const meanings[] = {"Tthe rows of x",        "Kthe columns of x",     "Nthe rows of weight_0",
                                       "Mthe rows of weight_1", "Pthe rows of weight_2", "Rthe rows of a_0",
                                       "Qthe rows of a_1",      "Sthe rows of a_2",      NULL};

#define LIKE_X BST_TYPE_OF(X, "the type of x")
#define LAYER(i, flags, columns, ranks)                                                                            \
    [WEIGHT(i)] = {"weight_" #i, BST_IN | (flags), BST_FLOATS, columns "K", BST_ROWS, LIKE_X, BST_AT(weight[i])},  \
    [BIAS(i)] = {"bias_" #i, BST_IN | BST_OPTIONAL, BST_FLOATS, columns, BST_CONTIGUOUS, LIKE_X, BST_AT(bias[i])}, \
    [INTO(i)] = {"into_" #i, BST_IN | BST_OPTIONAL, BST_FLOATS, "T" columns, BST_ROWS, LIKE_X},                    \
    [A(i)] = {"a_" #i, BST_IN | BST_OPTIONAL, BST_FLOATS, ranks "K", BST_CONTIGUOUS, BST_AT(a[i])},                \
    [B(i)] = {"b_" #i,       BST_IN | BST_OPTIONAL, BST_FLOATS,                                                    \
              columns ranks, BST_CONTIGUOUS,        BST_TYPE_OF(A(i), "the type of a_" #i),                        \
              BST_AT(b[i]),  BST_WITH(A(i))}
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
    LAYER(0, 0, "N", "R"),
    LAYER(1, BST_OPTIONAL, "M", "Q"),
    LAYER(2, BST_OPTIONAL, "P", "S"),
    RESULT(0, 0, "N"),
    RESULT(1, BST_OPTIONAL, "M"),
    RESULT(2, BST_OPTIONAL, "P"),
    {NULL},
};

#define SCALE(i) {"scale_" #i, 'd', .at = offsetof(given_options, scale[i]), .bytes = sizeof(double)}

static const bst_attribute_rule rules[] = {SCALE(0), SCALE(1), SCALE(2), {NULL}};

/* The first adapter there is; -1: none. */
static int first_adapter(const bst_view *v) {
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (bst__given(&v[A(i)])) return i;
    return -1;
}

/* Products of the framework or of a library take no rows that overlap. */
static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const int first = first_adapter(v);
    (void)attributes;
    for (int i = X; i < OUT_0; i++)
        if (v[i].dims == 2) BST_TRY(bst__need_rows_apart(op, arguments[i].name, &v[i]));
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        if (bst__given(&v[BIAS(i)]) && !bst__given(&v[WEIGHT(i)]))
            return bst__error(BST_INVALID, "%s: bias_%d is given, but weight_%d is NULL", op, i, i);
        if (!bst__given(&v[A(i)])) continue;
        if (!bst__given(&v[WEIGHT(i)]))
            return bst__error(BST_INVALID, "%s: a_%d is given, but weight_%d is NULL", op, i, i);
        if (v[A(i)].dtype != v[A(first)].dtype)
            return bst__need_dtype(op, arguments[A(i)].name, &v[A(i)], v[A(first)].dtype, "the type of the first a");
        if (v[A(i)].dtype != BST_F32)
            BST_TRY(bst__need_dtype(op, arguments[A(i)].name, &v[A(i)], v[X].dtype, "the type of x, or float32"));
    }
    return BST_OK;
}

/* ---- in one launch ----------------------------------------------------------------------------------------------- */

static const bst_kernel kernel = {
    "low_rank_layers.cu", "low_rank_layers", {"TYPE", "TILES", "AHEAD", "THIN_ROWS", "FACTOR", NULL}};

static bool serves(const bst_view *v) {
    const bool served = v[X].dtype != BST_F32 && v[X].size[0] <= LOW_RANK_LAYERS_ROWS;
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (v[WEIGHT(i)].count && !bst__low_rank_aligned(&v[WEIGHT(i)])) return false;
    return served && v[X].size[1] && bst__low_rank_aligned(&v[X]);
}

/* Whether the launch makes x a^T, too. */
static bool has_thin(const bst_view *v, const low_rank_sums *s) {
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (v[A(i)].count && (uintptr_t)v[A(i)].data % 16) return false;
    return s->ranks > 0;
}

/* s: of layers with adapters, whose x a^T is made as well; or NULL. */
static bst_status launch(const bst_exec *exec, const char *op, const bst_view *v, const low_rank_sums *s) {
    low_rank_layers_args a = {
        .x = v[X].data, .x_stride = low_rank_stride(&v[X]), .rows = (int32_t)v[X].size[0], .width = v[X].size[1]};
    int64_t tiles = 1, thin_blocks = 0; /* tiles: of eight rows */
    while (8 * tiles < a.rows) tiles *= 2;
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        const bst_view *weight = &v[WEIGHT(i)], *y = &v[OUT_0 + i];
        a.first_block[i] = a.blocks;
        if (!weight->count) continue;
        BST_TRY(bst__cuda_need_rows(op, weight->size[0], LOW_RANK_LAYERS + 1));
        a.weight[i] = weight->data, a.bias[i] = v[BIAS(i)].data, a.y[i] = y->data;
        a.weight_stride[i] = low_rank_stride(weight), a.y_stride[i] = low_rank_stride(y);
        a.columns[i] = weight->size[0];
        a.blocks += (int32_t)bst__divided_up(weight->size[0], LOW_RANK_STEP);
    }
    if (s) {
        BST_TRY(bst__cuda_need_rows(op, s->ranks, LOW_RANK_LAYERS_ROWS * (LOW_RANK_LAYERS + 1)));
        a.thin = bst__low_rank_thin_args(s, &thin_blocks);
        a.thin_blocks = (int32_t)thin_blocks;
    }
    const int64_t thin_rows = s ? bst__low_rank_thin_rows(s->rows) : 0, factor = s ? s->factor_type : v[X].dtype;
    bst_launch l = {.kernel = &kernel,
                    .values = {v[X].dtype, tiles, tiles > 2 ? 2 : 4, thin_rows, factor},
                    .grid_x = (unsigned)(a.blocks + a.thin_blocks),
                    .block = LOW_RANK_THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op, v[X].device.device_id, &l, &a, sizeof a);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

/* What the adapters add to each y. */
static low_rank_sums sums_of(const bst_view *v, const bst_attribute *scales) {
    low_rank_sums s = {.dtype = v[X].dtype,
                       .factor_type = v[X].dtype,
                       .x = v[X].data,
                       .x_stride = low_rank_stride(&v[X]),
                       .rows = v[X].size[0],
                       .width = v[X].size[1]};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        const bst_view *y = &v[OUT_0 + i], *a = &v[A(i)];
        s.layer[i].first = s.ranks;
        if (!a->count || !y->count) continue;
        s.layer[i] = bst__low_rank_adapter(a, &v[B(i)], y, y, (float)scales[i].d, s.ranks);
        s.ranks += s.layer[i].rank, s.factor_type = a->dtype;
    }
    return s;
}

static bst_status run_in_one_launch(const bst_exec *exec, const char *op, const bst_view *v, low_rank_sums *s) {
    const DLDevice device = v[X].device;
    void *thin = NULL;
    if (!has_thin(v, s)) {
        BST_TRY(launch(exec, op, v, NULL));
        return s->ranks ? bst__low_rank_add_all(exec, op, device, s) : BST_OK;
    }
    BST_TRY(bst__allocate(exec, op, device, (size_t)(s->rows * s->ranks) * sizeof(float), &thin));
    s->thin = thin;
    bst_status status = launch(exec, op, v, s);
    if (!status) status = bst__low_rank_add_sums(exec, op, device.device_id, s, true);
    bst__release(exec, device, thin);
    return status;
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *scales) {
    low_rank_sums s = sums_of(v, scales);
    if (!v[X].size[0]) return BST_OK;
    if (v[X].device.device_type == kDLCUDA && serves(v)) return run_in_one_launch(exec, op, v, &s);
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (v[OUT_0 + i].count)
            BST_TRY(bst__low_rank_one(exec, op, &v[X], &v[WEIGHT(i)], bst__given(&v[BIAS(i)]) ? &v[BIAS(i)] : NULL,
                                      &v[OUT_0 + i]));
    return s.ranks ? bst__low_rank_add_all(exec, op, v[X].device, &s) : BST_OK;
}

const bst_function bst__low_rank_layers = {
    .name = "low_rank_layers",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_GIVEN,
    BST_TORCH("low_rank_layers: x weight_0 bias_0 into_0! a_0 b_0 weight_1 bias_1 into_1 a_1 b_1 weight_2 bias_2 "
              "into_2 a_2 b_2 scale_0 scale_1 scale_2 -> y_0=into_0 y_1=into_1 y_2=into_2"),
};

bst_status bst_low_rank_layers(const bst_exec *exec, const bst_low_rank_layers_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_layers, exec, tensors, tensors, NULL);
}
