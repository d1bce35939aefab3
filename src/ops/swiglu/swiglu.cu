/* swiglu.cu - y = silu(gate) * up and its gradients, element by element.
 *
 * Macros: TYPE (a code of dtype.h); VEC elements of an access; THREADS of a block; EACH accesses of a thread to each
 * tensor, all under way at once; FLAT: every tensor is one block of memory and has a.count elements; else COLUMNS of a
 * row, CHUNKS blocks a row, FOLDED: one stride describes all rows of each tensor; backward: DGATE, DUP, Y what is
 * wanted, which may take the place of an input.
 *
 * forward   reads gate and up, writes y. Bytes: 3 * size an element (6 in bf16). Measured on an H200, bf16: 276 us at
 *           16384 x 12288 (1.0 of the copy bandwidth).
 * backward  reads dy, gate and up, writes dgate and dup. Bytes: 5 * size. 465 us (1.0). The sigmoid is computed again:
 *           nothing was kept. With y, which forward wrote: 6 * size, 144 us at 4096 x 12288 (0.98).
 * Two special-function operations an element, 40 % of their rate at full bandwidth in bf16 (calculated, H200).
 */
#include "pack.cuh"
#include "row_map.h"
#include "sigmoid.cuh"
#include "swiglu_args.h"

BST_DEVICE int64_t start_of(const bst_row_map *map, int64_t row) { return FLAT ? 0 : bst_row_start(map, row, FOLDED); }

/* This block's row, and this thread's first column and the columns of the row. */
BST_DEVICE int64_t row_of_block(void) { return FLAT ? 0 : bst_block() / CHUNKS; }
BST_DEVICE int64_t first_column(void) {
    int64_t chunk = FLAT ? bst_block() : bst_block() % CHUNKS;
    return (chunk * EACH * THREADS + bst_thread()) * VEC;
}

#ifdef FORWARD
BST_KERNEL(swiglu_forward, swiglu_forward_args, THREADS, 1) {
    const int64_t row = row_of_block(), first = first_column(), columns = FLAT ? a.count : COLUMNS;
    const int64_t gate = start_of(&a.gate_map, row), up = start_of(&a.up_map, row), y = row * columns;
    bst_raw gate_raw[EACH], up_raw[EACH];
    bst_wait_for_previous();
    BST_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int64_t column = first + i * THREADS * VEC;
        if (column >= columns) continue;
        gate_raw[i] = bst_raw_at(a.gate, gate + column, TYPE, VEC);
        up_raw[i] = bst_raw_at(a.up, up + column, TYPE, VEC);
    }
    BST_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int64_t column = first + i * THREADS * VEC;
        if (column >= columns) continue;
        float g[VEC], u[VEC];
        bst_unpack(g, gate_raw[i], TYPE, VEC);
        bst_unpack(u, up_raw[i], TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) u[j] *= bst_quotient(g[j], 1.0f + bst_exp_minus(g[j], TYPE), TYPE);
        bst_store_once(a.y, y + column, u, TYPE, VEC);
    }
}
#endif

#ifdef BACKWARD
/* With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s)); y is computed as forward does, so that
 * its bits are the same. A thread reads all that it needs of an element before it writes there, so a result may take an
 * input's place. */
BST_KERNEL(swiglu_backward, swiglu_backward_args, THREADS, 1) {
    const int64_t row = row_of_block(), first = first_column(), columns = FLAT ? a.count : COLUMNS;
    const int64_t dy = start_of(&a.dy_map, row), gate = start_of(&a.gate_map, row), up = start_of(&a.up_map, row);
    /* What is not wanted has no map. */
    const int64_t dgate = DGATE ? start_of(&a.dgate_map, row) : 0, dup = DUP ? start_of(&a.dup_map, row) : 0;
    const int64_t y = Y ? start_of(&a.y_map, row) : 0;
    bst_raw dy_raw[EACH], gate_raw[EACH], up_raw[EACH];
    bst_wait_for_previous();
    BST_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int64_t column = first + i * THREADS * VEC;
        if (column >= columns) continue;
        dy_raw[i] = bst_raw_at(a.dy, dy + column, TYPE, VEC);
        gate_raw[i] = bst_raw_at(a.gate, gate + column, TYPE, VEC);
        if (DGATE || Y) up_raw[i] = bst_raw_at(a.up, up + column, TYPE, VEC);
    }
    BST_UNROLL
    for (int i = 0; i < EACH; i++) {
        const int64_t column = first + i * THREADS * VEC;
        if (column >= columns) continue;
        float d[VEC], g[VEC], u[VEC] = {0};
        bst_unpack(d, dy_raw[i], TYPE, VEC);
        bst_unpack(g, gate_raw[i], TYPE, VEC);
        if (DGATE || Y) bst_unpack(u, up_raw[i], TYPE, VEC);
        BST_UNROLL
        for (int j = 0; j < VEC; j++) {
            float e = 1.0f + bst_exp_minus(g[j], TYPE), s = bst_quotient(1.0f, e, TYPE), ds = d[j] * s;
            float slope = bst_fma(g[j], 1.0f - s, 1.0f), gate = g[j];
            /* gate s is a quotient, for float32, where a product with s, rounded twice, would show. */
            g[j] = TYPE == BST_F32_CODE ? d[j] * bst_quotient(gate, e, TYPE) : gate * ds;
            float dg = TYPE == BST_F32_CODE ? d[j] * u[j] * s * slope : u[j] * (ds * slope);
            if (Y) d[j] = u[j] * bst_quotient(gate, e, TYPE);
            if (DGATE) u[j] = dg;
        }
        if (DGATE) bst_store_once(a.dgate, dgate + column, u, TYPE, VEC);
        if (DUP) bst_store_once(a.dup, dup + column, g, TYPE, VEC);
        if (Y) bst_store_once(a.y, y + column, d, TYPE, VEC);
    }
}
#endif
