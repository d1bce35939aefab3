/* norm.cu - RMSNorm and LayerNorm, forward and backward.
 *
 * Macros: HIDDEN; X_TYPE, W_TYPE, Y_TYPE (codes of dtype.h; y's type is dy's); CASTING (norm_args.h); HAS_WEIGHT;
 * CENTRE: the mean is subtracted; ADD: forward: one more than the code of the type of a residual that is added to x
 * first, and what is normalised is the sum as it is written, rounded; backward: x is that sum, and dsum, the gradient
 * that reaches it from elsewhere, is added to dx; VEC elements of an access; THREADS of a row, ROWS of a block (THREADS
 * * ROWS threads); SOURCE (norm_args.h); FOLDED: one stride describes all rows; forward: HAS_BIAS, AFTER: a
 * residual of y's type is added to y; backward: DX, DW, DB what is wanted; STAGES of the ring.
 *
 * forward   reads x, weight (from the cache after the first rows); writes y and, if wanted, mean and rstd. Bytes: x +
 *           y. Measured on an H200, bf16: 67 us at 16384 x 4096 (0.94 of the copy bandwidth; an elementwise kernel of
 *           PyTorch's that reads and writes as much took 65 in the same run), 17.3 us at 131072 x 128.
 *           ADD: reads residual too and writes sum. Bytes: x + residual + sum + y. 134 us at 16384 x 4096 (0.95).
 * backward  persistent: each block takes every gridDim-th group of rows, sums its share of dweight and dbias in float32
 *           registers and writes one partial row at its end. Reads x, dy; writes dx. Bytes: x + dy + dx, and blocks *
 *           HIDDEN * 4 (of dweight and dbias 8) written and read back by column_sums, mostly within the L2.
 *           Measured on an H200, bf16: 107 us at 16384 x 4096 (0.88), 29.4 us at 131072 x 128 (0.80).
 *           ADD: reads dsum too. Bytes: x + dy + dsum + dx, and the partial rows. 131 us at 16384 x 4096 (0.96).
 * No floating-point atomics: the order of every sum is fixed by the launch configuration. */
#include "pack.cuh"
#include "reduce.cuh"
#include "ring.cuh"
#include "row_vectors.cuh"

#include "norm_args.h"

#define ROUND_N (CASTING == NORM_LLAMA && !CENTRE) /* before the product with the weight */
#define HELD    (SOURCE != NORM_AGAIN)
/* Loops over vectors in registers have no rolled form. Of those that are read at each use, two are in flight in the
 * backward pass: the compiler would take so many in float32 that registers spill. */
#if HELD
#define UNROLL_VECTORS BST_UNROLL
#elif defined BACKWARD
#define UNROLL_VECTORS BST_UNROLL_TWICE
#else
#define UNROLL_VECTORS
#endif

/* What rows are multiplied by, from the weight as it lies in memory. */
BST_DEVICE void unpack_weight(float *w, bst_raw raw) {
    if (HAS_WEIGHT) bst_unpack(w, raw, W_TYPE, VEC);
    BST_EACH(j, VEC) {
        if (!HAS_WEIGHT) w[j] = 1.0f;
        if (HAS_WEIGHT && CASTING == NORM_GEMMA) w[j] += 1.0f;
    }
}

BST_DEVICE bst_raw raw_weight(const void *weight, int column) {
    bst_raw none = {{0, 0, 0, 0}};
    return HAS_WEIGHT ? bst_raw_at(weight, column, W_TYPE, VEC) : none;
}

/* A vector of x, less the mean. */
BST_DEVICE void unpack_x(float *x, bst_raw raw, float mean) {
    bst_unpack(x, raw, X_TYPE, VEC);
    BST_EACH(j, CENTRE ? VEC : 0) x[j] -= mean;
}

#ifdef FORWARD
#define INPUTS 3
#define R_TYPE (ADD - 1)
/* Whether there is this input. */
#define GIVEN(input) ((input) == NORM_X || ((input) == NORM_RESIDUAL && ADD) || ((input) == NORM_AFTER && AFTER))
/* The vector at this column, packed: out of registers where the row is held there. */
#define PACKED(input, i, column) (HELD ? held[input][HELD ? i : 0] : bst_raw_at(in[input], column, type_of(input), VEC))

BST_DEVICE int type_of(int input) { return input == NORM_X ? X_TYPE : input == NORM_RESIDUAL ? R_TYPE : Y_TYPE; }

