/* optim_cpu.c - AdamW, sums of squares and scales of lists of tensors on CPU, a tile of 256 elements at a time: loaded
 * into float32, computed, stored. */
#include "ops/optim/optim_cpu.h"

enum { TILE = OPTIM_BLOCK };

/* The tensor of a unit: the last whose first one is at most that. */
static int64_t tensor_of(const int64_t *first, int64_t tensors, int64_t unit) {
    int64_t low = 0, high = tensors;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

/* 16 random bits for each element of a tile. */
static void draw(uint32_t *restrict random, const optim_step *s, const optim_item *item, int64_t tile, uint32_t kind,
                 uint32_t step) {
    enum { EIGHTS = TILE / OPTIM_EACH };
    uint32_t words[4][EIGHTS];
    const uint32_t number = s->first_number + item->tensor.number;
    const uint64_t seed = s->seed, first = (uint64_t)tile * EIGHTS;
#pragma omp simd
    for (int i = 0; i < EIGHTS; i++) {
        uint32_t out[4];
        optim_philox(out, seed, first + (uint64_t)i, kind, number, step);
        words[0][i] = out[0], words[1][i] = out[1], words[2][i] = out[2], words[3][i] = out[3];
    }
    for (int i = 0; i < EIGHTS; i++)
        for (int w = 0; w < 4; w++) {
            random[i * OPTIM_EACH + 2 * w] = words[w][i] & 0xffffu;
            random[i * OPTIM_EACH + 2 * w + 1] = words[w][i] >> 16;
        }
}

static void store_stochastic(uint16_t *restrict out, const float *restrict in, const uint32_t *restrict random,
                             int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = (uint16_t)optim_bf16_stochastic(in[i], random[i]);
}

/* A tile of a tensor: where it lies if that is float32, else its numbers in `tile`. */
static float *opened(float *restrict tile, void *from, bst_dtype type, int64_t n) {
    if (type == BST_F32) return from;
    bst_load(tile, from, type, n);
    return tile;
}

static float shifted(uint32_t bits) { return bst_from_bits(OPTIM_BYTE_BITS | bits); }

static float *open_moment(float *restrict tile, void *from, float scale, int moments, bool is_first, int64_t n) {
    const uint8_t *codes = from;
    if (moments != OPTIM_U8_CODE) return opened(tile, from, (bst_dtype)moments, n);
    if (is_first) {
        for (int64_t i = 0; i < n; i++) tile[i] = optim_decode_first(shifted(codes[i] ^ 0x80u), scale);
    } else {
        for (int64_t i = 0; i < n; i++) tile[i] = optim_decode_second(shifted(codes[i]), scale);
    }
    return tile;
}

/* Codes of the tile, behind its last element too, and its scale. */
static void store_codes(uint8_t *restrict codes, float *scale, float *restrict in, const uint32_t *restrict random,
                        bool is_first, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = n; i < TILE; i++) in[i] = 0;
    for (int64_t i = 0; !is_first && i < TILE; i++) in[i] = optim_root(in[i], true);
    for (int64_t i = 0; i < TILE; i++) {
        uint32_t bits = bst_bits(in[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    const float largest = bst_from_bits(most), inverse = optim_inverse(largest);
    *scale = is_first ? largest : largest * largest;
    if (is_first) {
        for (int64_t i = 0; i < TILE; i++)
            codes[i] = (uint8_t)optim_encode_first(in[i], inverse, optim_uniform(shifted(random[i])));
    } else {
        for (int64_t i = 0; i < TILE; i++)
            codes[i] = (uint8_t)optim_encode_second(in[i], inverse, optim_uniform(shifted(random[i])));
    }
    for (int64_t i = n; i < TILE; i++) codes[i] = 0;
}

/* All arithmetic of a tile. */
static void compute(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, int64_t n,
                    const optim_step *s, const optim_coefficients *given) {
    const optim_coefficients c = *given;
    const float sign = s->maximize ? -c.factor : c.factor;
    const float beta1_rest = (float)(1 - s->beta1), beta2_rest = (float)(1 - s->beta2);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float gradient = sign * g[i];
        m[i] = optim_exp_avg(m[i], gradient, beta1_rest);
        v[i] = optim_exp_avg_sq(v[i], gradient, beta2_rest);
        p[i] = optim_parameter(p[i], m[i], optim_root(v[i], true), &c, true);
    }
}

/* What opened() has opened goes back, rounded by chance where random numbers are given. */
static void closed(void *to, const float *from, bst_dtype type, const uint32_t *random, int64_t n) {
    if (random && type == BST_BF16)
        store_stochastic(to, from, random, n);
    else if (to != from)
        bst_store(to, from, type, n);
}

static void close_moment(void *to, float *scale, float *from, const optim_item *item, bool is_first,
                         const uint32_t *random, int64_t n) {
    if (item->moments == OPTIM_U8_CODE)
        store_codes(to, scale, from, random, is_first, n);
    else
        closed(to, from, (bst_dtype)item->moments, random, n);
}

static void update(const optim_step *s, const optim_item *item, const optim_coefficients *c, int64_t tile) {
    const optim_tensor *t = &item->tensor;
    const int64_t at = tile * TILE, n = t->count - at < TILE ? t->count - at : TILE;
    const bool codes = item->moments == OPTIM_U8_CODE;
    const bool drawn = s->stochastic && !t->master && item->type == BST_BF16;
    const bool moments_drawn = codes || (s->stochastic && item->moments == BST_BF16);
    const int64_t moment_at = at * (codes ? 1 : bst__dtype_size((bst_dtype)item->moments));
    const uint32_t step = (uint32_t)c->step;
    float tiles[4][TILE];
    uint32_t random[TILE];
    void *parameter = bst_at(t->parameter, at, item->type), *gradient = bst_at(t->gradient, at, item->type);
    void *first = (char *)t->exp_avg + moment_at, *second = (char *)t->exp_avg_sq + moment_at;
    float *p = t->master ? t->master + at : opened(tiles[0], parameter, item->type, n);
    float *g = opened(tiles[1], gradient, item->type, n);
    float *m = open_moment(tiles[2], first, codes ? t->exp_avg_scale[tile] : 0, item->moments, true, n);
    float *v = open_moment(tiles[3], second, codes ? t->exp_avg_sq_scale[tile] : 0, item->moments, false, n);
    compute(p, g, m, v, n, s, c);
    if (s->grad_scale) {
        for (int64_t i = 0; i < n; i++) g[i] *= c->factor;
        closed(gradient, g, item->type, NULL, n);
    }
    if (drawn) draw(random, s, item, tile, OPTIM_OF_PARAMETER, step);
    closed(parameter, p, item->type, drawn ? random : NULL, n);
    if (moments_drawn) draw(random, s, item, tile, OPTIM_OF_MOMENTS, step);
    close_moment(first, codes ? &t->exp_avg_scale[tile] : NULL, m, item, true, moments_drawn ? random : NULL, n);
    for (int64_t i = 0; moments_drawn && i < TILE; i++) random[i] = optim_exchanged(random[i]) & 0xffffu;
    close_moment(second, codes ? &t->exp_avg_sq_scale[tile] : NULL, v, item, false, moments_drawn ? random : NULL, n);
}

void BST_CPU(bst__optim_adamw_cpu)(void *context, int64_t begin, int64_t end) {
    const optim_cpu *a = context;
    const int64_t tensors = a->step->count;
    for (int64_t unit = begin, i = tensor_of(a->first, tensors, begin); unit < end; unit++) {
        while (a->first[i + 1] <= unit) i++;
        const optim_item *item = &a->step->items[i];
        int64_t tile = (unit - a->first[i]) * (OPTIM_UNIT / TILE), last = (item->tensor.count + TILE - 1) / TILE;
        for (int64_t k = 0; k < OPTIM_UNIT / TILE && tile < last; k++, tile++)
            if (a->coefficient[i].skip == 0) update(a->step, item, &a->coefficient[i], tile);
    }
}

/* ---- gradients --------------------------------------------------------------------------------------------------- */

/* The part of a list's tensor that is this unit. */
static void *part_of(const optim_list_cpu *a, int64_t unit, int64_t *i, int64_t *n) {
    while (a->first[*i + 1] <= unit) ++*i;
    const optim_list_item *item = &a->list->items[*i];
    int64_t at = (unit - a->first[*i]) * OPTIM_UNIT, left = item->gradient.count - at;
    *n = left < OPTIM_UNIT ? left : OPTIM_UNIT;
    return bst_at(item->gradient.data, at, item->type);
}

void BST_CPU(bst__optim_squares_cpu)(void *context, int64_t begin, int64_t end) {
    const optim_list_cpu *a = context;
    float g[OPTIM_UNIT];
    for (int64_t unit = begin, n, i = tensor_of(a->first, a->list->count, begin); unit < end; unit++) {
        const void *part = part_of(a, unit, &i, &n);
        const float *own = a->list->items[i].type == BST_F32 ? part : g;
        if (own == g) bst_load(g, part, a->list->items[i].type, n);
        a->partial[unit] = bst_sum_of_products(own, own, n);
    }
}

void BST_CPU(bst__optim_scale_cpu)(void *context, int64_t begin, int64_t end) {
    const optim_list_cpu *a = context;
    const float coefficient = a->coefficient;
    float g[OPTIM_UNIT];
    for (int64_t unit = begin, n, i = tensor_of(a->first, a->list->count, begin); unit < end; unit++) {
        void *part = part_of(a, unit, &i, &n);
        bst_load(g, part, a->list->items[i].type, n);
        for (int64_t j = 0; j < n; j++) g[j] *= coefficient;
        bst_store(part, g, a->list->items[i].type, n);
    }
}
