/* column_sums.cu - the sum of the partial rows that the blocks of a backward kernel leave of a weight's gradient, or of
 * two gradients side by side, always in the same order.
 *
 * Macros: COLUMNS; SPLIT, those of the first gradient; TYPE of the gradients (a code of dtype.h). A block takes 32
 * columns; its 32 warps take every 32nd row each. Bytes: 4 a partial element, mostly from the L2. */
#include "pack.cuh"
#include "reduce.cuh"

#include "column_sums_args.h"

BST_KERNEL(column_sums, bst_column_sums_args, 1024, 1) {
    BST_SHARED(float, scratch, 32 * 33);
    int first = (int)bst_block() * 32, column = first + (int)bst_thread() / 32;
    bst_wait_for_previous();
    float sum = bst_column_sums(a.partial, a.parts, COLUMNS, first, scratch);
    int second = SPLIT < COLUMNS && column >= SPLIT;
    if (bst_lane() == 0 && column < COLUMNS && a.out[second])
        bst_store(a.out[second], column - second * SPLIT, &sum, TYPE, 1);
}
