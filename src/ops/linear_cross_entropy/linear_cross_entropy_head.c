/* linear_cross_entropy_head.c - see linear_cross_entropy_head.h. */
#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_args.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_head.h"

static bool on_cuda(const bst_head *h) { return h->device.device_type == kDLCUDA; }

/* ---- the problem ------------------------------------------------------------------------------------------------- */

bst_status bst__head_check_weight(const char *op, const bst_view *w) {
    if (w->size[0] < 1 || w->size[1] < 1)
        return bst__error(BST_UNSUPPORTED, "%s: weight has shape %s; both dimensions must be at least 1", op,
                          bst__shape_text(w));
    if (w->size[0] > BST_CROSS_ENTROPY_MOST_CLASSES)
        return bst__error(BST_UNSUPPORTED, "%s: weight has %" PRId64 " rows; 1 to %d are supported", op, w->size[0],
                          BST_CROSS_ENTROPY_MOST_CLASSES);
    return BST_OK;
}

/* The rows of a matrix for a product: a stride of at least their length, also where there is but one row. */
static bst_status matrix(const char *op, const char *name, const bst_view *v, bst_view *out) {
    *out = *v;
    if (out->size[0] <= 1) out->stride[0] = out->size[1];
    if (out->stride[0] >= out->size[1]) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: the rows of %s overlap; make it contiguous", op, name);
}

bst_status bst__head_begin(bst_head *h, const bst_view *hidden, const bst_view *weight) {
    BST_TRY(matrix(h->op, "hidden", hidden, &h->hidden));
    BST_TRY(matrix(h->op, "weight", weight, &h->weight));
    h->device = hidden->device, h->dtype = hidden->dtype;
    h->rows = hidden->size[0], h->vocabulary = weight->size[0], h->width = hidden->size[1];
    return BST_OK;
}

/* Rows at 16-byte boundaries keep the products on their fast path; oneDNN's of bfloat16 read blocks: see below. */
enum { ALIGNED_COLUMNS = 8, COLUMNS_READ = 32 };

int64_t bst__head_padded(const bst_head *h) {
    int64_t whole = !on_cuda(h) && h->dtype == BST_BF16 ? COLUMNS_READ : ALIGNED_COLUMNS;
    return bst__divided_up(h->vocabulary, whole) * whole;
}

static int64_t logit_bytes(const bst_head *h) { return h->wide ? 4 : bst__dtype_size(h->dtype); }

bst_head_place bst__head_gradient_place(const bst_head *h, void *logits, int64_t stride) {
    if (!h->wide || h->dtype == BST_F32) return (bst_head_place){logits, stride};
    return (bst_head_place){bst_at(logits, stride, h->dtype), 2 * stride};
}

bst_status bst__head_choose_chunks(bst_head *h, const bst_view *whole, const char *name, int64_t chunk_bytes) {
    bst_chip chip = {0};
    if (!h->rows) return BST_OK;
    int64_t kept = bst__given(whole) ? whole->size[0] : 0, rest = h->rows - kept;
    if (bst__given(whole)) {
        if (kept < 1)
            return bst__error(BST_INVALID, "%s: %s has no rows; 1 to %" PRId64 " are needed", h->op, name, h->rows);
        BST_TRY(matrix(h->op, name, whole, &h->whole));
        h->chunk_rows = kept;
        chunk_bytes = kept * (bst__head_padded(h) * logit_bytes(h) + h->beside);
    }
    h->chunks = kept > 0;
    if (!rest) return BST_OK;
    if (on_cuda(h)) BST_TRY(bst__cuda_chip(h->op, h->device.device_id, &chip));
    bool others = h->dweight.data || h->dbias.data;
    linear_cross_entropy_chunks c = {.rows = rest,
                                     .width = h->width,
                                     .row_bytes = bst__head_padded(h) * logit_bytes(h) + h->beside,
                                     .budget = chunk_bytes,
                                     .rounded = h->dweight.data && h->dtype != BST_F32 && !h->exact,
                                     .hidden_alone = h->dhidden.data && !others,
                                     .forward_alone = !h->dhidden.data && !others,
                                     .processors = chip.processors,
                                     .memory = chip.memory};
    h->chunk_rows = bst__linear_cross_entropy_chunk_rows(&c);
    if (kept && h->chunk_rows > kept) h->chunk_rows = kept;
    h->memory_rows = bst__linear_cross_entropy_memory_rows(&c, h->chunk_rows);
    h->chunks += (rest + h->chunk_rows - 1) / h->chunk_rows;
    return BST_OK;
}

