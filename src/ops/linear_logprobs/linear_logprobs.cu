/* linear_logprobs.cu - log-probabilities of rows of logits with what else trainers ask for, and the gradient of these.
 *
 * Macros: VOCAB; TYPE (code of dtype.h); VEC elements of an access; SOFTCAP: in use; NEGATIVE: logit_scale < 0;
 * FORWARD and JOIN: ENTROPY, SQUARES, MEAN, TOP1: wanted; BACKWARD: ENTROPY: it has a gradient.
 *
 * One block a row, which begins at a vector; what is behind its last whole vector is read element by element.
 * FORWARD   Bytes: the logits, once.
 * JOIN      adds up what linear_logprobs_tiles left of rows. Bytes: 2 to 5 numbers for 256 logits, once.
 * BACKWARD  writes the logits' gradient in their place. Bytes: one read and one write per logit.
 * Rows to be ignored are not read. No atomics; all sums have a fixed order. */
#include "pack.cuh"

#include "cross_entropy_args.h"

#include "linear_logprobs_args.h"

#define THREADS    LINEAR_LOGPROBS_THREADS
#define BATCH      LINEAR_LOGPROBS_BATCH
#define HAS_WEIGHT 0
#define SMOOTH     0
#define Z_LOSS     0
#define MODE       LOSS
#include "cross_entropy_row.cuh"

#define VECTORS (VOCAB / VEC)

/* Below, in either unit, e^x is 0 and x e^x too, which for -inf would be NaN. */
#define LOWEST_POWER (-1e4f)

/* The single element of this thread behind the last whole vector, or -1. */
BST_DEVICE int behind(void) {
    int column = VECTORS * VEC + (int)bst_thread();
    return column < VOCAB ? column : -1;
}

#ifndef BACKWARD
/* Of e = exp(z - reference) and d = z - reference, without the target's: the sums of e, e d and e^2; of all the sum of
 * u, and 1 where another logit is larger than the target's, or as large and before it. */
typedef struct sums {
    float reference, others, products, squares, logits, beaten;
} sums;

BST_DEVICE void move_sums(sums *s, float reference) {
    float step = bst_max(s->reference - reference, LOWEST_POWER), factor = far_power(step);
    if (ENTROPY) s->products = factor * bst_fma(step, s->others, s->products);
    if (SQUARES) s->squares *= factor * factor;
    s->others *= factor;
    s->reference = reference;
}

/* `own`: the target's logit. */
BST_DEVICE void compare(sums *s, const float *x, int n, int column, int target, float own) {
    float top = top_of(-BST_INFINITY, x, n), mine = NEGATIVE ? -own : own;
    if (top > mine) s->beaten = 1.0f;
    if (top != mine || column >= target) return;
    BST_EACH(j, n)
        if (x[j] == own && column + j < target) s->beaten = 1.0f;
}

BST_DEVICE void add_logits(const cross_entropy_rows_args *a, sums *s, const float *x, int n, int column, int target) {
    BST_EACH(j, n) {
        float u = shaped(a, x[j]), above = above_reference(a, u, s->reference), e = far_power(above);
        if (column + j == target) e = 0.0f;
        s->others += e;
        if (ENTROPY) s->products = bst_fma(e, bst_max(above, LOWEST_POWER), s->products);
        if (SQUARES) s->squares = bst_fma(e, e, s->squares);
        if (MEAN) s->logits += u;
    }
}

BST_DEVICE sums thread_sums(const cross_entropy_rows_args *a, const void *row, int target, float own) {
    sums s = {LOWEST, 0, 0, 0, 0, 0};
    for (int first = (int)bst_thread(); first < VECTORS; first += BATCH * THREADS) {
        bst_raw raw[BATCH];
        float x[VEC], top = -BST_INFINITY;
        BST_EACH(i, BATCH)
            if (first + i * THREADS < VECTORS)
                raw[i] = bst_raw_once(row, (int64_t)(first + i * THREADS) * VEC, TYPE, VEC);
        BST_EACH(i, BATCH) {
            if (first + i * THREADS >= VECTORS) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            top = top_of(top, x, VEC);
            if (TOP1) compare(&s, x, VEC, (first + i * THREADS) * VEC, target, own);
        }
        move_sums(&s, bst_max(s.reference, shaped(a, NEGATIVE ? -top : top) * a->base2));
        BST_EACH(i, BATCH) {
            if (first + i * THREADS >= VECTORS) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            add_logits(a, &s, x, VEC, (first + i * THREADS) * VEC, target);
        }
    }
    int single = behind();
    if (single >= 0) {
        float x;
        bst_load(&x, row, single, TYPE, 1);
        if (TOP1) compare(&s, &x, 1, single, target, own);
        move_sums(&s, bst_max(s.reference, shaped(a, x) * a->base2));
        add_logits(a, &s, &x, 1, single, target);
    }
    return s;
}

