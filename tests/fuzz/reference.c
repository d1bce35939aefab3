/* reference.c - what outputs should be, in float64, by the formulas of include/bastile.h in plain loops. A reference
 * writes for each element of an output its value, and the size that its error is relative to: the sum of the terms'
 * absolute values. What overflows float32 on the way it leaves out, by an infinite size. */
#include "reference.h"

/* ---- glu --------------------------------------------------------------------------------------------------------- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* Infinite where float32 has no number for what a product begins with. */
static double unless_lost(double part) { return fabs(part) < 1e-36 ? INFINITY : 0; }

enum { SILU, GELU_TANH, GELU, RELU, RELU2, OAI };

/* Zero is the usual. */
static double alpha_of(const fuzz_call *c) { return real(c, "alpha") != 0 ? real(c, "alpha") : 1.702; }
static double limit_of(const fuzz_call *c) { return real(c, "limit") != 0 ? real(c, "limit") : INFINITY; }
static bool passes(const fuzz_call *c, double v, double limit) {
    return v < limit || (v == limit && !whole(c, "open_limit"));
}

/* What a gated unit makes of its gate, and the slope there; where the operator has no such attribute, silu. */
static double activate(const fuzz_call *c, double g, double *slope) {
    double s = sigmoid(g), normal = erfc(-g / sqrt(2)) / 2, root = sqrt(8 / acos(-1));
    double inner = root * (g + 0.044715 * g * g * g), tanh_s = sigmoid(inner), oai_s = sigmoid(alpha_of(c) * g);
    switch (whole(c, "activation")) {
        case SILU:
            *slope = s * (1 + g * (1 - s));
            return g * s;
        case GELU_TANH:
            *slope = tanh_s + (g * g > 1e4 ? 0 : g * tanh_s * (1 - tanh_s) * root * (1 + 3 * 0.044715 * g * g));
            return g * tanh_s;
        case GELU:
            *slope = normal + g * exp(-g * g / 2) / sqrt(2 * acos(-1));
            return g * normal;
        case RELU:
            *slope = g > 0;
            return g > 0 ? g : 0;
        case RELU2:
            *slope = g > 0 ? 2 * g : 0;
            return g > 0 ? g * g : 0;
        default:
            *slope = oai_s * (1 + alpha_of(c) * g * (1 - oai_s));
            return g * oai_s;
    }
}

/* What it is relative to: near a zero of the slope its terms, and where the result is nothing beside the gate the
 * gate. */
static double activation_size(const fuzz_call *c, double g, double value) {
    double lost = value != 0 && whole(c, "activation") <= GELU ? unless_lost(value) : 0;
    if (whole(c, "activation") == OAI)
        return (fabs(g) + 1) * (1 + fabs(alpha_of(c) * g)) + (fabs(g) > 1e18 ? INFINITY : 0);
    return fabs(value) + (whole(c, "activation") == SILU ? 0 : fabs(g) * 1e-3) + lost + (fabs(g) > 1e18 ? INFINITY : 0);
}

/* Element `at` of a unit and of its gradients: gate and up are elements of `gates` and `ups`. */
static void unit_element(fuzz_call *c, int64_t at, const double *gates, int64_t gate, const double *ups, int64_t up,
                         fuzz_tensor *y, fuzz_tensor *dgate, fuzz_tensor *dup) {
    const double *upstream = numbers(c, "dy");
    double limit = limit_of(c), dy = upstream ? upstream[at] : 0;
    bool oai = whole(c, "activation") == OAI, free = isinf(limit);
    double g = gates[gate] > limit ? limit : gates[gate];
    double u = (ups[up] > limit ? limit : ups[up] < -limit ? -limit : ups[up]) + oai, of_up = fabs(u) + 2 * oai;
    double slope, value = activate(c, g, &slope), size = activation_size(c, g, value), both = dy * u;
    double s = sigmoid(g), lost = unless_lost(both);
    want(y, at, value * u, size * of_up + (value == 0 && g < 0 ? 1e-30 : 0));
    if (!upstream) return;
    want(dup, up, free || passes(c, fabs(ups[up]), limit) ? dy * value : 0, size * fabs(dy));
    if (fabs(both) > 1e36 || fabs(dy) > 1e36 || of_up > 1e36 || fabs(g * both) > 1e36) lost = INFINITY;
    if (whole(c, "activation") <= GELU) lost += unless_lost(s);
    double terms = (oai ? 1 + fabs(alpha_of(c) * g) : s * (1 + fabs(g) * (1 - s))) + fabs(slope);
    want(dgate, gate, free || passes(c, gates[gate], limit) ? both * slope : 0, fabs(dy) * of_up * terms + lost);
}

