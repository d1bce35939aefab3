/* low_rank_glu.c - the backward pass of a gated unit with adapters around it: checks, then the configuration of the
 * kernel that reads gate, up and dy once, or the unit's operator and products where it does not serve. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/glu/glu.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_glu_tensors given_tensors;
typedef bst_glu_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { DY, GATE, UP, THIN, B_GATE, B_UP, G_DOWN, A_DOWN, INTO, DGATE, DUP, Y, G, DB_GATE, DB_UP, DA_DOWN, THIN_DOWN };
enum { SCALE_GATE = GLU_ATTRIBUTES, SCALE_UP };

static const char *const meanings[] = {"Tthe rows of dy", "Nthe columns of dy", "Wthe columns of thin", NULL};

#define LIKE_DY                    BST_TYPE_OF(DY, "the type of dy")
#define OF_UNIT(name)              {#name, BST_IN, BST_FLOATS, "TN", BST_ROWS, LIKE_DY, BST_AT(name)}
#define OF_B(name)                 {#name, BST_IN, BST_FLOATS, "N-W", BST_CONTIGUOUS, LIKE_DY, BST_AT(name)}
#define GRADIENT(name, shape, ...) {#name, BST_OUT, 1u << BST_F32, shape, BST_CONTIGUOUS, BST_AT(name), ##__VA_ARGS__}

static const bst_argument arguments[] = {
    [DY] = {"dy", BST_IN, BST_FLOATS, "TN", BST_ROWS, BST_AT(dy)},
    [GATE] = OF_UNIT(gate),
    [UP] = OF_UNIT(up),
    [THIN] = {"thin", BST_IN, BST_FLOATS, "TW", BST_ROWS, LIKE_DY, BST_AT(thin)},
    [B_GATE] = OF_B(b_gate),
    [B_UP] = OF_B(b_up),
    [G_DOWN] = {"g_down", BST_IN | BST_OPTIONAL, BST_FLOATS, "T-W", BST_ROWS, LIKE_DY, BST_AT(g_down)},
    [A_DOWN] = {"a_down", BST_IN | BST_OPTIONAL, BST_FLOATS, "-WN", BST_CONTIGUOUS, LIKE_DY, BST_AT(a_down)},
    /* PyTorch's way to say where g is to be. */
    [INTO] = {"into", BST_IN | BST_OPTIONAL, BST_FLOATS, "TW", BST_ROWS, LIKE_DY},
    [DGATE] = {"dgate", BST_OUT, BST_FLOATS, "TN", BST_ROWS, LIKE_DY, BST_MAY_BE(1u << GATE), BST_AT(dgate)},
    [DUP] = {"dup", BST_OUT, BST_FLOATS, "TN", BST_ROWS, LIKE_DY, BST_MAY_BE(1u << UP), BST_AT(dup)},
    [Y] = {"y", BST_OUT | BST_OPTIONAL, BST_FLOATS, "TN", BST_ROWS, LIKE_DY, BST_MAY_BE(1u << DY), BST_AT(y)},
    [G] = {"g", BST_OUT, BST_FLOATS, "TW", BST_ROWS, LIKE_DY, BST_MAY_BE(1u << INTO), BST_AT(g)},
    [DB_GATE] = GRADIENT(db_gate, "N-W"),
    [DB_UP] = GRADIENT(db_up, "N-W"),
    [DA_DOWN] = {"da_down", BST_OUT | BST_OPTIONAL, 1u << BST_F32, "-WN", BST_CONTIGUOUS, BST_WITH(G_DOWN),
                 BST_AT(da_down)},
    [THIN_DOWN] = {"thin_down", BST_OUT | BST_OPTIONAL, BST_FLOATS, "T-W", BST_ROWS, LIKE_DY, BST_WITH(A_DOWN),
                   BST_AT(thin_down)},
    {NULL},
};

