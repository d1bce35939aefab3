/* reference_segment_attention.c - attention within segments in float64. Backward takes y and lse as they are given. */
#include "reference.h"

/* What weighs nothing in float32, up to 1.2e-38, is not nothing here: all of it may be missing, where of a size no more
 * than 2e-5 may. */
#define NOTHING 1e-33

/* The keys that a query sees, and its segment. */
typedef struct seen {
    int64_t begin, end, key, query, query_end, key_end;
} seen;

static seen seen_of(const fuzz_call *c, int64_t query) {
    const fuzz_tensor *cuts = input(c, "cuts"), *q = input(c, "q"), *k = input(c, "k");
    const int64_t rows = whole(c, "rows") ? whole(c, "rows") : 1, window = whole(c, "window");
    seen s;
    if (cuts) {
        const int64_t count = last(cuts);
        int64_t n = 0;
        while (query >= (int64_t)cuts->numbers[n + 1]) n++;
        s = (seen){.begin = (int64_t)cuts->numbers[count + n],
                   .query = (int64_t)cuts->numbers[n],
                   .query_end = (int64_t)cuts->numbers[n + 1],
                   .key_end = (int64_t)cuts->numbers[count + n + 1]};
    } else {
        const int64_t queries = q->shape[0] / rows, keys = k->shape[0] / rows, n = query / queries;
        s = (seen){.begin = n * keys, .query = n * queries, .query_end = (n + 1) * queries, .key_end = (n + 1) * keys};
    }
    s.key = s.begin;
    const int64_t place = s.key_end + query - s.query_end;
    s.end = whole(c, "causal") ? place + 1 : s.key_end;
    if (window && place + window < s.end) s.end = place + window;
    if (window && place - window + 1 > s.begin) s.begin = place - window + 1;
    return s;
}

/* What was found of a segment, which holds for all of its queries and heads. */
typedef struct spill {
    seen of;
    bool known;
    double found;
} spill;

static double look_for_spills(const fuzz_call *c, const seen *s, const char *const *names) {
    for (; (whole(c, "causal") || whole(c, "window")) && *names; names++) {
        const fuzz_tensor *t = input(c, *names);
        const bool of_keys = **names == 'k' || **names == 'v';
        const int64_t row = t->shape[1] * t->shape[2], end = (of_keys ? s->key_end : s->query_end) * row;
        for (int64_t e = (of_keys ? s->key : s->query) * row; e < end; e++)
            if (!isfinite(t->numbers[e])) return INFINITY;
    }
    return 0;
}

/* Infinite where a weight of nothing meets what is not finite: a key that is not seen, in the tile of one that is. */
static double unless_spilled(const fuzz_call *c, spill *last, const seen *s, const char *const *names) {
    const seen *of = &last->of;
    if (!last->known || of->key != s->key || of->key_end != s->key_end || of->query != s->query ||
        of->query_end != s->query_end)
        *last = (spill){.of = *s, .known = true, .found = look_for_spills(c, s, names)};
    return last->found;
}

static double dot(const double *a, const double *b, int64_t n, double *size) {
    double sum = 0;
    *size = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i], *size += fabs(a[i] * b[i]);
    return sum;
}

static double scale_of(const fuzz_call *c, int64_t dim) {
    return real(c, "scale") != 0 ? real(c, "scale") : 1 / sqrt((double)dim);
}

/* An error of a score is one of its weight's factor; beyond what float32 holds there is no telling. */
static double unless_large(double size) { return size < 1e30 ? size : INFINITY; }

void fuzz_segment_attention_forward(fuzz_call *c) {
    const fuzz_tensor *q = input(c, "q"), *k = input(c, "k");
    const double *v = numbers(c, "v");
    fuzz_tensor *y = output(c, "y"), *lse = output(c, "lse");
    const int64_t queries = q->shape[0], heads = q->shape[1], dim = q->shape[2], groups = k->shape[1];
    const double scale = scale_of(c, dim);
    double *scores = calloc((size_t)(k->shape[0] + 1), sizeof *scores);
    if (!scores) abort();
    spill last = {.known = false};
    for (int64_t at = 0; at < queries * heads; at++) {
        const int64_t query = at / heads, head = at % heads, group = head / (heads / groups);
        const seen s = seen_of(c, query);
        const double spilled = unless_spilled(c, &last, &s, (const char *const[]){"v", NULL});
        double top = -INFINITY, total = 0, most = 1, size;
        for (int64_t j = s.begin; j < s.end; j++) {
            const double *key = k->numbers + (j * groups + group) * dim;
            scores[j] = scale * dot(q->numbers + at * dim, key, dim, &size);
            /* The scale comes after the sum. */
            most = fmax(most, unless_large(size * fmax(fabs(scale), 1)));
            top = fmax(top, scores[j]);
        }
        for (int64_t j = s.begin; j < s.end; j++) total += exp(scores[j] - top);
        want(lse, head * queries + query, s.end > s.begin ? top + log(total) : INFINITY, s.end > s.begin ? most : 0);
        for (int64_t i = 0; i < dim; i++) {
            double sum = 0, sizes = spilled;
            for (int64_t j = s.begin; j < s.end; j++) {
                const double term = exp(scores[j] - top) / total * v[(j * groups + group) * dim + i];
                sum += term, sizes += fabs(term);
            }
            for (int64_t j = s.begin; j < s.end; j++) sizes += NOTHING * fabs(v[(j * groups + group) * dim + i]);
            want(y, at * dim + i, sum, unless_large(sizes) * most);
        }
    }
    free(scores);
}