static void glu(fuzz_call *c) {
    const fuzz_tensor *a = input(c, "a");
    const double *ups = numbers(c, "b"), alone = whole(c, "activation") == OAI ? 0 : 1;
    fuzz_tensor *y = output(c, "y"), *da = output(c, "da"), *db = output(c, "db");
    for (int64_t i = 0; i < a->count; i++)
        unit_element(c, i, numbers(c, "a"), i, ups ? ups : &alone, ups ? i : 0, y, da, db);
}

static void glu_joined(fuzz_call *c) {
    const fuzz_tensor *h = input(c, "h");
    fuzz_tensor *y = output(c, "y"), *dh = output(c, "dh");
    int64_t width = last(h) / 2, step = whole(c, "interleaved") ? 2 : 1, up = whole(c, "interleaved") ? 1 : width;
    for (int64_t i = 0; 2 * i < h->count; i++) {
        int64_t gate = i / width * 2 * width + i % width * step;
        unit_element(c, i, h->numbers, gate, h->numbers, gate + up, y, dh, dh);
    }
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */

enum { LLAMA, GEMMA };

static double factor_of(const fuzz_call *c, const double *weight, int64_t at) {
    double own = weight ? weight[at] : 0;
    return whole(c, "casting") == GEMMA ? 1 + own : weight ? own : 1;
}

/* Of float16 the least numbers have fewer bits: what is rounded to it on the way is as wrong as this one. */
static double least(const fuzz_tensor *t) { return t->type == BST_F16 ? 0x1p-14 : 0; }

static double largest(const fuzz_tensor *t) { return t->type == BST_F16 ? 6e4 : 1e36; }

/* 1 / sqrt(mean(x^2) + eps); infinite where float32 overflows on the way. */
static double inverse_root(const double *x, int64_t count, double eps) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    double inverse = 1 / sqrt(sum / (double)count + eps);
    return sum < 1e37 && (sum > 1e-30 || eps > 1e-12) ? inverse : INFINITY;
}

static void norm_forward(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    const double *residual = numbers(c, "residual"), *weight = numbers(c, "weight"), *bias = numbers(c, "bias");
    const double *after = numbers(c, "after");
    fuzz_tensor *y = output(c, "y"), *sum = output(c, "sum"), *rstd = output(c, "rstd"), *means = output(c, "mean");
    int64_t columns = last(x);
    double *row = malloc((size_t)(columns ? columns : 1) * sizeof *row);
    for (int64_t r = 0; columns && row && r < x->count / columns; r++) {
        double mean = 0, largest_one = 0;
        for (int64_t i = 0; i < columns; i++) {
            int64_t at = r * columns + i;
            row[i] = x->numbers[at] + (residual ? residual[at] : 0);
            if (x->type == BST_F16 && fabs(row[i]) > 65504) row[i] = INFINITY;
            want(sum, at, row[i], fabs(row[i]));
            largest_one = fmax(largest_one, fabs(row[i]));
            mean += row[i] / (double)columns;
        }
        if (!whole(c, "kind")) mean = 0;
        want(means, r, mean, largest_one);
        for (int64_t i = 0; i < columns; i++) row[i] -= mean;
        double inverse = inverse_root(row, columns, real(c, "eps"));
        /* Where the numbers of a row differ by less than they are large, what is left of them is wrong by that. */
        double blur = mean != 0 ? largest_one * inverse : 0;
        /* And nothing is left where rounding takes more: of two that differ, the sums may be the same. */
        double rounding = fuzz_roundoff(residual ? x->type : BST_F32) * fmax(largest_one, least(x));
        if (mean != 0 && rounding * inverse > 0.25) inverse = INFINITY;
        want(rstd, r, inverse, inverse * (1 + blur * blur));
        for (int64_t i = 0; i < columns; i++) {
            double n = row[i] * inverse, w = factor_of(c, weight, i), beside = after ? after[r * columns + i] : 0;
            double more = (bias ? bias[i] : 0) + beside;
            double size = (fabs(n) + least(x) + blur) * (1 + blur * blur) * fabs(w) + fabs(more) + fabs(beside);
            want(y, r * columns + i, n * w + more,
                 size + (isfinite(inverse) ? row[i] != 0 ? unless_lost(n) : 0 : INFINITY));
        }
    }
    free(row);
}