/* ---- products and what stands beside them ------------------------------------------------------------------------ */

/* Row `row` of a matrix. */
static void *row_at(const bst_head *h, const void *base, int64_t row, int64_t stride) {
    return bst_at(base, row * stride, h->dtype);
}

static bst_status multiply(const bst_head *h, bst_gemm g) {
    g.device = h->device;
    g.input_type = bst__dl_type(h->dtype);
    if (!g.output_type.bits) g.output_type = g.input_type;
    g.alpha = 1;
    return bst__gemm(h->exec, h->op, &g);
}

#define KERNEL(name, ...) \
    static const bst_kernel name##_kernel = {"linear_cross_entropy.cu", "linear_cross_entropy_" #name, {__VA_ARGS__}}
KERNEL(spread, "TYPE", "OUT", "SPREAD");
KERNEL(round, "TYPE", "ROUND");
KERNEL(columns, "TYPE", "VEC", "COLUMNS");
KERNEL(bias, "TYPE", "BIAS");
enum { BLOCK = LINEAR_CROSS_ENTROPY_BLOCK, VEC = LINEAR_CROSS_ENTROPY_VEC };

/* A launch for so many threads, of which a grid has at most `most` blocks across. */
static bst_launch launch_of(const bst_head *h, const bst_kernel *kernel, int64_t threads, int64_t most) {
    int64_t blocks = (threads + BLOCK - 1) / BLOCK;
    return (bst_launch){.kernel = kernel,
                        .values = {h->dtype},
                        .block = BLOCK,
                        .grid_x = (unsigned)(blocks < 1      ? 1
                                             : blocks < most ? blocks
                                                             : most)};
}
#define LAUNCH(h, launch, ...) \
    bst__cuda_launch((h)->exec, (h)->op, (h)->device.device_id, launch, &__VA_ARGS__, sizeof __VA_ARGS__)

static bst_status run_cpu(const bst_head *h, int64_t count, int64_t work, bst_body body,
                          linear_cross_entropy_cpu call) {
    call.dtype = h->dtype;
    return bst__parallel_for(h->exec, count, bst__grain(work), body, &call);
}

static bst_dtype logits_type(const bst_head *h) { return h->wide ? BST_F32 : h->dtype; }

/* Writes the bias over each row of the logits. */
static bst_status spread(const bst_head *h, void *logits, int64_t rows, int64_t stride) {
    int64_t columns = h->vocabulary;
    if (!on_cuda(h))
        return run_cpu(
            h, rows, columns, BST_CPU_SELECT(bst__linear_cross_entropy_spread_cpu),
            (linear_cross_entropy_cpu){
                .in = h->bias.data, .out = logits, .columns = columns, .stride = stride, .out_type = logits_type(h)});
    bst_launch l = launch_of(h, &spread_kernel, columns, INT32_MAX);
    l.values[1] = logits_type(h);
    l.grid_y = (unsigned)(rows < 1024 ? rows : 1024);
    return LAUNCH(h, &l, (linear_cross_entropy_spread_args){h->bias.data, logits, rows, columns, stride});
}

static bst_status widen(const bst_head *h, const void *in, int64_t rows, int64_t stride, float *out) {
    return run_cpu(h, rows, h->width, BST_CPU_SELECT(bst__linear_cross_entropy_widen_cpu),
                   (linear_cross_entropy_cpu){.in = in, .out = out, .columns = h->width, .stride = stride});
}

/* A CPU's products do not write float32 from halves: the inputs are made float32 before, the weight a slab of rows at a
 * time, which at so many is read from the caches. */
