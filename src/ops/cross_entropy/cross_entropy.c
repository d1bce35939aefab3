/* cross_entropy.c - softmax cross-entropy: descriptions, configuration, then the kernels of the tensors' device. */
#include <assert.h>
#include <inttypes.h>

#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_cpu.h"

static const char forward_op[] = "cross_entropy_forward", backward_op[] = "cross_entropy_backward",
                  scale_op[] = "scale";

/* ---- options and targets ------------------------------------------------------------------------------------------------------ */

bst_cross_entropy_options bst__loss_options(const bst_attribute *attributes) {
    return (bst_cross_entropy_options){.ignore_index = attributes[BST_LOSS_IGNORE_INDEX].i,
                                       .reduction = (bst_reduction)attributes[BST_LOSS_REDUCTION].i,
                                       .label_smoothing = attributes[BST_LOSS_SMOOTHING].d,
                                       .softcap = attributes[BST_LOSS_SOFTCAP].d,
                                       .logit_scale = attributes[BST_LOSS_SCALE].d,
                                       .lse_square_scale = attributes[BST_LOSS_SQUARE].d};
}

bst_status bst__loss_attributes_of(const char *op, const bst_cross_entropy_options *o, bst_attribute *attributes) {
    if (!o) return bst__error(BST_INVALID, "%s: options is NULL; they are needed", op);
    attributes[BST_LOSS_IGNORE_INDEX].i = o->ignore_index;
    attributes[BST_LOSS_REDUCTION].i = o->reduction;
    attributes[BST_LOSS_SMOOTHING].d = o->label_smoothing;
    attributes[BST_LOSS_SOFTCAP].d = o->softcap;
    attributes[BST_LOSS_SCALE].d = o->logit_scale;
    attributes[BST_LOSS_SQUARE].d = o->lse_square_scale;
    return BST_OK;
}

bst_status bst__cross_entropy_check_targets(const char *op, DLDevice device, const int64_t *target, int64_t rows,
                                            int64_t vocabulary, int64_t ignore_index) {
    if (device.device_type != kDLCPU) return bst__cuda_need_rows(op, rows, 1);
    for (int64_t i = 0; i < rows; i++) {
        if ((target[i] >= 0 && target[i] < vocabulary) || target[i] == ignore_index) continue;
        return bst__error(BST_INVALID,
                          "%s: target[%" PRId64 "] is %" PRId64 "; 0 to %" PRId64 ", or ignore_index (%" PRId64
                          "), is needed",
                          op, i, target[i], vocabulary - 1, ignore_index);
    }
    return BST_OK;
}

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { LOGITS, TARGET, CLASS_WEIGHT, NUM_ITEMS, BOTH, OUT_LOSS = BOTH, OUT_KEPT, OUT_LSE, OUT_DLOGITS };
enum { GRAD_LOSS = BOTH, IN_KEPT, IN_LSE, DLOGITS };

static bst_status check_classes(const char *op, const bst_view *v) {
    int64_t classes = v[LOGITS].rows.columns;
    if (classes >= 1 && classes <= BST_CROSS_ENTROPY_MOST_CLASSES) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: logits has rows of %" PRId64 " elements; 1 to %d are supported", op,
                      classes, BST_CROSS_ENTROPY_MOST_CLASSES);
}

#define ONE_FLOAT(name, flags) {name, flags, 1u << BST_F32, ".", BST_CONTIGUOUS}
#define INPUTS                                                                       \
    {"logits", BST_IN, BST_FLOATS, "*V", BST_ROWS, .check = check_classes},          \
        {"target", BST_IN, 1u << BST_I64, "#", BST_CONTIGUOUS},                      \
        {"class_weight", BST_IN | BST_OPTIONAL, 1u << BST_F32, "V", BST_CONTIGUOUS}, \
        ONE_FLOAT("num_items", BST_IN | BST_OPTIONAL)
