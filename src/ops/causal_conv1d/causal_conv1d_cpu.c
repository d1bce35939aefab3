/* causal_conv1d_cpu.c - causal convolutions on CPU, a tile of channels at a time, token by token.
 *
 * The rows of a window stay in a ring of float32 tiles, so that each is read once; position p of a sequence has the
 * place p modulo the taps. A row of several sequences is taken as these one after the other. Sums of gradients are
 * float32 over short runs of tokens, and float64 over these. */
#include "ops/causal_conv1d/causal_conv1d.h"

#include "core/gated_unit.h"

/* Channels of a tile: with eight taps all that the backward pass has of one stays in a second-level cache, with four in
 * 48 KiB. RUN: tokens that are summed in float32. */
enum { TILE = 256, TAPS = CAUSAL_CONV1D_MOST_TAPS, RUN = 64 };

/* The weights and biases of a tile. */
typedef struct taps {
    int64_t count, at, n; /* taps; the tile's first channel, and how many it has */
    float weight[TAPS][TILE], bias[TILE];
} taps;

/* The rows of a window. */
typedef float ring[TAPS][TILE];

static void load_taps(const bst_view *v, taps *of, int64_t at, int64_t n) {
    const bst_view *weight = &v[WEIGHT], *bias = &v[BIAS];
    float packed[TAPS * TILE];
    of->count = weight->size[1];
    of->at = at;
    of->n = n;
    bst_load(packed, bst_at(weight->data, at * of->count, weight->dtype), weight->dtype, n * of->count);
    for (int64_t k = 0; k < of->count; k++)
        for (int64_t i = 0; i < n; i++) of->weight[k][i] = packed[i * of->count + k];
    if (bias->data)
        bst_load(of->bias, bst_at(bias->data, at, bias->dtype), bias->dtype, n);
    else
        memset(of->bias, 0, sizeof of->bias);
}

static float *row_of(ring rows, const taps *of, int64_t position) { return rows[(position + of->count) % of->count]; }

static void *tile_at(const bst_view *v, const taps *of, int64_t token) {
    return bst_at(v->data, bst__row_start(&v->rows, token) + of->at, v->dtype);
}

static void load_tile(float *tile, const bst_view *v, const taps *of, int64_t token) {
    bst_load(tile, tile_at(v, of, token), v->dtype, of->n);
}

/* Whether a sequence begins at a token: each does at its row's beginning, and those that share a row where seq_idx
 * changes. */
static bool begins(const bst_view *v, int64_t token) {
    const int32_t *seq_idx = v[SEQ_IDX].data;
    return token % v[X].size[1] == 0 || (seq_idx && seq_idx[token] != seq_idx[token - 1]);
}

/* The position of a token: how many of its sequence are before it, counted as far as windows reach. */
static int64_t position_of(const bst_view *v, const taps *of, int64_t token) {
    int64_t before = 0;
    while (before < of->count - 1 && !begins(v, token - before)) before++;
    return before;
}

/* The rows before a position; those before the sequence are zeros. token: of that position. */
static void load_before(ring rows, const bst_view *x, const taps *of, int64_t position, int64_t token) {
    for (int64_t back = 1; back < of->count; back++) {
        float *row = row_of(rows, of, position - back);
        if (position >= back)
            load_tile(row, x, of, token - back);
        else
            memset(row, 0, sizeof *rows);
    }
}

/* What the window that ends at a position is multiplied to. */
static void convolve(float *restrict z, ring rows, const taps *of, int64_t position) {
    memcpy(z, of->bias, (size_t)of->n * sizeof *z);
    for (int64_t k = 0; k < of->count; k++) {
        const float *restrict w = of->weight[k], *restrict row = row_of(rows, of, position + k + 1);
        for (int64_t i = 0; i < of->n; i++) z[i] = bst_fma(w[i], row[i], z[i]);
    }
}

/* `type` is a constant in these. */
BST_LOOP void silu_of(float *restrict z, int64_t n, int type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) z[i] = bst_activate(z[i], BST_SILU_CODE, type).value;
}

/* dy times SiLU's slope at z. Many slopes are just above a power of two, where a product's rounding weighs most: their
 * factors are not multiplied with each other first. */
BST_LOOP void silu_slope(float *restrict dy, const float *restrict z, int64_t n, int type) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        bst_gate gate = bst_activate(z[i], BST_SILU_CODE, type);
        dy[i] = dy[i] * gate.factor * gate.slope;
    }
}

void BST_CPU(bst__causal_conv1d_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const causal_conv1d_cpu *a = context;
    const bst_view *v = a->v;
    const int64_t channels = v[X].size[2];
    const bool exact = causal_conv1d_is_exact(v);
    taps of;
    ring rows;
    float z[TILE];
    BST_TILES(c, n, 0, channels, TILE) {
        int64_t position = 0;
        load_taps(v, &of, c, n);
        for (int64_t token = begin; token < end; token++) {
            position = token == begin ? position_of(v, &of, token) : begins(v, token) ? 0 : position + 1;
            if (token == begin || !position) load_before(rows, &v[X], &of, position, token);
            load_tile(row_of(rows, &of, position), &v[X], &of, token);
            convolve(z, rows, &of, position);
            if (a->silu && exact) silu_of(z, n, BST_F32);
            if (a->silu && !exact) silu_of(z, n, BST_BF16);
            bst_store(tile_at(&v[Y], &of, token), z, v[Y].dtype, n);
        }
    }
}

/* ---- the backward pass ------------------------------------------------------------------------------------------- */

