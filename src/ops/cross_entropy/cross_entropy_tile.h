/* cross_entropy_tile.h - what CPU kernels that read rows of logits share: z and slope of a tile, its maximum, its
 * sums. */
#ifndef BST_CROSS_ENTROPY_TILE_H
#define BST_CROSS_ENTROPY_TILE_H

#include "core/cpu_kernel.h"
#include "ops/cross_entropy/cross_entropy.h"

/* tanh to about two units in the last place: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel. */
static inline float hyperbolic_tangent(float x) {
    float magnitude = fabsf(x), square = x * x;
    float p = -5.6180824e-3f;
    p = p * square + 2.0566579e-2f;
    p = p * square - 5.3719564e-2f;
    p = p * square + 1.3331234e-1f;
    p = p * square - 3.3333276e-1f;
    float small = x + x * square * p;
    float large = copysignf(1.0f - 2.0f / (bst_exp(2.0f * magnitude) + 1.0f), x);
    return magnitude < 0.625f ? small : large;
}

/* z of a tile of logits and, where `slope` is not NULL, dz/d(logit). */
static inline void shape_tile(const bst_loss *o, float *z, float *slope, int64_t n) {
    float scale = (float)o->logit_scale, cap = (float)o->softcap, inner = (float)(o->logit_scale / o->softcap);
    if (o->softcap > 0) {
        for (int64_t i = 0; i < n; i++) z[i] = hyperbolic_tangent(z[i] * inner);
        if (slope)
            for (int64_t i = 0; i < n; i++) slope[i] = scale * (1.0f - z[i]) * (1.0f + z[i]);
        for (int64_t i = 0; i < n; i++) z[i] *= cap;
    } else if (scale != 1.0f) {
        for (int64_t i = 0; i < n; i++) z[i] *= scale;
    }
}

/* So many that compilers keep the loop over them a loop. */
enum { LANES = 128 };

/* The largest of `top` and n numbers, NaNs left out. In lanes: a reduction to a maximum that leaves NaNs out is none
 * that Clang vectorises. */
static inline float largest(float top, const float *z, int64_t n) {
    float lane[LANES];
    int64_t i = 0;
    for (int j = 0; j < LANES; j++) lane[j] = top;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = z[i + j] > lane[j] ? z[i + j] : lane[j];
    for (; i < n; i++) top = z[i] > top ? z[i] : top;
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0] > top ? lane[0] : top;
}

static inline double sum_of(const float *lane) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < LANES; j++) sum += lane[j];
    return sum;
}

#endif
