/* rms_norm.cu - RMSNorm forward and backward.
 *
 * Macros: HIDDEN; X_TYPE, W_TYPE, Y_TYPE (codes of dtype.h; y's type is dy's); CASTING (bst_casting); HAS_WEIGHT; ADD:
 * forward: one more than the code of the type of a residual that is added to x first, and what is normalised is the sum
 * as it is written, rounded; backward: x is that sum, and dsum, the gradient that reaches it from elsewhere, is added
 * to dx; VEC elements of an access; THREADS of
 * a row, ROWS of a block (THREADS * ROWS threads); KEEP: the row stays on the chip between its two uses, else it is
 * read again; FOLDED: one stride describes all rows; backward: DX, DW what is wanted; STAGES of the ring of shared
 * memory through which rows come (0: straight into registers).
 *
 * forward   reads x, weight (from the cache after the first rows); writes y and, if wanted, rstd. Bytes: x + y.
 *           Measured on an H200, bf16: 67 us at 16384 x 4096 (0.94 of the copy bandwidth; an elementwise kernel of
 *           PyTorch's that reads and writes as much took 65 in the same run), 17.3 us at 131072 x 128.
 *           ADD: reads residual too and writes sum. Bytes: x + residual + sum + y. 134 us at 16384 x 4096 (0.95).
 * backward  persistent: each block takes every gridDim-th group of rows, keeps its share of dweight in float32
 *           registers and writes one partial row at its end. Reads x, dy; writes dx. Bytes: x + dy + dx, and
 *           blocks * HIDDEN * 4 written and read back by rms_norm_dweight, mostly within the L2.
 *           Measured on an H200, bf16: 107 us at 16384 x 4096 (0.88), 29.4 us at 131072 x 128 (0.80).
 *           ADD: reads dsum too. Bytes: x + dy + dsum + dx, and the partial rows. 131 us at 16384 x 4096 (0.96).
 * No floating-point atomics: the order of every sum is fixed by the launch configuration. */
#include "pack.cuh"
#include "reduce.cuh"
#include "rms_norm_args.h"

#define VECTORS    ((HIDDEN + VEC - 1) / VEC)
#define PER_THREAD ((VECTORS + THREADS - 1) / THREADS)
#define COVERED    (PER_THREAD * THREADS == VECTORS)
#define BLOCK      (THREADS * ROWS)
#define LLAMA      0
#define GEMMA      1
#define R_TYPE     (ADD - 1)

/* The vector `i` of this thread begins at this column; threads of a row read neighbouring vectors. */
BST_DEVICE int column_of(int i, int lane) { return (i * THREADS + lane) * VEC; }
BST_DEVICE bool inside(int column) { return COVERED || column < HIDDEN; }

/* What rows are multiplied by, from the weight as it lies in memory. */
BST_DEVICE void unpack_weight(float *w, bst_raw raw) {
    if (HAS_WEIGHT) bst_unpack(w, raw, W_TYPE, VEC);
    BST_UNROLL
    for (int j = 0; j < VEC; j++) {
        if (!HAS_WEIGHT) w[j] = 1.0f;
        if (HAS_WEIGHT && CASTING == GEMMA) w[j] += 1.0f;
    }
}

BST_DEVICE void load_weight(float *w, const void *weight, int column) {
    bst_raw none = {{0, 0, 0, 0}};
    unpack_weight(w, HAS_WEIGHT ? bst_raw_at(weight, column, W_TYPE, VEC) : none);
}

#ifdef FORWARD
/* The vector at this column, packed: out of registers where the row is kept there. */
#define PACKED(kept, row, i, column, type) (KEEP ? kept[KEEP ? i : 0] : bst_raw_at(row, column, type, VEC))

