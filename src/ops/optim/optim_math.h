/* optim_math.h - AdamW's arithmetic of one element, the codes of 8 bits and the random numbers, for CPU and CUDA: the
 * same text on both. Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, in the form of
 * torch.optim.AdamW:
 *
 *     m = m + (1 - beta1) (g - m)        v = v + (1 - beta2) (g^2 - v)
 *     p = p - (lr weight_decay p + lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
 *
 * where the root of 1 - beta2^t goes into lr and eps. Each of the three is rounded once after sums of small terms, so
 * that its error is at most that of torch's order of operations. */
#ifndef BST_OPTIM_MATH_H
#define BST_OPTIM_MATH_H

#ifdef BST_DEVICE
#include "philox.h"
#else
#include "core/cpu_kernel.h"
#include "core/philox.h"
#endif

/* ---- coefficients of a tensor ------------------------------------------------------------------------------------ */

/* In the order in which the first kernel writes them. */
typedef struct optim_coefficients {
    float step_size; /* lr sqrt(1 - beta2^t) / (1 - beta1^t) */
    float eps;       /* eps sqrt(1 - beta2^t) */
    float decay;     /* lr weight_decay */
    float factor;    /* of the gradient: clip / grad_scale */
    float skip;      /* not 0: nothing is to be done, for a gradient was not finite */
    float step;      /* t, for the random numbers */
} optim_coefficients;

BST_INLINE double optim_power(double base, int64_t exponent) {
    double power = 1;
    for (; exponent > 0; exponent /= 2, base *= base)
        if (exponent & 1) power *= base;
    return power;
}

/* One step more, unless a gradient was not finite. */
BST_INLINE optim_coefficients optim_begin_tensor(float *step, double lr, double beta1, double beta2, double eps,
                                                 double weight_decay, const float *device_lr, const float *grad_scale,
                                                 const float *found_inf, const float *clip) {
    optim_coefficients c;
    c.skip = found_inf ? *found_inf : 0.0f;
    c.step = *step + 1.0f;
    if (c.skip == 0.0f) *step = c.step;
    const int64_t t = (int64_t)c.step;
    if (device_lr) lr = (double)*device_lr;
    const double root = bst_sqrt_double(1 - optim_power(beta2, t));
    c.step_size = (float)(lr * root / (1 - optim_power(beta1, t)));
    c.eps = (float)(eps * root);
    c.decay = (float)(lr * weight_decay);
    c.factor = clip ? *clip : 1.0f;
    if (grad_scale) c.factor = bst_divide(c.factor, *grad_scale);
    return c;
}

/* ---- one element ------------------------------------------------------------------------------------------------- */

BST_INLINE float optim_exp_avg(float m, float g, float beta1_rest) { return bst_fma(beta1_rest, g - m, m); }
BST_INLINE float optim_exp_avg_sq(float v, float g, float beta2_rest) {
    return bst_fma(beta2_rest, bst_fma(g, g, -v), v);
}

/* `exact` (a constant), of both: correctly rounded root and quotient; else each by one instruction, within 2^-22 of
 * itself, for what is rounded to 16 bits. */
BST_INLINE float optim_root(float v, bool exact) { return exact ? bst_sqrt(v) : bst_sqrt_near(v); }

/* root: the second moment's. */
BST_INLINE float optim_parameter(float p, float m, float root, const optim_coefficients *c, bool exact) {
    if (exact) return p - bst_fma(c->step_size, bst_divide(m, root + c->eps), c->decay * p);
    /* The root of a subnormal is 0 here: with an eps of 0 the smallest other one stands for it. */
    const float denominator = bst_max(root + c->eps, 1.0842022e-19f);
    return p - bst_fma(c->step_size, m * bst_reciprocal(denominator), c->decay * p);
}

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

/* What is rounded. Parameters have numbers of their own, and moments: of these the second one has the first one's with
 * their bytes exchanged, so that what counts most in one counts least in the other. */
enum { OPTIM_OF_PARAMETER, OPTIM_OF_MOMENTS };

BST_INLINE uint32_t optim_exchanged(uint32_t random) {
    return (random & 0x00ff00ffu) << 8 | (random >> 8 & 0x00ff00ffu);
}

/* 128 bits for OPTIM_EACH elements of 16. The counter: which eight elements, of which kind, of which tensor, at which
 * step. */
