/* low_rank_glu.cu - the backward pass of a gated unit together with what the adapters around it read of its results, in
 * one pass: dgate, dup and y are made in shared memory, and multiplied there.
 *
 * low_rank_glu_backward: a block has the columns of TILES tiles of THREADS / 2, and of the rows' tiles every one that
 * is its number in y modulo the blocks there. Tiles of gate, up and dy come by asynchronous copies, two ahead. Each
 * thread turns what it has copied into dgate, dup and y, which take its place, and writes the first two; then warps
 * multiply. A warp has 16 columns, transposed, of each matrix by its thin results, summed over the block's rows; and 16
 * rows of one matrix, of some of the tile's columns, by its b, summed over the block's columns. Sums stay in registers;
 * warps that share rows add up theirs in shared memory when the rows change. low_rank_glu_sum then adds up what the
 * blocks have, in one order.
 *
 * Macros: TYPE (bf16 or f16), RANK (8, 16, 24, 32), DOWN and LATE: da_down and thin_down are wanted; without them
 * low_rank_glu_sum is meant, else THREADS, TILES, UNIT and LIMITED as in glu.cu, WITH_Y: y is to be written.
 *
 * Bytes: five tensors' elements once (six with y), 2 each; beside it parts of g and thin_down, 4 * rank * rows * column
 * parts each, and of the other three, 4 * rank * columns * row parts, written and read, mostly within the L2.
 * Measured on an H200, bf16, silu, rank 16, with da_down, both kernels: 287 us at 8192 x 12288, where glu_backward
 * alone takes 239 and that with y, low_rank_backward of gate and of up and da_down's product 470; 79, 62 and 137 at
 * 8192 x 3072. With thin_down 324 and 525. 128 registers. */
#include "gated_unit.cuh"
#define MATRICES (2 + LATE) /* that are multiplied by a b: dgate, dup, y */
#define SUMMED   (2 + DOWN) /* that are multiplied, transposed, by thin results */
#ifndef THREADS
#define THREADS LOW_RANK_THREADS
#define SUM_ALONE
#endif
#include "low_rank_pieces.cuh"

#ifndef SUM_ALONE
#define ROWS       LOW_RANK_GLU_ROWS
#define COLUMNS    (THREADS / 2)
#define WARPS      (THREADS / 32)
#define PIECES     (COLUMNS / 8)
#define STAGES     LOW_RANK_GLU_STAGES
#define ROW_BYTES  (2 * COLUMNS)
#define TILE_BYTES (ROWS * ROW_BYTES)
#define THIN_BYTES (ROWS * PITCH)
#define B_BYTES    (COLUMNS * PITCH)

/* Warps that have the same rows of the same matrix, and how many have any. */
#define SLICES      (WARPS / (2 * MATRICES))
#define MULTIPLYING (2 * MATRICES * SLICES)

BST_DEVICE void load_tiles(unsigned char *shared, const low_rank_glu_args *a, int64_t row, int64_t column) {
    const int piece = (int)bst_thread() % PIECES, first = (int)bst_thread() / PIECES;
    const int64_t c = column + 8 * piece;
    BST_UNROLL
    for (int i = 0; i < ROWS; i += THREADS / PIECES) {
        const int64_t r = row + first + i;
        BST_EACH(m, 3)
            copy_or_clear(piece_of_tile(shared + m * TILE_BYTES, ROW_BYTES, first + i, piece), a->in[m],
                          r * a->in_stride[m] + c, r < a->rows && c < a->columns);
    }
}

/* What this thread has copied becomes dgate, dup and y. */
BST_DEVICE void apply(unsigned char *shared, const low_rank_glu_args *a, int64_t row, int64_t column) {
    const int piece = (int)bst_thread() % PIECES, first = (int)bst_thread() / PIECES;
    const int64_t c = column + 8 * piece;
    BST_ROLLED /* for registers */
        for (int i = 0; i < ROWS; i += THREADS / PIECES) {
        const int64_t r = row + first + i;
        const bool is_there = r < a->rows && c < a->columns;
        float v[3][8];
        BST_EACH(m, 3)
            bst_unpack(v[m], bst_read(piece_of_tile(shared + m * TILE_BYTES, ROW_BYTES, first + i, piece), 16), TYPE,
                       8);
        BST_EACH(j, 8) {
            const bst_gated_gradients d =
                bst_gated_within_backward(v[2][j], v[0][j], v[1][j], UNIT, a->alpha, LIMITED, a->limit, TYPE);
            v[0][j] = d.dgate, v[1][j] = d.dup, v[2][j] = d.y;
        }
        BST_EACH(m, 3) {
            const bst_raw raw = bst_pack(v[m], TYPE, 8);
            if (m < 2 || DOWN || LATE)
                bst_write(piece_of_tile(shared + m * TILE_BYTES, ROW_BYTES, first + i, piece), raw, 16);
            if (is_there && (m < 2 || WITH_Y))
                bst_write_once((char *)a->out[m] + 2 * (r * a->out_stride[m] + c), raw, 16);
        }
    }
}

