/* gated_unit.h - gated units for CPU kernels: the sigmoid and both forms of GELU, and tiles of units. The rest of the
 * arithmetic is that of CUDA too (gated_arithmetic.h). */
#ifndef BST_GATED_UNIT_H
#define BST_GATED_UNIT_H

#include "core/activation.h"
#include "core/cpu_kernel.h"
#include "core/gated_arithmetic.h"

/* 1 + exp(-x), where 1 hides what exp is short of near zero. exp(v) = 2^k p(f), k the integer nearest to v log2(e): for
 * float32 p is that of bst_exp; for types of 16 bits a polynomial of degree 4 in v log2(e) - k, wrong by at most
 * 2.6e-6, 1/90 of their rounding. For NaN any number: what it is used with is NaN too. */
static inline float bst_one_plus_exp_minus(float x, int type) {
    const float least = -87.3f, most = 88.37f, log2_e = 1.44269504f, magic = 12582912.0f;
    float v = -x < least ? least : -x;
    v = v > most ? most : v;
    float shifted = v * log2_e + magic, k = shifted - magic, p;
    if (type == BST_F32) {
        p = bst_exp_over_power(v, k);
    } else {
        float f = v * log2_e - k;
        p = 0.00957010128f;
        p = p * f + 0.0559178591f;
        p = p * f + 0.240247443f;
        p = p * f + 0.693121791f;
        p = p * f + 0.999999285f;
    }
    /* `magic` left k in the low bits; there it is added to p's exponent. */
    float e = bst_from_bits(bst_bits(p) + (bst_bits(shifted) << 23));
    return -x > most ? INFINITY : 1.0f + e;
}

/* Near the slope's zero a rounded product shows, in float32. */
static inline bst_gate bst_sigmoid_gate(float g, float v, float g_dv, int type) {
    float d = bst_one_plus_exp_minus(v, type), s = 1.0f / d;
    float slope = type == BST_F32 ? bst_fma(g_dv, 1.0f - s, 1.0f) : 1.0f + g_dv * (1.0f - s);
    return (bst_gate){g / d, s, g, slope};
}

static inline bst_gate bst_gelu_tanh(float g, int type) {
    float h = bst_clamp(g, -BST_GELU_TANH_END, BST_GELU_TANH_END), square = h * h;
    float v = h * (BST_GELU_TANH_FIRST + BST_GELU_TANH_THIRD * square);
    float g_dv = h * (BST_GELU_TANH_FIRST + 3 * BST_GELU_TANH_THIRD * square);
    if (type != BST_F32) return bst_sigmoid_gate(g, v, g_dv, type);
    /* Both sides of the sigmoid from its smaller one, whose roundings weigh least. */
    float e = bst_exp(-fabsf(v)), least = e / (1.0f + e);
    float value = v < 0 ? g * least : g - h * least;
    return (bst_gate){value, 1.0f, value, bst_sigmoid_slope(v, g_dv, least)};
}

/* From the distribution's smaller side. */
static inline bst_gate bst_gelu(float g, int type) {
    (void)type;
    float h = bst_clamp(g, -BST_NORMAL_END, BST_NORMAL_END), e = bst_exp(-0.5f * h * h);
    float t = 1.0f / (1.0f + BST_NORMAL_SCALE * fabsf(h)), p = 0.0f;
#define STEP(c) p = p * t + (c);
    BST_NORMAL_COEFFICIENTS(STEP)
#undef STEP
    float least = fabsf(g) < BST_NORMAL_END ? e * (t * p) : 0.0f;
    float value = g < 0 ? g * least : g - h * least;
    return (bst_gate){value, 1.0f, value, (g < 0 ? least : 1.0f - least) + h * (BST_NORMAL_DENSITY * e)};
}

static inline float bst_gated(float g, float u, int activation, int type) {
    return u * bst_activate(g, activation, type).value;
}

static inline bst_gated_gradients bst_gated_backward(float dy, float g, float u, int activation, int type) {
    return bst_gradients_of(dy, bst_activate(g, activation, type), u, type);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Of units in any layout, in float32: n gates, in pairs[0], and as many ups, in pairs[1]. */
enum { BST_PAIRS = BST_TILE / 2 };

/* From memory and to it; interleaved, `gate` is where both begin. */
static inline void bst_load_pairs(float pairs[2][BST_PAIRS], const void *gate, const void *up, bool interleaved,
                                  bst_dtype dtype, int64_t n) {
    if (interleaved) {
        float both[BST_TILE];
        bst_load(both, gate, dtype, 2 * n);
        for (int64_t i = 0; i < n; i++) pairs[0][i] = both[2 * i], pairs[1][i] = both[2 * i + 1];
    } else {
        bst_load(pairs[0], gate, dtype, n);
        bst_load(pairs[1], up, dtype, n);
    }
}

static inline void bst_store_pairs(const float pairs[2][BST_PAIRS], void *gate, void *up, bool interleaved,
                                   bst_dtype dtype, int64_t n) {
    if (interleaved) {
        float both[BST_TILE];
        for (int64_t i = 0; i < n; i++) both[2 * i] = pairs[0][i], both[2 * i + 1] = pairs[1][i];
        bst_store(gate, both, dtype, 2 * n);
    } else {
        if (gate) bst_store(gate, pairs[0], dtype, n);
        if (up) bst_store(up, pairs[1], dtype, n);
    }
}

/* A loop for each activation, whose code is a constant there: each branch folds away. */
#define BST_LOOP static inline __attribute__((always_inline))

BST_LOOP void bst_unit_loop(const bst_unit *unit, float pairs[2][BST_PAIRS], float *y, int activation, int64_t n) {
    const float alpha = unit->alpha, limit = unit->limit, *gate = pairs[0], *up = pairs[1];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = bst_gated_within(gate[i], up[i], activation, alpha, true, limit, BST_F32);
}

BST_LOOP double bst_unit_backward_loop(const bst_unit *unit, float pairs[2][BST_PAIRS], const float *restrict dy,
                                       float *restrict y, float weight, int activation, int64_t n) {
    const float alpha = unit->alpha, limit = unit->limit;
    const int limited = unit->limited;
    double dot = 0;
    float *restrict gate = pairs[0], *restrict up = pairs[1];
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; i++) {
        bst_gated_gradients d =
            bst_gated_within_backward(weight * dy[i], gate[i], up[i], activation, alpha, limited, limit, BST_F32);
        dot += (double)(dy[i] * d.y);
        y[i] = weight * d.y;
        gate[i] = d.dgate;
        up[i] = d.dup;
    }
    return dot;
}

static inline void bst_unit_tile(const bst_unit *unit, float pairs[2][BST_PAIRS], float *y, int64_t n) {
#define LOOP(name, code)                        \
    case code:                                  \
        bst_unit_loop(unit, pairs, y, code, n); \
        break;
    switch (unit->activation) { BST_ACTIVATIONS(LOOP) }
#undef LOOP
}

/* The pairs become their gradients, y the unit's output times the row's weight, by which dy counts too. Returns the sum
 * of dy y: in double, for as many numbers as a row has would lose more than a bit in one of float32's, and how many
 * there are is the CPU's affair. */
static inline double bst_unit_backward_tile(const bst_unit *unit, float pairs[2][BST_PAIRS], const float *dy, float *y,
                                            float weight, int64_t n) {
#define LOOP(name, code) \
    case code:           \
        return bst_unit_backward_loop(unit, pairs, dy, y, weight, code, n);
    switch (unit->activation) { BST_ACTIVATIONS(LOOP) }
#undef LOOP
    return 0;
}

#endif
