/* linear_cross_entropy.c - the output head and its loss, a chunk of rows at a time.
 *
 * A chunk is: logits = hidden weight^T (+ bias), their cross-entropy in place (src/ops/cross_entropy), and from the
 * logits' gradient dz the products dhidden = dz weight, dweight += dz^T hidden, and dbias by sums of our own: a product
 * with ones would add a column in one float32 after the other. Nothing waits for the device. */
#include <assert.h>
#include <inttypes.h>

#include "core/options.h"
#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_args.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_cpu.h"

/* Chunks up to which dweight is rounded to its type at each: eight roundings of partial sums add less to its error than
 * the rounding of the logits does. Beyond, it is summed in float32. */
enum { MOST_ROUNDINGS = 8 };

static const char forward_op[] = "linear_cross_entropy_forward", backward_op[] = "linear_cross_entropy_backward";

typedef struct problem {
    const bst_exec *exec;
    const char *op;
    bst_view hidden, weight, target, bias, class_weight, num_items; /* data NULL where absent */
    bst_view dhidden, dweight, dbias;                               /* data NULL where not wanted */
    const bst_loss *options;
    DLDevice device;
    bst_dtype dtype;
    int64_t tokens, vocabulary, width; /* T, V, H */
    int64_t chunk_rows, chunks;
    const bst_cross_entropy_divisors *divisors;
} problem;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Backward reads the gradient of the loss, lse and dlogits in the places of forward's outputs. */
enum { HIDDEN, WEIGHT, TARGET, BIAS, CLASS_WEIGHT, NUM_ITEMS, LOSS, LSE, DLOGITS, DHIDDEN, DWEIGHT, DBIAS };
enum { CHUNK_BYTES = BST_LOSS_COUNT };

#define AS_HIDDEN BST_TYPE_OF(HIDDEN, "the type of hidden")
#define INPUTS                                                                                                 \
    {"hidden", BST_IN, BST_FLOATS, "TH", BST_ROWS}, {"weight", BST_IN, BST_FLOATS, "VH", BST_ROWS, AS_HIDDEN}, \
        {"target", BST_IN, 1u << BST_I64, "T", BST_CONTIGUOUS},                                                \
        {"bias", BST_IN | BST_OPTIONAL, BST_FLOATS, "V", BST_CONTIGUOUS, AS_HIDDEN},                           \
        {"class_weight", BST_IN | BST_OPTIONAL, 1u << BST_F32, "V", BST_CONTIGUOUS}, {                         \
        "num_items", BST_IN | BST_OPTIONAL, 1u << BST_F32, ".", BST_CONTIGUOUS                                 \
    }
#define LOSS_OF(name, flags) {name, flags, 1u << BST_F32, "T", BST_CONTIGUOUS, BST_REDUCED(BST_LOSS_REDUCTION)}
#define KEPT(flags)          {"dlogits", flags, BST_FLOATS, "TV", BST_ROWS, AS_HIDDEN, BST_PADDED(8)}
#define GRADIENT(name, of)   \
    {name,                   \
     BST_OUT | BST_OPTIONAL, \
     BST_FLOATS,             \
     NULL,                   \
     BST_CONTIGUOUS,         \
     BST_LIKE(of),           \
     BST_TYPE_OF(of, "as the inputs have it")}
#define GRADIENTS \
    [DHIDDEN] = GRADIENT("dhidden", HIDDEN), [DWEIGHT] = GRADIENT("dweight", WEIGHT), [DBIAS] = GRADIENT("dbias", BIAS)

static const char *const meanings[] = {"Tthe rows of hidden", "Hthe last dimension of hidden", "Vthe rows of weight",
                                       NULL};