BST_KERNEL(rms_norm_forward, rms_norm_forward_args, BLOCK, 1) {
    BST_SHARED(float, scratch, 32);
    int lane = (int)bst_thread() % THREADS;
    int64_t row = (int64_t)bst_block() * ROWS + bst_thread() / THREADS;
    bool live = row < a.rows;
    const void *x = bst_at(a.x, live ? bst_row_start(&a.x_map, row, FOLDED) : 0, X_TYPE);
    bst_raw kept[KEEP ? PER_THREAD : 1];
#if ADD
    const void *residual = bst_at(a.residual, live ? bst_row_start(&a.residual_map, row, FOLDED) : 0, R_TYPE);
    bst_raw residual_kept[KEEP ? PER_THREAD : 1];
#endif
    float v[VEC], w[VEC], squares = 0;
    bst_wait_for_previous();
    if (KEEP) {
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            if (live && inside(column_of(i, lane))) {
                kept[KEEP ? i : 0] = bst_raw_at(x, column_of(i, lane), X_TYPE, VEC);
#if ADD
                residual_kept[KEEP ? i : 0] = bst_raw_at(residual, column_of(i, lane), R_TYPE, VEC);
#endif
            }
        }
    }
#if KEEP
    BST_UNROLL
#endif
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!live || !inside(column)) continue;
        bst_unpack(v, PACKED(kept, x, i, column, X_TYPE), X_TYPE, VEC);
#if ADD
        bst_unpack(w, PACKED(residual_kept, residual, i, column, R_TYPE), R_TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) v[j] += w[j];
        bst_raw sum = bst_pack(v, X_TYPE, VEC);
        bst_write(bst_at_out(a.sum, row * HIDDEN + column, X_TYPE), sum, VEC * bst_type_size(X_TYPE));
        bst_unpack(v, sum, X_TYPE, VEC);
        kept[KEEP ? i : 0] = sum;
#endif
        BST_UNROLL
        for (int j = 0; j < VEC; j++) squares = bst_fma(v[j], v[j], squares);
    }
    squares = bst_group_sum(squares, THREADS, scratch);
    float rstd = bst_rsqrt(squares * (1.0f / HIDDEN) + a.eps);
    if (!live) return;
    if (a.rstd && lane == 0) a.rstd[row] = rstd;
#if ADD
    x = bst_at(a.sum, row * HIDDEN, X_TYPE); /* each thread reads what it wrote itself */
#endif
#if KEEP
    BST_UNROLL
#endif
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!inside(column)) continue;
        bst_unpack(v, PACKED(kept, x, i, column, X_TYPE), X_TYPE, VEC);
        load_weight(w, a.weight, column);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) v[j] *= rstd;
        if (CASTING == LLAMA) bst_round_all(v, X_TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) v[j] *= w[j];
        bst_store(a.y, row * HIDDEN + column, v, Y_TYPE, VEC);
    }
}
#endif

#ifdef BACKWARD
#define RING   (STAGES > 0)
#define INPUTS (2 + ADD)

/* One row in the hands of this thread. */
typedef struct row_state {
    const void *x, *dy;
    float rstd;
    bool live;
#if ADD
    const void *dsum;
#endif
} row_state;

BST_DEVICE row_state row_at(const rms_norm_backward_args *a, int64_t row) {
    row_state r = {a->x, a->dy, 0, row < a->rows};
    if (!r.live) return r;
    r.x = bst_at(a->x, bst_row_start(&a->x_map, row, FOLDED), X_TYPE);
    r.dy = bst_at(a->dy, bst_row_start(&a->dy_map, row, FOLDED), Y_TYPE);
#if ADD
    r.dsum = bst_at(a->dsum, bst_row_start(&a->dsum_map, row, FOLDED), X_TYPE);
#endif
    r.rstd = a->rstd[row];
    return r;
}

#if RING
/* A thread copies its own vectors into its own places of the ring and reads nobody else's: waiting for its own copies
 * is all the synchronisation there is. Places of one vector lie side by side, which keeps the banks apart. */
