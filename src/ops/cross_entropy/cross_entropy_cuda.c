/* cross_entropy_cuda.c - softmax cross-entropy on CUDA: which kernel serves a call, and its launch. */
#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"

/* Macros of the row kernels, in the order of their values; the last ones are the ring's alone. */
#define ROW_MACROS(X)                                                                                        \
    X(VOCAB), X(TYPE), X(VEC), X(THREADS), X(BLOCKS), X(MODE), X(PEEL), X(FOLDED), X(HAS_WEIGHT), X(SMOOTH), \
        X(SOFTCAP), X(Z_LOSS), X(NEGATIVE)
#define RING_MACROS(X) X(CLUSTER), X(SLOTS), X(STAGED), X(AHEAD)
#define VALUE(name)    name
#define NAME(name)     #name
enum { ROW_MACROS(VALUE), RING_MACROS(VALUE) };

static const bst_kernel rows_kernel = {"cross_entropy.cu", "cross_entropy_rows", {ROW_MACROS(NAME), "ROWS"}};
static const bst_kernel registers_kernel = {
    "cross_entropy.cu", "cross_entropy_registers", {ROW_MACROS(NAME), "REGISTERS"}};
static const bst_kernel ring_kernel = {
    "cross_entropy_ring.cu", "cross_entropy_ring", {ROW_MACROS(NAME), RING_MACROS(NAME)}};
static const bst_kernel divisors_kernel = {"cross_entropy.cu", "cross_entropy_divisors", {"DIVISORS"}};
static const bst_kernel reduce_kernel = {"cross_entropy.cu", "cross_entropy_reduce", {"REDUCE"}};
static const bst_kernel scale_kernel = {"cross_entropy.cu", "scale", {"TYPE", "VEC", "THREADS", "SCALE"}};