static bst_status make_wide_on_cpu(const bst_head *h, int64_t first, int64_t rows, float *logits, int64_t stride) {
    enum { SLAB = 512 };
    void *memory;
    BST_TRY(bst__allocate(h->exec, h->op, h->device, (size_t)((rows + SLAB) * h->width) * sizeof(float), &memory));
    float *hidden = memory, *weight = hidden + rows * h->width;
    bst_status status =
        widen(h, row_at(h, h->hidden.data, first, h->hidden.stride[0]), rows, h->hidden.stride[0], hidden);
    for (int64_t column = 0; status == BST_OK && column < h->vocabulary; column += SLAB) {
        int64_t columns = h->vocabulary - column < SLAB ? h->vocabulary - column : SLAB;
        status = widen(h, row_at(h, h->weight.data, column, h->weight.stride[0]), columns, h->weight.stride[0], weight);
        bst_gemm g = {.device = h->device, .m = rows, .n = columns, .k = h->width, .b_transposed = 1, .alpha = 1};
        g.a = hidden, g.b = weight, g.lda = g.ldb = h->width;
        g.out = logits + column, g.ldo = stride, g.beta = h->bias.data ? 1 : 0;
        g.input_type = g.output_type = bst__dl_type(BST_F32);
        if (status == BST_OK) status = bst__cpu_gemm(h->exec, h->op, &g);
    }
    bst__release(h->exec, h->device, memory);
    return status;
}

/* logits = hidden weight^T + bias for rows [first, first + rows). The bias is laid down first and the product added to
 * it, so that the sum is rounded once. */
bst_status bst__head_logits(const bst_head *h, int64_t first, int64_t rows, void *logits, int64_t stride) {
    if (h->bias.data) BST_TRY(spread(h, logits, rows, stride));
    if (h->wide && h->dtype != BST_F32 && !on_cuda(h)) return make_wide_on_cpu(h, first, rows, logits, stride);
    bst_gemm g = {.m = rows, .n = h->vocabulary, .k = h->width, .b_transposed = 1, .beta = h->bias.data ? 1 : 0};
    g.a = row_at(h, h->hidden.data, first, h->hidden.stride[0]), g.lda = h->hidden.stride[0];
    g.b = h->weight.data, g.ldb = h->weight.stride[0];
    g.out = logits, g.ldo = stride;
    g.output_type = bst__dl_type(logits_type(h));
    return multiply(h, g);
}

/* The caller's logits have what they have behind each row: a copy has zeros there, see allocate_logits. */
static bst_status copy_logits(const bst_head *h, int64_t rows, bst_gemm *g, void **copy) {
    int64_t stride = bst__head_padded(h), bytes = bst__dtype_size(h->dtype);
    if (on_cuda(h) || h->dtype != BST_BF16 || !h->whole.data || stride == h->vocabulary) return BST_OK;
    BST_TRY(bst__allocate(h->exec, h->op, h->device, (size_t)(rows * stride * bytes), copy));
    memset(*copy, 0, (size_t)(rows * stride * bytes));
    for (int64_t row = 0; row < rows; row++)
        memcpy(bst_at(*copy, row * stride, h->dtype), bst_at(g->a, row * g->lda, h->dtype),
               (size_t)(h->vocabulary * bytes));
    g->a = *copy, g->lda = stride;
    return BST_OK;
}

/* dhidden of rows [first, first + rows); in float32, of inputs that are not, on a CPU by way of a rounded one. */
static bst_status make_dhidden(const bst_head *h, int64_t first, int64_t rows, bst_gemm g) {
    bool widens = h->dhidden.dtype != h->dtype && !on_cuda(h);
    void *out = bst_at(h->dhidden.data, first * h->width, h->dhidden.dtype), *rounded = NULL, *copy = NULL;
    size_t bytes = (size_t)(rows * h->width * bst__dtype_size(h->dtype));
    if (widens) BST_TRY(bst__allocate(h->exec, h->op, h->device, bytes, &rounded));
    g.out = widens ? rounded : out;
    g.output_type = bst__dl_type(widens ? h->dtype : h->dhidden.dtype);
    bst_status status = copy_logits(h, rows, &g, &copy);
    if (status == BST_OK) status = multiply(h, g);
    if (status == BST_OK && widens) status = widen(h, rounded, rows, h->width, out);
    bst__release(h->exec, h->device, copy);
    bst__release(h->exec, h->device, rounded);
    return status;
}

/* Whether dweight is float32 where weight is not: the sum itself. */
static bool is_wide(const bst_head *h) { return h->dweight.data && h->dweight.dtype != h->dtype; }

