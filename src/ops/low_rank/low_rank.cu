/* low_rank.cu - g = scale dy b and db = scale dy^T thin, in one pass over dy.
 *
 * low_rank_backward: a block has the columns of TILES tiles, and of the rows' tiles every one that is its number in y
 * modulo the blocks there. Tiles come by asynchronous copies, STAGES - 1 ahead. A warp multiplies its 16 rows of a tile
 * by b, summed over the block's columns, and its 16 columns, transposed, by thin, summed over the block's rows: both
 * sums stay in registers, that of g until the rows change. low_rank_sum then adds up what the blocks have, in one
 * order. A tensor core multiplies 16 x 16 by 16 x 8: of dy's 16 x 16 elements each comes out of shared memory twice.
 *
 * Macros: TYPE (of dy, b, thin, g: bf16 or f16), RANK (8, 16, 24, 32); TILES and STAGES, which low_rank_sum has not;
 * BIAS: low_rank_bias alone, for low_rank_linear, of any TYPE.
 *
 * Bytes: dy once, 2 an element; beside it parts of g, 4 * rank * rows * column parts, and of db, 4 * rank * columns *
 * row parts, written and read, mostly within the L2. Measured on an H200, 8192 rows, rank 16, both kernels: 64 us at
 * 12288 columns (its bytes 47, two products 113), 27 at 4096 (15.7, 44.5). */
#define THREADS LOW_RANK_THREADS
#ifdef BIAS
#include "pack.cuh"

#include "low_rank_args.h"

/* Each row of y becomes the bias, VEC numbers a thread, for products that are added to it. Bytes: y written. */
BST_KERNEL(low_rank_bias, low_rank_bias_args, THREADS, 1) {
    const int64_t chunks = (a.columns + THREADS * VEC - 1) / (THREADS * VEC), row = bst_block() / chunks;
    const int64_t column = (bst_block() % chunks * THREADS + bst_thread()) * VEC;
    float bias[VEC];
    bst_wait_for_previous();
    if (column >= a.columns) return;
    bst_load(bias, a.bias, column, TYPE, VEC);
    bst_store(a.y, row * a.y_stride + column, bias, TYPE, VEC);
}
#else
#include "low_rank_pieces.cuh"

#define TILE       LOW_RANK_TILE
#define STEPS      (TILE / STEP)

#define ROW_BYTES  (TILE * 2)
#define TILE_BYTES (TILE * ROW_BYTES)
#define THIN_BYTES (TILE * PITCH)

BST_DEVICE void load_tile(unsigned char *shared, const low_rank_args *a, int64_t row, int64_t column) {
    const int piece = (int)bst_thread() % (TILE / 8), first = (int)bst_thread() / (TILE / 8);
    BST_UNROLL
    for (int i = 0; i < TILE; i += THREADS / (TILE / 8)) {
        const int64_t r = row + first + i, c = column + 8 * piece;
        copy_or_clear(piece_of_tile(shared, ROW_BYTES, first + i, piece), a->dy, r * a->dy_stride + c,
                      r < a->rows && c < a->columns);
    }
}

#ifdef TILES
BST_KERNEL(low_rank_backward, low_rank_args, THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    unsigned char *const b = memory, *const thins = b + TILES * THIN_BYTES, *const tiles = thins + STAGES * THIN_BYTES;
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    const int64_t column = (int64_t)bst_block() * (TILES * TILE), row_tiles = (a.rows + TILE - 1) / TILE;
    const int64_t mine = (row_tiles - bst_block_y() + bst_blocks_y() - 1) / bst_blocks_y(), all = mine * TILES;
    float of_g[EIGHTS][4] = {}, of_db[TILES][EIGHTS][4] = {};
    uint32_t thin[STEPS][EIGHTS][2];
    bst_wait_for_previous();
    load_thin(b, a.b, RANK, column, a.columns, TILES * TILE);

    int64_t ahead = 0; /* the tile to be asked for next, counted over the block's rows */
    const auto ask = [&]() {
        if (ahead < all) {
            const int64_t row = (bst_block_y() + ahead / TILES * bst_blocks_y()) * TILE;
            load_tile(tiles + ahead % STAGES * TILE_BYTES, &a, row, column + ahead % TILES * TILE);
            if (ahead % TILES == 0)
                load_thin(thins + ahead / TILES % STAGES * THIN_BYTES, a.thin, a.thin_stride, row, a.rows, TILE);
        }
        bst_copy_async_commit();
        ahead++;
    };
    BST_UNROLL
    for (int i = 0; i < STAGES - 1; i++) ask();
    for (int64_t i = 0; i < mine; i++) {
        const int64_t row = (bst_block_y() + i * bst_blocks_y()) * TILE;
        BST_UNROLL
        for (int t = 0; t < TILES; t++) {
            bst_copy_async_wait(STAGES - 2);
            bst_sync();
            unsigned char *const tile = tiles + (ahead - (STAGES - 1)) % STAGES * TILE_BYTES;
            ask(); /* into the place of the tile before this one, which no warp reads any more */
            if (t == 0)
                BST_EACH(s, STEPS) thin_step(thin[s], thins + i % STAGES * THIN_BYTES, s);
            BST_EACH(s, STEPS) {
                uint32_t factor[4], of_b[EIGHTS][2];
                thin_step(of_b, b + t * THIN_BYTES, s);
                /* Its rows; matrices: upper left, lower left, upper right, lower right. */
                bst_load_matrices(factor, piece_of_tile(tile, ROW_BYTES, warp * STEP + lane % 16, 2 * s + lane / 16));
                BST_EACH(n, EIGHTS) bst_multiply_add(of_g[n], factor, of_b[n], TYPE == BST_F16_CODE);
                /* Its columns: rows of the tile are the columns of this. */
                bst_load_matrices_transposed(factor, piece_of_tile(tile, ROW_BYTES, s * STEP + lane / 16 * 8 + lane % 8,
                                                                   2 * warp + lane / 8 % 2));
                BST_EACH(n, EIGHTS) bst_multiply_add(of_db[t][n], factor, thin[s][n], TYPE == BST_F16_CODE);
            }
        }
        write_part(a.g_parts + (int64_t)bst_block() * a.rows * RANK, of_g, row + warp * STEP, a.rows);
        BST_EACH(n, EIGHTS)
            BST_EACH(j, 4) of_g[n][j] = 0;
    }
    BST_EACH(t, TILES)
        write_part(a.db_parts + (int64_t)bst_block_y() * a.columns * RANK, of_db[t], column + t * TILE + warp * STEP,
                   a.columns);
}

#else
/* Four numbers a thread. */
BST_KERNEL(low_rank_sum, low_rank_sum_args, THREADS, 1) {
    const int64_t of_g = a.rows * (RANK / 4), of_db = a.columns * (RANK / 4);
    const int64_t i = (int64_t)bst_block() * THREADS + bst_thread(), at = i < of_g ? i : i - of_g;
    if (i >= of_g + of_db) return;
    const float *const parts = i < of_g ? a.g_parts : a.db_parts;
    const int64_t apart = 4 * (i < of_g ? of_g : of_db);
    const int count = i < of_g ? a.column_parts : a.row_parts;
    float sum[4];
    bst_wait_for_previous();
    sum_parts(sum, parts, count, apart, at);
    BST_EACH(j, 4) sum[j] *= a.scale;
    if (i < of_g)
        bst_store(a.g, at / (RANK / 4) * a.g_stride + at % (RANK / 4) * 4, sum, TYPE, 4);
    else
        bst_store(a.db, 4 * at, sum, BST_F32_CODE, 4);
}
#endif
#endif
