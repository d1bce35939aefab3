/* low_rank_linear.c - linear layers with their adapters, and the gradient of their input: checks, then the kernel where
 * the chip has it and its tiles fill the chip, else a product at a time, of which each adds to those before. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_dx_tensors given_tensors;

/* ---- descriptions ------------------------------------------------------------------------------------------------ */

enum { X, WEIGHT, THIN, B, BIAS, INTO, Y };
enum { SCALE };

static const char *const linear_meanings[] = {"Tthe rows of x", "Kthe columns of x", "Nthe rows of weight",
                                              "Rthe columns of thin", NULL};

#define LIKE_X BST_TYPE_OF(X, "the type of x")

static const bst_argument linear_arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "TK", BST_ROWS},
    [WEIGHT] = {"weight", BST_IN, BST_FLOATS, "NK", BST_ROWS, LIKE_X},
    [THIN] = {"thin", BST_IN, BST_FLOATS, "TR", BST_ROWS, LIKE_X},
    [B] = {"b", BST_IN, BST_FLOATS, "NR", BST_ROWS, LIKE_X},
    [BIAS] = {"bias", BST_IN | BST_OPTIONAL, BST_FLOATS, "N", BST_CONTIGUOUS, LIKE_X},
    /* PyTorch's way to say where y is to be. */
    [INTO] = {"into", BST_IN | BST_OPTIONAL, BST_FLOATS, "TN", BST_ROWS, LIKE_X},
    [Y] = {"y", BST_OUT, BST_FLOATS, "TN", BST_ROWS, LIKE_X, BST_MAY_BE(1u << INTO)},
    {NULL},
};

static const bst_attribute_rule linear_rules[] = {[SCALE] = {"scale", 'd'}, {NULL}};

/* Of LOW_RANK_PRODUCTS layers, one behind another. */
enum { DY_0, WEIGHT_0, G = 2 * LOW_RANK_PRODUCTS, A, DX_INTO, DX };

static const char *const dx_meanings[] = {
    "Tthe rows of dy_0",    "Kthe columns of weight_0", "Nthe columns of dy_0", "Mthe columns of dy_1",
    "Pthe columns of dy_2", "Qthe columns of dy_3",     "Rthe columns of g",    NULL};

