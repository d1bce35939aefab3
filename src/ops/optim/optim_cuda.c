/* optim_cuda.c - lists of tensors as tables in kernels' arguments, and the launches. */
#include <string.h>

#include "cuda/cuda.h"
#include "ops/optim/optim.h"

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { TABLE, CHUNK, THREADS, TYPE, MOMENTS, MASTER, STOCHASTIC, MAXIMIZE, WRITE_GRADIENT, MIN_BLOCKS };
static const bst_kernel adamw_kernel = {"optim.cu",
                                        "optim_adamw",
                                        {"TABLE", "CHUNK", "THREADS", "TYPE", "MOMENTS", "MASTER", "STOCHASTIC",
                                         "MAXIMIZE", "WRITE_GRADIENT", "MIN_BLOCKS", "ADAMW", NULL}};
static const bst_kernel squares_kernel = {
    "optim.cu", "optim_squares", {"TABLE", "CHUNK", "THREADS", "TYPE", "SQUARES", NULL}};
static const bst_kernel scale_kernel = {
    "optim.cu", "optim_scale", {"TABLE", "CHUNK", "THREADS", "TYPE", "SCALE", NULL}};
static const bst_kernel begin_kernel = {"optim.cu", "optim_begin", {"THREADS", "BEGIN", NULL}};
static const bst_kernel norm_kernel = {"optim.cu", "optim_norm", {"THREADS", "NORM", NULL}};

/* Elements of a block: enough that finding its tensor does not show, few enough that the last blocks end together. Of a
 * sum more, so that few partial sums are left to the one block that adds them up. On an H200, Qwen3-8B's parameters in
 * bfloat16, ms: 28.8 to 29.4 by blocks of 4096, 29.6 of 8192, 29.7 of 16384, 30.4 of 65536; rounded by chance 30.4,
 * 29.7, 30.2. */
enum { ADAMW_CHUNK = 8192, CODES_CHUNK = 16384, SUM_THREADS = 256, SUM_CHUNK = 65536 };

/* Threads of a block, and blocks of a multiprocessor that registers must leave room for: accesses in flight are what
 * counts. What is not 16 bits throughout has twice the registers. Moments of 8 bits want threads above all, for most of
 * their time is instructions: of small blocks, which end one by one, as many as spill no register on any chip. */
static void occupancy(const optim_item *item, bool stochastic, int64_t *threads, int64_t *blocks) {
    const bool wide = item->type == BST_F32 || item->moments == BST_F32 || item->tensor.master;
    const bool codes = item->moments == OPTIM_U8_CODE;
    *threads = codes ? 128 : 256;
    *blocks = wide ? 3 : 4;
    if (codes) *blocks = wide ? 5 : stochastic ? 9 : 10;
}

/* Elements of a block. */
static int64_t chunk_of(const optim_item *item) { return item->moments == OPTIM_U8_CODE ? CODES_CHUNK : ADAMW_CHUNK; }

/* ---- tables ------------------------------------------------------------------------------------------------------ */

/* Arguments of a kernel: a head, the first block of each tensor, the tensors. They are as wide as the list is long. */
typedef struct table {
    int capacity, tensors;
    int64_t blocks;
    size_t head, each;
    union {
        unsigned char bytes[32764];
        uint64_t aligned;
    } arguments;
} table;

static void empty(table *t) { t->tensors = 0, t->blocks = 0; }

static void choose(table *t, const bst_chip *chip, int64_t tensors, int narrow, int wide) {
    t->capacity = tensors > narrow && chip->arguments >= (int)sizeof t->arguments.bytes ? wide : narrow;
    empty(t);
}

static size_t table_bytes(const table *t) { return t->head + (size_t)t->capacity * (sizeof(uint32_t) + t->each); }

static void add(table *t, const void *tensor, int64_t blocks) {
    uint32_t first = (uint32_t)t->blocks;
    unsigned char *at = t->arguments.bytes + t->head;
    memcpy(at + (size_t)t->tensors * sizeof first, &first, sizeof first);
    memcpy(at + (size_t)t->capacity * sizeof first + (size_t)t->tensors * t->each, tensor, t->each);
    t->tensors++;
    t->blocks += blocks;
}

/* Whether a tensor of so many blocks goes in. */
static bool has_room(const table *t, int64_t blocks) {
    return t->tensors < t->capacity && t->blocks + blocks <= INT32_MAX;
}

