/* cross_entropy_cpu.c - softmax cross-entropy of rows of logits on CPU.
 *
 * A row is read twice, a tile at a time: for the sum of exponentials, relative to a running maximum, and for the
 * gradient. The second read finds it in the cache. All arithmetic is float32; sums over tiles are float64. */
#include "ops/cross_entropy/cross_entropy_cpu.h"

#include <float.h>

typedef bst_cross_entropy_rows_call rows_call;

/* The sums of a row: of exp(z - top); for label smoothing of w (z - top), w being the class weight or one, and of w. */
typedef struct row_sums {
    float top;
    double exponentials, weighted, weights;
} row_sums;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* tanh to about two units in the last place: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel. */
static inline float hyperbolic_tangent(float x) {
    float magnitude = fabsf(x), square = x * x;
    float p = -5.6180824e-3f;
    p = p * square + 2.0566579e-2f;
    p = p * square - 5.3719564e-2f;
    p = p * square + 1.3331234e-1f;
    p = p * square - 3.3333276e-1f;
    float small = x + x * square * p;
    float large = copysignf(1.0f - 2.0f / (bst_exp(2.0f * magnitude) + 1.0f), x);
    return magnitude < 0.625f ? small : large;
}

/* z of a tile of logits and, where `slope` is not NULL, dz/d(logit). */
static void shape_tile(const bst_loss *o, float *z, float *slope, int64_t n) {
    float scale = (float)o->logit_scale, cap = (float)o->softcap, inner = (float)(o->logit_scale / o->softcap);
    if (o->softcap > 0) {
        for (int64_t i = 0; i < n; i++) z[i] = hyperbolic_tangent(z[i] * inner);
        if (slope)
            for (int64_t i = 0; i < n; i++) slope[i] = scale * (1.0f - z[i]) * (1.0f + z[i]);
        for (int64_t i = 0; i < n; i++) z[i] *= cap;
    } else if (scale != 1.0f) {
        for (int64_t i = 0; i < n; i++) z[i] *= scale;
    }
}

static float shaped(const rows_call *c, const void *row, int64_t column) {
    float z;
    bst_load(&z, bst_at(row, column, c->dtype), c->dtype, 1);
    shape_tile(c->options, &z, NULL, 1);
    return z;
}

/* So many that compilers keep the loop over them a loop. */
enum { LANES = 128 };

/* The largest of `top` and n numbers, NaNs left out. In lanes: a reduction to a maximum that leaves NaNs out is none
 * that Clang vectorises. */
static float largest(float top, const float *z, int64_t n) {
    float lane[LANES];
    int64_t i = 0;
    for (int j = 0; j < LANES; j++) lane[j] = top;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = z[i + j] > lane[j] ? z[i + j] : lane[j];
    for (; i < n; i++) top = z[i] > top ? z[i] : top;
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0] > top ? lane[0] : top;
}

/* Sums of a tile in lanes, so that no number is added to one that has grown much larger. */
typedef struct lanes {
    float exponentials[LANES], weighted[LANES], weights[LANES];
} lanes;

/* `smooth`, and whether w is NULL, are constants. */
static inline void add_to_lanes(lanes *l, const float *z, const float *w, float top, int64_t n, bool smooth) {
    for (int64_t j = 0; j < n; j++) {
        float difference = z[j] - top;
        l->exponentials[j] += bst_exp(difference);
        if (smooth) l->weighted[j] += w ? w[j] * difference : difference;
        if (smooth && w) l->weights[j] += w[j];
    }
}

static inline void add_all_to_lanes(lanes *l, const float *z, const float *w, float top, int64_t n, bool smooth) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) add_to_lanes(l, z + i, w ? w + i : NULL, top, LANES, smooth);
    add_to_lanes(l, z + i, w ? w + i : NULL, top, n - i, smooth);
}

static double sum_of(const float *lane) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < LANES; j++) sum += lane[j];
    return sum;
}

static void add_tile(const rows_call *c, row_sums *s, const float *z, int64_t column, int64_t n) {
    float top = largest(s->top, z, n);
    lanes l = {{0}, {0}, {0}};
    s->exponentials *= exp((double)s->top - (double)top);
    s->weighted += s->weights * ((double)s->top - (double)top);
    s->top = top;
    bool smooth = c->options->label_smoothing > 0;
    const float *w = smooth && c->class_weight ? c->class_weight + column : NULL;
    if (w)
        add_all_to_lanes(&l, z, w, top, n, true);
    else if (smooth)
        add_all_to_lanes(&l, z, NULL, top, n, true);
    else
        add_all_to_lanes(&l, z, NULL, top, n, false);
    s->exponentials += sum_of(l.exponentials);
    if (!smooth) return;
    s->weighted += sum_of(l.weighted);
    s->weights += w ? sum_of(l.weights) : (double)n;
}

/* What multiplies the parts of a row's gradient: dz = share exp(z - reference) - smooth w - hit [target]. */
typedef struct row_terms {
    float reference, share, smooth, hit;
} row_terms;

