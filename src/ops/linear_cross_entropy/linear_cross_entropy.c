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
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_args.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_cpu.h"

static const char forward_op[] = "linear_cross_entropy_forward", backward_op[] = "linear_cross_entropy_backward";

typedef struct problem {
    const bst_exec *exec;
    const char *op;
    bst_view hidden, weight, bias, dlogits, dhidden, dweight, dbias; /* data NULL where absent or not wanted */
    const float *upstream;                                           /* backward: the gradient of the loss */
    bst_cross_entropy_rows_call loss;                                /* of all rows, without their logits */
    int64_t width, chunk_rows, chunks;
} problem;

static bool on_cuda(const problem *p) { return p->loss.device.device_type == kDLCUDA; }

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Backward reads the gradient of the loss, lse and dlogits in the places of forward's outputs. */
enum { HIDDEN, WEIGHT, TARGET, BIAS, CLASS_WEIGHT, NUM_ITEMS, LOSS, LSE, DLOGITS, DHIDDEN, DWEIGHT, DBIAS };
enum { CHUNK_BYTES = BST_LOSS_COUNT };

#define AS_HIDDEN     BST_TYPE_OF(HIDDEN, "the type of hidden")
#define ARGUMENT(...) {__VA_ARGS__}
#define GRADIENT(name, of)                                                                 \
    ARGUMENT(name, BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), \
             BST_TYPE_OF(of, "as the inputs have it"))
#define ARGUMENTS(loss, direction, lse_flags)                                                                          \
    [HIDDEN] = ARGUMENT("hidden", BST_IN, BST_FLOATS, "TH", BST_ROWS),                                                 \
    [WEIGHT] = ARGUMENT("weight", BST_IN, BST_FLOATS, "VH", BST_ROWS, AS_HIDDEN),                                      \
    [TARGET] = ARGUMENT("target", BST_IN, 1u << BST_I64, "T", BST_CONTIGUOUS),                                         \
    [BIAS] = ARGUMENT("bias", BST_IN | BST_OPTIONAL, BST_FLOATS, "V", BST_CONTIGUOUS, AS_HIDDEN),                      \
    [CLASS_WEIGHT] = BST_LOSS_FLOATS("class_weight", BST_IN | BST_OPTIONAL, "V"),                                      \
    [NUM_ITEMS] = BST_LOSS_FLOATS("num_items", BST_IN | BST_OPTIONAL, "."),                                            \
    [LOSS] = BST_LOSS_FLOATS(loss, direction, "T", BST_REDUCED(BST_LOSS_REDUCTION)),                                   \
    [LSE] = BST_LOSS_FLOATS("lse", lse_flags, "T"),                                                                    \
    [DLOGITS] = ARGUMENT("dlogits", (direction) | BST_OPTIONAL, BST_FLOATS, "TV", BST_ROWS, AS_HIDDEN, BST_PADDED(8)), \
    [DHIDDEN] = GRADIENT("dhidden", HIDDEN), [DWEIGHT] = GRADIENT("dweight", WEIGHT),                                  \
    [DBIAS] = GRADIENT("dbias", BIAS)

static const bst_argument forward_arguments[] = {ARGUMENTS("loss", BST_OUT, BST_OUT | BST_OPTIONAL), {NULL}},
                          backward_arguments[] = {ARGUMENTS("grad_loss", BST_IN, BST_IN), {NULL}};

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

/* Columns of a chunk in memory: rows at 16-byte boundaries keep the products on their fast path. */
static int64_t padded(const problem *p) { return (p->loss.vocabulary + 7) / 8 * 8; }

static bst_status choose_chunks(problem *p, int64_t chunk_bytes) {
    bst_chip chip = {0};
    if (!p->loss.rows) return BST_OK;
    if (on_cuda(p)) BST_TRY(bst__cuda_chip(p->op, p->loss.device.device_id, &chip));
    p->chunk_rows = bst__linear_cross_entropy_chunk_rows(
        &(linear_cross_entropy_chunks){.rows = p->loss.rows,
                                       .width = p->width,
                                       .row_bytes = padded(p) * bst__dtype_size(p->loss.dtype),
                                       .budget = chunk_bytes,
                                       .rounded = p->dweight.data && p->loss.dtype != BST_F32,
                                       .processors = chip.processors});
    p->chunks = (p->loss.rows + p->chunk_rows - 1) / p->chunk_rows;
    return BST_OK;
}

