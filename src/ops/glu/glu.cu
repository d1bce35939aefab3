/* glu.cu - y = act(gate) * up and its gradients, element by element.
 *
 * Macros: TYPE (a code of dtype.h), ACTIVATION (of activation.h); VEC elements of an access: a thread has one to each
 * tensor; THREADS of a block; FLAT: every tensor is one block of memory and has a.count elements; else COLUMNS of a
 * row, CHUNKS blocks a row, FOLDED: one stride describes all rows of each tensor; backward: DGATE, DUP, Y what is
 * wanted, which may take the place of an input.
 *
 * forward   reads gate and up, writes y. Bytes: 3 * size an element (6 in bf16). Measured on an H200, bf16, silu: 276
 *           us at 16384 x 12288 (1.0 of the copy bandwidth).
 * backward  reads dy, gate and up, writes dgate and dup. Bytes: 5 * size. 465 us (1.0). The activation is computed
 *           again: nothing was kept. With y, which forward wrote: 6 * size, 144 us at 4096 x 12288 (0.98).
 * With silu two special-function operations an element, 40 % of their rate at full bandwidth in bf16 (calculated,
 * H200). */
#include "gated_unit.cuh"
#include "glu_args.h"
#include "pack.cuh"
#include "row_map.h"

BST_DEVICE int64_t start_of(const bst_row_map *map, int64_t row) { return FLAT ? 0 : bst_row_start(map, row, FOLDED); }

/* This block's row, and this thread's first column. */
BST_DEVICE int64_t row_of_block(void) { return FLAT ? 0 : bst_block() / CHUNKS; }
BST_DEVICE int64_t column_of_thread(void) {
    int64_t chunk = FLAT ? bst_block() : bst_block() % CHUNKS;
    return (chunk * THREADS + bst_thread()) * VEC;
}

#ifdef FORWARD
BST_KERNEL(glu_forward, glu_forward_args, THREADS, 1) {
    const int64_t row = row_of_block(), column = column_of_thread(), columns = FLAT ? a.count : COLUMNS;
    const int64_t gate = start_of(&a.gate_map, row) + column, up = start_of(&a.up_map, row) + column;
    bst_wait_for_previous();
    if (column >= columns) return;
    const bst_raw gate_raw = bst_raw_at(a.gate, gate, TYPE, VEC), up_raw = bst_raw_at(a.up, up, TYPE, VEC);
    float g[VEC], u[VEC];
    bst_unpack(g, gate_raw, TYPE, VEC);
    bst_unpack(u, up_raw, TYPE, VEC);
    BST_UNROLL
    for (int j = 0; j < VEC; j++) u[j] = bst_gated(g[j], u[j], ACTIVATION, TYPE);
    bst_store_once(a.y, row * columns + column, u, TYPE, VEC);
}
#endif

#ifdef BACKWARD
/* dup = dy act(gate), dgate = dy up act'(gate); y is computed as forward does, so that its bits are the same. A thread
 * reads all that it needs before it writes, so a result may take an input's place. */
BST_KERNEL(glu_backward, glu_backward_args, THREADS, 1) {
    const int64_t row = row_of_block(), column = column_of_thread(), columns = FLAT ? a.count : COLUMNS;
    const int64_t dy = start_of(&a.dy_map, row), gate = start_of(&a.gate_map, row), up = start_of(&a.up_map, row);
    /* What is not wanted has no map. */
    const int64_t dgate = DGATE ? start_of(&a.dgate_map, row) : 0, dup = DUP ? start_of(&a.dup_map, row) : 0;
    const int64_t y = Y ? start_of(&a.y_map, row) : 0;
    bst_wait_for_previous();
    if (column >= columns) return;
    const bst_raw dy_raw = bst_raw_at(a.dy, dy + column, TYPE, VEC);
    const bst_raw gate_raw = bst_raw_at(a.gate, gate + column, TYPE, VEC);
    const bst_raw up_raw = DGATE || Y ? bst_raw_at(a.up, up + column, TYPE, VEC) : gate_raw; /* not read for dup */
    float d[VEC], g[VEC], u[VEC];
    bst_unpack(d, dy_raw, TYPE, VEC);
    bst_unpack(g, gate_raw, TYPE, VEC);
    bst_unpack(u, up_raw, TYPE, VEC);
    BST_UNROLL
    for (int j = 0; j < VEC; j++) {
        const bst_gated_gradients out = bst_gated_backward(d[j], g[j], u[j], ACTIVATION, TYPE);
        d[j] = out.y;
        g[j] = out.dup;
        u[j] = out.dgate;
    }
    if (DGATE) bst_store_once(a.dgate, dgate + column, u, TYPE, VEC);
    if (DUP) bst_store_once(a.dup, dup + column, g, TYPE, VEC);
    if (Y) bst_store_once(a.y, y + column, d, TYPE, VEC);
}
#endif
