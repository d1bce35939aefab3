/* row_vectors.cuh - how kernels of norms share out rows: each has THREADS threads, which take vectors of VEC of its
 * HIDDEN elements in turn, and a block has ROWS rows at a time. All four are macros of the kernel's. */
#ifndef BST_ROW_VECTORS_CUH
#define BST_ROW_VECTORS_CUH

#include "pack.cuh"

#define VECTORS    ((HIDDEN + VEC - 1) / VEC)
#define PER_THREAD ((VECTORS + THREADS - 1) / THREADS)
#define COVERED    (PER_THREAD * THREADS == VECTORS)
#define BLOCK      (THREADS * ROWS)

/* The vector `i` of this thread begins at this column; threads of a row read neighbouring vectors. */
BST_DEVICE int column_of(int i, int lane) { return (i * THREADS + lane) * VEC; }
BST_DEVICE bool inside(int column) { return COVERED || column < HIDDEN; }

/* Writes this block's partial row. The row groups of a block add theirs up in `sums`, one after the other. */
BST_DEVICE void bst_store_partial(float *out, float *sums, float of_thread[][VEC], int group, int lane) {
    for (int g = 0; g < ROWS; g++) {
        if (g == group) {
            BST_EACH(i, PER_THREAD) {
                int column = column_of(i, lane);
                if (!inside(column)) continue;
                float *to = (ROWS > 1 ? sums : out) + column;
                BST_EACH(j, VEC) to[j] = g ? to[j] + of_thread[i][j] : of_thread[i][j];
            }
        }
        if (ROWS > 1) bst_sync();
    }
    if (ROWS > 1)
        for (int c = (int)bst_thread(); c < HIDDEN; c += BLOCK) out[c] = sums[c];
}

#endif
