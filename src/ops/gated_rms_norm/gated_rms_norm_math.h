/* gated_rms_norm_math.h - one gate of the norm, for CPU and CUDA alike, after gated_arithmetic.h. `activation` and
 * `type` are codes of gated_rms_norm_args.h and dtype.h, constants at every call, so that each branch folds away. */
#ifndef BST_GATED_RMS_NORM_MATH_H
#define BST_GATED_RMS_NORM_MATH_H

typedef struct norm_gate {
    float value, slope; /* act(g), act'(g) */
} norm_gate;

BST_INLINE norm_gate norm_gate_of(float g, int activation, int type) {
    bst_gate a = bst_sigmoid_gate(g, g, g, type);
    float s = g == g ? a.factor : g; /* which for NaN is any number: silu's is multiplied with g */
    norm_gate silu = {a.value, a.factor * a.slope}, sigmoid = {s, s * (1.0f - s)};
    return activation == GATE_SIGMOID ? sigmoid : silu;
}

#endif