/* For the backward pass lse may be the two numbers that it is made of. */
#define KEPT(flags) {"lse", flags, 1u << BST_F32, "#2", BST_CONTIGUOUS}
#define LSE(flags)  {"lse", flags, 1u << BST_F32, "#", BST_CONTIGUOUS}
/* logits itself, or contiguous and apart from it. */
#define GRADIENT(flags)                         \
    {"dlogits",                                 \
     flags,                                     \
     BST_FLOATS,                                \
     NULL,                                      \
     BST_CONTIGUOUS,                            \
     BST_LIKE(LOGITS),                          \
     BST_TYPE_OF(LOGITS, "the type of logits"), \
     BST_MAY_BE(1u << LOGITS)}
#define LOSS_OF(name, flags) {name, flags, 1u << BST_F32, "#", BST_CONTIGUOUS, BST_REDUCED(BST_LOSS_REDUCTION)}

static const bst_attribute_rule loss_rules[] = {BST_LOSS_ATTRIBUTES, {NULL}};

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_rows *r = &v[LOGITS].rows;
    return bst__cross_entropy_check_targets(op, v[LOGITS].device, v[TARGET].data, r->rows, r->columns,
                                            attributes[BST_LOSS_IGNORE_INDEX].i);
}

static bst_status check_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    if (!bst__given(&v[IN_KEPT]) && !bst__given(&v[IN_LSE]))
        return bst__error(BST_INVALID, "%s: lse is NULL; a tensor is needed", op);
    return check(op, v, attributes);
}

