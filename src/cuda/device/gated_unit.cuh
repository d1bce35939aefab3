/* gated_unit.cuh - gated units for CUDA: the sigmoid and both forms of GELU, as exact as results of `type` can show.
 * The rest of the arithmetic is that of the CPU too (gated_arithmetic.h). */
#ifndef BST_GATED_UNIT_CUH
#define BST_GATED_UNIT_CUH

#include "ptx.cuh"

#include "activation.h"
#include "dtype.h"

#include "gated_arithmetic.h"
#include "logarithm.h"

/* exp(x) to less than one unit in the last place, for float32: exp2's approximation is off by two. As on CPU
 * (cpu_kernel.h): 2^k (1 + (f + f^2 p(f))), k the integer nearest to x log2(e) and f = x - k ln 2; never less than
 * 2^-126, infinite above 88.37. For NaN any number. */
BST_DEVICE float bst_exp_exact(float x) {
    const float most = 88.37f,
                magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    float v = bst_min(bst_max(x, -87.3f), most), shifted = bst_fma(v, BST_LOG2_E, magic), k = shifted - magic;
    float f = bst_fma(k, 2.12194440e-4f, bst_fma(k, -0.693359375f, v));
    float p = bst_fma(1.38189504e-3f, f, 8.36870447e-3f);
    p = bst_fma(p, f, 4.16682884e-2f);
    p = bst_fma(p, f, 0.166665211f);
    p = bst_fma(p, f, 0.49999994f);
    p = 1.0f + bst_fma(f * f, p, f);
    return x > most ? BST_INFINITY : bst_from_bits(bst_bits(p) + (bst_bits(shifted) << 23));
}

/* exp(-v). */
BST_DEVICE float bst_exp_minus(float v, int type) {
    return type == BST_F32_CODE ? bst_exp_exact(-v) : bst_exp2(-v * BST_LOG2_E);
}

/* n / d; the approximation is good to 1 ulp of float32, which only float32 results could notice. */
BST_DEVICE float bst_quotient(float n, float d, int type) {
    return type == BST_F32_CODE ? bst_divide(n, d) : n * bst_reciprocal(d);
}

BST_DEVICE bst_gate bst_sigmoid_gate(float g, float v, float g_dv, int type) {
    float d = 1.0f + bst_exp_minus(v, type), s = bst_quotient(1.0f, d, type);
    return {bst_quotient(g, d, type), s, g, bst_fma(g_dv, 1.0f - s, 1.0f)};
}

BST_DEVICE bst_gate bst_gelu_tanh(float g, int type) {
    float h = bst_clamp(g, -BST_GELU_TANH_END, BST_GELU_TANH_END), square = h * h;
    float v = h * bst_fma(BST_GELU_TANH_THIRD, square, BST_GELU_TANH_FIRST);
    float g_dv = h * bst_fma(3 * BST_GELU_TANH_THIRD, square, BST_GELU_TANH_FIRST);
    if (type != BST_F32_CODE) return bst_sigmoid_gate(g, v, g_dv, type);
    /* Both sides of the sigmoid from its smaller one, whose roundings weigh least. */
    float size = v < 0 ? -v : v, e = size < 87.0f ? bst_exp_exact(-size) : 0.0f;
    float least = bst_divide(e, 1.0f + e), value = v < 0 ? g * least : g - h * least;
    return {value, 1.0f, value, bst_sigmoid_slope(v, g_dv, least)};
}

/* From the distribution's smaller side. */
BST_DEVICE bst_gate bst_gelu(float g, int type) {
    float h = bst_clamp(g, -BST_NORMAL_END, BST_NORMAL_END), size = h < 0 ? -h : h;
    float square = h * h, e = bst_exp_minus(0.5f * square, type);
    if (type == BST_F32_CODE) e = bst_fma(e, -0.5f * bst_fma(h, h, -square), e); /* what the square lost */
    float t = bst_quotient(1.0f, bst_fma(BST_NORMAL_SCALE, size, 1.0f), type);
    float p = 0.0f;
#define STEP(c) p = bst_fma(p, t, c);
    BST_NORMAL_COEFFICIENTS(STEP)
#undef STEP
    float least = size < BST_NORMAL_END ? e * (t * p) : 0.0f, value = g < 0 ? g * least : g - h * least;
    float slope = bst_fma(h, BST_NORMAL_DENSITY * e, g < 0 ? least : 1.0f - least);
    if (type == BST_F32_CODE && size < BST_NORMAL_NEAR) { /* where the roundings of `least` would show */
        float q = 0.0f;
#define STEP(c) q = bst_fma(q, square, c);
        BST_NORMAL_NEAR_COEFFICIENTS(STEP)
#undef STEP
        value = bst_fma(square, q, 0.5f * g);
        slope = bst_fma(h, bst_fma(BST_NORMAL_DENSITY, e, q), 0.5f);
    }
    return {value, 1.0f, value, slope};
}

#endif
