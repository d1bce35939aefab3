/* linear_divergence_cpu.c - the divergence of rows of logits, and its gradient, on CPU.
 *
 * A row is read a tile at a time: once for its sums, once for the loss, once for the gradient, which is written in the
 * row's place or elsewhere. Arithmetic of a class is float32 (linear_divergence_math.h), sums are float64. The last
 * pass goes from the end on, as what it writes in place of float32 logits takes the upper half of their memory. */
#include "ops/cross_entropy/cross_entropy_tile.h"
#include "ops/linear_divergence/linear_divergence.h"
#include "ops/linear_divergence/linear_divergence_math.h"

/* z of a tile of logits and, where `slope` is not NULL, what tanh takes from its derivative. */
static void shape(const divergence_map *m, bool capped, float *x, float *slope, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float u = capped ? hyperbolic_tangent(x[i] * m->inner) : x[i], z = u * m->scale;
        if (slope) slope[i] = capped ? (1.0f - u) * (1.0f + u) : 1.0f;
        x[i] = z < DIVERGENCE_NEVER || x[i] == DIVERGENCE_LEFT_OUT ? DIVERGENCE_NEVER : z; /* NaN stays */
    }
}

/* z of n columns of both rows. */
static void load(const linear_divergence_rows *c, int64_t row, int64_t column, int64_t n, float *zp, float *zq,
                 float *slope) {
    const linear_divergence_args *a = &c->args;
    memcpy(zp, a->student + row * a->student_stride + column, (size_t)n * sizeof *zp);
    bst_load(zq, bst_at(a->teacher, row * a->teacher_stride + column, c->teacher_type), c->teacher_type, n);
    shape(&a->of_student, c->student_capped, zp, slope, n);
    shape(&a->of_teacher, c->teacher_capped, zq, NULL, n);
}

typedef struct row_sums {
    float top;
    double sum, products, gap; /* relative to top: of e, of e times what z lies above it, and of e (zp - zq - first) */
} row_sums;

static void move(row_sums *s, float top) {
    double step = (double)s->top - (double)top, factor = exp(step);
    s->products = factor * (s->products + step * s->sum);
    s->gap *= factor;
    s->sum *= factor;
    s->top = top;
}

/* other: NULL, or the logits to which the gap is measured. */
static void add_tile(row_sums *s, const float *z, const float *other, float first, int64_t n) {
    float e[BST_TILE], top = largest(s->top, z, n);
    if (top > s->top) move(s, top);
    for (int64_t i = 0; i < n; i++) e[i] = bst_exp(z[i] - top);
    double sum = 0, products = 0, gap = 0;
#pragma omp simd reduction(+ : sum, products)
    for (int64_t i = 0; i < n; i++) {
        sum += (double)e[i];
        products += (double)(e[i] * (z[i] - top));
    }
    if (other) {
#pragma omp simd reduction(+ : gap)
        for (int64_t i = 0; i < n; i++) gap += (double)(e[i] * ((z[i] - other[i]) - first));
    }
    s->sum += sum, s->products += products, s->gap += gap;
}

static void sum_up(const linear_divergence_rows *c, int64_t row, float *sums) {
    const linear_divergence_args *a = &c->args;
    row_sums p = {.top = 2 * DIVERGENCE_NEVER}, q = p;
    float zp[BST_TILE], zq[BST_TILE], first = 0;
    BST_TILES(column, n, 0, c->vocabulary, BST_TILE) {
        load(c, row, column, n, zp, zq, NULL);
        if (column == 0) first = fabsf(zp[0] - zq[0]) < 1e4f ? zp[0] - zq[0] : 0;
        add_tile(&p, zp, c->kind == DIVERGENCE_REVERSE ? zq : NULL, first, n);
        add_tile(&q, zq, NULL, 0, n);
    }
    if (a->entropy) a->entropy[row] = (float)(log(p.sum) - p.products / p.sum);
    sums[0] = p.top, sums[1] = (float)p.sum, sums[2] = q.top, sums[3] = (float)q.sum;
    sums[4] = c->kind == DIVERGENCE_REVERSE ? (float)((double)first + p.gap / p.sum) : 0;
}

static inline divergence_class class_of(int kind, const divergence_row *t, float zp, float zq) {
    divergence_pair z = {zp - t->top_p, zq - t->top_q, zp, zq};
    return divergence_of(kind, t, &z);
}