/* ---- products and what stands beside them ------------------------------------------------------------------------ */

static DLDataType dl_type(bst_dtype dtype) {
    return (DLDataType){dtype == BST_BF16 ? kDLBfloat : kDLFloat, dtype == BST_F32 ? 32 : 16, 1};
}

/* Row `row` of a matrix. */
static void *row_at(const problem *p, const void *base, int64_t row, int64_t stride) {
    return bst_at(base, row * stride, p->loss.dtype);
}

static bst_status multiply(const problem *p, bst_gemm g) {
    g.device = p->loss.device;
    g.input_type = dl_type(p->loss.dtype);
    if (!g.output_type.bits) g.output_type = g.input_type;
    g.alpha = 1;
    return on_cuda(p) ? bst__cuda_gemm(p->exec, p->op, &g) : bst__cpu_gemm(p->exec, p->op, &g);
}

#define KERNEL(name, ...) \
    static const bst_kernel name##_kernel = {"linear_cross_entropy.cu", "linear_cross_entropy_" #name, {__VA_ARGS__}}
KERNEL(spread, "TYPE", "SPREAD");
KERNEL(round, "TYPE", "ROUND");
KERNEL(columns, "TYPE", "VEC", "COLUMNS");
KERNEL(bias, "TYPE", "BIAS");
enum { BLOCK = LINEAR_CROSS_ENTROPY_BLOCK, VEC = LINEAR_CROSS_ENTROPY_VEC };

/* A launch for so many threads, of which a grid has at most `most` blocks across. */
static bst_launch launch_of(const problem *p, const bst_kernel *kernel, int64_t threads, int64_t most) {
    int64_t blocks = (threads + BLOCK - 1) / BLOCK;
    return (bst_launch){.kernel = kernel,
                        .values = {p->loss.dtype},
                        .block = BLOCK,
                        .grid_x = (unsigned)(blocks < 1      ? 1
                                             : blocks < most ? blocks
                                                             : most)};
}
#define LAUNCH(p, launch, ...) \
    bst__cuda_launch((p)->exec, (p)->op, (p)->loss.device.device_id, launch, &__VA_ARGS__, sizeof __VA_ARGS__)

static bst_status run_cpu(const problem *p, int64_t count, int64_t work, bst_body body, linear_cross_entropy_cpu call) {
    call.dtype = p->loss.dtype;
    bst__parallel_for(p->exec, count, bst__grain(work), body, &call);
    return BST_OK;
}

/* Writes the bias over each row of the logits. */
static bst_status spread(const problem *p, void *logits, int64_t rows, int64_t stride) {
    int64_t columns = p->loss.vocabulary;
    if (!on_cuda(p))
        return run_cpu(
            p, rows, columns, BST_CPU_SELECT(bst__linear_cross_entropy_spread_cpu),
            (linear_cross_entropy_cpu){.in = p->bias.data, .out = logits, .columns = columns, .stride = stride});
    bst_launch l = launch_of(p, &spread_kernel, columns, INT32_MAX);
    l.grid_y = (unsigned)(rows < 1024 ? rows : 1024);
    return LAUNCH(p, &l, (linear_cross_entropy_spread_args){p->bias.data, logits, rows, columns, stride});
}

/* logits = hidden weight^T + bias for rows [first, first + rows). The bias is laid down first and the product added to
 * it, so that the sum is rounded once. */
static bst_status make_logits(const problem *p, int64_t first, int64_t rows, void *logits, int64_t stride) {
    if (p->bias.data) BST_TRY(spread(p, logits, rows, stride));
    bst_gemm g = {.m = rows, .n = p->loss.vocabulary, .k = p->width, .b_transposed = 1, .beta = p->bias.data ? 1 : 0};
    g.a = row_at(p, p->hidden.data, first, p->hidden.stride[0]), g.lda = p->hidden.stride[0];
    g.b = p->weight.data, g.ldb = p->weight.stride[0];
    g.out = logits, g.ldo = stride;
    return multiply(p, g);
}

