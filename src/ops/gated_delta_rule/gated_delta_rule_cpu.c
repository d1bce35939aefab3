/* gated_delta_rule_cpu.c - the gated delta rule on CPU, a head of keys with its heads of values at a time: the products
 * of gated_delta_rule.cu and gated_delta_rule_backward.cu, whose names these are, in float32. T, an inverse, is not
 * made: rows of V follow from those before them. */
#include "ops/gated_delta_rule/gated_delta_rule.h"
#include "ops/gated_delta_rule/gated_delta_rule_args.h"

enum { CHUNK = DELTA_CHUNK };

/* A head of a sequence: of the tokens of a batch from `begin` to `end`. */
typedef struct delta_head {
    int64_t sequence, batch, begin, end, key_head, head;
} delta_head;

/* ---- products ---------------------------------------------------------------------------------------------------- */

static void clear(float *out, int64_t n) { memset(out, 0, (size_t)n * sizeof *out); }

/* out [m, n] += a [m, depth] b [depth, n], n at most that of a state's row; a's rows and columns are so far apart. Sums
 * are short before they are added: a library's products have many at a time, and are as exact. */
static void multiply(float *restrict out, int64_t m, int64_t n, int64_t depth, const float *restrict a,
                     int64_t row_stride, int64_t column_stride, const float *restrict b) {
    enum { SHORT = 16 };
    float sums[DELTA_MOST_VALUE];
    for (int64_t i = 0; i < m; i++)
        for (int64_t first = 0; first < depth; first += SHORT) {
            const int64_t end = bst__lesser(first + SHORT, depth);
            clear(sums, n);
            for (int64_t l = first; l < end; l++) {
                const float factor = a[i * row_stride + l * column_stride];
                for (int64_t j = 0; j < n; j++) sums[j] += factor * b[l * n + j];
            }
            for (int64_t j = 0; j < n; j++) out[i * n + j] += sums[j];
        }
}

static void transpose(float *restrict out, const float *restrict in, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[j * rows + i] = in[i * columns + j];
}

static void scale_rows(float *out, const float *in, const float *factors, float times, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[i * columns + j] = times * factors[i] * in[i * columns + j];
}

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

static const void *row_of(const bst_view *v, int64_t batch, int64_t token, int64_t head) {
    return bst_at(v->data, batch * v->stride[0] + token * v->stride[1] + head * v->stride[2], v->dtype);
}

static float number_of(const bst_view *v, int64_t batch, int64_t token, int64_t head) {
    float number;
    bst_load(&number, row_of(v, batch, token, head), v->dtype, 1);
    return number;
}

static void load_values(float *out, const delta_call *c, const bst_view *v, const delta_head *h, int64_t first,
                        int64_t count) {
    for (int64_t i = 0; i < count; i++)
        bst_load(out + i * c->value, row_of(v, h->batch, first + i, h->head), v->dtype, c->value);
}

static float inverse_length(const delta_call *c, const float *row) {
    return c->normalize ? 1 / sqrtf((float)bst_sum_of_products(row, row, c->key) + c->eps) : 1;
}

static void load_keys(float *out, const delta_call *c, const bst_view *v, const delta_head *h, int64_t first,
                      int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float *row = out + i * c->key;
        bst_load(row, row_of(v, h->batch, first + i, h->key_head), v->dtype, c->key);
        const float factor = inverse_length(c, row);
        for (int64_t j = 0; j < c->key; j++) row[j] *= factor;
    }
}

static float decay(const delta_workspace *w, int64_t i, int64_t j) { return bst_exp((float)(w->sum[i] - w->sum[j])); }

/* Keys, queries and numbers of a chunk; A and P. */
static void load_chunk(delta_workspace *w, const delta_call *c, const delta_head *h, int64_t first, int64_t count) {
    double so_far = 0;
    load_keys(w->k, c, &c->k, h, first, count);
    load_keys(w->q, c, &c->q, h, first, count);
    for (int64_t i = 0; i < count; i++) {
        w->sum[i] = so_far += number_of(&c->g, h->batch, first + i, h->head);
        w->beta[i] = number_of(&c->beta, h->batch, first + i, h->head);
    }
    for (int64_t i = 0; i < count; i++) w->rise[i] = bst_exp((float)w->sum[i]), w->fall[i] = decay(w, count - 1, i);
    transpose(w->k_columns, w->k, count, c->key);
    clear(w->a, count * count);
    clear(w->p, count * count);
    multiply(w->a, count, count, c->key, w->k, c->key, 1, w->k_columns);
    multiply(w->p, count, count, c->key, w->q, c->key, 1, w->k_columns);
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < count; j++) {
            const float of_both = j <= i ? decay(w, i, j) : 0;
            w->a[i * count + j] *= j < i && !c->additive ? w->beta[i] * of_both : 0;
            w->p[i * count + j] *= c->scale * of_both;
        }
}