static const bst_attribute_rule rules[] = {
    BST_GLU_RULES, [SCALE_GATE] = {"scale_gate", 'd'}, [SCALE_UP] = {"scale_up", 'd'}, {NULL}};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(bst__glu_need_apart(op, attributes));
    /* A library's products take no rows that overlap. */
    BST_TRY(bst__need_rows_apart(op, "thin", &v[THIN]));
    if (bst__given(&v[G_DOWN])) BST_TRY(bst__need_rows_apart(op, "g_down", &v[G_DOWN]));
    if (v[THIN].size[1] % 2 == 0) return BST_OK;
    return bst__error(BST_INVALID, "%s: thin has shape %s; columns of gate, and as many of up, are needed", op,
                      bst__shape_text(&v[THIN]));
}

/* ---- in one pass ------------------------------------------------------------------------------------------------- */

static const bst_kernel backward_kernel = {
    "low_rank_glu.cu",
    "low_rank_glu_backward",
    {"TYPE", "RANK", "DOWN", "LATE", "THREADS", "TILES", "UNIT", "LIMITED", "WITH_Y", NULL}};
static const bst_kernel sum_kernel = {"low_rank_glu.cu", "low_rank_glu_sum", {"TYPE", "RANK", "DOWN", "LATE", NULL}};

/* Tiles x rank, of which a warp sums 16 columns of three matrices in its registers; rounds of blocks. */
enum { MOST_SUMS = 32, MOST_ROUNDS = 4 };

/* What other rows and another block cost beside their tiles, in tenths of a tile, of which an element has 10 bytes. */
enum { NEW_ROWS = 3, NEW_BLOCK = 30 };

typedef struct plan {
    int threads, tiles, shared;
    int64_t column_parts, row_parts;
} plan;

static bool serves(const bst_view *v) {
    int64_t rank = v[B_GATE].size[1];
    bool aligned = v[DY].dtype != BST_F32 && rank > 0 && rank <= LOW_RANK_MOST;
    for (int i = 0; i <= THIN_DOWN; i++)
        if (bst__given(&v[i]) && v[i].data) aligned = aligned && bst__low_rank_aligned(&v[i]);
    return aligned;
}

/* How many tiles' columns a block has, and how many rounds of blocks the chip makes: those that cost the fewest bytes,
 * of tiles and of parts, which are written and read. On an H200 at 8192 x 12288 and rank 16, both kernels: 288 us with
 * 2 tiles of 512 threads and two full rounds, 299 with one of 120 blocks, 298 and 308 with three and four; 331 with one
 * tile, 350 with 256 threads. Rank 8: 269 with four tiles, 274 with two. Rank 32: 439 with four rounds, 553 with one.
 */
static bool choose(const bst_chip *chip, int64_t rows, int64_t columns, int rank, int matrices, int summed,
                   plan *best) {
    int64_t row_tiles = bst__divided_up(rows, LOW_RANK_GLU_ROWS), least = INT64_MAX;
    int pitch = LOW_RANK_PITCH(rank);
    for (int threads = 512; threads >= 256 && least == INT64_MAX; threads /= 2) /* 256 where the memory wants it */
        for (int tiles = 1; tiles * rank <= MOST_SUMS; tiles *= 2)
            for (int rounds = 1; rounds <= MOST_ROUNDS; rounds++) {
                int width = threads / 2, slices = threads / 32 / (2 * matrices);
                plan p = {threads, tiles, .column_parts = bst__divided_up(columns, tiles * width)};
                p.shared = LOW_RANK_GLU_STAGES * LOW_RANK_GLU_ROWS * (3 * 2 * width + summed * pitch) +
                           tiles * matrices * width * pitch + 2 * matrices * slices * LOW_RANK_STEP * rank * 4;
                if (p.shared > chip->shared_memory) break;
                int64_t blocks = rounds * chip->processors;
                int64_t at_once = p.column_parts < blocks ? blocks / p.column_parts : 1;
                int64_t each = bst__divided_up(row_tiles, bst__lesser(at_once, row_tiles));
                p.row_parts = bst__divided_up(row_tiles, each);
                int64_t made = bst__divided_up(p.column_parts * p.row_parts, chip->processors);
                int64_t tiles_of_block = each * (10 * tiles + NEW_ROWS) + NEW_BLOCK; /* in tenths */
                int64_t cost = made * tiles_of_block * chip->processors * LOW_RANK_GLU_ROWS * width +
                               2 * 4 * rank * (matrices * p.column_parts * rows + summed * p.row_parts * columns);
                if (cost < least) least = cost, *best = p;
            }
    return least < INT64_MAX;
}