BST_KERNEL(norm_forward, norm_forward_args, BLOCK, 1) {
    BST_SHARED(float, scratch, CENTRE ? 64 : 32);
    int lane = (int)bst_thread() % THREADS;
    int64_t row = (int64_t)bst_block() * ROWS + bst_thread() / THREADS;
    bool live = row < a.rows;
    const void *in[INPUTS];
    bst_raw held[INPUTS][HELD ? PER_THREAD : 1];
    float v[VEC], w[VEC], squares = 0, total = 0, mean = 0;
    BST_EACH(k, INPUTS)
        if (GIVEN(k)) in[k] = bst_at(a.in[k], live ? bst_row_start(&a.map[k], row, FOLDED) : 0, type_of(k));
    bst_wait_for_previous();
    if (HELD) {
        BST_EACH(i, PER_THREAD) {
            if (!live || !inside(column_of(i, lane))) continue;
            BST_EACH(k, INPUTS)
                if (GIVEN(k)) held[k][HELD ? i : 0] = bst_raw_at(in[k], column_of(i, lane), type_of(k), VEC);
        }
    }
    UNROLL_VECTORS
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!live || !inside(column)) continue;
        bst_unpack(v, PACKED(NORM_X, i, column), X_TYPE, VEC);
#if ADD
        bst_unpack(w, PACKED(NORM_RESIDUAL, i, column), R_TYPE, VEC);
        BST_EACH(j, VEC) v[j] += w[j];
        bst_raw sum = bst_pack(v, X_TYPE, VEC);
        bst_write(bst_at_out(a.sum, row * HIDDEN + column, X_TYPE), sum, VEC * bst_type_size(X_TYPE));
        bst_unpack(v, sum, X_TYPE, VEC);
        held[NORM_X][HELD ? i : 0] = sum;
#endif
        BST_EACH(j, VEC) {
            if (CENTRE)
                total += v[j];
            else
                squares = bst_fma(v[j], v[j], squares);
        }
    }
    if (ADD) in[NORM_X] = bst_at(a.sum, row * HIDDEN, X_TYPE); /* each thread reads what it wrote itself */
    if (CENTRE) {
        mean = bst_group_sum(total, THREADS, scratch + 32) * (1.0f / HIDDEN);
        UNROLL_VECTORS
        for (int i = 0; i < PER_THREAD; i++) {
            if (!live || !inside(column_of(i, lane))) continue;
            unpack_x(v, PACKED(NORM_X, i, column_of(i, lane)), mean);
            BST_EACH(j, VEC) squares = bst_fma(v[j], v[j], squares);
        }
    }
    squares = bst_group_sum(squares, THREADS, scratch);
    float rstd = bst_rsqrt(squares * (1.0f / HIDDEN) + a.eps);
    if (!live) return;
    if (a.rstd && lane == 0) a.rstd[row] = rstd;
    if (CENTRE && a.mean && lane == 0) a.mean[row] = mean;
    UNROLL_VECTORS
    for (int i = 0; i < PER_THREAD; i++) {
        int column = column_of(i, lane);
        if (!inside(column)) continue;
        unpack_x(v, PACKED(NORM_X, i, column), mean);
        unpack_weight(w, raw_weight(a.weight, column));
        BST_EACH(j, VEC) v[j] *= rstd;
        if (ROUND_N) bst_round_all(v, X_TYPE, VEC);
        BST_EACH(j, VEC) v[j] *= w[j];
        if (HAS_BIAS) bst_load(w, a.bias, column, W_TYPE, VEC);
        BST_EACH(j, HAS_BIAS ? VEC : 0) v[j] += w[j];
        if (AFTER) bst_unpack(w, PACKED(NORM_AFTER, i, column), Y_TYPE, VEC);
        BST_EACH(j, AFTER ? VEC : 0) v[j] += w[j];
        bst_store(a.y, row * HIDDEN + column, v, Y_TYPE, VEC);
    }
}
#endif

#if defined BACKWARD || defined WIDE
/* Adds a row's share of dweight to its sum: dy n, n = x rstd as forward rounded it. Overwrites x. */
BST_DEVICE void add_to_dweight(float *sum, float *x, const float *dy, float rstd) {
    BST_EACH(j, VEC) x[j] *= rstd;
    if (ROUND_N) bst_round_all(x, X_TYPE, VEC);
    BST_EACH(j, VEC) sum[j] = bst_fma(dy[j], x[j], sum[j]);
}
#endif