/* Sums over tokens, of each tap and, behind them, of dy alone. */
typedef struct sums {
    float run[TAPS + 1][TILE];
    double all[TAPS + 1][TILE];
} sums;

static void end_run(sums *s, int64_t count) {
    for (int64_t k = 0; k <= count; k++)
        for (int64_t i = 0; i < TILE; i++) s->all[k][i] += (double)s->run[k][i];
    memset(s->run, 0, sizeof s->run);
}

/* Adds one token's share of what is wanted. */
static void add_token(const bst_view *v, sums *s, ring rows, const taps *of, const float *restrict g,
                      int64_t position) {
    for (int64_t k = 0; v[DWEIGHT].data && k < of->count; k++) {
        const float *restrict row = row_of(rows, of, position + k + 1);
        float *restrict sum = s->run[k];
        for (int64_t i = 0; i < of->n; i++) sum[i] = bst_fma(g[i], row[i], sum[i]);
    }
    for (int64_t i = 0; v[DBIAS].data && i < of->n; i++) s->run[of->count][i] += g[i];
}

/* dx of a position: what each of the windows that reach it adds, the last first. */
static void store_dx(const bst_view *dx, ring gradients, const taps *of, int64_t position, int64_t token) {
    float out[TILE] = {0};
    for (int64_t ahead = of->count - 1; ahead >= 0; ahead--) {
        const float *restrict w = of->weight[of->count - 1 - ahead], *restrict g =
                                                                         row_of(gradients, of, position + ahead);
        for (int64_t i = 0; i < of->n; i++) out[i] = bst_fma(w[i], g[i], out[i]);
    }
    bst_store(tile_at(dx, of, token), out, dx->dtype, of->n);
}

/* The token behind the sequence that a token is of, or one that windows of the tokens before `last` do not reach. */
static int64_t sequence_end(const bst_view *v, const taps *of, int64_t token, int64_t last) {
    const int64_t most = bst__lesser(v[X].rows.rows, last + of->count - 1);
    int64_t end = token + 1;
    while (end < most && !begins(v, end)) end++;
    return end;
}

/* Tokens [begin, end) of one sequence, whose last is before `sequence_end`. Windows behind them reach into them, so for
 * dx what comes to those is made here too. */
static void backward_run(const causal_conv1d_cpu *a, const taps *of, sums *s, int64_t begin, int64_t end,
                         int64_t sequence_end) {
    const bst_view *v = a->v;
    const int64_t position = position_of(v, of, begin), count = end - begin, after = v[DX].data ? of->count - 1 : 0;
    const bool exact = causal_conv1d_is_exact(v), reads_x = a->silu || v[DWEIGHT].data;
    ring rows, gradients;
    float z[TILE];
    if (reads_x) load_before(rows, &v[X], of, position, begin);
    for (int64_t i = 0; i < count + after; i++) {
        const int64_t at = position + i, token = begin + i;
        float *g = row_of(gradients, of, at);
        if (token < sequence_end) {
            if (reads_x) load_tile(row_of(rows, of, at), &v[X], of, token);
            load_tile(g, &v[DY], of, token);
            if (a->silu) convolve(z, rows, of, at);
            if (a->silu && exact) silu_slope(g, z, of->n, BST_F32);
            if (a->silu && !exact) silu_slope(g, z, of->n, BST_BF16);
        } else {
            memset(g, 0, sizeof *gradients);
        }
        if (i < count) add_token(v, s, rows, of, g, at);
        if (i % RUN == RUN - 1) end_run(s, of->count);
        if (v[DX].data && i >= after) store_dx(&v[DX], gradients, of, at - after, token - after);
    }
    end_run(s, of->count);
}

void BST_CPU(bst__causal_conv1d_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const causal_conv1d_cpu *a = context;
    const bst_view *v = a->v;
    const int64_t channels = v[X].size[2], tokens = v[X].rows.rows;
    taps of;
    sums s;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = tokens * chunk / a->chunks, last = tokens * (chunk + 1) / a->chunks;
        float *partial = a->partial ? a->partial + chunk * a->width : NULL;
        BST_TILES(c, n, 0, channels, TILE) {
            load_taps(v, &of, c, n);
            memset(&s, 0, sizeof s);
            for (int64_t at = first, until; at < last; at = until) {
                const int64_t behind = sequence_end(v, &of, at, last);
                until = bst__lesser(last, behind);
                backward_run(a, &of, &s, at, until, behind);
            }
            for (int64_t i = 0; v[DWEIGHT].data && i < n; i++)
                for (int64_t k = 0; k < of.count; k++) partial[(c + i) * of.count + k] = (float)s.all[k][i];
            for (int64_t i = 0; v[DBIAS].data && i < n; i++)
                partial[v[DWEIGHT].count + c + i] = (float)s.all[of.count][i];
        }
    }
}

void BST_CPU(bst__causal_conv1d_sums_cpu)(void *context, int64_t begin, int64_t end) {
    const causal_conv1d_cpu *a = context;
    const int64_t split = a->v[DWEIGHT].count;
    float sum[BST_TILE];
    for (int64_t c = begin, n; c < end; c += n) {
        const bst_view *out = &a->v[c < split ? DWEIGHT : DBIAS];
        n = bst__lesser(bst__lesser(BST_TILE, end - c), c < split ? split - c : end - c);
        bst_sum_rows(sum, a->partial + c, a->chunks, a->width, n);
        bst_store(bst_at(out->data, c < split ? c : c - split, out->dtype), sum, out->dtype, n);
    }
}
