/* low_rank.c - the backward pass of y = scale thin b^T: checks, then the configuration of the kernel that reads dy
 * once, or two products where it does not serve. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { DY, THIN, B, INTO, G, DB };
enum { SCALE };

static const char *const meanings[] = {"Tthe rows of dy", "Nthe columns of dy", "Rthe columns of thin", NULL};

static const bst_argument arguments[] = {
    [DY] = {"dy", BST_IN, BST_FLOATS, "TN", BST_ROWS},
    [THIN] = {"thin", BST_IN, BST_FLOATS, "TR", BST_ROWS, BST_TYPE_OF(DY, "the type of dy")},
    [B] = {"b", BST_IN, BST_FLOATS, "NR", BST_CONTIGUOUS, BST_TYPE_OF(DY, "the type of dy")},
    /* PyTorch's way to say where g is to be. */
    [INTO] = {"into", BST_IN | BST_OPTIONAL, BST_FLOATS, "TR", BST_ROWS, BST_TYPE_OF(DY, "the type of dy")},
    [G] = {"g", BST_OUT, BST_FLOATS, "TR", BST_ROWS, BST_TYPE_OF(DY, "the type of dy"), BST_MAY_BE(1u << INTO)},
    [DB] = {"db", BST_OUT, 1u << BST_F32, "NR", BST_CONTIGUOUS},
    {NULL},
};

static const bst_attribute_rule rules[] = {[SCALE] = {"scale", 'd'}, {NULL}};

/* ---- by two products --------------------------------------------------------------------------------------------- */

static bst_status multiply(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    const bst_view *dy = &v[DY];
    DLDataType type = bst__dl_type(dy->dtype);
    bst_gemm of_g = {.device = dy->device,
                     .m = v[G].size[0],
                     .n = v[G].size[1],
                     .k = dy->size[1],
                     .a = dy->data,
                     .b = v[B].data,
                     .out = v[G].data,
                     .lda = dy->rows.inner_stride,
                     .ldb = v[B].size[1],
                     .ldo = v[G].rows.inner_stride,
                     .input_type = type,
                     .output_type = type,
                     .alpha = scale};
    bst_gemm of_db = of_g;
    of_db.m = dy->size[1], of_db.k = dy->size[0];
    of_db.a_transposed = 1;
    of_db.b = v[THIN].data, of_db.ldb = v[THIN].rows.inner_stride;
    of_db.out = v[DB].data, of_db.ldo = v[DB].size[1];
    of_db.output_type = bst__dl_type(BST_F32);
    /* A library's products take no rows that overlap; said before anything is written. */
    BST_TRY(bst__need_rows_apart(op, "dy", dy));
    BST_TRY(bst__need_rows_apart(op, "thin", &v[THIN]));
    BST_TRY(bst__gemm(exec, op, &of_g));
    return bst__gemm(exec, op, &of_db);
}

/* ---- in one pass ------------------------------------------------------------------------------------------------- */

static const bst_kernel backward_kernel = {
    "low_rank.cu", "low_rank_backward", {"TYPE", "RANK", "TILES", "STAGES", NULL}};
static const bst_kernel sum_kernel = {"low_rank.cu", "low_rank_sum", {"TYPE", "RANK", NULL}};

enum { MOST_SUMS = 128, MOST_STAGES = 3 }; /* tiles x rank that a block sums in its registers */

typedef struct plan {
    int tiles, stages, shared;
    int64_t column_parts, row_parts;
} plan;

bool bst__low_rank_aligned(const bst_view *v) {
    return v->size[1] % 8 == 0 && (v->size[0] < 2 || v->rows.inner_stride % 8 == 0) && (uintptr_t)v->data % 16 == 0;
}

static bool serves(const bst_view *v) {
    int64_t rank = v[B].size[1];
    return v[DY].dtype != BST_F32 && rank && rank <= LOW_RANK_MOST && bst__low_rank_aligned(&v[DY]) &&
           bst__low_rank_aligned(&v[THIN]) && bst__low_rank_aligned(&v[B]) && bst__low_rank_aligned(&v[G]) &&
           (uintptr_t)v[DB].data % 16 == 0;
}

/* How many tiles' columns a block has: those that cost the fewest bytes, of the rounds of tiles that the chip makes,
 * and of the parts, which stay in the L2 and count half. On an H200 at 8192 rows and rank 16, with 1, 2, 4 and 8: 11.7,
 * 13, 16.6 and 19 us at 1024 columns, 35, 29, 27 and 30 at 4096, and 64 with 8 at 12288; three stages and four the
 * same, five 1 us more. */
