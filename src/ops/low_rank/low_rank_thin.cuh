/* low_rank_thin.cuh - x a^T of layers with adapters, in float32: a block has a row of some a and THIN_ROWS rows of x;
 * its threads share out the width, with THIN_AHEAD vectors of each row in flight, and add up what they have in one
 * order.
 *
 * Macros: TYPE (of x), FACTOR (of a: TYPE or float32), THIN_ROWS (1, 2, 4, 8), THIN_VEC: elements that are read at a
 * time, 16 bytes of x, or 1. */
#ifndef BST_LOW_RANK_THIN_CUH
#define BST_LOW_RANK_THIN_CUH

#include "pack.cuh"
#include "reduce.cuh"

#include "low_rank_args.h"

#define THIN_WARPS (LOW_RANK_THREADS / 32)
#define THIN_STEP  (LOW_RANK_THREADS * THIN_VEC)
#ifndef THIN_AHEAD
#define THIN_AHEAD (THIN_ROWS <= 2 ? 4 : 2)
#endif
/* THIN_VEC elements of `a`, which are more than 16 bytes where these are wider than those of x. */
#define A_VEC   (FACTOR == BST_F32_CODE && THIN_VEC > 4 ? 4 : THIN_VEC)
#define A_PARTS (THIN_VEC / A_VEC)

/* of_warps: [THIN_WARPS * THIN_ROWS], shared. */
BST_DEVICE void make_thin(const low_rank_thin_args *a, unsigned block, float *of_warps) {
    const int rank = (int)(block % (unsigned)a->ranks), thread = (int)bst_thread();
    const int layer = (rank >= a->first[1]) + (rank >= a->first[2]);
    const int64_t first = (int64_t)(block / (unsigned)a->ranks) * THIN_ROWS;
    const void *const row_of_a = bst_at(a->a[layer], (rank - a->first[layer]) * a->width, FACTOR);
    const bst_raw zeros = {{0, 0, 0, 0}};
    int64_t starts[THIN_ROWS]; /* beyond the last row that one again: its sums are nobody's */
    BST_EACH(r, THIN_ROWS) starts[r] = (first + r < a->rows ? first + r : a->rows - 1) * a->x_stride;
    float sums[THIN_ROWS] = {};
    for (int64_t at = (int64_t)thread * THIN_VEC; at < a->width; at += THIN_AHEAD * THIN_STEP) {
        bst_raw of_a[THIN_AHEAD][A_PARTS], of_x[THIN_AHEAD][THIN_ROWS];
        BST_EACH(i, THIN_AHEAD) {
            const int64_t k = at + i * THIN_STEP;
            const bool there = k < a->width;
            BST_EACH(p, A_PARTS) of_a[i][p] = there ? bst_raw_at(row_of_a, k + p * A_VEC, FACTOR, A_VEC) : zeros;
            BST_EACH(r, THIN_ROWS) of_x[i][r] = there ? bst_raw_at(a->x, starts[r] + k, TYPE, THIN_VEC) : zeros;
        }
        BST_EACH(i, THIN_AHEAD) {
            float factor[THIN_VEC], x[THIN_VEC];
            BST_EACH(p, A_PARTS) bst_unpack(factor + p * A_VEC, of_a[i][p], FACTOR, A_VEC);
            BST_EACH(r, THIN_ROWS) {
                bst_unpack(x, of_x[i][r], TYPE, THIN_VEC);
                BST_EACH(j, THIN_VEC) sums[r] = bst_fma(x[j], factor[j], sums[r]);
            }
        }
    }
    BST_EACH(r, THIN_ROWS) {
        const float sum = bst_warp_reduce(sums[r], 32, false);
        if (bst_lane() == 0) of_warps[thread / 32 * THIN_ROWS + r] = sum;
    }
    bst_sync();
    if (thread >= THIN_ROWS || first + thread >= a->rows) return;
    float sum = 0;
    BST_EACH(w, THIN_WARPS) sum += of_warps[w * THIN_ROWS + thread];
    a->thin[(first + thread) * a->ranks + rank] = sum;
}

#endif
