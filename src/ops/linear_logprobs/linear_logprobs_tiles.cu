/* linear_logprobs_tiles.cu - the head's product, of whose logits nothing is left but sums, on Hopper's tensor cores.
 *
 * Macros: VOCAB; TYPE (code of dtype.h: bfloat16 or float16); ENTROPY, SQUARES, MEAN, TOP1: wanted.
 *
 * Tiles of 128 rows x 256 classes, as tile_product.cuh has them, are rounded in their registers as a product would
 * leave them, and then summed; linear_logprobs_join adds up a row's tiles.
 * Bytes: hidden and weight, some times, most of it from the L2; written 2 to 5 numbers for 256 logits. No atomics; all
 * sums have a fixed order.
 * Measured on an H200, bf16, H = 4096, V = 151936, with the join, over cuBLASLt's product alone: 1.005, 1.039 and 1.013
 *           at 4096, 8192 and 16384 rows; a row kernel behind that product 1.002, 1.023 and 1.032, and logits. */
#include "pack.cuh"
#include "reduce.cuh"
#include "tile_product.cuh"

#include "cross_entropy_args.h"

#include "linear_logprobs_args.h"

#define CLASSES      BST_TILE_COLUMNS

#define LOWEST       (-3.402823466e38f)
#define LOWEST_POWER (-1e4f) /* below, e^x is 0 and x e^x too, which for -inf would be NaN */

/* Two logits in a word, and what leaves either of them out: -inf. */
BST_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    return TYPE == BST_BF16_CODE ? bst_max_bf16x2(a, b) : bst_max_f16x2(a, b);
}
BST_DEVICE uint32_t without(uint32_t pair, int which) {
    uint32_t none = TYPE == BST_BF16_CODE ? 0xff80u : 0xfc00u;
    return which ? (pair & 0xffffu) | none << 16 : (pair & 0xffff0000u) | none;
}
BST_DEVICE float logit_of(uint32_t pair, int which) {
    return bst_half_to_float(which ? pair >> 16 : pair & 0xffffu, TYPE);
}

/* The target's logit goes to where it is asked for, and out of the row. `pairs`: of columns `own` + 8 j and the next of
 * this tile, the target being `at`; -1: elsewhere. */
BST_DEVICE void take_target(const linear_logprobs_tiles_args *a, uint32_t *pairs, int own, int at, int row) {
    float before = -BST_INFINITY;
    BST_EACH(i, 64) {
        int offset = own + i / 2 * 8 + i % 2;
        float x = logit_of(pairs[i / 2], i % 2);
        if (offset < at) before = bst_max(before, x);
        if (offset != at) continue;
        a->targets[row] = x;
        pairs[i / 2] = without(pairs[i / 2], i % 2);
    }
    if (TOP1) before = bst_warp_reduce(before, 4, true);
    if (TOP1 && at >= 0 && own == 0) a->targets[a->stride + row] = before;
}

/* Sums of a row, of which this lane has the 64 logits that `sums` has at 4 j + 2 `half` and the next; `column`: of the
 * first of them. */
BST_DEVICE void finish_row(const linear_logprobs_tiles_args *a, const float *sums, int half, int row, int column) {
    int64_t target = row < a->rows ? a->all.row.target[row] : -1;
    int first = column / CLASSES * CLASSES, at = target >= first && target < first + CLASSES ? (int)target - first : -1;
    uint32_t pairs[32];
    float mean = 0.0f;
    BST_EACH(j, 32) pairs[j] = bst_half_pair(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1], TYPE);
    if (MEAN) /* beyond the last class logits are 0 */
        BST_EACH(i, 64) mean += logit_of(pairs[i / 2], i % 2);
    if (VOCAB % CLASSES && first + CLASSES > VOCAB) {
        BST_EACH(i, 64)
            if (column + i / 2 * 8 + i % 2 >= VOCAB) pairs[i / 2] = without(pairs[i / 2], i % 2);
    }
    if (bst_warp_max_u32(at >= 0)) take_target(a, pairs, column - first, at, row);
    uint32_t both = pairs[0];
    BST_EACH(j, 32) both = larger(both, pairs[j]);
    float top = bst_warp_reduce(bst_max(logit_of(both, 0), logit_of(both, 1)), 4, true);
    float reference = bst_max(LOWEST, top * a->all.row.base2);
    float others[2] = {0, 0}, products[2] = {0, 0}, squares[2] = {0, 0};
    BST_EACH(i, 64) {
        float above = bst_fma(logit_of(pairs[i / 2], i % 2), a->all.row.base2, -reference), e = bst_exp2(above);
        others[i % 2] += e;
        if (ENTROPY) products[i % 2] = bst_fma(e, bst_max(above, LOWEST_POWER), products[i % 2]);
        if (SQUARES) squares[i % 2] = bst_fma(e, e, squares[i % 2]);
    }
    float numbers[] = {others[0] + others[1], products[0] + products[1], squares[0] + squares[1], mean};
    const bool wanted[] = {true, ENTROPY, SQUARES, MEAN};
    BST_EACH(i, 4)
        if (wanted[i]) numbers[i] = bst_warp_reduce(numbers[i], 4, false);
    if (bst_lane() % 4 || row >= a->rows) return;
    int64_t plane = (int64_t)a->tiles.columns * a->stride;
    float *to = a->sums + (int64_t)(column / CLASSES) * a->stride + row;
    *to = top;
    BST_EACH(i, 4)
        if (wanted[i]) *(to += plane) = numbers[i];
}

BST_DEVICE void work(const linear_logprobs_tiles_args *a, bst_pipe *p, bst_place at) {
    float sums[128];
    int warp = (int)bst_thread() / 32 % 4, lane = (int)bst_lane();
    bst_tile_multiply(p, sums, a->steps, 0, TYPE, false);
    BST_EACH(half, 2)
        finish_row(a, sums, half, at.row + p->worker * 64 + warp * 16 + lane / 4 + half * 8, at.column + lane % 4 * 2);
}

BST_DEVICE void copy(const linear_logprobs_tiles_args *a, bst_pipe *p, bst_place at) {
    BST_ROLLED
    for (int step = 0; step < a->steps; step++)
        bst_tile_copy(p, &a->hidden, &a->weight, at, step * BST_BOX_COLUMNS, false);
}

BST_KERNEL(linear_logprobs_tiles, linear_logprobs_tiles_args, BST_TILE_THREADS, 1) { BST_TILE_PRODUCT(a, copy, work); }
