/* logarithm.h - the natural logarithm to a unit in the last place, without branches: the same text for CPU and CUDA.
 * Kernels include it after ptx.cuh. */
#ifndef BST_LOGARITHM_H
#define BST_LOGARITHM_H

#ifndef BST_DEVICE
#include "core/cpu_kernel.h"
#endif

#define BST_LN2         0.693147180559945f
#define BST_LN2_REST    (-1.90465430e-9f) /* what is missing in the float above */
#define BST_LOG2_E      1.44269504088896f
#define BST_LOG2_E_REST 1.92596299e-8f

/* 2 atanh(s), for |s| up to 0.1716. */
BST_INLINE float bst_twice_atanh(float s) {
    float q = s * s;
    float series = bst_fma(q, bst_fma(q, bst_fma(q, 0.222222222f, 0.285714286f), 0.4f), 0.666666667f);
    return bst_fma(s * q, series, 2.0f * s);
}

/* Of a positive, finite v that is not subnormal. With m from sqrt(1/2) to sqrt(2) it is
 * power ln 2 + 2 atanh((m - 1) / (m + 1)). */
BST_INLINE float bst_log_of_normal(float v) {
    int32_t power = (int32_t)(bst_bits(v) - 0x3f3504f3u) >> 23;
    float m = bst_from_bits(bst_bits(v) - ((uint32_t)power << 23));
    float small = bst_twice_atanh(bst_divide(m - 1.0f, m + 1.0f));
    return bst_fma((float)power, BST_LN2, bst_fma((float)power, BST_LN2_REST, small));
}

#endif