static bst_status launch(const bst_exec *exec, const char *op, int device, bst_launch *l, table *t, const void *head) {
    memcpy(t->arguments.bytes, head, t->head);
    l->grid_x = (unsigned)t->blocks;
    bst_status status = bst__cuda_launch(exec, op, device, l, t->arguments.bytes, table_bytes(t));
    empty(t);
    return status;
}

static bst_status need_blocks(const char *op, int64_t count, int64_t chunk) {
    if (optim_blocks(count, chunk) <= INT32_MAX) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: a tensor has %lld elements; at most %lld are supported", op,
                      (long long)count, (long long)INT32_MAX * chunk);
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

static bst_status begin_all(const bst_exec *exec, const optim_step *s, float *coefficient) {
    bst_launch l = {.kernel = &begin_kernel, .values = {64, 1}, .block = 64, .overlap = true};
    for (int64_t from = 0; from < s->count; from += OPTIM_STEPS) {
        int64_t n = s->count - from < OPTIM_STEPS ? s->count - from : OPTIM_STEPS;
        optim_begin_args args = {.lr = s->lr,
                                 .beta1 = s->beta1,
                                 .beta2 = s->beta2,
                                 .eps = s->eps,
                                 .weight_decay = s->weight_decay,
                                 .device_lr = s->device_lr,
                                 .grad_scale = s->grad_scale,
                                 .found_inf = s->found_inf,
                                 .clip = s->clip,
                                 .coefficient = coefficient + from * OPTIM_COEFFICIENT,
                                 .tensors = n};
        for (int64_t i = 0; i < n; i++) args.step[i] = s->items[from + i].step;
        l.grid_x = (unsigned)((n + 63) / 64);
        BST_TRY(bst__cuda_launch(exec, s->op, s->device.device_id, &l, &args, sizeof args));
    }
    return BST_OK;
}

/* Whether two parameters take the same kernel. */
static bool alike(const optim_item *a, const optim_item *b) {
    return a->type == b->type && a->moments == b->moments && !a->tensor.master == !b->tensor.master;
}

/* All parameters from `from` on that take its kernel; a table that is full is launched. */
static bst_status launch_alike(const bst_exec *exec, const optim_step *s, int64_t from, table *t,
                               const optim_adamw_head *head) {
    const optim_item *like = &s->items[from];
    bst_launch l = {.kernel = &adamw_kernel, .overlap = true};
    occupancy(like, s->stochastic, &l.values[THREADS], &l.values[MIN_BLOCKS]);
    l.block = (unsigned)l.values[THREADS];
    l.values[TABLE] = t->capacity;
    l.values[CHUNK] = chunk_of(like);
    l.values[TYPE] = like->type;
    l.values[MOMENTS] = like->moments;
    l.values[MASTER] = like->tensor.master != NULL;
    l.values[STOCHASTIC] = s->stochastic && (like->moments == BST_BF16 || like->type == BST_BF16);
    l.values[MAXIMIZE] = s->maximize;
    l.values[WRITE_GRADIENT] = s->grad_scale != NULL;
    l.values[MIN_BLOCKS + 1] = 1;
    for (int64_t i = from; i <= s->count; i++) {
        const optim_item *item = &s->items[i];
        if (i < s->count && (!item->tensor.count || !alike(item, like))) continue;
        int64_t blocks = i < s->count ? optim_blocks(item->tensor.count, chunk_of(item)) : 0;
        if (t->tensors && (i == s->count || !has_room(t, blocks))) {
            optim_adamw_head own = *head;
            own.tensors = (uint32_t)t->tensors;
            BST_TRY(launch(exec, s->op, s->device.device_id, &l, t, &own));
        }
        if (i < s->count) add(t, &item->tensor, blocks);
    }
    return BST_OK;
}

