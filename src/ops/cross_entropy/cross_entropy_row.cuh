/* cross_entropy_row.cuh - the arithmetic of one row of logits, for the kernels that hold it in their different ways.
 *
 * Macros: those of the kernel that includes this; EACH and STEP where it holds its row. Exponentials are powers of two
 * relative to a running reference, so that the plain case costs one multiply-add and one exponential per logit. All
 * sums have a fixed order. */
#ifndef BST_CROSS_ENTROPY_ROW_CUH
#define BST_CROSS_ENTROPY_ROW_CUH

#include "pack.cuh"
#include "reduce.cuh"

#include "cross_entropy_args.h"
#include "logarithm.h"

#define LOSS              BST_CROSS_ENTROPY_LOSS
#define LOSS_AND_GRADIENT BST_CROSS_ENTROPY_LOSS_AND_GRADIENT
#define GRADIENT          BST_CROSS_ENTROPY_GRADIENT
#define SIZE              (TYPE == BST_F32_CODE ? 4 : 2)
#define LOWEST            (-3.402823466e38f)

/* ---- one logit --------------------------------------------------------------------------------------------------- */

/* z = u * natural. For 16-bit logits tanh needs no more than an absolute error of 2^-22. */
BST_DEVICE float shaped(const cross_entropy_rows_args *a, float x) {
    if (!SOFTCAP) return x;
    if (TYPE == BST_F32_CODE) return bst_tanh(x * a->inner);
    return 1.0f - 2.0f * bst_reciprocal(1.0f + bst_exp2(x * a->inner * (2.0f * BST_LOG2_E)));
}

/* References are in z's own units for float32, whose difference to z is then as exact as a subtraction, and in powers
 * of two for the 16-bit types, which saves an instruction a logit. */
BST_DEVICE float above_reference(const cross_entropy_rows_args *a, float u, float reference) {
    return bst_fma(u, a->base2, -reference);
}

/* e^z / e^reference of what is above the reference. */
BST_DEVICE float power(float above) { return bst_exp2(TYPE == BST_F32_CODE ? above * BST_LOG2_E : above); }

/* The same of a number far from 0: for float32 with what the product with log2(e) rounds away, at 60 3e-6 of it. */
BST_DEVICE float far_power(float above) {
    if (TYPE != BST_F32_CODE) return power(above);
    float finite = bst_max(above, -200.0f), e = power(above);
    float rest = bst_fma(finite, BST_LOG2_E_REST, bst_fma(finite, BST_LOG2_E, -(finite * BST_LOG2_E)));
    return bst_fma(e * BST_LN2, rest, e);
}

/* Whether the target's logit is -inf in the row that sums are made of: so it is left out of them and of their reference
 * without being looked for, and they are exact however far it is. Else sums look for it. */
#define PATCHED (!SMOOTH && !SOFTCAP && !NEGATIVE)

/* Sums relative to a reference: others = sum of e^z / e^reference of all but the target, beside which a confident row
 * would lose them. */
typedef struct partial {
    float reference, others;
    /* For label smoothing, the sum of w, the class weight or one, and of w times what the exponentials are of. Relative
     * to the reference, as these are: a sum of the logits themselves would lose what is small beside them. */
    float weights, weighted;
} partial;

BST_DEVICE partial nothing(void) {
    partial p = {LOWEST, 0, 0, 0};
    return p;
}

BST_DEVICE float top_of(float top, const float *x, int n) {
    BST_EACH(j, n) top = bst_max(top, NEGATIVE ? -x[j] : x[j]);
    return top;
}

/* Sums relative to another reference. Of nothing, whose own is LOWEST, they stay 0. */
BST_DEVICE void move_to(partial *p, float reference) {
    float step = p->reference - reference;
    p->others *= far_power(step);
    if (SMOOTH) p->weighted = bst_fma(p->weights, bst_max(step, LOWEST), p->weighted);
    p->reference = reference;
}

/* Makes room for logits up to `top`. Stays finite for rows of -inf, so that exp(-inf) is 0. */
BST_DEVICE void raise_to(const cross_entropy_rows_args *a, partial *p, float top) {
    float reference = bst_max(p->reference, shaped(a, NEGATIVE ? -top : top) * a->base2);
    move_to(p, reference);
}

BST_DEVICE float weight_of(const cross_entropy_rows_args *a, int column) {
    return HAS_WEIGHT ? a->class_weight[column] : 1.0f;
}

