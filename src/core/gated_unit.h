/* gated_unit.h - one element of a gated unit, y = act(gate) * up, and its gradients, for CPU kernels. `activation` and
 * `dtype` are constants in every loop, so that each branch folds away. src/cuda/device/gated_unit.cuh is the same for
 * CUDA. */
#ifndef BST_GATED_UNIT_H
#define BST_GATED_UNIT_H

#include "core/activation.h"
#include "core/cpu_kernel.h"

/* 1 + exp(-x), where 1 hides what exp is short of near zero. exp(v) = 2^k p(f), k the integer nearest to v log2(e): for
 * float32 p is that of bst_exp; for types of 16 bits a polynomial of degree 4 in v log2(e) - k, wrong by at most
 * 2.6e-6, 1/90 of their rounding. For NaN any number: what it is used with is NaN too. */
static inline float bst_one_plus_exp_minus(float x, bst_dtype dtype) {
    const float least = -87.3f, most = 88.37f, log2_e = 1.44269504f, magic = 12582912.0f;
    float v = -x < least ? least : -x;
    v = v > most ? most : v;
    float shifted = v * log2_e + magic, k = shifted - magic, p;
    if (dtype == BST_F32) {
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
    float e = bst_float_from_bits(bst_bits_from_float(p) + (bst_bits_from_float(shifted) << 23));
    return -x > most ? INFINITY : 1.0f + e;
}

/* Of a gate g: act(g) = factor * rest, or as `value`, rounded but once after its last sum; act'(g) = factor * slope. */
typedef struct bst_gate {
    float value, factor, rest, slope;
} bst_gate;

/* g sigmoid(v), where v is a function of g, and g_dv g times its derivative. Near the slope's zero a rounded product
 * shows, in float32. */
static inline bst_gate bst_sigmoid_gate(float g, float v, float g_dv, bst_dtype dtype) {
    float d = bst_one_plus_exp_minus(v, dtype), s = 1.0f / d;
    float slope = dtype == BST_F32 ? bst_multiply_add(g_dv, 1.0f - s, 1.0f) : 1.0f + g_dv * (1.0f - s);
    return (bst_gate){g / d, s, g, slope};
}

/* As torch.clamp: NaN stays NaN. */
static inline float bst_clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

static inline bst_gate bst_gelu_tanh(float g, bst_dtype dtype) {
    float h = bst_clamp(g, -BST_GELU_TANH_END, BST_GELU_TANH_END), square = h * h;
    float v = h * (BST_GELU_TANH_FIRST + BST_GELU_TANH_THIRD * square);
    float g_dv = h * (BST_GELU_TANH_FIRST + 3 * BST_GELU_TANH_THIRD * square);
    if (dtype != BST_F32) return bst_sigmoid_gate(g, v, g_dv, dtype);
    /* Both sides of the sigmoid from its smaller one, whose roundings weigh least. */
    float e = bst_exp(-fabsf(v)), least = e / (1.0f + e), most = 1.0f - least;
    float value = v < 0 ? g * least : g - h * least;
    return (bst_gate){value, 1.0f, value, (v < 0 ? least : most) + g_dv * (least * most)};
}

/* g F(g), F the normal distribution, from its smaller side. */
static inline bst_gate bst_gelu(float g) {
    float h = bst_clamp(g, -BST_NORMAL_END, BST_NORMAL_END), e = bst_exp(-0.5f * h * h);
    float t = 1.0f / (1.0f + BST_NORMAL_SCALE * fabsf(h)), p = 0.0f;
#define STEP(c) p = p * t + (c);
    BST_NORMAL_COEFFICIENTS(STEP)
#undef STEP
    float least = fabsf(g) < BST_NORMAL_END ? e * (t * p) : 0.0f;
    float value = g < 0 ? g * least : g - h * least;
    return (bst_gate){value, 1.0f, value, (g < 0 ? least : 1.0f - least) + h * (BST_NORMAL_DENSITY * e)};
}

static inline bst_gate bst_activate(float g, int activation, bst_dtype dtype) {
    float positive = g <= 0 ? 0.0f : g; /* NaN stays NaN */
    switch (activation) {
        case BST_GELU_TANH_CODE:
            return bst_gelu_tanh(g, dtype);
        case BST_GELU_CODE:
            return bst_gelu(g);
        case BST_RELU_CODE:
            return (bst_gate){positive, 1.0f, positive, g <= 0 ? 0.0f : 1.0f};
        case BST_RELU2_CODE:
            return (bst_gate){positive * positive, 1.0f, positive * positive, 2 * positive};
        default:
            return bst_sigmoid_gate(g, g, g, dtype);
    }
}

static inline float bst_gated(float g, float u, int activation, bst_dtype dtype) {
    return u * bst_activate(g, activation, dtype).value;
}

typedef struct bst_gated_gradients {
    float dgate, dup, y; /* y: what bst_gated gives */
} bst_gated_gradients;

/* For float32, where each rounding shows, dup is of `value`, one quotient, which does not become subnormal, as dy s
 * may, where it need not. */
static inline bst_gated_gradients bst_gated_backward(float dy, float g, float u, int activation, bst_dtype dtype) {
    bst_gate a = bst_activate(g, activation, dtype);
    float scaled = dy * a.factor;
    if (dtype == BST_F32) return (bst_gated_gradients){dy * u * a.factor * a.slope, dy * a.value, u * a.value};
    return (bst_gated_gradients){u * (scaled * a.slope), a.rest * scaled, u * a.value};
}

/* Of experts: the gate at most `limit`, up between -limit and limit. swiglu_oai is (up + 1) gate sigmoid(alpha gate),
 * from float32's exponential whatever the type. */
static inline float bst_gated_within(float g, float u, int activation, float alpha, float limit, bst_dtype dtype) {
    float gate = bst_clamp(g, -INFINITY, limit), up = bst_clamp(u, -limit, limit);
    if (activation != BST_SWIGLU_OAI_CODE) return bst_gated(gate, up, activation, dtype);
    return (up + 1.0f) * (gate / (1.0f + bst_exp(-alpha * gate)));
}

/* As of torch.clamp: no gradient goes beyond a limit, nor, where there is one, to a NaN. With s = sigmoid(alpha gate)
 * swiglu_oai's derivatives are (up + 1) s (1 + alpha gate (1 - s)) and gate s. */
static inline bst_gated_gradients bst_gated_within_backward(float dy, float g, float u, int activation, float alpha,
                                                            float limit, bst_dtype dtype) {
    float gate = bst_clamp(g, -INFINITY, limit), up = bst_clamp(u, -limit, limit);
    bst_gated_gradients d;
    if (activation == BST_SWIGLU_OAI_CODE) {
        float s = 1.0f / (1.0f + bst_exp(-alpha * gate)), slope = s * (1.0f + alpha * gate * (1.0f - s));
        up += 1.0f;
        d = (bst_gated_gradients){dy * up * slope, dy * (gate * s), up * (gate * s)};
    } else {
        d = bst_gated_backward(dy, gate, up, activation, dtype);
        if (!(limit < INFINITY)) return d;
    }
    d.dgate = g <= limit ? d.dgate : 0.0f;
    d.dup = u >= -limit && u <= limit ? d.dup : 0.0f;
    return d;
}

#endif
