/* cross_entropy.cu - softmax cross-entropy of rows of logits: loss, gradient, or both at once.
 *
 * Macros: VOCAB; TYPE (code of dtype.h); VEC elements of an access; THREADS of a block; BLOCKS of a multiprocessor at
 * least; MODE (bst_cross_entropy_mode); PEEL: rows begin between vectors; FOLDED: one stride describes all rows;
 * HAS_WEIGHT, SMOOTH, SOFTCAP, Z_LOSS: options in use; NEGATIVE: logit_scale <= 0.
 *
 * rows      one block a row. LOSS: Bytes: the logits, once. GRADIENT: the logits and dlogits, once each.
 *           LOSS_AND_GRADIENT: reads the logits twice, the second time backwards, so that the caches have most of what
 *           is left. Measured on an H200, bf16: LOSS 259 us at 4096 x 128256 (0.95 of the copy bandwidth).
 * registers LOSS_AND_GRADIENT on sm_90 and later, rows of up to 64 KiB; cross_entropy_ring.cu has the wider ones.
 *           Bytes: one read and one write per logit. A block holds its row in registers between its uses. Measured on
 *           an H200, bf16, with divisors and reduce: 140 us at 4096 x 32000 (0.89 of the copy).
 * Rows to be ignored are not read. No atomics. */
#ifdef REGISTERS
#define VECTORS (VOCAB / VEC)
#define STEP    THREADS
#define EACH    ((VECTORS + THREADS - 1) / THREADS)
#endif
#if defined(ROWS) || defined(REGISTERS)
#include "cross_entropy_row.cuh"
#else
#include "pack.cuh"
#include "reduce.cuh"

#include "cross_entropy_args.h"
#endif

#ifdef ROWS
#define BATCH BST_CROSS_ENTROPY_BATCH

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

/* A vector of logits without the target's. */
BST_DEVICE bst_raw without(bst_raw raw, int column, int target) {
    float x[VEC];
    bst_unpack(x, raw, TYPE, VEC);
    BST_EACH(j, VEC)
        if (column + j == target) x[j] = -BST_INFINITY;
    return bst_pack(x, TYPE, VEC);
}

BST_DEVICE partial row_total(const cross_entropy_rows_args *a, const void *row, const row_shape *s, int target,
                             float *scratch) {
    partial p = nothing();
    int with_target = target >= s->head ? (target - s->head) / VEC : s->vectors; /* the vector that has it */
    for (int first = (int)bst_thread(); first < s->vectors; first += BATCH * THREADS) {
        bst_raw raw[BATCH];
        float x[VEC], top = -BST_INFINITY;
        BST_EACH(i, BATCH)
            if (first + i * THREADS < s->vectors) raw[i] = read_vector(row, s->head + (first + i * THREADS) * VEC);
        if (PATCHED && (unsigned)(with_target - first) < BATCH * THREADS && (with_target - first) % THREADS == 0) {
            BST_EACH(i, BATCH)
                if (first + i * THREADS == with_target) raw[i] = without(raw[i], s->head + with_target * VEC, target);
        }
        BST_EACH(i, BATCH) {
            if (first + i * THREADS >= s->vectors) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            top = top_of(top, x, VEC);
        }
        raise_to(a, &p, top);
        BST_EACH(i, BATCH) {
            if (first + i * THREADS >= s->vectors) continue;
            bst_unpack(x, raw[i], TYPE, VEC);
            add(a, &p, x, VEC, s->head + (first + i * THREADS) * VEC, target);
        }
    }
    int single = PEEL ? single_of(s) : -1;
    if (single >= 0) {
        float x;
        bst_load(&x, row, single, TYPE, 1);
        if (PATCHED && single == target) x = -BST_INFINITY;
        raise_to(a, &p, top_of(-BST_INFINITY, &x, 1));
        add(a, &p, &x, 1, single, target);
    }
    return block_total(p, scratch);
}