static void norm_backward(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    const double *dy = numbers(c, "dy"), *weight = numbers(c, "weight"), *rstd = numbers(c, "rstd");
    const double *dsum = numbers(c, "dsum"), *means = numbers(c, "mean");
    fuzz_tensor *dx = output(c, "dx"), *dweight = output(c, "dweight"), *dbias = output(c, "dbias");
    int64_t columns = last(x);
    for (int64_t r = 0; columns && r < x->count / columns; r++) {
        const double *own = x->numbers + r * columns, *gradient = dy + r * columns;
        double dot = 0, dot_size = 0, mean = means ? means[r] : 0, mean_g = 0, mean_g_size = 0;
        for (int64_t i = 0; i < columns; i++) {
            double g = gradient[i] * factor_of(c, weight, i), centred = own[i] - mean;
            double term = g * centred * rstd[r] / (double)columns;
            dot += term;
            /* In whichever order they are multiplied. */
            bool overflows = fabs(g * centred) > 1e36 || fabs(g) > 1e36 || fabs(rstd[r]) < 1e-36 ||
                             fabs(g * rstd[r]) > 1e36 || fabs(centred * rstd[r]) > 1e18;
            dot_size += overflows ? INFINITY : fabs(g) * (fabs(own[i]) + fabs(mean)) * fabs(rstd[r]) / (double)columns;
            mean_g += means ? g / (double)columns : 0;
            mean_g_size += means ? fabs(g) / (double)columns : 0;
        }
        for (int64_t i = 0; i < columns; i++) {
            int64_t at = r * columns + i;
            double n = (own[i] - mean) * rstd[r], n_size = (fabs(own[i]) + fabs(mean)) * fabs(rstd[r]);
            double g = gradient[i] * factor_of(c, weight, i), more = dsum ? dsum[at] : 0;
            want(dx, at, rstd[r] * (g - mean_g - n * dot) + more,
                 fabs(rstd[r]) * (fabs(g) + mean_g_size + n_size * dot_size) + fabs(more));
            if (dbias) {
                dbias->numbers[i] += gradient[i];
                dbias->size[i] += fabs(gradient[i]);
            }
            if (!dweight) continue;
            dweight->numbers[i] += gradient[i] * n;
            dweight->size[i] += fabs(gradient[i]) * (n_size + least(x));
            if (fabs(gradient[i] * own[i]) > 1e36 || fabs(n) > largest(x)) dweight->size[i] = INFINITY;
        }
    }
}

/* ---- rotations --------------------------------------------------------------------------------------------------- */

enum { HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES };

/* How wide the part of a head is that turns. */
static int64_t rotary_of(const fuzz_call *c) { return last(input(c, "cos")) * (whole(c, "half_tables") ? 2 : 1); }

/* Turns one head by its row of the tables; backward, the transposed rotation. */
static void turn(const fuzz_call *c, const double *x, const double *cos, const double *sin, int64_t dim, bool backward,
                 fuzz_tensor *out, int64_t at) {
    int64_t rotary = rotary_of(c), layout = whole(c, "layout") + whole(c, "interleaved");
    for (int64_t p = 0; p < rotary / 2; p++) {
        int64_t apart[] = {p, p + rotary / 2}, together[] = {2 * p, 2 * p + 1};
        const int64_t *to = layout == INTERLEAVED ? together : apart, *from = layout == HALVES ? apart : together;
        const int64_t *in = backward ? to : from, *result = backward ? from : to;
        int64_t one = whole(c, "half_tables") ? p : to[0], two = whole(c, "half_tables") ? p : to[1];
        double x1 = x[in[0]], x2 = x[in[1]];
        double across1 = x2 * (backward ? sin[two] : -sin[one]), across2 = x1 * (backward ? -sin[one] : sin[two]);
        want(out, at + result[0], x1 * cos[one] + across1, fabs(x1 * cos[one]) + fabs(across1));
        want(out, at + result[1], x2 * cos[two] + across2, fabs(x2 * cos[two]) + fabs(across2));
    }
    for (int64_t i = rotary; i < dim; i++) want(out, at + i, x[i], fabs(x[i]));
}

