/* low_rank_tiles.cu - linear layers with their adapters on Hopper's tensor cores, a sum of products rounded once:
 * y = scale thin b^T + x weight^T + bias, and across, which is their input's gradient, dx = g a + sum of dy_i weight_i.
 *
 * Macros: TYPE (bf16 or f16), PARTS: 16 columns of thin each that its first piece has, rounded up, 0 without thin;
 * SCALED: scale is not 1, and thin is one piece; ACROSS; BIAS: there is one, added in float32.
 *
 * Tiles of tile_product.cuh: what thin and b make comes first, is scaled in the registers that it is summed in, and
 * then the large products are added to it. So y is rounded once, and written once.
 * Bytes: each x and weight, some times, most of it from the L2, thin and b; y written once. Measured on an H200, bf16,
 * rank 16, K = 4096, beside cuBLASLt's product alone and with the thin product before, whose result it adds to: 8192 x
 * 12288 1251, 1196 and 1278 us; 8192 x 4096 397, 391 and 423; 8192 x 1024 104, 102 and 112. K = 1024: 8192 x 3072 87,
 * 83 and 113. cuBLASLt rounds a product before it adds it to what is there: an adapter's part below half a unit of y is
 * lost so. Across, with adapters, beside the products added up without and with them: 8192 x 4096 of 12288 and 12288
 * columns 2381, 2450 and 2447 us; of 4096, 1024 and 1024 602, 662 and 692; of 4096 410, 407 and 446. 168 registers. */
#include "tile_product.cuh"

#include "low_rank_args.h"

BST_DEVICE void copy(const low_rank_tiles_args *a, bst_pipe *p, bst_place at) {
    BST_ROLLED
    for (int step = 0; step < a->thin_steps; step++)
        bst_tile_copy(p, &a->thin, &a->b, at, step * BST_BOX_COLUMNS, ACROSS);
    BST_ROLLED
    for (int i = 0; i < LOW_RANK_PRODUCTS; i++) BST_ROLLED
    for (int step = 0; step < a->steps[i]; step++)
        bst_tile_copy(p, a->x + i, a->weight + i, at, step * BST_BOX_COLUMNS, ACROSS);
}

BST_DEVICE void work(const low_rank_tiles_args *a, bst_pipe *p, bst_place at) {
    float sums[128];
    const int warp = (int)bst_thread() / 32 % 4, lane = (int)bst_lane();
    if (PARTS) {
        bst_tile_multiply_piece(p, sums, PARTS, 0, TYPE, ACROSS);
        bst_products_wait(0);
        bst_hold_sums(sums);
        if (SCALED)
            BST_EACH(i, 128) sums[i] *= a->scale;
        bst_tile_release(p, p->stage);
        bst_next_piece(p);
    }
    bst_tile_multiply(p, sums, a->all_steps - (PARTS != 0), PARTS, TYPE, ACROSS);
    if (BIAS) bst_tile_add_row(sums, a->bias, at.column, a->columns, TYPE);
    BST_EACH(half, 2) {
        const int row = at.row + p->worker * 64 + warp * 16 + lane / 4 + half * 8;
        bst_tile_store_row(a->y, row * a->y_stride, sums, half, at.column, a->columns, BST_TILE_COLUMNS, row < a->rows,
                           TYPE);
    }
}

BST_KERNEL(low_rank_tiles, low_rank_tiles_args, BST_TILE_THREADS, 1) { BST_TILE_PRODUCT(a, copy, work); }
