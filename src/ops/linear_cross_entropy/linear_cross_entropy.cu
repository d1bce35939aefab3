/* linear_cross_entropy.cu - what the fused loss needs beside matrix products (cuBLASLt) and the rows' cross-entropy.
 *
 * Macros: TYPE (a code of dtype.h); SPREAD or ROUND chooses the kernel.
 *
 * spread  writes one row (the bias, or ones) over rows that the next product adds to. Bytes: the output's, once.
 * round   rounds a float32 sum to the output's type. Bytes: 4 read and 2 or 4 written per element. */
#include "pack.cuh"

#include "linear_cross_entropy_args.h"

#define BLOCK 256

#ifdef SPREAD
BST_KERNEL(linear_cross_entropy_spread, linear_cross_entropy_spread_args, BLOCK, 1) {
    int64_t column = (int64_t)bst_block() * BLOCK + bst_thread();
    if (column >= a.columns) return;
    float v = 1.0f;
    if (a.row) bst_load(&v, a.row, column, TYPE, 1);
    for (int64_t row = bst_block_y(); row < a.rows; row += bst_blocks_y())
        bst_store(a.out, row * a.stride + column, &v, TYPE, 1);
}
#endif

#ifdef ROUND
BST_KERNEL(linear_cross_entropy_round, linear_cross_entropy_round_args, BLOCK, 1) {
    int64_t step = (int64_t)bst_blocks() * BLOCK * 4;
    for (int64_t i = ((int64_t)bst_block() * BLOCK + bst_thread()) * 4; i < a.count; i += step) {
        float v[4];
        if (i + 4 <= a.count) {
            bst_unpack(v, bst_raw_once(a.in, i, BST_F32_CODE, 4), BST_F32_CODE, 4);
            bst_store_once(a.out, i, v, TYPE, 4);
        } else {
            for (int64_t j = i; j < a.count; j++) bst_store(a.out, j, a.in + j, TYPE, 1);
        }
    }
}
#endif
