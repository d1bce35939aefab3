/* gated_rms_norm.cu - the RMS norm with a gate, forward and backward.
 *
 * Macros: HIDDEN: columns that are normed together, GROUPS of them a row; X_TYPE, G_TYPE, W_TYPE, Y_TYPE (codes of
 * dtype.h; y's type is dy's); EXACT_TYPE: how exact the gate's arithmetic is; ACTIVATION (gated_rms_norm_args.h);
 * GATE_FIRST: x is multiplied with the gate before the norm; VEC elements of an access; THREADS of a group's row, ROWS
 * of a block (THREADS * ROWS threads); HELD: rows stay in registers between their two uses, else they are read again;
 * FOLDED: one stride describes all rows of each tensor; backward: AHEAD: the next row is read while this one is worked
 * on; RESIDENT blocks a multiprocessor, for which there are registers; DX, DGATE, DW what is wanted.
 *
 * forward   reads x, gate, weight (from the cache after the first rows); writes y. Bytes: x + gate + y, 6 an element in
 *           bf16: at 3.35 TB/s (H100) 60 us at 262144 x 128. Measured in a step of Qwen3.5-4B's shape: 65 us.
 * backward  persistent: each block takes every so many-th row of one group, sums its share of dweight in float32
 *           registers (rows that are too wide for these: in its partial row) and writes one partial row at its end. The
 *           root and the gate are computed again: nothing was saved. Reads x, gate, dy; writes dx and dgate. Bytes: x +
 *           gate + dy + dx + dgate, 10 an element in bf16, and the partial rows, written and read back by column_sums,
 *           mostly within the L2: 100 us at 262144 x 128. Measured there: 114 us.
 *           In bf16 four special-function operations an element, 40 % of their rate at full bandwidth (calculated,
 *           H100).
 * No floating-point atomics: the order of every sum is fixed by the launch configuration. */
#include "gated_unit.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "row_vectors.cuh"

#include "gated_rms_norm_args.h"
#include "gated_rms_norm_math.h"

/* Loops over vectors in registers have no rolled form. */
#if HELD
#define UNROLL_VECTORS BST_UNROLL
#else
#define UNROLL_VECTORS BST_ROLLED
#endif

BST_DEVICE int type_of(int input) { return input == GATED_X ? X_TYPE : input == GATED_GATE ? G_TYPE : Y_TYPE; }

/* This thread's place in its row, and the row's in its block; the group of the block's rows, and the first column that
 * it has. */
BST_DEVICE int lane_of_thread(void) { return ROWS > 1 ? (int)bst_thread() % THREADS : (int)bst_thread(); }
BST_DEVICE int row_of_thread(void) { return ROWS > 1 ? (int)bst_thread() / THREADS : 0; }
BST_DEVICE int first_column(void) { return GROUPS > 1 ? (int)(bst_block() % GROUPS) * HIDDEN : 0; }

/* Where a group of a row begins. */
BST_DEVICE const void *row_start(const gated_rms_norm_args *a, int input, int64_t row) {
    return bst_at(a->in[input], bst_row_start(&a->map[input], row, FOLDED) + first_column(), type_of(input));
}

#ifdef FORWARD
/* A vector of what is normed, out of vectors of x and of the gate. */
BST_DEVICE void unpack_normed(float *u, bst_raw x, bst_raw gate) {
    bst_unpack(u, x, X_TYPE, VEC);
    if (!GATE_FIRST) return;
    float g[VEC];
    bst_unpack(g, gate, G_TYPE, VEC);
    BST_EACH(j, VEC) u[j] *= norm_gate_of(g[j], ACTIVATION, EXACT_TYPE).value;
}