/* The row of a table [B or 1, S, R] for a head of x [B, heads, S, D]. */
static const double *table_row(const fuzz_tensor *table, const fuzz_tensor *x, int64_t head) {
    int64_t positions = x->shape[2], position = head % positions, batch = head / positions / x->shape[1];
    return table->numbers + ((table->shape[0] == 1 ? 0 : batch) * positions + position) * table->shape[2];
}

/* `weight_of`: of the norm that comes first, where it is given; or NULL. */
static void rotate(fuzz_call *c, const char *from, const char *weight_of, const char *to, bool backward) {
    const fuzz_tensor *x = input(c, from), *cos = input(c, "cos"), *sin = input(c, "sin");
    const double *weight = weight_of ? numbers(c, weight_of) : NULL;
    fuzz_tensor *out = x ? output(c, to) : NULL;
    if (!out || !x->count) return;
    int64_t dim = x->shape[3];
    double *row = malloc((size_t)dim * sizeof *row);
    for (int64_t head = 0; row && head < x->count / dim; head++) {
        const double *own = x->numbers + head * dim;
        double inverse = weight ? inverse_root(own, dim, real(c, "eps")) : 1;
        for (int64_t i = 0; i < dim; i++) {
            double n = own[i] * inverse;
            row[i] = weight ? n * factor_of(c, weight, i) : own[i];
            if (weight && (fabs(row[i]) > 1e36 || (own[i] != 0 && fmin(fabs(n), fabs(row[i])) < 1e-36)))
                row[i] = INFINITY;
        }
        turn(c, row, table_row(cos, x, head), table_row(sin, x, head), dim, backward, out, head * dim);
    }
    free(row);
}

static void rope_forward(fuzz_call *c) {
    rotate(c, "q", "q_weight", "q_out", false);
    rotate(c, "k", "k_weight", "k_out", false);
}

/* Without a norm: with one, no more than what holds of every call is asked. */
static void rope_backward(fuzz_call *c) {
    if (fuzz_place(c->function, "q_weight", BST_IN) >= 0) return;
    rotate(c, "dq_out", NULL, "dq", true);
    rotate(c, "dk_out", NULL, "dk", true);
}

/* ---- losses ------------------------------------------------------------------------------------------------------ */

enum { MEAN = BST_REDUCTION_MEAN, NONE = BST_REDUCTION_NONE };

/* A loss over rows of logits, and what divides it. */
typedef struct losses {
    const fuzz_call *call;
    const double *target, *weight, *num_items;
    int64_t rows, classes;
    double smoothing, softcap, scale, square, smooth_divisor, square_divisor, counted;
    double lost; /* infinite where float32 has no inverse of what divides */
} losses;

static double class_weight(const losses *l, int64_t j) { return l->weight ? l->weight[j] : 1; }
static bool counts(const losses *l, int64_t row) { return l->target[row] != (double)whole(l->call, "ignore_index"); }

static losses losses_of(const fuzz_call *c, int64_t rows, int64_t classes) {
    losses l = {.call = c,
                .target = numbers(c, "target"),
                .weight = numbers(c, "class_weight"),
                .num_items = numbers(c, "num_items"),
                .rows = rows,
                .classes = classes,
                .smoothing = real(c, "label_smoothing"),
                .softcap = real(c, "softcap"),
                .scale = real(c, "logit_scale"),
                .square = real(c, "lse_square_scale")};
    double weights = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (!counts(&l, r)) continue;
        weights += class_weight(&l, (int64_t)l.target[r]);
        l.counted++;
    }
    bool mean = whole(c, "reduction") == MEAN;
    l.smooth_divisor = mean ? weights : 1;
    l.square_divisor = mean ? l.counted : 1;
    bool by_weights = mean && !l.num_items && l.counted > 0;
    l.lost = (l.num_items && fabs(*l.num_items) < 1e-36) || (by_weights && fabs(weights) < 1e-36) ? INFINITY : 0;
    if (l.num_items && whole(c, "reduction") != NONE) l.smooth_divisor = l.square_divisor = *l.num_items;
    return l;
}

