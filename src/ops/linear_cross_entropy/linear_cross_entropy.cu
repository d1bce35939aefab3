/* linear_cross_entropy.cu - what the fused loss needs beside matrix products (cuBLASLt) and the rows' cross-entropy.
 *
 * Macros: TYPE (a code of dtype.h); OUT, the output's, of spread; VEC elements of an access (columns alone); SPREAD,
 * ROUND, COLUMNS or BIAS chooses the kernel.
 *
 * spread   writes one row (the bias) over rows that the next product adds to. Bytes: the output's, once.
 * round    rounds a float32 sum to the output's type. Bytes: 4 read and 2 or 4 written per element.
 * columns  adds the columns of a chunk's gradient to sums in float64, each of every PARTS-th row. Bytes: the
 *          gradient's, once, and 16 PARTS a column.
 * bias     adds these up in their order and rounds once. Bytes: 8 PARTS a column. */
#include "pack.cuh"

#include "linear_cross_entropy_args.h"

#define BLOCK LINEAR_CROSS_ENTROPY_BLOCK

#ifdef SPREAD
BST_KERNEL(linear_cross_entropy_spread, linear_cross_entropy_spread_args, BLOCK, 1) {
    int64_t column = (int64_t)bst_block() * BLOCK + bst_thread();
    if (column >= a.columns) return;
    float v;
    bst_load(&v, a.row, column, TYPE, 1);
    for (int64_t row = bst_block_y(); row < a.rows; row += bst_blocks_y())
        bst_store(a.out, row * a.stride + column, &v, OUT, 1);
}
#endif

#ifdef ROUND
BST_KERNEL(linear_cross_entropy_round, linear_cross_entropy_round_args, BLOCK, 1) {
    enum { EACH = LINEAR_CROSS_ENTROPY_VEC };
    int64_t step = (int64_t)bst_blocks() * BLOCK * EACH;
    for (int64_t i = ((int64_t)bst_block() * BLOCK + bst_thread()) * EACH; i < a.count; i += step) {
        float v[EACH];
        if (i + EACH <= a.count) {
            bst_unpack(v, bst_raw_once(a.in, i, BST_F32_CODE, EACH), BST_F32_CODE, EACH);
            bst_store_once(a.out, i, v, TYPE, EACH);
        } else {
            for (int64_t j = i; j < a.count; j++) bst_store(a.out, j, a.in + j, TYPE, 1);
        }
    }
}
#endif

#ifdef COLUMNS
BST_KERNEL(linear_cross_entropy_columns, linear_cross_entropy_columns_args, BLOCK, 1) {
    int64_t column = ((int64_t)bst_block() * BLOCK + bst_thread()) * VEC;
    if (column >= a.columns) return;
    double sum[VEC];
    BST_EACH(i, VEC) sum[i] = 0;
    for (int64_t row = bst_block_y(); row < a.rows; row += LINEAR_CROSS_ENTROPY_PARTS) {
        float v[VEC];
        bst_load(v, a.in, row * a.stride + column, TYPE, VEC);
        BST_EACH(i, VEC) sum[i] += (double)v[i];
    }
    double *to = a.partial + bst_block_y() * a.columns + column;
    BST_EACH(i, VEC) to[i] = a.first ? sum[i] : to[i] + sum[i];
}
#endif

#ifdef BIAS
BST_KERNEL(linear_cross_entropy_bias, linear_cross_entropy_bias_args, BLOCK, 1) {
    int64_t column = (int64_t)bst_block() * BLOCK + bst_thread();
    if (column >= a.columns) return;
    double sum = 0;
    for (int part = 0; part < LINEAR_CROSS_ENTROPY_PARTS; part++) sum += a.partial[part * a.columns + column];
    float v = (float)(a.alpha ? sum * (double)*a.alpha : sum);
    bst_store(a.out, column, &v, TYPE, 1);
}
#endif