BST_DEVICE void add(const cross_entropy_rows_args *a, partial *p, const float *x, int n, int column, int target) {
    BST_EACH(j, n) {
        float above = above_reference(a, shaped(a, x[j]), p->reference), e = PATCHED ? power(above) : far_power(above);
        p->others += !PATCHED && column + j == target ? 0.0f : e;
        if (!SMOOTH) continue;
        float w = weight_of(a, column + j);
        p->weights += w;
        /* In powers of two the lowest bfloat16 is out of range, and a class that weighs nothing may have it. */
        p->weighted = bst_fma(w, HAS_WEIGHT ? bst_max(above, LOWEST) : above, p->weighted);
    }
}

/* The total of `lanes` lanes, in each of them. */
BST_DEVICE partial warp_total(partial p, int lanes) {
    move_to(&p, bst_warp_reduce(p.reference, lanes, true));
    p.others = bst_warp_reduce(p.others, lanes, false);
    if (SMOOTH) p.weights = bst_warp_reduce(p.weights, lanes, false);
    if (SMOOTH) p.weighted = bst_warp_reduce(p.weighted, lanes, false);
    return p;
}

/* Partials in shared memory, `n` of them: PARTIAL arrays. */
#define PARTIAL BST_CROSS_ENTROPY_PARTIALS(SMOOTH)
BST_DEVICE partial shared_total(const float *from, int n) {
    partial p = nothing();
    int lane = (int)bst_lane();
    if (lane < n) {
        p.reference = from[lane];
        p.others = from[n + lane];
        p.weights = SMOOTH ? from[2 * n + lane] : 0.0f;
        p.weighted = SMOOTH ? from[3 * n + lane] : 0.0f;
    }
    return warp_total(p, 32);
}

/* The block's total, in every thread. `scratch`: PARTIAL numbers a warp. */
BST_DEVICE partial block_total(partial p, float *scratch) {
    p = warp_total(p, 32);
    int warp = (int)bst_thread() / 32;
    if (bst_lane() == 0) {
        scratch[warp] = p.reference;
        scratch[THREADS / 32 + warp] = p.others;
        if (SMOOTH) scratch[2 * (THREADS / 32) + warp] = p.weights;
        if (SMOOTH) scratch[3 * (THREADS / 32) + warp] = p.weighted;
    }
    bst_sync();
    return shared_total(scratch, THREADS / 32);
}

/* ---- one row ----------------------------------------------------------------------------------------------------- */

/* The natural logarithm, to a unit in the last place at every size: the hardware's is good to 2^-22, which shows in
 * small losses. */
BST_DEVICE float log_of(float v) { return v > 0.0f && v < BST_INFINITY ? bst_log_of_normal(v) : bst_log2(v); }

/* log(1 + v), for v from 0 to 1, however small. */
BST_DEVICE float log_above_one(float v) {
    return v < 0.4142f ? bst_twice_atanh(bst_divide(v, 2.0f + v)) : log_of(1.0f + v);
}

/* What the sums of a row say, relative to a reference. */
typedef struct row_facts {
    float reference, above, own, others, total; /* above, own: of the target, what it is above the reference and its
                                                   exponential; total: own and others */
    float log_total, log_p;                     /* natural logarithms; log_p: of the target's probability */
} row_facts;

/* `x`: the target's logit. Where `told` is not set, the logarithms are not made. */
BST_DEVICE row_facts facts_of(const cross_entropy_rows_args *a, float reference, float others, float x, bool told) {
    float u = shaped(a, x), mine = u * a->base2;
    row_facts f = {reference, 0, 0, others, 0, 0, 0};
    /* The others' reference is left where the target's exponential would overflow. */
    if (PATCHED && mine > reference + (TYPE == BST_F32_CODE ? 80.0f : 100.0f)) {
        f.others *= far_power(reference - mine);
        f.reference = mine;
    }
    f.above = above_reference(a, u, f.reference);
    f.own = far_power(f.above);
    f.total = f.others + f.own;
    if (!told) return f;
    /* References, and what is relative to them, in z's own units are multiplied by one, in powers of two by ln 2. */
    float unit = TYPE == BST_F32_CODE ? 1.0f : BST_LN2;
    bool confident = f.others < f.own;
    float less = confident ? log_above_one(bst_divide(f.others, f.own)) : 0.0f;
    f.log_total = confident ? bst_fma(f.above, unit, less) : log_of(f.total);
    f.log_p = confident ? -less : bst_fma(f.above, unit, -f.log_total);
    return f;
}

