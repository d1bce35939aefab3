/* lists.c - random calls of the functions that take lists of tensors, which no description tells of: the optimiser's.
 * What is asked of them is what fuzz.c asks of the others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { MOST = 5, BLOCK = 256 };
enum { PARAMETER, GRADIENT, EXP_AVG, EXP_AVG_SQ, MASTER, M_SCALE, V_SCALE, STEP, LISTS };
enum { LR, GRAD_SCALE, FOUND_INF, CLIP, NORM, COEFFICIENT, SCALARS };
static const char *const list_names[] = {"parameter", "gradient",      "exp_avg",          "exp_avg_sq",
                                         "master",    "exp_avg_scale", "exp_avg_sq_scale", "step"};
static const char *const scalar_names[] = {"lr", "grad_scale", "found_inf", "clip", "norm", "coefficient"};

/* A tensor amid bytes that nobody is to touch. */
typedef struct member {
    DLTensor tensor;
    bst_dtype type;
    int64_t count, shape[4], stride[4];
    unsigned char *block, *before;
    size_t bytes;
    bool written; /* by the call, which may write its elements and nothing beside them */
    double *numbers, *size;
} member;

typedef struct list_call {
    fuzz_list function;
    int64_t count;
    member of[LISTS][MOST], scalar[SCALARS];
    DLTensor *pointer[LISTS][MOST];
    bst_adamw_tensors tensors;
    bst_adamw_options options;
    double lr, beta1, beta2, eps, decay, max_norm;
} list_call;

/* ---- drawing ----------------------------------------------------------------------------------------------------- */

static double draw_between(double low, double high) {
    return low + (high - low) * ((double)(fuzz_bits() >> 11) * 0x1p-53);
}

static void store(member *m, int64_t at, double value) {
    int64_t bytes = bst__dtype_size(m->type);
    fuzz_store((char *)m->tensor.data + at * bytes, m->type, value);
    if (m->numbers) m->numbers[at] = fuzz_load((char *)m->tensor.data + at * bytes, m->type);
}

/* Its block, its elements between `low` and `high`. The shape is there. */
static void place(member *m, bst_dtype type, bool written, double low, double high) {
    int64_t bytes = bst__dtype_size(type), step = type == BST_U8 ? 16 : bytes; /* what it begins at a multiple of */
    int64_t begin = FUZZ_GUARD + (fuzz_chance(2) ? 0 : fuzz_below(9)) * step;
    m->type = type;
    m->written = written;
    m->bytes = (size_t)(begin + m->count * bytes + (written ? FUZZ_GUARD : 0));
    m->block = malloc(m->bytes);
    m->before = malloc(m->bytes);
    m->numbers = calloc((size_t)m->count + 1, sizeof(double));
    m->size = calloc((size_t)m->count + 1, sizeof(double));
    if (!m->block || !m->before || !m->numbers || !m->size) abort();
    memset(m->block, 0xff, m->bytes);
    m->tensor.data = m->block + begin;
    m->tensor.device = fuzz_device;
    m->tensor.dtype = fuzz_dl_type(type);
    m->tensor.shape = m->shape;
    m->tensor.strides = m->stride;
    for (int64_t i = 0; i < m->count; i++)
        store(m, i, type == BST_U8 ? (double)fuzz_below(256) : draw_between(low, high));
}

/* Contiguous, of one or two dimensions. */
static void shape(member *m, int dims, int64_t rows, int64_t columns) {
    m->tensor.ndim = dims;
    m->shape[0] = dims == 2 ? rows : columns, m->shape[1] = columns;
    m->stride[0] = dims == 2 ? columns : 1, m->stride[1] = 1;
    m->count = !dims ? 1 : dims == 2 ? rows * columns : columns;
}

/* A parameter's, dense in any order of its dimensions. */
static void draw_shape(member *m) {
    static const int64_t edges[] = {1, 2, 3, 7, 8, 9, 16, 31, 40, 257};
    int order[3];
    m->tensor.ndim = (int)fuzz_below(4);
    m->count = 1;
    for (int i = 0; i < m->tensor.ndim; i++) {
        m->shape[i] = fuzz_chance(40) ? 0 : edges[fuzz_below(m->count > 300 ? 4 : 10)];
        m->count *= m->shape[i];
        int with = (int)fuzz_below(i + 1);
        order[i] = order[with], order[with] = i;
    }
    int64_t step = 1;
    for (int i = 0; i < m->tensor.ndim; i++) m->stride[order[i]] = step, step *= m->shape[order[i]];
}