enum {
    ROW_THREADS = 512,    /* of rows_kernel at most */
    BLOCK_BYTES = 65536,  /* rows up to this size are one block's */
    BLOCK_EACH = 8,       /* vectors of a thread there */
    PLAIN_THREADS = 1024, /* of a multiprocessor there: 64 registers each, just enough */
    OTHER_THREADS = 512,  /* with label smoothing, softcap or rows of two strides: 128 registers each */
    BLOCK_SHARED = 512,   /* static, of a block there, with what the driver keeps for itself */
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
static bool can_read_once(const bst_cross_entropy_rows_call *c, const bst_chip *chip, const bst_launch *l) {
    return c->mode == BST_CROSS_ENTROPY_LOSS_AND_GRADIENT && chip->arch >= 90 && !l->values[PEEL] &&
           l->values[VEC] * bst__dtype_size(c->dtype) == 16;
}

/* A row in one block. Blocks start over for each row: as fast as ones that stay, measured at 4096 x 32000. */
static bool choose_registers(const bst_cross_entropy_rows_call *c, const bst_chip *chip, bst_launch *l) {
    int64_t vectors = c->vocabulary / l->values[VEC], shared = vectors * 16;
    int64_t threads = (vectors + BLOCK_EACH * 32 - 1) / (BLOCK_EACH * 32) * 32;
    if (shared > BLOCK_BYTES || shared + BLOCK_SHARED > chip->shared_memory) return false;
    int64_t room = is_plain(l) ? PLAIN_THREADS : OTHER_THREADS;
    int64_t blocks = threads < room ? room / threads : 1, fit = chip->shared_memory / (shared + BLOCK_SHARED);
    if (blocks > fit) blocks = fit;
    l->kernel = &registers_kernel;
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
    int64_t numbers = BST_CROSS_ENTROPY_IN_FLIGHT * BST_CROSS_ENTROPY_ROW_NUMBERS(cluster * warps, l->values[SMOOTH]);
    int64_t room =
        (chip->shared_memory + RESERVED) / blocks - RESERVED - BARRIERS_BYTES - numbers * (int64_t)sizeof(float);
    /* On an H200 at 4096 x 128256: two slots and staged 514 us, one and staged 523, two and not staged 521. */
    int64_t slots = 3 * slice * 16 <= room ? 2 : 1;
    bool staged = (slots + 1) * slice * 16 <= room;
    if (slots * slice * 16 > room) return false;
    /* What a row takes in registers, and what else there is: found by compiling. */
    bool light = is_plain(l) && !l->values[NEGATIVE];
    int64_t lanes = (slice + warps - 1) / warps, each_lane = (lanes + 31) / 32;
    int64_t others = !light ? 72 : !staged || c->dtype == BST_F32 ? 48 : chip->arch == 90 ? 40 : 44;
    int64_t registers = (1 + ahead) * 4 * each_lane + others;
    int64_t warps_allocated = (warps + 1 + 3) / 4 * 4 * blocks; /* registers are given to four warps at a time */
    if (registers > 255 || registers * 32 * warps_allocated > REGISTERS) return false;
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
 * H200, 4096 x 128256 in bf16: 8 blocks twice 514 us, 4 once 519. Most vectors a lane: few warps leave most
 * registers. */
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
    while (threads < ROW_THREADS && threads * BST_CROSS_ENTROPY_BATCH < vectors) threads *= 2;
    l->kernel = &rows_kernel;
    l->values[THREADS] = threads;
    /* Losses alone fit three blocks of 40 registers a thread: their loads are what a multiprocessor waits for. */
    int blocks = c->mode == BST_CROSS_ENTROPY_LOSS ? 3 : 2;
    l->values[BLOCKS] = threads == ROW_THREADS && is_plain(l) ? blocks : 1;
    l->block = (unsigned)threads;
    l->grid_x = (unsigned)c->rows;
}

cross_entropy_rows_args bst__cross_entropy_args(const bst_cross_entropy_rows_call *c) {
    const bst_loss *o = c->options;
    bst_row_map in = {c->inner > 0 ? c->inner : c->rows, c->stride, c->outer_stride};
    bst_row_map out = {c->rows, c->dlogits_stride, 0};
    double natural = o->softcap > 0 ? o->softcap : o->logit_scale;
    cross_entropy_rows_args args = {.logits = c->logits, .dlogits = c->dlogits, .rows = c->rows};
    args.logits_map = in, args.dlogits_map = c->dlogits == c->logits ? in : out;
    args.target = c->target, args.ignore_index = o->ignore_index, args.class_weight = c->class_weight;
    args.divisors = c->divisors, args.tickets = c->tickets, args.undivided = c->undivided;
    args.upstream = c->upstream, args.upstream_stride = c->upstream_stride;
    args.loss_rows = c->loss_rows, args.lse = c->lse, args.lse_pairs = c->lse_pairs;
    args.inner = o->softcap > 0 ? (float)(o->logit_scale / o->softcap) : 0;
    args.natural = (float)natural;
    args.base2 = (float)(c->dtype == BST_F32 ? natural : natural * 1.4426950408889634);
    args.slope = (float)o->logit_scale;
    args.smoothing = (float)o->label_smoothing, args.lse_square_scale = (float)o->lse_square_scale;
    return args;
}

bst_status bst__cross_entropy_rows_cuda(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *c) {
    const bst_loss *o = c->options;
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
    l.values[NEGATIVE] = !(o->logit_scale > 0);
    choose_access(c, &l);
    if (!can_read_once(c, &chip, &l) || !(choose_registers(c, &chip, &l) || choose_ring(c, &chip, &l)))
        choose_rows(c, &l);
    cross_entropy_rows_args args = bst__cross_entropy_args(c);
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

/* A kernel of one block. */
static bst_launch one_block(const bst_kernel *kernel) {
    return (bst_launch){.kernel = kernel, .grid_x = 1, .block = BST_CROSS_ENTROPY_BLOCK, .overlap = true};
}

bst_status bst__cross_entropy_divisors_cuda(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *c,
                                            const float *num_items, const float *upstream, int64_t chunks,
                                            bst_cross_entropy_divisors *out) {
    bst_launch l = one_block(&divisors_kernel);
    cross_entropy_divisors_args args = {.num_items = num_items, .upstream = upstream, .out = out};
    args.target = c->target, args.rows = c->rows, args.ignore_index = c->options->ignore_index;
    args.class_weight = c->class_weight, args.vocabulary = (int32_t)c->vocabulary;
    args.mean = c->options->reduction == BST_REDUCTION_MEAN;
    args.tickets = c->tickets, args.chunks = (int32_t)chunks;
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

bst_status bst__cross_entropy_reduce_cuda(const bst_exec *exec, const char *op, const bst_cross_entropy_rows_call *c,
                                          float *loss) {
    bst_launch l = one_block(&reduce_kernel);
    cross_entropy_reduce_args args = {c->loss_rows, c->divisors, loss, c->rows};
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &args, sizeof args);
}

bst_status bst__scale_cuda(const bst_exec *exec, const char *op, const bst_view *t, const float *factor) {
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, t->device.device_id, &chip));
    int bytes = lowest_bit((uintptr_t)t->data), size = bst__dtype_size(t->dtype), vec = bytes > size ? bytes / size : 1;
    int64_t blocks = (t->count + (int64_t)vec * SCALE_THREADS - 1) / ((int64_t)vec * SCALE_THREADS);
    int64_t resident = (int64_t)chip.processors * 8; /* 8 blocks of 256 threads fill a multiprocessor */
    bst_launch l = {
        .kernel = &scale_kernel, .values = {t->dtype, vec, SCALE_THREADS}, .block = SCALE_THREADS, .overlap = true};
    l.grid_x = (unsigned)(blocks < resident ? blocks : resident);
    scale_args args = {t->data, factor, t->count};
    return bst__cuda_launch(exec, op, t->device.device_id, &l, &args, sizeof args);
}
