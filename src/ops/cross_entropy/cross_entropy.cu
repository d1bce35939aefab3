/* cross_entropy.cu - softmax cross-entropy of rows of logits: loss, gradient, or both at once.
 *
 * Macros: VOCAB; TYPE (code of dtype.h); VEC elements of an access; THREADS of a block; BLOCKS of a multiprocessor at
 * least; MODE (bst_cross_entropy_mode); PEEL: rows begin between vectors; FOLDED: one stride describes all rows;
 * HAS_WEIGHT, SMOOTH, SOFTCAP, Z_LOSS: options in use; NEGATIVE: logit_scale < 0; CLUSTER blocks that share a row.
 *
 * rows      one block a row. LOSS: Bytes: the logits, once. GRADIENT: the logits and dlogits, once each.
 *           LOSS_AND_GRADIENT: reads the logits twice, the second time backwards, so that the caches have most of what
 *           is left. Measured on an H200, bf16: LOSS 259 us at 4096 x 128256 (0.95 of the copy bandwidth).
 * clusters  LOSS_AND_GRADIENT on sm_90 and later. Bytes: one read and one write per logit. A cluster shares a row; each
 *           block keeps its slice packed in registers between its uses, while a bulk copy brings its slice of the
 *           cluster's next row into shared memory. Partial maxima and sums meet through distributed shared memory, one
 *           exchange a row. Measured on an H200, bf16, with divisors and reduce: 569 us at 4096 x 128256 (0.87), 665 at
 *           4096 x 151936 (0.89), 141 at 4096 x 32000 (0.88).
 * Rows to be ignored are not read. Exponentials are powers of two relative to a running reference, so that the plain case
 * costs one multiply-add and one exponential per logit. All sums have a fixed order; no atomics. */
#include "pack.cuh"
#include "reduce.cuh"

#include "cross_entropy_args.h"

#define LN2   0.693147180559945f
#define LOG2E 1.44269504088896f

#if defined(ROWS) || defined(CLUSTERS)
#define LOSS              0
#define LOSS_AND_GRADIENT 1
#define GRADIENT          2
#define SIZE              (TYPE == BST_F32_CODE ? 4 : 2)
#define LOWEST            (-3.402823466e38f)

/* ---- one logit --------------------------------------------------------------------------------------------------- */

/* z = u * natural. For 16-bit logits tanh needs no more than an absolute error of 2^-22. */
BST_DEVICE float shaped(const cross_entropy_rows_args *a, float x) {
    if (!SOFTCAP) return x;
    if (TYPE == BST_F32_CODE) return bst_tanh(x * a->inner);
    return 1.0f - 2.0f * bst_reciprocal(1.0f + bst_exp2(x * a->inner * (2.0f * LOG2E)));
}

/* References are in z's own units for float32, whose difference to z is then as exact as a subtraction, and in powers
 * of two for the 16-bit types, which saves an instruction a logit. */
BST_DEVICE float to_base2(float difference) { return TYPE == BST_F32_CODE ? difference * LOG2E : difference; }
BST_DEVICE float exponent(const cross_entropy_rows_args *a, float u, float reference) {
    return to_base2(bst_fma(u, a->base2, -reference));
}

/* Sums relative to a reference: sum = sum of e^z / e^reference. */
typedef struct partial {
    float reference, sum, weighted; /* weighted: sum of w u, for label smoothing */
} partial;

BST_DEVICE partial nothing(void) {
    partial p = {LOWEST, 0, 0};
    return p;
}

BST_DEVICE float top_of(float top, const float *x, int n) {
    BST_UNROLL
    for (int j = 0; j < n; j++) top = bst_max(top, NEGATIVE ? -x[j] : x[j]);
    return top;
}

/* Makes room for logits up to `top`. Stays finite for rows of -inf, so that exp(-inf) is 0. */
BST_DEVICE void raise_to(const cross_entropy_rows_args *a, partial *p, float top) {
    float reference = bst_max(p->reference, shaped(a, NEGATIVE ? -top : top) * a->base2);
    p->sum *= bst_exp2(to_base2(p->reference - reference));
    p->reference = reference;
}

