/* linear_divergence_math.h - what one class adds to a divergence, and its gradient: the same text for CPU and CUDA.
 *
 * With p the student's and q the teacher's probability of a class, and d = log q - log p,
 *
 *     forward  KL(q || p)  = sum of B(q, p)
 *     reverse  KL(p || q)  = sum of B(p, q)
 *     jsd      beta KL(q || m) + (1 - beta) KL(p || m) = sum of beta B(q, m) + (1 - beta) B(p, m)
 *                            with the mixture m = beta q + (1 - beta) p
 *
 * B(a, b) = a log(a / b) - a + b. What it has beside a log(a / b) is 0 in the sum over all classes, and makes each term
 * positive: nothing cancels, so that small divergences keep their digits, and an error of a normaliser counts only by
 * its square. With x = log(a / b) it is b (e^x (x - 1) + 1), by its series where x is small. */
#ifndef BST_LINEAR_DIVERGENCE_MATH_H
#define BST_LINEAR_DIVERGENCE_MATH_H

#ifdef BST_DEVICE
#include "logarithm.h"
#if defined(D_TYPE) && D_TYPE != BST_F32_CODE
/* For gradients of 16 bits: powers of two of numbers in these units, and the hardware's reciprocal. (Its logarithm is
 * wrong by 2^-22, which makes jsd's error larger than TRL's function has.) */
#define DIVERGENCE_UNIT       BST_LN2
#define divergence_power      bst_exp2
#define divergence_exp(x)     bst_exp2((x) * BST_LOG2_E)
#define divergence_over(a, b) ((a) * bst_reciprocal(b))
#else
#define DIVERGENCE_UNIT  1.0f
/* e^x with what the product with log2(e) rounds away. */
BST_INLINE float divergence_exp(float x) {
    float finite = x < -200.0f ? -200.0f : x, power = finite * BST_LOG2_E, e = bst_exp2(x * BST_LOG2_E);
    float rest = bst_fma(finite, BST_LOG2_E_REST, bst_fma(finite, BST_LOG2_E, -power));
    return bst_fma(e * BST_LN2, rest, e);
}
#define divergence_power divergence_exp
#define divergence_over  bst_divide
#endif
#else
#include "core/logarithm.h"
#define DIVERGENCE_UNIT  1.0f
#define divergence_exp   bst_exp
#define divergence_power bst_exp
#define divergence_over  bst_divide
#endif

/* As the options number them. */
#define DIVERGENCE_FORWARD 0
#define DIVERGENCE_REVERSE 1
#define DIVERGENCE_JSD     2

/* The z of a logit of -inf: the difference of two such is 0. */
#define DIVERGENCE_NEVER (-1e30f)
/* The logit of a class that is not among the largest that are given: whatever scale and softcap are, none. */
#define DIVERGENCE_LEFT_OUT (-3.402823466e38f)

/* What a row's sums say. */
typedef struct divergence_row {
    float top_p, log_p, over_p; /* the largest z, in DIVERGENCE_UNITs; log p = z - it - log_p; over_p = e^-log_p */
    float top_q, log_q, over_q;
    float shift;      /* d = zq - zp + shift */
    float mean;       /* reverse: the mean of zp - zq under p; jsd: of log p - log m */
    float beta, rest; /* rest = 1 - beta */
} divergence_row;

/* Sums are of e^(z - top). */
BST_INLINE divergence_row divergence_row_of(float top_p, float sum_p, float top_q, float sum_q, float mean, float beta,
                                            float rest) {
    divergence_row r;
    r.top_p = top_p, r.log_p = bst_log_of_normal(sum_p), r.over_p = bst_divide(1.0f, sum_p);
    r.top_q = top_q, r.log_q = bst_log_of_normal(sum_q), r.over_q = bst_divide(1.0f, sum_q);
    r.shift = (top_p - top_q) * DIVERGENCE_UNIT + (r.log_p - r.log_q);
    r.mean = mean, r.beta = beta, r.rest = rest;
    return r;
}