/* R, what the values have left, and V, of the state before the chunk. */
static void solve(delta_workspace *w, const delta_call *c, const delta_head *h, const float *state, int64_t first,
                  int64_t count) {
    const int64_t n = c->value;
    clear(w->r, count * n);
    if (!c->additive) multiply(w->r, count, n, c->key, w->k, c->key, 1, state);
    load_values(w->left, c, &c->v, h, first, count);
    for (int64_t i = 0; i < count; i++) {
        float *v = w->v + i * n;
        for (int64_t j = 0; j < n; j++) {
            w->left[i * n + j] -= w->rise[i] * w->r[i * n + j];
            v[j] = -w->beta[i] * w->left[i * n + j];
        }
        if (!c->additive) multiply(v, 1, n, i, w->a + i * count, 0, 1, w->v);
        for (int64_t j = 0; j < n; j++) v[j] = -v[j];
    }
}

/* The state after the chunk; `scratch` [C, V]. */
static void advance(delta_workspace *w, const delta_call *c, float *state, float *scratch, int64_t count) {
    for (int64_t i = 0; i < c->key * c->value; i++) state[i] *= w->rise[count - 1];
    scale_rows(scratch, w->v, w->fall, 1, count, c->value);
    multiply(state, c->key, c->value, count, w->k, 1, c->key, scratch);
}

static int64_t count_of(const delta_head *h, int64_t first) { return bst__lesser(CHUNK, h->end - first); }

static void load_state(float *out, const delta_call *c, const bst_view *state, const delta_head *h) {
    const int64_t n = c->key * c->value;
    clear(out, n);
    if (state->data) memcpy(out, (const float *)state->data + (h->batch * c->heads + h->head) * n, (size_t)n * 4);
}

static void store_state(const delta_call *c, const bst_view *state, const delta_head *h, const float *from) {
    const int64_t n = c->key * c->value;
    if (state->data) memcpy((float *)state->data + (h->batch * c->heads + h->head) * n, from, (size_t)n * 4);
}

