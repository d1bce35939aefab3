/* rope_cpu.c - rotary position embedding on CPU, with and without a norm, one token at a time: its cosines and sines
 * are arranged once, then serve all heads of q and k.
 *
 * A head is one float32 tile. Where pairs are neighbours, tiles hold the firsts of all pairs, then the seconds, as
 * they lie where pairs are halves: all loops run over halves. */
#include <assert.h>

#include "ops/rope/rope.h"

static_assert((int)ROPE_MOST_DIM <= (int)BST_TILE, "a head is one tile");

/* Whether pairs are neighbours in x (and the weight and their gradients), in y, and in the tables. */
static bool near_in(const rope_call *a) {
    if (a->layout != BST_ROPE_INTERLEAVED_TO_HALVES) return a->layout == BST_ROPE_INTERLEAVED;
    return a->normed || !a->transposed;
}
static bool near_out(const rope_call *a) {
    if (a->layout != BST_ROPE_INTERLEAVED_TO_HALVES) return a->layout == BST_ROPE_INTERLEAVED;
    return !a->normed && a->transposed;
}
static bool near_tables(const rope_call *a) { return a->layout == BST_ROPE_INTERLEAVED && !a->half_tables; }

/* The first `rotary` elements of a tile from neighbours to halves, and back. */
static void to_halves(float *restrict tile, int64_t rotary) {
    float run[BST_TILE];
    memcpy(run, tile, (size_t)rotary * sizeof *run);
    for (int64_t i = 0; i < rotary / 2; i++) {
        tile[i] = run[2 * i];
        tile[rotary / 2 + i] = run[2 * i + 1];
    }
}

static void to_neighbours(float *restrict tile, int64_t rotary) {
    float run[BST_TILE];
    memcpy(run, tile, (size_t)rotary * sizeof *run);
    for (int64_t i = 0; i < rotary / 2; i++) {
        tile[2 * i] = run[i];
        tile[2 * i + 1] = run[rotary / 2 + i];
    }
}

static void load(const rope_call *a, float *tile, const bst_view *v, int64_t at, bool near) {
    bst_load(tile, bst_at(v->data, at, v->dtype), v->dtype, v->size[v->dims - 1]);
    if (near) to_halves(tile, a->rotary);
}

static void store(const rope_call *a, const bst_view *v, int64_t at, float *tile, bool near) {
    if (near) to_neighbours(tile, a->rotary);
    bst_store(bst_at(v->data, at, v->dtype), tile, v->dtype, v->size[v->dims - 1]);
}

static void load_weight(const rope_call *a, float *tile, const rope_heads *h) {
    load(a, tile, &h->weight, 0, near_in(a));
    if (a->gemma)
        for (int64_t i = 0; i < h->weight.size[0]; i++) tile[i] += 1.0f;
}

/* Where a token is, and what elements and their partners are multiplied by: y = x own + partner across. */
typedef struct factors {
    int64_t batch, position;
    float own[BST_TILE], across[BST_TILE];
} factors;

static void load_table(const rope_call *a, float *tile, const bst_view *table, const factors *f) {
    load(a, tile, table, f->batch * table->stride[0] + f->position * table->stride[1], near_tables(a));
    if (a->half_tables) memcpy(tile + a->rotary / 2, tile, (size_t)(a->rotary / 2) * sizeof *tile);
}

static void load_factors(const rope_call *a, factors *f, int64_t token) {
    int64_t half = a->rotary / 2;
    float sine[BST_TILE];
    f->batch = token / a->positions;
    f->position = token % a->positions;
    load_table(a, f->own, &a->cos, f);
    load_table(a, sine, &a->sin, f);
    for (int64_t i = 0; i < half; i++) {
        f->across[i] = a->transposed ? sine[half + i] : -sine[i];
        f->across[half + i] = a->transposed ? -sine[i] : sine[half + i];
    }
}

static int64_t start_of(const bst_view *v, const factors *f, int64_t head) {
    return f->batch * v->stride[0] + head * v->stride[1] + f->position * v->stride[2];
}

static void turn(const rope_call *a, float *restrict y, const float *restrict x, const factors *f, int64_t dim) {
    int64_t half = a->rotary / 2;
    const float *restrict own = f->own, *restrict across = f->across;
    for (int64_t i = 0; i < half; i++) {
        y[i] = x[i] * own[i] + x[half + i] * across[i];
        y[half + i] = x[half + i] * own[half + i] + x[i] * across[half + i];
    }
    for (int64_t i = 2 * half; i < dim; i++) y[i] = x[i];
}