static double capped(const losses *l, double logit) {
    double z = l->scale * logit;
    return l->softcap > 0 ? l->softcap * tanh(z / l->softcap) : z;
}

static double lse_of(const losses *l, const double *logits) {
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < l->classes; j++) most = fmax(most, capped(l, logits[j]));
    for (int64_t j = 0; j < l->classes; j++) sum += exp(capped(l, logits[j]) - most);
    return most + log(sum);
}

/* The loss of a row, divided; *size: the terms that it is made of. */
static double loss_of(const losses *l, int64_t row, const double *logits, double lse, double *size) {
    int64_t t = (int64_t)l->target[row];
    double all = 0, all_size = 0, z = capped(l, logits[t]), w = class_weight(l, t), e = l->smoothing;
    for (int64_t j = 0; j < l->classes; j++) {
        double zj = capped(l, logits[j]);
        all += class_weight(l, j) * (lse - zj);
        all_size += fabs(class_weight(l, j)) * (fabs(lse) + fabs(zj));
    }
    e /= (double)l->classes;
    double square = l->square * lse * lse / l->square_divisor;
    *size =
        (fabs((1 - l->smoothing) * w) * (fabs(lse) + fabs(z)) + e * all_size) / fabs(l->smooth_divisor) + fabs(square);
    return ((1 - l->smoothing) * w * (lse - z) + e * all) / l->smooth_divisor + square;
}

static void lose(losses *l, const double *logits, double noise) {
    fuzz_call *c = (fuzz_call *)(uintptr_t)l->call;
    /* Where lse is given as the two numbers that it is made of, these have no reference. */
    int place = fuzz_place(c->function, "lse", BST_OUT);
    bool pairs = !strcmp(c->function->arguments[place].shape, "T2");
    fuzz_tensor *loss = output(c, "loss"), *lse_out = pairs ? NULL : output(c, "lse");
    double total = 0, total_size = 0;
    bool none = whole(c, "reduction") == NONE;
    for (int64_t r = 0; r < l->rows; r++) {
        double value = 0, size = 0, lse = 0, most = 1;
        if (counts(l, r)) {
            lse = lse_of(l, logits + r * l->classes);
            value = loss_of(l, r, logits + r * l->classes, lse, &size);
            for (int64_t j = 0; j < l->classes; j++) most = fmax(most, fabs(l->scale * logits[r * l->classes + j]));
        }
        want(lse_out, r, lse, noise * most);
        size = noise > 1e36 ? INFINITY : size * noise * most;
        if (none) want(loss, r, value, size);
        total += value;
        total_size += size;
    }
    bool nothing = whole(c, "reduction") == MEAN && !l->num_items && !l->counted;
    if (!none) want(loss, 0, nothing ? NAN : total + 0 / (l->num_items ? *l->num_items : 1), total_size + l->lost);
}

static void cross_entropy_forward(fuzz_call *c) {
    const fuzz_tensor *logits = input(c, "logits");
    losses l = losses_of(c, last(logits) ? logits->count / last(logits) : 0, last(logits));
    lose(&l, logits->numbers, 1);
}

double *fuzz_logits_of(const fuzz_call *c, const char *of_hidden, const char *of_weight, const char *of_bias,
                       double *most) {
    const fuzz_tensor *hidden = input(c, of_hidden), *weight = input(c, of_weight);
    const double *bias = numbers(c, of_bias);
    int64_t rows = hidden->shape[0], classes = weight->shape[0], width = last(weight);
    double *logits = calloc((size_t)(rows * classes + 1), sizeof *logits);
    if (!logits) abort();
    *most = 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < classes; j++) {
            double sum = bias ? bias[j] : 0, size = fabs(sum);
            for (int64_t i = 0; i < width; i++) {
                double term = hidden->numbers[r * width + i] * weight->numbers[j * width + i];
                sum += term;
                size += fabs(term);
            }
            logits[r * classes + j] = sum;
            *most = fmax(*most, hidden->type == BST_F16 && size > 3e4 ? INFINITY : size);
        }
    return logits;
}

