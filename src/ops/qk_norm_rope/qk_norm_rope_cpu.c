/* qk_norm_rope_cpu.c - QK-norm and rotary embedding on CPU, one token at a time: its cosines and sines are arranged
 * once, then serve all heads of q and k.
 *
 * A head is one float32 tile. Where pairs are neighbours, tiles hold the firsts of all pairs, then the seconds, as they
 * lie where pairs are halves: all loops run over halves. */
#include "ops/qk_norm_rope/qk_norm_rope_cpu.h"
#include <assert.h>

#include "core/heads.h"

static_assert((int)BST_MOST_HEAD_DIM <= (int)BST_TILE, "a head is one tile");

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

static void load(const qk_norm_rope_cpu *a, float *tile, const bst_view *v, int64_t at, int64_t n) {
    bst_load(tile, bst_at(v->data, at, v->dtype), v->dtype, n);
    if (a->interleaved) to_halves(tile, a->cos.size[2]);
}

static void store(const qk_norm_rope_cpu *a, const bst_view *v, int64_t at, float *tile, int64_t n) {
    if (a->interleaved) to_neighbours(tile, a->cos.size[2]);
    bst_store(bst_at(v->data, at, v->dtype), tile, v->dtype, n);
}

static void load_weight(const qk_norm_rope_cpu *a, float *tile, const qk_norm_rope_heads *h) {
    int64_t dim = h->x.size[3];
    load(a, tile, &h->weight, 0, dim);
    if (a->gemma)
        for (int64_t i = 0; i < dim; i++) tile[i] += 1.0f;
}

/* Where a token is, and its tables. */
typedef struct token_tables {
    int64_t batch, position;
    float cos[BST_TILE], sin[BST_TILE];
} token_tables;

static void load_tables(const qk_norm_rope_cpu *a, token_tables *t, int64_t token) {
    t->batch = token / a->positions;
    t->position = token % a->positions;
    load(a, t->cos, &a->cos, t->batch * a->cos.stride[0] + t->position * a->cos.stride[1], a->cos.size[2]);
    load(a, t->sin, &a->sin, t->batch * a->sin.stride[0] + t->position * a->sin.stride[1], a->sin.size[2]);
}

static int64_t start_of(const bst_view *v, const token_tables *t, int64_t head) {
    return t->batch * v->stride[0] + head * v->stride[1] + t->position * v->stride[2];
}