#ifdef BACKWARD
#define INPUTS (2 + ADD)

BST_DEVICE int type_of(int input) { return input == NORM_DY ? Y_TYPE : X_TYPE; }

BST_DEVICE const void *row_start(const norm_backward_args *a, int input, int64_t row) {
    return bst_at(a->in[input], bst_row_start(&a->map[input], row, FOLDED), type_of(input));
}

/* The row that this thread works on. */
typedef struct row_state {
    const void *in[INPUTS];
    float rstd, mean;
    bool live;
} row_state;

BST_DEVICE row_state row_at(const norm_backward_args *a, int64_t row) {
    row_state r = {{a->in[0], a->in[1]}, 0, 0, row < a->rows};
    if (!r.live) return r;
    BST_EACH(k, INPUTS) r.in[k] = row_start(a, k, row);
    r.rstd = a->rstd[row];
    if (CENTRE) r.mean = a->mean[row];
    return r;
}

/* How rows come, and where they are between their two uses. Each SOURCE has its struct `source` and
 *   rows_open    before the kernel before this one has ended
 *   rows_start   prefetches the first rows
 *   rows_next    makes `row` the current one, and prefetches another
 *   vector       vector `i` of an input of that row, packed; weight_of: of the weight
 *   rows_done    after each row */

#if SOURCE == NORM_BULK
/* One thread issues bulk copies of whole rows: one block a multiprocessor, STAGES rows in shared memory or in flight,
 * the weight in registers. For rows that each take a block, on chips with bulk copies. */
#define ROW_BYTES (HIDDEN * 16 / VEC)
typedef struct source {
    unsigned char *ring;
    uint64_t *arrived; /* [STAGES] */
    bst_stage stage;
    bst_raw weight[PER_THREAD], held[INPUTS][PER_THREAD];
    row_state now; /* its rstd and mean */
    float next_rstd, next_mean;
} source;

BST_DEVICE void prefetch(const norm_backward_args *a, const source *s, int stage, int64_t row) {
    if (row >= a->rows) return;
    bst_barrier_expect(&s->arrived[stage], INPUTS * ROW_BYTES);
    BST_EACH(k, INPUTS)
        bst_bulk_read(s->ring + (stage * INPUTS + k) * ROW_BYTES, row_start(a, k, row), ROW_BYTES, &s->arrived[stage]);
}

BST_DEVICE void rows_open(source *s, unsigned char *ring, uint64_t *arrived) {
    s->ring = ring;
    s->arrived = arrived;
    s->stage.index = 0, s->stage.parity = 0;
    if (bst_thread() == 0) {
        for (int i = 0; i < STAGES; i++) bst_barrier_init(&arrived[i], 1);
        bst_barrier_fence_init();
    }
    bst_sync();
}

BST_DEVICE void rows_start(source *s, const norm_backward_args *a, int64_t row, int64_t step, int lane) {
    if (lane == 0)
        for (int i = 0; i < STAGES - 1; i++) prefetch(a, s, i, row + i * step);
    BST_EACH(i, PER_THREAD)
        if (inside(column_of(i, lane))) s->weight[i] = raw_weight(a->weight, column_of(i, lane));
    s->now.live = true;
    s->next_rstd = row < a->rows ? a->rstd[row] : 0.0f;
    s->next_mean = CENTRE && row < a->rows ? a->mean[row] : 0.0f;
}

BST_DEVICE void rows_next(source *s, const norm_backward_args *a, int64_t row, int64_t step, int lane) {
    s->now.rstd = s->next_rstd;
    s->now.mean = s->next_mean;
    if (row + step < a->rows) s->next_rstd = a->rstd[row + step];
    if (CENTRE && row + step < a->rows) s->next_mean = a->mean[row + step];
    /* The stage before this one is free: all threads had taken its row before they agreed on that row's sum. */
    if (lane == 0) prefetch(a, s, bst_stage_before(&s->stage, STAGES), row + (STAGES - 1) * step);
    bst_barrier_wait(&s->arrived[s->stage.index], s->stage.parity);
    const unsigned char *here = s->ring + s->stage.index * INPUTS * ROW_BYTES;
    BST_EACH(i, PER_THREAD) {
        if (!inside(column_of(i, lane))) continue;
        BST_EACH(k, INPUTS) s->held[k][i] = bst_read(here + k * ROW_BYTES + column_of(i, lane) * 16 / VEC, 16);
    }
}