/* What forward and backward share of the call. `o` outlives it. */
static bst_cross_entropy_rows_call call_of(const bst_view *v, const bst_cross_entropy_options *o) {
    const bst_rows *r = &v[LOGITS].rows;
    return (bst_cross_entropy_rows_call){.device = v[LOGITS].device,
                                         .dtype = v[LOGITS].dtype,
                                         .rows = r->rows,
                                         .vocabulary = r->columns,
                                         .logits = v[LOGITS].data,
                                         .stride = r->inner_stride,
                                         .inner = r->inner < r->rows ? r->inner : 0,
                                         .outer_stride = r->outer_stride,
                                         .target = v[TARGET].data,
                                         .class_weight = v[CLASS_WEIGHT].data,
                                         .options = o,
                                         .dlogits_stride = r->columns};
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* Macros of the row kernels, in the order of their values; the last ones are the ring's alone. */
enum {
    VOCAB,
    TYPE,
    VEC,
    THREADS,
    BLOCKS,
    MODE,
    PEEL,
    FOLDED,
    HAS_WEIGHT,
    SMOOTH,
    SOFTCAP,
    Z_LOSS,
    NEGATIVE,
    CLUSTER,
    SLOTS,
    STAGED,
    AHEAD
};
#define MACROS                                                                                                \
    "VOCAB", "TYPE", "VEC", "THREADS", "BLOCKS", "MODE", "PEEL", "FOLDED", "HAS_WEIGHT", "SMOOTH", "SOFTCAP", \
        "Z_LOSS", "NEGATIVE"

static const bst_kernel rows_kernel = {"cross_entropy.cu", "cross_entropy_rows", {MACROS, "ROWS"}};
static const bst_kernel held_kernel = {"cross_entropy.cu", "cross_entropy_held", {MACROS, "HELD"}};
static const bst_kernel ring_kernel = {
    "cross_entropy_ring.cu", "cross_entropy_ring", {MACROS, "CLUSTER", "SLOTS", "STAGED", "AHEAD"}};
static const bst_kernel divisors_kernel = {"cross_entropy.cu", "cross_entropy_divisors", {"DIVISORS"}};
static const bst_kernel reduce_kernel = {"cross_entropy.cu", "cross_entropy_reduce", {"REDUCE"}};
static const bst_kernel scale_kernel = {"cross_entropy.cu", "scale", {"TYPE", "VEC", "THREADS", "SCALE"}};

enum {
    ROW_THREADS = 512,   /* of rows_kernel at most: two blocks a multiprocessor with 64 registers a thread */
    BATCH = 4,           /* vectors a thread of rows_kernel asks for at a time */
    HELD_BYTES = 65536,  /* rows up to this size are one block's */
    HELD_EACH = 8,       /* vectors of a thread there */
    HELD_THREADS = 1024, /* of a multiprocessor there: 64 registers each, just enough */
    OTHER_THREADS = 512, /* with label smoothing, softcap or rows of two strides: 128 registers each */
    HELD_SHARED = 512,   /* static, of a block there, with what the driver keeps for itself */
    SCALE_THREADS = 256
};

/* The largest power of two, at most 16, that divides. */
static int lowest_bit(uint64_t bits) {
    bits |= 16u;
    return (int)(bits & -bits);
}

/* The access width: whole vectors at 16-byte boundaries, or, where rows begin between those (a vocabulary of odd size),
 * the widest at which logits and dlogits are off alike, with single elements at both ends of a row. */
static void choose_access(const bst_cross_entropy_rows_call *c, bst_launch *l) {
    uint64_t size = (uint64_t)bst__dtype_size(c->dtype);
    uint64_t in = (uintptr_t)c->logits,
             in_steps = ((uint64_t)c->stride | (uint64_t)(c->inner > 0 ? c->outer_stride : 0)) * size;
    int apart = lowest_bit(in | in_steps), alike = 16;
    if (c->dlogits && c->dlogits != c->logits) {
        uint64_t out = (uintptr_t)c->dlogits, out_step = (uint64_t)c->dlogits_stride * size;
        int own = lowest_bit(out | out_step);
        apart = own < apart ? own : apart;
        alike = c->inner > 0 ? apart : lowest_bit((in - out) | (in_steps - out_step));
    }
    int bytes = apart == 16 ? 16 : alike;
    l->values[VEC] = bytes > (int)size ? bytes / (int)size : 1;
    l->values[PEEL] = l->values[VEC] > 1 && (apart < bytes || c->vocabulary % l->values[VEC] != 0);
}

/* Options that need more registers are off. */
static bool is_plain(const bst_launch *l) { return l->values[FOLDED] && !l->values[SMOOTH] && !l->values[SOFTCAP]; }

/* One read and one write per logit, where the chip has bulk copies and rows are whole vectors. */
static bool can_hold(const bst_cross_entropy_rows_call *c, const bst_chip *chip, const bst_launch *l) {
    return c->mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT && chip->arch >= 90 && !l->values[PEEL] &&
           l->values[VEC] * bst__dtype_size(c->dtype) == 16;
}

/* A row in one block. Blocks start over for each row: as fast as ones that stay, measured at 4096 x 32000. */
static bool choose_held(const bst_cross_entropy_rows_call *c, const bst_chip *chip, bst_launch *l) {
    int64_t vectors = c->vocabulary / l->values[VEC], shared = vectors * 16;
    int64_t threads = (vectors + HELD_EACH * 32 - 1) / (HELD_EACH * 32) * 32;
    if (shared > HELD_BYTES || shared + HELD_SHARED > chip->shared_memory) return false;
    int64_t room = is_plain(l) ? HELD_THREADS : OTHER_THREADS;
    int64_t blocks = threads < room ? room / threads : 1, fit = chip->shared_memory / (shared + HELD_SHARED);
    if (blocks > fit) blocks = fit;
    l->kernel = &held_kernel;
    l->values[THREADS] = threads;
    l->values[BLOCKS] = blocks < 16 ? blocks : 16;
    l->block = (unsigned)threads;
    l->shared = (unsigned)shared;
    l->grid_x = (unsigned)c->rows;
    return true;
}

/* A row in a cluster: sets the launch where blocks of at most `each` vectors a lane have room for it. */
static bool fit_ring(const bst_cross_entropy_rows_call *c, const bst_chip *chip, int cluster, int blocks, int ahead,
                     int64_t each, bst_launch *l) {
    enum {
        REGISTERS = 65536,   /* of a multiprocessor */
        RESERVED = 1024,     /* bytes of shared memory that the driver keeps for itself, of each block */
        BARRIERS_BYTES = 512 /* the other static arrays there, with the gaps between them */
    };
    int64_t vectors = c->vocabulary / l->values[VEC], slice = (vectors + cluster - 1) / cluster;
    int64_t warps = (slice + each * 32 - 1) / (each * 32), threads = (warps + 1) * 32;
    if (threads > 1024) return false;
    int64_t numbers = BST_CROSS_ENTROPY_TURNS * cluster * warps * BST_CROSS_ENTROPY_NUMBERS(l->values[SMOOTH]);
    int64_t room =
        (chip->shared_memory + RESERVED) / blocks - RESERVED - BARRIERS_BYTES - numbers * (int64_t)sizeof(float);
    /* On an H200 at 4096 x 128256: two slots and staged 514 us, one and staged 523, two and not staged 521. */
    int64_t slots = 3 * slice * 16 <= room ? 2 : 1;
    bool staged = (slots + 1) * slice * 16 <= room;
    if (slots * slice * 16 > room) return false;
    /* What a row takes in registers, and what else there is: found by compiling. */
    bool light = is_plain(l) && !l->values[NEGATIVE];
    int64_t lanes = (slice + warps - 1) / warps, held = (lanes + 31) / 32;
    int64_t others = !light ? 72 : !staged || c->dtype == BST_F32 ? 48 : chip->arch == 90 ? 40 : 44;
    int64_t registers = (1 + ahead) * 4 * held + others;
    int64_t warps_held = (warps + 1 + 3) / 4 * 4 * blocks; /* registers are given to four warps at a time */
    if (registers > 255 || registers * 32 * warps_held > REGISTERS) return false;
    int64_t resident = chip->processors * blocks / cluster, wanted = c->rows < resident ? c->rows : resident;
    l->kernel = &ring_kernel;
    l->values[THREADS] = threads;
    l->values[BLOCKS] = blocks;
    l->values[CLUSTER] = cluster;
    l->values[SLOTS] = slots;
    l->values[STAGED] = staged;
    l->values[AHEAD] = ahead;
    l->block = (unsigned)threads;
    l->cluster = (unsigned)cluster;
    l->shared = (unsigned)((slots + staged) * slice * 16);
    l->resident = true;
    /* At least one: a chip, or a part of one, may hold fewer blocks than a cluster has. */
    l->grid_x = (unsigned)((wanted > 0 ? wanted : 1) * cluster);
    return true;
}

/* The narrowest cluster whose blocks fit twice on a multiprocessor; else the widest that every chip takes, once. On an
 * H200, 4096 x 128256 in bf16: 8 blocks twice 514 us, 4 once 519. Most vectors a lane: few warps leave most registers. */
static bool choose_ring(const bst_cross_entropy_rows_call *c, const bst_chip *chip, bst_launch *l) {
    enum { CLUSTER_MOST = 8, EACH_LEAST = 8, EACH_BEST = 11, EACH_MOST = 20 };
    if (!c->tickets) return false;
    for (int cluster = 2; cluster <= CLUSTER_MOST; cluster *= 2)
        for (int each = EACH_BEST; each >= EACH_LEAST; each--)
            if (fit_ring(c, chip, cluster, 2, 1, each, l)) return true;
    for (int ahead = 1; ahead >= 0; ahead--)
        for (int each = EACH_BEST; each <= EACH_MOST; each++)
            if (fit_ring(c, chip, CLUSTER_MOST, 1, ahead, each, l)) return true;
    return false;
}

static void choose_rows(const bst_cross_entropy_rows_call *c, bst_launch *l) {
    int64_t vectors = c->vocabulary / l->values[VEC], threads = 32;
    while (threads < ROW_THREADS && threads * BATCH < vectors) threads *= 2;
    l->kernel = &rows_kernel;
    l->values[THREADS] = threads;
    l->values[BLOCKS] = threads == ROW_THREADS && is_plain(l) ? 2 : 1;
    l->block = (unsigned)threads;
    l->grid_x = (unsigned)c->rows;
}

static bst_status rows_cuda(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *c) {
    const bst_cross_entropy_options *o = c->options;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, c->device.device_id, &chip));
    bst_launch l = {.overlap = true};
    l.values[VOCAB] = c->vocabulary;
    l.values[TYPE] = c->dtype;
    l.values[MODE] = c->mode;
    l.values[FOLDED] = c->inner <= 0;
    l.values[HAS_WEIGHT] = c->class_weight != NULL;
    l.values[SMOOTH] = o->label_smoothing > 0;
    l.values[SOFTCAP] = o->softcap > 0;
    l.values[Z_LOSS] = o->lse_square_scale != 0;
    l.values[NEGATIVE] = o->logit_scale < 0;
    choose_access(c, &l);
    if (!can_hold(c, &chip, &l) || !(choose_held(c, &chip, &l) || choose_ring(c, &chip, &l))) choose_rows(c, &l);
    bst_row_map in = {c->inner > 0 ? c->inner : c->rows, c->stride, c->outer_stride};
    bst_row_map out = {c->rows, c->dlogits_stride, 0};
    double natural = o->softcap > 0 ? o->softcap : o->logit_scale;
    cross_entropy_rows_args args = {
        .logits = c->logits,
        .dlogits = c->dlogits,
        .target = c->target,
        .class_weight = c->class_weight,
        .divisors = c->divisors,
        .upstream = c->upstream,
        .loss_rows = c->loss_rows,
        .tickets = c->tickets,
        .lse = c->lse,
        .kept = c->kept,
        .rows = c->rows,
        .ignore_index = o->ignore_index,
        .upstream_stride = c->upstream_stride,
        .logits_map = in,
        .dlogits_map = c->dlogits == c->logits ? in : out,
        .inner = o->softcap > 0 ? (float)(o->logit_scale / o->softcap) : 0,
        .natural = (float)natural,
        .base2 = (float)(c->dtype == BST_F32 ? natural : natural * 1.4426950408889634),
        .slope = (float)o->logit_scale,
        .smoothing = (float)o->label_smoothing,
        .lse_square_scale = (float)o->lse_square_scale,
        .undivided = c->undivided,
    };
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

