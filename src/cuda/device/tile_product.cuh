/* tile_product.cuh - x w^T, or x w (across), of matrices of 16-bit numbers, in tiles of registers, on Hopper's tensor
 * cores.
 *
 * A cluster of two blocks has two tiles of rows and one of columns. Tiles of 128 x 256 stay in the registers of two
 * warp groups, while a thread of a third copies their operands: each block its own rows, and half of w's for both (half
 * of its rows, which are the product's columns, or, across, half of its columns). BST_TILE_PRODUCT: a kernel's body.
 * Where a kernel says BST_TILE_BLOCKS 1 before it includes this, there are no clusters, and it copies by itself. */
#ifndef BST_TILE_PRODUCT_CUH
#define BST_TILE_PRODUCT_CUH

#include "fragment.cuh"
#include "warpgroup.cuh"

#include "tile_product.h"

#define BST_TILE_COPIER 40 /* registers of a thread that copies, and of one that multiplies */
#define BST_TILE_WORKER 232

#ifndef BST_TILE_BLOCKS
#define BST_TILE_BLOCKS 2 /* of a cluster */
#endif

/* The stages in shared memory, and which of them comes next. */
typedef struct bst_pipe {
    unsigned char *memory; /* all stages' pieces of x, and behind them all stages' pieces of w */
    uint64_t *barriers;    /* a stage's is full; [BST_TILE_STAGES] on: it is empty */
    unsigned stage, phase;
    unsigned rank; /* of the block in its cluster */
    int worker;    /* 0 and 1: this warp group multiplies that half of a tile's rows; -1: it copies */
} bst_pipe;

BST_DEVICE unsigned char *bst_x_of(const bst_pipe *p) { return p->memory + p->stage * BST_TILE_X_BYTES; }
BST_DEVICE unsigned char *bst_w_of(const bst_pipe *p) {
    return p->memory + BST_TILE_STAGES * BST_TILE_X_BYTES + p->stage * BST_TILE_W_BYTES;
}
BST_DEVICE void bst_next_piece(bst_pipe *p) {
    if (++p->stage < BST_TILE_STAGES) return;
    p->stage = 0;
    p->phase ^= 1;
}

/* shared: BST_TILE_SHARED bytes; barriers: 2 * BST_TILE_STAGES, shared. */
BST_DEVICE bst_pipe bst_tile_begin(unsigned char *shared, uint64_t *barriers) {
    unsigned char *aligned = shared + (1024 - bst_shared_address(shared) % 1024) % 1024;
    if (bst_thread() == 0) {
        BST_EACH(i, BST_TILE_STAGES) {
            bst_barrier_init(barriers + i, 1);
            /* By two workers of each block: w is copied to both. */
            bst_barrier_init(barriers + BST_TILE_STAGES + i, 2 * BST_TILE_BLOCKS);
        }
        bst_barrier_fence_init();
    }
    bst_cluster_sync();
    bst_pipe p = {aligned, barriers, 0, 0, bst_cluster_rank(), (int)bst_thread() / 128 - 1};
    return p;
}

typedef struct bst_place {
    int row, column;
} bst_place;

/* Where a tile begins. Tiles go down a group's rows, and then to the next columns. */
BST_DEVICE bst_place bst_place_of(const bst_tiles *t, int tile, unsigned rank) {
    int each = t->group * t->columns, group = tile / each, in = tile % each, left = t->pairs - group * t->group;
    int tall = left < t->group ? left : t->group;
    const int row = BST_TILE_BLOCKS * (group * t->group + in % tall) + (int)rank;
    bst_place p = {row * BST_TILE_ROWS, in / tall * BST_TILE_COLUMNS};
    return p;
}

/* The tiles of this block's cluster: from the first on, so many apart, below all. */
BST_DEVICE int bst_first_tile(void) { return (int)bst_block() / 2; }
BST_DEVICE int bst_tiles_apart(void) { return (int)bst_blocks() / 2; }
BST_DEVICE int bst_all_tiles(const bst_tiles *t) { return t->pairs * t->columns; }

