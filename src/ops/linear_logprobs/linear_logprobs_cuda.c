/* linear_logprobs_cuda.c - log-probabilities of rows of logits on CUDA: which kernel, and its launch. */
#include "cuda/cuda.h"
#include "ops/linear_logprobs/linear_logprobs.h"

/* Macros of the kernels, in the order of their values. */
enum { VOCAB, TYPE, VEC, SOFTCAP, NEGATIVE, ENTROPY, SQUARES, MEAN, TOP1 };
#define MACROS "VOCAB", "TYPE", "VEC", "SOFTCAP", "NEGATIVE", "ENTROPY"

static const bst_kernel forward_kernel = {
    "linear_logprobs.cu", "linear_logprobs_forward", {MACROS, "SQUARES", "MEAN", "TOP1", "FORWARD"}};
static const bst_kernel backward_kernel = {"linear_logprobs.cu", "linear_logprobs_backward", {MACROS, "BACKWARD"}};

static linear_logprobs_args args_of(const linear_logprobs_rows *c) {
    bst_cross_entropy_rows_call rows = {.dtype = c->dtype, .rows = c->rows, .vocabulary = c->vocabulary};
    linear_logprobs_args args = c->args;
    rows.logits = rows.dlogits = c->logits, rows.stride = c->stride;
    rows.target = c->target, rows.options = &c->z, rows.lse_pairs = c->pairs;
    args.row = bst__cross_entropy_args(&rows);
    return args;
}