BST_KERNEL(gated_rms_norm_forward, gated_rms_norm_args, BLOCK, 1) {
    BST_SHARED(float, scratch, 32);
    const int lane = lane_of_thread(), first = first_column();
    const int64_t row = (int64_t)(bst_block() / GROUPS) * ROWS + row_of_thread();
    const bool live = row < a.rows;
    const void *x = row_start(&a, GATED_X, live ? row : 0), *gate = row_start(&a, GATED_GATE, live ? row : 0);
    bst_raw held_x[HELD ? PER_THREAD : 1], held_gate[HELD ? PER_THREAD : 1];
    float u[HELD ? PER_THREAD : 1][VEC], w[VEC], squares = 0;
    bst_wait_for_previous();
    BST_EACH(i, HELD ? PER_THREAD : 0) {
        if (!live || !inside(column_of(i, lane))) continue;
        held_x[HELD ? i : 0] = bst_raw_at(x, column_of(i, lane), X_TYPE, VEC);
        held_gate[HELD ? i : 0] = bst_raw_at(gate, column_of(i, lane), G_TYPE, VEC);
    }
    UNROLL_VECTORS
    for (int i = 0; i < PER_THREAD; i++) {
        const int column = column_of(i, lane), at = HELD ? i : 0;
        if (!live || !inside(column)) continue;
        if (!HELD) held_x[0] = bst_raw_at(x, column, X_TYPE, VEC);
        if (!HELD && GATE_FIRST) held_gate[0] = bst_raw_at(gate, column, G_TYPE, VEC);
        unpack_normed(u[at], held_x[at], held_gate[at]);
        BST_EACH(j, VEC) squares = bst_fma(u[at][j], u[at][j], squares);
    }
    squares = bst_group_sum(squares, THREADS, scratch);
    const float rstd = bst_rsqrt(squares * (1.0f / HIDDEN) + a.eps);
    if (!live) return;
    UNROLL_VECTORS
    for (int i = 0; i < PER_THREAD; i++) {
        const int column = column_of(i, lane), at = HELD ? i : 0;
        if (!inside(column)) continue;
        if (!HELD) held_gate[0] = bst_raw_at(gate, column, G_TYPE, VEC);
        if (!HELD) unpack_normed(u[0], bst_raw_at(x, column, X_TYPE, VEC), held_gate[0]);
        bst_load(w, a.weight, first + column, W_TYPE, VEC);
        BST_EACH(j, VEC) u[at][j] *= rstd * w[j];
        if (!GATE_FIRST) bst_unpack(w, held_gate[at], G_TYPE, VEC);
        BST_EACH(j, GATE_FIRST ? 0 : VEC) u[at][j] *= norm_gate_of(w[j], ACTIVATION, EXACT_TYPE).value;
        bst_store(a.y, row * GROUPS * HIDDEN + first + column, u[at], Y_TYPE, VEC);
    }
}
#endif

#ifdef BACKWARD
/* A row in registers, or where it begins. */
typedef struct row_state {
    const void *in[GATED_INPUTS];
    bst_raw held[GATED_INPUTS][HELD ? PER_THREAD : 1];
    bool live;
} row_state;

BST_DEVICE void load_row(row_state *r, const gated_rms_norm_args *a, int64_t row, int lane) {
    r->live = row < a->rows;
    if (!r->live) return;
    BST_EACH(k, GATED_INPUTS) r->in[k] = row_start(a, k, row);
    BST_EACH(i, HELD ? PER_THREAD : 0) {
        if (!inside(column_of(i, lane))) continue;
        BST_EACH(k, GATED_INPUTS)
            r->held[k][HELD ? i : 0] = bst_raw_once(r->in[k], column_of(i, lane), type_of(k), VEC);
    }
}

/* Of a vector: x, what is normed of it, the gradient of what the norm returns, dy, the weight, the gate. */
typedef struct terms {
    float x[VEC], u[VEC], m[VEC], dy[VEC], w[VEC];
    norm_gate gate[VEC];
} terms;

BST_DEVICE void unpack_terms(terms *t, const row_state *r, const void *weight, int i, int column) {
    bst_raw raw[GATED_INPUTS];
    BST_EACH(k, GATED_INPUTS) raw[k] = HELD ? r->held[k][HELD ? i : 0] : bst_raw_at(r->in[k], column, type_of(k), VEC);
    bst_unpack(t->x, raw[GATED_X], X_TYPE, VEC);
    bst_unpack(t->u, raw[GATED_GATE], G_TYPE, VEC);
    bst_unpack(t->dy, raw[GATED_DY], Y_TYPE, VEC);
    bst_load(t->w, weight, first_column() + column, W_TYPE, VEC);
    BST_EACH(j, VEC) {
        t->gate[j] = norm_gate_of(t->u[j], ACTIVATION, EXACT_TYPE);
        t->u[j] = GATE_FIRST ? t->x[j] * t->gate[j].value : t->x[j];
        t->m[j] = GATE_FIRST ? t->dy[j] * t->w[j] : t->dy[j] * t->w[j] * t->gate[j].value;
    }
}