/* Writes a row of gradients; all zero without `t`. */
BST_DEVICE void row_gradient(const cross_entropy_rows_args *a, const row_terms *t, const void *row, void *out,
                             const row_shape *s, int target) {
    int last = (s->vectors + BATCH * THREADS - 1) / (BATCH * THREADS) - 1;
    for (int batch = last; batch >= 0; batch--) {
        int first = batch * BATCH * THREADS + (int)bst_thread();
        bst_raw raw[BATCH];
        float x[VEC];
        BST_EACH(i, BATCH)
            if (t && first + i * THREADS < s->vectors) raw[i] = read_vector(row, s->head + (first + i * THREADS) * VEC);
        BST_EACH(i, BATCH) {
            int column = s->head + (first + i * THREADS) * VEC;
            if (first + i * THREADS >= s->vectors) continue;
            if (t) {
                bst_unpack(x, raw[i], TYPE, VEC);
                differentiate(a, t, x, VEC, column, target);
            } else {
                BST_EACH(j, VEC) x[j] = 0.0f;
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
    BST_SHARED(float, scratch, PARTIAL * 32);
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
    float x;
    partial total = nothing();
    bst_load(&x, logits, target, TYPE, 1); /* before the barriers: dlogits may be logits */
    if (MODE != GRADIENT) {
        total = row_total(&a, logits, &shape, (int)target, scratch);
    } else if (a.lse_pairs) {
        total.reference = a.lse_pairs[2 * row];
        total.others = a.lse_pairs[2 * row + 1];
    } else {
        total.reference = TYPE == BST_F32_CODE ? a.lse[row] : a.lse[row] * BST_LOG2_E;
        total.others = 1.0f - far_power(above_reference(&a, shaped(&a, x), total.reference));
    }
    if (MODE == GRADIENT) bst_sync();
    bst_cross_entropy_divisors divide = divisors_of(&a);
    row_terms terms = terms_of(&a, &divide, row, (int)target, total, x, MODE != LOSS || bst_thread() == 0);
    if (MODE != GRADIENT && bst_thread() == 0) {
        if (a.loss_rows) a.loss_rows[row] = terms.loss;
        store_lse(&a, row, &terms);
    }
    if (MODE != LOSS) row_gradient(&a, &terms, logits, dlogits, &shape, (int)target);
}
#endif

#ifdef REGISTERS
BST_KERNEL(cross_entropy_registers, cross_entropy_rows_args, THREADS, BLOCKS) {
    BST_DYNAMIC_SHARED(buffer); /* VECTORS vectors */
    BST_SHARED(uint64_t, arrived, 1);
    BST_SHARED(float, scratch, PARTIAL *(THREADS / 32));
    int thread = (int)bst_thread();
    if (thread == 0) {
        bst_barrier_init(arrived, 1);
        bst_barrier_fence_init();
    }
    bst_sync();
    bst_wait_for_previous();
    int64_t row = bst_block(), target = a.target[row];
    const void *logits = bst_at(a.logits, bst_row_start(&a.logits_map, row, FOLDED), TYPE);
    void *out = bst_at_out(a.dlogits, bst_row_start(&a.dlogits_map, row, FOLDED), TYPE);
    if (!in_vocabulary(&a, target)) {
        bst_raw zero = {{0, 0, 0, 0}};
        for (int i = thread; i < VECTORS; i += THREADS)
            bst_write_once(bst_at_out(out, (int64_t)i * VEC, TYPE), zero, 16);
        if (thread == 0) skip(&a, row, target);
        return;
    }
    if (thread == 0) {
        bst_barrier_expect(arrived, VECTORS * 16u);
        bst_bulk_read(buffer, logits, VECTORS * 16u, arrived);
    }
    bst_cross_entropy_divisors divide = divisors_of(&a);
    float x;
    bst_load(&x, logits, target, TYPE, 1); /* before the barrier in block_total: out may be logits */
    bst_barrier_wait(arrived, 0);
    registers h;
    /* By the thread that reads it: the order of one thread is all it takes. */
    bool owner = (int)target / VEC % THREADS == thread;
    if (PATCHED && owner) leave_out(buffer, (int)target);
    BST_EACH(i, EACH)
        if (thread + i * THREADS < VECTORS) h.raw[i] = bst_read(buffer + (thread + i * THREADS) * 16, 16);
    partial p = block_total(registers_sums(&a, &h, thread, VECTORS, 0, (int)target), scratch);
    row_terms terms = terms_of(&a, &divide, row, (int)target, p, x, owner || thread == 0);
    float share = registers_share(&terms, &h);
    if (thread == 0) {
        if (a.loss_rows) a.loss_rows[row] = terms.loss;
        store_lse(&a, row, &terms);
    }
    BST_EACH(i, EACH) {
        int column = (thread + i * THREADS) * VEC;
        if (thread + i * THREADS < VECTORS)
            bst_write(bst_at_out(out, column, TYPE), registers_gradient(&a, &terms, share, &h, i, column, (int)target),
                      16);
    }
    if (PATCHED && owner) bst_store(out, target, &terms.at_target, TYPE, 1);
}
#endif

#ifdef DIVISORS
/* One block. Counts the targets in the vocabulary, sums their class weights and all class weights, clears the chunks'
 * tickets. */
BST_KERNEL(cross_entropy_divisors, cross_entropy_divisors_args, BST_CROSS_ENTROPY_BLOCK, 1) {
    BST_SHARED(float, scratch, 3 * 32);
    bst_let_next_start();
    bst_wait_for_previous();
    float weights = 0, count = 0, all = 0;
    if (a.mean && !a.num_items) {
        for (int64_t i = bst_thread(); i < a.rows; i += BST_CROSS_ENTROPY_BLOCK) {
            int64_t target = a.target[i];
            if (target == a.ignore_index || target < 0 || target >= a.vocabulary) continue;
            count += 1.0f;
            weights += a.class_weight ? a.class_weight[target] : 1.0f;
        }
    }
    if (a.class_weight)
        for (int i = (int)bst_thread(); i < a.vocabulary; i += BST_CROSS_ENTROPY_BLOCK) all += a.class_weight[i];
    count = bst_group_sum(count, BST_CROSS_ENTROPY_BLOCK, scratch);
    weights = bst_group_sum(weights, BST_CROSS_ENTROPY_BLOCK, scratch + 32);
    all = bst_group_sum(all, BST_CROSS_ENTROPY_BLOCK, scratch + 64);
    for (int i = (int)bst_thread(); i < a.chunks; i += BST_CROSS_ENTROPY_BLOCK) a.tickets[i] = 0;
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
BST_KERNEL(cross_entropy_reduce, cross_entropy_reduce_args, BST_CROSS_ENTROPY_BLOCK, 1) {
    BST_SHARED(float, scratch, 32);
    bst_wait_for_previous();
    float sum = 0;
    for (int64_t i = bst_thread(); i < a.rows; i += BST_CROSS_ENTROPY_BLOCK) sum += a.loss_rows[i];
    sum = bst_group_sum(sum, BST_CROSS_ENTROPY_BLOCK, scratch);
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
        BST_EACH(j, VEC) x[j] *= scale;
        bst_store_once(a.tensor, i * VEC, x, TYPE, VEC);
    }
    if (thread >= a.count - vectors * VEC) return;
    bst_load(x, a.tensor, vectors * VEC + thread, TYPE, 1);
    x[0] *= scale;
    bst_store(a.tensor, vectors * VEC + thread, x, TYPE, 1);
}
#endif