static float rstd_of(const rope_call *a, const float *x, int64_t dim) {
    return (float)(1 / sqrt(bst_sum_of_products(x, x, dim) / (double)dim + (double)a->eps));
}

static void turn_heads(const rope_call *a, const rope_heads *h, const float *restrict w, const factors *f) {
    int64_t dim = h->x.size[3];
    float x[BST_TILE], y[BST_TILE];
    for (int64_t head = 0; head < h->x.size[1]; head++) {
        load(a, x, &h->x, start_of(&h->x, f, head), near_in(a));
        if (a->normed) {
            float rstd = rstd_of(a, x, dim);
            for (int64_t i = 0; i < dim; i++) x[i] = x[i] * rstd * w[i];
        }
        turn(a, y, x, f, dim);
        store(a, &h->y, start_of(&h->y, f, head), y, near_out(a));
    }
}

void BST_CPU(bst__rope_cpu)(void *context, int64_t begin, int64_t end) {
    const rope_call *a = context;
    factors f;
    float w[2][BST_TILE];
    for (int i = 0; i < 2; i++)
        if (a->of[i].weight.data) load_weight(a, w[i], &a->of[i]);
    for (int64_t token = begin; token < end; token++) {
        load_factors(a, &f, token);
        for (int i = 0; i < 2; i++)
            if (a->of[i].x.data) turn_heads(a, &a->of[i], w[i], &f);
    }
}

/* ---- the backward pass with a norm ------------------------------------------------------------------------------- */

/* With z = n w, n = x rstd: dz is dy turned back, m = dz w, dx = rstd (m - n mean(m n)), dweight = sum of dz n. */
static void backward_heads(const rope_call *a, const rope_heads *h, const float *restrict w, const factors *f,
                           float *restrict dweight) {
    int64_t dim = h->x.size[3];
    float n[BST_TILE], dy[BST_TILE], dz[BST_TILE];
    for (int64_t head = 0; head < h->x.size[1]; head++) {
        load(a, dy, &h->y, start_of(&h->y, f, head), near_out(a));
        turn(a, dz, dy, f, dim);
        load(a, n, &h->x, start_of(&h->x, f, head), near_in(a));
        float rstd = rstd_of(a, n, dim);
        for (int64_t i = 0; i < dim; i++) n[i] *= rstd;
        if (dweight)
            for (int64_t i = 0; i < dim; i++) dweight[i] += dz[i] * n[i];
        if (!h->dx.data) continue;
        for (int64_t i = 0; i < dim; i++) dz[i] *= w[i];
        float mean = (float)(bst_sum_of_products(dz, n, dim) / (double)dim);
        for (int64_t i = 0; i < dim; i++) dz[i] = rstd * (dz[i] - n[i] * mean);
        store(a, &h->dx, start_of(&h->dx, f, head), dz, near_in(a));
    }
}

void BST_CPU(bst__rope_norm_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const rope_call *a = context;
    int64_t dim = a->of[0].x.size[3];
    factors f;
    float w[2][BST_TILE];
    for (int i = 0; i < 2; i++)
        if (a->of[i].y.data) load_weight(a, w[i], &a->of[i]);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *partial = a->partial ? a->partial + chunk * 2 * dim : NULL;
        if (partial) memset(partial, 0, (size_t)(2 * dim) * sizeof *partial);
        int64_t last = a->tokens * (chunk + 1) / a->chunks;
        for (int64_t token = a->tokens * chunk / a->chunks; token < last; token++) {
            load_factors(a, &f, token);
            for (int i = 0; i < 2; i++) {
                const rope_heads *h = &a->of[i];
                float *dweight = h->dweight.data ? partial + i * dim : NULL;
                if (h->y.data) backward_heads(a, h, w[i], &f, dweight);
            }
        }
    }
}

void BST_CPU(bst__rope_norm_dweight_cpu)(void *context, int64_t begin, int64_t end) {
    const rope_call *a = context;
    int64_t dim = a->of[0].x.size[3];
    float sum[BST_TILE];
    for (int64_t which = begin; which < end; which++) {
        if (!a->of[which].dweight.data) continue;
        bst_sum_rows(sum, a->partial + which * dim, a->chunks, 2 * dim, dim);
        store(a, &a->of[which].dweight, 0, sum, near_in(a));
    }
}
