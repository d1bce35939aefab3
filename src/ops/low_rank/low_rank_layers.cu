/* low_rank_layers.cu - linear layers of one input, y = x weight^T + bias of up to three weights, for few rows.
 *
 * A block has 16 columns of some y, so 16 rows of its weight, and all rows of x; its warps share out the width, each
 * a run of it, with AHEAD steps of 32 elements of weights and x in flight. The product's first factor is the weight,
 * so that its 16 rows fill a tile of tensor cores, of which x's rows are columns, eight a tile. Which elements of the
 * width make a step's products is nobody's concern as long as both factors agree: a lane reads 16 bytes of a row, and
 * has what two products want of it. The warps' sums are added up in their order.
 *
 * Where layers have adapters, some more blocks make x a^T of them meanwhile, which low_rank_add_expand then reads.
 *
 * Macros: TYPE (bf16 or f16), TILES: of eight rows of x (1, 2, 4), AHEAD; THIN_ROWS (1, 2, 4, 8), 0 for no adapters,
 * and FACTOR: of a (TYPE or float32).
 *
 * Bytes: all weights once, x once for each 16 columns, mostly from the L2, a once for THIN_ROWS rows, y once. H200,
 * bf16, 8 rows, us within a CUDA graph (2026-11-30): 1024 to 2048, 1024 and 1024 columns 4.6 (cuBLAS, three products,
 * 13.7; the bytes 2.0), to 3072 and 3072 5.2 (10.1; 2.9), 4096 to 4096, 1024 and 1024 15.8 (29.7; 11.8), to 12288 and
 * 12288 53.8 (55.8; 47.2). With adapters of rank 16 in float32 and low_rank_add_expand (2026-12-01): 7.5, 8.2, 18.5 and
 * 56.6, where low_rank_add's two launches behind this one made it 8.9, 10.0, 20.5 and 59.5.
 */
#include "pack.cuh"

#include "low_rank_args.h"
#if THIN_ROWS
#define THIN_VEC   8
#define THIN_AHEAD 1 /* with more, fewer blocks are resident for want of registers */
#include "low_rank_thin.cuh"
#endif

#define THREADS LOW_RANK_THREADS
#define WARPS   (THREADS / 32)
#define COLUMNS LOW_RANK_STEP
#define ROWS    (8 * TILES)
#define STEP    32 /* of the width, of which a lane has a quarter of a row's */

BST_KERNEL(low_rank_layers, low_rank_layers_args, THREADS, 1) {
    BST_SHARED(float, parts, WARPS * COLUMNS * ROWS);
    const int thread = (int)bst_thread(), warp = thread / 32, lane = (int)bst_lane();
    const int block = (int)bst_block() - a.thin_blocks;
#if THIN_ROWS
    if (block < 0) {
        bst_wait_for_previous();
        bst_let_next_start();
        make_thin(&a.thin, bst_block(), parts);
        return;
    }
#endif
    const int layer = (block >= a.first_block[1]) + (block >= a.first_block[2]);
    const int64_t first = (int64_t)(block - a.first_block[layer]) * COLUMNS;
    const int64_t steps = (a.width + STEP - 1) / STEP, each = (steps + WARPS - 1) / WARPS;
    const int64_t begin = warp * each, end = begin + each < steps ? begin + each : steps;
    const bst_raw zeros = {{0, 0, 0, 0}};
    /* Behind the last column and row those again, whose sums are nobody's. */
    int64_t of_weight[2], of_x[TILES];
    BST_EACH(half, 2) {
        const int64_t column = first + lane / 4 + 8 * half;
        of_weight[half] = (column < a.columns[layer] ? column : a.columns[layer] - 1) * a.weight_stride[layer];
    }
    BST_EACH(tile, TILES) {
        const int row = 8 * tile + lane / 4;
        of_x[tile] = (row < a.rows ? row : a.rows - 1) * a.x_stride;
    }
    float sums[TILES][4] = {};
    bst_wait_for_previous();
    bst_let_next_start();
    BST_ROLLED
    for (int64_t step = begin; step < end; step += AHEAD) {
        bst_raw w[AHEAD][2], x[AHEAD][TILES];
        BST_EACH(i, AHEAD) {
            const int64_t k = (step + i) * STEP + lane % 4 * 8;
            const bool there = step + i < end && k < a.width;
            BST_EACH(half, 2)
                w[i][half] = there ? bst_read_once(bst_at(a.weight[layer], of_weight[half] + k, TYPE), 16) : zeros;
            BST_EACH(tile, TILES) x[i][tile] = there ? bst_raw_at(a.x, of_x[tile] + k, TYPE, 8) : zeros;
        }
        BST_EACH(i, AHEAD)
            BST_EACH(pair, 2) {
                const uint32_t left[4] = {w[i][0].w[2 * pair], w[i][1].w[2 * pair], w[i][0].w[2 * pair + 1],
                                          w[i][1].w[2 * pair + 1]};
                BST_EACH(tile, TILES) bst_multiply_add(sums[tile], left, x[i][tile].w + 2 * pair, TYPE == BST_F16_CODE);
            }
    }
    /* [warp, row of x, column] */
    BST_EACH(tile, TILES)
        BST_EACH(i, 4) {
            const int row = 8 * tile + lane % 4 * 2 + i % 2, column = lane / 4 + i / 2 * 8;
            parts[(warp * ROWS + row) * COLUMNS + column] = sums[tile][i];
        }
    bst_sync();
    for (int i = thread; i < a.rows * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS;
        const int64_t column = first + i % COLUMNS;
        if (column >= a.columns[layer]) continue;
        float sum = 0, bias = 0;
        BST_EACH(w, WARPS) sum += parts[w * ROWS * COLUMNS + i];
        if (a.bias[layer]) bst_load(&bias, a.bias[layer], column, TYPE, 1);
        sum += bias;
        bst_store(a.y[layer], row * a.y_stride[layer] + column, &sum, TYPE, 1);
    }
}