BST_DEVICE unsigned char *place(unsigned char *ring, int stage, int i, int which) {
    return ring + ((((stage * PER_THREAD + i) * INPUTS + which) * BLOCK) + (int)bst_thread()) * 16;
}

BST_DEVICE void fetch(unsigned char *ring, int stage, const row_state *r, int lane) {
    BST_UNROLL
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (r->live && inside(column)) {
            bst_copy_async16(place(ring, stage, i, 0), bst_at(r->x, column, X_TYPE));
            bst_copy_async16(place(ring, stage, i, 1), bst_at(r->dy, column, Y_TYPE));
#if ADD
            bst_copy_async16(place(ring, stage, i, 2), bst_at(r->dsum, column, X_TYPE));
#endif
        }
    }
    bst_copy_async_commit();
}
#endif

/* With n = x rstd and m = dy w: dx = rstd (m - n mean(m n)) + dsum, dweight = sum over rows of dy round(n). */
BST_KERNEL(rms_norm_backward, rms_norm_backward_args, BLOCK, 1) {
    BST_SHARED(float, scratch, 64);
    int lane = (int)bst_thread() % THREADS, group = (int)bst_thread() / THREADS;
    float dw[DW ? PER_THREAD : 1][VEC];
    BST_UNROLL
    for (int i = 0; i < (DW ? PER_THREAD : 1); i++) {
        BST_UNROLL
        for (int j = 0; j < VEC; j++) dw[i][j] = 0;
    }
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the partial rows: it waits for this kernel's end on the multiprocessor */
    int64_t step = (int64_t)bst_blocks() * ROWS, first = (int64_t)bst_block() * ROWS;
#if RING
    BST_DYNAMIC_SHARED(ring);
    row_state coming[STAGES];
    BST_UNROLL
    for (int s = 0; s < STAGES - 1; s++) {
        coming[s] = row_at(&a, first + s * step + group);
        fetch(ring, s, &coming[s], lane);
    }
    int stage = 0;
#endif
    for (int turn = 0; first < a.rows; first += step, turn ^= 32) {
        int64_t row = first + group;
#if RING
        row_state now = coming[0];
        coming[STAGES - 1] = row_at(&a, row + (STAGES - 1) * step);
        fetch(ring, stage ? stage - 1 : STAGES - 1, &coming[STAGES - 1], lane);
        BST_UNROLL
        for (int s = 0; s + 1 < STAGES; s++) coming[s] = coming[s + 1];
        bst_copy_async_wait(STAGES - 1);
#else
        row_state now = row_at(&a, row);
        bst_raw x_kept[KEEP ? PER_THREAD : 1], dy_kept[KEEP ? PER_THREAD : 1];
#if ADD
        bst_raw dsum_kept[KEEP ? PER_THREAD : 1];
#endif
        if (KEEP) {
            BST_UNROLL
            for (int i = 0; i < PER_THREAD; i++) {
                int column = column_of(i, lane);
                if (!now.live || !inside(column)) continue;
                x_kept[KEEP ? i : 0] = bst_raw_once(now.x, column, X_TYPE, VEC);
                dy_kept[KEEP ? i : 0] = bst_raw_once(now.dy, column, Y_TYPE, VEC);
#if ADD
                dsum_kept[KEEP ? i : 0] = bst_raw_once(now.dsum, column, X_TYPE, VEC);
#endif
            }
        }
#endif
        float xv[VEC], dv[VEC], w[VEC], projection = 0;
/* This thread's vector `i` of x and dy, wherever it waits. */
#if RING
#define LOAD_VECTOR(i, column)                                           \
    bst_unpack(xv, bst_read(place(ring, stage, i, 0), 16), X_TYPE, VEC); \
    bst_unpack(dv, bst_read(place(ring, stage, i, 1), 16), Y_TYPE, VEC)
#define LOAD_DSUM(i, column) bst_unpack(dsum, bst_read(place(ring, stage, i, 2), 16), X_TYPE, VEC)
#elif KEEP
#define LOAD_VECTOR(i, column)              \
    bst_unpack(xv, x_kept[i], X_TYPE, VEC); \
    bst_unpack(dv, dy_kept[i], Y_TYPE, VEC)
#define LOAD_DSUM(i, column) bst_unpack(dsum, dsum_kept[i], X_TYPE, VEC)
#else
#define LOAD_VECTOR(i, column)                \
    bst_load(xv, now.x, column, X_TYPE, VEC); \
    bst_load(dv, now.dy, column, Y_TYPE, VEC)
#define LOAD_DSUM(i, column) bst_unpack(dsum, bst_raw_once(now.dsum, column, X_TYPE, VEC), X_TYPE, VEC)
#endif
        if (DX) {
#if KEEP
            BST_UNROLL
#endif
            for (int i = 0; i < PER_THREAD; i++) {
                int column = column_of(i, lane);
                if (!now.live || !inside(column)) continue;
                LOAD_VECTOR(i, column);
                load_weight(w, a.weight, column);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) projection = bst_fma(dv[j] * w[j], xv[j], projection);
            }
            projection = bst_group_sum(projection, THREADS, scratch + turn);
        }
        float rstd = now.rstd, slope = projection * rstd * rstd * (1.0f / HIDDEN);
#if KEEP
        BST_UNROLL
#endif
        for (int i = 0; i < PER_THREAD; i++) {
            int column = column_of(i, lane);
            if (!now.live || !inside(column)) continue;
            LOAD_VECTOR(i, column);
            if (DX) {
                float dx[VEC];
                load_weight(w, a.weight, column);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) dx[j] = rstd * (dv[j] * w[j] - xv[j] * slope);
#if ADD
                float dsum[VEC];
                LOAD_DSUM(i, column);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) dx[j] += dsum[j];
#endif
                bst_store_once(a.dx, row * HIDDEN + column, dx, X_TYPE, VEC);
            }
            if (DW) {
                BST_UNROLL
                for (int j = 0; j < VEC; j++) xv[j] *= rstd;
                if (CASTING == LLAMA) bst_round_all(xv, X_TYPE, VEC);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) dw[DW ? i : 0][j] = bst_fma(dv[j], xv[j], dw[DW ? i : 0][j]);
            }
        }