static bst_status begin_sums(bst_head *h) {
    int most = h->exact ? 1 : LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS;
    void *memory;
    if (h->dweight.data && h->dtype != BST_F32 && (is_wide(h) || h->chunks > most)) {
        size_t count = (size_t)h->dweight.count;
        if (is_wide(h)) {
            h->dweight_sum = h->dweight.data;
        } else {
            BST_TRY(bst__allocate(h->exec, h->op, h->device, count * sizeof(float), &memory));
            h->dweight_sum = memory;
        }
        if (!on_cuda(h)) {
            memset(h->dweight_sum, 0, count * sizeof(float));
            BST_TRY(bst__allocate(h->exec, h->op, h->device, count * (size_t)bst__dtype_size(h->dtype), &h->part));
        }
    }
    if (!h->dbias.data) return BST_OK;
    size_t bytes = (size_t)(h->vocabulary * (on_cuda(h) ? LINEAR_CROSS_ENTROPY_PARTS : 1)) * sizeof(double);
    BST_TRY(bst__allocate(h->exec, h->op, h->device, bytes, &memory));
    h->dbias_sum = on_cuda(h) ? memory : memset(memory, 0, bytes);
    return BST_OK;
}

static void free_sums(const bst_head *h) {
    bst__release(h->exec, h->device, h->dbias_sum);
    bst__release(h->exec, h->device, h->part);
    if (!is_wide(h)) bst__release(h->exec, h->device, h->dweight_sum);
}

static bst_status add_dbias(const bst_head *h, const void *dz, int64_t rows, int64_t stride, bool first) {
    int64_t columns = h->vocabulary;
    if (!on_cuda(h))
        return run_cpu(h, columns, rows, BST_CPU_SELECT(bst__linear_cross_entropy_add_columns_cpu),
                       (linear_cross_entropy_cpu){.in = dz, .dbias = h->dbias_sum, .rows = rows, .stride = stride});
    int64_t vec = stride % VEC == 0 && columns % VEC == 0 && (uintptr_t)dz % 16 == 0 ? VEC : 1;
    bst_launch l = launch_of(h, &columns_kernel, columns / vec, INT32_MAX);
    l.values[1] = vec;
    l.grid_y = LINEAR_CROSS_ENTROPY_PARTS;
    return LAUNCH(h, &l, (linear_cross_entropy_columns_args){dz, h->dbias_sum, rows, columns, stride, first});
}

/* The gradients of rows [first, first + rows) from dz. begins: these are the first of the sums. */
static bst_status add_gradients(const bst_head *h, int64_t first, int64_t rows, const void *dz, int64_t stride,
                                bool begins) {
    bst_gemm g = {.m = rows, .n = h->width, .k = h->vocabulary, .device_alpha = h->alpha};
    g.a = dz, g.lda = stride;
    g.b = h->weight.data, g.ldb = h->weight.stride[0];
    g.ldo = h->width;
    if (h->dhidden.data) BST_TRY(make_dhidden(h, first, rows, g));
    g.m = h->vocabulary, g.k = rows, g.a_transposed = 1;
    g.b = row_at(h, h->hidden.data, first, h->hidden.stride[0]), g.ldb = h->hidden.stride[0];
    g.out = h->part ? h->part : h->dweight_sum ? (void *)h->dweight_sum : h->dweight.data;
    g.output_type = bst__dl_type(h->dweight_sum && !h->part ? BST_F32 : h->dtype);
    g.beta = begins || h->part ? 0 : 1;
    if (h->dweight.data) BST_TRY(multiply(h, g));
    if (h->part)
        BST_TRY(run_cpu(h, h->dweight.count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_add_cpu),
                        (linear_cross_entropy_cpu){.in = h->part, .dweight = h->dweight_sum}));
    return h->dbias_sum ? add_dbias(h, dz, rows, stride, begins) : BST_OK;
}

