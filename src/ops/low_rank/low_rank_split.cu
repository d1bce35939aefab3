/* low_rank_split.cu - numbers of float32, or the sums of their three parts, times a scale: as they are, as three pieces
 * of bfloat16 that are added up to them, and rounded to bfloat16, three times over. A piece is the upper half of what
 * the ones before it leave, so that the subtractions are exact and the third one leaves nothing.
 *
 * Macros: VEC: numbers that a thread has, 4 or 1.
 *
 * Bytes, of each number: 4 read for each part; 4 of sum, 6 of pieces and 6 of repeated written. Of thin matrices it is
 * the launch that takes the time: 1.9 us on an H200 within a CUDA graph, of 4096 rows of 16 to 48 numbers and of
 * adapters of rank 16 (2026-11-30). */
#include "pack.cuh"

#include "low_rank_args.h"

/* What `first` makes of x / y and of the rest: in 32 bits where x has no more. */
BST_DEVICE int64_t divided(int64_t x, int64_t y, int64_t *rest) {
    const bool small = !((x | y) >> 32);
    const int64_t found = small ? (int64_t)((uint32_t)x / (uint32_t)y) : x / y;
    *rest = x - found * y;
    return found;
}

BST_KERNEL(low_rank_split, low_rank_split_args, LOW_RANK_THREADS, 1) {
    const int64_t at = ((int64_t)bst_block() * LOW_RANK_THREADS + bst_thread()) * VEC;
    if (at >= a.count) return;
    int64_t rank, group;
    const int64_t row = divided(divided(at, a.ranks, &rank), a.groups, &group);
    float v[VEC], piece[VEC];
    bst_wait_for_previous();
    bst_let_next_start();
    const int64_t from = row * a.x_stride[0] + group * a.x_stride[1] + rank;
    bst_load(v, a.x, from, BST_F32_CODE, VEC);
    for (int part = 1; part < a.parts; part++) {
        bst_load(piece, a.x, from + part * a.x_stride[2], BST_F32_CODE, VEC);
        BST_EACH(i, VEC) v[i] += piece[i];
    }
    BST_EACH(i, VEC) v[i] = bst_product(v[i], a.scale);
    if (a.sum) bst_store(a.sum, row * a.sum_stride[0] + group * a.sum_stride[1] + rank, v, BST_F32_CODE, VEC);
    if (a.repeated) {
        const int64_t to = row * a.repeated_stride[0] + group * a.repeated_stride[1] + rank;
        BST_EACH(p, LOW_RANK_PIECES) bst_store(a.repeated, to + p * a.repeated_stride[2], v, BST_BF16_CODE, VEC);
    }
    if (!a.pieces) return;
    const int64_t to = row * a.pieces_stride[0] + group * a.pieces_stride[1] + rank;
    BST_EACH(p, LOW_RANK_PIECES) {
        BST_EACH(i, VEC) piece[i] = bst_from_bits(bst_bits(v[i]) & 0xffff0000u);
        bst_store(a.pieces, to + p * a.pieces_stride[2], piece, BST_BF16_CODE, VEC);
        BST_EACH(i, VEC) v[i] -= piece[i];
    }
}
