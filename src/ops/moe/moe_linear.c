/* moe_linear.c - the experts' linear layers, with their adapters or without: checks, then the kernel where the chip has
 * it, which reads on the device where the experts' rows end, else one or two products an expert. */
#include "cuda/cuda.h"
#include "ops/moe/moe.h"

#include "cuda/device/tile_product.h"

enum { X, MATRICES, ENDS, THIN, B, Y };
enum { SCALE };

static const char *const meanings[] = {"Nthe rows of x",       "Athe columns of x", "Bthe columns of matrices",
                                       "Rthe columns of thin", "Ethe experts",      NULL};

#define LIKE_X BST_TYPE_OF(X, "the type of x")

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "NA", BST_ROWS},
    [MATRICES] = {"matrices", BST_IN, BST_FLOATS, "EAB", BST_STRIDED, LIKE_X},
    [ENDS] = {"ends", BST_IN, 1u << BST_I32, "E", BST_CONTIGUOUS},
    [THIN] = {"thin", BST_IN | BST_OPTIONAL, BST_FLOATS, "NR", BST_ROWS, LIKE_X},
    [B] = {"b", BST_IN | BST_OPTIONAL, BST_FLOATS, "ERB", BST_STRIDED, LIKE_X, BST_WITH(THIN)},
    [Y] = {"y", BST_OUT, BST_FLOATS, "NB", BST_CONTIGUOUS, LIKE_X},
    {NULL},
};

static const bst_attribute_rule rules[] = {[SCALE] = {"scale", 'd'}, {NULL}};

/* ---- matrices, a row contiguous or a column ---------------------------------------------------------------------- */

typedef struct lain {
    bool across;     /* columns, which are not summed over, lie side by side */
    int64_t stride;  /* from a row to the next, or from a column */
    int64_t outer;   /* how many of these */
    int64_t inner;   /* and how long they are */
    int64_t between; /* from an expert's to the next one's */
} lain;

static lain lain_of(const bst_view *m) {
    const bool across = m->size[2] < 2 || m->stride[2] == 1;
    const int inner = across ? 2 : 1, outer = across ? 1 : 2;
    lain l = {.across = across, .outer = m->size[outer], .inner = m->size[inner]};
    l.stride = l.outer > 1 ? m->stride[outer] : l.inner;
    l.between = m->size[0] > 1 ? m->stride[0] : l.outer * l.stride;
    return l;
}

/* Products of the framework or of a library take no rows that overlap. Said before anything is written. */
static bst_status need_lain(const char *op, const char *name, const bst_view *m) {
    if (!m->count) return BST_OK;
    const lain l = lain_of(m);
    const int inner = l.across ? 2 : 1;
    if ((m->size[inner] < 2 || m->stride[inner] == 1) && l.stride >= l.inner) return BST_OK;
    return bst__error(BST_UNSUPPORTED,
                      "%s: neither the rows nor the columns of %s are contiguous and apart; make it contiguous", op,
                      name);
}

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    BST_TRY(bst__moe_need_countable(op, "x", "rows", v[X].size[0]));
    BST_TRY(bst__moe_need_experts(op, v[ENDS].count));
    BST_TRY(bst__need_rows_apart(op, "x", &v[X]));
    BST_TRY(need_lain(op, "matrices", &v[MATRICES]));
    if (!bst__given(&v[THIN])) return BST_OK;
    BST_TRY(bst__need_rows_apart(op, "thin", &v[THIN]));
    return need_lain(op, "b", &v[B]);
}

/* ---- expert by expert -------------------------------------------------------------------------------------------- */

static bst_status multiply(const bst_exec *exec, const char *op, const bst_view *v, int64_t expert, int64_t begin,
                           int64_t end, bool is_thin, float scale) {
    const bst_view *x = &v[is_thin ? THIN : X], *m = &v[is_thin ? B : MATRICES], *y = &v[Y];
    const bool adds = !is_thin && v[THIN].count;
    const lain l = lain_of(m);
    DLDataType type = bst__dl_type(x->dtype);
    if (is_thin ? !x->count : adds && !x->size[1]) return BST_OK; /* nothing is added */
    return bst__gemm(exec, op,
                     &(bst_gemm){.device = x->device,
                                 .m = end - begin,
                                 .n = y->size[1],
                                 .k = x->size[1],
                                 .a = bst_at(x->data, begin * x->rows.inner_stride, x->dtype),
                                 .b = bst_at(m->data, expert * l.between, m->dtype),
                                 .out = bst_at(y->data, begin * y->size[1], y->dtype),
                                 .lda = x->rows.inner_stride,
                                 .ldb = l.stride,
                                 .ldo = y->size[1],
                                 .b_transposed = !l.across,
                                 .input_type = type,
                                 .output_type = type,
                                 .alpha = is_thin ? scale : 1,
                                 .beta = adds});
}

static bst_status one_by_one(const bst_exec *exec, const char *op, const bst_view *v, const int32_t *ends,
                             float scale) {
    int64_t begin = 0, rows = v[X].size[0];
    for (int64_t e = 0; e < v[ENDS].count; e++) {
        int64_t end = bst__lesser(ends[e], rows); /* on CUDA they are not believed */
        if (end <= begin) continue;
        BST_TRY(multiply(exec, op, v, e, begin, end, true, scale));
        BST_TRY(multiply(exec, op, v, e, begin, end, false, scale));
        begin = end;
    }
    return BST_OK;
}

/* ---- as one ------------------------------------------------------------------------------------------------------ */