static bst_status run_kernel(const bst_exec *exec, const char *op, const plan *p, const bst_view *v,
                             const bst_unit *unit, const float scale[2]) {
    int64_t rows = v[DY].size[0], columns = v[DY].size[1], rank = v[B_GATE].size[1];
    bool down = v[DA_DOWN].data != NULL, late = v[THIN_DOWN].data != NULL;
    DLDevice device = v[DY].device;
    int64_t of_g = (2 + late) * p->column_parts * rows * rank, of_db = (2 + down) * p->row_parts * columns * rank;
    void *parts = NULL;
    BST_TRY(bst__cuda_need_rows(op, 3 * (rows + columns), LOW_RANK_MOST)); /* the grid of the sums is smaller */
    BST_TRY(bst__allocate(exec, op, device, (size_t)(of_g + of_db) * sizeof(float), &parts));
    char *half = (char *)v[THIN].data + 2 * rank, *g_half = (char *)v[G].data + 2 * rank;
    low_rank_glu_args first = {
        .in = {v[GATE].data, v[UP].data, v[DY].data},
        .out = {v[DGATE].data, v[DUP].data, v[Y].data},
        .b_gate = v[B_GATE].data,
        .b_up = v[B_UP].data,
        .a_down = v[A_DOWN].data,
        .thin = {v[THIN].data, half, v[G_DOWN].data},
        .g_parts = parts,
        .db_parts = (float *)parts + of_g,
        .in_stride = {low_rank_stride(&v[GATE]), low_rank_stride(&v[UP]), low_rank_stride(&v[DY])},
        .out_stride = {low_rank_stride(&v[DGATE]), low_rank_stride(&v[DUP]), low_rank_stride(&v[Y])},
        .thin_stride = {low_rank_stride(&v[THIN]), low_rank_stride(&v[THIN]), low_rank_stride(&v[G_DOWN])},
        .rows = rows,
        .columns = columns,
        .alpha = unit->alpha,
        .limit = unit->limit,
    };
    bst_launch l = {.kernel = &backward_kernel,
                    .values = {v[DY].dtype, rank, down, late, p->threads, p->tiles, unit->activation, unit->limited,
                               v[Y].data != NULL},
                    .grid_x = (unsigned)p->column_parts,
                    .grid_y = (unsigned)p->row_parts,
                    .block = (unsigned)p->threads,
                    .shared = (unsigned)p->shared,
                    .overlap = true};
    bst_status status = p->tiles ? bst__cuda_launch(exec, op, device.device_id, &l, &first, sizeof first) : BST_OK;
    low_rank_glu_sum_args sum = {
        .g_parts = first.g_parts,
        .db_parts = first.db_parts,
        .g = {v[G].data, g_half, v[THIN_DOWN].data},
        .db = {v[DB_GATE].data, v[DB_UP].data, v[DA_DOWN].data},
        .g_stride = {low_rank_stride(&v[G]), low_rank_stride(&v[G]), low_rank_stride(&v[THIN_DOWN])},
        .rows = rows,
        .columns = columns,
        .column_parts = (int32_t)p->column_parts,
        .row_parts = (int32_t)p->row_parts,
        .scale = {scale[0], scale[1]},
    };
    int64_t quads = ((2 + late) * rows + (2 + down) * columns) * (rank / 4);
    l = (bst_launch){.kernel = &sum_kernel,
                     .values = {v[DY].dtype, rank, down, late},
                     .grid_x = (unsigned)bst__divided_up(quads, LOW_RANK_THREADS),
                     .block = LOW_RANK_THREADS,
                     .overlap = true};
    if (status == BST_OK) status = bst__cuda_launch(exec, op, device.device_id, &l, &sum, sizeof sum);
    bst__release(exec, device, parts);
    return status;
}

/* ---- by the unit's operator and products ------------------------------------------------------------------------- */

static DLTensor tensor_of(const bst_view *v) {
    return (DLTensor){.data = v->data,
                      .device = v->device,
                      .ndim = v->dims,
                      .dtype = bst__dl_type(v->dtype),
                      .shape = (int64_t *)v->size,
                      .strides = (int64_t *)v->stride};
}

