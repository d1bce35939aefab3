/* rope_cpu.c - rotary position embedding on CPU, one token at a time: its cos and sin are read and arranged once, then
 * serve all heads of q and k. */
#include "ops/rope/rope_cpu.h"

/* Pairs that are turned at once: all those of a head, in the models we know. */
enum { PAIRS = 256 };

/* For the two elements of each pair, what they and their partners are multiplied by:
 * y1 = x1 own1 + x2 across1, y2 = x2 own2 + x1 across2. */
typedef struct factors {
    float own1[PAIRS], across1[PAIRS], own2[PAIRS], across2[PAIRS];
} factors;

/* Element `first` of a half, for half-split pairs; of both halves' interleaved run else. */
static void load_pairs(float *restrict one, float *restrict two, const void *in, bst_dtype dtype, int64_t first,
                       int64_t n, int64_t half, bool interleaved) {
    if (!interleaved) {
        bst_load(one, bst_at(in, first, dtype), dtype, n);
        bst_load(two, bst_at(in, half + first, dtype), dtype, n);
        return;
    }
    float run[2 * PAIRS];
    bst_load(run, bst_at(in, 2 * first, dtype), dtype, 2 * n);
    for (int64_t i = 0; i < n; i++) {
        one[i] = run[2 * i];
        two[i] = run[2 * i + 1];
    }
}

static void store_pairs(void *out, const float *restrict one, const float *restrict two, bst_dtype dtype, int64_t first,
                        int64_t n, int64_t half, bool interleaved) {
    if (!interleaved) {
        bst_store(bst_at(out, first, dtype), one, dtype, n);
        bst_store(bst_at(out, half + first, dtype), two, dtype, n);
        return;
    }
    float run[2 * PAIRS];
    for (int64_t i = 0; i < n; i++) {
        run[2 * i] = one[i];
        run[2 * i + 1] = two[i];
    }
    bst_store(bst_at(out, 2 * first, dtype), run, dtype, 2 * n);
}

static void load_factors(factors *f, const rope_cpu *a, const void *cos, const void *sin, int64_t first, int64_t n) {
    int64_t half = a->cos.size[2] / 2;
    float sin1[PAIRS], sin2[PAIRS];
    load_pairs(f->own1, f->own2, cos, a->cos.dtype, first, n, half, a->interleaved);
    load_pairs(sin1, sin2, sin, a->sin.dtype, first, n, half, a->interleaved);
    for (int64_t i = 0; i < n; i++) {
        f->across1[i] = a->backward ? sin2[i] : -sin1[i];
        f->across2[i] = a->backward ? -sin1[i] : sin2[i];
    }
}

/* The elements behind those that turn. */
static void copy_rest(void *out, bst_dtype out_type, const void *in, bst_dtype in_type, int64_t begin, int64_t end) {
    float tile[PAIRS];
    for (int64_t c = begin; c < end && out != in; c += PAIRS) {
        int64_t n = end - c < PAIRS ? end - c : PAIRS;
        bst_load(tile, bst_at(in, c, in_type), in_type, n);
        bst_store(bst_at(out, c, out_type), tile, out_type, n);
    }
}

static void turn_heads(const rope_cpu *a, const rope_pair *p, const factors *f, int64_t batch, int64_t position,
                       int64_t first, int64_t n) {
    int64_t rotary = a->cos.size[2];
    float x1[PAIRS], x2[PAIRS], y1[PAIRS], y2[PAIRS];
    for (int64_t head = 0; head < p->in.size[1]; head++) {
        const int64_t *from = p->in.stride, *to = p->out.stride;
        const void *in = bst_at(p->in.data, batch * from[0] + head * from[1] + position * from[2], p->in.dtype);
        void *out = bst_at(p->out.data, batch * to[0] + head * to[1] + position * to[2], p->out.dtype);
        load_pairs(x1, x2, in, p->in.dtype, first, n, rotary / 2, a->interleaved);
        for (int64_t i = 0; i < n; i++) {
            y1[i] = x1[i] * f->own1[i] + x2[i] * f->across1[i];
            y2[i] = x2[i] * f->own2[i] + x1[i] * f->across2[i];
        }
        store_pairs(out, y1, y2, p->out.dtype, first, n, rotary / 2, a->interleaved);
        if (first == 0) copy_rest(out, p->out.dtype, in, p->in.dtype, rotary, p->in.size[3]);
    }
}

void BST_CPU(bst__rope_cpu)(void *context, int64_t begin, int64_t end) {
    const rope_cpu *a = context;
    int64_t half = a->cos.size[2] / 2;
    factors f;
    for (int64_t token = begin; token < end; token++) {
        int64_t batch = token / a->positions, position = token % a->positions;
        const void *cos = bst_at(a->cos.data, batch * a->cos.stride[0] + position * a->cos.stride[1], a->cos.dtype);
        const void *sin = bst_at(a->sin.data, batch * a->sin.stride[0] + position * a->sin.stride[1], a->sin.dtype);
        for (int64_t first = 0; first < half; first += PAIRS) {
            int64_t n = half - first < PAIRS ? half - first : PAIRS;
            load_factors(&f, a, cos, sin, first, n);
            for (int i = 0; i < 2; i++)
                if (a->pair[i].in.data) turn_heads(a, &a->pair[i], &f, batch, position, first, n);
        }
    }
}
