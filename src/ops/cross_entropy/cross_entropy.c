/* cross_entropy.c - softmax cross-entropy: checks, then the configuration, then the kernels of the tensors' device. */
#include <assert.h>
#include <inttypes.h>
#include <math.h>

#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_cpu.h"

static const char forward_op[] = "cross_entropy_forward", backward_op[] = "cross_entropy_backward",
                  scale_op[] = "scale";

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static bst_status check_number(const char *op, const char *name, double value, bool fine, const char *need) {
    if (fine && isfinite(value)) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is %g; %s is needed", op, name, value, need);
}

bst_status bst__cross_entropy_check_options(const char *op, const bst_cross_entropy_options *o) {
    if (!o) return bst__error(BST_INVALID, "%s: options is NULL; they are needed", op);
    if (o->reduction < BST_REDUCTION_NONE || o->reduction > BST_REDUCTION_SUM)
        return bst__error(BST_INVALID, "%s: reduction is %d; 0 (none), 1 (mean) or 2 (sum) is needed", op,
                          (int)o->reduction);
    bool share = o->label_smoothing >= 0 && o->label_smoothing <= 1;
    BST_TRY(check_number(op, "label_smoothing", o->label_smoothing, share, "a number from 0 to 1"));
    BST_TRY(check_number(op, "softcap", o->softcap, o->softcap >= 0, "a positive number, or 0 for none,"));
    BST_TRY(check_number(op, "logit_scale", o->logit_scale, true, "a finite number"));
    return check_number(op, "lse_square_scale", o->lse_square_scale, true, "a finite number");
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

/* A contiguous tensor of `count` elements, as many as logits has rows. */
static bst_status check_per_row(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor,
                                int64_t count, const bst_view *logits, bst_view *out) {
    BST_TRY(bst__view(op, name, dtypes, tensor, out));
    if (out->count != count)
        return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, one a row of logits, are needed", op,
                          name, bst__shape_text(out), count);
    BST_TRY(bst__need_contiguous(op, name, out));
    return bst__need_device(op, name, out, logits, "logits");
}

static bst_status check_scalar(const char *op, const char *name, const DLTensor *tensor, const bst_view *logits,
                               bst_view *out) {
    BST_TRY(bst__view(op, name, 1u << BST_F32, tensor, out));
    BST_TRY(bst__need_one(op, name, out));
    return bst__need_device(op, name, out, logits, "logits");
}

/* lse: [T], or [T, 2] for what the backward pass needs to be exact. */
static bst_status check_lse(const char *op, const DLTensor *tensor, const bst_view *logits, bst_view *out,
                            bst_cross_entropy_rows_call *c) {
    bool pairs = tensor && tensor->ndim == 2 && tensor->shape[1] == 2;
    BST_TRY(check_per_row(op, "lse", 1u << BST_F32, tensor, pairs ? 2 * c->rows : c->rows, logits, out));
    *(pairs ? &c->kept : &c->lse) = out->data;
    return BST_OK;
}

/* The inputs that forward and backward share, and the call that they describe. */
typedef struct problem {
    bst_view logits, target, class_weight, num_items, lse, dlogits;
    bst_rows rows;
    bst_cross_entropy_rows_call call;
} problem;

static bst_status check_input(const char *op, const DLTensor *logits, const DLTensor *target,
                              const DLTensor *class_weight, const DLTensor *num_items,
                              const bst_cross_entropy_options *options, problem *p) {
    *p = (problem){0};
    BST_TRY(bst__cross_entropy_check_options(op, options));
    BST_TRY(bst__view(op, "logits", BST_FLOATS, logits, &p->logits));
    BST_TRY(bst__rows(op, "logits", &p->logits, &p->rows));
    if (p->rows.columns < 1 || p->rows.columns > BST_CROSS_ENTROPY_MOST_CLASSES)
        return bst__error(BST_UNSUPPORTED, "%s: logits has rows of %" PRId64 " elements; 1 to %d are supported", op,
                          p->rows.columns, BST_CROSS_ENTROPY_MOST_CLASSES);
    BST_TRY(check_per_row(op, "target", 1u << BST_I64, target, p->rows.rows, &p->logits, &p->target));
    if (class_weight) {
        BST_TRY(bst__view(op, "class_weight", 1u << BST_F32, class_weight, &p->class_weight));
        BST_TRY(bst__need_dims(op, "class_weight", &p->class_weight, 1));
        BST_TRY(
            bst__need_size(op, "class_weight", &p->class_weight, 0, p->rows.columns, "the last dimension of logits"));
        BST_TRY(bst__need_contiguous(op, "class_weight", &p->class_weight));
        BST_TRY(bst__need_device(op, "class_weight", &p->class_weight, &p->logits, "logits"));
    }
    if (num_items) BST_TRY(check_scalar(op, "num_items", num_items, &p->logits, &p->num_items));
    p->call = (bst_cross_entropy_rows_call){
        .device = p->logits.device,
        .dtype = p->logits.dtype,
        .rows = p->rows.rows,
        .vocabulary = p->rows.columns,
        .logits = p->logits.data,
        .stride = p->rows.inner_stride,
        .inner = p->rows.inner < p->rows.rows ? p->rows.inner : 0,
        .outer_stride = p->rows.outer_stride,
        .target = p->target.data,
        .class_weight = p->class_weight.data,
        .options = options,
        .dlogits_stride = p->rows.columns,
    };
    return BST_OK;
}