static void draw_scalar(list_call *c, int which, bool written, double low, double high) {
    member *m = &c->scalar[which];
    shape(m, (int)fuzz_below(2), 1, 1);
    place(m, BST_F32, written, low, high);
}

static void draw_member(list_call *c, int64_t i, bool stochastic) {
    static const double scales[] = {1, 1, 1e-3, 30};
    member *p = &c->of[PARAMETER][i];
    bst_dtype type = (bst_dtype)fuzz_below(3), moments = fuzz_chance(3) ? BST_F32 : fuzz_chance(2) ? BST_BF16 : type;
    bool codes = fuzz_chance(4), master = type != BST_F32 && (fuzz_chance(2) || (stochastic && type == BST_F16));
    double of_gradient = scales[fuzz_below(4)];
    draw_shape(p);
    for (int k = GRADIENT; k <= MASTER; k++) {
        member *m = &c->of[k][i];
        m->tensor.ndim = p->tensor.ndim, m->count = p->count;
        memcpy(m->shape, p->shape, sizeof p->shape), memcpy(m->stride, p->stride, sizeof p->stride);
    }
    place(p, type, true, -2, 2);
    place(&c->of[GRADIENT][i], type, c->function != FUZZ_NORM, -of_gradient, of_gradient);
    if (c->function != FUZZ_ADAMW) return;
    int64_t blocks = (p->count + BLOCK - 1) / BLOCK;
    for (int k = EXP_AVG; k <= EXP_AVG_SQ; k++) {
        member *m = &c->of[k][i], *scale = &c->of[k == EXP_AVG ? M_SCALE : V_SCALE][i];
        if (codes) shape(m, 2, blocks, BLOCK), shape(scale, 1, 1, blocks), place(scale, BST_F32, true, 1e-3, 2);
        double high = k == EXP_AVG ? of_gradient : of_gradient * of_gradient;
        place(m, codes ? BST_U8 : moments, true, k == EXP_AVG ? -high : 0, high);
    }
    if (master) place(&c->of[MASTER][i], BST_F32, true, -2, 2);
    shape(&c->of[STEP][i], (int)fuzz_below(2), 1, 1);
    place(&c->of[STEP][i], BST_F32, true, 0, 0);
    store(&c->of[STEP][i], 0, (double)fuzz_below(fuzz_chance(2) ? 3 : 1000));
}

static void draw(list_call *c, fuzz_list function) {
    static const double betas[] = {0, 0.5, 0.9, 0.95, 0.999};
    bool stochastic = function == FUZZ_ADAMW && fuzz_chance(3);
    *c = (list_call){.function = function, .count = fuzz_below(MOST + 1)};
    c->lr = draw_between(0, 0.1), c->decay = fuzz_chance(2) ? 0 : draw_between(0, 0.5);
    c->beta1 = betas[fuzz_below(5)], c->beta2 = betas[fuzz_below(5)], c->eps = fuzz_chance(8) ? 0 : 1e-8;
    c->max_norm = draw_between(0, 3);
    for (int64_t i = 0; i < c->count; i++) draw_member(c, i, stochastic);
    if (fuzz_chance(3)) draw_scalar(c, GRAD_SCALE, false, 0.5, 8);
    if (function == FUZZ_ADAMW) {
        if (fuzz_chance(3)) draw_scalar(c, LR, false, 0, 0.1);
        if (fuzz_chance(3)) draw_scalar(c, CLIP, false, 0, 1);
        if (fuzz_chance(3)) draw_scalar(c, FOUND_INF, false, 0, 0);
        if (c->scalar[FOUND_INF].block && fuzz_chance(3)) store(&c->scalar[FOUND_INF], 0, 1);
    } else {
        draw_scalar(c, NORM, true, 0, 0);
        draw_scalar(c, COEFFICIENT, function == FUZZ_NORM, 0, 1);
        if (fuzz_chance(4)) store(&c->scalar[COEFFICIENT], 0, 1);
    }
    for (int k = 0; k < LISTS; k++)
        for (int64_t i = 0; i < c->count; i++) c->pointer[k][i] = c->of[k][i].block ? &c->of[k][i].tensor : NULL;
    for (int64_t i = 0; i < c->count; i++)
        c->of[GRADIENT][i].written = function == FUZZ_SCALE || (function == FUZZ_ADAMW && c->scalar[GRAD_SCALE].block);
    DLTensor *scalar[SCALARS];
    for (int k = 0; k < SCALARS; k++) scalar[k] = c->scalar[k].block ? &c->scalar[k].tensor : NULL;
    c->tensors = (bst_adamw_tensors){.size = sizeof c->tensors,
                                     .count = c->count,
                                     .parameter = c->pointer[PARAMETER],
                                     .gradient = c->pointer[GRADIENT],
                                     .exp_avg = c->pointer[EXP_AVG],
                                     .exp_avg_sq = c->pointer[EXP_AVG_SQ],
                                     .master = c->pointer[MASTER],
                                     .exp_avg_scale = c->pointer[M_SCALE],
                                     .exp_avg_sq_scale = c->pointer[V_SCALE],
                                     .step = c->pointer[STEP],
                                     .lr = scalar[LR],
                                     .grad_scale = scalar[GRAD_SCALE],
                                     .found_inf = scalar[FOUND_INF],
                                     .clip = scalar[CLIP]};
    c->options = (bst_adamw_options){.size = sizeof c->options,
                                     .maximize = fuzz_chance(3),
                                     .stochastic = stochastic,
                                     .seed = fuzz_bits(),
                                     .first_number = fuzz_below(100)};
}