static const bst_kernel kernel = {
    "moe_tiles.cu", "moe_linear", {"TYPE", "PARTS", "SCALED", "ACROSS", "THIN_ACROSS", NULL}};

/* The most tiles of an expert's rows that stay in the L2 while all columns pass: 2048 rows. */
enum { GROUP = 16 };

static bool are_served(const bst_view *x, const bst_view *m) {
    const lain l = lain_of(m);
    const bool aligned = (uintptr_t)x->data % 16 == 0 && (x->size[0] < 2 || x->rows.inner_stride % 8 == 0) &&
                         (uintptr_t)m->data % 16 == 0 && l.stride % 8 == 0 && l.between % 8 == 0 && l.between > 0;
    return aligned && x->count && m->count && x->size[1] <= INT32_MAX / 2;
}

/* So many tiles there are at most: experts without rows have none. */
static int64_t most_tiles(const bst_view *v) {
    int64_t of_rows = bst__divided_up(v[Y].size[0], BST_TILE_ROWS) + v[ENDS].count;
    return of_rows * bst__divided_up(v[Y].size[1], BST_TILE_COLUMNS);
}

static bool serves(const bst_chip *chip, const bst_view *v, moe_linear_args *a) {
    const bst_view *y = &v[Y];
    const bool adapted = v[THIN].count;
    if (!chip->warpgroups || y->dtype == BST_F32 || (uintptr_t)y->data % 16 || y->size[1] % 8) return false;
    if (!are_served(&v[X], &v[MATRICES]) || (adapted && !are_served(&v[THIN], &v[B]))) return false;
    if (adapted && v[THIN].size[1] > BST_BOX_COLUMNS) return false; /* scaled in registers: one piece */
    if (y->size[1] > INT32_MAX / 2 || y->size[0] > INT32_MAX / 2 || most_tiles(v) > INT32_MAX / 2) return false;
    *a = (moe_linear_args){.y = y->data,
                           .ends = v[ENDS].data,
                           .rows = (int32_t)y->size[0],
                           .columns = (int32_t)y->size[1],
                           .experts = (int32_t)v[ENDS].count,
                           .tile_columns = (int32_t)bst__divided_up(y->size[1], BST_TILE_COLUMNS),
                           .group = GROUP,
                           .steps = (int32_t)bst__divided_up(v[X].size[1], BST_BOX_COLUMNS)};
    return true;
}

static bst_status map(const char *op, const bst_view *x, const bst_view *m, bst_tensor_map *of_x,
                      bst_tensor_map *of_matrices) {
    const lain l = lain_of(m);
    const bst_boxes boxes = {.data = m->data,
                             .dtype = m->dtype,
                             .dims = 3,
                             .sizes = {(uint64_t)l.inner, (uint64_t)l.outer, (uint64_t)m->size[0]},
                             .strides = {(uint64_t)l.stride, (uint64_t)l.between},
                             .rows = l.across ? BST_BOX_ACROSS : BST_BOX_ROWS};
    BST_TRY(bst__cuda_tensor_map(op, x->device.device_id, x, BST_BOX_ROWS, of_x));
    return bst__cuda_map_boxes(op, x->device.device_id, &boxes, of_matrices);
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const bst_view *v, float scale) {
    const int device = v[Y].device.device_id;
    bst_chip chip;
    moe_linear_args a;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    if (!serves(&chip, v, &a)) {
        int32_t ends[BST_MOE_MOST_EXPERTS];
        BST_TRY(bst__cuda_read(exec, op, device, v[ENDS].data, ends, (size_t)v[ENDS].count * sizeof *ends));
        return one_by_one(exec, op, v, ends, scale);
    }
    int64_t parts = 0;
    bool thin_across = false;
    a.scale = scale;
    BST_TRY(map(op, &v[X], &v[MATRICES], &a.x, &a.matrices));
    if (v[THIN].count) {
        BST_TRY(map(op, &v[THIN], &v[B], &a.thin, &a.b));
        parts = bst__divided_up(v[THIN].size[1], BST_TILE_DEPTH);
        thin_across = lain_of(&v[B]).across;
    }
    bst_launch l = {.kernel = &kernel,
                    .values = {v[Y].dtype, parts, parts && scale != 1, lain_of(&v[MATRICES]).across, thin_across},
                    .block = BST_TILE_THREADS,
                    .grid_x = (unsigned)bst__lesser(most_tiles(v), chip.processors),
                    .shared = BST_TILE_SHARED};
    return bst__cuda_launch(exec, op, device, &l, &a, sizeof a);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const float scale = (float)attributes[SCALE].d;
    if (!v[Y].count) return BST_OK;
    if (v[Y].device.device_type == kDLCUDA) return run_cuda(exec, op, v, scale);
    BST_TRY(bst__moe_check_ends(op, &v[ENDS], v[X].size[0]));
    return one_by_one(exec, op, v, v[ENDS].data, scale);
}

const bst_function bst__moe_linear = {
    .name = "moe_linear",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_TORCH("moe_linear: x matrices ends thin b scale -> y"),
};

bst_status bst_moe_linear(const bst_exec *exec, const DLTensor *x, const DLTensor *matrices, const DLTensor *ends,
                          const DLTensor *thin, const DLTensor *b, double scale, DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [MATRICES] = matrices, [ENDS] = ends, [THIN] = thin, [B] = b, [Y] = y};
    return bst__run(&bst__moe_linear, exec, tensors, (bst_attribute[]){[SCALE] = {.d = scale}});
}