BST_DEVICE float weight_of(const cross_entropy_rows_args *a, int column) {
    return HAS_WEIGHT ? a->class_weight[column] : 1.0f;
}

BST_DEVICE void add(const cross_entropy_rows_args *a, partial *p, const float *x, int n, int column) {
    BST_UNROLL
    for (int j = 0; j < n; j++) {
        float u = shaped(a, x[j]);
        p->sum += bst_exp2(exponent(a, u, p->reference));
        if (SMOOTH) p->weighted = bst_fma(weight_of(a, column + j), u, p->weighted);
    }
}

/* The total of `lanes` lanes, in each of them. */
BST_DEVICE partial warp_total(partial p, int lanes) {
    float reference = bst_warp_reduce(p.reference, lanes, true);
    p.sum = bst_warp_reduce(p.sum * bst_exp2(to_base2(p.reference - reference)), lanes, false);
    if (SMOOTH) p.weighted = bst_warp_reduce(p.weighted, lanes, false);
    p.reference = reference;
    return p;
}

/* Partials in shared memory, `n` of them: three arrays. */
BST_DEVICE partial shared_total(const float *from, int n) {
    partial p = nothing();
    int lane = (int)bst_lane();
    if (lane < n) {
        p.reference = from[lane];
        p.sum = from[n + lane];
        p.weighted = SMOOTH ? from[2 * n + lane] : 0.0f;
    }
    return warp_total(p, 32);
}

/* ---- one row ----------------------------------------------------------------------------------------------------- */

/* Accurate to 2^-22 at every size: the hardware's relative error would show in large sums. */
BST_DEVICE float log2_of(float v) {
    if (!(v > 0.0f && v < BST_INFINITY)) return bst_log2(v);
    int32_t power = ((int32_t)bst_bits(v) - 0x3f3504f3) >> 23;
    return (float)power + bst_log2(bst_from_bits(bst_bits(v) - ((uint32_t)power << 23)));
}

/* What a row's loss and gradient need besides its logits. */
typedef struct row_terms {
    float reference; /* p = exp2(exponent) / sum */
    float share;     /* of the softmax, over the sum */
    float hit;       /* of the target */
    float smooth;    /* of every class weight */
    float lse, loss;
} row_terms;

/* `x`: the target's logit, for the loss. */
BST_DEVICE row_terms terms_of(const cross_entropy_rows_args *a, int64_t row, int target, partial total, float x) {
    bst_cross_entropy_divisors divide = {1.0f, 1.0f, VOCAB, 0.0f};
    if (a->divisors) divide = *a->divisors;
    float upstream = a->upstream ? a->upstream[row * a->upstream_stride] : 1.0f;
    float weight = weight_of(a, target) * (SMOOTH ? 1.0f - a->smoothing : 1.0f);
    float each = SMOOTH ? a->smoothing / VOCAB : 0.0f;
    float log_sum = log2_of(total.sum);
    row_terms t;
    t.reference = total.reference;
    t.lse = TYPE == BST_F32_CODE ? total.reference + log_sum * LN2 : (total.reference + log_sum) * LN2;
    t.loss = weight * ((log_sum - exponent(a, shaped(a, x), total.reference)) * LN2);
    if (SMOOTH) t.loss += each * (divide.class_weight_sum * t.lse - total.weighted * a->natural);
    t.loss *= divide.inverse_weight_sum;
    /* Undivided gradients are left to whoever multiplies them by divisors->gradient; the z-loss has another divisor. */
    float by_weight = a->undivided ? 1.0f : divide.inverse_weight_sum, by_count = by_weight;
    if (HAS_WEIGHT)
        by_count = a->undivided ? bst_divide(divide.inverse_count, divide.inverse_weight_sum) : divide.inverse_count;
    float scale = upstream * by_weight * a->slope;
    t.hit = scale * weight;
    t.smooth = scale * each;
    t.share = t.hit;
    if (SMOOTH) t.share += t.smooth * divide.class_weight_sum;
    if (Z_LOSS) {
        t.loss += divide.inverse_count * a->lse_square_scale * t.lse * t.lse;
        t.share += upstream * by_count * a->slope * 2.0f * a->lse_square_scale * t.lse;
    }
    t.share = bst_divide(t.share, total.sum);
    return t;
}