static const bst_attribute_rule rules[] = {
    BST_LOSS_ATTRIBUTES,
    [CHUNK_BYTES] = {"chunk_bytes", 'i', 0, (double)INT64_MAX, "a positive number, or 0 for the default,"},
    {NULL},
};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *w = &v[WEIGHT];
    if (w->size[0] < 1 || w->size[1] < 1)
        return bst__error(BST_UNSUPPORTED, "%s: weight has shape %s; both dimensions must be at least 1", op,
                          bst__shape_text(w));
    if (w->size[0] > BST_CROSS_ENTROPY_MOST_CLASSES)
        return bst__error(BST_UNSUPPORTED, "%s: weight has %" PRId64 " rows; 1 to %d are supported", op, w->size[0],
                          BST_CROSS_ENTROPY_MOST_CLASSES);
    return bst__cross_entropy_check_targets(op, w->device, v[TARGET].data, v[HIDDEN].size[0], w->size[0],
                                            attributes[BST_LOSS_IGNORE_INDEX].i);
}

/* The rows of a matrix for a product: a stride of at least their length, also where there is but one row. */
static bst_status matrix(const char *op, const char *name, const bst_view *v, bst_view *out) {
    *out = *v;
    if (out->size[0] <= 1) out->stride[0] = out->size[1];
    if (out->stride[0] >= out->size[1]) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: the rows of %s overlap; make it contiguous", op, name);
}

/* The problem that the arguments pose. `options` and what `p` has already outlive it. */
static bst_status pose(problem *p, const bst_view *v, bst_view *kept) {
    BST_TRY(matrix(p->op, "hidden", &v[HIDDEN], &p->hidden));
    BST_TRY(matrix(p->op, "weight", &v[WEIGHT], &p->weight));
    *kept = v[DLOGITS];
    if (bst__given(kept)) {
        BST_TRY(matrix(p->op, "dlogits", &v[DLOGITS], kept));
        if (p->options->reduction == BST_REDUCTION_NONE)
            return bst__error(BST_INVALID, "%s: dlogits cannot be kept for reduction none; mean or sum is needed",
                              p->op);
    }
    p->target = v[TARGET], p->bias = v[BIAS], p->class_weight = v[CLASS_WEIGHT], p->num_items = v[NUM_ITEMS];
    p->dhidden = v[DHIDDEN], p->dweight = v[DWEIGHT], p->dbias = v[DBIAS];
    p->tokens = p->hidden.size[0], p->width = p->hidden.size[1], p->vocabulary = p->weight.size[0];
    p->dtype = p->hidden.dtype, p->device = p->hidden.device;
    return BST_OK;
}

/* ---- chunks ------------------------------------------------------------------------------------------------------ */

/* Columns of a chunk in memory: rows at 16-byte boundaries keep the products on their fast path. */
static int64_t padded(const problem *p) { return (p->vocabulary + 7) / 8 * 8; }

enum {
    TILE = 128,        /* rows and columns of a tile: what the products round to */
    CHUNK_ROWS = 4096, /* on CUDA by default: more rows make no product faster for its size (bench/NOTES.md) */
    LEAST_ROWS = 64
};

/* Rounds of tiles, one a multiprocessor at a time, in which dhidden's product is made from chunks of `rows` rows. Its
 * tiles are few: a last round with little to do costs as much as a full one. */
static int64_t rounds(const problem *p, int64_t rows, int processors) {
    int64_t across = (p->width + TILE - 1) / TILE, whole = p->tokens / rows, rest = p->tokens % rows;
    int64_t each = ((rows + TILE - 1) / TILE * across + processors - 1) / processors;
    return whole * each + ((rest + TILE - 1) / TILE * across + processors - 1) / processors;
}

/* Rows of a chunk: at most `most`, in no more chunks than that needs; whole tiles where they can be, and on CUDA (where
 * `processors` are known) the fewest rounds. */
static int64_t chunk_rows(const problem *p, int64_t most, int processors) {
    int64_t chunks = (p->tokens + most - 1) / most, even = (p->tokens + chunks - 1) / chunks;
    int64_t best = (even + TILE - 1) / TILE * TILE;
    if (chunks == 1 || best > most) return even;
    for (int64_t rows = best + TILE; processors && rows <= most; rows += TILE)
        if (rounds(p, rows, processors) < rounds(p, best, processors)) best = rows;
    return best;
}

