/* cpu_kernel.h - what CPU kernels share: names per vector level, type conversions, exponentials.
 *
 * A file <op>_cpu.c is compiled once per vector level with BST_CPU_SUFFIX naming the level. Its loops are plain C over
 * float32 tiles that fit the first-level cache; the compiler vectorises them. Functions here are branch-free for that
 * reason. */
#ifndef BST_CPU_KERNEL_H
#define BST_CPU_KERNEL_H

#include <math.h>
#include <string.h>

#include "core/core.h"

#define BST_CPU_PASTE_(name, suffix) name##suffix
#define BST_CPU_PASTE(name, suffix)  BST_CPU_PASTE_(name, suffix)
/* In a kernel file: the name of a function at this level. */
#define BST_CPU(name) BST_CPU_PASTE(name, BST_CPU_SUFFIX)

/* For the caller: declares the bst_body `name` at every level, and picks one. */
#if defined(BST_CPU_HAS_LEVELS)
#define BST_CPU_DECLARE(name)                                        \
    void name##_baseline(void *context, int64_t begin, int64_t end); \
    void name##_v3(void *context, int64_t begin, int64_t end);       \
    void name##_v4(void *context, int64_t begin, int64_t end)
#define BST_CPU_SELECT(name) ((const bst_body[BST_CPU_LEVELS]){name##_baseline, name##_v3, name##_v4}[bst__cpu_level()])
#else
#define BST_CPU_DECLARE(name) void name##_baseline(void *context, int64_t begin, int64_t end)
#define BST_CPU_SELECT(name)  name##_baseline
#endif

/* Runs one over [0, count), each of which is so much work (bst__grain). */
#define BST_CPU_RUN(exec, count, work, name, context) \
    bst__parallel_for(exec, count, bst__grain(work), BST_CPU_SELECT(name), context)

/* Elements of a float32 tile: 8 KiB, so that a few tiles share a 32 KiB cache. */
enum { BST_TILE = 2048 };
/* For each run of `tile` elements of [begin, end), which begins at `at` and has `n`: of the last what is left. */
#define BST_TILES(at, n, begin, end, tile) \
    for (int64_t at = (begin), n; n = bst__lesser(tile, (end) - at), at < (end); at += (tile))

/* ---- the words of ptx.cuh that texts for CPU and CUDA alike are written in --------------------------------------- */

#define BST_INLINE        static inline
#define BST_INFINITY      INFINITY
#define bst_abs           fabsf
#define bst_divide(a, b)  ((a) / (b))
#define bst_reciprocal(a) (1.0f / (a))
#define bst_sqrt          sqrtf
#define bst_sqrt_double   sqrt
#define bst_sqrt_near     sqrtf
static inline float bst_max(float a, float b) { return a > b ? a : b; }

static inline float bst_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bst_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* a b + c, of an exact product where the machine has that at a product's cost. */
static inline float bst_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* ---- element types ----------------------------------------------------------------------------------------------- */

static inline float bst_from_bf16(uint16_t half) { return bst_from_bits((uint32_t)half << 16); }

/* To nearest, ties to even; NaN stays NaN. */
static inline uint16_t bst_to_bf16(float value) {
    uint32_t bits = bst_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded);
}

