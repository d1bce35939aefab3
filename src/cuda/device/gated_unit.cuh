/* gated_unit.cuh - one element of a gated unit, y = act(gate) * up, and its gradients, as exact as results of `type`
 * can show. `activation` and `type` are codes of activation.h and dtype.h, constants at every call.
 * src/core/gated_unit.h is the same for CPU. */
#ifndef BST_GATED_UNIT_CUH
#define BST_GATED_UNIT_CUH

#include "ptx.cuh"

#include "activation.h"
#include "dtype.h"

#define BST_LOG2_E 1.44269504f

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

/* Of a gate g: act(g) = factor * rest, or as `value`, rounded but once after its last sum; act'(g) = factor * slope. */
struct bst_gate {
    float value, factor, rest, slope;
};

/* g sigmoid(v), where v is a function of g, and g_dv g times its derivative. */
BST_DEVICE bst_gate bst_sigmoid_gate(float g, float v, float g_dv, int type) {
    float d = 1.0f + bst_exp_minus(v, type), s = bst_quotient(1.0f, d, type);
    return {bst_quotient(g, d, type), s, g, bst_fma(g_dv, 1.0f - s, 1.0f)};
}

/* As torch.clamp: NaN stays NaN. */
BST_DEVICE float bst_clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

BST_DEVICE bst_gate bst_gelu_tanh(float g, int type) {
    float h = bst_clamp(g, -BST_GELU_TANH_END, BST_GELU_TANH_END), square = h * h;
    float v = h * bst_fma(BST_GELU_TANH_THIRD, square, BST_GELU_TANH_FIRST);
    float g_dv = h * bst_fma(3 * BST_GELU_TANH_THIRD, square, BST_GELU_TANH_FIRST);
    if (type != BST_F32_CODE) return bst_sigmoid_gate(g, v, g_dv, type);
    /* Both sides of the sigmoid from its smaller one, whose roundings weigh least. */
    float size = v < 0 ? -v : v, e = size < 87.0f ? bst_exp_exact(-size) : 0.0f;
    float least = bst_divide(e, 1.0f + e), most = 1.0f - least, value = v < 0 ? g * least : g - h * least;
    return {value, 1.0f, value, bst_fma(g_dv, least * most, v < 0 ? least : most)};
}

/* g F(g), F the normal distribution, from its smaller side. */
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

BST_DEVICE bst_gate bst_activate(float g, int activation, int type) {
    float positive = g <= 0 ? 0.0f : g; /* NaN stays NaN */
    switch (activation) {
        case BST_GELU_TANH_CODE:
            return bst_gelu_tanh(g, type);
        case BST_GELU_CODE:
            return bst_gelu(g, type);
        case BST_RELU_CODE:
            return {positive, 1.0f, positive, g <= 0 ? 0.0f : 1.0f};
        case BST_RELU2_CODE:
            return {positive * positive, 1.0f, positive * positive, 2 * positive};
        default:
            return bst_sigmoid_gate(g, g, g, type);
    }
}

/* Of swiglu_oai, what the sigmoid is of: finite, so that no slope of 0 is multiplied with an infinite one. */
BST_DEVICE float bst_oai_inner(float g, float alpha) { return bst_clamp(alpha * g, -BST_LARGEST, BST_LARGEST); }

/* Of swiglu_oai too. Its up is one more. */
BST_DEVICE bst_gate bst_unit_gate(float g, int activation, float alpha, int type) {
    if (activation != BST_SWIGLU_OAI_CODE) return bst_activate(g, activation, type);
    float v = bst_oai_inner(g, alpha);
    return bst_sigmoid_gate(g, v, v, type);
}
BST_DEVICE float bst_unit_up(float u, int activation) { return activation == BST_SWIGLU_OAI_CODE ? u + 1.0f : u; }

struct bst_gated_gradients {
    float dgate, dup, y; /* y: what bst_gated_within gives */
};

/* For float32, where each rounding shows, dup is of `value`: a product with factor, rounded twice, would show. */
BST_DEVICE bst_gated_gradients bst_gradients_of(float dy, bst_gate a, float u, int type) {
    float scaled = dy * a.factor;
    if (type == BST_F32_CODE) return {dy * u * a.factor * a.slope, dy * a.value, u * a.value};
    return {u * (scaled * a.slope), a.rest * scaled, u * a.value};
}

/* Any unit; where `limited`, a constant, the gate is at most `limit`, and up between -limit and limit. */
BST_DEVICE float bst_gated_within(float g, float u, int activation, float alpha, bool limited, float limit, int type) {
    float gate = limited && g > limit ? limit : g, up = limited ? bst_clamp(u, -limit, limit) : u;
    return bst_unit_up(up, activation) * bst_unit_gate(gate, activation, alpha, type).value;
}

/* As of torch.clamp: no gradient goes beyond a limit, nor, where there is one, to a NaN. For float32 swiglu_oai's slope
 * is added to, not multiplied with: a rounding less, as its definition has it. */
BST_DEVICE bst_gated_gradients bst_gated_within_backward(float dy, float g, float u, int activation, float alpha,
                                                         bool limited, float limit, int type) {
    float gate = limited && g > limit ? limit : g, up = limited ? bst_clamp(u, -limit, limit) : u;
    bst_gate of_gate = bst_unit_gate(gate, activation, alpha, type);
    up = bst_unit_up(up, activation);
    bst_gated_gradients d = bst_gradients_of(dy, of_gate, up, type);
    if (activation == BST_SWIGLU_OAI_CODE && type == BST_F32_CODE) {
        float scaled = dy * up * of_gate.factor;
        d.dgate = bst_fma(scaled, bst_oai_inner(gate, alpha) * (1.0f - of_gate.factor), scaled);
    }
    if (limited) {
        d.dgate = g <= limit ? d.dgate : 0.0f;
        d.dup = u >= -limit && u <= limit ? d.dup : 0.0f;
    }
    return d;
}

#endif
