/* linear_logprobs_cpu.c - log-probabilities of rows of logits, and the gradient of these, on CPU.
 *
 * Forward reads a row once, a tile at a time, relative to a running maximum; backward reads and writes it once.
 * All arithmetic is float32; sums over tiles, and what is made of a row's sums, are float64. The exponentials' sum
 * leaves the target out: what a confident row has beside it would be lost in one that begins with 1. */
#include "ops/cross_entropy/cross_entropy_tile.h"
#include "ops/linear_logprobs/linear_logprobs.h"

/* Below, e^x is 0 and x e^x too, which for -inf would be NaN. */
#define LOWEST_POWER (-1e4f)

/* With d = z - top and e = exp(d), of all but the target: the sums of e, e d and e^2; of all: the sum of z, and whether
 * another logit is larger than the target's, or as large and before it. */
typedef struct row_sums {
    float top;
    double others, products, squares, logits;
    bool beaten;
} row_sums;

typedef struct lanes {
    float others[LANES], products[LANES], squares[LANES];
} lanes;

static inline void add_to_lanes(lanes *l, const float *z, float top, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        float d = z[j] - top, e = bst_exp(d);
        d = d < LOWEST_POWER ? LOWEST_POWER : d;
        l->others[j] += e;
        l->products[j] += e * d;
        l->squares[j] += e * e;
    }
}

/* `at`: the target's place in this tile, or one outside it. Spoils z there. */
static void add_tile(row_sums *s, float *z, int64_t n, int64_t at) {
    float top = largest(s->top, z, n);
    double step = fmax((double)s->top - (double)top, (double)LOWEST_POWER), factor = exp(step);
    s->products = factor * (s->products + step * s->others);
    s->others *= factor;
    s->squares *= factor * factor;
    s->top = top;
    lanes l = {{0}, {0}, {0}};
    double logits = 0;
#pragma omp simd reduction(+ : logits)
    for (int64_t j = 0; j < n; j++) logits += (double)z[j];
    s->logits += logits;
    if (at >= 0 && at < n) z[at] = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) add_to_lanes(&l, z + i, top, LANES);
    add_to_lanes(&l, z + i, top, n - i);
    s->others += sum_of(l.others);
    s->products += sum_of(l.products);
    s->squares += sum_of(l.squares);
}

/* Whether one of n logits, of which the first `before` stand before the target, keeps it from being the first of the
 * largest. sign: of what multiplies logits. */
static bool is_beaten(const float *x, int64_t n, int64_t before, float hit, float sign) {
    int larger = 0;
    for (int64_t j = 0; j < n; j++) larger |= sign * x[j] > sign * hit;
    for (int64_t j = 0; j < before; j++) larger |= x[j] == hit;
    return larger;
}

/* What a row's sums say. Relative to the maximum z. */
typedef struct row_facts {
    double own, total, log_total, log_p; /* the target's exponential, the sum of all and its logarithm; log p of it */
} row_facts;

static row_facts facts_of(double top, double others, double hit) {
    double own = exp(hit - top), less = log1p(others / own);
    row_facts f = {.own = own, .total = others + own};
    f.log_total = others < own ? hit - top + less : log(f.total);
    f.log_p = others < own ? -less : hit - top - f.log_total;
    return f;
}

static void put(float *to, int64_t row, double value) {
    if (to) to[row] = (float)value;
}

static void forward(const linear_logprobs_rows *c, int64_t row, const void *in, int64_t target, float hit, float raw) {
    const linear_logprobs_args *a = &c->args;
    float z[BST_TILE];
    row_sums s = {.top = -FLT_MAX};
    for (int64_t column = 0; column < c->vocabulary; column += BST_TILE) {
        int64_t n = bst__lesser(BST_TILE, c->vocabulary - column), at = target - column;
        bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
        if (a->is_top1 && !s.beaten)
            s.beaten = is_beaten(z, n, at < 0 ? 0 : bst__lesser(at, n), raw, c->z.logit_scale < 0 ? -1.0f : 1.0f);
        shape_tile(&c->z, z, NULL, n);
        add_tile(&s, z, n, at);
    }
    row_facts f = facts_of(s.top, s.others, hit);
    double d = fmax((double)hit - (double)s.top, (double)LOWEST_POWER);
    put(a->log_probs, row, f.log_p);
    put(a->lse, row, s.top + f.log_total);
    put(a->entropy, row, f.log_total - (s.products + f.own * d) / f.total);
    put(a->log_sum_sq_probs, row, log(s.squares + f.own * f.own) - 2 * f.log_total);
    put(a->mean_logits, row, s.logits / (double)c->vocabulary);
    if (a->is_top1) a->is_top1[row] = !s.beaten;
    if (c->pairs) c->pairs[2 * row] = s.top, c->pairs[2 * row + 1] = (float)s.others;
}