static float rstd_of(const qk_norm_rope_cpu *a, const float *x, int64_t dim) {
    return (float)(1 / sqrt(bst_sum_of_products(x, x, dim) / (double)dim + (double)a->eps));
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static void forward_heads(const qk_norm_rope_cpu *a, const qk_norm_rope_heads *h, const float *restrict w,
                          const token_tables *t) {
    int64_t dim = h->x.size[3], half = a->cos.size[2] / 2;
    const float *restrict c = t->cos, *restrict s = t->sin;
    float x[BST_TILE], y[BST_TILE];
    for (int64_t head = 0; head < h->x.size[1]; head++) {
        load(a, x, &h->x, start_of(&h->x, t, head), dim);
        float rstd = rstd_of(a, x, dim);
        for (int64_t i = 0; i < dim; i++) x[i] = x[i] * rstd * w[i];
        for (int64_t i = 0; i < half; i++) {
            y[i] = x[i] * c[i] - x[half + i] * s[i];
            y[half + i] = x[half + i] * c[half + i] + x[i] * s[half + i];
        }
        for (int64_t i = 2 * half; i < dim; i++) y[i] = x[i];
        store(a, &h->y, start_of(&h->y, t, head), y, dim);
    }
}

void BST_CPU(bst__qk_norm_rope_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const qk_norm_rope_cpu *a = context;
    token_tables tables;
    float w[2][BST_TILE];
    for (int i = 0; i < 2; i++)
        if (a->of[i].x.data) load_weight(a, w[i], &a->of[i]);
    for (int64_t token = begin; token < end; token++) {
        load_tables(a, &tables, token);
        for (int i = 0; i < 2; i++)
            if (a->of[i].x.data) forward_heads(a, &a->of[i], w[i], &tables);
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* With z = n w, n = x rstd: dz is dy turned back, m = dz w, dx = rstd (m - n mean(m n)), dweight = sum of dz n. */
static void backward_heads(const qk_norm_rope_cpu *a, const qk_norm_rope_heads *h, const float *restrict w,
                           const token_tables *t, float *restrict dweight) {
    int64_t dim = h->x.size[3], half = a->cos.size[2] / 2;
    const float *restrict c = t->cos, *restrict s = t->sin;
    float n[BST_TILE], dy[BST_TILE], dz[BST_TILE];
    for (int64_t head = 0; head < h->x.size[1]; head++) {
        load(a, dy, &h->y, start_of(&h->y, t, head), dim);
        for (int64_t i = 0; i < half; i++) {
            dz[i] = dy[i] * c[i] + dy[half + i] * s[half + i];
            dz[half + i] = dy[half + i] * c[half + i] - dy[i] * s[i];
        }
        for (int64_t i = 2 * half; i < dim; i++) dz[i] = dy[i];
        load(a, n, &h->x, start_of(&h->x, t, head), dim);
        float rstd = rstd_of(a, n, dim);
        for (int64_t i = 0; i < dim; i++) n[i] *= rstd;
        if (dweight)
            for (int64_t i = 0; i < dim; i++) dweight[i] += dz[i] * n[i];
        if (!h->dx.data) continue;
        for (int64_t i = 0; i < dim; i++) dz[i] *= w[i];
        float mean = (float)(bst_sum_of_products(dz, n, dim) / (double)dim);
        for (int64_t i = 0; i < dim; i++) dz[i] = rstd * (dz[i] - n[i] * mean);
        store(a, &h->dx, start_of(&h->dx, t, head), dz, dim);
    }
}

void BST_CPU(bst__qk_norm_rope_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const qk_norm_rope_cpu *a = context;
    int64_t dim = a->of[0].x.size[3];
    token_tables tables;
    float w[2][BST_TILE];
    for (int i = 0; i < 2; i++)
        if (a->of[i].y.data) load_weight(a, w[i], &a->of[i]);
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *partial = a->partial ? a->partial + chunk * 2 * dim : NULL;
        if (partial) memset(partial, 0, (size_t)(2 * dim) * sizeof *partial);
        int64_t last = a->tokens * (chunk + 1) / a->chunks;
        for (int64_t token = a->tokens * chunk / a->chunks; token < last; token++) {
            load_tables(a, &tables, token);
            for (int i = 0; i < 2; i++) {
                const qk_norm_rope_heads *h = &a->of[i];
                float *dweight = h->dweight.data ? partial + i * dim : NULL;
                if (h->y.data) backward_heads(a, h, w[i], &tables, dweight);
            }
        }
    }
}

void BST_CPU(bst__qk_norm_rope_dweight_cpu)(void *context, int64_t begin, int64_t end) {
    const qk_norm_rope_cpu *a = context;
    int64_t dim = a->of[0].x.size[3];
    double sum[BST_TILE];
    float rounded[BST_TILE];
    for (int64_t which = begin; which < end; which++) {
        if (!a->of[which].dweight.data) continue;
        memset(sum, 0, sizeof sum);
        for (int64_t chunk = 0; chunk < a->chunks; chunk++) {
            const float *part = a->partial + (chunk * 2 + which) * dim;
            for (int64_t i = 0; i < dim; i++) sum[i] += (double)part[i];
        }
        for (int64_t i = 0; i < dim; i++) rounded[i] = (float)sum[i];
        store(a, &a->of[which].dweight, 0, rounded, dim);
    }
}
