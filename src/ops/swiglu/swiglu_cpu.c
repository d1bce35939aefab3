/* swiglu_cpu.c - SwiGLU on CPU: one loop per element type, from memory to memory, in float32. */
#include "ops/swiglu/swiglu_cpu.h"

/* The elements from e on that lie in one row. */
static int64_t run_length(const swiglu_cpu *a, int64_t e, int64_t end) {
    int64_t columns = a->gate.rows.columns, left = columns - e % columns;
    return left < end - e ? left : end - e;
}

static void *element(const swiglu_cpu *a, const swiglu_matrix *m, int64_t e) {
    if (!m->data) return NULL;
    int64_t columns = m->rows.columns;
    return bst_at(m->data, bst__row_start(&m->rows, e / columns) + e % columns, a->dtype);
}

/* `dtype` is a constant in what follows: each branch folds away. Types of 16 bits travel two to a word, so that all
 * vectors in a loop have as many lanes: the compiler then needs no shuffles. */
static inline float low_half(uint32_t word, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_float_from_bits(word << 16) : bst_from_f16((uint16_t)word);
}

static inline float high_half(uint32_t word, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_float_from_bits(word & 0xffff0000u) : bst_from_f16((uint16_t)(word >> 16));
}

static inline uint32_t half_of(float value, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_to_bf16(value) : bst_to_f16(value);
}

static inline uint32_t word_at(const void *from, int64_t i) {
    uint32_t word;
    memcpy(&word, (const char *)from + 4 * i, sizeof word);
    return word;
}

static inline void put_word(void *to, int64_t i, uint32_t word) { memcpy((char *)to + 4 * i, &word, sizeof word); }

static inline void put_float(void *to, int64_t i, float value) { put_word(to, i, bst_bits_from_float(value)); }

/* 1 + exp(-x), where 1 hides what exp is short of near zero. exp(v) = 2^k p(f), k the integer nearest to v log2(e): for
 * float32 p is that of bst_exp; for types of 16 bits a polynomial of degree 4 in v log2(e) - k, wrong by at most
 * 2.6e-6, 1/90 of their rounding. For NaN any number: what it is used with is NaN too. */
static inline float one_plus_exp_minus(float x, bst_dtype dtype) {
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

static inline float forward_one(float g, float u, bst_dtype dtype) { return u * (g / one_plus_exp_minus(g, dtype)); }

typedef struct gradients {
    float dgate, dup;
} gradients;

/* With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)). */
static inline gradients backward_one(float dy, float g, float u, bst_dtype dtype) {
    float d = one_plus_exp_minus(g, dtype), s = 1.0f / d, ds = dy * s;
    return (gradients){u * (ds * (1.0f + g * (1.0f - s))), g * ds};
}

/* The same for float32, where each rounding shows: near its zero 1 + gate (1 - s) must not be of a rounded product, and
 * gate s is one quotient, so that it does not become subnormal, as dy s may, where it need not. */
static inline gradients backward_one_f32(float dy, float g, float u) {
    float d = one_plus_exp_minus(g, BST_F32), s = 1.0f / d;
    return (gradients){dy * u * s * bst_multiply_add(g, 1.0f - s, 1.0f), dy * (g / d)};
}

/* In these loops an output may be an input: each iteration reads its elements before it writes there. */
static inline void forward_run(const void *gate, const void *up, void *y, int64_t n, bst_dtype dtype) {
    if (dtype == BST_F32) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            put_float(y, i,
                      forward_one(bst_float_from_bits(word_at(gate, i)), bst_float_from_bits(word_at(up, i)), dtype));
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t g = word_at(gate, i), u = word_at(up, i);
        put_word(y, i,
                 half_of(forward_one(low_half(g, dtype), low_half(u, dtype), dtype), dtype) |
                     half_of(forward_one(high_half(g, dtype), high_half(u, dtype), dtype), dtype) << 16);
    }
    if (n % 2) {
        float g, u, last;
        bst_load(&g, bst_at(gate, n - 1, dtype), dtype, 1);
        bst_load(&u, bst_at(up, n - 1, dtype), dtype, 1);
        last = forward_one(g, u, dtype);
        bst_store(bst_at(y, n - 1, dtype), &last, dtype, 1);
    }
}

/* A part of one row. */
typedef struct backward_part {
    const void *dy, *gate, *up;
    void *dgate, *dup, *y; /* NULL: not wanted */
    int64_t n;
} backward_part;