/* ---- all members ------------------------------------------------------------------------------------------------- */

static void each(list_call *c, void (*visit)(member *, const char *, int64_t, void *), void *context) {
    for (int k = 0; k < LISTS; k++)
        for (int64_t i = 0; i < c->count; i++)
            if (c->of[k][i].block) visit(&c->of[k][i], list_names[k], i, context);
    for (int k = 0; k < SCALARS; k++)
        if (c->scalar[k].block) visit(&c->scalar[k], scalar_names[k], -1, context);
}

static void remember(member *m, const char *name, int64_t i, void *context) {
    (void)name, (void)i, (void)context;
    memcpy(m->before, m->block, m->bytes);
}

static void restore(member *m, const char *name, int64_t i, void *context) {
    (void)name, (void)i, (void)context;
    memcpy(m->block, m->before, m->bytes);
}

static void discard(member *m, const char *name, int64_t i, void *context) {
    (void)name, (void)i, (void)context;
    free(m->block), free(m->before), free(m->numbers), free(m->size);
}

typedef struct change {
    bool ran;
    char text[64]; /* whose memory has changed */
} change;

static void look(member *m, const char *name, int64_t i, void *context) {
    change *found = context;
    size_t begin = (size_t)((unsigned char *)m->tensor.data - m->block);
    size_t end = begin + (size_t)(m->count * bst__dtype_size(m->type));
    bool whole = !found->ran || !m->written;
    for (size_t b = 0; b < m->bytes; b++)
        if (m->block[b] != m->before[b] && (whole || b < begin || b >= end))
            snprintf(found->text, sizeof found->text, "%s[%lld], byte %lld", name, (long long)i,
                     (long long)(b - begin));
}

static const char *changed(list_call *c, change *found, bool ran) {
    *found = (change){.ran = ran};
    each(c, look, found);
    return *found->text ? found->text : NULL;
}

static void hash(member *m, const char *name, int64_t i, void *context) {
    uint64_t *sum = context;
    (void)name, (void)i;
    for (size_t b = 0; b < m->bytes; b++) *sum = (*sum ^ m->block[b]) * UINT64_C(0x100000001b3);
}

static bst_status run(list_call *c, const bst_exec *exec) {
    const member *coefficient = &c->scalar[COEFFICIENT];
    if (c->function == FUZZ_ADAMW)
        return bst_optim_adamw(exec, &c->tensors, c->lr, c->beta1, c->beta2, c->eps, c->decay, &c->options);
    if (c->function == FUZZ_SCALE)
        return bst_optim_scale(exec, c->tensors.count, c->tensors.gradient, &coefficient->tensor);
    return bst_optim_norm(exec, c->tensors.count, (const DLTensor *const *)c->tensors.gradient, c->tensors.grad_scale,
                          c->max_norm, &c->scalar[NORM].tensor, &c->scalar[COEFFICIENT].tensor);
}

/* ---- what it should be ------------------------------------------------------------------------------------------- */

static void want(member *m, int64_t at, double value, double size) {
    m->numbers[at] = value;
    m->size[at] = size;
}

static double scalar_of(const list_call *c, int which, double otherwise) {
    return c->scalar[which].block ? c->scalar[which].numbers[0] : otherwise;
}

/* A moment as it lies there; of 8 bits: the powers of src/ops/optim/optim_math.h. */
static double moment_of(const list_call *c, int list, int64_t i, int64_t at) {
    const member *m = &c->of[list][i];
    if (m->type != BST_U8) return m->numbers[at];
    double scale = c->of[list == EXP_AVG ? M_SCALE : V_SCALE][i].numbers[at / BLOCK], code = m->numbers[at];
    if (list == EXP_AVG) code = (double)(int8_t)(uint8_t)code;
    return list == EXP_AVG ? scale * code * fabs(code) / (127 * 127) : scale * pow(code / 255, 4);
}