/* ---- the parts, for other operators too -------------------------------------------------------------------------- */

bst_status bst__cross_entropy_rows(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *call) {
    if (!call->rows) return BST_OK;
    if (call->device.device_type == kDLCUDA) return rows_cuda(exec, op, call);
    bst__parallel_for(exec, call->rows, bst__grain(call->vocabulary), BST_CPU_SELECT(bst__cross_entropy_rows_cpu),
                      (void *)(uintptr_t)call);
    return BST_OK;
}

bst_status bst__cross_entropy_divisors(const bst_exec *exec, const char *op, DLDevice device, const int64_t *target,
                                       int64_t rows, int64_t vocabulary, const float *class_weight,
                                       const float *num_items, const float *upstream,
                                       const bst_cross_entropy_options *options, int64_t chunks,
                                       bst_cross_entropy_divisors *out) {
    bool mean = options->reduction == BST_REDUCTION_MEAN;
    if (options->reduction == BST_REDUCTION_NONE) num_items = NULL;
    if (device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &divisors_kernel, .grid_x = 1, .block = 1024, .overlap = true};
        cross_entropy_divisors_args args = {.target = target,
                                            .class_weight = class_weight,
                                            .num_items = num_items,
                                            .upstream = upstream,
                                            .out = out,
                                            .tickets = bst__cross_entropy_tickets(out, 0),
                                            .rows = rows,
                                            .ignore_index = options->ignore_index,
                                            .vocabulary = (int32_t)vocabulary,
                                            .mean = mean,
                                            .chunks = (int32_t)chunks};
        return bst__cuda_launch(exec, op, device.device_id, &l, &args, sizeof args);
    }
    double weights = 0, count = 0, all = class_weight ? 0 : (double)vocabulary;
    for (int64_t i = 0; i < rows; i++) {
        if (target[i] == options->ignore_index || target[i] < 0 || target[i] >= vocabulary) continue;
        count += 1;
        weights += class_weight ? (double)class_weight[target[i]] : 1;
    }
    for (int64_t i = 0; class_weight && i < vocabulary; i++) all += (double)class_weight[i];
    *out = (bst_cross_entropy_divisors){1, 1, (float)all, 0};
    if (num_items)
        out->inverse_weight_sum = out->inverse_count = 1.0f / *num_items;
    else if (mean)
        out->inverse_weight_sum = (float)(1 / weights), out->inverse_count = (float)(1 / count);
    /* Of nothing, the loss is NaN and the gradient zero. */
    out->gradient = isfinite(out->inverse_weight_sum) ? out->inverse_weight_sum * (upstream ? *upstream : 1) : 0;
    return BST_OK;
}

