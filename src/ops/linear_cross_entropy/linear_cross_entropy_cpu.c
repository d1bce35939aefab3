/* linear_cross_entropy_cpu.c - what the fused loss needs beside matrix products and the rows' cross-entropy, on CPU. */
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

void BST_CPU(bst__linear_cross_entropy_spread_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    float tile[BST_TILE];
    BST_TILES(c, n, 0, a->columns, BST_TILE) {
        bst_load(tile, bst_at(a->in, c, a->dtype), a->dtype, n);
        for (int64_t row = begin; row < end; row++)
            bst_store(bst_at(a->out, row * a->stride + c, a->out_type), tile, a->out_type, n);
    }
}

void BST_CPU(bst__linear_cross_entropy_widen_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    for (int64_t row = begin; row < end; row++)
        bst_load((float *)a->out + row * a->columns, bst_at(a->in, row * a->stride, a->dtype), a->dtype, a->columns);
}

void BST_CPU(bst__linear_cross_entropy_add_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    float tile[BST_TILE];
    BST_TILES(i, n, begin, end, BST_TILE) {
        bst_load(tile, bst_at(a->in, i, a->dtype), a->dtype, n);
        for (int64_t j = 0; j < n; j++) a->dweight[i + j] += tile[j];
    }
}

void BST_CPU(bst__linear_cross_entropy_round_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    BST_TILES(i, n, begin, end, BST_TILE) bst_store(bst_at(a->out, i, a->dtype), a->dweight + i, a->dtype, n);
}

void BST_CPU(bst__linear_cross_entropy_add_columns_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    enum { WIDTH = BST_TILE / 4 }; /* with the sums, which are float64, well within the first-level cache */
    float tile[WIDTH];
    BST_TILES(c, n, begin, end, WIDTH) {
        for (int64_t row = 0; row < a->rows; row++) {
            bst_load(tile, bst_at(a->in, row * a->stride + c, a->dtype), a->dtype, n);
            for (int64_t i = 0; i < n; i++) a->dbias[c + i] += (double)tile[i];
        }
    }
}

void BST_CPU(bst__linear_cross_entropy_round_columns_cpu)(void *context, int64_t begin, int64_t end) {
    const linear_cross_entropy_cpu *a = context;
    float tile[BST_TILE];
    BST_TILES(c, n, begin, end, BST_TILE) {
        for (int64_t i = 0; i < n; i++) tile[i] = (float)(a->scale * a->dbias[c + i]);
        bst_store(bst_at(a->out, c, a->out_type), tile, a->out_type, n);
    }
}
