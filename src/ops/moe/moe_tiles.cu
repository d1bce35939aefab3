/* moe_tiles.cu - the experts' linear layers, with their adapters or without, on Hopper's tensor cores: each row times
 * the matrix of its expert, y = scale thin b[e] + x matrices[e], a sum of products rounded once.
 *
 * Macros: TYPE (bf16 or f16), PARTS: 16 columns of thin each, rounded up, 0 without thin;
 * SCALED: scale is not 1; ACROSS, THIN_ACROSS: rows of the matrices, and of b, are what is summed over, else columns.
 *
 * Tiles of tile_product.cuh, of the rows of one expert each, whose number only the device knows: a block looks up where
 * the experts' rows end, counts their tiles, and takes every so many of all. A tile copies rows behind its expert's,
 * too, and does not write them; where its lower half has no rows, that half's workers sit it out.
 * Bytes: x once, each expert's matrix once for 2048 of its rows, y once, as long as these rows stay in the L2.
 * Measured on an H200, bf16, beside PyTorch's grouped_mm, us: 36,864 rows of 64 experts, 2048 x 2048 (OLMoE) 512 and
 * 552, with an adapter of rank 16 548 and 778, which takes two products and a sum there; 1024 x 2048 303 and 348, 305
 * and 563; of 128 experts, 2048 x 1536 (Qwen3-30B-A3B) 498 and 587, 503 and 768. Five products of a layer for seconds
 * on end, which power limits: 0.975 and 0.987 of PyTorch's time, 1.015 with GPT-OSS's 2880 columns. 168 registers. */
#define BST_TILE_BLOCKS 1
#include "prefix.cuh"
#include "tile_product.cuh"

#include "moe_args.h"

typedef struct tile {
    bst_place at;
    int expert, end; /* end: of its expert's rows */
} tile;

/* Where an expert's rows end: ends are not believed. */
BST_DEVICE int end_of(const moe_linear_args *a, int expert) {
    const int end = expert < 0 ? 0 : a->ends[expert];
    return end < 0 ? 0 : end < a->rows ? end : a->rows;
}

/* ends[e]: where the rows of expert e - 1 end; before[e]: the tiles of rows of all experts before e. By all threads. */
BST_DEVICE void count_tiles(const moe_linear_args *a, int32_t *ends, int32_t *before) {
    for (int e = (int)bst_thread(); e < a->experts; e += BST_TILE_THREADS) {
        const int rows = end_of(a, e) - end_of(a, e - 1);
        before[e + 1] = rows > 0 ? (rows + BST_TILE_ROWS - 1) / BST_TILE_ROWS : 0;
        ends[e + 1] = end_of(a, e);
    }
    bst_sync();
    if (bst_thread() < 32) bst_prefix_sums(before, a->experts);
    if (bst_thread() == 0) ends[0] = 0;
    bst_sync();
}

/* Tile number `number`, not less than the one that `t` was. The tiles of an expert's rows in as many groups as need be,
 * all as large as the others: a small one would read all of the matrix again for few rows. */
BST_DEVICE void find(const moe_linear_args *a, const int32_t *ends, const int32_t *before, int number, tile *t) {
    while (before[t->expert + 1] * a->tile_columns <= number) t->expert++;
    const int first = before[t->expert], tall = before[t->expert + 1] - first;
    const int groups = (tall + a->group - 1) / a->group;
    const bst_tiles tiles = {tall, a->tile_columns, (tall + groups - 1) / groups};
    t->at = bst_place_of(&tiles, number - first * a->tile_columns, 0);
    t->at.row += ends[t->expert];
    t->end = ends[t->expert + 1];
}