BST_DEVICE sums warp_sums(sums s) {
    move_sums(&s, bst_warp_reduce(s.reference, 32, true));
    s.others = bst_warp_reduce(s.others, 32, false);
    if (ENTROPY) s.products = bst_warp_reduce(s.products, 32, false);
    if (SQUARES) s.squares = bst_warp_reduce(s.squares, 32, false);
    if (MEAN) s.logits = bst_warp_reduce(s.logits, 32, false);
    if (TOP1) s.beaten = bst_warp_reduce(s.beaten, 32, true);
    return s;
}

BST_DEVICE sums block_sums(sums s, sums *scratch) {
    sums none = {LOWEST, 0, 0, 0, 0, 0};
    int lane = (int)bst_lane();
    s = warp_sums(s);
    if (lane == 0) scratch[bst_thread() / 32] = s;
    bst_sync();
    return warp_sums(lane < THREADS / 32 ? scratch[lane] : none);
}

BST_DEVICE void put(float *to, int64_t row, float value) {
    if (to) to[row] = value;
}

/* What the sums of a row say, by one thread. `x`: the target's logit; counts: neither ignored nor out of range. */
BST_DEVICE void tell_row(const linear_logprobs_args *a, int64_t row, bool counts, sums s, float x) {
    const cross_entropy_rows_args *c = &a->row;
    float unit = TYPE == BST_F32_CODE ? 1.0f : BST_LN2, mean = 0.0f, entropy = 0.0f, squares = 0.0f, lse = 0.0f;
    row_facts f = {0, 0, 0, 0, 0, 0};
    if (counts) {
        f = facts_of(c, s.reference, s.others, x, true);
        lse = bst_fma(s.reference, unit, f.log_total);
        mean = s.logits * c->natural * (1.0f / VOCAB);
        entropy = f.log_total - bst_divide(bst_fma(f.own, bst_max(f.above, LOWEST_POWER), s.products) * unit, f.total);
        squares = log_of(bst_fma(f.own, f.own, s.squares)) - 2.0f * f.log_total;
    } else {
        f.log_p = c->target[row] == c->ignore_index ? 0.0f : BST_NAN;
    }
    put(a->log_probs, row, f.log_p);
    put(a->lse, row, lse);
    if (ENTROPY) put(a->entropy, row, entropy);
    if (SQUARES) put(a->log_sum_sq_probs, row, squares);
    if (MEAN) put(a->mean_logits, row, mean);
    if (TOP1) a->is_top1[row] = s.beaten == 0.0f;
    put(c->lse_pairs, 2 * row, s.reference);
    put(c->lse_pairs, 2 * row + 1, s.others);
}

/* Of a row that does not count. */
BST_DEVICE sums no_sums(void) {
    sums s = {0.0f, 1.0f, 0, 0, 0, 1.0f};
    return s;
}
#endif

#ifdef FORWARD
BST_KERNEL(linear_logprobs_forward, linear_logprobs_args, THREADS, 2) {
    BST_SHARED(sums, scratch, THREADS / 32);
    bst_wait_for_previous();
    const cross_entropy_rows_args *c = &a.row;
    int64_t row = bst_block(), target = c->target[row];
    const void *logits = bst_at(c->logits, bst_row_start(&c->logits_map, row, 1), TYPE);
    bool counts = in_vocabulary(c, target);
    float x = 0.0f;
    sums s = no_sums();
    if (counts) {
        bst_load(&x, logits, target, TYPE, 1);
        s = block_sums(thread_sums(c, logits, (int)target, x), scratch);
    }
    if (bst_thread() == 0) tell_row(&a, row, counts, s, x);
}
#endif

#ifdef JOIN
#define CLASSES BST_TILE_COLUMNS
#define SLICES  LINEAR_LOGPROBS_SLICES

BST_DEVICE void join(sums *s, sums with) {
    float reference = bst_max(s->reference, with.reference);
    move_sums(s, reference);
    move_sums(&with, reference);
    s->others += with.others;
    s->products += with.products;
    s->squares += with.squares;
    s->logits += with.logits;
    s->beaten = bst_max(s->beaten, with.beaten);
}

/* What linear_logprobs_tiles left of a row in one of its tiles. `own`: the target's logit. */
BST_DEVICE sums tile_sums(const linear_logprobs_tiles_args *a, int64_t row, int tile, int target, float own) {
    int64_t plane = (int64_t)a->tiles.columns * a->stride;
    const float *from = a->sums + (int64_t)tile * a->stride + row;
    sums s = {0, 0, 0, 0, 0, 0};
    float top = *from;
    s.reference = bst_max(LOWEST, top * a->all.row.base2);
    s.others = *(from += plane);
    if (ENTROPY) s.products = *(from += plane);
    if (SQUARES) s.squares = *(from += plane);
    if (MEAN) s.logits = *(from += plane);
    bool before = (tile + 1) * CLASSES <= target;
    if (TOP1 && target / CLASSES == tile) before = a->targets[a->stride + row] == own;
    if (TOP1 && (top > own || (before && top == own))) s.beaten = 1.0f;
    return s;
}