static void adamw(list_call *c, int64_t i) {
    member *p = &c->of[PARAMETER][i], *g = &c->of[GRADIENT][i], *m = &c->of[EXP_AVG][i], *v = &c->of[EXP_AVG_SQ][i];
    member *master = &c->of[MASTER][i], *step = &c->of[STEP][i];
    bool skip = scalar_of(c, FOUND_INF, 0) != 0, codes = m->type == BST_U8;
    double factor = scalar_of(c, CLIP, 1) / scalar_of(c, GRAD_SCALE, 1), lr = scalar_of(c, LR, c->lr);
    double t = step->numbers[0] + !skip, b1 = c->beta1, b2 = c->beta2;
    want(step, 0, t, 0);
    for (int64_t k = 0; k < p->count && !skip; k++) {
        double used = g->numbers[k] * factor, signed_one = c->options.maximize ? -used : used;
        double old_m = moment_of(c, EXP_AVG, i, k), old_v = moment_of(c, EXP_AVG_SQ, i, k);
        double old = master->block ? master->numbers[k] : p->numbers[k];
        double mean = b1 * old_m + (1 - b1) * signed_one, square = b2 * old_v + (1 - b2) * used * used;
        double mean_size = fabs(old_m) + fabs(used), square_size = old_v + used * used;
        double root = sqrt(square / (1 - pow(b2, t))) + c->eps, rate = lr / (1 - pow(b1, t));
        double move = rate * mean / root, size = rate * mean_size / root * (1 + square_size / square);
        /* Where the old second moment is far larger than the new one, rounding leaves nothing of that. */
        if (!(root > 1e-15) || !(square_size < 1e5 * square) || !isfinite(size)) size = INFINITY;
        if (g->written) want(g, k, used, fabs(used));
        if (!codes) want(m, k, mean, mean_size), want(v, k, square, square_size);
        double value = old - lr * c->decay * old - move;
        if (master->block) want(master, k, value, fabs(old) + size);
        want(p, k, value, fabs(old) + size);
    }
}