BST_DEVICE bst_raw vector(const source *s, int input, int i, int column) { return s->held[input][i]; }
BST_DEVICE bst_raw weight_of(const source *s, const void *weight, int i, int column) { return s->weight[i]; }
BST_DEVICE void rows_done(source *s) { bst_next_stage(&s->stage, STAGES); }

#else
/* Each thread loads its own vectors: into registers, with two STAGES the next row's while this row is worked on; too
 * wide for these: at each use. */
#define AHEAD (HELD && STAGES > 1)
typedef struct source {
    row_state now, next;
    bst_raw held[INPUTS][HELD ? PER_THREAD : 1], ahead[INPUTS][AHEAD ? PER_THREAD : 1];
} source;

BST_DEVICE row_state load_row(bst_raw (*to)[HELD ? PER_THREAD : 1], const norm_backward_args *a, int64_t row,
                              int lane) {
    row_state r = row_at(a, row);
    BST_EACH(i, HELD ? PER_THREAD : 0) {
        int column = column_of(i, lane);
        if (!r.live || !inside(column)) continue;
        BST_EACH(k, INPUTS) to[k][HELD ? i : 0] = bst_raw_once(r.in[k], column, type_of(k), VEC);
    }
    return r;
}

BST_DEVICE void rows_open(source *s, unsigned char *unused, uint64_t *unused_too) {}
BST_DEVICE void rows_start(source *s, const norm_backward_args *a, int64_t row, int64_t step, int lane) {
#if AHEAD
    s->next = load_row(s->ahead, a, row, lane);
#endif
}

BST_DEVICE void rows_next(source *s, const norm_backward_args *a, int64_t row, int64_t step, int lane) {
#if AHEAD
    s->now = s->next;
    BST_EACH(i, PER_THREAD) {
        BST_EACH(k, INPUTS) s->held[k][i] = s->ahead[k][i];
    }
    s->next = load_row(s->ahead, a, row + step, lane);
#else
    s->now = load_row(s->held, a, row, lane);
#endif
}

BST_DEVICE bst_raw vector(const source *s, int input, int i, int column) {
    if (HELD) return s->held[input][HELD ? i : 0];
    if (input == NORM_DSUM) return bst_raw_once(s->now.in[input], column, type_of(input), VEC);
    return bst_raw_at(s->now.in[input], column, type_of(input), VEC);
}
BST_DEVICE bst_raw weight_of(const source *s, const void *weight, int i, int column) {
    return raw_weight(weight, column);
}
BST_DEVICE void rows_done(source *s) {}
#endif

/* With n = x rstd, of x less its mean with CENTRE, and m = dy w: dx = rstd (m - n mean(m n)) + dsum, dweight = sum over
 * rows of dy round(n), dbias = sum of dy. CENTRE: m less mean(m) in dx. */