static bst_status choose_chunks(problem *p, int64_t chunk_bytes) {
    bool cpu = p->device.device_type == kDLCPU, by_default = chunk_bytes == 0;
    int64_t bytes = by_default ? (int64_t)(cpu ? 256 : 1664) << 20 : chunk_bytes;
    int64_t most = bytes / (padded(p) * bst__dtype_size(p->dtype));
    int64_t eighth = (p->tokens + MOST_ROUNDINGS - 1) / MOST_ROUNDINGS;
    bst_chip chip = {0};
    if (!p->tokens) return BST_OK;
    if (!cpu) BST_TRY(bst__cuda_chip(p->op, p->device.device_id, &chip));
    if (cpu && by_default) {
        /* Less than fits, where no sum of rounded chunks is made: dweight of 16 bits, which a CPU's product rounds at
         * each, is as exact as one product over all rows where it is one. Not under 256 rows: each chunk reads and
         * writes all of dweight, which at 64 costs a third of the products' time. */
        bool rounded = p->dweight.data && p->dtype != BST_F32;
        if (most > eighth && !rounded) most = eighth;
        if (most < 256) most = 256;
    } else if (by_default && most < p->tokens) {
        /* Not so many chunks that dweight would be summed in float32. */
        int64_t small = eighth > CHUNK_ROWS ? (eighth + TILE - 1) / TILE * TILE : CHUNK_ROWS;
        if (most > small) most = small;
    }
    if (most < LEAST_ROWS) most = LEAST_ROWS;
    p->chunk_rows = chunk_rows(p, most, chip.processors);
    p->chunks = (p->tokens + p->chunk_rows - 1) / p->chunk_rows;
    return BST_OK;
}

/* ---- products and what stands beside them ------------------------------------------------------------------------ */

static DLDataType dl_type(bst_dtype dtype) {
    return (DLDataType){dtype == BST_BF16 ? kDLBfloat : kDLFloat, dtype == BST_F32 ? 32 : 16, 1};
}

static void *at(const void *base, int64_t index, bst_dtype dtype) {
    return (char *)(uintptr_t)base + index * bst__dtype_size(dtype);
}

static bst_status multiply(const problem *p, bst_gemm g) {
    g.device = p->device;
    g.input_type = dl_type(p->dtype);
    return p->device.device_type == kDLCUDA ? bst__cuda_gemm(p->exec, p->op, &g) : bst__cpu_gemm(p->exec, p->op, &g);
}

static const bst_kernel spread_kernel = {"linear_cross_entropy.cu", "linear_cross_entropy_spread", {"TYPE", "SPREAD"}};
static const bst_kernel round_kernel = {"linear_cross_entropy.cu", "linear_cross_entropy_round", {"TYPE", "ROUND"}};
static const bst_kernel columns_kernel = {
    "linear_cross_entropy.cu", "linear_cross_entropy_columns", {"TYPE", "VEC", "COLUMNS"}};
static const bst_kernel bias_kernel = {"linear_cross_entropy.cu", "linear_cross_entropy_bias", {"TYPE", "BIAS"}};
enum { BLOCK = 256 };

/* Writes `row` over each row of out. */
static bst_status spread(const problem *p, const void *row, void *out, int64_t rows, int64_t columns, int64_t stride) {
    if (p->device.device_type == kDLCPU) {
        linear_cross_entropy_spread_cpu call = {row, out, columns, stride, p->dtype};
        bst__parallel_for(p->exec, rows, bst__grain(columns), BST_CPU_SELECT(bst__linear_cross_entropy_spread_cpu),
                          &call);
        return BST_OK;
    }
    bst_launch l = {.kernel = &spread_kernel, .values = {p->dtype}, .block = BLOCK};
    l.grid_x = (unsigned)((columns + BLOCK - 1) / BLOCK);
    l.grid_y = (unsigned)(rows < 1024 ? rows : 1024);
    linear_cross_entropy_spread_args args = {row, out, rows, columns, stride};
    return bst__cuda_launch(p->exec, p->op, p->device.device_id, &l, &args, sizeof args);
}

/* logits = hidden weight^T + bias for rows [first, first + rows). The bias is laid down first and the product added to
 * it, so that the sum is rounded once. */