static double *logits_of(const fuzz_call *c, double *most) {
    return fuzz_logits_of(c, "hidden", "weight", "bias", most);
}

static void linear_cross_entropy_forward(fuzz_call *c) {
    double most, *logits = logits_of(c, &most);
    losses l = losses_of(c, input(c, "hidden")->shape[0], input(c, "weight")->shape[0]);
    lose(&l, logits, most); /* logits are rounded, and as wrong as their terms are large */
    free(logits);
}

static void linear_logprobs_forward(fuzz_call *c) {
    double most, *logits = logits_of(c, &most), t = real(c, "temperature");
    losses l = losses_of(c, input(c, "hidden")->shape[0], input(c, "weight")->shape[0]);
    static const char *const names[] = {"log_probs", "entropy", "lse", "log_sum_sq_probs", "mean_logits"};
    fuzz_tensor *outputs[5];
    for (int k = 0; k < 5; k++) outputs[k] = output(c, names[k]);
    for (int64_t r = 0; r < l.rows; r++) {
        double *z = logits + r * l.classes, top = -INFINITY, sum = 0, products = 0, squares = 0, all = 0, largest = 1;
        for (int64_t j = 0; j < l.classes; j++) {
            largest = fmax(largest, fabs(l.scale * z[j] / t));
            z[j] = capped(&l, z[j]) / t;
            top = fmax(top, z[j]);
        }
        for (int64_t j = 0; j < l.classes; j++) {
            double d = z[j] - top, e = exp(d);
            sum += e, products += e * d, squares += e * e, all += z[j];
        }
        double log_sum = log(sum), at = counts(&l, r) ? z[(int64_t)l.target[r]] : 0;
        double of[] = {at - top - log_sum, log_sum - products / sum, top + log_sum, log(squares) - 2 * log_sum,
                       all / (double)l.classes};
        /* An error of the logits is one of these; of the entropy as many times more as logits differ. */
        double size = most * fmax(1, fabs(l.scale) / t) * largest, sizes[] = {size, size * largest, size, size, size};
        for (int k = 0; k < 5; k++) {
            bool lost = !isfinite(of[k]) || !(sizes[k] < 1e36);
            want(outputs[k], r, counts(&l, r) ? of[k] : 0, lost ? INFINITY : sizes[k]);
        }
    }
    free(logits);
}

static void scale(fuzz_call *c) {
    const double *in = numbers(c, "tensor"), *factor = numbers(c, "scale");
    fuzz_tensor *out = output(c, "tensor");
    for (int64_t i = 0; i < out->count; i++) want(out, i, in[i] * *factor, fabs(in[i] * *factor));
}

/* ---- experts ----------------------------------------------------------------------------------------------------- */

static void moe_sort(fuzz_call *c) {
    const fuzz_tensor *indices = input(c, "indices");
    fuzz_tensor *order = output(c, "order"), *position = output(c, "position"), *ends = output(c, "ends");
    int64_t row = 0;
    for (int64_t e = 0; e < whole(c, "experts"); e++) {
        for (int64_t i = 0; i < indices->count; i++) {
            if (indices->numbers[i] != (double)e) continue;
            want(order, row, (double)i, 0);
            want(position, i, (double)row++, 0);
        }
        want(ends, e, (double)row, 0);
    }
}

static void moe_gather(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x"), *position = input(c, "position");
    fuzz_tensor *rows = output(c, "rows");
    for (int64_t pair = 0; rows->count && pair < position->count; pair++) {
        int64_t token = pair / (position->count / x->shape[0]), row = (int64_t)position->numbers[pair];
        for (int64_t i = 0; i < last(x); i++) want(rows, row * last(x) + i, x->numbers[token * last(x) + i], 0);
    }
}