/* What a row's loss and gradient need besides its logits. */
typedef struct row_terms {
    float reference; /* p = power / total */
    float share;     /* of the softmax, over the total */
    float at_target; /* the target's gradient, but for the softcap's slope */
    float smooth;    /* of every class weight */
    float lse, loss;
    float others; /* relative to the reference */
} row_terms;

BST_DEVICE bst_cross_entropy_divisors divisors_of(const cross_entropy_rows_args *a) {
    bst_cross_entropy_divisors none = {1.0f, 1.0f, VOCAB, 0.0f};
    return a->divisors ? *a->divisors : none;
}

/* `x`: the target's logit. told: whether this thread tells of the loss or of the target; else loss, lse and at_target
 * are not made: all threads have these terms, and few need more than the share. */
BST_DEVICE row_terms terms_of(const cross_entropy_rows_args *a, const bst_cross_entropy_divisors *divide, int64_t row,
                              int target, partial sums, float x, bool told) {
    float upstream = a->upstream ? a->upstream[row * a->upstream_stride] : 1.0f;
    float weight = weight_of(a, target) * (SMOOTH ? 1.0f - a->smoothing : 1.0f);
    float each = SMOOTH ? a->smoothing / VOCAB : 0.0f, unit = TYPE == BST_F32_CODE ? 1.0f : BST_LN2;
    row_facts f = facts_of(a, sums.reference, sums.others, x, told || Z_LOSS);
    row_terms t;
    t.reference = f.reference;
    t.others = f.others;
    t.lse = bst_fma(f.reference, unit, f.log_total);
    /* Undivided gradients are left to whoever multiplies them by divisors->gradient; the z-loss has another divisor. */
    float by_weight = a->undivided ? 1.0f : divide->inverse_weight_sum, by_count = by_weight;
    if (HAS_WEIGHT)
        by_count = a->undivided ? bst_divide(divide->inverse_count, divide->inverse_weight_sum) : divide->inverse_count;
    float scale = upstream * by_weight * a->slope, hit = scale * weight, more = 0.0f;
    t.smooth = scale * each;
    if (SMOOTH) more = t.smooth * divide->class_weight_sum;
    if (Z_LOSS) more += upstream * by_count * a->slope * 2.0f * a->lse_square_scale * t.lse;
    t.share = bst_divide(hit + more, f.total);
    t.loss = t.at_target = 0.0f;
    if (!told) return t;
    /* hit (p - 1) + more p: what a confident target lacks of 1 is what the others have; else one rounding is enough. */
    if (f.others < f.own)
        t.at_target = bst_divide(bst_fma(more, f.own, -(hit * f.others)), f.total);
    else
        t.at_target = bst_fma(hit + more, bst_divide(f.own, f.total), -hit);
    if (SMOOTH) t.at_target = bst_fma(-t.smooth, weight_of(a, target), t.at_target);
    t.loss = weight * -f.log_p;
    if (SMOOTH) t.loss += each * bst_fma(-sums.weighted, unit, divide->class_weight_sum * f.log_total);
    t.loss *= divide->inverse_weight_sum;
    if (Z_LOSS) t.loss += divide->inverse_count * a->lse_square_scale * t.lse * t.lse;
    return t;
}

/* Puts the target's gradient in its place, and multiplies all with the softcap's slope at u. */
BST_DEVICE void finish(float *x, const float *u, int n, int column, int target, float at_target) {
    if ((unsigned)(target - column) < (unsigned)n) {
        BST_EACH(j, n)
            if (column + j == target) x[j] = at_target;
    }
    BST_EACH(j, SOFTCAP ? n : 0) x[j] *= (1.0f - u[j]) * (1.0f + u[j]);
}

/* Logits become their gradients. */
BST_DEVICE void differentiate(const cross_entropy_rows_args *a, const row_terms *t, float *x, int n, int column,
                              int target) {
    float u[VEC];
    BST_EACH(j, n) {
        u[j] = shaped(a, x[j]);
        float above = above_reference(a, u[j], t->reference);
        x[j] = t->share * (PATCHED ? power(above) : far_power(above));
        if (SMOOTH) x[j] = bst_fma(-t->smooth, weight_of(a, column + j), x[j]);
    }
    finish(x, u, n, column, target, t->at_target);
}

BST_DEVICE bool in_vocabulary(const cross_entropy_rows_args *a, int64_t target) {
    return target != a->ignore_index && target >= 0 && target < VOCAB;
}