BST_KERNEL(norm_backward, norm_backward_args, BLOCK, 1) {
    BST_SHARED(float, scratch, CENTRE ? 128 : 64);
    BST_SHARED(uint64_t, arrived, SOURCE == NORM_BULK ? STAGES : 1);
    BST_SHARED(float, sums, ROWS > 1 ? (DW || DB) * HIDDEN + 1 : 1);
    BST_DYNAMIC_SHARED(ring);
    int lane = ROWS > 1 ? (int)bst_thread() % THREADS : (int)bst_thread();
    int group = ROWS > 1 ? (int)bst_thread() / THREADS : 0;
    float dw[DW ? PER_THREAD : 1][VEC], db[DB ? PER_THREAD : 1][VEC];
    source s;
    BST_EACH(i, (DW ? PER_THREAD : 1)) {
        BST_EACH(j, VEC) dw[i][j] = 0;
    }
    BST_EACH(i, (DB ? PER_THREAD : 1)) {
        BST_EACH(j, VEC) db[i][j] = 0;
    }
    rows_open(&s, ring, arrived);
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the partial rows: it waits for this kernel's end on the multiprocessor */
    int64_t step = (int64_t)bst_blocks() * ROWS, first = (int64_t)bst_block() * ROWS;
    rows_start(&s, &a, first + group, step, lane);
    for (int buffer = 0; first < a.rows; first += step, buffer ^= 32) {
        int64_t row = first + group;
        float xv[VEC], dv[VEC], w[VEC], projection = 0, shift = 0;
        rows_next(&s, &a, row, step, lane);
        if (DX) {
            UNROLL_VECTORS
            for (int i = 0; i < PER_THREAD; i++) {
                int column = column_of(i, lane);
                if (!s.now.live || !inside(column)) continue;
                unpack_x(xv, vector(&s, NORM_X, i, column), s.now.mean);
                bst_unpack(dv, vector(&s, NORM_DY, i, column), Y_TYPE, VEC);
                unpack_weight(w, weight_of(&s, a.weight, i, column));
                BST_EACH(j, VEC) {
                    projection = bst_fma(dv[j] * w[j], xv[j], projection);
                    if (CENTRE) shift = bst_fma(dv[j], w[j], shift);
                }
            }
            projection = bst_group_sum(projection, THREADS, scratch + buffer);
            if (CENTRE) shift = bst_group_sum(shift, THREADS, scratch + 64 + buffer) * (1.0f / HIDDEN);
        }
        float rstd = s.now.rstd, slope = projection * rstd * rstd * (1.0f / HIDDEN);
        UNROLL_VECTORS
        for (int i = 0; i < PER_THREAD; i++) {
            int column = column_of(i, lane);
            if (!s.now.live || !inside(column)) continue;
            unpack_x(xv, vector(&s, NORM_X, i, column), s.now.mean);
            bst_unpack(dv, vector(&s, NORM_DY, i, column), Y_TYPE, VEC);
            if (DX) {
                float dx[VEC];
                unpack_weight(w, weight_of(&s, a.weight, i, column));
                BST_EACH(j, VEC) dx[j] = rstd * (dv[j] * w[j] - xv[j] * slope - shift);
#if ADD
                float dsum[VEC];
                bst_unpack(dsum, vector(&s, NORM_DSUM, i, column), X_TYPE, VEC);
                BST_EACH(j, VEC) dx[j] += dsum[j];
#endif
                bst_store_once(a.dx, row * HIDDEN + column, dx, X_TYPE, VEC);
            }
            if (DW) add_to_dweight(dw[DW ? i : 0], xv, dv, rstd);
            BST_EACH(j, DB ? VEC : 0) db[DB ? i : 0][j] += dv[j];
        }
        rows_done(&s);
    }
    float *out = a.partial + (int64_t)bst_block() * (DW + DB) * HIDDEN;
    if (DW) bst_store_partial(out, sums, dw, group, lane);
    if (DW && DB && ROWS > 1) bst_sync(); /* `sums` has been read */
    if (DB) bst_store_partial(out + DW * HIDDEN, sums, db, group, lane);
}
#endif

#ifdef WIDE
/* dweight and dbias of rows too wide for registers: a block sums THREADS * VEC columns over every gridDim.y-th row.
 * Reads x and dy once more; writes one partial row per blockIdx.y. */
BST_KERNEL(norm_dweight_wide, norm_backward_args, THREADS, 1) {
    int column = ((int)bst_block() * THREADS + (int)bst_thread()) * VEC;
    if (column >= HIDDEN) return;
    float dw[VEC], db[VEC], xv[VEC], dv[VEC];
    BST_EACH(j, VEC) dw[j] = db[j] = 0;
    for (int64_t row = bst_block_y(); row < a.rows; row += bst_blocks_y()) {
        bst_raw x = bst_raw_at(a.in[NORM_X], bst_row_start(&a.map[NORM_X], row, FOLDED) + column, X_TYPE, VEC);
        unpack_x(xv, x, CENTRE ? a.mean[row] : 0.0f);
        bst_load(dv, a.in[NORM_DY], bst_row_start(&a.map[NORM_DY], row, FOLDED) + column, Y_TYPE, VEC);
        if (DW) add_to_dweight(dw, xv, dv, a.rstd[row]);
        BST_EACH(j, DB ? VEC : 0) db[j] += dv[j];
    }
    float *out = a.partial + (int64_t)bst_block_y() * (DW + DB) * HIDDEN + column;
    BST_EACH(j, VEC) {
        if (DW) out[j] = dw[j];
        if (DB) out[DW * HIDDEN + j] = db[j];
    }
}
#endif