bst_status bst__cross_entropy_reduce(const bst_exec *exec, const char *op, DLDevice device, const float *loss_rows,
                                     int64_t rows, const bst_cross_entropy_divisors *divisors, float *loss) {
    if (device.device_type == kDLCUDA) {
        bst_launch l = {.kernel = &reduce_kernel, .grid_x = 1, .block = 1024, .overlap = true};
        cross_entropy_reduce_args args = {loss_rows, divisors, loss, rows};
        return bst__cuda_launch(exec, op, device.device_id, &l, &args, sizeof args);
    }
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) sum += (double)loss_rows[i];
    /* Nothing left to divide: 0 * (1 / 0) is NaN, as torch has it. */
    *loss = (float)(sum == 0 && divisors ? sum * (double)divisors->inverse_weight_sum : sum);
    return BST_OK;
}

/* ---- the operators ----------------------------------------------------------------------------------------------- */

/* Whether there are divisors, or tickets to be cleared with them. */
static bool divides(const bst_cross_entropy_rows_call *c, const float *num_items) {
    const bst_cross_entropy_options *o = c->options;
    if (c->device.device_type == kDLCUDA && c->mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT) return true;
    return o->reduction == BST_REDUCTION_MEAN || (num_items && o->reduction == BST_REDUCTION_SUM) ||
           (c->class_weight && o->label_smoothing > 0);
}