/* Logits become their gradients. The target's is formed in float32: p - 1 rounded once. */
BST_DEVICE void differentiate(const cross_entropy_rows_args *a, const row_terms *t, float *x, int n, int column,
                              int target) {
    float u[VEC];
    BST_UNROLL
    for (int j = 0; j < n; j++) {
        u[j] = shaped(a, x[j]);
        x[j] = t->share * bst_exp2(exponent(a, u[j], t->reference));
        if (SMOOTH) x[j] = bst_fma(-t->smooth, weight_of(a, column + j), x[j]);
    }
    if ((unsigned)(target - column) < (unsigned)n) {
        BST_UNROLL
        for (int j = 0; j < n; j++)
            if (column + j == target) x[j] -= t->hit;
    }
    if (SOFTCAP) {
        BST_UNROLL
        for (int j = 0; j < n; j++) x[j] *= (1.0f - u[j]) * (1.0f + u[j]);
    }
}

BST_DEVICE bool in_vocabulary(const cross_entropy_rows_args *a, int64_t target) {
    return target != a->ignore_index && target >= 0 && target < VOCAB;
}

BST_DEVICE void keep(const cross_entropy_rows_args *a, int64_t row, partial total, float lse) {
    if (a->lse) a->lse[row] = lse;
    if (!a->kept) return;
    a->kept[2 * row] = total.reference;
    a->kept[2 * row + 1] = total.sum;
}

/* The loss of a row that is not read. */
BST_DEVICE void skip(const cross_entropy_rows_args *a, int64_t row, int64_t target) {
    partial one = {0.0f, 1.0f, 0.0f};
    if (MODE == GRADIENT) return;
    if (a->loss_rows) a->loss_rows[row] = target == a->ignore_index ? 0.0f : BST_NAN;
    keep(a, row, one, 0.0f);
}
#endif

#ifdef ROWS
#define BATCH 4 /* vectors a thread asks for before it uses the first */

/* A row as whole vectors, with up to VEC - 1 single elements before and behind where it begins between vectors. */
typedef struct row_shape {
    int head, vectors; /* columns [head, head + vectors * VEC) */
} row_shape;

BST_DEVICE row_shape shape_of(const void *row) {
    row_shape s = {0, VOCAB / VEC};
    if (PEEL) {
        int past = (int)((size_t)row / SIZE % VEC);
        s.head = (VEC - past) % VEC;
        if (s.head > VOCAB) s.head = VOCAB;
        s.vectors = (VOCAB - s.head) / VEC;
    }
    return s;
}

/* The single element of this thread, or -1: the first VEC threads take the head, the next the tail. */
BST_DEVICE int single_of(const row_shape *s) {
    int i = (int)bst_thread(), tail = s->head + s->vectors * VEC + i - VEC;
    if (i < VEC) return i < s->head ? i : -1;
    return i < 2 * VEC && tail < VOCAB ? tail : -1;
}

BST_DEVICE bst_raw read_vector(const void *row, int column) {
    const void *p = bst_at(row, column, TYPE);
    return MODE == LOSS ? bst_read_once(p, VEC * SIZE) : bst_read(p, VEC * SIZE);
}