static void moe_transpose(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    fuzz_tensor *y = output(c, "y");
    int64_t columns = last(x);
    for (int64_t e = 0; e < x->count; e++) { /* rounded: but for the same type, half a unit of it */
        double size = x->type == y->type ? 0 : fabs(x->numbers[e]);
        want(y, e % columns * (x->count / columns) + e / columns, x->numbers[e], size);
    }
}

static void moe_glu_forward(fuzz_call *c) {
    const fuzz_tensor *h = input(c, "h"), *ends = input(c, "ends");
    const double *bias = numbers(c, "bias");
    fuzz_tensor *y = output(c, "y");
    int64_t columns = last(h), half = columns / 2, expert = 0;
    int64_t step = whole(c, "interleaved") ? 2 : 1, up = whole(c, "interleaved") ? 1 : half;
    double alpha = alpha_of(c), limit = limit_of(c);
    for (int64_t n = 0; y->count && n < h->shape[0]; n++) {
        while (expert < ends->count && n >= (int64_t)ends->numbers[expert]) expert++;
        for (int64_t i = 0; i < half; i++) {
            const double *gate = h->numbers + n * columns + step * i, *b = bias + expert * columns + step * i;
            double given = gate[0] + (bias ? b[0] : 0), lost = bias ? (fabs(gate[0]) + fabs(b[0])) : 0, slope;
            double g = given > limit ? limit : given, u = gate[up] + (bias ? b[up] : 0); /* NaN stays */
            double of_up = fabs(u) + (bias ? fabs(gate[up]) + fabs(b[up]) : 0);
            u = u > limit ? limit : u < -limit ? -limit : u;
            if (whole(c, "activation") > RELU2) {
                want(y, n * half + i, (u + 1) * g * sigmoid(alpha * g),
                     (fabs(u) + 1) * (fabs(g) + 1) * (1 + fabs(alpha * g)));
                continue;
            }
            double value = activate(c, g, &slope), size = activation_size(c, g, value) + fabs(slope) * lost;
            want(y, n * half + i, value * u, size * fabs(u) + fabs(value) * of_up + (value == 0 && g < 0 ? 1e-30 : 0));
        }
    }
}

static void moe_combine_forward(fuzz_call *c) {
    const fuzz_tensor *y = input(c, "y"), *position = input(c, "position");
    const double *weights = numbers(c, "weights"), *bias = numbers(c, "bias"), *indices = numbers(c, "indices");
    fuzz_tensor *out = output(c, "out");
    int64_t columns = last(y), choices = position->shape[1];
    for (int64_t p = 0; out->count && p < position->count; p++)
        for (int64_t i = 0; i < columns; i++) {
            double value = y->numbers[(int64_t)position->numbers[p] * columns + i];
            double more = bias ? bias[(int64_t)indices[p] * columns + i] : 0, w = weights ? weights[p] : 1;
            out->numbers[p / choices * columns + i] += w * (value + more);
            out->size[p / choices * columns + i] += fabs(w) * (fabs(value) + fabs(more));
        }
}

/* ---- codes of 4 bits --------------------------------------------------------------------------------------------- */

static void dequantize_4bit(fuzz_call *c) {
    const double *packed = numbers(c, "packed"), *absmax = numbers(c, "absmax"), *code = numbers(c, "code");
    const double *nested = numbers(c, "nested_code"), *scale = numbers(c, "nested_absmax"), *add = numbers(c, "offset");
    int64_t block = whole(c, "blocksize"), inner = whole(c, "nested_blocksize");
    fuzz_tensor *weight = output(c, "weight");
    for (int64_t e = 0; e < weight->count; e++) {
        int byte = (int)packed[e / 2], number = e % 2 ? byte & 15 : byte >> 4;
        int64_t b = e / block;
        double most = absmax[b], size = fabs(most);
        if (nested) {
            double product = nested[(int)absmax[b]] * scale[b / inner];
            most = product + *add, size = fabs(product) + fabs(*add);
            if (size > 0x1p127) size = INFINITY;
        }
        want(weight, e, code[number] * most, fabs(code[number]) * size);
    }
}

/* ---- dropout ----------------------------------------------------------------------------------------------------- */