/* Gradients that are sums over chunks, while they are made. */
typedef struct sums {
    /* What the sums of a chunk's logit gradients are multiplied by: the divisor and the upstream gradient, where they
     * are the same for all rows; NULL: one. The logits' own gradients, p - 1 and p, so stay in the range where their
     * type is most exact. */
    const float *alpha;
    /* Up to LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS chunks of dweight are added in its own type; more are in `dweight`, in
     * float32 (on CPU, whose products do not write float32 from halves, each is made in `part` first). */
    float *dweight;
    void *part;
    /* Float64, and rounded once: PARTS sums on CUDA, of a part of the rows each, or one; NULL: not wanted. */
    double *dbias;
} sums;

static bst_status begin_sums(const problem *p, sums *s) {
    const bst_cross_entropy_rows_call *loss = &p->loss;
    void *memory;
    if (loss->options->reduction != BST_REDUCTION_NONE)
        s->alpha = loss->divisors ? &loss->divisors->gradient : p->upstream;
    if (p->dweight.data && loss->dtype != BST_F32 && p->chunks > LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS) {
        size_t count = (size_t)p->dweight.count;
        BST_TRY(bst__allocate(p->exec, p->op, loss->device, count * sizeof(float), &memory));
        s->dweight = memory;
        if (!on_cuda(p)) {
            memset(memory, 0, count * sizeof(float));
            size_t bytes = count * (size_t)bst__dtype_size(loss->dtype);
            BST_TRY(bst__allocate(p->exec, p->op, loss->device, bytes, &s->part));
        }
    }
    if (!p->dbias.data) return BST_OK;
    size_t bytes = (size_t)(loss->vocabulary * (on_cuda(p) ? LINEAR_CROSS_ENTROPY_PARTS : 1)) * sizeof(double);
    BST_TRY(bst__allocate(p->exec, p->op, loss->device, bytes, &memory));
    s->dbias = on_cuda(p) ? memory : memset(memory, 0, bytes);
    return BST_OK;
}

static void free_sums(const problem *p, const sums *s) {
    bst__release(p->exec, p->loss.device, s->dbias);
    bst__release(p->exec, p->loss.device, s->part);
    bst__release(p->exec, p->loss.device, s->dweight);
}

static bst_status add_dbias(const problem *p, const sums *s, const void *dz, int64_t rows, int64_t stride, bool first) {
    int64_t columns = p->loss.vocabulary;
    if (!on_cuda(p))
        return run_cpu(p, columns, rows, BST_CPU_SELECT(bst__linear_cross_entropy_add_columns_cpu),
                       (linear_cross_entropy_cpu){.in = dz, .dbias = s->dbias, .rows = rows, .stride = stride});
    int64_t vec = stride % VEC == 0 && columns % VEC == 0 && (uintptr_t)dz % 16 == 0 ? VEC : 1;
    bst_launch l = launch_of(p, &columns_kernel, columns / vec, INT32_MAX);
    l.values[1] = vec;
    l.grid_y = LINEAR_CROSS_ENTROPY_PARTS;
    return LAUNCH(p, &l, (linear_cross_entropy_columns_args){dz, s->dbias, rows, columns, stride, first});
}

/* The gradients of rows [first, first + rows) from dz. */
static bst_status add_gradients(const problem *p, int64_t first, int64_t rows, const void *dz, int64_t stride,
                                const sums *s) {
    bst_gemm g = {.m = rows, .n = p->width, .k = p->loss.vocabulary, .device_alpha = s->alpha};
    g.a = dz, g.lda = stride;
    g.b = p->weight.data, g.ldb = p->weight.stride[0];
    g.ldo = p->width;
    if (p->dhidden.data) {
        g.out = row_at(p, p->dhidden.data, first, p->width);
        BST_TRY(multiply(p, g));
    }
    g.m = p->loss.vocabulary, g.k = rows, g.a_transposed = 1;
    g.b = row_at(p, p->hidden.data, first, p->hidden.stride[0]), g.ldb = p->hidden.stride[0];
    g.out = s->part ? s->part : s->dweight ? (void *)s->dweight : p->dweight.data;
    g.output_type = dl_type(s->dweight && !s->part ? BST_F32 : p->loss.dtype);
    g.beta = first == 0 || s->part ? 0 : 1;
    if (p->dweight.data) BST_TRY(multiply(p, g));
    if (s->part)
        BST_TRY(run_cpu(p, p->dweight.count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_add_cpu),
                        (linear_cross_entropy_cpu){.in = s->part, .dweight = s->dweight}));
    return s->dbias ? add_dbias(p, s, dz, rows, stride, first == 0) : BST_OK;
}