/* want_gate, want_up, want_y: constants too. */
static inline void backward_run(const backward_part *part, bst_dtype dtype, bool want_gate, bool want_up, bool want_y) {
    const void *dy = part->dy, *gate = part->gate, *up = part->up;
    void *dgate = part->dgate, *dup = part->dup, *y = part->y;
    const int64_t n = part->n;
    if (dtype == BST_F32) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float g = bst_float_from_bits(word_at(gate, i)), u = bst_float_from_bits(word_at(up, i));
            gradients d = backward_one_f32(bst_float_from_bits(word_at(dy, i)), g, u);
            if (want_gate) put_float(dgate, i, d.dgate);
            if (want_up) put_float(dup, i, d.dup);
            if (want_y) put_float(y, i, forward_one(g, u, dtype));
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t d = word_at(dy, i), g = word_at(gate, i), u = word_at(up, i);
        gradients low = backward_one(low_half(d, dtype), low_half(g, dtype), low_half(u, dtype), dtype);
        gradients high = backward_one(high_half(d, dtype), high_half(g, dtype), high_half(u, dtype), dtype);
        if (want_gate) put_word(dgate, i, half_of(low.dgate, dtype) | half_of(high.dgate, dtype) << 16);
        if (want_up) put_word(dup, i, half_of(low.dup, dtype) | half_of(high.dup, dtype) << 16);
        if (want_y)
            put_word(y, i,
                     half_of(forward_one(low_half(g, dtype), low_half(u, dtype), dtype), dtype) |
                         half_of(forward_one(high_half(g, dtype), high_half(u, dtype), dtype), dtype) << 16);
    }
    if (n % 2) {
        float d, g, u;
        bst_load(&d, bst_at(dy, n - 1, dtype), dtype, 1);
        bst_load(&g, bst_at(gate, n - 1, dtype), dtype, 1);
        bst_load(&u, bst_at(up, n - 1, dtype), dtype, 1);
        gradients last = backward_one(d, g, u, dtype);
        if (want_gate) bst_store(bst_at(dgate, n - 1, dtype), &last.dgate, dtype, 1);
        if (want_up) bst_store(bst_at(dup, n - 1, dtype), &last.dup, dtype, 1);
        if (want_y) {
            float value = forward_one(g, u, dtype);
            bst_store(bst_at(y, n - 1, dtype), &value, dtype, 1);
        }
    }
}

static inline void backward_wanted(const backward_part *part, bst_dtype dtype) {
    switch ((part->dgate != NULL) | (part->dup != NULL) << 1 | (part->y != NULL) << 2) {
        case 1:
            return backward_run(part, dtype, true, false, false);
        case 2:
            return backward_run(part, dtype, false, true, false);
        case 3:
            return backward_run(part, dtype, true, true, false);
        case 4:
            return backward_run(part, dtype, false, false, true);
        case 5:
            return backward_run(part, dtype, true, false, true);
        case 6:
            return backward_run(part, dtype, false, true, true);
        case 7:
            return backward_run(part, dtype, true, true, true);
    }
}

void BST_CPU(bst__swiglu_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const swiglu_cpu *a = context;
    for (int64_t e = begin, n; e < end; e += n) {
        n = run_length(a, e, end);
        const void *gate = element(a, &a->gate, e), *up = element(a, &a->up, e);
        void *y = element(a, &a->y, e);
        if (a->dtype == BST_F32) forward_run(gate, up, y, n, BST_F32);
        if (a->dtype == BST_BF16) forward_run(gate, up, y, n, BST_BF16);
        if (a->dtype == BST_F16) forward_run(gate, up, y, n, BST_F16);
    }
}

void BST_CPU(bst__swiglu_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const swiglu_cpu *a = context;
    for (int64_t e = begin, n; e < end; e += n) {
        n = run_length(a, e, end);
        backward_part part = {.dy = element(a, &a->dy, e),
                              .gate = element(a, &a->gate, e),
                              .up = element(a, &a->up, e),
                              .dgate = element(a, &a->dgate, e),
                              .dup = element(a, &a->dup, e),
                              .y = element(a, &a->y, e),
                              .n = n};
        if (a->dtype == BST_F32) backward_wanted(&part, BST_F32);
        if (a->dtype == BST_BF16) backward_wanted(&part, BST_BF16);
        if (a->dtype == BST_F16) backward_wanted(&part, BST_F16);
    }
}