/* Boxes of 128 of an expert's rows, or across of 64 columns, one behind another. */
BST_DEVICE void copy_piece(bst_pipe *p, const bst_tensor_map *x, const bst_tensor_map *w, const tile *t, int column,
                           bool across) {
    uint64_t *full = p->barriers + p->stage;
    bst_barrier_wait(p->barriers + BST_TILE_STAGES + p->stage, p->phase ^ 1);
    bst_barrier_expect(full, BST_TILE_X_BYTES + BST_TILE_W_BYTES);
    bst_box_read(bst_x_of(p), x, column, t->at.row, full);
    if (across) {
        BST_EACH(i, 4) {
            unsigned char *to = bst_w_of(p) + i * (BST_TILE_W_BYTES / 4);
            bst_box_read_of(to, w, t->at.column + i * BST_BOX_COLUMNS, column, t->expert, full);
        }
    } else {
        BST_EACH(i, 2) {
            unsigned char *to = bst_w_of(p) + i * (BST_TILE_W_BYTES / 2);
            bst_box_read_of(to, w, column, t->at.column + i * BST_BOX_ROWS, t->expert, full);
        }
    }
    bst_next_piece(p);
}

BST_DEVICE void copy(const moe_linear_args *a, bst_pipe *p, const tile *t) {
    if (PARTS) copy_piece(p, &a->thin, &a->b, t, 0, THIN_ACROSS);
    BST_ROLLED
    for (int step = 0; step < a->steps; step++) copy_piece(p, &a->x, &a->matrices, t, step * BST_BOX_COLUMNS, ACROSS);
}

BST_DEVICE void sit_out(bst_pipe *p, int pieces) {
    BST_ROLLED
    for (int piece = 0; piece < pieces; piece++) {
        bst_barrier_wait(p->barriers + p->stage, p->phase);
        bst_tile_release(p, p->stage);
        bst_next_piece(p);
    }
}

BST_DEVICE void work(const moe_linear_args *a, bst_pipe *p, const tile *t) {
    float sums[128];
    const int warp = (int)bst_thread() / 32 % 4, lane = (int)bst_lane(), first = t->at.row + p->worker * 64;
    if (first >= t->end) {
        sit_out(p, (PARTS != 0) + a->steps);
        return;
    }
    if (PARTS) {
        bst_tile_multiply_piece(p, sums, PARTS, 0, TYPE, THIN_ACROSS);
        bst_products_wait(0);
        bst_hold_sums(sums);
        bst_tile_release(p, p->stage);
        bst_next_piece(p);
        if (SCALED)
            BST_EACH(i, 128) sums[i] *= a->scale;
    }
    bst_tile_multiply(p, sums, a->steps, PARTS, TYPE, ACROSS);
    BST_EACH(half, 2) {
        const int row = first + warp * 16 + lane / 4 + half * 8;
        bst_tile_store_row(a->y, (int64_t)row * a->columns, sums, half, t->at.column, a->columns, BST_TILE_COLUMNS,
                           row < t->end, TYPE);
    }
}

BST_KERNEL(moe_linear, moe_linear_args, BST_TILE_THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(uint64_t, barriers, 2 * BST_TILE_STAGES);
    BST_SHARED(int32_t, ends, BST_MOE_MOST_EXPERTS + 1);
    BST_SHARED(int32_t, before, BST_MOE_MOST_EXPERTS + 1);
    bst_pipe p = bst_tile_begin(memory, barriers);
    count_tiles(&a, ends, before);
    const int all = before[a.experts] * a.tile_columns, apart = (int)bst_blocks();
    tile t = {{0, 0}, 0, 0};
    if (p.worker < 0) {
        bst_registers_less(BST_TILE_COPIER);
        BST_ROLLED
        for (int number = (int)bst_block(); number < all && bst_thread() == 0; number += apart) {
            find(&a, ends, before, number, &t);
            copy(&a, &p, &t);
        }
    } else {
        bst_registers_more(BST_TILE_WORKER);
        BST_ROLLED
        for (int number = (int)bst_block(); number < all; number += apart) {
            find(&a, ends, before, number, &t);
            work(&a, &p, &t);
        }
    }
}