/* Word e % 4 of Philox 4x32 with seven rounds. */
static double random_word(uint64_t key, uint64_t offset, uint64_t e) {
    uint64_t word[4] = {e / 4 & 0xffffffff, e / 4 >> 32, offset & 0xffffffff, offset >> 32};
    uint64_t k[2] = {key & 0xffffffff, key >> 32};
    for (int round = 0; round < 7; round++) {
        uint64_t first = word[0] * 0xd2511f53u, second = word[2] * 0xcd9e8d57u;
        uint64_t next[4] = {(second >> 32) ^ word[1] ^ k[0], second & 0xffffffff, (first >> 32) ^ word[3] ^ k[1],
                            first & 0xffffffff};
        memcpy(word, next, sizeof word);
        k[0] = (k[0] + 0x9e3779b9u) & 0xffffffff, k[1] = (k[1] + 0xbb67ae85u) & 0xffffffff;
    }
    return (double)word[e % 4];
}

static void dropout(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    const double *seed = numbers(c, "seed"), *addend = numbers(c, "addend");
    double p = c->attributes[fuzz_attribute(c->function, "p")].d, scale = p < 1 ? 1 / (1 - p) : 0;
    fuzz_tensor *y = output(c, "y");
    for (int64_t e = 0; e < x->count; e++) {
        double word = random_word((uint64_t)(int64_t)seed[0], (uint64_t)(int64_t)seed[1], (uint64_t)e);
        double kept = x->numbers[e] * (word < floor(p * 0x1p32 + 0.5) ? 0 : scale), more = addend ? addend[e] : 0;
        want(y, e, kept + more, fabs(kept) + fabs(more));
    }
}

/* ---- the tables -------------------------------------------------------------------------------------------------- */

const fuzz_reference fuzz_references[] = {
    {"glu_forward", glu},
    {"glu_backward", glu},
    {"glu_joined_forward", glu_joined},
    {"glu_joined_backward", glu_joined},
    {"norm_forward", norm_forward},
    {"norm_backward", norm_backward},
    {"gated_rms_norm_forward", fuzz_gated_rms_norm_forward},
    {"gated_rms_norm_backward", fuzz_gated_rms_norm_backward},
    {"rope_forward", rope_forward},
    {"rope_backward", rope_backward},
    {"causal_conv1d_forward", fuzz_causal_conv1d_forward},
    {"causal_conv1d_backward", fuzz_causal_conv1d_backward},
    {"cross_entropy_forward", cross_entropy_forward},
    {"linear_cross_entropy_forward", linear_cross_entropy_forward},
    {"linear_logprobs_forward", linear_logprobs_forward},
    {"linear_divergence_forward", fuzz_linear_divergence_forward},
    {"scale", scale},
    {"moe_sort", moe_sort},
    {"moe_gather", moe_gather},
    {"moe_glu_forward", moe_glu_forward},
    {"moe_combine_forward", moe_combine_forward},
    {"moe_linear", fuzz_moe_linear},
    {"moe_transpose", moe_transpose},
    {"dequantize_4bit", dequantize_4bit},
    {"dropout", dropout},
    {"low_rank_add", fuzz_low_rank_add},
    {"low_rank_backward", fuzz_low_rank_backward},
    {"low_rank_dx", fuzz_low_rank_dx},
    {"low_rank_layers", fuzz_low_rank_layers},
    {"low_rank_linear", fuzz_low_rank_linear},
    {"low_rank_split", fuzz_low_rank_split},
    {"token_attention", fuzz_token_attention},
    {"segment_attention_forward", fuzz_segment_attention_forward},
    {"segment_attention_backward", fuzz_segment_attention_backward},
    {NULL, NULL},
};

/* Judged by bounds and repetition alone here: what a plain loop would say of them is said in tests/c and tests/py. */
const char *const fuzz_without_reference[] = {"cross_entropy_backward",    "linear_cross_entropy_backward",
                                              "linear_logprobs_backward",  "linear_divergence_backward",
                                              "low_rank_glu_backward",     "moe_glu_backward",
                                              "moe_combine_backward",      "gated_delta_rule_forward",
                                              "gated_delta_rule_backward", NULL};

void fuzz_refer(fuzz_call *c) {
    for (const fuzz_reference *r = fuzz_references; r->name; r++)
        if (strcmp(r->name, c->function->name) == 0) r->compute(c);
}