bst_status bst__linear_logprobs_rows_cuda(const bst_exec *exec, const char *op, const linear_logprobs_rows *c) {
    int size = bst__dtype_size(c->dtype);
    bool aligned = (uintptr_t)c->logits % 16 == 0 && c->stride * size % 16 == 0;
    linear_logprobs_args args = args_of(c);
    bst_launch l = {.kernel = c->backward ? &backward_kernel : &forward_kernel,
                    .block = LINEAR_LOGPROBS_THREADS,
                    .grid_x = (unsigned)c->rows,
                    .overlap = true};
    l.values[VOCAB] = c->vocabulary;
    l.values[TYPE] = c->dtype;
    l.values[VEC] = aligned ? 16 / size : 1;
    l.values[SOFTCAP] = c->z.softcap > 0;
    l.values[NEGATIVE] = c->z.logit_scale < 0;
    l.values[ENTROPY] = c->backward ? args.grad_entropy != NULL : args.entropy != NULL;
    l.values[SQUARES] = args.log_sum_sq_probs != NULL;
    l.values[MEAN] = args.mean_logits != NULL;
    l.values[TOP1] = args.is_top1 != NULL;
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

/* ---- without logits ---------------------------------------------------------------------------------------------- */

enum {
    TILES_LEAST_ROWS = 1024, /* fewer are too few tiles for a large chip */
    TILES_SUMS = 256,        /* MiB that they may take by default */
    TILES_ALIGNED = 16,      /* bytes: what a tensor map wants of addresses and strides */
    PAIR = 2 * BST_TILE_ROWS,
    TILES_GROUP = 8
};

static const bst_kernel tiles_kernel = {
    "linear_logprobs_tiles.cu", "linear_logprobs_tiles", {"VOCAB", "TYPE", "ENTROPY", "SQUARES", "MEAN", "TOP1"}};
static const bst_kernel join_kernel = {
    "linear_logprobs.cu", "linear_logprobs_join", {MACROS, "SQUARES", "MEAN", "TOP1", "JOIN"}};

static bool is_aligned(const bst_view *matrix) {
    return (uintptr_t)matrix->data % TILES_ALIGNED == 0 && matrix->stride[0] * 2 % TILES_ALIGNED == 0;
}

static bst_status run_tiles(const bst_exec *exec, const char *op, const bst_chip *chip, bst_view hidden,
                            const bst_view *weight, const linear_logprobs_rows *c, float *sums, int numbers) {
    int32_t tiles = (int32_t)((c->vocabulary + BST_TILE_COLUMNS - 1) / BST_TILE_COLUMNS);
    hidden.size[0] = c->rows;
    linear_logprobs_tiles_args args = {.all = args_of(c), .sums = sums};
    args.rows = (int32_t)c->rows, args.stride = (int32_t)((c->rows + PAIR - 1) / PAIR * PAIR);
    args.targets = sums + (int64_t)numbers * tiles * args.stride;
    args.steps = (int32_t)((weight->size[1] + BST_BOX_COLUMNS - 1) / BST_BOX_COLUMNS);
    args.tiles = (bst_tiles){args.stride / PAIR, tiles, TILES_GROUP};
    BST_TRY(bst__cuda_tensor_map(op, c->device.device_id, &hidden, BST_BOX_ROWS, &args.hidden));
    BST_TRY(bst__cuda_tensor_map(op, c->device.device_id, weight, BST_BOX_ROWS, &args.weight));
    const linear_logprobs_args *wanted = &args.all;
    bool entropy = wanted->entropy, squares = wanted->log_sum_sq_probs;
    bool mean = wanted->mean_logits, top1 = wanted->is_top1;
    bst_launch l = {.kernel = &tiles_kernel,
                    .values = {c->vocabulary, c->dtype, entropy, squares, mean, top1},
                    .block = BST_TILE_THREADS,
                    .grid_x = (unsigned)(chip->processors / 2 * 2),
                    .cluster = 2,
                    .shared = BST_TILE_SHARED};
    BST_TRY(bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args));
    l = (bst_launch){.kernel = &join_kernel,
                     .values = {c->vocabulary, c->dtype, 1, 0, 0, entropy, squares, mean, top1},
                     .block = LINEAR_LOGPROBS_THREADS,
                     .grid_x = (unsigned)((c->rows + 31) / 32),
                     .overlap = true};
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

bst_status bst__linear_logprobs_tiles_cuda(const bst_exec *exec, const char *op, const bst_view *hidden,
                                           const bst_view *weight, const linear_logprobs_rows *c, int64_t budget,
                                           bool *done) {
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, c->device.device_id, &chip));
    const linear_logprobs_args *a = &c->args;
    int numbers = 2 + (a->entropy != NULL) + (a->log_sum_sq_probs != NULL) + (a->mean_logits != NULL);
    int64_t tiles = (c->vocabulary + BST_TILE_COLUMNS - 1) / BST_TILE_COLUMNS;
    int64_t row_bytes = (numbers * tiles + 2) * (int64_t)sizeof(float);
    int64_t most = (budget ? budget : (int64_t)TILES_SUMS << 20) / row_bytes / PAIR * PAIR;
    int64_t parts = most ? (c->rows + most - 1) / most : 0;
    *done = chip.warpgroups && c->dtype != BST_F32 && c->rows >= TILES_LEAST_ROWS && most >= TILES_LEAST_ROWS &&
            c->z.softcap == 0 && c->z.logit_scale > 0 && is_aligned(hidden) && is_aligned(weight);
    if (!*done) return BST_OK;
    int64_t each = ((c->rows + parts - 1) / parts + PAIR - 1) / PAIR * PAIR;
    void *memory;
    BST_TRY(bst__allocate(exec, op, c->device, (size_t)(each * row_bytes), &memory));
    bst_status status = BST_OK;
    for (int64_t first = 0; first < c->rows && status == BST_OK; first += each) {
        linear_logprobs_rows part =
            bst__linear_logprobs_part(c, first, c->rows - first < each ? c->rows - first : each);
        bst_view rows = *hidden;
        rows.data = bst_at(hidden->data, first * hidden->stride[0], c->dtype);
        status = run_tiles(exec, op, &chip, rows, weight, &part, memory, numbers);
    }
    bst__release(exec, c->device, memory);
    return status;
}