/* A class of two logits. */
typedef struct divergence_pair {
    float above_p, above_q; /* z above the row's largest, in DIVERGENCE_UNITs */
    float zp, zq;
} divergence_pair;

/* B(a, b) with x = log(a / b); `bounded`, a constant: |x| is less than 1e29. The series is fitted to |x| <= 1, relative
 * error 4e-8. */
BST_INLINE float divergence_term(float a, float b, float x, bool bounded) {
    float s = 2.18467343e-5f;
    s = bst_fma(s, x, 1.78510737e-4f);
    s = bst_fma(s, x, 1.19137882e-3f);
    s = bst_fma(s, x, 6.94147733e-3f);
    s = bst_fma(s, x, 3.33327976e-2f);
    s = bst_fma(s, x, 0.125000563f);
    s = bst_fma(s, x, 0.333333404f);
    s = bst_fma(s, x, 0.5f);
    float near = b * x * x * s, far = bst_fma(a, x, b - a);
    if (!bounded) far = x > 1e29f ? (a > 0.0f ? BST_INFINITY : b) : far; /* what b leaves out and a does not */
    return bst_abs(x) <= 1.0f ? near : far;
}

/* log(m / p) = log(1 + beta (e^d - 1)), for |d| up to 80. Where d is small, by a series of e^d - 1 that is fitted to
 * |d| <= 0.5, relative error 2e-8. */
BST_INLINE float divergence_log_mixture(const divergence_row *r, float d) {
    float s = 1.98756272e-4f;
    s = bst_fma(s, d, 1.39819971e-3f);
    s = bst_fma(s, d, 8.33345218e-3f);
    s = bst_fma(s, d, 4.16657959e-2f);
    s = bst_fma(s, d, 0.166666655f);
    s = bst_fma(s, d, 0.5f);
    float u = r->beta * bst_fma(s * d, d, d);
    float near = bst_twice_atanh(divergence_over(u, 2.0f + u));
    float far = bst_log_of_normal(bst_fma(r->beta, divergence_exp(d), r->rest));
    return bst_abs(d) <= 0.34f ? near : far;
}

/* A class: its term, what it adds to the sum that is the mean's over sum_p (jsd alone), and the divergence's derivative
 * by zp. `kind` is a constant. */
typedef struct divergence_class {
    float term, to_mean, slope;
} divergence_class;

BST_INLINE divergence_class divergence_of(int kind, const divergence_row *r, const divergence_pair *z) {
    divergence_class c = {0, 0, 0};
    float power = divergence_power(z->above_p), p = power * r->over_p, q = divergence_power(z->above_q) * r->over_q;
    float d = (z->zq - z->zp) + r->shift;
    if (kind == DIVERGENCE_FORWARD) {
        c.term = divergence_term(q, p, d, false);
        c.slope =
            bst_abs(d) <= 1.0f ? bst_fma(-q, d, c.term) : p - q; /* p - q both, the first without their digits lost */
    } else if (kind == DIVERGENCE_REVERSE) {
        c.term = divergence_term(p, q, -d, false);
        c.slope = p * ((z->zp - z->zq) - r->mean);
    } else {
        /* Beyond, p or q is no part of the mixture that float32 has. */
        d = d > 80.0f ? 80.0f : d < -80.0f ? -80.0f : d;
        float mixed = divergence_log_mixture(r, d), m = bst_fma(r->beta, q, r->rest * p);
        float of_p = divergence_term(p, m, -mixed, true);
        c.term = bst_fma(r->beta, divergence_term(q, m, d - mixed, true), r->rest * of_p);
        /* Of -mixed itself and of e^(z - top), not of of_p and p: what rounds a normaliser cancels in the slope. */
        c.to_mean = power * -mixed;
        c.slope = r->rest * p * (-mixed - r->mean);
    }
    return c;
}

#endif
