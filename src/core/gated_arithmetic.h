/* gated_arithmetic.h - one element of a gated unit, y = act(gate) * up, and its gradients: the same text for CPU and
 * CUDA, around the sigmoid and both forms of GELU, which gated_unit.h and gated_unit.cuh have each in their way.
 * `activation` and `type` are codes of activation.h and dtype.h, constants at every call, so that each branch folds
 * away. */
#ifndef BST_GATED_ARITHMETIC_H
#define BST_GATED_ARITHMETIC_H

/* Of a gate g: act(g) = factor * rest, or as `value`, rounded but once after its last sum; act'(g) = factor * slope. */
typedef struct bst_gate {
    float value, factor, rest, slope;
} bst_gate;

/* g sigmoid(v), where v is a function of g, and g_dv g times its derivative. */
BST_INLINE bst_gate bst_sigmoid_gate(float g, float v, float g_dv, int type);
BST_INLINE bst_gate bst_gelu_tanh(float g, int type);
/* g F(g), F the normal distribution. */
BST_INLINE bst_gate bst_gelu(float g, int type);

/* sigmoid(v) + g_dv sigmoid(v) sigmoid(-v), of the smaller one of these two: a rounding of the larger would show in
 * float32. */
BST_INLINE float bst_sigmoid_slope(float v, float g_dv, float least) {
    float most = 1.0f - least;
    return v < 0 ? least * bst_fma(g_dv, most, 1.0f) : bst_fma(-least, bst_fma(-g_dv, most, 1.0f), 1.0f);
}

/* As torch.clamp: NaN stays NaN. */
BST_INLINE float bst_clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

BST_INLINE bst_gate bst_activate(float g, int activation, int type) {
    float positive = g <= 0 ? 0.0f : g; /* NaN stays NaN */
    bst_gate relu = {positive, 1.0f, positive, g <= 0 ? 0.0f : 1.0f};
    bst_gate relu2 = {positive * positive, 1.0f, positive * positive, 2 * positive};
    switch (activation) {
        case BST_GELU_TANH_CODE:
            return bst_gelu_tanh(g, type);
        case BST_GELU_CODE:
            return bst_gelu(g, type);
        case BST_RELU_CODE:
            return relu;
        case BST_RELU2_CODE:
            return relu2;
        default:
            return bst_sigmoid_gate(g, g, g, type);
    }
}

/* Of swiglu_oai, what the sigmoid is of: finite, so that no slope of 0 is multiplied with an infinite one. */
BST_INLINE float bst_oai_inner(float g, float alpha) { return bst_clamp(alpha * g, -BST_LARGEST, BST_LARGEST); }

/* Of swiglu_oai too. Its up is one more. */
BST_INLINE bst_gate bst_unit_gate(float g, int activation, float alpha, int type) {
    if (activation != BST_SWIGLU_OAI_CODE) return bst_activate(g, activation, type);
    float v = bst_oai_inner(g, alpha);
    return bst_sigmoid_gate(g, v, v, type);
}
BST_INLINE float bst_unit_up(float u, int activation) { return activation == BST_SWIGLU_OAI_CODE ? u + 1.0f : u; }

/* The up that leaves the activation alone. */
BST_INLINE float bst_no_up(int activation) { return activation == BST_SWIGLU_OAI_CODE ? 0.0f : 1.0f; }

typedef struct bst_gated_gradients {
    float dgate, dup, y; /* y: the unit's */
} bst_gated_gradients;

/* For float32, where each rounding shows, dup is of `value`, one quotient: a product with factor, rounded twice, would
 * show, and dy factor may become subnormal where it need not. */
BST_INLINE bst_gated_gradients bst_gradients_of(float dy, bst_gate a, float u, int type) {
    float scaled = dy * a.factor;
    bst_gated_gradients exact = {dy * u * a.factor * a.slope, dy * a.value, u * a.value};
    bst_gated_gradients plain = {u * (scaled * a.slope), a.rest * scaled, u * a.value};
    return type == BST_F32_CODE ? exact : plain;
}

/* Any unit; where `limited` (core/activation.h), the gate is at most `limit`, and up between -limit and limit. */
BST_INLINE float bst_gated_within(float g, float u, int activation, float alpha, int limited, float limit, int type) {
    float gate = limited && g > limit ? limit : g, up = limited ? bst_clamp(u, -limit, limit) : u;
    return bst_unit_up(up, activation) * bst_unit_gate(gate, activation, alpha, type).value;
}

/* As of torch.clamp: no gradient goes beyond a limit, nor, where there is one, to a NaN. For float32 swiglu_oai's slope
 * is of the sigmoid's smaller side. */
BST_INLINE bst_gated_gradients bst_gated_within_backward(float dy, float g, float u, int activation, float alpha,
                                                         int limited, float limit, int type) {
    float gate = limited && g > limit ? limit : g, up = limited ? bst_clamp(u, -limit, limit) : u;
    bst_gate of_gate = bst_unit_gate(gate, activation, alpha, type);
    up = bst_unit_up(up, activation);
    bst_gated_gradients d = bst_gradients_of(dy, of_gate, up, type);
    if (activation == BST_SWIGLU_OAI_CODE && type == BST_F32_CODE) {
        float v = bst_oai_inner(gate, alpha);
        d.dgate = dy * up * bst_sigmoid_slope(v, v, bst_sigmoid_gate(1.0f, v < 0 ? v : -v, 0.0f, type).factor);
    }
    if (limited == BST_CLOSED_LIMIT) {
        d.dgate = g <= limit ? d.dgate : 0.0f;
        d.dup = u >= -limit && u <= limit ? d.dup : 0.0f;
    } else if (limited) {
        d.dgate = g < limit ? d.dgate : 0.0f;
        d.dup = u > -limit && u < limit ? d.dup : 0.0f;
    }
    return d;
}

#endif