static inline float bst_from_f16(uint16_t half) {
    /* Moves exponent and mantissa into place, then a multiplication by 2^112 mends the bias, subnormals included; Inf
     * and NaN (exponent 31) get the float's largest exponent. */
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    float value = bst_from_bits(magnitude) * 0x1p112f;
    uint32_t bits = (half & 0x7c00) == 0x7c00 ? (magnitude | 0x7f800000u) : bst_bits(value);
    return bst_from_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t bst_to_f16(float value) {
    uint32_t bits = bst_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    /* Normal results: rebias and round the 13 bits that fall away. Subnormal results: adding 0.5 lets the float unit
     * round at the right place. Anything from 65520 up is Inf. */
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    uint32_t small = bst_bits(bst_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? small : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return (uint16_t)(result | sign);
}

/* The address of an element. */
static inline void *bst_at(const void *base, int64_t index, bst_dtype dtype) {
    return (char *)(uintptr_t)base + index * bst__dtype_size(dtype);
}

/* n elements into a float32 tile, and back. */
static inline void bst_load(float *restrict out, const void *restrict in, bst_dtype dtype, int64_t n) {
    const uint16_t *half = in;
    if (dtype == BST_F32) {
        memcpy(out, in, (size_t)n * sizeof *out);
    } else if (dtype == BST_BF16) {
        for (int64_t i = 0; i < n; i++) out[i] = bst_from_bf16(half[i]);
    } else {
        for (int64_t i = 0; i < n; i++) out[i] = bst_from_f16(half[i]);
    }
}

static inline void bst_store(void *restrict out, const float *restrict in, bst_dtype dtype, int64_t n) {
    uint16_t *half = out;
    if (dtype == BST_F32) {
        memcpy(out, in, (size_t)n * sizeof *in);
    } else if (dtype == BST_BF16) {
        for (int64_t i = 0; i < n; i++) half[i] = bst_to_bf16(in[i]);
    } else {
        for (int64_t i = 0; i < n; i++) half[i] = bst_to_f16(in[i]);
    }
}

/* A tile as it is after being stored in `dtype`. */
static inline void bst_round_tile(float *tile, bst_dtype dtype, int64_t n) {
    if (dtype == BST_BF16) {
        for (int64_t i = 0; i < n; i++) tile[i] = bst_from_bf16(bst_to_bf16(tile[i]));
    } else if (dtype == BST_F16) {
        for (int64_t i = 0; i < n; i++) tile[i] = bst_from_f16(bst_to_f16(tile[i]));
    }
}

/* ---- sums and exponentials --------------------------------------------------------------------------------------- */

/* The sum of n products: in float32 over short runs, so that none is added to a sum that has grown much larger. */
static inline double bst_sum_of_products(const float *x, const float *y, int64_t n) {
    enum { RUN = 128 };
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += RUN) {
        int64_t end = n - begin < RUN ? n : begin + RUN;
        float run = 0;
#pragma omp simd reduction(+ : run)
        for (int64_t i = begin; i < end; i++) run += x[i] * y[i];
        sum += (double)run;
    }
    return sum;
}

/* Of n columns of rows of floats, `stride` apart, the sums, at most BST_TILE: in float64, in the rows' order. */
static inline void bst_sum_rows(float *restrict out, const float *rows, int64_t count, int64_t stride, int64_t n) {
    double sum[BST_TILE] = {0};
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < n; i++) sum[i] += (double)rows[row * stride + i];
    for (int64_t i = 0; i < n; i++) out[i] = (float)sum[i];
}

/* exp(x) / 2^k for an integer k within 0.51 of x / ln 2, wrong by 0.06 units in the last place before its last
 * rounding: with f = x - k ln 2, |f| < 0.3535, it is 1 + (f + f^2 p(f)), p of degree 4 with the least largest error.
 * Terms are added from the smallest on: only the last sum rounds at the result's own size. */
static inline float bst_exp_over_power(float x, float k) {
    float f = x - k * 0.693359375f; /* exact: 10 bits times 8 */
    f = f + k * 2.12194440e-4f;
    float p = 1.38189504e-3f;
    p = p * f + 8.36870447e-3f;
    p = p * f + 4.16682884e-2f;
    p = p * f + 0.166665211f;
    p = p * f + 0.49999994f;
    return 1.0f + (f + f * f * p);
}

/* exp(x) to less than one unit in the last place; Inf above 88.73, 0 below -87.34 (no subnormal results); NaN stays
 * NaN. */
static inline float bst_exp(float x) {
    float clamped = x < -87.33655f ? -87.33655f : x;
    clamped = clamped > 88.72284f ? 88.72284f : clamped;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    float shifted = clamped * 1.44269504f + magic;
    float p = bst_exp_over_power(clamped, shifted - magic);
    /* 2^k in two factors, as k may be 128. */
    uint32_t exponent = bst_bits(shifted) - bst_bits(magic);
    int32_t half = (int32_t)exponent >> 1, rest = (int32_t)exponent - half;
    float result = p * bst_from_bits((uint32_t)(half + 127) << 23) * bst_from_bits((uint32_t)(rest + 127) << 23);
    result = x > 88.72284f ? INFINITY : result;
    return x < -87.33655f ? 0.0f : result;
}

#endif