static bst_status end_sums(const problem *p, const sums *s) {
    const bst_view *w = &p->dweight, *b = &p->dbias;
    if (s->dweight && on_cuda(p)) {
        bst_launch l = launch_of(p, &round_kernel, w->count / VEC, 65536);
        BST_TRY(LAUNCH(p, &l, (linear_cross_entropy_round_args){s->dweight, w->data, w->count}));
    } else if (s->dweight) {
        BST_TRY(run_cpu(p, w->count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_round_cpu),
                        (linear_cross_entropy_cpu){.dweight = s->dweight, .out = w->data}));
    }
    if (!s->dbias) return BST_OK;
    if (!on_cuda(p))
        return run_cpu(
            p, b->count, 1, BST_CPU_SELECT(bst__linear_cross_entropy_round_columns_cpu),
            (linear_cross_entropy_cpu){.dbias = s->dbias, .out = b->data, .scale = s->alpha ? (double)*s->alpha : 1});
    bst_launch l = launch_of(p, &bias_kernel, b->count, INT32_MAX);
    return LAUNCH(p, &l, (linear_cross_entropy_bias_args){s->dbias, b->data, s->alpha, b->count});
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

/* Rows [first, first + rows), whose logits are in `logits`, or will be. */
static bst_status run_chunk(const problem *p, int64_t first, int64_t rows, void *logits, int64_t stride,
                            const sums *s) {
    bst_cross_entropy_rows_call c = p->loss;
    bool there = c.mode == BST_CROSS_ENTROPY_GRADIENT && p->dlogits.data; /* forward has made them */
    if (!there) {
        BST_TRY(make_logits(p, first, rows, logits, stride));
        c.rows = rows;
        c.logits = logits;
        c.dlogits = c.mode == BST_CROSS_ENTROPY_LOSS ? NULL : logits;
        c.stride = c.dlogits_stride = stride;
        c.target += first;
        if (c.tickets) c.tickets += first / p->chunk_rows;
        if (c.upstream) c.upstream += first;
        if (c.loss_rows) c.loss_rows += first;
        if (c.lse) c.lse += first;
        BST_TRY(bst__cross_entropy_rows(p->exec, p->op, &c));
    }
    return c.mode == BST_CROSS_ENTROPY_LOSS ? BST_OK : add_gradients(p, first, rows, logits, stride, s);
}

static bst_status run_chunks(const problem *p, void *memory, const sums *s) {
    bool saved = p->dlogits.data; /* for the backward pass, or by the forward one */
    int64_t stride = saved ? p->dlogits.stride[0] : padded(p);
    for (int64_t first = 0; first < p->loss.rows; first += p->chunk_rows) {
        int64_t left = p->loss.rows - first, rows = left < p->chunk_rows ? left : p->chunk_rows;
        BST_TRY(run_chunk(p, first, rows, saved ? p->dlogits.data : memory, stride, s));
    }
    return end_sums(p, s);
}

/* Memory for the logits of a chunk. oneDNN multiplies bfloat16 in pairs: of an odd number of columns the last is paired
 * with what lies behind it, times zero, which is a NaN where that is one. So on CPU the padding is cleared. */
static bst_status allocate_logits(const problem *p, void **memory) {
    int64_t stride = padded(p), bytes = bst__dtype_size(p->loss.dtype), gap = stride - p->loss.vocabulary;
    BST_TRY(bst__allocate(p->exec, p->op, p->loss.device, (size_t)(p->chunk_rows * stride * bytes), memory));
    for (int64_t row = 0; row < p->chunk_rows && gap && !on_cuda(p); row++)
        memset(bst_at(*memory, row * stride + p->loss.vocabulary, p->loss.dtype), 0, (size_t)(gap * bytes));
    return BST_OK;
}