BST_DEVICE void store_lse(const cross_entropy_rows_args *a, int64_t row, const row_terms *t) {
    if (a->lse) a->lse[row] = t->lse;
    if (!a->lse_pairs) return;
    a->lse_pairs[2 * row] = t->reference;
    a->lse_pairs[2 * row + 1] = t->others;
}

/* The loss of a row that is not read. */
BST_DEVICE void skip(const cross_entropy_rows_args *a, int64_t row, int64_t target) {
    row_terms none = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f};
    if (MODE == GRADIENT) return;
    if (a->loss_rows) a->loss_rows[row] = target == a->ignore_index ? 0.0f : BST_NAN;
    store_lse(a, row, &none);
}

#ifdef EACH
/* ---- a row that is held in registers --------------------------------------------------------------------------------
 *
 * A thread has the EACH vectors `first`, `first` + STEP, ... below `count` of a piece of the row. */

/* For 16-bit logits without options that look at each logit twice, what stays in registers is not the logits but their
 * exponentials relative to the thread's own maximum, in float16 with 2^15 for one: 12 bits, four more than the gradient
 * keeps, down to 2e-9 of the maximum. The gradient is then one multiplication. The target's own is made from its
 * logit. */
#define COMPACT (TYPE != BST_F32_CODE && PATCHED)
#define ONE     15.0f

typedef struct registers {
    bst_raw raw[EACH];
    float own; /* COMPACT: what the exponentials are relative to */
} registers;

/* The largest of a thread's logits (of their negatives where NEGATIVE). */
BST_DEVICE float registers_top(const registers *h, int first, int count) {
    float x[VEC], top = -BST_INFINITY;
    if (COMPACT) {
        uint32_t pair = TYPE == BST_BF16_CODE ? 0xff80ff80u : 0xfc00fc00u; /* -inf, twice */
        BST_EACH(i, EACH) {
            if (first + i * STEP >= count) continue;
            BST_EACH(j, 4) {
                uint32_t w = h->raw[i].w[j];
                pair = TYPE == BST_BF16_CODE ? bst_max_bf16x2(pair, w) : bst_max_f16x2(pair, w);
            }
        }
        top = bst_max(bst_half_to_float(pair & 0xffffu, TYPE), bst_half_to_float(pair >> 16, TYPE));
    } else {
        BST_EACH(i, EACH) {
            if (first + i * STEP >= count) continue;
            bst_unpack(x, h->raw[i], TYPE, VEC);
            top = top_of(top, x, VEC);
        }
    }
    return top;
}

/* PATCHED: puts -inf in the place of the target's logit, in shared memory, before it is read there for the sums. */
BST_DEVICE void leave_out(void *row, int column) {
    float none = -BST_INFINITY;
    bst_store(row, column, &none, TYPE, 1);
}

/* This thread's sums. `column`: where the piece begins. */
BST_DEVICE partial registers_sums(const cross_entropy_rows_args *a, registers *h, int first, int count, int column,
                                  int target) {
    partial p = nothing();
    float x[VEC];
    raise_to(a, &p, registers_top(h, first, count));
    if (COMPACT) p.reference -= ONE;
    BST_EACH(i, EACH) {
        if (first + i * STEP >= count) continue;
        bst_unpack(x, h->raw[i], TYPE, VEC);
        if (COMPACT) {
            BST_EACH(j, VEC) {
                x[j] = power(above_reference(a, x[j], p.reference));
                p.others += x[j];
            }
            h->raw[i] = bst_pack(x, BST_F16_CODE, VEC);
        } else {
            add(a, &p, x, VEC, column + (first + i * STEP) * VEC, target);
        }
    }
    h->own = p.reference;
    return p;
}

/* What makes gradients of a thread's exponentials. */
BST_DEVICE float registers_share(const row_terms *t, const registers *h) {
    return COMPACT ? t->share * power(h->own - t->reference) : 0.0f;
}

/* Gradients of vector i, which begins at `column`, packed. PATCHED: that of the target is 0, and for its thread to put
 * there. */
BST_DEVICE bst_raw registers_gradient(const cross_entropy_rows_args *a, const row_terms *t, float share,
                                      const registers *h, int i, int column, int target) {
    float x[VEC];
    bst_unpack(x, h->raw[i], COMPACT ? BST_F16_CODE : TYPE, VEC);
    if (COMPACT) {
        BST_EACH(j, VEC) x[j] *= share;
    } else {
        differentiate(a, t, x, VEC, column, PATCHED ? -1 : target);
    }
    return bst_pack(x, TYPE, VEC);
}
#endif

#endif
