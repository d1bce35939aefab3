/* segment_attention_cpu.c - attention within segments on CPU, a tile of queries by keys at a time, in float32. Forward,
 * a block of queries and a head go along the keys with the largest score so far, as online softmax has it (Milakov and
 * Gimelshein, 2018). Backward goes twice over the tiles, along the keys for dq and along the queries for dk and dv: so
 * no sum is shared by threads, and its order is the same whatever their number. */
#include "ops/segment_attention/segment_attention.h"

enum { QUERIES = SEGMENT_CPU_QUERIES, KEYS = SEGMENT_CPU_KEYS, COLUMNS = SEGMENT_CPU_COLUMNS };

/* Of all tokens, the queries and keys of a segment. */
typedef struct segment {
    int64_t query, query_end, key, key_end;
} segment;

/* ---- products ---------------------------------------------------------------------------------------------------- */

static void clear(float *out, int64_t n) { memset(out, 0, (size_t)n * sizeof *out); }

/* out [m, n] += a [m, depth] b [depth, n]; n is padded to COLUMNS, rows of b and out are `pitch` apart. Sums are short
 * before they are added: a library's products have many at a time, and are as exact. */
static void multiply(float *restrict out, int64_t m, int64_t n, int64_t depth, const float *restrict a,
                     int64_t row_stride, int64_t column_stride, const float *restrict b, int64_t pitch) {
    enum { ROWS = 4, SHORT = 16 };
    for (int64_t i = 0; i < m; i += ROWS) {
        const float *rows[ROWS]; /* where there are fewer, the last one again */
        for (int64_t r = 0; r < ROWS; r++) rows[r] = a + bst__lesser(i + r, m - 1) * row_stride;
        for (int64_t j = 0; j < n; j += COLUMNS)
            for (int64_t first = 0; first < depth; first += SHORT) {
                const int64_t end = bst__lesser(first + SHORT, depth);
                float sums[ROWS][COLUMNS] = {{0}};
                for (int64_t l = first; l < end; l++)
                    for (int64_t r = 0; r < ROWS; r++) {
                        const float factor = rows[r][l * column_stride];
                        for (int64_t e = 0; e < COLUMNS; e++) sums[r][e] += factor * b[l * pitch + j + e];
                    }
                for (int64_t r = 0; r < bst__lesser(ROWS, m - i); r++)
                    for (int64_t e = 0; e < COLUMNS; e++) out[(i + r) * pitch + j + e] += sums[r][e];
            }
    }
}

static int64_t padded(int64_t n) { return bst__divided_up(n, COLUMNS) * COLUMNS; }