static bst_status end_sums(const bst_head *h) {
    const bst_view *w = &h->dweight, *b = &h->dbias;
    if (is_wide(h)) {
        /* It is where it belongs. */
    } else if (h->dweight_sum && on_cuda(h)) {
        bst_launch l = launch_of(h, &round_kernel, w->count / VEC, 65536);
        BST_TRY(LAUNCH(h, &l, (linear_cross_entropy_round_args){h->dweight_sum, w->data, w->count}));
    } else if (h->dweight_sum) {
        BST_TRY(run_cpu(h, w->count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_round_cpu),
                        (linear_cross_entropy_cpu){.dweight = h->dweight_sum, .out = w->data}));
    }
    if (!h->dbias_sum) return BST_OK;
    if (!on_cuda(h))
        return run_cpu(h, b->count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_round_columns_cpu),
                       (linear_cross_entropy_cpu){.dbias = h->dbias_sum,
                                                  .out = b->data,
                                                  .scale = h->alpha ? (double)*h->alpha : 1,
                                                  .out_type = b->dtype});
    bst_launch l = launch_of(h, &bias_kernel, b->count, INT32_MAX);
    l.values[0] = b->dtype;
    return LAUNCH(h, &l, (linear_cross_entropy_bias_args){h->dbias_sum, b->data, h->alpha, b->count});
}

/* ---- the pass ---------------------------------------------------------------------------------------------------- */

/* Memory for the logits of a chunk. oneDNN multiplies bfloat16 in pairs of columns, with AMX in blocks of 32: what a
 * row lacks of a block it takes from behind it, times zero, which is a NaN where that is one. So on CPU rows are padded
 * to whole blocks and the padding is cleared; of wide logits, whose gradient lies elsewhere, by whoever writes that. */
static bst_status allocate_logits(const bst_head *h, void **memory) {
    int64_t stride = bst__head_padded(h), bytes = logit_bytes(h), gap = h->wide ? 0 : stride - h->vocabulary;
    BST_TRY(bst__allocate(h->exec, h->op, h->device, (size_t)(h->memory_rows * stride * bytes), memory));
    for (int64_t row = 0; row < h->memory_rows && gap && !on_cuda(h); row++)
        memset(bst_at(*memory, row * stride + h->vocabulary, h->dtype), 0, (size_t)(gap * bytes));
    return BST_OK;
}

/* What is done in bst__head_run, and where. */
typedef struct pass {
    void *logits;
    int64_t stride;
    bst_head_rows body;
    void *context;
    bool gradients;
} pass;

static bst_status run_chunk(const bst_head *h, const pass *p, int64_t first, int64_t rows, bool made, bool begins) {
    bst_head_place dz =
        made ? (bst_head_place){p->logits, p->stride} : bst__head_gradient_place(h, p->logits, p->stride);
    if (!made) BST_TRY(bst__head_logits(h, first, rows, p->logits, p->stride));
    if (p->body) BST_TRY(p->body(h, p->context, first, rows, p->logits, p->stride));
    return p->gradients ? add_gradients(h, first, rows, dz.at, dz.stride, begins) : BST_OK;
}

static bst_status run_chunks(const bst_head *h, const pass *p, bool made) {
    int64_t kept = h->whole.data ? h->whole.size[0] : 0, rest = h->rows - kept;
    if (made) BST_TRY(run_chunk(h, p, rest, kept, true, true));
    for (int64_t first = 0; first < rest; first += h->chunk_rows) {
        int64_t left = rest - first, rows = left < h->chunk_rows ? left : h->chunk_rows;
        BST_TRY(run_chunk(h, p, first, rows, false, first == 0 && !made));
    }
    if (kept && !made) BST_TRY(run_chunk(h, p, rest, kept, false, rest == 0));
    return p->gradients ? end_sums(h) : BST_OK;
}

bst_status bst__head_run(bst_head *h, bool made, bst_head_rows rows, void *context, bool gradients) {
    if (!h->rows) { /* sums of nothing */
        if (h->dweight.data) BST_TRY(bst__zero(h->exec, h->op, &h->dweight));
        return h->dbias.data ? bst__zero(h->exec, h->op, &h->dbias) : BST_OK;
    }
    void *memory = NULL;
    bool whole = h->whole.data;
    bst_status status = gradients ? begin_sums(h) : BST_OK;
    if (status == BST_OK && !whole) status = allocate_logits(h, &memory);
    if (status == BST_OK)
        status = run_chunks(h,
                            &(pass){whole ? h->whole.data : memory, whole ? h->whole.stride[0] : bst__head_padded(h),
                                    rows, context, gradients},
                            made);
    bst__release(h->exec, h->device, memory);
    free_sums(h);
    return status;
}
