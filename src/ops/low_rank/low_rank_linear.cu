/* low_rank_linear.cu - a linear layer with its adapter, y = x weight^T + scale thin b^T, on Hopper's tensor cores.
 *
 * Macros: TYPE (bf16 or f16), PARTS: 16 columns of thin each, rounded up; SCALED: scale is not 1.
 *
 * Tiles of tile_product.cuh: what thin and b make comes first, is scaled in the registers that it is summed in, and
 * then the large product is added to it. So y is rounded once, and written once.
 * Bytes: x and weight, some times, most of it from the L2, thin and b; y written once. Measured on an H200, bf16, rank
 * 16, K = 4096, beside cuBLASLt's product alone and with the thin product before, whose result it adds to: 8192 x 12288
 * 1251, 1196 and 1278 us; 8192 x 4096 397, 391 and 423; 8192 x 1024 104, 102 and 112. K = 1024: 8192 x 3072 87, 83 and
 * 113. cuBLASLt rounds a product before it adds it to what is there: an adapter's part below half a unit of y is lost
 * so. 168 registers. */
#include "pack.cuh"
#include "tile_product.cuh"

#include "low_rank_args.h"

/* Each of four lanes has a pair of the first eight columns, of the second, third and fourth; exchanged, this lane has
 * all of the eight that are its number. */
BST_DEVICE bst_raw exchanged(const uint32_t pairs[4]) {
    const bool odd = bst_lane() % 2, upper = bst_lane() % 4 / 2;
    uint32_t first = bst_shuffle_xor_u32(odd ? pairs[0] : pairs[1], 1);
    uint32_t second = bst_shuffle_xor_u32(odd ? pairs[2] : pairs[3], 1);
    const uint32_t a = odd ? first : pairs[0], b = odd ? pairs[1] : first;
    const uint32_t c = odd ? second : pairs[2], d = odd ? pairs[3] : second;
    first = bst_shuffle_xor_u32(upper ? a : c, 2);
    second = bst_shuffle_xor_u32(upper ? b : d, 2);
    return {{upper ? first : a, upper ? second : b, upper ? c : first, upper ? d : second}};
}

/* A row's 256 columns from `column` on, of which sums has this lane's 64 as wgmma leaves them. */
BST_DEVICE void store_row(const low_rank_linear_args *a, const float *sums, int half, int row, int column) {
    BST_EACH(i, 8) {
        uint32_t pairs[4];
        BST_EACH(j, 4) {
            const float *pair = sums + 16 * i + 4 * j + 2 * half;
            pairs[j] = bst_half_pair(pair[0], pair[1], TYPE);
        }
        const bst_raw raw = exchanged(pairs);
        const int c = column + 32 * i + (int)bst_lane() % 4 * 8;
        if (row < a->rows && c < a->columns) bst_write((char *)a->y + 2 * (row * a->y_stride + c), raw, 16);
    }
}

BST_DEVICE void work(const low_rank_linear_args *a, bst_pipe *p, bst_place at) {
    float sums[128];
    const int warp = (int)bst_thread() / 32 % 4, lane = (int)bst_lane();
    bst_tile_multiply_piece(p, sums, PARTS, 0, TYPE);
    if (SCALED) {
        bst_products_wait(0);
        bst_hold_sums(sums);
        BST_EACH(i, 128) sums[i] *= a->scale;
    }
    const unsigned thin = p->stage;
    bst_next_piece(p);
    if (!SCALED) bst_products_wait(0);
    bst_tile_release(p, thin);
    bst_tile_multiply(p, sums, a->steps, 1, TYPE);
    BST_EACH(half, 2) store_row(a, sums, half, at.row + p->worker * 64 + warp * 16 + lane / 4 + half * 8, at.column);
}

BST_KERNEL(low_rank_linear, low_rank_linear_args, BST_TILE_THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(uint64_t, barriers, 2 * BST_TILE_STAGES);
    bst_pipe p = bst_tile_begin(memory, barriers);
    if (p.worker < 0) {
        bst_registers_less(BST_TILE_COPIER);
        BST_ROLLED
        for (int tile = bst_first_tile(); tile < bst_all_tiles(&a.tiles) && bst_thread() == 0;
             tile += bst_tiles_apart()) {
            const bst_place at = bst_place_of(&a.tiles, tile, p.rank);
            bst_tile_copy(&p, &a.thin, &a.b, at, 0);
            BST_ROLLED
            for (int step = 0; step < a.steps; step++) bst_tile_copy(&p, &a.x, &a.weight, at, step * BST_BOX_COLUMNS);
        }
    } else {
        bst_registers_more(BST_TILE_WORKER);
        BST_ROLLED
        for (int tile = bst_first_tile(); tile < bst_all_tiles(&a.tiles); tile += bst_tiles_apart())
            work(&a, &p, bst_place_of(&a.tiles, tile, p.rank));
    }
    bst_cluster_sync();
}