BST_INLINE void optim_philox(uint32_t out[4], uint64_t seed, uint64_t eight, uint32_t kind, uint32_t number,
                             uint32_t step) {
    bst_philox(out, seed, (uint32_t)eight, (uint32_t)(eight >> 32) | kind << 30, number, step);
}

/* bfloat16, up with the probability that leaves the mean as it is: what is cut off, in 2^-16 of a unit, against 16
 * random bits. Inf, of which nothing is cut off, stays, and NaN. */
BST_INLINE uint32_t optim_bf16_stochastic(float value, uint32_t random16) {
    return value != value ? 0x7fffu : (bst_bits(value) + random16) >> 16;
}

/* ---- moments of 8 bits ------------------------------------------------------------------------------------------- */

/* A block's scale is its largest magnitude, and codes are of powers of what it is divided by:
 *     first moment   c |c| / 127^2, c from -127 to 127        steps of 1.6 % of the largest, down to 6e-5 of it
 *     second moment  (c / 255)^4,   c from 0 to 255           its root in steps of 0.8 %, down to 1.5e-5 of it
 * Fine for large numbers, coarse for small ones, without a table. A code is drawn between the two neighbours so that
 * the mean is right: moments change by less than a step, which rounding to nearest would lose for good. A second moment
 * is divided by, so its code is 1 at least.
 *
 * A chip has few units for integers, and fewer for conversions: a byte, or 16 random bits, becomes a float as the low
 * bits of 2^23, the integer next to x is in the low bits of x + 1.5 2^23, and what is less than 0 has 1 as its topmost
 * bit. */
#define OPTIM_BYTE_BITS 0x4b000000u /* of 2^23 */

/* shifted: 2^23 + code, that of the first one with its topmost bit exchanged. */
BST_INLINE float optim_decode_first(float shifted, float scale) {
    const float c = shifted - 8388736.0f; /* 2^23 + 128 */
    return scale * (1.0f / (127 * 127)) * (c * bst_abs(c));
}
BST_INLINE float optim_decode_second(float shifted, float scale) {
    const float c = shifted - 8388608.0f, square = c * c; /* 2^23 */
    return scale * (1.0f / (255.0f * 255 * 255 * 255)) * (square * square);
}

/* What values are multiplied with. Of a scale that is next to nothing, or no number: 0. */
BST_INLINE float optim_inverse(float scale) { return scale >= 1e-37f && scale < 8e37f ? bst_reciprocal(scale) : 0.0f; }

/* 2^23 + 16 random bits as a number between 0 and 1. */
BST_INLINE float optim_uniform(float shifted) { return bst_fma(shifted, 0x1p-16f, -0x1.fffffep+6f); }

/* The code, in the low byte of what is returned: that of the level below, or the next one where the share of the step
 * is larger than the random number. The level below may be one too low or too high next to a level; its share of the
 * step then is 1 or 0. */
#define OPTIM_SHIFT 12582912.0f /* 1.5 2^23: what is added to it becomes an integer, to nearest */
BST_INLINE uint32_t optim_encode_first(float value, float inverse, float uniform) {
    const float x = value * inverse, size = bst_sqrt_near(bst_abs(x));
    const float root = bst_from_bits(bst_bits(size) | (bst_bits(x) & 0x80000000u));
    const float shifted = bst_fma(root, 126.999f, -0.5f) + OPTIM_SHIFT, low = shifted - OPTIM_SHIFT, high = low + 1;
    const float below = low * bst_abs(low), step = bst_fma(high, bst_abs(high), -below);
    const float above = bst_fma(x, 127 * 127, -below);
    return bst_bits(shifted) + (bst_bits(bst_fma(uniform, step, -above)) >> 31);
}
/* Of the moment's root, and the inverse of the largest one. */
BST_INLINE uint32_t optim_encode_second(float root, float inverse, float uniform) {
    const float x = root * inverse, fourth = bst_max(bst_sqrt_near(x), 1.001f / 254.999f);
    const float shifted = bst_fma(fourth, 254.999f, -0.5f) + OPTIM_SHIFT, low = shifted - OPTIM_SHIFT;
    /* high^4 - low^4 = (high^2 + low^2) (high + low) */
    const float square = low * low, ends = bst_fma(2, low, 1), step = bst_fma(2, square, ends) * ends;
    const float above = bst_fma(x * x, 255.0f * 255 * 255 * 255, -square * square);
    return bst_bits(shifted) + (bst_bits(bst_fma(uniform, step, -above)) >> 31);
}

#endif