static float skip_of(const delta_call *c, const delta_head *h) {
    float skip = 0;
    if (c->skip.data) bst_load(&skip, bst_at(c->skip.data, h->head, c->skip.dtype), c->skip.dtype, 1);
    return skip;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static void forward_head(delta_workspace *w, const delta_call *c, const delta_head *h) {
    const int64_t n = c->value;
    const float skip = skip_of(c, h);
    load_state(w->state, c, &c->initial, h);
    for (int64_t first = h->begin; first < h->end; first += CHUNK) {
        const int64_t count = count_of(h, first);
        load_chunk(w, c, h, first, count);
        solve(w, c, h, w->state, first, count);
        clear(w->r, count * n);
        multiply(w->r, count, n, c->key, w->q, c->key, 1, w->state);
        scale_rows(w->r, w->r, w->rise, c->scale, count, n);
        multiply(w->r, count, n, count, w->p, count, 1, w->v);
        if (c->skip.data) {
            load_values(w->left, c, &c->v, h, first, count);
            for (int64_t i = 0; i < count * n; i++) w->r[i] += skip * w->left[i];
        }
        for (int64_t i = 0; i < count; i++)
            bst_store(bst_at(c->y.data, ((h->batch * c->tokens + first + i) * c->heads + h->head) * n, c->y.dtype),
                      w->r + i * n, c->y.dtype, n);
        advance(w, c, w->state, w->r, count);
    }
    store_state(c, &c->final, h, w->state);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* What a chunk leaves to q, k, v, g, beta, and to the state before it. */
static void backward_chunk(delta_workspace *w, const delta_call *c, const delta_head *h, const float *state,
                           int64_t first, int64_t count, double *skipped) {
    const int64_t n = c->value, k = c->key, row_at = (h->batch * c->tokens + first) * c->heads + h->head;
    double dg[CHUNK] = {0}, dbeta[CHUNK] = {0}, at_end = 0;
    const float skip = skip_of(c, h);
    float less[CHUNK], row[DELTA_MOST_VALUE], *dq = w->dq_here, *dk = w->dk_here;
    load_chunk(w, c, h, first, count);
    solve(w, c, h, state, first, count);
    load_values(w->dy, c, &c->dy, h, first, count);
    if (c->skip.data) {
        load_values(w->read, c, &c->v, h, first, count);
        *skipped += bst_sum_of_products(w->dy, w->read, count * n);
    }
    clear(w->read, count * n);
    multiply(w->read, count, n, k, w->k, k, 1, w->dstate);
    scale_rows(w->read, w->read, w->fall, 1, count, n);
    memcpy(w->dv, w->read, (size_t)(count * n) * sizeof(float));
    multiply(w->dv, count, n, count, w->p, 1, count, w->dy);
    memcpy(w->dx, w->dv, (size_t)(count * n) * sizeof(float));
    for (int64_t l = count - 1; l >= 0 && !c->additive; l--) {
        float *dx = w->dx + l * n;
        for (int64_t j = 0; j < n; j++) dx[j] = -dx[j];
        multiply(dx, 1, n, count - 1 - l, w->a + (l + 1) * count + l, 0, count, dx + n);
        for (int64_t j = 0; j < n; j++) dx[j] = -dx[j];
    }
    for (int64_t i = 0; i < count; i++) {
        const double kept = bst_sum_of_products(w->v + i * n, w->read + i * n, n);
        less[i] = c->additive ? 0 : -w->beta[i] * w->rise[i];
        dbeta[i] = bst_sum_of_products(w->dx + i * n, w->left + i * n, n);
        dg[i] = (double)less[i] * bst_sum_of_products(w->dx + i * n, w->r + i * n, n) - kept;
        at_end += kept;
        for (int64_t j = 0; j < n; j++) row[j] = w->beta[i] * w->dx[i * n + j] + skip * w->dy[i * n + j];
        bst_store(bst_at(c->dv.data, (row_at + i * c->heads) * n, c->dv.dtype), row, c->dv.dtype, n);
    }
    at_end += (double)w->rise[count - 1] * bst_sum_of_products(state, w->dstate, k * n);

    clear(w->da, count * count);
    clear(w->dp, count * count);
    transpose(w->columns, w->v, count, n);
    multiply(w->da, count, count, n, w->dx, n, 1, w->columns);
    multiply(w->dp, count, count, n, w->dy, n, 1, w->columns);
    clear(dq, count * k);
    clear(dk, count * k);
    transpose(w->columns, w->dstate, k, n);
    scale_rows(w->v, w->v, w->fall, 1, count, n);
    multiply(dk, count, k, n, w->v, n, 1, w->columns);
    transpose(w->columns, state, k, n);
    scale_rows(w->dx, w->dx, less, 1, count, n);
    multiply(dk, count, k, n, w->dx, n, 1, w->columns);
    multiply(dq, count, k, n, w->dy, n, 1, w->columns);
    scale_rows(dq, dq, w->rise, c->scale, count, k);

    /* The state before the chunk. */
    for (int64_t i = 0; i < k * n; i++) w->dstate[i] *= w->rise[count - 1];
    multiply(w->dstate, k, n, count, w->k, 1, k, w->dx);
    scale_rows(w->dy, w->dy, w->rise, c->scale, count, n);
    multiply(w->dstate, k, n, count, w->q, 1, k, w->dy);

    /* Within the chunk: M in the place of dA, N in that of dP. */
    for (int64_t i = 0; i < count; i++) {
        dg[i] += bst_sum_of_products(dq + i * k, w->q + i * k, k);
        for (int64_t j = 0; j < count; j++) {
            float *da = &w->da[i * count + j], *dp = &w->dp[i * count + j];
            const float of_both = j <= i ? decay(w, i, j) : 0, of_a = j < i && !c->additive ? -*da * of_both : 0;
            const double both = j < i ? (double)of_a * bst_sum_of_products(w->k + i * k, w->k + j * k, k) : 0;
            const double change = (double)w->beta[i] * both + (double)*dp * (double)w->p[i * count + j];
            dbeta[i] += both;
            dg[i] += change;
            dg[j] -= change;
            *da = w->beta[i] * of_a;
            *dp *= c->scale * of_both;
        }
    }
    multiply(dk, count, k, count, w->da, count, 1, w->k);
    multiply(dk, count, k, count, w->da, 1, count, w->k);
    multiply(dk, count, k, count, w->dp, 1, count, w->q);
    multiply(dq, count, k, count, w->dp, count, 1, w->k);
    /* Short sums, added to those of the other heads. */
    float *const all_dq = w->dq + (first - h->begin) * k, *const all_dk = w->dk + (first - h->begin) * k;
    for (int64_t i = 0; i < count * k; i++) all_dq[i] += dq[i], all_dk[i] += dk[i];
    for (int64_t i = count - 1; i >= 0; i--) {
        const float both[] = {(float)(at_end += dg[i]), (float)dbeta[i]};
        bst_store(bst_at(c->dg.data, row_at + i * c->heads, c->dg.dtype), &both[0], c->dg.dtype, 1);
        bst_store(bst_at(c->dbeta.data, row_at + i * c->heads, c->dbeta.dtype), &both[1], c->dbeta.dtype, 1);
    }
}

static void backward_head(delta_workspace *w, const delta_call *c, const delta_head *h) {
    const int64_t states = c->key * c->value;
    double skipped = 0;
    load_state(w->state, c, &c->initial, h);
    for (int64_t first = h->begin; first < h->end; first += CHUNK) {
        const int64_t count = count_of(h, first);
        memcpy(w->states + (first - h->begin) / CHUNK * states, w->state, (size_t)states * sizeof(float));
        load_chunk(w, c, h, first, count);
        solve(w, c, h, w->state, first, count);
        advance(w, c, w->state, w->r, count);
    }
    load_state(w->dstate, c, &c->dfinal, h);
    for (int64_t chunk = bst__divided_up(h->end - h->begin, CHUNK) - 1; chunk >= 0; chunk--) {
        const int64_t first = h->begin + chunk * CHUNK;
        backward_chunk(w, c, h, w->states + chunk * states, first, count_of(h, first), &skipped);
    }
    c->skipped[h->sequence * c->heads + h->head] = (float)skipped;
    store_state(c, &c->dinitial, h, w->dstate);
}

/* A gradient with respect to rows of length 1 as one with respect to what was normalised, to memory. */
static void store_keys(const delta_call *c, const bst_view *x, const bst_view *dx, const delta_head *h, float *sums) {
    float row[DELTA_MOST_KEY];
    for (int64_t i = h->begin; i < h->end; i++) {
        float *gradient = sums + (i - h->begin) * c->key;
        if (c->normalize) {
            bst_load(row, row_of(x, h->batch, i, h->key_head), x->dtype, c->key);
            const float inverse = inverse_length(c, row);
            const float along = inverse * inverse * (float)bst_sum_of_products(row, gradient, c->key);
            for (int64_t j = 0; j < c->key; j++) gradient[j] = inverse * (gradient[j] - along * row[j]);
        }
        int64_t at = ((h->batch * c->tokens + i) * c->key_heads + h->key_head) * c->key;
        bst_store(bst_at(dx->data, at, dx->dtype), gradient, dx->dtype, c->key);
    }
}

/* ---- strips ------------------------------------------------------------------------------------------------------ */

static delta_head head_of(const delta_call *c, int64_t i) {
    const int64_t sequence = i / c->key_heads, key_head = i % c->key_heads;
    if (!c->boundaries) return (delta_head){sequence, sequence, 0, c->tokens, key_head, 0};
    return (delta_head){sequence, 0, c->boundaries[sequence], c->boundaries[sequence + 1], key_head, 0};
}

static void each_head(const delta_call *c, bool backward, int64_t begin, int64_t end) {
    const int64_t heads = c->sequences * c->key_heads, group = c->heads / c->key_heads;
    for (int64_t strip = begin; strip < end; strip++) {
        delta_workspace w;
        bst__delta_share_out(c, backward, c->work + strip * c->floats, &w);
        for (int64_t i = strip; i < heads; i += c->strips) { /* far from each other: short sequences may all be last */
            delta_head h = head_of(c, i);
            const int64_t keys = (h.end - h.begin) * c->key;
            if (backward) clear(w.dq, keys), clear(w.dk, keys);
            for (int64_t member = 0; member < group; member++) {
                h.head = h.key_head * group + member;
                backward ? backward_head(&w, c, &h) : forward_head(&w, c, &h);
            }
            if (backward) store_keys(c, &c->q, &c->dq, &h, w.dq), store_keys(c, &c->k, &c->dk, &h, w.dk);
        }
    }
}

void BST_CPU(bst__delta_forward_cpu)(void *context, int64_t begin, int64_t end) {
    each_head(context, false, begin, end);
}
void BST_CPU(bst__delta_backward_cpu)(void *context, int64_t begin, int64_t end) {
    each_head(context, true, begin, end);
}

void BST_CPU(bst__delta_skip_cpu)(void *context, int64_t begin, int64_t end) {
    const delta_call *c = context;
    float sums[BST_TILE];
    (void)begin, (void)end;
    BST_TILES(at, n, 0, c->heads, BST_TILE) {
        bst_sum_rows(sums, c->skipped + at, c->sequences, c->heads, n);
        bst_store(bst_at(c->dskip.data, at, c->dskip.dtype), sums, c->dskip.dtype, n);
    }
}