/* A row that does not count; NaN where its target is none. */
static void leave_out(const linear_logprobs_rows *c, int64_t row, int64_t target, void *in) {
    const linear_logprobs_args *a = &c->args;
    if (c->backward) {
        memset(in, 0, (size_t)(c->vocabulary * bst__dtype_size(c->dtype)));
        return;
    }
    put(a->log_probs, row, target == c->z.ignore_index ? 0.0 : (double)NAN);
    put(a->lse, row, 0);
    put(a->entropy, row, 0);
    put(a->log_sum_sq_probs, row, 0);
    put(a->mean_logits, row, 0);
    if (a->is_top1) a->is_top1[row] = 0;
    if (c->pairs) c->pairs[2 * row] = 0, c->pairs[2 * row + 1] = 1;
}

/* dz = p (A + B d) but for the target, with p = exp(d) / total, from
 *   d log p_t / dz = [t] - p,   d H / dz = -p (log p + H),   d lse / dz = p,   log p = d - log(total). */
static void backward(const linear_logprobs_rows *c, int64_t row, void *in, int64_t target, float hit) {
    const linear_logprobs_args *given = &c->args;
    float z[BST_TILE], slope[BST_TILE], top = c->pairs[2 * row];
    double others = (double)c->pairs[2 * row + 1];
    row_facts f = facts_of(top, others, hit);
    double by_log_p = given->grad_log_probs ? (double)given->grad_log_probs[row] : (double)given->without;
    double by_entropy = given->grad_entropy ? (double)given->grad_entropy[row] : 0;
    double by_lse = given->grad_lse ? (double)given->grad_lse[row] : 0,
           entropy = by_entropy != 0 ? given->entropy_was[row] : 0;
    bool has_entropy = by_entropy != 0;
    float scale = c->z.softcap > 0 ? 1.0f : (float)c->z.logit_scale; /* with a softcap it is in the slope */
    float a = scale * (float)((by_lse - by_log_p - by_entropy * (entropy - f.log_total)) / f.total);
    float b = scale * (float)(-by_entropy / f.total);
    double p = f.own / f.total, log_p = has_entropy ? fmax(f.log_p, (double)LOWEST_POWER) : 0;
    float at_target = scale * (float)(by_log_p * (others / f.total) + p * (by_lse - by_entropy * (log_p + entropy)));
    BST_TILES(column, n, 0, c->vocabulary, BST_TILE) {
        bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
        shape_tile(&c->z, z, slope, n);
        if (has_entropy) {
            for (int64_t i = 0; i < n; i++) {
                float d = z[i] - top, e = bst_exp(d);
                d = d < LOWEST_POWER ? LOWEST_POWER : d;
                z[i] = e * (a + b * d);
            }
        } else {
            for (int64_t i = 0; i < n; i++) z[i] = a * bst_exp(z[i] - top);
        }
        if (target >= column && target < column + n) z[target - column] = at_target;
        if (c->z.softcap > 0)
            for (int64_t i = 0; i < n; i++) z[i] *= slope[i];
        bst_store(bst_at(in, column, c->dtype), z, c->dtype, n);
    }
}

void BST_CPU(bst__linear_logprobs_rows_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_logprobs_rows *c = context;
    for (int64_t row = begin; row < end; row++) {
        int64_t target = c->target[row];
        void *in = bst_at(c->logits, row * c->stride, c->dtype);
        if (target == c->z.ignore_index || target < 0 || target >= c->vocabulary) {
            leave_out(c, row, target, in);
            continue;
        }
        float raw, hit;
        bst_load(&raw, bst_at(in, target, c->dtype), c->dtype, 1);
        hit = raw;
        shape_tile(&c->z, &hit, NULL, 1);
        if (c->backward)
            backward(c, row, in, target, hit);
        else
            forward(c, row, in, target, hit, raw);
    }
}