void fuzz_segment_attention_backward(fuzz_call *c) {
    const fuzz_tensor *q = input(c, "q"), *k = input(c, "k");
    const double *v = numbers(c, "v"), *dy = numbers(c, "dy"), *y = numbers(c, "y"), *lse = numbers(c, "lse");
    fuzz_tensor *dq = output(c, "dq"), *dk = output(c, "dk"), *dv = output(c, "dv");
    const int64_t queries = q->shape[0], heads = q->shape[1], dim = q->shape[2], groups = k->shape[1];
    const double scale = scale_of(c, dim);
    spill last = {.known = false};
    for (int64_t at = 0; at < queries * heads; at++) {
        const int64_t query = at / heads, head = at % heads, group = head / (heads / groups);
        const double *of_q = q->numbers + at * dim, *of_dy = dy + at * dim;
        const seen s = seen_of(c, query);
        const double spilled = unless_spilled(c, &last, &s, (const char *const[]){"q", "k", "v", "y", "dy", NULL});
        double of_delta, delta = dot(of_dy, y + at * dim, dim, &of_delta);
        for (int64_t i = 0; spilled > 0 && i < dim; i++) {
            dq->size[at * dim + i] = INFINITY;
            for (int64_t j = s.key; j < s.key_end; j++)
                dk->size[(j * groups + group) * dim + i] = dv->size[(j * groups + group) * dim + i] = INFINITY;
        }
        for (int64_t j = s.begin; j < s.end; j++) {
            const int64_t from = (j * groups + group) * dim;
            double of_score, of_dp, score = scale * dot(of_q, k->numbers + from, dim, &of_score);
            const double dp = dot(of_dy, v + from, dim, &of_dp), given = lse[head * queries + query];
            const double p = exp(score - given);
            const double off = unless_large(of_score * fmax(fabs(scale), 1) + fabs(given) + 1);
            /* A weight that is nothing in float32 may meet a large gradient, and one that is too large a zero. */
            const double weight = p < 1e36 ? p + NOTHING : INFINITY;
            const double ds = p * (dp - delta), of_ds = unless_large(weight * unless_large(of_dp + of_delta)) * off;
            for (int64_t i = 0; i < dim; i++) {
                dq->numbers[at * dim + i] += scale * ds * k->numbers[from + i];
                dk->numbers[from + i] += scale * ds * of_q[i];
                dv->numbers[from + i] += p * of_dy[i];
                dq->size[at * dim + i] += fmax(fabs(scale), 1) * unless_large(of_ds * fabs(k->numbers[from + i]));
                dk->size[from + i] += fmax(fabs(scale), 1) * unless_large(of_ds * fabs(of_q[i]));
                dv->size[from + i] += unless_large(weight * fabs(of_dy[i])) * off;
            }
        }
    }
}

void fuzz_token_attention(fuzz_call *c) {
    const fuzz_tensor *q = input(c, "q"), *k = input(c, "k");
    const double *v = numbers(c, "v"), *bias = numbers(c, "bias");
    fuzz_tensor *y = output(c, "y");
    const int64_t heads = q->shape[1], dim = q->shape[2], groups = k->shape[1], keys = k->shape[2];
    const double scale = scale_of(c, dim);
    double *scores = calloc((size_t)(keys + 1), sizeof *scores);
    if (!scores) abort();
    for (int64_t at = 0; at < q->shape[0] * heads; at++) {
        const int64_t row = at / heads, first = (row * groups + at % heads / (heads / groups)) * keys;
        double top = -INFINITY, total = 0, most = 1, size;
        for (int64_t j = 0; j < keys; j++) {
            const double more = bias ? bias[row * keys + j] : 0;
            scores[j] = more;
            if (more == -INFINITY) continue;
            scores[j] += scale * dot(q->numbers + at * dim, k->numbers + (first + j) * dim, dim, &size);
            /* The query is multiplied by the scale first. */
            most = fmax(most, unless_large(size * fmax(fabs(scale), 1) + fabs(more)));
            top = fmax(top, scores[j]);
        }
        for (int64_t j = 0; j < keys; j++)
            if (scores[j] != -INFINITY) total += exp(scores[j] - top);
        for (int64_t i = 0; i < dim; i++) {
            double sum = 0, sizes = 0;
            for (int64_t j = 0; j < keys; j++) {
                if (scores[j] == -INFINITY) continue;
                const double value = v[(first + j) * dim + i], term = exp(scores[j] - top) / total * value;
                sum += term, sizes += fabs(term) + NOTHING * fabs(value);
            }
            want(y, at * dim + i, sum, unless_large(sizes) * most);
        }
    }
    free(scores);
}