static bool choose(const bst_chip *chip, int64_t rows, int64_t columns, int rank, plan *best) {
    int64_t row_tiles = bst__divided_up(rows, LOW_RANK_TILE), least = INT64_MAX;
    for (int tiles = 1; tiles * rank <= MOST_SUMS; tiles *= 2) {
        plan p = {.tiles = tiles, .column_parts = bst__divided_up(columns, tiles * LOW_RANK_TILE)};
        int pitch = LOW_RANK_PITCH(rank), stage = LOW_RANK_TILE * (2 * LOW_RANK_TILE + pitch);
        p.stages = (chip->shared_memory - tiles * LOW_RANK_TILE * pitch) / stage;
        if (p.stages < 2) break;
        if (p.stages > MOST_STAGES) p.stages = MOST_STAGES;
        p.shared = tiles * LOW_RANK_TILE * pitch + p.stages * stage;
        int64_t at_once = p.column_parts < chip->processors ? chip->processors / p.column_parts : 1;
        int64_t each = bst__divided_up(row_tiles, bst__lesser(at_once, row_tiles));
        p.row_parts = bst__divided_up(row_tiles, each);
        int64_t rounds = bst__divided_up(p.column_parts * p.row_parts, chip->processors);
        int64_t cost = rounds * each * tiles * chip->processors * LOW_RANK_TILE * LOW_RANK_TILE * 2 +
                       4 * rank * (p.column_parts * rows + p.row_parts * columns);
        if (cost < least) least = cost, *best = p;
    }
    return least < INT64_MAX;
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    int64_t rows = v[DY].size[0], columns = v[DY].size[1], rank = v[B].size[1];
    DLDevice device = v[DY].device;
    bst_chip chip;
    plan p = {0};
    BST_TRY(bst__cuda_chip(op, device.device_id, &chip));
    if (!serves(v) || (rows && columns && !choose(&chip, rows, columns, (int)rank, &p)))
        return multiply(exec, op, v, scale);
    int64_t of_g = p.column_parts * rows * rank, of_db = p.row_parts * columns * rank;
    BST_TRY(bst__cuda_need_rows(op, rows + columns, LOW_RANK_MOST)); /* the grid of the sums is smaller */
    void *parts = NULL;
    BST_TRY(bst__allocate(exec, op, device, (size_t)(of_g + of_db) * sizeof(float), &parts));
    low_rank_args first = {.dy = v[DY].data,
                           .thin = v[THIN].data,
                           .b = v[B].data,
                           .g_parts = parts,
                           .db_parts = (float *)parts + of_g,
                           .dy_stride = v[DY].rows.inner_stride,
                           .thin_stride = v[THIN].rows.inner_stride,
                           .rows = rows,
                           .columns = columns};
    bst_launch l = {.kernel = &backward_kernel,
                    .values = {v[DY].dtype, rank, p.tiles, p.stages},
                    .grid_x = (unsigned)p.column_parts,
                    .grid_y = (unsigned)p.row_parts,
                    .block = LOW_RANK_THREADS,
                    .shared = (unsigned)p.shared,
                    .overlap = true};
    bst_status status = p.tiles ? bst__cuda_launch(exec, op, device.device_id, &l, &first, sizeof first) : BST_OK;
    low_rank_sum_args sum = {.g_parts = first.g_parts,
                             .db_parts = first.db_parts,
                             .g = v[G].data,
                             .db = v[DB].data,
                             .g_stride = v[G].rows.inner_stride,
                             .rows = rows,
                             .columns = columns,
                             .column_parts = (int32_t)p.column_parts,
                             .row_parts = (int32_t)p.row_parts,
                             .scale = scale};
    l = (bst_launch){.kernel = &sum_kernel,
                     .values = {v[DY].dtype, rank},
                     .grid_x = (unsigned)bst__divided_up((rows + columns) * (rank / 4), LOW_RANK_THREADS),
                     .block = LOW_RANK_THREADS,
                     .overlap = true};
    if (status == BST_OK) status = bst__cuda_launch(exec, op, device.device_id, &l, &sum, sizeof sum);
    bst__release(exec, device, parts);
    return status;
}

/* ---- on CPU ------------------------------------------------------------------------------------------------------ */

/* In 16 bits by loops of our own: PyTorch's product leaves no float32. */
static bst_status run_cpu(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    const bst_view *dy = &v[DY], *factors[] = {&v[B], &v[THIN]}, *results[] = {&v[G], &v[DB]};
    if (dy->dtype == BST_F32) return multiply(exec, op, v, scale);
    const bst_body loops[] = {BST_CPU_SELECT(bst__low_rank_cpu), BST_CPU_SELECT(bst__low_rank_transposed_cpu)};
    int64_t rank = v[B].size[1], longer = dy->size[0] > dy->size[1] ? dy->size[0] : dy->size[1];
    void *wide = NULL;
    if (!rank) return BST_OK;
    BST_TRY(bst__allocate(exec, op, dy->device, (size_t)(longer * rank) * sizeof(float), &wide));
    for (int i = 0; i < 2; i++) {
        const bst_view *y = factors[i];
        for (int64_t row = 0; row < y->size[0]; row++)
            bst_load((float *)wide + row * rank, bst_at(y->data, row * y->rows.inner_stride, y->dtype), y->dtype, rank);
        low_rank_cpu call = {.dtype = dy->dtype,
                             .out_type = results[i]->dtype,
                             .dy = dy->data,
                             .y = wide,
                             .out = results[i]->data,
                             .dy_stride = dy->rows.inner_stride,
                             .out_stride = results[i]->rows.inner_stride,
                             .k = y->size[0],
                             .rank = rank,
                             .scale = scale};
        bst__parallel_for(exec, dy->size[i], bst__grain(y->size[0] * rank), loops[i], &call);
    }
    bst__release(exec, dy->device, wide);
    return BST_OK;
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    float scale = (float)attributes[SCALE].d;
    if (v[DY].device.device_type == kDLCUDA) return run_cuda(exec, op, v, scale);
    return run_cpu(exec, op, v, scale);
}

static const bst_function backward = {
    .name = "low_rank_backward",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_TORCH("low_rank_backward: dy thin b scale -> g db",
              "low_rank_backward_into: dy thin b into! scale -> g=into db"),
};

bst_status bst_low_rank_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *thin, const DLTensor *b,
                                 double scale, DLTensor *g, DLTensor *db) {
    const DLTensor *tensors[] = {[DY] = dy, [THIN] = thin, [B] = b, [INTO] = NULL, [G] = g, [DB] = db};
    return bst__run(&backward, exec, tensors, (bst_attribute[]){[SCALE] = {.d = scale}});
}

const bst_function *const bst__low_rank[] = {
    &bst__low_rank_linear, &bst__low_rank_dx,     &backward, &bst__low_rank_glu_backward, &bst__low_rank_add,
    &bst__low_rank_split,  &bst__low_rank_layers, NULL};