BST_DEVICE partial row_total(const cross_entropy_rows_args *a, const void *row, const row_shape *s, float *scratch) {
    partial p = nothing();
    for (int first = (int)bst_thread(); first < s->vectors; first += BATCH * THREADS) {
        bst_raw raw[BATCH];
        float x[VEC], top = -BST_INFINITY;
        BST_UNROLL
        for (int i = 0; i < BATCH; i++)
            if (first + i * THREADS < s->vectors) raw[i] = read_vector(row, s->head + (first + i * THREADS) * VEC);
        BST_UNROLL
        for (int i = 0; i < BATCH; i++) {
            if (first + i * THREADS >= s->vectors) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            top = top_of(top, x, VEC);
        }
        raise_to(a, &p, top);
        BST_UNROLL
        for (int i = 0; i < BATCH; i++) {
            if (first + i * THREADS >= s->vectors) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            add(a, &p, x, VEC, s->head + (first + i * THREADS) * VEC);
        }
    }
    int single = PEEL ? single_of(s) : -1;
    if (single >= 0) {
        float x;
        bst_load(&x, row, single, TYPE, 1);
        raise_to(a, &p, top_of(-BST_INFINITY, &x, 1));
        add(a, &p, &x, 1, single);
    }
    p = warp_total(p, 32);
    int warp = (int)bst_thread() / 32;
    if (bst_lane() == 0) {
        scratch[warp] = p.reference;
        scratch[THREADS / 32 + warp] = p.sum;
        scratch[2 * (THREADS / 32) + warp] = p.weighted;
    }
    bst_sync();
    return shared_total(scratch, THREADS / 32);
}

/* Writes a row of gradients; all zero without `t`. */
BST_DEVICE void row_gradient(const cross_entropy_rows_args *a, const row_terms *t, const void *row, void *out,
                             const row_shape *s, int target) {
    int last = (s->vectors + BATCH * THREADS - 1) / (BATCH * THREADS) - 1;
    for (int turn = last; turn >= 0; turn--) {
        int first = turn * BATCH * THREADS + (int)bst_thread();
        bst_raw raw[BATCH];
        float x[VEC];
        BST_UNROLL
        for (int i = 0; i < BATCH; i++)
            if (t && first + i * THREADS < s->vectors) raw[i] = read_vector(row, s->head + (first + i * THREADS) * VEC);
        BST_UNROLL
        for (int i = 0; i < BATCH; i++) {
            int column = s->head + (first + i * THREADS) * VEC;
            if (first + i * THREADS >= s->vectors) continue;
            if (t) {
                bst_unpack(x, raw[i], TYPE, VEC);
                differentiate(a, t, x, VEC, column, target);
            } else {
                BST_UNROLL
                for (int j = 0; j < VEC; j++) x[j] = 0.0f;
            }
            bst_store_once(out, column, x, TYPE, VEC);
        }
    }
    int single = PEEL ? single_of(s) : -1;
    if (single >= 0) {
        float x = 0.0f;
        if (t) {
            bst_load(&x, row, single, TYPE, 1);
            differentiate(a, t, &x, 1, single, target);
        }
        bst_store(out, single, &x, TYPE, 1);
    }
}

BST_KERNEL(cross_entropy_rows, cross_entropy_rows_args, THREADS, BLOCKS) {
    BST_SHARED(float, scratch, 3 * 32);
    bst_wait_for_previous();
    int64_t row = bst_block(), target = a.target[row];
    const void *logits = bst_at(a.logits, bst_row_start(&a.logits_map, row, FOLDED), TYPE);
    void *dlogits = MODE == LOSS ? 0 : bst_at_out(a.dlogits, bst_row_start(&a.dlogits_map, row, FOLDED), TYPE);
    row_shape shape = shape_of(logits);
    if (!in_vocabulary(&a, target)) {
        if (MODE != LOSS) row_gradient(&a, 0, logits, dlogits, &shape, 0);
        if (bst_thread() == 0) skip(&a, row, target);
        return;
    }
    float x = 0.0f;
    partial total;
    if (MODE == GRADIENT) {
        total = nothing();
        total.reference = a.kept ? a.kept[2 * row] : TYPE == BST_F32_CODE ? a.lse[row] : a.lse[row] * LOG2E;
        total.sum = a.kept ? a.kept[2 * row + 1] : 1.0f;
    } else {
        bst_load(&x, logits, target, TYPE, 1); /* before the barrier in row_total: dlogits may be logits */
        total = row_total(&a, logits, &shape, scratch);
    }
    row_terms terms = terms_of(&a, row, (int)target, total, x);
    if (MODE != GRADIENT && bst_thread() == 0) {
        if (a.loss_rows) a.loss_rows[row] = terms.loss;
        keep(&a, row, total, terms.lse);
    }
    if (MODE != LOSS) row_gradient(&a, &terms, logits, dlogits, &shape, (int)target);
}
#endif

