/* glu.cu - y = act(gate) * up, or as its activation says, or act(gate), and its gradients, element by element.
 *
 * Macros: TYPE (a code of dtype.h), UNIT and LIMITED (an activation, and which limit, of activation.h); VEC elements
 * of an access to y: a thread has one to each tensor; H_VEC: 0, or gate and up are the even and odd columns of
 * one tensor, and this many elements of an access to it; THREADS of a block; FLAT: every tensor is one block of memory
 * and y has a.count elements; else COLUMNS of a row of y, CHUNKS blocks a row, FOLDED: one stride describes all rows of
 * each tensor; WITH_UP: there is an up; backward: DGATE, DUP, WITH_Y what is wanted, which may take an input's place.
 *
 * forward   reads gate and up, writes y. Bytes: 3 * size an element (6 in bf16). Measured on an H200, bf16, silu: 276
 *           us at 16384 x 12288 (1.0 of the copy bandwidth).
 * backward  reads dy, gate and up, writes dgate and dup. Bytes: 5 * size. 465 us (1.0). The activation is computed
 *           again: nothing was saved. With y, which forward wrote: 6 * size, 144 us at 4096 x 12288 (0.98).
 * With silu two special-function operations an element, 40 % of their rate at full bandwidth in bf16 (calculated,
 * H200). */
#include "gated_unit.cuh"
#include "glu_args.h"
#include "pack.cuh"
#include "row_map.h"

/* Where a row of y has its elements, or of h its pairs, in one of the tensors. */
BST_DEVICE int64_t start_of(const glu_args *a, int tensor, int64_t row) {
    return FLAT ? 0 : bst_row_start(&a->map[tensor], row, FOLDED);
}

/* This block's row, and this thread's first column. */
BST_DEVICE int64_t row_of_block(void) { return FLAT ? 0 : bst_block() / CHUNKS; }
BST_DEVICE int64_t column_of_thread(void) {
    int64_t chunk = FLAT ? bst_block() : bst_block() % CHUNKS;
    return (chunk * THREADS + bst_thread()) * VEC;
}

/* This thread's gates and ups, which begin at elements `gate` and `up`. Without up what leaves the activation alone. */
BST_DEVICE void load_unit(float *g, float *u, const glu_args *a, int64_t gate, int64_t up, bool want_up) {
#if H_VEC
    float h[2 * VEC];
    BST_UNROLL
    for (int j = 0; j < 2 * VEC; j += H_VEC) bst_load(h + j, a->at[GLU_GATE], gate + j, TYPE, H_VEC);
    BST_EACH(j, VEC) g[j] = h[2 * j], u[j] = h[2 * j + 1];
#else
    const bst_raw gate_raw = bst_raw_at(a->at[GLU_GATE], gate, TYPE, VEC);
    const bst_raw up_raw = WITH_UP && want_up ? bst_raw_at(a->at[GLU_UP], up, TYPE, VEC) : gate_raw;
    bst_unpack(g, gate_raw, TYPE, VEC);
    bst_unpack(u, up_raw, TYPE, VEC);
    if (!WITH_UP)
        BST_EACH(j, VEC) u[j] = bst_no_up(UNIT);
#endif
}

/* Their gradients. */
BST_DEVICE void store_unit(const float *g, const float *u, const glu_args *a, int64_t dgate, int64_t dup) {
#if H_VEC
    float h[2 * VEC];
    BST_EACH(j, VEC) h[2 * j] = g[j], h[2 * j + 1] = u[j];
    BST_UNROLL
    for (int j = 0; j < (DGATE ? 2 * VEC : 0); j += H_VEC)
        bst_store_once(a->at[GLU_DGATE], dgate + j, h + j, TYPE, H_VEC);
#else
    if (DGATE) bst_store_once(a->at[GLU_DGATE], dgate, g, TYPE, VEC);
    if (DUP) bst_store_once(a->at[GLU_DUP], dup, u, TYPE, VEC);
#endif
}

/* From y's column to that of a pair, or of a gate or up that lies in a tensor of its own. */
BST_DEVICE int64_t unit_column(int64_t column) { return H_VEC ? 2 * column : column; }

#ifdef FORWARD
BST_KERNEL(glu_forward, glu_args, THREADS, 1) {
    const int64_t row = row_of_block(), column = column_of_thread(), columns = FLAT ? a.count : COLUMNS;
    const int64_t gate = start_of(&a, GLU_GATE, row) + unit_column(column);
    const int64_t up = WITH_UP && !H_VEC ? start_of(&a, GLU_UP, row) + column : 0;
    bst_wait_for_previous();
    if (column >= columns) return;
    float g[VEC], u[VEC];
    load_unit(g, u, &a, gate, up, true);
    BST_EACH(j, VEC) u[j] = bst_gated_within(g[j], u[j], UNIT, a.alpha, LIMITED, a.limit, TYPE);
    bst_store_once(a.at[GLU_Y], row * columns + column, u, TYPE, VEC);
}
#endif

#ifdef BACKWARD
/* dup = dy act(gate), dgate = dy up act'(gate); y is computed as forward does, so that its bits are the same. A thread
 * reads all that it needs before it writes, so a result may take an input's place. */
BST_KERNEL(glu_backward, glu_args, THREADS, 1) {
    const int64_t row = row_of_block(), column = column_of_thread(), columns = FLAT ? a.count : COLUMNS;
    const int64_t gate = start_of(&a, GLU_GATE, row) + unit_column(column);
    const int64_t up = WITH_UP && !H_VEC ? start_of(&a, GLU_UP, row) + column : 0;
    const int64_t dy = start_of(&a, GLU_DY, row) + column;
    /* What is not wanted has no map. */
    const int64_t dgate = DGATE ? start_of(&a, GLU_DGATE, row) + unit_column(column) : 0;
    const int64_t dup = DUP ? start_of(&a, GLU_DUP, row) + column : 0;
    const int64_t y = WITH_Y ? start_of(&a, GLU_Y, row) + column : 0;
    bst_wait_for_previous();
    if (column >= columns) return;
    float d[VEC], g[VEC], u[VEC];
    const bst_raw dy_raw = bst_raw_at(a.at[GLU_DY], dy, TYPE, VEC);
    load_unit(g, u, &a, gate, up, DGATE || WITH_Y || LIMITED); /* dup alone needs no up */
    bst_unpack(d, dy_raw, TYPE, VEC);
    BST_EACH(j, VEC) {
        const bst_gated_gradients out =
            bst_gated_within_backward(d[j], g[j], u[j], UNIT, a.alpha, LIMITED, a.limit, TYPE);
        d[j] = out.y;
        g[j] = out.dgate;
        u[j] = out.dup;
    }
    store_unit(g, u, &a, dgate, dup);
    if (WITH_Y) bst_store_once(a.at[GLU_Y], y, d, TYPE, VEC);
}
#endif