/* [rows, dim] as [dim, KEYS], zeros behind the columns. */
static void transpose(float *restrict out, const float *restrict in, int64_t rows, int64_t dim, int64_t pitch) {
    for (int64_t j = 0; j < dim; j++) {
        for (int64_t i = 0; i < rows; i++) out[j * KEYS + i] = in[i * pitch + j];
        clear(out + j * KEYS + rows, padded(rows) - rows);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static const void *row_of(const bst_view *v, int64_t token, int64_t head) {
    return bst_at(v->data, token * v->stride[0] + head * v->stride[1], v->dtype);
}

/* Rows of a head, zeros behind them. */
static void load(float *out, const bst_view *v, int64_t first, int64_t count, int64_t head, int64_t dim,
                 int64_t pitch) {
    for (int64_t i = 0; i < count; i++) {
        bst_load(out + i * pitch, row_of(v, first + i, head), v->dtype, dim);
        clear(out + i * pitch + dim, pitch - dim);
    }
}

static void store(const bst_view *v, float *rows, int64_t first, int64_t count, int64_t head, float scale, int64_t dim,
                  int64_t pitch) {
    for (int64_t i = 0; i < count; i++) {
        float *row = rows + i * pitch;
        for (int64_t j = 0; j < dim; j++) row[j] *= scale;
        bst_store((void *)(uintptr_t)row_of(v, first + i, head), row, v->dtype, dim);
    }
}

/* The keys that a query sees, from `key` to below `end`. */
typedef struct sight {
    int64_t key, end;
} sight;

/* How many keys a query sees to a side, itself among them; without a window more than there are. */
static int64_t reach(const segment_attention_call *c) { return c->window ? c->window : INT64_MAX / 2; }

static sight sight_of(const segment_attention_call *c, const segment *s, int64_t query) {
    const int64_t place = query + s->key_end - s->query_end; /* of the key that stands where it does */
    sight seen = {place - reach(c) + 1, place + (c->causal ? 1 : reach(c))};
    if (seen.key < s->key) seen.key = s->key;
    seen.end = bst__lesser(seen.end, s->key_end);
    if (seen.end < seen.key) seen.end = seen.key;
    return seen;
}

/* Which of a tile's keys, counted there. */
static sight seen_of(const segment_attention_call *c, const segment *s, int64_t query, int64_t key, int64_t keys) {
    sight seen = sight_of(c, s, query);
    seen.key = seen.key < key ? 0 : bst__lesser(seen.key - key, keys);
    seen.end = seen.end < key ? 0 : bst__lesser(seen.end - key, keys);
    return seen;
}

/* The keys that any of a block's queries sees. */
static sight all_sight(const segment_attention_call *c, const segment *s, int64_t first, int64_t count) {
    return (sight){sight_of(c, s, first).key, sight_of(c, s, first + count - 1).end};
}

static segment segment_of(const segment_attention_call *c, int row, int64_t token) {
    if (!c->cuts.dims) {
        const int64_t of_row[2] = {c->queries / c->segments, c->keys / c->segments}, n = token / of_row[row];
        return (segment){n * of_row[0], (n + 1) * of_row[0], n * of_row[1], (n + 1) * of_row[1]};
    }
    const int32_t *queries = c->cuts.data, *keys = queries + c->segments + 1, *cuts = row ? keys : queries;
    int64_t low = 0, high = c->segments; /* the last one that does not begin behind it */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (cuts[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return (segment){queries[low], queries[low + 1], keys[low], keys[low + 1]};
}

static float *lse_of(const segment_attention_call *c, int64_t head, int64_t query) {
    return (float *)c->lse.data + head * c->queries + query;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Scores of a query and the `seen` of a tile's keys become exp(score - the largest so far); what is summed so far
 * follows. */
static void weigh(float *restrict scores, sight seen, int64_t keys, float scale, float *largest, double *sum,
                  float *restrict y, int64_t pitch) {
    float most = *largest, here = 0;
    for (int64_t j = seen.key; j < seen.end; j++) scores[j] *= scale;
#pragma omp simd reduction(max : most)
    for (int64_t j = seen.key; j < seen.end; j++) most = scores[j] > most ? scores[j] : most;
    const float shift = most == -INFINITY ? 0 : most; /* infinite scores below all others weigh nothing */
#pragma omp simd reduction(+ : here)
    for (int64_t j = seen.key; j < seen.end; j++) here += scores[j] = bst_exp(scores[j] - shift);
    clear(scores, seen.key);
    clear(scores + seen.end, keys - seen.end);
    if (most > *largest) {
        const float factor = bst_exp(*largest - most);
        *sum *= (double)factor;
        for (int64_t j = 0; j < pitch; j++) y[j] *= factor;
    }
    *largest = most;
    *sum += (double)here;
}

static void forward_part(const segment_attention_tiles *w, const segment_attention_call *c, const segment *s,
                         int64_t first, int64_t count, int64_t head) {
    const int64_t group = head / (c->heads / c->groups), pitch = w->pitch;
    const sight all = all_sight(c, s, first, count);
    float largest[QUERIES];
    double sum[QUERIES] = {0};
    for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY;
    load(w->q, &c->q, first, count, head, c->dim, pitch);
    clear(w->sums, count * pitch);
    BST_TILES(key, keys, all.key, all.end, KEYS) {
        load(w->k, &c->k, key, keys, group, c->dim, pitch);
        load(w->v, &c->v, key, keys, group, c->dim, pitch);
        transpose(w->k_columns, w->k, keys, c->dim, pitch);
        clear(w->p, count * KEYS);
        multiply(w->p, count, padded(keys), c->dim, w->q, pitch, 1, w->k_columns, KEYS);
        for (int64_t i = 0; i < count; i++)
            weigh(w->p + i * KEYS, seen_of(c, s, first + i, key, keys), keys, c->scale, &largest[i], &sum[i],
                  w->sums + i * pitch, pitch);
        multiply(w->sums, count, pitch, keys, w->p, KEYS, 1, w->v, pitch);
    }
    for (int64_t i = 0; i < count; i++) {
        const bool sees = sum[i] != 0; /* NaN too */
        float *y = w->sums + i * pitch, of_all = sees ? (float)sum[i] : 1;
        for (int64_t j = 0; j < c->dim; j++) y[j] /= of_all;
        *lse_of(c, head, first + i) = sees ? (float)((double)largest[i] + log(sum[i])) : INFINITY;
    }
    store(&c->y, w->sums, first, count, head, 1, c->dim, pitch);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Of a tile whose queries and keys are there: p, and in dp the gradient of its scores, divided by scale. */
static void differentiate(const segment_attention_tiles *w, const segment_attention_call *c, const segment *s,
                          const float *delta, int64_t first, int64_t count, int64_t head, int64_t key, int64_t keys) {
    clear(w->p, count * KEYS);
    clear(w->dp, count * KEYS);
    multiply(w->p, count, padded(keys), c->dim, w->q, w->pitch, 1, w->k_columns, KEYS);
    multiply(w->dp, count, padded(keys), c->dim, w->dy, w->pitch, 1, w->v_columns, KEYS);
    for (int64_t i = 0; i < count; i++) {
        float *restrict p = w->p + i * KEYS, *restrict dp = w->dp + i * KEYS;
        const float lse = *lse_of(c, head, first + i), minus = delta[head * c->queries + first + i];
        const sight seen = seen_of(c, s, first + i, key, keys);
        for (int64_t j = seen.key; j < seen.end; j++) {
            p[j] = bst_exp(c->scale * p[j] - lse);
            dp[j] = p[j] * (dp[j] - minus);
        }
        clear(p, seen.key), clear(p + seen.end, keys - seen.end);
        clear(dp, seen.key), clear(dp + seen.end, keys - seen.end);
    }
}

static void load_queries(const segment_attention_tiles *w, const segment_attention_call *c, int64_t first,
                         int64_t count, int64_t head) {
    load(w->q, &c->q, first, count, head, c->dim, w->pitch);
    load(w->dy, &c->dy, first, count, head, c->dim, w->pitch);
}

static void load_keys(const segment_attention_tiles *w, const segment_attention_call *c, int64_t key, int64_t keys,
                      int64_t group) {
    load(w->k, &c->k, key, keys, group, c->dim, w->pitch);
    load(w->v, &c->v, key, keys, group, c->dim, w->pitch);
    transpose(w->k_columns, w->k, keys, c->dim, w->pitch);
    transpose(w->v_columns, w->v, keys, c->dim, w->pitch);
}

static void queries_part(const segment_attention_tiles *w, const segment_attention_call *c, const segment *s,
                         float *delta, int64_t first, int64_t count, int64_t head) {
    const int64_t group = head / (c->heads / c->groups), pitch = w->pitch;
    const sight all = all_sight(c, s, first, count);
    load_queries(w, c, first, count, head);
    load(w->sums, &c->y, first, count, head, c->dim, pitch);
    for (int64_t i = 0; i < count; i++)
        delta[head * c->queries + first + i] =
            (float)bst_sum_of_products(w->dy + i * pitch, w->sums + i * pitch, c->dim);
    clear(w->sums, count * pitch);
    BST_TILES(key, keys, all.key, all.end, KEYS) {
        load_keys(w, c, key, keys, group);
        differentiate(w, c, s, delta, first, count, head, key, keys);
        multiply(w->sums, count, pitch, keys, w->dp, KEYS, 1, w->k, pitch);
    }
    store(&c->dq, w->sums, first, count, head, c->scale, c->dim, pitch);
}

static void keys_part(const segment_attention_tiles *w, const segment_attention_call *c, const segment *s,
                      const float *delta, int64_t key, int64_t keys, int64_t group) {
    const int64_t members = c->heads / c->groups, pitch = w->pitch;
    const int64_t place = key + s->query_end - s->key_end; /* of the query that stands where the first does */
    const int64_t first_one = c->causal ? place : place - reach(c) + 1; /* that sees one of them */
    const int64_t begin = first_one > s->query ? first_one : s->query;
    const int64_t end = bst__lesser(s->query_end, place + keys - 1 + reach(c));
    load_keys(w, c, key, keys, group);
    clear(w->sums, keys * pitch);
    clear(w->more, keys * pitch);
    for (int64_t head = group * members; head < (group + 1) * members; head++)
        BST_TILES(first, count, begin, end, QUERIES) {
            load_queries(w, c, first, count, head);
            differentiate(w, c, s, delta, first, count, head, key, keys);
            multiply(w->sums, keys, pitch, count, w->dp, 1, KEYS, w->q, pitch);
            multiply(w->more, keys, pitch, count, w->p, 1, KEYS, w->dy, pitch);
        }
    store(&c->dk, w->sums, key, keys, group, c->scale, c->dim, pitch);
    store(&c->dv, w->more, key, keys, group, 1, c->dim, pitch);
}

/* ---- strips ------------------------------------------------------------------------------------------------------ */

enum pass { FORWARD, OF_QUERIES, OF_KEYS };

/* Blocks of all tokens, head by head, and of each the parts that different segments have of it. */
static void each_part(const segment_attention_work *work, enum pass pass, int64_t begin, int64_t end) {
    const segment_attention_call *c = work->call;
    const bool of_keys = pass == OF_KEYS;
    const int64_t tokens = of_keys ? c->keys : c->queries, heads = of_keys ? c->groups : c->heads;
    const int64_t block = of_keys ? KEYS : QUERIES, blocks = bst__divided_up(tokens, block) * heads;
    for (int64_t strip = begin; strip < end; strip++) {
        segment_attention_tiles w;
        bst__segment_attention_share_out(c, work->work + strip * work->floats, &w);
        for (int64_t i = strip; i < blocks; i += work->strips) { /* far from each other: later ones may see more */
            const int64_t head = i % heads, last = bst__lesser(tokens, (i / heads + 1) * block);
            for (int64_t at = i / heads * block, count; at < last; at += count) {
                const segment s = segment_of(c, of_keys, at);
                count = bst__lesser(last, of_keys ? s.key_end : s.query_end) - at;
                if (pass == FORWARD) forward_part(&w, c, &s, at, count, head);
                if (pass == OF_QUERIES) queries_part(&w, c, &s, work->delta, at, count, head);
                if (pass == OF_KEYS) keys_part(&w, c, &s, work->delta, at, count, head);
            }
        }
    }
}

void BST_CPU(bst__segment_attention_forward_cpu)(void *context, int64_t begin, int64_t end) {
    each_part(context, FORWARD, begin, end);
}

void BST_CPU(bst__segment_attention_queries_cpu)(void *context, int64_t begin, int64_t end) {
    each_part(context, OF_QUERIES, begin, end);
}

void BST_CPU(bst__segment_attention_keys_cpu)(void *context, int64_t begin, int64_t end) {
    each_part(context, OF_KEYS, begin, end);
}

/* ---- one query a row --------------------------------------------------------------------------------------------- */

static void of_token(const token_attention_call *c, float *work, int64_t row, int64_t head) {
    const int64_t dim = c->dim, group = head / (c->heads / c->groups);
    const bst_view *k = &c->k, *v = &c->v;
    float *q = work, *other = q + dim, *weights = other + dim, top = -INFINITY;
    bst_load(q, bst_at(c->q.data, row * c->q.stride[0] + head * c->q.stride[1], c->q.dtype), c->q.dtype, dim);
    for (int64_t j = 0; j < c->keys; j++) {
        float bias = 0;
        if (c->bias.dims)
            bst_load(&bias, bst_at(c->bias.data, row * c->bias.stride[0] + j, c->bias.dtype), c->bias.dtype, 1);
        weights[j] = bias;
        if (bias == -INFINITY) continue;
        const int64_t at = row * k->stride[0] + group * k->stride[1] + j * k->stride[2];
        bst_load(other, bst_at(k->data, at, k->dtype), k->dtype, dim);
        weights[j] = c->scale * (float)bst_sum_of_products(q, other, dim) + bias;
        top = bst_max(top, weights[j]);
    }
    float *sums = q; /* the query has been read */
    double total = 0;
    clear(sums, dim);
    for (int64_t j = 0; j < c->keys; j++) {
        if (weights[j] == -INFINITY) continue;
        const float weight = bst_exp(weights[j] - top);
        const int64_t at = row * v->stride[0] + group * v->stride[1] + j * v->stride[2];
        bst_load(other, bst_at(v->data, at, v->dtype), v->dtype, dim);
        total += (double)weight;
        for (int64_t i = 0; i < dim; i++) sums[i] += weight * other[i];
    }
    for (int64_t i = 0; total > 0 && i < dim; i++) sums[i] = (float)((double)sums[i] / total);
    bst_store(bst_at(c->y.data, (row * c->heads + head) * dim, c->y.dtype), sums, c->y.dtype, dim);
}

void BST_CPU(bst__token_attention_cpu)(void *context, int64_t begin, int64_t end) {
    const token_attention_call *c = context;
    for (int64_t strip = begin; strip < end; strip++)
        for (int64_t i = strip; i < c->rows * c->heads; i += c->strips)
            of_token(c, c->work + strip * (2 * c->dim + c->keys), i / c->heads, i % c->heads);
}