/* Divisors, rows, and the sum of the loss rows where `loss` is not NULL. `memory`: room for the divisors. */
static bst_status run(const bst_exec *exec, const char *op, bst_cross_entropy_rows_call *c, const float *num_items,
                      bst_cross_entropy_divisors *memory, float *loss) {
    if (memory) {
        BST_TRY(bst__cross_entropy_divisors(exec, op, c->device, c->target, c->rows, c->vocabulary, c->class_weight,
                                            num_items, NULL, c->options, 1, memory));
        c->divisors = memory;
        c->tickets = bst__cross_entropy_tickets(memory, 0);
    }
    BST_TRY(bst__cross_entropy_rows(exec, op, c));
    if (!loss) return BST_OK;
    return bst__cross_entropy_reduce(exec, op, c->device, c->loss_rows, c->rows, c->divisors, loss);
}

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    bst_cross_entropy_options o = bst__loss_options(attributes);
    bool none = o.reduction == BST_REDUCTION_NONE, gradient = bst__given(&v[OUT_DLOGITS]);
    if (gradient && none)
        return bst__error(BST_INVALID, "%s: dlogits is wanted with reduction none; mean or sum is needed", forward_op);
    bst_cross_entropy_rows_call c = call_of(v, &o);
    c.lse = v[OUT_LSE].data;
    c.kept = v[OUT_KEPT].data;
    c.dlogits = v[OUT_DLOGITS].data;
    c.mode = gradient ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT : BST_CROSS_ENTROPY_LOSS;
    c.loss_rows = none ? v[OUT_LOSS].data : NULL;
    void *memory;
    size_t bytes = bst__cross_entropy_divisors_bytes(1) + (none ? 0 : (size_t)c.rows * sizeof(float));
    BST_TRY(bst__allocate(exec, forward_op, c.device, bytes, &memory));
    bst_cross_entropy_divisors *divisors = memory;
    if (!none) c.loss_rows = (float *)(void *)(bst__cross_entropy_tickets(divisors, 0) + 1);
    const float *num_items = v[NUM_ITEMS].data;
    bst_status status =
        run(exec, forward_op, &c, num_items, divides(&c, num_items) ? divisors : NULL, none ? NULL : v[OUT_LOSS].data);
    bst__release(exec, c.device, memory);
    return status;
}

