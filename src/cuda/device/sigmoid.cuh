/* sigmoid.cuh - what gates are made of: exp(-v) and quotients, as exact as results of `type` can show. `type` is a code
 * of dtype.h, a constant. */
#ifndef BST_SIGMOID_CUH
#define BST_SIGMOID_CUH

#include "ptx.cuh"

#include "dtype.h"

#define BST_LOG2_E 1.44269504f
/* What is missing in the line above. */
#define BST_LOG2_E_REST 1.92596299e-8f
#define BST_LN_2        0.693147181f

/* exp(-v). The rounding of v * log2(e) costs up to |v| 2^-24 of the result: for float32 it is put back. */
BST_DEVICE float bst_exp_minus(float v, int type) {
    float power = -v * BST_LOG2_E, e = bst_exp2(power);
    if (type == BST_F32_CODE) {
        float rest = bst_fma(-v, BST_LOG2_E_REST, bst_fma(-v, BST_LOG2_E, -power));
        if (bst_abs(v) < 87.0f) e = bst_fma(e * rest, BST_LN_2, e); /* beyond, e is near 0 or infinite */
    }
    return e;
}

/* n / d; the approximation is good to 1 ulp of float32, which only float32 results could notice. */
BST_DEVICE float bst_quotient(float n, float d, int type) {
    return type == BST_F32_CODE ? bst_divide(n, d) : n * bst_reciprocal(d);
}

#endif
