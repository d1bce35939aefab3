/* cross_entropy_cpu.c - softmax cross-entropy of rows of logits on CPU.
 *
 * A row is read twice, a tile at a time: for the sum of exponentials, relative to a running maximum, and for the
 * gradient. The second read finds it in the cache. All arithmetic is float32; sums over tiles are float64. */
#include "ops/cross_entropy/cross_entropy_tile.h"

typedef bst_cross_entropy_rows_call rows_call;

/* The sums of a row: of exp(z - top) over all but the target, without which a confident row keeps its digits; for label
 * smoothing of w (z - top), w being the class weight or one, and of w. `top` is the largest of all. */
typedef struct row_sums {
    float top;
    double others, weighted, weights;
} row_sums;

static float shaped(const rows_call *c, const void *row, int64_t column) {
    float z;
    bst_load(&z, bst_at(row, column, c->dtype), c->dtype, 1);
    shape_tile(c->options, &z, NULL, 1);
    return z;
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

/* Adds n numbers from column `column` on, none of them the target's or that alone. */
static void add_piece(const rows_call *c, row_sums *s, const float *z, int64_t column, int64_t n, bool is_target) {
    lanes l = {{0}, {0}, {0}};
    bool smooth = c->options->label_smoothing > 0;
    const float *w = smooth && c->class_weight ? c->class_weight + column : NULL;
    if (w)
        add_all_to_lanes(&l, z, w, s->top, n, true);
    else if (smooth)
        add_all_to_lanes(&l, z, NULL, s->top, n, true);
    else
        add_all_to_lanes(&l, z, NULL, s->top, n, false);
    if (!is_target) s->others += sum_of(l.exponentials);
    if (!smooth) return;
    s->weighted += sum_of(l.weighted);
    s->weights += w ? sum_of(l.weights) : (double)n;
}

static void add_tile(const rows_call *c, row_sums *s, const float *z, int64_t column, int64_t n, int64_t target) {
    float top = largest(s->top, z, n);
    s->others *= exp((double)s->top - (double)top);
    s->weighted += s->weights * ((double)s->top - (double)top);
    s->top = top;
    int64_t at = target - column;
    if (at < 0 || at >= n) {
        add_piece(c, s, z, column, n, false);
        return;
    }
    add_piece(c, s, z, column, at, false);
    add_piece(c, s, z + at, target, 1, true);
    add_piece(c, s, z + at + 1, target + 1, n - at - 1, false);
}

/* What multiplies the parts of a row's gradient: dz = share exp(z - reference) - smooth w, and dz of the target. */
typedef struct row_terms {
    float reference, share, smooth, at_target;
} row_terms;

static void write_gradient(const rows_call *c, const row_terms *t, const void *in, void *out, int64_t target, float *z,
                           bool loaded) {
    float slope[BST_TILE];
    const bst_loss *o = c->options;
    BST_TILES(column, n, 0, c->vocabulary, BST_TILE) {
        if (!loaded || o->softcap > 0) {
            bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
            shape_tile(o, z, slope, n);
        }
        for (int64_t i = 0; i < n; i++) z[i] = t->share * bst_exp(z[i] - t->reference);
        if (o->label_smoothing > 0) {
            const float *w = c->class_weight ? c->class_weight + column : NULL;
            for (int64_t i = 0; i < n; i++) z[i] -= t->smooth * (w ? w[i] : 1.0f);
        }
        if (target >= column && target < column + n) z[target - column] = t->at_target;
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
    c->lse_pairs[2 * row + 1] = (float)s->others;
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
        if (forward) store_lse(c, row, &(row_sums){.others = 1}, 0);
        if (c->mode != BST_CROSS_ENTROPY_LOSS) memset(out, 0, (size_t)(c->vocabulary * bst__dtype_size(c->dtype)));
        return;
    }
    float z[BST_TILE];
    float hit = shaped(c, in, target); /* before anything is written: out may be in */
    /* The lowest finite number, not -inf, so that a row of -inf gets exponentials of 0. */
    row_sums s = {.top = -FLT_MAX};
    for (int64_t column = 0; forward && column < c->vocabulary; column += BST_TILE) {
        int64_t n = bst__lesser(BST_TILE, c->vocabulary - column);
        bst_load(z, bst_at(in, column, c->dtype), c->dtype, n);
        shape_tile(o, z, NULL, n);
        add_tile(c, &s, z, column, n, target);
    }
    if (!forward && c->lse_pairs)
        s = (row_sums){.top = c->lse_pairs[2 * row], .others = (double)c->lse_pairs[2 * row + 1]};
    if (!forward && !c->lse_pairs) s.top = c->lse[row], s.others = 1 - exp((double)hit - (double)s.top);
    double own = exp((double)hit - (double)s.top), log_sum = log(s.others + own);
    float lse = (float)(s.top + log_sum), smoothing = (float)o->label_smoothing;
    float weight = (c->class_weight ? c->class_weight[target] : 1.0f) * (1 - smoothing);
    float each = smoothing / (float)c->vocabulary, square = (float)o->lse_square_scale;
    if (forward) {
        /* Of the others, where they are less than the target; else relative to the maximum: lse itself has lost what
         * is small beside it. */
        double loss = weight * (s.others < own ? log1p(s.others / own) : (double)s.top - hit + log_sum);
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
    float scale = upstream * by_weight, hit_share = scale * weight;
    row_terms t = {.reference = s.top, .smooth = scale * each, .share = hit_share};
    if (smoothing > 0) t.share += t.smooth * divide.class_weight_sum;
    if (square != 0) t.share += upstream * by_count * 2 * square * lse;
    /* The target's, whose p - 1 is what the others have. They are as a saved pair has them. */
    double others = (double)(float)s.others, total = others + own;
    t.at_target = (float)(((double)(t.share - hit_share) * own - hit_share * others) / total);
    if (smoothing > 0) t.at_target -= t.smooth * (c->class_weight ? c->class_weight[target] : 1.0f);
    t.share /= (float)total;
    write_gradient(c, &t, in, out, target, z, forward && c->vocabulary <= BST_TILE);
}

void BST_CPU(bst__cross_entropy_rows_cpu)(void *context, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) one_row(context, row);
}

void BST_CPU(bst__scale_cpu)(void *context, int64_t begin, int64_t end) {
    const scale_cpu *a = context;
    float x[BST_TILE];
    BST_TILES(i, n, begin, end, BST_TILE) {
        void *at = bst_at(a->tensor.data, i, a->tensor.dtype);
        bst_load(x, at, a->tensor.dtype, n);
        for (int64_t j = 0; j < n; j++) x[j] *= a->scale;
        bst_store(at, x, a->tensor.dtype, n);
    }
}
