/* low_rank_add.cu - what adapters add to results of few rows, y = y + scale (x a^T) b^T of up to three layers of one x,
 * in two launches: low_rank_add_thin makes x a^T of all layers, in float32, and low_rank_add_expand the rest.
 *
 * low_rank_add_thin is low_rank_thin.cuh's, which low_rank_layers has, too. low_rank_add_expand: LANES threads have a
 * column of some y and ROWS rows of it; each reads up to PIECES vectors of the column's row of b at a time, their sums
 * are added up by shuffles, and each thread adds to the rows that are its own: read early, rounded once, written.
 *
 * Macros: TYPE (of x and y), FACTOR (of a and b: TYPE or float32), ROWS (1, 2, 4, 8), VEC: elements that are read at a
 * time, 16 bytes of x and of b, or 1; LANES and PIECES, which low_rank_add_thin has not.
 *
 * Bytes: each a and b once for ROWS rows, x once for each row of an a, mostly from the L2, y read and written once;
 * thin, 4 * rows * ranks, written and read within the L2. Of few rows it is the two launches that take the time.
 * H200, 8 rows, adapters of rank 16 in float32 on all layers of Qwen3-0.6B, within a CUDA graph (2026-11-30): 2.3 us a
 * launch of low_rank_add_thin, 3.7 of low_rank_add_expand, its wait for the other's end among them. */
#include "pack.cuh"
#include "reduce.cuh"

#include "low_rank_args.h"

#define THREADS LOW_RANK_THREADS

#ifndef LANES
#define THIN_ROWS ROWS
#define THIN_VEC  VEC
#include "low_rank_thin.cuh"

BST_KERNEL(low_rank_add_thin, low_rank_thin_args, THREADS, 1) {
    BST_SHARED(float, of_warps, THIN_WARPS *ROWS);
    bst_wait_for_previous();
    bst_let_next_start();
    make_thin(&a, bst_block(), of_warps);
}

#else
#define RANKS (LANES * PIECES * VEC) /* of a column at a time */
#define OWN   ((ROWS + LANES - 1) / LANES)
#define QUAD  (VEC > 4 ? 4 : VEC)

BST_KERNEL(low_rank_add_expand, low_rank_expand_args, THREADS, 1) {
    BST_SHARED(float, thin, ROWS *RANKS);
    const int thread = (int)bst_thread(), lane = thread % LANES;
    const int block = (int)(bst_block() % (unsigned)a.blocks);
    const int layer = (block >= a.first_block[1]) + (block >= a.first_block[2]);
    const int64_t column = (int64_t)(block - a.first_block[layer]) * (THREADS / LANES) + thread / LANES;
    const int64_t first = (int64_t)(bst_block() / (unsigned)a.blocks) * ROWS;
    const int rank = a.rank[layer];
    const bool there = column < a.columns[layer];
    const bst_raw zeros = {{0, 0, 0, 0}};
    float y[OWN] = {}, sums[ROWS] = {};
    bst_wait_for_previous();
    BST_EACH(r, ROWS)
        if (r % LANES == lane && there && first + r < a.rows)
            bst_load(y + r / LANES, a.y[layer], (first + r) * a.y_stride[layer] + column, TYPE, 1);
    for (int from = 0; from < rank; from += RANKS) {
        bst_raw of_b[PIECES];
        BST_EACH(p, PIECES) {
            const int at = from + (p * LANES + lane) * VEC;
            of_b[p] = there && at < rank ? bst_raw_at(a.b[layer], column * rank + at, FACTOR, VEC) : zeros;
        }
        if (from) bst_sync(); /* thin has been read */
        for (int i = thread; i < ROWS * RANKS; i += THREADS) {
            const int64_t row = first + i / RANKS;
            const int at = from + i % RANKS;
            thin[i] = row < a.rows && at < rank ? a.thin[row * a.ranks + a.first[layer] + at] : 0.0f;
        }
        bst_sync();
        BST_EACH(p, PIECES) {
            float factor[VEC], of_row[VEC];
            bst_unpack(factor, of_b[p], FACTOR, VEC);
            BST_EACH(r, ROWS) {
                const int at = r * RANKS + (p * LANES + lane) * VEC;
                BST_EACH(q, VEC / QUAD) bst_load(of_row + q * QUAD, thin, at + q * QUAD, BST_F32_CODE, QUAD);
                BST_EACH(j, VEC) sums[r] = bst_fma(of_row[j], factor[j], sums[r]);
            }
        }
    }
    BST_EACH(r, ROWS) {
        const float result = y[r / LANES] + a.scale[layer] * bst_warp_reduce(sums[r], LANES, false);
        if (r % LANES == lane && there && first + r < a.rows)
            bst_store(a.out[layer], (first + r) * a.out_stride[layer] + column, &result, TYPE, 1);
    }
}
#endif