/* A block has 32 rows, and each of its warps a slice of their tiles. */
BST_KERNEL(linear_logprobs_join, linear_logprobs_tiles_args, THREADS, 2) {
    BST_SHARED(sums, slices, THREADS);
    bst_wait_for_previous();
    const cross_entropy_rows_args *c = &a.all.row;
    int64_t row = (int64_t)bst_block() * 32 + bst_lane(), target = row < a.rows ? c->target[row] : -1;
    int slice = (int)bst_thread() / 32;
    bool counts = row < a.rows && in_vocabulary(c, target);
    float x = counts ? a.targets[row] : 0.0f;
    sums s = {LOWEST, 0, 0, 0, 0, 0};
    for (int tile = slice; counts && tile < a.tiles.columns; tile += SLICES)
        join(&s, tile_sums(&a, row, tile, (int)target, x));
    slices[bst_thread()] = s;
    bst_sync();
    if (slice || row >= a.rows) return;
    for (int i = 1; i < SLICES; i++) join(&s, slices[32 * i + bst_lane()]);
    tell_row(&a.all, row, counts, counts ? s : no_sums(), x);
}
#endif

#ifdef BACKWARD
/* dz = p (A + B d), from d log p_t / dz = [t] - p, d H / dz = -p (log p + H) and d lse / dz = p, with p = e / total and
 * log p = d - log(total). `share` and `slant` are A and B over the total, times the slope. */
typedef struct terms {
    float reference, share, slant, at_target;
} terms;

BST_DEVICE terms backward_terms(const linear_logprobs_args *a, int64_t row, float x) {
    const cross_entropy_rows_args *c = &a->row;
    row_facts f = facts_of(c, c->lse_pairs[2 * row], c->lse_pairs[2 * row + 1], x, true);
    float unit = TYPE == BST_F32_CODE ? 1.0f : BST_LN2;
    float by_log_p = a->grad_log_probs ? a->grad_log_probs[row] : a->without;
    float by_lse = a->grad_lse ? a->grad_lse[row] : 0.0f;
    float by_entropy = ENTROPY ? a->grad_entropy[row] : 0.0f, entropy = ENTROPY ? a->entropy_was[row] : 0.0f;
    float slope = bst_divide(c->slope, f.total), at_target = by_lse, all = by_lse - by_log_p;
    if (ENTROPY) all -= by_entropy * (entropy - f.log_total);
    if (ENTROPY) at_target -= by_entropy * (bst_max(f.log_p, LOWEST_POWER) + entropy);
    terms t = {f.reference, slope * all, 0.0f, slope * bst_fma(by_log_p, f.others, f.own * at_target)};
    if (ENTROPY) t.slant = -slope * by_entropy * unit;
    return t;
}

BST_DEVICE void logits_gradient(const cross_entropy_rows_args *a, const terms *t, float *x, int n, int column,
                                int target) {
    float u[VEC];
    BST_EACH(j, n) {
        u[j] = shaped(a, x[j]);
        float above = above_reference(a, u[j], t->reference), e = far_power(above);
        x[j] = e * (ENTROPY ? bst_fma(t->slant, bst_max(above, LOWEST_POWER), t->share) : t->share);
    }
    finish(x, u, n, column, target, t->at_target);
}

BST_KERNEL(linear_logprobs_backward, linear_logprobs_args, THREADS, 2) {
    bst_wait_for_previous();
    const cross_entropy_rows_args *c = &a.row;
    int64_t row = bst_block(), target = c->target[row];
    void *logits = bst_at_out(c->dlogits, bst_row_start(&c->logits_map, row, 1), TYPE);
    bool counts = in_vocabulary(c, target);
    int at = counts ? (int)target : -1;
    float hit = 0.0f, x[VEC];
    terms t = {0, 0, 0, 0};
    if (counts) {
        bst_load(&hit, logits, target, TYPE, 1);
        t = backward_terms(&a, row, hit);
    }
    bst_sync(); /* every thread has the target's logit, which one of them will overwrite */
    for (int first = (int)bst_thread(); first < VECTORS; first += BATCH * THREADS) {
        bst_raw raw[BATCH];
        BST_EACH(i, BATCH)
            if (counts && first + i * THREADS < VECTORS)
                raw[i] = bst_raw_at(logits, (int64_t)(first + i * THREADS) * VEC, TYPE, VEC);
        BST_EACH(i, BATCH) {
            int column = (first + i * THREADS) * VEC;
            if (first + i * THREADS >= VECTORS) continue;
            BST_EACH(j, VEC) x[j] = 0.0f;
            if (counts) {
                bst_unpack(x, raw[i], TYPE, VEC);
                logits_gradient(c, &t, x, VEC, column, at);
            }
            bst_store_once(logits, column, x, TYPE, VEC);
        }
    }
    int single = behind();
    if (single < 0) return;
    x[0] = 0.0f;
    if (counts) {
        bst_load(x, logits, single, TYPE, 1);
        logits_gradient(c, &t, x, 1, single, at);
    }
    bst_store(logits, single, x, TYPE, 1);
}
#endif