#define SUM_CLASSES(kind)                                                           \
    _Pragma("omp simd reduction(+ : loss, mean)") for (int64_t i = 0; i < n; i++) { \
        divergence_class class = class_of(kind, t, zp[i], zq[i]);                   \
        loss += (double)class.term;                                                 \
        mean += (double)class.to_mean;                                              \
    }
#define DIFFERENTIATE(kind) \
    for (int64_t i = 0; i < n; i++) zp[i] = slope[i] * class_of(kind, t, zp[i], zq[i]).slope;
/* Each kind has its own loop: there it is a constant. */
#define OF_KIND(loop)                               \
    do {                                            \
        if (c->kind == DIVERGENCE_FORWARD) {        \
            loop(DIVERGENCE_FORWARD)                \
        } else if (c->kind == DIVERGENCE_REVERSE) { \
            loop(DIVERGENCE_REVERSE)                \
        } else {                                    \
            loop(DIVERGENCE_JSD)                    \
        }                                           \
    } while (0)

static double lose(const linear_divergence_rows *c, int64_t row, float sum_p, divergence_row *t) {
    float zp[BST_TILE], zq[BST_TILE];
    double loss = 0, mean = 0;
    BST_TILES(column, n, 0, c->vocabulary, BST_TILE) {
        load(c, row, column, n, zp, zq, NULL);
        OF_KIND(SUM_CLASSES);
    }
    if (c->kind == DIVERGENCE_JSD) t->mean = (float)(mean / (double)sum_p);
    return loss;
}

static void differentiate(const linear_divergence_rows *c, int64_t row, const divergence_row *t, void *out) {
    float zp[BST_TILE], zq[BST_TILE], slope[BST_TILE];
    float factor = c->args.slope * (c->args.grad ? c->args.grad[row] : 1);
    int64_t last = (c->vocabulary - 1) / BST_TILE * BST_TILE;
    for (int64_t column = last; column >= 0; column -= BST_TILE) {
        int64_t n = bst__lesser(BST_TILE, c->vocabulary - column);
        load(c, row, column, n, zp, zq, slope);
        for (int64_t i = 0; i < n; i++) slope[i] *= factor;
        OF_KIND(DIFFERENTIATE);
        bst_store(bst_at(out, column, c->dtype), zp, c->dtype, n);
    }
}

void BST_CPU(bst__linear_divergence_rows_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_divergence_rows *c = context;
    const linear_divergence_args *a = &c->args;
    for (int64_t row = begin; row < end; row++) {
        float made[LINEAR_DIVERGENCE_SUMS] = {0, 1, 0, 1, 0};
        float *sums = a->sums ? a->sums + row * LINEAR_DIVERGENCE_SUMS : made;
        void *out = a->dlogits ? bst_at(a->dlogits, row * a->dlogits_stride, c->dtype) : NULL;
        int64_t bytes = bst__dtype_size(c->dtype);
        if (c->in_place) /* oneDNN reads what lies behind the last column */
            memset(bst_at(out, c->vocabulary, c->dtype), 0, (size_t)((a->dlogits_stride / 2 - c->vocabulary) * bytes));
        if (a->mask && !a->mask[row]) {
            if (a->divergence) a->divergence[row] = 0;
            if (a->entropy) a->entropy[row] = 0;
            if (!c->saved) memcpy(sums, made, sizeof made);
            if (out) memset(out, 0, (size_t)(c->vocabulary * bytes));
            continue;
        }
        if (!c->saved) sum_up(c, row, sums);
        divergence_row t = divergence_row_of(sums[0], sums[1], sums[2], sums[3], sums[4], a->beta, a->rest);
        if (a->divergence) a->divergence[row] = (float)lose(c, row, sums[1], &t);
        if (!c->saved) sums[4] = t.mean;
        if (out) differentiate(c, row, &t, out);
    }
}

void BST_CPU(bst__linear_divergence_spread_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_divergence_spread *c = context;
    const linear_divergence_spread_args *a = &c->args;
    for (int64_t row = begin; row < end; row++) {
        float *out = a->out + row * a->out_stride;
        for (int64_t i = 0; i < a->columns; i++) out[i] = DIVERGENCE_LEFT_OUT;
        for (int64_t i = 0; i < a->count; i++)
            bst_load(out + a->indices[row * a->count + i], bst_at(a->values, row * a->values_stride + i, c->dtype),
                     c->dtype, 1);
    }
}