/* The b of matrix m in columns 16 step and on, for its rows; of y that is a_down, whose rows are the ranks. */
BST_DEVICE void b_step(uint32_t out[EIGHTS][2], unsigned char *b, int m, int step) {
    if (m < 2) {
        thin_step(out, b, step);
        return;
    }
    const int lane = (int)bst_lane();
    BST_UNROLL
    for (int n = 0; n < EIGHTS; n += 2) {
        uint32_t v[4];
        const int eight = n + lane / 16;
        bst_load_matrices(
            v, piece_of_tile(b, ROW_BYTES, 8 * (eight < EIGHTS ? eight : n) + lane % 8, 2 * step + lane / 8 % 2));
        out[n][0] = v[0], out[n][1] = v[1];
        if (n + 1 < EIGHTS) out[n + 1][0] = v[2], out[n + 1][1] = v[3];
    }
}

BST_DEVICE void load_b(unsigned char *b, const low_rank_glu_args *a, int64_t column) {
    BST_EACH(t, TILES) {
        const int64_t first = column + t * COLUMNS;
        unsigned char *const mine = b + t * MATRICES * B_BYTES;
        load_thin(mine, a->b_gate, RANK, first, a->columns, COLUMNS);
        load_thin(mine + B_BYTES, a->b_up, RANK, first, a->columns, COLUMNS);
        for (int i = (int)bst_thread(); i < (LATE ? RANK * PIECES : 0); i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES;
            copy_or_clear(piece_of_tile(mine + 2 * B_BYTES, ROW_BYTES, row, piece), a->a_down,
                          row * a->columns + first + 8 * piece, first + 8 * piece < a->columns);
        }
    }
}

/* The sums of the warps that had a row's slices, from where they left them. */
BST_DEVICE void write_g(const low_rank_glu_args *a, const float *sums, int64_t row) {
    for (int i = (int)bst_thread(); i < MATRICES * ROWS * (RANK / 4); i += THREADS) {
        const int quad = i % (RANK / 4), r = i / (RANK / 4) % ROWS, m = i / (RANK / 4) / ROWS;
        float sum[4];
        const int at = ((2 * m + r / STEP) * STEP + r % STEP) * RANK + 4 * quad;
        sum_parts(sum, sums, SLICES, 2 * MATRICES * STEP * RANK, at / 4);
        if (row + r < a->rows)
            bst_store(a->g_parts, ((m * (int64_t)bst_blocks() + bst_block()) * a->rows + row + r) * RANK + 4 * quad,
                      sum, BST_F32_CODE, 4);
    }
}