/* Gate's or up's columns of thin or g. */
static bst_view half_of(const bst_view *v, int which) {
    bst_view half = *v;
    half.size[1] /= 2, half.count /= 2, half.rows.columns /= 2;
    if (half.data) half.data = (char *)half.data + which * half.size[1] * bst__dtype_size(v->dtype);
    return half;
}

static bst_status unit_backward(const bst_exec *exec, const bst_view *v, const bst_view *y,
                                const bst_attribute *attributes) {
    const bst_glu_options options = {.size = sizeof options,
                                     .activation = (bst_activation)attributes[ACTIVATION].i,
                                     .alpha = attributes[ALPHA].d,
                                     .limit = attributes[LIMIT].d,
                                     .open_limit = (int)attributes[OPEN_LIMIT].i};
    DLTensor dy = tensor_of(&v[DY]), gate = tensor_of(&v[GATE]), up = tensor_of(&v[UP]), out = tensor_of(y);
    DLTensor dgate = tensor_of(&v[DGATE]), dup = tensor_of(&v[DUP]);
    return bst_glu_backward(exec, &dy, &gate, &up, &options, &dgate, &dup, y->dims ? &out : NULL);
}

static bst_status adapter_backward(const bst_exec *exec, const bst_view *v, int which, double scale) {
    bst_view halves[] = {half_of(&v[THIN], which), half_of(&v[G], which)};
    DLTensor dy = tensor_of(&v[DGATE + which]), thin = tensor_of(&halves[0]), b = tensor_of(&v[B_GATE + which]);
    DLTensor g = tensor_of(&halves[1]), db = tensor_of(&v[DB_GATE + which]);
    return bst_low_rank_backward(exec, &dy, &thin, &b, scale, &g, &db);
}

/* da_down = g_down^T y and thin_down = y a_down^T, each where it is wanted. */
static bst_status down_by_products(const bst_exec *exec, const char *op, const bst_view *v, const bst_view *y) {
    DLDataType type = bst__dl_type(y->dtype);
    bst_gemm of_a = {.device = y->device,
                     .m = v[DA_DOWN].size[0],
                     .n = y->size[1],
                     .k = y->size[0],
                     .a = v[G_DOWN].data,
                     .b = y->data,
                     .out = v[DA_DOWN].data,
                     .lda = low_rank_stride(&v[G_DOWN]),
                     .ldb = low_rank_stride(y),
                     .ldo = y->size[1],
                     .a_transposed = 1,
                     .input_type = type,
                     .output_type = bst__dl_type(BST_F32),
                     .alpha = 1};
    bst_gemm of_thin = {.device = y->device,
                        .m = y->size[0],
                        .n = v[THIN_DOWN].size[1],
                        .k = y->size[1],
                        .a = y->data,
                        .b = v[A_DOWN].data,
                        .out = v[THIN_DOWN].data,
                        .lda = low_rank_stride(y),
                        .ldb = y->size[1],
                        .ldo = low_rank_stride(&v[THIN_DOWN]),
                        .b_transposed = 1,
                        .input_type = type,
                        .output_type = type,
                        .alpha = 1};
    if (v[DA_DOWN].data) BST_TRY(bst__cuda_gemm(exec, op, &of_a));
    return v[THIN_DOWN].data ? bst__cuda_gemm(exec, op, &of_thin) : BST_OK;
}