/* With n = u rstd and du = rstd (m - n mean(m n)): the gate last, dx = du, dgate = dy weight n act'(gate), dweight =
 * sum over rows of dy act(gate) n; first, dx = du act(gate), dgate = du x act'(gate), dweight = sum of dy n. */
BST_KERNEL(gated_rms_norm_backward, gated_rms_norm_args, BLOCK, RESIDENT) {
    BST_SHARED(float, scratch, 128);
    BST_SHARED(float, sums, ROWS > 1 ? DW * HIDDEN + 1 : 1);
    const int lane = lane_of_thread(), first = first_column();
    const int64_t step = (int64_t)(bst_blocks() / GROUPS) * ROWS;
    int64_t row = (int64_t)(bst_block() / GROUPS) * ROWS + row_of_thread();
    float *out = a.partial + (int64_t)(bst_block() / GROUPS) * GROUPS * HIDDEN + first;
    float dw[DW && HELD ? PER_THREAD : 1][VEC];
    BST_EACH(i, (DW && HELD ? PER_THREAD : 1)) {
        BST_EACH(j, VEC) dw[i][j] = 0;
    }
    row_state now, next;
    terms t;
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the partial rows: it waits for this kernel's end on the multiprocessor */
    if (AHEAD) load_row(&next, &a, row, lane);
    bool is_first = true;
    for (int buffer = 0; row - row_of_thread() < a.rows; row += step, buffer ^= 32) {
        float squares = 0, projection = 0;
        if (AHEAD) now = next;
        load_row(AHEAD ? &next : &now, &a, AHEAD ? row + step : row, lane);
        UNROLL_VECTORS
        for (int i = 0; i < PER_THREAD; i++) {
            if (!now.live || !inside(column_of(i, lane))) continue;
            unpack_terms(&t, &now, a.weight, i, column_of(i, lane));
            BST_EACH(j, VEC) {
                squares = bst_fma(t.u[j], t.u[j], squares);
                projection = bst_fma(t.m[j], t.u[j], projection);
            }
        }
        squares = bst_group_sum(squares, THREADS, scratch + buffer);
        if (DX || GATE_FIRST) projection = bst_group_sum(projection, THREADS, scratch + 64 + buffer);
        const float rstd = bst_rsqrt(squares * (1.0f / HIDDEN) + a.eps);
        const float slope = projection * rstd * rstd * (1.0f / HIDDEN);
        UNROLL_VECTORS
        for (int i = 0; i < PER_THREAD; i++) {
            const int column = column_of(i, lane);
            if (!now.live || !inside(column)) continue;
            unpack_terms(&t, &now, a.weight, i, column);
            BST_EACH(j, VEC) {
                const float n = t.u[j] * rstd, du = rstd * (t.m[j] - t.u[j] * slope);
                const float of_weight = GATE_FIRST ? t.dy[j] * n : t.dy[j] * t.gate[j].value * n;
                if (DW && HELD) dw[HELD ? i : 0][j] += of_weight;
                if (DW && !HELD) out[column + j] = is_first ? of_weight : out[column + j] + of_weight;
                t.u[j] = GATE_FIRST ? du * t.gate[j].value : du;
                t.m[j] = (GATE_FIRST ? du * t.x[j] : t.dy[j] * t.w[j] * n) * t.gate[j].slope;
            }
            if (DX) bst_store_once(a.dx, row * GROUPS * HIDDEN + first + column, t.u, X_TYPE, VEC);
            if (DGATE) bst_store_once(a.dgate, row * GROUPS * HIDDEN + first + column, t.m, G_TYPE, VEC);
        }
        is_first = false;
    }
    if (DW && HELD) bst_store_partial(out, sums, dw, row_of_thread(), lane);
}
#endif
