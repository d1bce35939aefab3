/* low_rank_linear.c - a linear layer with its adapter: checks, then the kernel where the chip has it and its tiles fill
 * the chip, else two products, of which the second adds to the first. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { X, WEIGHT, THIN, B, INTO, Y };
enum { SCALE };

static const char *const meanings[] = {"Tthe rows of x", "Kthe columns of x", "Nthe rows of weight",
                                       "Rthe columns of thin", NULL};

#define LIKE_X BST_TYPE_OF(X, "the type of x")

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "TK", BST_ROWS},
    [WEIGHT] = {"weight", BST_IN, BST_FLOATS, "NK", BST_ROWS, LIKE_X},
    [THIN] = {"thin", BST_IN, BST_FLOATS, "TR", BST_ROWS, LIKE_X},
    [B] = {"b", BST_IN, BST_FLOATS, "NR", BST_ROWS, LIKE_X},
    /* PyTorch's way to say where y is to be. */
    [INTO] = {"into", BST_IN | BST_OPTIONAL, BST_FLOATS, "TN", BST_ROWS, LIKE_X},
    [Y] = {"y", BST_OUT, BST_FLOATS, "TN", BST_ROWS, LIKE_X, BST_MAY_BE(1u << INTO)},
    {NULL},
};

static const bst_attribute_rule rules[] = {[SCALE] = {"scale", 'd'}, {NULL}};

/* ---- by two products --------------------------------------------------------------------------------------------- */

static bst_status multiply(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    DLDataType type = bst__dl_type(v[X].dtype);
    bst_gemm of_thin = {.device = v[X].device,
                        .m = v[Y].size[0],
                        .n = v[Y].size[1],
                        .k = v[THIN].size[1],
                        .a = v[THIN].data,
                        .b = v[B].data,
                        .out = v[Y].data,
                        .lda = low_rank_stride(&v[THIN]),
                        .ldb = low_rank_stride(&v[B]),
                        .ldo = low_rank_stride(&v[Y]),
                        .b_transposed = 1,
                        .input_type = type,
                        .output_type = type,
                        .alpha = scale};
    bst_gemm of_x = of_thin;
    of_x.k = v[X].size[1];
    of_x.a = v[X].data, of_x.lda = low_rank_stride(&v[X]);
    of_x.b = v[WEIGHT].data, of_x.ldb = low_rank_stride(&v[WEIGHT]);
    of_x.alpha = of_x.beta = 1;
    BST_TRY(bst__gemm(exec, op, &of_thin));
    return of_x.k ? bst__gemm(exec, op, &of_x) : BST_OK;
}

/* ---- in one product ---------------------------------------------------------------------------------------------- */

static const bst_kernel kernel = {"low_rank_linear.cu", "low_rank_linear", {"TYPE", "PARTS", "SCALED", NULL}};

/* Pairs of tiles of rows that stay in the L2 while all columns pass: 1024 rows. On an H200 at 8192 x 12288, K =
 * 4096, with 2, 4, 8, 16: 1.033, 1.033, 1.044, 1.032 of cuBLASLt's product alone. */
enum { GROUP = 4, MOST_RANK = BST_BOX_COLUMNS, PAIR = 2 * BST_TILE_ROWS };

/* The last round of tiles is to leave few blocks without one: cuBLASLt has smaller tiles. */
static bool fills(const bst_chip *chip, const bst_tiles *t) {
    int64_t clusters = chip->processors / 2, tiles = (int64_t)t->pairs * t->columns;
    return 10 * tiles >= 9 * clusters * bst__divided_up(tiles, clusters);
}

static bool serves(const bst_chip *chip, const bst_view *v, bst_tiles *tiles) {
    bool aligned = chip->warpgroups && v[X].dtype != BST_F32;
    for (int i = 0; i <= Y; i++)
        if (i != INTO) aligned = aligned && v[i].count && bst__low_rank_aligned(&v[i]);
    if (!aligned || v[THIN].size[1] > MOST_RANK || v[Y].size[0] > INT32_MAX - PAIR || v[Y].size[1] > INT32_MAX / 2)
        return false;
    *tiles = (bst_tiles){(int32_t)bst__divided_up(v[Y].size[0], PAIR),
                         (int32_t)bst__divided_up(v[Y].size[1], BST_TILE_COLUMNS), GROUP};
    return fills(chip, tiles);
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    int device = v[X].device.device_id;
    bst_chip chip;
    low_rank_linear_args a = {.y = v[Y].data, .y_stride = low_rank_stride(&v[Y]), .scale = scale};
    BST_TRY(bst__cuda_chip(op, device, &chip));
    if (!serves(&chip, v, &a.tiles)) return multiply(exec, op, v, scale);
    a.rows = (int32_t)v[Y].size[0], a.columns = (int32_t)v[Y].size[1];
    a.steps = (int32_t)bst__divided_up(v[X].size[1], BST_BOX_COLUMNS);
    bst_tensor_map *maps[] = {&a.x, &a.weight, &a.thin, &a.b};
    for (int i = X; i <= B; i++) BST_TRY(bst__cuda_tensor_map(op, device, &v[i], maps[i]));
    bst_launch l = {.kernel = &kernel,
                    .values = {v[X].dtype, bst__divided_up(v[THIN].size[1], LOW_RANK_STEP), scale != 1},
                    .block = BST_TILE_THREADS,
                    .grid_x = (unsigned)(chip.processors / 2 * 2),
                    .cluster = 2,
                    .shared = BST_TILE_SHARED};
    return bst__cuda_launch(exec, op, device, &l, &a, sizeof a);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    float scale = (float)attributes[SCALE].d;
    if (!v[Y].count) return BST_OK;
    if (v[X].device.device_type == kDLCUDA) return run_cuda(exec, op, v, scale);
    return multiply(exec, op, v, scale);
}

const bst_function bst__low_rank_linear = {
    .name = "low_rank_linear",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_TORCH("low_rank_linear: x weight thin b into! scale -> y=into"),
};

bst_status bst_low_rank_linear(const bst_exec *exec, const DLTensor *x, const DLTensor *weight, const DLTensor *thin,
                               const DLTensor *b, double scale, DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [WEIGHT] = weight, [THIN] = thin, [B] = b, [INTO] = NULL, [Y] = y};
    return bst__run(&bst__low_rank_linear, exec, tensors, (bst_attribute[]){[SCALE] = {.d = scale}});
}