/* The same on CPU, by loops whose sums are float32 in any type. */
static bst_status down_by_loops(const bst_exec *exec, const char *op, const bst_view *v, const bst_view *y) {
    const bst_body loops[] = {BST_CPU_SELECT(bst__low_rank_cpu), BST_CPU_SELECT(bst__low_rank_transposed_cpu)};
    const int64_t rows = y->size[0], columns = y->size[1], rank = v[B_GATE].size[1];
    low_rank_cpu of_a = {.dtype = y->dtype,
                         .out_type = BST_F32,
                         .dy = v[G_DOWN].data,
                         .out = v[DA_DOWN].data,
                         .dy_stride = low_rank_stride(&v[G_DOWN]),
                         .out_stride = columns,
                         .k = rows,
                         .rank = columns,
                         .scale = 1};
    low_rank_cpu of_thin = {.dtype = y->dtype,
                            .out_type = y->dtype,
                            .dy = y->data,
                            .out = v[THIN_DOWN].data,
                            .dy_stride = low_rank_stride(y),
                            .out_stride = low_rank_stride(&v[THIN_DOWN]),
                            .k = columns,
                            .rank = rank,
                            .scale = 1};
    const int64_t most = rows > rank ? rows : rank;
    void *wide = NULL;
    BST_TRY(bst__allocate(exec, op, y->device, (size_t)(most * columns) * sizeof(float), &wide));
    if (v[DA_DOWN].data && columns) {
        for (int64_t row = 0; row < rows; row++)
            bst_load((float *)wide + row * columns, bst_at(y->data, row * low_rank_stride(y), y->dtype), y->dtype,
                     columns);
        of_a.y = wide;
        bst__parallel_for(exec, rank, bst__grain(rows * columns), loops[1], &of_a);
    }
    if (v[THIN_DOWN].data) {
        for (int64_t i = 0; i < rank * columns; i++)
            bst_load((float *)wide + i % columns * rank + i / columns, bst_at(v[A_DOWN].data, i, y->dtype), y->dtype,
                     1);
        of_thin.y = wide;
        bst__parallel_for(exec, rows, bst__grain(columns * rank), loops[0], &of_thin);
    }
    bst__release(exec, y->device, wide);
    return BST_OK;
}

static bst_status run_parts(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bool reads_y = v[DA_DOWN].data || v[THIN_DOWN].data;
    const bool on_cpu = v[DY].device.device_type == kDLCPU;
    void *memory = NULL;
    bst_view y = v[Y];
    if (reads_y && !y.data) {
        y = v[DY];
        y.stride[0] = y.rows.inner_stride = y.rows.columns;
        y.rows.inner = y.rows.rows, y.rows.outer_stride = 0;
        BST_TRY(bst__allocate(exec, op, y.device, (size_t)(y.count * bst__dtype_size(y.dtype)), &memory));
        y.data = memory;
    }
    bst_status status = unit_backward(exec, v, &y, attributes);
    for (int i = 0; i < 2 && status == BST_OK; i++) status = adapter_backward(exec, v, i, attributes[SCALE_GATE + i].d);
    if (status == BST_OK && reads_y) status = (on_cpu ? down_by_loops : down_by_products)(exec, op, v, &y);
    bst__release(exec, y.device, memory);
    return status;
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const float scale[] = {(float)attributes[SCALE_GATE].d, (float)attributes[SCALE_UP].d};
    const int64_t rows = v[DY].size[0], columns = v[DY].size[1];
    const bst_unit unit = bst__glu_unit(attributes);
    plan p = {0};
    bst_chip chip;
    if (v[DY].device.device_type != kDLCUDA) return run_parts(exec, op, v, attributes);
    BST_TRY(bst__cuda_chip(op, v[DY].device.device_id, &chip));
    if (!serves(v) ||
        (rows && columns &&
         !choose(&chip, rows, columns, (int)v[B_GATE].size[1], 2 + !!v[THIN_DOWN].data, 2 + !!v[DA_DOWN].data, &p)))
        return run_parts(exec, op, v, attributes);
    return run_kernel(exec, op, &p, v, &unit, scale);
}

const bst_function bst__low_rank_glu_backward = {
    .name = "low_rank_glu_backward",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_GIVEN,
    BST_TORCH(
        "low_rank_glu_backward: activation alpha limit open_limit scale_gate scale_up dy gate up thin b_gate b_up "
        "g_down a_down into! -> dgate=gate dup=up y?=dy g=into db_gate db_up da_down? thin_down?"),
};

bst_status bst_low_rank_glu_backward(const bst_exec *exec, const bst_low_rank_glu_tensors *tensors, double scale_gate,
                                     double scale_up, const bst_glu_options *options) {
    bst_attribute attributes[] = {[SCALE_GATE] = {.d = scale_gate}, [SCALE_UP] = {.d = scale_up}};
    return bst__call_struct(&bst__low_rank_glu_backward, exec, tensors, options, attributes);
}