#if RING
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#endif
    }
#if RING
    bst_copy_async_wait(0);
#endif
#if DW
    /* The row groups of a block add theirs up in shared memory, one after the other. */
    float *out = a.partial + (int64_t)bst_block() * HIDDEN;
#if ROWS > 1
    BST_SHARED(float, sums, HIDDEN);
    for (int g = 0; g < ROWS; g++) {
        if (g == group) {
            BST_UNROLL
            for (int i = 0; i < PER_THREAD; i++) {
                int column = column_of(i, lane);
                if (!inside(column)) continue;
                BST_UNROLL
                for (int j = 0; j < VEC; j++) sums[column + j] = g ? sums[column + j] + dw[i][j] : dw[i][j];
            }
        }
        bst_sync();
    }
    for (int c = (int)bst_thread(); c < HIDDEN; c += BLOCK) out[c] = sums[c];
#else
    BST_UNROLL
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!inside(column)) continue;
        BST_UNROLL
        for (int j = 0; j < VEC; j++) out[column + j] = dw[i][j];
    }
#endif
#endif
}
#endif

#ifdef BACKWARD_ROWS
#define INPUTS    (2 + ADD)
#define ROW_BYTES (HIDDEN * 16 / VEC)

/* Asks for row `row` of every input. One thread. */
BST_DEVICE void fetch_row(const rms_norm_backward_args *a, unsigned char *stage, int64_t row, uint64_t *arrived) {
    if (row >= a->rows) return;
    bst_barrier_expect(arrived, INPUTS * ROW_BYTES);
    bst_bulk_read(stage, bst_at(a->x, bst_row_start(&a->x_map, row, FOLDED), X_TYPE), ROW_BYTES, arrived);
    bst_bulk_read(stage + ROW_BYTES, bst_at(a->dy, bst_row_start(&a->dy_map, row, FOLDED), Y_TYPE), ROW_BYTES, arrived);
#if ADD
    bst_bulk_read(stage + 2 * ROW_BYTES, bst_at(a->dsum, bst_row_start(&a->dsum_map, row, FOLDED), X_TYPE), ROW_BYTES,
                  arrived);
#endif
}