BST_KERNEL(low_rank_glu_backward, low_rank_glu_args, THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    unsigned char *const tiles = memory, *const thins = tiles + STAGES * 3 * TILE_BYTES;
    unsigned char *const b = thins + STAGES * SUMMED * THIN_BYTES;
    float *const sums = (float *)(b + TILES * MATRICES * B_BYTES);
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    const int matrix = warp / 2 % MATRICES, slice = warp / (2 * MATRICES);
    const int64_t column = (int64_t)bst_block() * (TILES * COLUMNS), row_tiles = (a.rows + ROWS - 1) / ROWS;
    const int64_t mine = (row_tiles - bst_block_y() + bst_blocks_y() - 1) / bst_blocks_y(), all = mine * TILES;
    float of_g[EIGHTS][4] = {}, of_db[TILES][SUMMED][EIGHTS][4] = {};
    bst_wait_for_previous();
    load_b(b, &a, column);

    int64_t ahead = 0; /* the tile to be asked for next, counted over the block's rows */
    const auto ask = [&]() {
        if (ahead < all) {
            const int64_t row = (bst_block_y() + ahead / TILES * bst_blocks_y()) * ROWS;
            load_tiles(tiles + ahead % STAGES * (3 * TILE_BYTES), &a, row, column + ahead % TILES * COLUMNS);
            if (ahead % TILES == 0) {
                unsigned char *const thin = thins + ahead / TILES % STAGES * (SUMMED * THIN_BYTES);
                BST_EACH(m, SUMMED) load_thin(thin + m * THIN_BYTES, a.thin[m], a.thin_stride[m], row, a.rows, ROWS);
            }
        }
        bst_copy_async_commit();
        ahead++;
    };
    ask();
    ask();
    for (int64_t i = 0; i < mine; i++) {
        const int64_t row = (bst_block_y() + i * bst_blocks_y()) * ROWS;
        unsigned char *const thin = thins + i % STAGES * (SUMMED * THIN_BYTES);
        BST_UNROLL
        for (int t = 0; t < TILES; t++) {
            unsigned char *const tile = tiles + (ahead - 2) % STAGES * (3 * TILE_BYTES);
            bst_copy_async_wait(1);
            apply(tile, &a, row, column + t * COLUMNS); /* nobody else's copies are read */
            bst_sync();
            ask(); /* into the place of the tile before this one, which no warp reads any more */
            if (t == 0 && i) write_g(&a, sums, row - bst_blocks_y() * ROWS);
            BST_ROLLED
            for (int s = 0; s < ROWS / STEP; s++)
                BST_EACH(m, SUMMED) {
                    uint32_t factor[4], of_thin[EIGHTS][2];
                    thin_step(of_thin, thin + m * THIN_BYTES, s);
                    /* Its columns: rows of the tile are the columns of this. */
                    bst_load_matrices_transposed(
                        factor, piece_of_tile(tile + m * TILE_BYTES, ROW_BYTES, s * STEP + lane / 16 * 8 + lane % 8,
                                              2 * warp + lane / 8 % 2));
                    BST_EACH(n, EIGHTS) bst_multiply_add(of_db[t][m][n], factor, of_thin[n], TYPE == BST_F16_CODE);
                }
            if (warp < MULTIPLYING) {
                BST_UNROLL_TWICE
                for (int s = 0; s < COLUMNS / SLICES / STEP; s++) {
                    const int step = slice * (COLUMNS / SLICES / STEP) + s;
                    uint32_t factor[4], of_b[EIGHTS][2];
                    b_step(of_b, b + (t * MATRICES + matrix) * B_BYTES, matrix, step);
                    bst_load_matrices(factor, piece_of_tile(tile + matrix * TILE_BYTES, ROW_BYTES,
                                                            warp % 2 * STEP + lane % 16, 2 * step + lane / 16));
                    BST_EACH(n, EIGHTS) bst_multiply_add(of_g[n], factor, of_b[n], TYPE == BST_F16_CODE);
                }
            }
        }
        if (TILES == 1) bst_sync(); /* the sums of the rows before are being read */
        if (warp < MULTIPLYING) write_part(sums, of_g, warp * STEP, MULTIPLYING * STEP);
        BST_EACH(n, EIGHTS)
            BST_EACH(j, 4) of_g[n][j] = 0;
    }
    bst_sync();
    if (mine > 0) write_g(&a, sums, (bst_block_y() + (mine - 1) * bst_blocks_y()) * ROWS);
    BST_EACH(m, SUMMED)
        BST_EACH(t, TILES)
            write_part(a.db_parts + (m * (int64_t)bst_blocks_y() + bst_block_y()) * a.columns * RANK, of_db[t][m],
                       column + t * COLUMNS + warp * STEP, a.columns);
}

#else
/* Four numbers a thread: of g's halves, thin_down, db_gate, db_up, da_down. */
BST_KERNEL(low_rank_glu_sum, low_rank_glu_sum_args, THREADS, 1) {
    const int64_t of_g = a.rows * (RANK / 4), of_db = a.columns * (RANK / 4);
    const int64_t i = (int64_t)bst_block() * THREADS + bst_thread(), in_db = i - MATRICES * of_g;
    if (in_db >= SUMMED * of_db) return;
    const bool is_g = in_db < 0;
    const int m = (int)(is_g ? i / of_g : in_db / of_db);
    const int64_t at = is_g ? i % of_g : in_db % of_db, size = is_g ? of_g : of_db;
    const int count = is_g ? a.column_parts : a.row_parts;
    float sum[4];
    bst_wait_for_previous();
    sum_parts(sum, (is_g ? a.g_parts : a.db_parts) + 4 * m * count * size, count, 4 * size, at);
    const int64_t row = at / (RANK / 4), column = at % (RANK / 4) * 4;
    if (m < 2)
        BST_EACH(j, 4) sum[j] *= a.scale[m];
    if (is_g)
        bst_store(a.g[m], row * a.g_stride[m] + column, sum, TYPE, 4);
    else if (m < 2)
        bst_store(a.db[m], 4 * at, sum, BST_F32_CODE, 4);
    else
        BST_EACH(j, 4) a.db[2][(column + j) * a.columns + row] = sum[j];
}
#endif