/* The copying thread: columns `column` and on of x's rows and of w's; across: of x's rows, and w's rows so far down. */
#if BST_TILE_BLOCKS == 2
BST_DEVICE void bst_tile_copy(bst_pipe *p, const bst_tensor_map *x, const bst_tensor_map *w, bst_place at, int column,
                              bool across) {
    uint64_t *full = p->barriers + p->stage;
    int half = at.column + (int)p->rank * (BST_TILE_COLUMNS / 2);
    unsigned char *to = bst_w_of(p) + p->rank * (BST_TILE_W_BYTES / 2);
    bst_barrier_wait(p->barriers + BST_TILE_STAGES + p->stage, p->phase ^ 1);
    bst_barrier_expect(full, BST_TILE_X_BYTES + BST_TILE_W_BYTES);
    bst_box_read(bst_x_of(p), x, column, at.row, full);
    if (across) {
        BST_EACH(i, 2) bst_box_read_both(to + i * (BST_TILE_W_BYTES / 4), w, half + i * BST_BOX_COLUMNS, column, full);
    } else {
        bst_box_read_both(to, w, column, half, full);
    }
    bst_next_piece(p);
}
#endif

BST_DEVICE void bst_tile_release(bst_pipe *p, unsigned stage) {
    int lane = (int)bst_thread() % 128;
    if (lane < BST_TILE_BLOCKS) bst_barrier_arrive_at(p->barriers + BST_TILE_STAGES + stage, (unsigned)lane);
}

/* Of the next piece: begins the products of its first 16 `parts` columns. add: to what sums are. */
BST_DEVICE void bst_tile_multiply_piece(bst_pipe *p, float *sums, int parts, int add, int type, bool across) {
    bst_barrier_wait(p->barriers + p->stage, p->phase);
    bst_hold_sums(sums);
    bst_products_begin();
    uint64_t x = bst_tile(bst_x_of(p) + p->worker * (BST_TILE_X_BYTES / 2));
    uint64_t w = across ? bst_tile_across(bst_w_of(p)) : bst_tile(bst_w_of(p));
    const int step = across ? BST_TILE_STEP_ACROSS : BST_TILE_STEP;
    BST_EACH(i, parts)
        bst_product_64(sums, BST_TILE_COLUMNS, x + BST_TILE_STEP * i, w + step * i, add | i, type, across);
    bst_products_commit();
}

/* sums [64, 256] (+)= this worker's half of a tile's rows, over so many pieces, one at least. */
BST_DEVICE void bst_tile_multiply(bst_pipe *p, float *sums, int pieces, int add, int type, bool across) {
    unsigned before = 0;
    BST_ROLLED
    for (int piece = 0; piece < pieces; piece++) {
        bst_tile_multiply_piece(p, sums, BST_BOX_COLUMNS / BST_TILE_DEPTH, add | piece, type, across);
        if (piece) {
            bst_products_wait(1);
            bst_tile_release(p, before);
        }
        before = p->stage;
        bst_next_piece(p);
    }
    bst_products_wait(0);
    bst_hold_sums(sums);
    bst_tile_release(p, before);
}

/* sums of a tile that begins at this column: adds a row to each of theirs, below `columns`, which is even. */
BST_DEVICE void bst_tile_add_row(float *sums, const void *row, int column, int columns, int type) {
    const int first = column + (int)bst_lane() % 4 * 2;
    BST_EACH(i, 32) {
        float pair[2] = {0, 0};
        if (first + 8 * i < columns) bst_load(pair, row, first + 8 * i, type, 2);
        BST_EACH(half, 2) sums[4 * i + 2 * half] += pair[0], sums[4 * i + 2 * half + 1] += pair[1];
    }
}

/* ---- a kernel ---------------------------------------------------------------------------------------------------- */

/* Of arguments a, which have the tiles: copy(&a, &pipe, place) in one thread and work(&a, &pipe, place) in two warp
 * groups, for each tile of this block's. The other block's last arrivals need this one's barriers. */
#define BST_TILE_PRODUCT(a, copy, work)                                                                \
    BST_DYNAMIC_SHARED(memory);                                                                        \
    BST_SHARED(uint64_t, barriers, 2 * BST_TILE_STAGES);                                               \
    bst_pipe p = bst_tile_begin(memory, barriers);                                                     \
    if (p.worker < 0) {                                                                                \
        bst_registers_less(BST_TILE_COPIER);                                                           \
        BST_ROLLED                                                                                     \
        for (int tile = bst_first_tile(); tile < bst_all_tiles(&(a).tiles) && bst_thread() == 0;       \
             tile += bst_tiles_apart())                                                                \
            copy(&(a), &p, bst_place_of(&(a).tiles, tile, p.rank));                                    \
    } else {                                                                                           \
        bst_registers_more(BST_TILE_WORKER);                                                           \
        BST_ROLLED                                                                                     \
        for (int tile = bst_first_tile(); tile < bst_all_tiles(&(a).tiles); tile += bst_tiles_apart()) \
            work(&(a), &p, bst_place_of(&(a).tiles, tile, p.rank));                                    \
    }                                                                                                  \
    bst_cluster_sync()

#endif