/* rms_norm_backward for rows that each take a whole block, on chips with bulk copies: one block a multiprocessor, with
 * STAGES rows in shared memory or on their way there, and the weight in registers. */
BST_KERNEL(rms_norm_backward_rows, rms_norm_backward_args, THREADS, 1) {
    BST_DYNAMIC_SHARED(ring);
    BST_SHARED(uint64_t, arrived, STAGES);
    BST_SHARED(float, scratch, 64);
    int lane = (int)bst_thread();
    float dw[DW ? PER_THREAD : 1][VEC];
    bst_raw weight[PER_THREAD];
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) bst_barrier_init(&arrived[s], 1);
        bst_barrier_fence_init();
    }
    bst_sync();
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the partial rows: it waits for this kernel's end on the multiprocessor */
    int64_t row = bst_block(), step = bst_blocks();
    if (lane == 0)
        for (int s = 0; s < STAGES - 1; s++) fetch_row(&a, ring + s * INPUTS * ROW_BYTES, row + s * step, &arrived[s]);
    BST_UNROLL
    for (int i = 0; i < PER_THREAD; i++) {
        BST_UNROLL
        for (int j = 0; j < VEC; j++) dw[DW ? i : 0][j] = 0;
        if (HAS_WEIGHT && inside(column_of(i, lane))) weight[i] = bst_raw_at(a.weight, column_of(i, lane), W_TYPE, VEC);
    }
    float rstd = row < a.rows ? a.rstd[row] : 0.0f, next_rstd = 0.0f;
    int stage = 0, turn = 0;
    for (unsigned parity = 0; row < a.rows; row += step, rstd = next_rstd) {
        if (row + step < a.rows) next_rstd = a.rstd[row + step];
        /* The stage before this one is free: all threads had taken its row before they agreed on that row's sum. */
        int free = stage ? stage - 1 : STAGES - 1;
        if (lane == 0) fetch_row(&a, ring + free * INPUTS * ROW_BYTES, row + (STAGES - 1) * step, &arrived[free]);
        bst_barrier_wait(&arrived[stage], parity);
        const unsigned char *here = ring + stage * INPUTS * ROW_BYTES;
        bst_raw x[PER_THREAD], dy[PER_THREAD];
#if ADD
        bst_raw dsum[PER_THREAD];
#endif
        float xv[VEC], dv[VEC], w[VEC], projection = 0;
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            int at = column_of(i, lane) * 16 / VEC;
            if (!inside(column_of(i, lane))) continue;
            x[i] = bst_read(here + at, 16);
            dy[i] = bst_read(here + ROW_BYTES + at, 16);
#if ADD
            dsum[i] = bst_read(here + 2 * ROW_BYTES + at, 16);
#endif
        }
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            if (!inside(column_of(i, lane))) continue;
            bst_unpack(xv, x[i], X_TYPE, VEC);
            bst_unpack(dv, dy[i], Y_TYPE, VEC);
            unpack_weight(w, weight[i]);
            BST_UNROLL
            for (int j = 0; j < VEC; j++) projection = bst_fma(dv[j] * w[j], xv[j], projection);
        }
        projection = bst_group_sum(projection, THREADS, scratch + turn);
        float slope = projection * rstd * rstd * (1.0f / HIDDEN);
        BST_UNROLL
        for (int i = 0; i < PER_THREAD; i++) {
            int column = column_of(i, lane);
            if (!inside(column)) continue;
            bst_unpack(xv, x[i], X_TYPE, VEC);
            bst_unpack(dv, dy[i], Y_TYPE, VEC);
            unpack_weight(w, weight[i]);
            float dx[VEC];
            BST_UNROLL
            for (int j = 0; j < VEC; j++) dx[j] = rstd * (dv[j] * w[j] - xv[j] * slope);
#if ADD
            float ds[VEC];
            bst_unpack(ds, dsum[i], X_TYPE, VEC);
            BST_UNROLL
            for (int j = 0; j < VEC; j++) dx[j] += ds[j];
#endif
            bst_store_once(a.dx, row * HIDDEN + column, dx, X_TYPE, VEC);
            if (DW) {
                BST_UNROLL
                for (int j = 0; j < VEC; j++) xv[j] *= rstd;
                if (CASTING == LLAMA) bst_round_all(xv, X_TYPE, VEC);
                BST_UNROLL
                for (int j = 0; j < VEC; j++) dw[DW ? i : 0][j] = bst_fma(dv[j], xv[j], dw[DW ? i : 0][j]);
            }
        }
        turn ^= 32;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#if DW
    float *out = a.partial + (int64_t)bst_block() * HIDDEN;
    BST_UNROLL
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!inside(column)) continue;
        BST_UNROLL
        for (int j = 0; j < VEC; j++) out[column + j] = dw[i][j];
    }