static bst_status make_logits(const problem *p, int64_t first, int64_t rows, void *logits, int64_t stride) {
    if (p->bias.data) BST_TRY(spread(p, p->bias.data, logits, rows, p->vocabulary, stride));
    return multiply(p, (bst_gemm){.m = rows,
                                  .n = p->vocabulary,
                                  .k = p->width,
                                  .a = at(p->hidden.data, first * p->hidden.stride[0], p->dtype),
                                  .lda = p->hidden.stride[0],
                                  .b = p->weight.data,
                                  .ldb = p->weight.stride[0],
                                  .b_transposed = 1,
                                  .out = logits,
                                  .ldo = stride,
                                  .output_type = dl_type(p->dtype),
                                  .alpha = 1,
                                  .beta = p->bias.data ? 1 : 0});
}

/* A gradient that is a sum over chunks. Up to MOST_ROUNDINGS chunks are added in the gradient's own type; more are
 * added up in `sum`, in float32 (on CPU, whose products do not write float32 from halves, each lands in `part` first).
 */
typedef struct total {
    void *out;
    float *sum;
    void *part;
    int64_t count;
} total;

static bst_status total_begin(const problem *p, const bst_view *gradient, total *t) {
    *t = (total){.out = gradient->data, .count = gradient->count};
    if (!t->out || p->dtype == BST_F32 || p->chunks <= MOST_ROUNDINGS) return BST_OK;
    void *memory;
    BST_TRY(bst__allocate(p->exec, p->op, p->device, (size_t)t->count * sizeof(float), &memory));
    t->sum = memory;
    if (p->device.device_type == kDLCUDA) return BST_OK;
    memset(t->sum, 0, (size_t)t->count * sizeof(float));
    return bst__allocate(p->exec, p->op, p->device, (size_t)(t->count * bst__dtype_size(p->dtype)), &t->part);
}

/* Adds the product g, of which a chunk's operands are set. */
static bst_status total_add(const problem *p, const total *t, bst_gemm g, bool first) {
    bool f32_out = t->sum && !t->part;
    g.out = f32_out ? (void *)t->sum : t->part ? t->part : t->out;
    g.output_type = dl_type(f32_out ? BST_F32 : p->dtype);
    g.beta = first || t->part ? 0 : 1;
    BST_TRY(multiply(p, g));
    if (!t->part) return BST_OK;
    linear_cross_entropy_sum_cpu call = {.in = t->part, .sum = t->sum, .dtype = p->dtype};
    bst__parallel_for(p->exec, t->count, bst__grain(1), BST_CPU_SELECT(bst__linear_cross_entropy_add_cpu), &call);
    return BST_OK;
}

static bst_status total_end(const problem *p, const total *t) {
    if (!t->sum) return BST_OK;
    if (p->device.device_type == kDLCPU) {
        linear_cross_entropy_sum_cpu call = {.sum = t->sum, .out = t->out, .dtype = p->dtype};
        bst__parallel_for(p->exec, t->count, bst__grain(1), BST_CPU_SELECT(bst__linear_cross_entropy_round_cpu), &call);
        return BST_OK;
    }
    bst_launch l = {.kernel = &round_kernel, .values = {p->dtype}, .block = BLOCK};
    int64_t blocks = (t->count / 4 + BLOCK - 1) / BLOCK;
    l.grid_x = (unsigned)(blocks < 1 ? 1 : blocks < 65536 ? blocks : 65536);
    linear_cross_entropy_round_args args = {t->sum, t->out, t->count};
    return bst__cuda_launch(p->exec, p->op, p->device.device_id, &l, &args, sizeof args);
}

static void total_free(const problem *p, total *t) {
    bst__release(p->exec, p->device, t->part);
    bst__release(p->exec, p->device, t->sum);
}

/* dbias, the sum over all rows: in float64, and rounded once. On CUDA `columns` are PARTS sums, of a part of the rows
 * each. `alpha` multiplies it where it is not NULL. */
typedef struct bias_total {
    double *columns; /* NULL: not wanted */
    const float *alpha;
} bias_total;