#ifdef CLUSTERS
#define VECTORS    (VOCAB / VEC)
#define SLICE      ((VECTORS + CLUSTER - 1) / CLUSTER) /* vectors of a block */
#define PER_THREAD ((SLICE + THREADS - 1) / THREADS)
#define WARPS      (THREADS / 32)
/* For 16-bit logits without options that look at each logit twice, what stays in registers is not the logits but their
 * exponentials relative to the thread's own maximum, in float16 with 2^15 for one: 12 bits, four more than the gradient
 * keeps, down to 2e-9 of the maximum. The gradient is then one multiplication. The target's own is made from its logit. */
#define COMPACT (TYPE != BST_F32_CODE && !SMOOTH && !SOFTCAP && !NEGATIVE)
#define ONE     15.0f

/* Asks for this block's slice of a row. One thread. */
BST_DEVICE void fetch(const cross_entropy_rows_args *a, unsigned char *buffer, int64_t row, int first, int count,
                      uint64_t *arrived) {
    bst_barrier_expect(arrived, (unsigned)count * 16u);
    bst_bulk_read(buffer, bst_at(a->logits, bst_row_start(&a->logits_map, row, FOLDED) + (int64_t)first * VEC, TYPE),
                  (unsigned)count * 16u, arrived);
}

/* The largest of a thread's logits (of their negatives where NEGATIVE). */
BST_DEVICE float slice_top(const bst_raw *kept, int thread, int count) {
    float x[VEC], top = -BST_INFINITY;
    if (COMPACT) {
        uint32_t pair = TYPE == BST_BF16_CODE ? 0xff80ff80u : 0xfc00fc00u; /* -inf, twice */
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            if (thread + i * THREADS >= count) continue;
            BST_UNROLL
            for (int j = 0; j < 4; j++)
                pair = TYPE == BST_BF16_CODE ? bst_max_bf16x2(pair, kept[i].w[j]) : bst_max_f16x2(pair, kept[i].w[j]);
        }
        return bst_max(bst_half_to_float(pair & 0xffffu, TYPE), bst_half_to_float(pair >> 16, TYPE));
    }
    BST_UNROLL
    for (int i = 0; i < PER_THREAD; i++) {
        if (thread + i * THREADS >= count) continue;
        bst_unpack(x, kept[i], TYPE, VEC);
        top = top_of(top, x, VEC);
    }
    return top;
}

/* The cluster's total from the threads' partials. `exchange` is for this row alone: the next one but one may reuse it.
 */
BST_DEVICE partial cluster_total(partial p, float *scratch, float *exchange) {
    p = warp_total(p, 32);
    unsigned warp = bst_thread() / 32;
    if (bst_lane() == 0) {
        scratch[warp] = p.reference;
        scratch[WARPS + warp] = p.sum;
        scratch[2 * WARPS + warp] = p.weighted;
    }
    bst_sync();
#if CLUSTER == 1
    return shared_total(scratch, WARPS);
#else
    if (warp == 0) {
        p = shared_total(scratch, WARPS);
        unsigned rank = bst_cluster_rank();
        if (bst_lane() < CLUSTER) {
            bst_cluster_write(&exchange[rank], bst_lane(), p.reference);
            bst_cluster_write(&exchange[CLUSTER + rank], bst_lane(), p.sum);
            if (SMOOTH) bst_cluster_write(&exchange[2 * CLUSTER + rank], bst_lane(), p.weighted);
        }
    }
    bst_cluster_sync();
    return shared_total(exchange, CLUSTER);
#endif
}