static const bst_argument forward_arguments[] = {
    INPUTS,
    [OUT_LOSS] = LOSS_OF("loss", BST_OUT),
    [OUT_KEPT] = KEPT(BST_OUT | BST_OPTIONAL),
    [OUT_LSE] = LSE(BST_OUT | BST_OPTIONAL),
    [OUT_DLOGITS] = GRADIENT(BST_OUT | BST_OPTIONAL),
    {NULL},
};

#define OPTIONS "ignore_index reduction label_smoothing softcap logit_scale lse_square_scale"
static const bst_function forward = {
    .name = forward_op,
    .arguments = forward_arguments,
    .attributes = loss_rules,
    .check = check,
    .run = run_forward,
    BST_TORCH("cross_entropy_forward: logits target class_weight num_items " OPTIONS " -> loss lse",
              "cross_entropy_forward_inplace: logits target class_weight num_items " OPTIONS " -> loss dlogits=logits"),
};

/* Whether a tensor holds the two numbers that lse is made of. */
static bool in_pairs(const DLTensor *lse) { return lse && lse->ndim == 2 && lse->shape && lse->shape[1] == 2; }

bst_status bst_cross_entropy_forward(const bst_exec *exec, const DLTensor *logits, const DLTensor *target,
                                     const DLTensor *class_weight, const DLTensor *num_items,
                                     const bst_cross_entropy_options *o, DLTensor *loss, DLTensor *lse,
                                     DLTensor *dlogits) {
    bst_attribute attributes[BST_LOSS_COUNT];
    BST_TRY(bst__loss_attributes_of(forward_op, o, attributes));
    const DLTensor *tensors[] = {[LOGITS] = logits,
                                 [TARGET] = target,
                                 [CLASS_WEIGHT] = class_weight,
                                 [NUM_ITEMS] = num_items,
                                 [OUT_LOSS] = loss,
                                 [OUT_KEPT] = in_pairs(lse) ? lse : NULL,
                                 [OUT_LSE] = in_pairs(lse) ? NULL : lse,
                                 [OUT_DLOGITS] = dlogits};
    return bst__run(&forward, exec, tensors, attributes);
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    bst_cross_entropy_options o = bst__loss_options(attributes);
    bst_cross_entropy_rows_call c = call_of(v, &o);
    c.lse = v[IN_LSE].data;
    c.kept = v[IN_KEPT].data;
    c.dlogits = v[DLOGITS].data;
    c.mode = BST_CROSS_ENTROPY_GRADIENT;
    c.upstream = v[GRAD_LOSS].data;
    c.upstream_stride = o.reduction == BST_REDUCTION_NONE;
    const float *num_items = v[NUM_ITEMS].data;
    void *memory = NULL;
    if (divides(&c, num_items))
        BST_TRY(bst__allocate(exec, backward_op, c.device, bst__cross_entropy_divisors_bytes(1), &memory));
    bst_status status = run(exec, backward_op, &c, num_items, memory, NULL);
    bst__release(exec, c.device, memory);
    return status;
}

static const bst_argument backward_arguments[] = {
    INPUTS,
    [GRAD_LOSS] = LOSS_OF("grad_loss", BST_IN),
    [IN_KEPT] = KEPT(BST_IN | BST_OPTIONAL),
    [IN_LSE] = LSE(BST_IN | BST_OPTIONAL),
    [DLOGITS] = GRADIENT(BST_OUT),
    {NULL},
};