static bst_status launch_all(const bst_exec *exec, const optim_step *s, const bst_chip *chip,
                             const float *coefficient) {
    table t = {.head = sizeof(optim_adamw_head), .each = sizeof(optim_tensor)};
    optim_adamw_head head = {.coefficient = coefficient,
                             .seed = s->seed,
                             .beta1_rest = (float)(1 - s->beta1),
                             .beta2_rest = (float)(1 - s->beta2),
                             .first_number = s->first_number};
    choose(&t, chip, s->count, OPTIM_TENSORS, OPTIM_WIDE_TENSORS);
    for (int64_t i = 0; i < s->count; i++) {
        bool earlier = !s->items[i].tensor.count;
        for (int64_t j = 0; j < i && !earlier; j++)
            earlier = s->items[j].tensor.count && alike(&s->items[i], &s->items[j]);
        if (!earlier) BST_TRY(launch_alike(exec, s, i, &t, &head));
    }
    return BST_OK;
}

bst_status bst__optim_adamw_cuda(const bst_exec *exec, const optim_step *s) {
    bst_chip chip;
    void *coefficient;
    BST_TRY(bst__cuda_chip(s->op, s->device.device_id, &chip));
    for (int64_t i = 0; i < s->count; i++) BST_TRY(need_blocks(s->op, s->items[i].tensor.count, ADAMW_CHUNK));
    BST_TRY(bst__allocate(exec, s->op, s->device, (size_t)s->count * OPTIM_COEFFICIENT * sizeof(float), &coefficient));
    bst_status status = begin_all(exec, s, coefficient);
    if (status == BST_OK) status = launch_all(exec, s, &chip, coefficient);
    bst__release(exec, s->device, coefficient);
    return status;
}

/* ---- gradients --------------------------------------------------------------------------------------------------- */

/* A kernel over all gradients, those of each type in launches of their own. partial: where sums of squares go. */
static bst_status over_gradients(const bst_exec *exec, const optim_list *list, const bst_kernel *kernel, int64_t chunk,
                                 float *partial, const float *coefficient) {
    bst_chip chip;
    BST_TRY(bst__cuda_chip(list->op, list->device.device_id, &chip));
    table t = {.head = sizeof(optim_gradients_head), .each = sizeof(optim_gradient)};
    choose(&t, &chip, list->count, OPTIM_GRADIENTS, OPTIM_WIDE_GRADIENTS);
    for (int64_t i = 0; i < list->count; i++) BST_TRY(need_blocks(list->op, list->items[i].gradient.count, chunk));
    for (int type = BST_F32; type <= BST_F16; type++) {
        bst_launch l = {.kernel = kernel, .values = {t.capacity, chunk, SUM_THREADS, type, 1}, .block = SUM_THREADS};
        l.overlap = true;
        for (int64_t i = 0; i <= list->count; i++) {
            const optim_list_item *item = &list->items[i];
            if (i < list->count && ((int)item->type != type || !item->gradient.count)) continue;
            int64_t blocks = i < list->count ? optim_blocks(item->gradient.count, chunk) : 0;
            if (t.tensors && (i == list->count || !has_room(&t, blocks))) {
                optim_gradients_head head = {partial, coefficient, (uint32_t)t.tensors, 0};
                if (partial) partial += t.blocks;
                BST_TRY(launch(exec, list->op, list->device.device_id, &l, &t, &head));
            }
            if (i < list->count) add(&t, &item->gradient, blocks);
        }
    }
    return BST_OK;
}

bst_status bst__optim_norm_cuda(const bst_exec *exec, const optim_list *list, const float *grad_scale, double max_norm,
                                float *norm, float *coefficient) {
    enum { NORM_THREADS = 1024 };
    int64_t parts = 0;
    void *partial;
    for (int64_t i = 0; i < list->count; i++) parts += optim_blocks(list->items[i].gradient.count, SUM_CHUNK);
    BST_TRY(bst__allocate(exec, list->op, list->device, (size_t)parts * sizeof(float), &partial));
    bst_status status = over_gradients(exec, list, &squares_kernel, SUM_CHUNK, partial, NULL);
    bst_launch l = {
        .kernel = &norm_kernel, .values = {NORM_THREADS, 1}, .grid_x = 1, .block = NORM_THREADS, .overlap = true};
    optim_norm_args args = {partial, grad_scale, norm, coefficient, parts, max_norm};
    if (status == BST_OK) status = bst__cuda_launch(exec, list->op, list->device.device_id, &l, &args, sizeof args);
    bst__release(exec, list->device, partial);
    return status;
}

bst_status bst__optim_scale_cuda(const bst_exec *exec, const optim_list *list, const float *coefficient) {
    return over_gradients(exec, list, &scale_kernel, ADAMW_CHUNK, NULL, coefficient);
}