static void write_gradient(const rows_call *c, const row_terms *t, const void *in, void *out, int64_t target, float *z,
                           bool loaded) {
    float slope[BST_TILE];
    const bst_loss *o = c->options;
    for (int64_t column = 0; column < c->vocabulary; column += BST_TILE) {
        int64_t n = smaller(BST_TILE, c->vocabulary - column);
        if (!loaded || o->softcap > 0) {
            bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
            shape_tile(o, z, slope, n);
        }
        for (int64_t i = 0; i < n; i++) z[i] = t->share * bst_exp(z[i] - t->reference);
        if (o->label_smoothing > 0) {
            const float *w = c->class_weight ? c->class_weight + column : NULL;
            for (int64_t i = 0; i < n; i++) z[i] -= t->smooth * (w ? w[i] : 1.0f);
        }
        if (target >= column && target < column + n) z[target - column] -= t->hit;
        if (o->softcap > 0) {
            for (int64_t i = 0; i < n; i++) z[i] *= slope[i];
        } else if (o->logit_scale != 1) {
            float scale = (float)o->logit_scale;
            for (int64_t i = 0; i < n; i++) z[i] *= scale;
        }
        bst_store(bst_at(out, column, c->dtype), z, c->dtype, n);
    }
}

static void store_lse(const rows_call *c, int64_t row, const row_sums *s, float lse) {
    if (c->lse) c->lse[row] = lse;
    if (!c->lse_pairs) return;
    c->lse_pairs[2 * row] = s->top;
    c->lse_pairs[2 * row + 1] = (float)s->exponentials;
}

static void one_row(const rows_call *c, int64_t row) {
    const bst_loss *o = c->options;
    bst_cross_entropy_divisors divide = {1, 1, (float)c->vocabulary, 0};
    if (c->divisors) divide = *c->divisors;
    int64_t inner = c->inner > 0 ? c->inner : c->rows;
    int64_t start = row / inner * c->outer_stride + row % inner * c->stride;
    const void *in = bst_at(c->logits, start, c->dtype);
    void *out =
        !c->dlogits ? NULL : bst_at(c->dlogits, c->dlogits == c->logits ? start : row * c->dlogits_stride, c->dtype);
    int64_t target = c->target[row];
    bool forward = c->mode != BST_CROSS_ENTROPY_GRADIENT;
    if (target == o->ignore_index || target < 0 || target >= c->vocabulary) {
        if (forward && c->loss_rows) c->loss_rows[row] = target == o->ignore_index ? 0.0f : NAN;
        if (forward) store_lse(c, row, &(row_sums){.exponentials = 1}, 0);
        if (c->mode != BST_CROSS_ENTROPY_LOSS) memset(out, 0, (size_t)(c->vocabulary * bst__dtype_size(c->dtype)));
        return;
    }
    float z[BST_TILE];
    /* The lowest finite number, not -inf, so that a row of -inf gets exponentials of 0. */
    row_sums s = {.top = -FLT_MAX};
    float hit = shaped(c, in, target); /* before anything is written: out may be in */
    for (int64_t column = 0; forward && column < c->vocabulary; column += BST_TILE) {
        int64_t n = smaller(BST_TILE, c->vocabulary - column);
        bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
        shape_tile(o, z, NULL, n);
        add_tile(c, &s, z, column, n);
    }
    if (!forward && c->lse_pairs)
        s = (row_sums){.top = c->lse_pairs[2 * row], .exponentials = (double)c->lse_pairs[2 * row + 1]};
    if (!forward && !c->lse_pairs) s = (row_sums){.top = c->lse[row], .exponentials = 1};
    double log_sum = log(s.exponentials);
    float lse = (float)(s.top + log_sum), smoothing = (float)o->label_smoothing;
    float weight = (c->class_weight ? c->class_weight[target] : 1.0f) * (1 - smoothing);
    float each = smoothing / (float)c->vocabulary, square = (float)o->lse_square_scale;
    if (forward) {
        /* Relative to the maximum: lse itself has lost what is small beside it. */
        double loss = weight * ((double)s.top - hit + log_sum);
        if (smoothing > 0) loss += each * (divide.class_weight_sum * log_sum - s.weighted);
        loss *= divide.inverse_weight_sum;
        if (square != 0) loss += divide.inverse_count * square * lse * lse;
        if (c->loss_rows) c->loss_rows[row] = (float)loss;
        store_lse(c, row, &s, lse);
    }
    if (c->mode == BST_CROSS_ENTROPY_LOSS) return;
    float upstream = c->upstream ? c->upstream[row * c->upstream_stride] : 1.0f;
    /* Undivided gradients are left to whoever multiplies them by divisors->gradient; the z-loss has another divisor. */
    float by_weight = c->undivided ? 1.0f : divide.inverse_weight_sum, by_count = divide.inverse_count;
    if (c->undivided) by_count = c->class_weight ? divide.inverse_count / divide.inverse_weight_sum : 1.0f;
    float scale = upstream * by_weight;
    row_terms t = {.reference = s.top, .smooth = scale * each, .hit = scale * weight};
    t.share = t.hit;
    if (smoothing > 0) t.share += t.smooth * divide.class_weight_sum;
    if (square != 0) t.share += upstream * by_count * 2 * square * lse;
    t.share /= (float)s.exponentials;
    write_gradient(c, &t, in, out, target, z, forward && c->vocabulary <= BST_TILE);
}

void BST_CPU(bst__cross_entropy_rows_cpu)(void *context, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) one_row(context, row);
}

void BST_CPU(bst__scale_cpu)(void *context, int64_t begin, int64_t end) {
    const scale_cpu *a = context;
    float x[BST_TILE];
    for (int64_t i = begin; i < end; i += BST_TILE) {
        int64_t n = smaller(BST_TILE, end - i);
        void *at = bst_at(a->tensor.data, i, a->tensor.dtype);
        bst_load(x, at, a->tensor.dtype, n);
        for (int64_t j = 0; j < n; j++) x[j] *= a->scale;
        bst_store(at, x, a->tensor.dtype, n);
    }
}