static void refer(list_call *c) {
    member *norm = &c->scalar[NORM], *coefficient = &c->scalar[COEFFICIENT];
    double squares = 0;
    for (int64_t i = 0; i < c->count; i++) {
        member *g = &c->of[GRADIENT][i];
        for (int64_t k = 0; k < g->count && c->function != FUZZ_ADAMW; k++) {
            squares += g->numbers[k] * g->numbers[k];
            if (c->function == FUZZ_SCALE)
                want(g, k, g->numbers[k] * coefficient->numbers[0], fabs(g->numbers[k] * coefficient->numbers[0]));
        }
        if (c->function == FUZZ_ADAMW) adamw(c, i);
    }
    if (c->function != FUZZ_NORM) return;
    double root = sqrt(squares) / scalar_of(c, GRAD_SCALE, 1);
    want(norm, 0, root, root);
    want(coefficient, 0, fmin(1, c->max_norm / (root + 1e-6)), 1);
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

const char *const fuzz_list_names[FUZZ_LISTS] = {"optim_adamw", "optim_norm", "optim_scale", "dequantize_4bit_group"};
static const list_call *judged;

static void compare(member *m, const char *name, int64_t i, void *context) {
    double coarsest = fuzz_roundoff(i < 0 ? BST_F32 : judged->of[PARAMETER][i].type);
    if (i >= 0 && judged->of[EXP_AVG][i].type == BST_BF16) coarsest = fuzz_roundoff(BST_BF16);
    char *message = context;
    double most = m->type == BST_F16 ? 3e4 : 1e30, floor = m->type == BST_F16 ? 1e-6 : 1e-30;
    /* Codes are drawn between two neighbours: tests/c and tests/py judge them. */
    if (i >= 0 && judged->of[EXP_AVG][i].type == BST_U8 && !strncmp(name, "exp_avg", 7)) return;
    for (int64_t k = 0; k < m->count && !*message; k++) {
        double got = fuzz_load((char *)m->tensor.data + k * bst__dtype_size(m->type), m->type);
        double allowed = m->size[k] == 0 ? 0 : m->size[k] * (6 * coarsest + 2e-5) + floor;
        if (got == m->numbers[k] || fabs(got - m->numbers[k]) <= allowed) continue;
        if (m->size[k] > 0 && (!(m->size[k] < most) || !(fabs(m->numbers[k]) < most))) continue;
        snprintf(message, 200, "%s[%lld], element %lld, is %.9g; %.9g, and at most %.3g away, is needed", name,
                 (long long)i, (long long)k, got, m->numbers[k], allowed);
    }
}

static int judge(list_call *c, const bst_exec *exec, void (*cut)(uint64_t)) {
    char message[256] = "";
    change found;
    uint64_t once = 1, again = 1;
    const char *op = fuzz_list_names[c->function];
    each(c, remember, NULL);
    cut(1);
    if (run(c, exec) != BST_OK) return printf("fuzz: %s: a legal call was refused: %s\n", op, bst_last_error()), 1;
    if (changed(c, &found, true)) return printf("fuzz: %s: wrote beside an output, at %s\n", op, found.text), 1;
    each(c, hash, &once);
    refer(c);
    judged = c;
    each(c, compare, message);
    if (*message) return printf("fuzz: %s: %s\n", op, message), 1;
    each(c, restore, NULL);
    cut(fuzz_bits());
    if (run(c, exec) != BST_OK) return printf("fuzz: %s: refused when it was repeated\n", op), 1;
    each(c, hash, &again);
    if (once != again) return printf("fuzz: %s: other bits when it was repeated\n", op), 1;
    each(c, restore, NULL);
    return 0;
}

/* ---- what is refused --------------------------------------------------------------------------------------------- */

/* Breaks a rule; the name that the error must have, NULL where none was found to break. */
static const char *spoil(list_call *c, DLTensor *other) {
    int64_t i = c->count ? fuzz_below(c->count) : 0;
    static const int lists[] = {PARAMETER, GRADIENT, EXP_AVG, EXP_AVG_SQ, STEP};
    int kind = (int)fuzz_below(9), k = lists[c->function == FUZZ_ADAMW ? fuzz_below(5) : 1];
    member *m = &c->of[k][i];
    static char name[32];
    snprintf(name, sizeof name, "%s[%lld]", list_names[k], (long long)i);
    if (kind == 0) return c->tensors.count = -1 - fuzz_below(5), "count";
    if (kind == 1 && c->function == FUZZ_ADAMW) {
        double *numbers[] = {&c->lr, &c->beta1, &c->beta2, &c->eps, &c->decay};
        static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
        int which = (int)fuzz_below(5);
        return *numbers[which] = fuzz_chance(2) ? -1 : (double)NAN, names[which];
    }
    if (!c->count) return NULL;
    *other = m->tensor;
    c->pointer[k][i] = other;
    switch (kind) {
        case 2:
            return c->pointer[k][i] = NULL, name;
        case 3:
            return other->data = NULL, m->count ? name : NULL;
        case 4:
            return other->dtype = (DLDataType){kDLInt, 16, 1}, m->type == BST_U8 ? NULL : name;
        case 5:
            return other->device.device_type = kDLMetal, name;
        case 6:
            return other->data = (char *)other->data + 1, m->count && m->type != BST_U8 ? name : NULL;
        case 7: /* another shape than the parameter's */
            if (k == PARAMETER || c->function != FUZZ_ADAMW) return NULL;
            static int64_t seven[] = {7, 7, 7};
            return other->ndim = 3, other->shape = seven, other->strides = NULL, name;
        case 8: /* over the parameter */
            if (k == PARAMETER || k == STEP || !m->count || m->type != c->of[PARAMETER][i].type) return NULL;
            return c->function == FUZZ_ADAMW ? other->data = c->of[PARAMETER][i].tensor.data, name : NULL;
        default:
            return NULL;
    }
}

static int judge_illegal(list_call *c, const bst_exec *exec) {
    DLTensor other;
    change found;
    const char *op = fuzz_list_names[c->function], *name = spoil(c, &other);
    if (!name) return 0;
    if (run(c, exec) == BST_OK) return printf("fuzz: %s: %s was wrong, and it was accepted\n", op, name), 1;
    const char *text = bst_last_error();
    size_t length = strlen(op);
    if (strncmp(text, op, length) || strncmp(text + length, ": ", 2) || !strstr(text + length, name))
        return printf("fuzz: %s: %s was wrong, and the message is '%s'\n", op, name, text), 1;
    if (changed(c, &found, false))
        return printf("fuzz: %s: %s was wrong, and memory has changed at %s\n", op, name, found.text), 1;
    return 0;
}

int fuzz_lists(fuzz_list function, const bst_exec *exec, void (*cut)(uint64_t)) {
    list_call call;
    if (function == FUZZ_GROUP) return fuzz_groups(exec, cut);
    draw(&call, function);
    int failures = judge(&call, exec, cut);
    if (!failures && fuzz_chance(2)) failures = judge_illegal(&call, exec);
    each(&call, discard, NULL);
    return failures;
}