static bst_status bias_begin(const problem *p, const float *alpha, bias_total *t) {
    *t = (bias_total){.alpha = alpha};
    if (!p->dbias.data) return BST_OK;
    bool cpu = p->device.device_type == kDLCPU;
    size_t bytes = (size_t)(p->vocabulary * (cpu ? 1 : LINEAR_CROSS_ENTROPY_PARTS)) * sizeof *t->columns;
    void *memory;
    BST_TRY(bst__allocate(p->exec, p->op, p->device, bytes, &memory));
    t->columns = cpu ? memset(memory, 0, bytes) : memory;
    return BST_OK;
}

static bst_status bias_add(const problem *p, const bias_total *t, const void *dz, int64_t rows, int64_t stride,
                           bool first) {
    if (!t->columns) return BST_OK;
    if (p->device.device_type == kDLCPU) {
        linear_cross_entropy_columns_cpu call = {
            .in = dz, .sum = t->columns, .rows = rows, .stride = stride, .dtype = p->dtype};
        bst__parallel_for(p->exec, p->vocabulary, bst__grain(rows),
                          BST_CPU_SELECT(bst__linear_cross_entropy_add_columns_cpu), &call);
        return BST_OK;
    }
    enum { VEC = 4 };
    bool wide = stride % VEC == 0 && p->vocabulary % VEC == 0 && (uintptr_t)dz % 16 == 0;
    bst_launch l = {.kernel = &columns_kernel, .values = {p->dtype, wide ? VEC : 1}, .block = BLOCK};
    int64_t threads = p->vocabulary / l.values[1];
    l.grid_x = (unsigned)((threads + BLOCK - 1) / BLOCK);
    l.grid_y = LINEAR_CROSS_ENTROPY_PARTS;
    linear_cross_entropy_columns_args args = {dz, t->columns, rows, p->vocabulary, stride, first};
    return bst__cuda_launch(p->exec, p->op, p->device.device_id, &l, &args, sizeof args);
}

static bst_status bias_end(const problem *p, const bias_total *t) {
    if (!t->columns) return BST_OK;
    if (p->device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &bias_kernel, .values = {p->dtype}, .block = BLOCK};
        l.grid_x = (unsigned)((p->vocabulary + BLOCK - 1) / BLOCK);
        linear_cross_entropy_bias_args args = {t->columns, p->dbias.data, t->alpha, p->vocabulary};
        return bst__cuda_launch(p->exec, p->op, p->device.device_id, &l, &args, sizeof args);
    }
    linear_cross_entropy_columns_cpu call = {
        .sum = t->columns, .out = p->dbias.data, .scale = t->alpha ? (double)*t->alpha : 1, .dtype = p->dtype};
    bst__parallel_for(p->exec, p->vocabulary, bst__grain(1),
                      BST_CPU_SELECT(bst__linear_cross_entropy_round_columns_cpu), &call);
    return BST_OK;
}

static void bias_free(const problem *p, bias_total *t) { bst__release(p->exec, p->device, t->columns); }