static const bst_function backward = {
    .name = backward_op,
    .arguments = backward_arguments,
    .attributes = loss_rules,
    .check = check_backward,
    .run = run_backward,
    BST_TORCH("cross_entropy_backward: grad_loss logits target class_weight num_items lse! " OPTIONS " -> dlogits"),
};

bst_status bst_cross_entropy_backward(const bst_exec *exec, const DLTensor *grad_loss, const DLTensor *logits,
                                      const DLTensor *target, const DLTensor *class_weight, const DLTensor *num_items,
                                      const DLTensor *lse, const bst_cross_entropy_options *o, DLTensor *dlogits) {
    bst_attribute attributes[BST_LOSS_COUNT];
    BST_TRY(bst__loss_attributes_of(backward_op, o, attributes));
    const DLTensor *tensors[] = {[LOGITS] = logits,
                                 [TARGET] = target,
                                 [CLASS_WEIGHT] = class_weight,
                                 [NUM_ITEMS] = num_items,
                                 [GRAD_LOSS] = grad_loss,
                                 [IN_KEPT] = in_pairs(lse) ? lse : NULL,
                                 [IN_LSE] = in_pairs(lse) ? NULL : lse,
                                 [DLOGITS] = dlogits};
    return bst__run(&backward, exec, tensors, attributes);
}

/* ---- scale ------------------------------------------------------------------------------------------------------- */

enum { TENSOR, FACTOR, SCALED };

static bst_status run_scale(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    const bst_view *t = &v[SCALED];
    const void *factor = v[FACTOR].data;
    if (!t->count) return BST_OK;
    if (t->device.device_type == kDLCPU) {
        scale_cpu call = {*t, *(const float *)factor};
        if (call.scale != 1) bst__parallel_for(exec, t->count, bst__grain(1), BST_CPU_SELECT(bst__scale_cpu), &call);
        return BST_OK;
    }
    bst_chip chip;
    BST_TRY(bst__cuda_chip(scale_op, t->device.device_id, &chip));
    int bytes = lowest_bit((uintptr_t)t->data), size = bst__dtype_size(t->dtype), vec = bytes > size ? bytes / size : 1;
    int64_t blocks = (t->count + (int64_t)vec * SCALE_THREADS - 1) / ((int64_t)vec * SCALE_THREADS);
    int64_t resident = (int64_t)chip.processors * 8; /* 8 blocks of 256 threads fill a multiprocessor */
    bst_launch l = {
        .kernel = &scale_kernel, .values = {t->dtype, vec, SCALE_THREADS}, .block = SCALE_THREADS, .overlap = true};
    l.grid_x = (unsigned)(blocks < resident ? blocks : resident);
    scale_args args = {t->data, factor, t->count};
    return bst__cuda_launch(exec, scale_op, t->device.device_id, &l, &args, sizeof args);
}

/* It is an output for the sake of the checks, and has no place of its own. */
static bst_status check_scaled(const char *op, const bst_view *v) {
    if (v[SCALED].data == v[TENSOR].data) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: tensor is to be written elsewhere; it is scaled where it lies", op);
}

static const bst_argument scale_arguments[] = {
    [TENSOR] = {"tensor", BST_IN, BST_FLOATS, "*N", BST_CONTIGUOUS},
    [FACTOR] = ONE_FLOAT("scale", BST_IN),
    [SCALED] = {"tensor", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(TENSOR), BST_TYPE_OF(TENSOR, "its own"),
                BST_MAY_BE(1u << TENSOR), .check = check_scaled},
    {NULL},
};

static const bst_function scale = {
    .name = scale_op,
    .arguments = scale_arguments,
    .run = run_scale,
    BST_TORCH("scale_: tensor scale -> tensor=tensor"),
};

bst_status bst_scale(const bst_exec *exec, DLTensor *tensor, const DLTensor *factor) {
    return bst__run(&scale, exec, (const DLTensor *[]){[TENSOR] = tensor, [FACTOR] = factor, [SCALED] = tensor}, NULL);
}

const bst_function *const bst__cross_entropy[] = {&forward, &backward, &scale, NULL};