BST_KERNEL(cross_entropy_clusters, cross_entropy_rows_args, THREADS, BLOCKS) {
    BST_DYNAMIC_SHARED(buffer); /* SLICE vectors */
    BST_SHARED(uint64_t, arrived, 1);
    BST_SHARED(float, scratch, 3 * WARPS);
    BST_SHARED(float, exchange, 2 * 3 * CLUSTER);
    int thread = (int)bst_thread(), rank = CLUSTER == 1 ? 0 : (int)bst_cluster_rank();
    int first = rank * SLICE, count = VECTORS - first < SLICE ? VECTORS - first : SLICE;
    if (thread == 0) {
        bst_barrier_init(arrived, 1);
        bst_barrier_fence_init();
    }
    bst_sync();
    bst_wait_for_previous();
    int64_t row = bst_block() / CLUSTER, step = bst_blocks() / CLUSTER;
    int64_t coming = row < a.rows ? a.target[row] : a.ignore_index;
    if (thread == 0 && in_vocabulary(&a, coming)) fetch(&a, buffer, row, first, count, arrived);
#if CLUSTER > 1
    bst_cluster_sync(); /* every block has begun: its shared memory may be written */
#endif
    unsigned parity = 0;
    for (int turn = 0; row < a.rows; row += step) {
        int64_t target = coming, next = row + step;
        coming = next < a.rows ? a.target[next] : a.ignore_index;
        bool more = thread == 0 && in_vocabulary(&a, coming);
        void *out = bst_at_out(a.dlogits, bst_row_start(&a.dlogits_map, row, FOLDED) + (int64_t)first * VEC, TYPE);
        if (!in_vocabulary(&a, target)) {
            if (more) fetch(&a, buffer, next, first, count, arrived);
            bst_raw zero = {{0, 0, 0, 0}};
            for (int i = thread; i < count; i += THREADS)
                bst_write_once(bst_at_out(out, (int64_t)i * VEC, TYPE), zero, 16);
            if (thread == 0 && rank == 0) skip(&a, row, target);
            continue;
        }
        bst_barrier_wait(arrived, parity);
        parity ^= 1;
        bst_raw kept[PER_THREAD];
        float x[VEC], hit = 0.0f;
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++)
            if (thread + i * THREADS < count) kept[i] = bst_read(buffer + (thread + i * THREADS) * 16, 16);
        int column = (int)target - first * VEC; /* within the slice, if it is there */
        bool mine = column >= 0 && column < count * VEC;
        if (mine) bst_load(&hit, buffer, column, TYPE, 1);
        bst_sync(); /* the slice is in registers: its place is free */
        if (more) fetch(&a, buffer, next, first, count, arrived);
        partial p = nothing();
        raise_to(&a, &p, slice_top(kept, thread, count));
        if (COMPACT) p.reference -= ONE;
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            if (thread + i * THREADS >= count) continue;
            bst_unpack(x, kept[i], TYPE, VEC);
            if (COMPACT) {
                BST_UNROLL
                for (int j = 0; j < VEC; j++) {
                    x[j] = bst_exp2(exponent(&a, x[j], p.reference));
                    p.sum += x[j];
                }
                kept[i] = bst_pack(x, BST_F16_CODE, VEC);
            } else {
                add(&a, &p, x, VEC, (first + thread + i * THREADS) * VEC);
            }
        }
        float own = p.reference;
        p = cluster_total(p, scratch, exchange + turn * 3 * CLUSTER);
        turn ^= 1;
        row_terms terms = terms_of(&a, row, (int)target, p, hit);
        if (thread == 0) {
            if (mine && a.loss_rows) a.loss_rows[row] = terms.loss;
            if (rank == 0) keep(&a, row, p, terms.lse);
        }
        float share = COMPACT ? terms.share * bst_exp2(own - p.reference) : 0.0f;
        float at_target = COMPACT ? terms.share * bst_exp2(exponent(&a, hit, p.reference)) - terms.hit : 0.0f;
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            if (thread + i * THREADS >= count) continue;
            int at = (thread + i * THREADS) * VEC;
            if (COMPACT) {
                bst_unpack(x, kept[i], BST_F16_CODE, VEC);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) x[j] *= share;
                if ((unsigned)(column - at) < (unsigned)VEC) {
                    BST_UNROLL
                    for (int j = 0; j < VEC; j++)
                        if (at + j == column) x[j] = at_target;
                }
            } else {
                bst_unpack(x, kept[i], TYPE, VEC);
                differentiate(&a, &terms, x, VEC, first * VEC + at, (int)target);
            }
            bst_store(out, (int64_t)(thread + i * THREADS) * VEC, x, TYPE, VEC); /* streaming stores: 1 % slower */
        }
    }
}
#endif