/* The gradients of rows [first, first + rows) from dz, each multiplied by *alpha where alpha is not NULL. */
static bst_status make_gradients(const problem *p, int64_t first, int64_t rows, const void *dz, int64_t stride,
                                 const float *alpha, const total *dweight, const bias_total *dbias) {
    const void *hidden = at(p->hidden.data, first * p->hidden.stride[0], p->dtype);
    if (p->dhidden.data)
        BST_TRY(multiply(p, (bst_gemm){.m = rows,
                                       .n = p->width,
                                       .k = p->vocabulary,
                                       .a = dz,
                                       .lda = stride,
                                       .b = p->weight.data,
                                       .ldb = p->weight.stride[0],
                                       .out = at(p->dhidden.data, first * p->width, p->dtype),
                                       .ldo = p->width,
                                       .output_type = dl_type(p->dtype),
                                       .alpha = 1,
                                       .device_alpha = alpha}));
    if (dweight->out) {
        bst_gemm g = {.m = p->vocabulary,
                      .n = p->width,
                      .k = rows,
                      .a = dz,
                      .lda = stride,
                      .a_transposed = 1,
                      .b = hidden,
                      .ldb = p->hidden.stride[0],
                      .ldo = p->width,
                      .alpha = 1,
                      .device_alpha = alpha};
        BST_TRY(total_add(p, dweight, g, first == 0));
    }
    return bias_add(p, dbias, dz, rows, stride, first == 0);
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

/* What each pass over the chunks does with their logits. */
typedef struct pass {
    bst_cross_entropy_mode mode;
    float *loss_rows, *lse;
    const float *upstream; /* GRADIENT: of the loss, per row where reduction is none */
    void *kept;            /* memory of all logits, or NULL: a chunk's workspace */
    int64_t kept_stride;
} pass;

/* What the sums of a chunk's logit gradients are multiplied by: the divisor and the upstream gradient, where they are
 * the same for all rows. The logits' own gradients, p - 1 and p, so stay in the range where their type is most exact.
 */
static const float *alpha_of(const problem *p, const pass *r) {
    if (p->options->reduction == BST_REDUCTION_NONE) return NULL;
    return p->divisors ? &p->divisors->gradient : r->upstream;
}

static bst_status run_chunks(const problem *p, const pass *r, void *memory, const total *dweight,
                             const bias_total *dbias) {
    int64_t stride = r->kept ? r->kept_stride : padded(p);
    bool per_row = p->options->reduction == BST_REDUCTION_NONE;
    for (int64_t first = 0; first < p->tokens; first += p->chunk_rows) {
        int64_t rows = p->tokens - first < p->chunk_rows ? p->tokens - first : p->chunk_rows;
        void *logits = r->kept ? at(r->kept, first * stride, p->dtype) : memory;
        BST_TRY(make_logits(p, first, rows, logits, stride));
        bst_cross_entropy_rows_call call = {
            .device = p->device,
            .mode = r->mode,
            .dtype = p->dtype,
            .rows = rows,
            .vocabulary = p->vocabulary,
            .logits = logits,
            .stride = stride,
            .target = (const int64_t *)p->target.data + first,
            .class_weight = p->class_weight.data,
            .options = p->options,
            .divisors = p->divisors,
            .undivided = !per_row,
            .upstream = per_row && r->upstream ? r->upstream + first : NULL,
            .upstream_stride = 1,
            .tickets = p->divisors ? bst__cross_entropy_tickets(p->divisors, first / p->chunk_rows) : NULL,
            .loss_rows = r->loss_rows ? r->loss_rows + first : NULL,
            .lse = r->lse ? r->lse + first : NULL,
            .dlogits = r->mode == BST_CROSS_ENTROPY_LOSS ? NULL : logits,
            .dlogits_stride = stride,
        };
        BST_TRY(bst__cross_entropy_rows(p->exec, p->op, &call));
        if (r->mode != BST_CROSS_ENTROPY_LOSS)
            BST_TRY(make_gradients(p, first, rows, logits, stride, alpha_of(p, r), dweight, dbias));
    }
    BST_TRY(total_end(p, dweight));
    return bias_end(p, dbias);
}

/* Memory for the logits of a chunk. oneDNN multiplies bfloat16 in pairs: of an odd number of columns the last is paired
 * with what lies behind it, times zero, which is a NaN where that is one. So on CPU the padding is cleared. */
static bst_status allocate_logits(const problem *p, void **memory) {
    int64_t stride = padded(p), bytes = bst__dtype_size(p->dtype);
    BST_TRY(bst__allocate(p->exec, p->op, p->device, (size_t)(p->chunk_rows * stride * bytes), memory));
    if (p->device.device_type != kDLCPU) return BST_OK;
    for (int64_t row = 0; row < p->chunk_rows && stride > p->vocabulary; row++)
        memset(at(*memory, row * stride + p->vocabulary, p->dtype), 0, (size_t)((stride - p->vocabulary) * bytes));
    return BST_OK;
}

/* A chunk's memory, and that of the sums, around `run_chunks`. */
static bst_status run_pass(const problem *p, const pass *r) {
    total dweight = {0};
    bias_total dbias = {.alpha = NULL};
    void *memory = NULL;
    bst_status status = total_begin(p, &p->dweight, &dweight);
    if (status == BST_OK) status = bias_begin(p, alpha_of(p, r), &dbias);
    if (status == BST_OK && !r->kept) status = allocate_logits(p, &memory);
    if (status == BST_OK) status = run_chunks(p, r, memory, &dweight, &dbias);
    bst__release(p->exec, p->device, memory);
    bias_free(p, &dbias);
    total_free(p, &dweight);
    return status;
}

/* No row: sums of nothing. */
static bst_status zero_gradients(const problem *p) {
    if (p->dweight.data) BST_TRY(bst__zero(p->exec, p->op, &p->dweight));
    if (p->dbias.data) BST_TRY(bst__zero(p->exec, p->op, &p->dbias));
    return BST_OK;
}

/* Runs `body` with the divisors of the whole problem. */
static bst_status with_divisors(problem *p, const pass *r, bst_status (*body)(const problem *, const pass *)) {
    bool divided = p->options->reduction == BST_REDUCTION_MEAN || p->num_items.data || p->class_weight.data;
    /* The tickets of each chunk's rows are cleared with them. */
    if (p->device.device_type == kDLCUDA && r->mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT) divided = true;
    void *memory = NULL;
    bst_status status = BST_OK;
    if (divided) {
        BST_TRY(bst__allocate(p->exec, p->op, p->device, bst__cross_entropy_divisors_bytes(p->chunks), &memory));
        status = bst__cross_entropy_divisors(p->exec, p->op, p->device, p->target.data, p->tokens, p->vocabulary,
                                             p->class_weight.data, p->num_items.data,
                                             p->options->reduction == BST_REDUCTION_NONE ? NULL : r->upstream,
                                             p->options, p->chunks, memory);
        p->divisors = memory;
    }
    if (status == BST_OK) status = body(p, r);
    bst__release(p->exec, p->device, memory);
    return status;
}

/* The loss rows' memory and their sum, around a pass that makes them. */
static bst_status reduced(const problem *p, const pass *r) {
    if (p->options->reduction == BST_REDUCTION_NONE) return run_pass(p, r);
    void *memory;
    BST_TRY(bst__allocate(p->exec, p->op, p->device, (size_t)p->tokens * sizeof(float), &memory));
    pass inner = *r;
    inner.loss_rows = memory;
    bst_status status = p->tokens ? run_pass(p, &inner) : zero_gradients(p);
    if (status == BST_OK)
        status = bst__cross_entropy_reduce(p->exec, p->op, p->device, memory, p->tokens, p->divisors, r->loss_rows);
    bst__release(p->exec, p->device, memory);
    return status;
}

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    bst_loss options = bst__loss_of(attributes);
    problem p = {.exec = exec, .op = forward_op, .options = &options};
    bst_view kept;
    BST_TRY(pose(&p, v, &kept));
    bool keep = bst__given(&kept), now = bst__given(&p.dhidden) || bst__given(&p.dweight) || bst__given(&p.dbias);
    if (keep && now)
        return bst__error(
            BST_INVALID, "%s: dlogits and other gradients are both given; keep the one or make the others", forward_op);
    if (now && options.reduction == BST_REDUCTION_NONE)
        return bst__error(BST_INVALID, "%s: reduction none has no gradients before the backward pass", forward_op);
    BST_TRY(choose_chunks(&p, attributes[CHUNK_BYTES].i));
    if (keep) p.chunks = 1, p.chunk_rows = p.tokens;
    pass r = {.mode = now || keep ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT : BST_CROSS_ENTROPY_LOSS,
              .loss_rows = v[LOSS].data,
              .lse = v[LSE].data,
              .kept = kept.data,
              .kept_stride = kept.stride[0]};
    return with_divisors(&p, &r, reduced);
}