/* A chunk's memory, and that of the sums, around `run_chunks`. */
static bst_status run_all(const problem *p) {
    if (!p->loss.rows) { /* sums of nothing */
        if (p->dweight.data) BST_TRY(bst__zero(p->exec, p->op, &p->dweight));
        return p->dbias.data ? bst__zero(p->exec, p->op, &p->dbias) : BST_OK;
    }
    sums s = {NULL};
    void *memory = NULL;
    bst_status status = begin_sums(p, &s);
    if (status == BST_OK && !p->dlogits.data) status = allocate_logits(p, &memory);
    if (status == BST_OK) status = run_chunks(p, memory, &s);
    bst__release(p->exec, p->loss.device, memory);
    free_sums(p, &s);
    return status;
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    bst_loss options = bst__loss_of(attributes);
    bool backward = op == backward_op, none = options.reduction == BST_REDUCTION_NONE, reduce = !backward && !none;
    bool save = bst__given(&v[DLOGITS]);
    bool now = !backward && (bst__given(&v[DHIDDEN]) || bst__given(&v[DWEIGHT]) || bst__given(&v[DBIAS]));
    problem p = {.exec = exec,
                 .op = op,
                 .bias = v[BIAS],
                 .dhidden = v[DHIDDEN],
                 .dweight = v[DWEIGHT],
                 .dbias = v[DBIAS],
                 .upstream = backward ? v[LOSS].data : NULL,
                 .width = v[HIDDEN].size[1]};
    BST_TRY(matrix(op, "hidden", &v[HIDDEN], &p.hidden));
    BST_TRY(matrix(op, "weight", &v[WEIGHT], &p.weight));
    if (save) BST_TRY(matrix(op, "dlogits", &v[DLOGITS], &p.dlogits));
    if (save && none)
        return bst__error(BST_INVALID, "%s: dlogits cannot be kept for reduction none; mean or sum is needed", op);
    if (save && now)
        return bst__error(BST_INVALID,
                          "%s: dlogits and other gradients are both given; keep the one or make the others", op);
    if (now && none) return bst__error(BST_INVALID, "%s: reduction none has no gradients before the backward pass", op);
    bst_cross_entropy_rows_call *c = &p.loss;
    c->mode = backward      ? BST_CROSS_ENTROPY_GRADIENT
              : now || save ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT
                            : BST_CROSS_ENTROPY_LOSS;
    c->device = p.hidden.device, c->dtype = p.hidden.dtype, c->options = &options, c->undivided = !none;
    c->rows = p.hidden.size[0], c->vocabulary = p.weight.size[0];
    c->target = v[TARGET].data, c->class_weight = v[CLASS_WEIGHT].data;
    c->upstream = none ? p.upstream : NULL, c->upstream_stride = 1;
    c->loss_rows = backward ? NULL : v[LOSS].data, c->lse = v[LSE].data;
    if (save)
        p.chunks = 1, p.chunk_rows = p.loss.rows;
    else
        BST_TRY(choose_chunks(&p, attributes[CHUNK_BYTES].i));
    void *divisors, *loss_rows = NULL;
    bst_status status =
        bst__cross_entropy_begin(exec, op, c, v[NUM_ITEMS].data, none ? NULL : p.upstream, p.chunks, 0, &divisors);
    if (status == BST_OK && reduce)
        status = bst__allocate(exec, op, c->device, (size_t)c->rows * sizeof(float), &loss_rows);
    if (reduce) c->loss_rows = loss_rows;
    if (status == BST_OK) status = run_all(&p);
    if (status == BST_OK && reduce) status = bst__cross_entropy_reduce(exec, op, c, v[LOSS].data);
    bst__release(exec, c->device, loss_rows);
    bst__release(exec, c->device, divisors);
    return status;
}

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    return run(exec, forward_op, v, attributes);
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    return run(exec, backward_op, v, attributes);
}

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
    const DLTensor *loss = function == &forward ? t.loss : t.grad_loss;
    const DLTensor *all[] = {t.hidden, t.weight, t.target,  t.bias,    t.class_weight, t.num_items,
                             loss,     t.lse,    t.dlogits, t.dhidden, t.dweight,      t.dbias};
    return bst__run(function, exec, all, attributes);
}

bst_status bst_linear_cross_entropy_forward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                            const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&forward, exec, tensors, options, chunk_bytes);
}

bst_status bst_linear_cross_entropy_backward(const bst_exec *exec, const bst_linear_cross_entropy_tensors *tensors,
                                             const bst_cross_entropy_options *options, int64_t chunk_bytes) {
    return call(&backward, exec, tensors, options, chunk_bytes);
}