/* dlogits: logits itself, or contiguous and apart from it. */
static bst_status check_dlogits(const char *op, const DLTensor *tensor, problem *p) {
    bst_rows rows;
    BST_TRY(bst__view(op, "dlogits", BST_FLOATS, tensor, &p->dlogits));
    BST_TRY(bst__need_same_shape(op, "dlogits", &p->dlogits, "logits", &p->logits));
    BST_TRY(bst__need_dtype(op, "dlogits", &p->dlogits, p->logits.dtype, "the type of logits"));
    BST_TRY(bst__need_device(op, "dlogits", &p->dlogits, &p->logits, "logits"));
    p->call.dlogits = p->dlogits.data;
    if (p->dlogits.data != p->logits.data || !p->logits.count) {
        BST_TRY(bst__need_contiguous(op, "dlogits", &p->dlogits));
        if (!bst__overlap(&p->dlogits, &p->logits)) return BST_OK;
        return bst__error(BST_INVALID, "%s: dlogits and logits share memory, but do not begin together", op);
    }
    BST_TRY(bst__rows(op, "dlogits", &p->dlogits, &rows));
    BST_TRY(bst__need_distinct(op, "dlogits", &p->dlogits));
    if (rows.inner == p->rows.inner && rows.inner_stride == p->rows.inner_stride &&
        rows.outer_stride == p->rows.outer_stride)
        return BST_OK;
    return bst__error(BST_INVALID, "%s: dlogits shares the memory of logits, but has other strides", op);
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
static bool divides(const problem *p, const bst_cross_entropy_options *o) {
    if (p->call.device.device_type == kDLCUDA && p->call.mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT) return true;
    return o->reduction == BST_REDUCTION_MEAN || (p->num_items.data && o->reduction == BST_REDUCTION_SUM) ||
           (p->class_weight.data && o->label_smoothing > 0);
}

/* Divisors, rows, and the sum of the loss rows where `loss` is not NULL. `memory`: room for the divisors. */
static bst_status run(const bst_exec *exec, const char *op, problem *p, bst_cross_entropy_divisors *memory,
                      float *loss) {
    bst_cross_entropy_rows_call *c = &p->call;
    if (memory) {
        BST_TRY(bst__cross_entropy_divisors(exec, op, c->device, c->target, c->rows, c->vocabulary, c->class_weight,
                                            p->num_items.data, NULL, c->options, 1, memory));
        c->divisors = memory;
        c->tickets = bst__cross_entropy_tickets(memory, 0);
    }
    BST_TRY(bst__cross_entropy_rows(exec, op, c));
    if (!loss) return BST_OK;
    return bst__cross_entropy_reduce(exec, op, c->device, c->loss_rows, c->rows, c->divisors, loss);
}

bst_status bst_cross_entropy_forward(const bst_exec *exec, const DLTensor *logits, const DLTensor *target,
                                     const DLTensor *class_weight, const DLTensor *num_items,
                                     const bst_cross_entropy_options *options, DLTensor *loss, DLTensor *lse,
                                     DLTensor *dlogits) {
    problem p;
    bst_view loss_view;
    BST_TRY(check_input(forward_op, logits, target, class_weight, num_items, options, &p));
    bool none = options->reduction == BST_REDUCTION_NONE;
    if (none) {
        BST_TRY(check_per_row(forward_op, "loss", 1u << BST_F32, loss, p.rows.rows, &p.logits, &loss_view));
    } else {
        BST_TRY(check_scalar(forward_op, "loss", loss, &p.logits, &loss_view));
    }
    if (lse) BST_TRY(check_lse(forward_op, lse, &p.logits, &p.lse, &p.call));
    if (dlogits && none)
        return bst__error(BST_INVALID, "%s: dlogits is wanted with reduction none; mean or sum is needed", forward_op);
    if (dlogits) BST_TRY(check_dlogits(forward_op, dlogits, &p));
    const bst_named outputs[] = {{"loss", &loss_view}, {"lse", &p.lse}, {"dlogits", &p.dlogits}};
    const bst_named inputs[] = {
        {"target", &p.target}, {"class_weight", &p.class_weight}, {"num_items", &p.num_items}, {"logits", &p.logits}};
    BST_TRY(bst__need_all_apart(forward_op, outputs, 2, inputs, 4));
    BST_TRY(bst__need_all_apart(forward_op, outputs + 2, 1, inputs, 3)); /* dlogits may be logits */
    BST_TRY(bst__need_all_apart(forward_op, outputs, 3, NULL, 0));
    bst_cross_entropy_rows_call *c = &p.call;
    BST_TRY(bst__cross_entropy_check_targets(forward_op, c->device, c->target, c->rows, c->vocabulary,
                                             options->ignore_index));
    c->mode = dlogits ? BST_CROSS_ENTROPY_LOSS_AND_GRADIENT : BST_CROSS_ENTROPY_LOSS;
    c->loss_rows = none ? loss_view.data : NULL;
    void *memory;
    size_t bytes = bst__cross_entropy_divisors_bytes(1) + (none ? 0 : (size_t)c->rows * sizeof(float));
    BST_TRY(bst__allocate(exec, forward_op, c->device, bytes, &memory));
    bst_cross_entropy_divisors *divisors = memory;
    if (!none) c->loss_rows = (float *)(void *)(bst__cross_entropy_tickets(divisors, 0) + 1);
    bst_status status = run(exec, forward_op, &p, divides(&p, options) ? divisors : NULL, none ? NULL : loss_view.data);
    bst__release(exec, c->device, memory);
    return status;
}

bst_status bst_cross_entropy_backward(const bst_exec *exec, const DLTensor *grad_loss, const DLTensor *logits,
                                      const DLTensor *target, const DLTensor *class_weight, const DLTensor *num_items,
                                      const DLTensor *lse, const bst_cross_entropy_options *options,
                                      DLTensor *dlogits) {
    problem p;
    bst_view upstream;
    BST_TRY(check_input(backward_op, logits, target, class_weight, num_items, options, &p));
    bool none = options->reduction == BST_REDUCTION_NONE;
    if (none) {
        BST_TRY(check_per_row(backward_op, "grad_loss", 1u << BST_F32, grad_loss, p.rows.rows, &p.logits, &upstream));
    } else {
        BST_TRY(check_scalar(backward_op, "grad_loss", grad_loss, &p.logits, &upstream));
    }
    BST_TRY(check_lse(backward_op, lse, &p.logits, &p.lse, &p.call));
    BST_TRY(check_dlogits(backward_op, dlogits, &p));
    const bst_named inputs[] = {{"target", &p.target},
                                {"class_weight", &p.class_weight},
                                {"num_items", &p.num_items},
                                {"lse", &p.lse},
                                {"grad_loss", &upstream}};
    BST_TRY(bst__need_all_apart(backward_op, (bst_named[]){{"dlogits", &p.dlogits}}, 1, inputs, 5));
    bst_cross_entropy_rows_call *c = &p.call;
    BST_TRY(bst__cross_entropy_check_targets(backward_op, c->device, c->target, c->rows, c->vocabulary,
                                             options->ignore_index));
    c->mode = BST_CROSS_ENTROPY_GRADIENT;
    c->upstream = upstream.data;
    c->upstream_stride = none;
    void *memory = NULL;
    if (divides(&p, options))
        BST_TRY(bst__allocate(exec, backward_op, c->device, bst__cross_entropy_divisors_bytes(1), &memory));
    bst_status status = run(exec, backward_op, &p, memory, NULL);
    bst__release(exec, c->device, memory);
    return status;
}

bst_status bst_scale(const bst_exec *exec, DLTensor *tensor, const DLTensor *scale) {
    bst_view t, s;
    BST_TRY(bst__view(scale_op, "tensor", BST_FLOATS, tensor, &t));
    BST_TRY(bst__need_contiguous(scale_op, "tensor", &t));
    BST_TRY(bst__view(scale_op, "scale", 1u << BST_F32, scale, &s));
    BST_TRY(bst__need_one(scale_op, "scale", &s));
    BST_TRY(bst__need_device(scale_op, "scale", &s, &t, "tensor"));
    BST_TRY(bst__need_apart(scale_op, "tensor", &t, "scale", &s));
    if (!t.count) return BST_OK;
    if (t.device.device_type == kDLCPU) {
        scale_cpu call = {t, *(const float *)s.data};
        if (call.scale != 1) bst__parallel_for(exec, t.count, bst__grain(1), BST_CPU_SELECT(bst__scale_cpu), &call);
        return BST_OK;
    }
    bst_chip chip;
    BST_TRY(bst__cuda_chip(scale_op, t.device.device_id, &chip));
    int bytes = lowest_bit((uintptr_t)t.data), size = bst__dtype_size(t.dtype), vec = bytes > size ? bytes / size : 1;
    int64_t blocks = (t.count + (int64_t)vec * SCALE_THREADS - 1) / ((int64_t)vec * SCALE_THREADS);
    int64_t resident = (int64_t)chip.processors * 8; /* 8 blocks of 256 threads fill a multiprocessor */
    bst_launch l = {
        .kernel = &scale_kernel, .values = {t.dtype, vec, SCALE_THREADS}, .block = SCALE_THREADS, .overlap = true};
    l.grid_x = (unsigned)(blocks < resident ? blocks : resident);
    scale_args args = {t.data, s.data, t.count};
    return bst__cuda_launch(exec, scale_op, t.device.device_id, &l, &args, sizeof args);
}