static const bst_argument forward_arguments[] = {
    INPUTS,
    [LOSS] = LOSS_OF("loss", BST_OUT),
    [LSE] = {"lse", BST_OUT | BST_OPTIONAL, 1u << BST_F32, "T", BST_CONTIGUOUS},
    [DLOGITS] = KEPT(BST_OUT | BST_OPTIONAL),
    GRADIENTS,
    {NULL},
};

#define OPTIONS "ignore_index reduction label_smoothing softcap logit_scale lse_square_scale chunk_bytes"
static const bst_function forward = {
    .name = forward_op,
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_forward,
    BST_TORCH("linear_cross_entropy_forward: hidden weight target bias class_weight num_items " OPTIONS
              " -> loss lse dlogits? dhidden? dweight? dbias?"),
};

/* The gradients from logit gradients that the forward pass left. */
static bst_status multiply_kept(const problem *p, const pass *r) {
    total dweight = {.out = p->dweight.data, .count = p->dweight.count};
    bias_total dbias;
    bst_status status = bias_begin(p, alpha_of(p, r), &dbias);
    if (status == BST_OK)
        status = make_gradients(p, 0, p->tokens, r->kept, r->kept_stride, alpha_of(p, r), &dweight, &dbias);
    if (status == BST_OK) status = bias_end(p, &dbias);
    bias_free(p, &dbias);
    return status;
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    bst_loss options = bst__loss_of(attributes);
    problem p = {.exec = exec, .op = backward_op, .options = &options};
    bst_view kept;
    BST_TRY(pose(&p, v, &kept));
    if (!p.tokens) return zero_gradients(&p);
    if (bst__given(&kept)) {
        pass kept_pass = {.upstream = v[LOSS].data, .kept = kept.data, .kept_stride = kept.stride[0]};
        return with_divisors(&p, &kept_pass, multiply_kept);
    }
    BST_TRY(choose_chunks(&p, attributes[CHUNK_BYTES].i));
    pass r = {.mode = BST_CROSS_ENTROPY_GRADIENT, .lse = v[LSE].data, .upstream = v[LOSS].data};
    return with_divisors(&p, &r, run_pass);
}