#define LIKE_DY BST_TYPE_OF(DY_0, "the type of dy_0")
#define LAYER(i, flags, letter, ...)                                                             \
    [2 * i] = {"dy_" #i, flags, BST_FLOATS, "T" letter, BST_ROWS, BST_AT(dy[i]), ##__VA_ARGS__}, \
         [2 * i + 1] = {"weight_" #i, flags,   BST_FLOATS,        letter "K",                    \
                        BST_ROWS,     LIKE_DY, BST_AT(weight[i]), BST_WITH(2 * i)}
#define OPTIONAL (BST_IN | BST_OPTIONAL)

static const bst_argument dx_arguments[] = {
    LAYER(0, BST_IN, "N"),
    LAYER(1, OPTIONAL, "M", LIKE_DY),
    LAYER(2, OPTIONAL, "P", LIKE_DY),
    LAYER(3, OPTIONAL, "Q", LIKE_DY),
    [G] = {"g", OPTIONAL, BST_FLOATS, "TR", BST_ROWS, LIKE_DY, BST_AT(g)},
    [A] = {"a", OPTIONAL, BST_FLOATS, "RK", BST_ROWS, LIKE_DY, BST_AT(a), BST_WITH(G)},
    /* PyTorch's way to say where dx is to be. */
    [DX_INTO] = {"into", OPTIONAL, BST_FLOATS, "TK", BST_ROWS, LIKE_DY},
    [DX] = {"dx", BST_OUT, BST_FLOATS, "TK", BST_ROWS, LIKE_DY, BST_AT(dx), BST_MAY_BE(1u << DX_INTO)},
    {NULL},
};

/* ---- what both are ----------------------------------------------------------------------------------------------- */

/* y = scale thin b^T + sum of x weight^T + bias; across: y = thin b + sum of x weight. */
typedef struct sum {
    const bst_view *thin, *b; /* NULL: none */
    const bst_view *bias;     /* likewise */
    const bst_view *x[LOW_RANK_PRODUCTS], *weight[LOW_RANK_PRODUCTS];
    const bst_view *y;
    int products;
    bool across;
    float scale;
} sum;

static bst_gemm gemm_of(const sum *s, const bst_view *x, const bst_view *weight, bool adds) {
    DLDataType type = bst__dl_type(x->dtype);
    return (bst_gemm){.device = x->device,
                      .m = s->y->size[0],
                      .n = s->y->size[1],
                      .k = x->size[1],
                      .a = x->data,
                      .b = weight->data,
                      .out = s->y->data,
                      .lda = low_rank_stride(x),
                      .ldb = low_rank_stride(weight),
                      .ldo = low_rank_stride(s->y),
                      .b_transposed = !s->across,
                      .input_type = type,
                      .output_type = type,
                      .alpha = s->thin && x == s->thin ? s->scale : 1,
                      .beta = adds};
}

static const bst_kernel bias_kernel = {"low_rank.cu", "low_rank_bias", {"TYPE", "VEC", "BIAS", NULL}};

/* Each row of y as the bias, for products to be added to. */
static bst_status begin_with_bias(const bst_exec *exec, const char *op, const sum *s) {
    const bst_view *y = s->y;
    int64_t rows = y->size[0], columns = y->size[1], stride = low_rank_stride(y);
    if (y->device.device_type != kDLCUDA) {
        size_t bytes = bst__dtype_size(y->dtype);
        for (int64_t row = 0; row < rows; row++)
            memcpy((char *)y->data + (size_t)(row * stride) * bytes, s->bias->data, (size_t)columns * bytes);
        return BST_OK;
    }
    int vec = bst__row_vector(y, &y->rows), of_bias = bst__row_vector(s->bias, &s->bias->rows);
    if (of_bias < vec) vec = of_bias;
    low_rank_bias_args a = {y->data, s->bias->data, stride, columns};
    int64_t chunks = bst__divided_up(columns, (int64_t)LOW_RANK_THREADS * vec);
    bst_launch l = {.kernel = &bias_kernel,
                    .values = {y->dtype, vec, 1},
                    .block = LOW_RANK_THREADS,
                    .grid_x = (unsigned)(chunks * rows)};
    BST_TRY(bst__cuda_need_rows(op, rows, chunks));
    return bst__cuda_launch(exec, op, y->device.device_id, &l, &a, sizeof a);
}

/* A product of nothing makes zeros, where it is the first. */
static bst_status one_by_one(const bst_exec *exec, const char *op, const sum *s) {
    bool adds = s->bias != NULL;
    if (adds) BST_TRY(begin_with_bias(exec, op, s));
    for (int i = s->thin ? -1 : 0; i < s->products; i++) {
        bst_gemm product = gemm_of(s, i < 0 ? s->thin : s->x[i], i < 0 ? s->b : s->weight[i], adds);
        if (product.k || !adds) BST_TRY(bst__gemm(exec, op, &product));
        adds = true;
    }
    return BST_OK;
}

bst_status bst__low_rank_one(const bst_exec *exec, const char *op, const bst_view *x, const bst_view *weight,
                             const bst_view *bias, const bst_view *y) {
    return one_by_one(exec, op, &(sum){.bias = bias, .x = {x}, .weight = {weight}, .y = y, .products = 1});
}

/* Products of the framework or of a library take no rows that overlap. Said before anything is written. */
static bst_status need_apart(const char *op, const bst_argument *arguments, const bst_view *v) {
    for (int i = 0; !(arguments[i].flags & BST_OUT); i++) /* which are the last */
        if (v[i].dims == 2) BST_TRY(bst__need_rows_apart(op, arguments[i].name, &v[i]));
    return BST_OK;
}

/* ---- in one product ---------------------------------------------------------------------------------------------- */

static const bst_kernel kernel = {
    "low_rank_tiles.cu", "low_rank_tiles", {"TYPE", "PARTS", "SCALED", "ACROSS", "BIAS", NULL}};

/* Pairs of tiles of rows that stay in the L2 while all columns pass: 1024 rows. On an H200 at 8192 x 12288, K =
 * 4096, with 2, 4, 8, 16: 1.033, 1.033, 1.044, 1.032 of cuBLASLt's product alone. */
enum { GROUP = 4, PAIR = 2 * BST_TILE_ROWS };

/* The last round of tiles is to leave few blocks without one: cuBLASLt has smaller tiles. */
static bool fills(const bst_chip *chip, const bst_tiles *t) {
    int64_t clusters = chip->processors / 2, tiles = (int64_t)t->pairs * t->columns;
    return 10 * tiles >= 9 * clusters * bst__divided_up(tiles, clusters);
}

static bool is_served(const bst_view *v) {
    return v->count && v->dtype != BST_F32 && bst__low_rank_aligned(v) && v->size[0] <= INT32_MAX / 2 &&
           v->size[1] <= INT32_MAX / 2;
}

static int32_t steps_of(const bst_view *v) { return (int32_t)bst__divided_up(v->size[1], BST_BOX_COLUMNS); }

static bool serves(const bst_chip *chip, const sum *s, low_rank_tiles_args *a) {
    bool served = chip->warpgroups && is_served(s->y);
    if (s->thin) {
        served = served && is_served(s->thin) && is_served(s->b);
        a->all_steps = a->thin_steps = steps_of(s->thin);
        served = served && (a->thin_steps == 1 || s->scale == 1);
    }
    for (int i = 0; i < s->products; i++) {
        served = served && is_served(s->x[i]) && is_served(s->weight[i]);
        a->all_steps += a->steps[i] = steps_of(s->x[i]);
    }
    /* Which is read in pairs. */
    if (!served || (s->bias && (uintptr_t)s->bias->data % 4)) return false;
    a->rows = (int32_t)s->y->size[0], a->columns = (int32_t)s->y->size[1];
    a->tiles = (bst_tiles){(int32_t)bst__divided_up(a->rows, PAIR),
                           (int32_t)bst__divided_up(a->columns, BST_TILE_COLUMNS), GROUP};
    return fills(chip, &a->tiles);
}

static bst_status map(const char *op, const bst_view *x, const bst_view *weight, bool across, bst_tensor_map *of_x,
                      bst_tensor_map *of_weight) {
    int device = x->device.device_id;
    BST_TRY(bst__cuda_tensor_map(op, device, x, BST_BOX_ROWS, of_x));
    return bst__cuda_tensor_map(op, device, weight, across ? BST_BOX_ACROSS : BST_BOX_ROWS, of_weight);
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const sum *s) {
    int device = s->y->device.device_id;
    bst_chip chip;
    low_rank_tiles_args a = {.y = s->y->data, .y_stride = low_rank_stride(s->y), .scale = s->scale};
    a.bias = s->bias ? s->bias->data : NULL;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    if (!serves(&chip, s, &a)) return one_by_one(exec, op, s);
    int64_t parts = 0;
    if (s->thin) {
        BST_TRY(map(op, s->thin, s->b, s->across, &a.thin, &a.b));
        parts = bst__divided_up(bst__lesser(s->thin->size[1], BST_BOX_COLUMNS), BST_TILE_DEPTH);
    }
    for (int i = 0; i < s->products; i++) BST_TRY(map(op, s->x[i], s->weight[i], s->across, &a.x[i], &a.weight[i]));
    bst_launch l = {.kernel = &kernel,
                    .values = {s->y->dtype, parts, s->scale != 1, s->across, s->bias != NULL},
                    .block = BST_TILE_THREADS,
                    .grid_x = (unsigned)(chip.processors / 2 * 2),
                    .cluster = 2,
                    .shared = BST_TILE_SHARED};
    return bst__cuda_launch(exec, op, device, &l, &a, sizeof a);
}

static bst_status run(const bst_exec *exec, const char *op, const sum *s) {
    if (!s->y->count) return BST_OK;
    return s->y->device.device_type == kDLCUDA ? run_cuda(exec, op, s) : one_by_one(exec, op, s);
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

static bst_status check_linear(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return need_apart(op, linear_arguments, v);
}

static bst_status check_dx(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return need_apart(op, dx_arguments, v);
}

static bst_status run_linear(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *bias = bst__given(&v[BIAS]) ? &v[BIAS] : NULL;
    float scale = (float)attributes[SCALE].d;
    return run(exec, op, &(sum){&v[THIN], &v[B], bias, {&v[X]}, {&v[WEIGHT]}, &v[Y], 1, false, scale});
}

static bst_status run_dx(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    sum s = {.y = &v[DX], .across = true, .scale = 1};
    if (bst__given(&v[G])) s.thin = &v[G], s.b = &v[A];
    for (int i = 0; i < LOW_RANK_PRODUCTS; i++)
        if (bst__given(&v[2 * i])) s.x[s.products] = &v[2 * i], s.weight[s.products++] = &v[2 * i + 1];
    return run(exec, op, &s);
}

const bst_function bst__low_rank_linear = {
    .name = "low_rank_linear",
    .meanings = linear_meanings,
    .arguments = linear_arguments,
    .attributes = linear_rules,
    .check = check_linear,
    .run = run_linear,
    BST_TORCH("low_rank_linear: x weight thin b bias into! scale -> y=into"),
};

const bst_function bst__low_rank_dx = {
    .name = "low_rank_dx",
    .meanings = dx_meanings,
    .arguments = dx_arguments,
    .check = check_dx,
    .run = run_dx,
    .tensors = BST_FITS(given_tensors),
    BST_TORCH("low_rank_dx: dy_0 weight_0 dy_1 weight_1 dy_2 weight_2 dy_3 weight_3 g a into! -> dx=into"),
};

bst_status bst_low_rank_linear(const bst_exec *exec, const DLTensor *x, const DLTensor *weight, const DLTensor *thin,
                               const DLTensor *b, const DLTensor *bias, double scale, DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [WEIGHT] = weight, [THIN] = thin, [B] = b, [BIAS] = bias, [Y] = y};
    return bst__run(&bst__low_rank_linear, exec, tensors, (bst_attribute[]){[SCALE] = {.d = scale}});
}

bst_status bst_low_rank_dx(const bst_exec *exec, const bst_low_rank_dx_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_dx, exec, tensors, NULL, NULL);
}