#endif
}
#endif

#ifdef WIDE
/* dweight of rows too wide for registers: a block sums THREADS * VEC columns over every SPLIT-th row (blockIdx.y).
 * Reads x and dy once more; writes one partial row per blockIdx.y. */
BST_KERNEL(rms_norm_dweight_wide, rms_norm_backward_args, THREADS, 1) {
    int column = ((int)bst_block() * THREADS + (int)bst_thread()) * VEC;
    if (column >= HIDDEN) return;
    float sum[VEC], xv[VEC], dv[VEC];
    BST_UNROLL
    for (int j = 0; j < VEC; j++) sum[j] = 0;
    for (int64_t row = bst_block_y(); row < a.rows; row += bst_blocks_y()) {
        float rstd = a.rstd[row];
        bst_load(xv, a.x, bst_row_start(&a.x_map, row, FOLDED) + column, X_TYPE, VEC);
        bst_load(dv, a.dy, bst_row_start(&a.dy_map, row, FOLDED) + column, Y_TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) xv[j] *= rstd;
        if (CASTING == LLAMA) bst_round_all(xv, X_TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) sum[j] = bst_fma(dv[j], xv[j], sum[j]);
    }
    BST_UNROLL
    for (int j = 0; j < VEC; j++) a.partial[(int64_t)bst_block_y() * HIDDEN + column + j] = sum[j];
}
#endif

#ifdef REDUCE
/* dweight = the sum of the partial rows. A block takes 32 columns; its 32 warps take every 32nd row each. */
BST_KERNEL(rms_norm_dweight, rms_norm_dweight_args, 1024, 1) {
    BST_SHARED(float, sums, 32 * 33);
    int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    int column = (int)bst_block() * 32 + lane;
    float sum = 0;
    bst_wait_for_previous();
    if (column < HIDDEN) {
        for (int64_t part = warp; part < a.parts; part += 32) sum += a.partial[part * HIDDEN + column];
    }
    sums[warp * 33 + lane] = sum;
    bst_sync();
    /* Each warp now adds up one column: lane l holds what warp l found there. */
    sum = bst_warp_reduce(sums[lane * 33 + warp], 32, false);
    column = (int)bst_block() * 32 + warp;
    if (lane == 0 && column < HIDDEN) bst_store(a.dweight, column, &sum, W_TYPE, 1);
}
#endif