static const bst_argument backward_arguments[] = {
    INPUTS,
    [LOSS] = LOSS_OF("grad_loss", BST_IN),
    [LSE] = {"lse", BST_IN, 1u << BST_F32, "T", BST_CONTIGUOUS},
    [DLOGITS] = KEPT(BST_IN | BST_OPTIONAL),
    GRADIENTS,
    {NULL},
};

static const bst_function backward = {
    .name = backward_op,
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_backward,
    BST_TORCH("linear_cross_entropy_backward: grad_loss hidden weight target bias class_weight num_items lse "
              "dlogits " OPTIONS " -> dhidden? dweight? dbias?"),
};

const bst_function *const bst__linear_cross_entropy[] = {&forward, &backward, NULL};

static bst_status call(const bst_function *function, const bst_exec *exec,
                       const bst_linear_cross_entropy_tensors *tensors, const bst_cross_entropy_options *options,
                       int64_t chunk_bytes) {
    bst_linear_cross_entropy_tensors t;
    bst_attribute attributes[BST_LOSS_COUNT + 1] = {[CHUNK_BYTES].i = chunk_bytes};
    BST_TRY(bst__options(function->name, "tensors", tensors, &t, sizeof t));
    BST_TRY(bst__loss_attributes(function->name, options, attributes));
    return bst__run(function, exec,
                    (const DLTensor *[]){[HIDDEN] = t.hidden,
                                         [WEIGHT] = t.weight,
                                         [TARGET] = t.target,
                                         [BIAS] = t.bias,
                                         [CLASS_WEIGHT] = t.class_weight,
                                         [NUM_ITEMS] = t.num_items,
                                         [LOSS] = function == &forward ? t.loss : t.grad_loss,
                                         [LSE] = t.lse,
                                         [DLOGITS] = t.dlogits,
                                         [DHIDDEN] = t.dhidden,
                                         [DWEIGHT] = t.dweight,
                                         [DBIAS] = t.dbias},
                    attributes);
}

bst_status bst_linear_cross_entropy_forward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                            const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&forward, exec, tensors, options, chunk_bytes);
}

bst_status bst_linear_cross_entropy_backward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                             const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&backward, exec, tensors, options, chunk_bytes);
}