#ifdef DIVISORS
/* One block. Counts the targets in the vocabulary, sums their class weights and all class weights. */
BST_KERNEL(cross_entropy_divisors, cross_entropy_divisors_args, 1024, 1) {
    BST_SHARED(float, scratch, 3 * 32);
    bst_let_next_start();
    bst_wait_for_previous();
    float weights = 0, count = 0, all = 0;
    if (a.mean && !a.num_items) {
        for (int64_t i = bst_thread(); i < a.rows; i += 1024) {
            int64_t target = a.target[i];
            if (target == a.ignore_index || target < 0 || target >= a.vocabulary) continue;
            count += 1.0f;
            weights += a.class_weight ? a.class_weight[target] : 1.0f;
        }
    }
    if (a.class_weight)
        for (int i = (int)bst_thread(); i < a.vocabulary; i += 1024) all += a.class_weight[i];
    count = bst_group_sum(count, 1024, scratch);
    weights = bst_group_sum(weights, 1024, scratch + 32);
    all = bst_group_sum(all, 1024, scratch + 64);
    if (bst_thread() != 0) return;
    bst_cross_entropy_divisors out = {1.0f, 1.0f, a.class_weight ? all : (float)a.vocabulary, 0.0f};
    if (a.num_items)
        out.inverse_weight_sum = out.inverse_count = bst_divide(1.0f, *a.num_items);
    else if (a.mean)
        out.inverse_weight_sum = bst_divide(1.0f, weights), out.inverse_count = bst_divide(1.0f, count);
    /* Of nothing, the loss is NaN and the gradient zero. */
    out.gradient =
        out.inverse_weight_sum < BST_INFINITY ? out.inverse_weight_sum * (a.upstream ? *a.upstream : 1.0f) : 0.0f;
    *a.out = out;
}
#endif

#ifdef REDUCE
/* One block. Nothing left to divide: 0 * (1 / 0) is NaN, as torch has it. */
BST_KERNEL(cross_entropy_reduce, cross_entropy_reduce_args, 1024, 1) {
    BST_SHARED(float, scratch, 32);
    bst_wait_for_previous();
    float sum = 0;
    for (int64_t i = bst_thread(); i < a.rows; i += 1024) sum += a.loss_rows[i];
    sum = bst_group_sum(sum, 1024, scratch);
    if (bst_thread() == 0) *a.loss = sum == 0.0f && a.divisors ? sum * a.divisors->inverse_weight_sum : sum;
}
#endif

#ifdef SCALE
/* tensor *= scale. A fixed number of blocks, so that a scale of one costs a launch and no more. */
BST_KERNEL(scale, scale_args, THREADS, 1) {
    bst_wait_for_previous();
    float scale = *a.scale, x[VEC];
    if (scale == 1.0f) return;
    int64_t vectors = a.count / VEC, step = (int64_t)bst_blocks() * THREADS;
    int64_t thread = (int64_t)bst_block() * THREADS + bst_thread();
    for (int64_t i = thread; i < vectors; i += step) {
        bst_load(x, a.tensor, i * VEC, TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) x[j] *= scale;
        bst_store_once(a.tensor, i * VEC, x, TYPE, VEC);
    }
    if (thread >= a.count - vectors * VEC) return;
    bst_load(x, a.tensor, vectors * VEC + thread, TYPE, 1);
    x[0] *= scale;
    bst_store(a.tensor, vectors * VEC + thread, x, TYPE, 1);
}
#endif
