/* low_rank_cpu.c - products of dy, of 16 bits, and of dy transposed with a thin matrix, on CPU: sums in float32, which
 * a framework's own product may not leave in that type. */
#include "ops/low_rank/low_rank.h"

enum {
    WIDTH = 32,
    DEPTH = 64
}; /* columns of the thin matrix, and of dy, at a time: sums stay in the first-level cache */

/* sums[j] += x y[j] for so many columns of the thin matrix. */
static inline void add(float sums[WIDTH], float x, const float *y, int64_t width) {
    if (width == WIDTH)
        for (int j = 0; j < WIDTH; j++) sums[j] += x * y[j];
    else
        for (int64_t j = 0; j < width; j++) sums[j] += x * y[j];
}

static void store(const low_rank_cpu *a, int64_t row, int64_t column, float *sums, int64_t width) {
    for (int64_t j = 0; j < width; j++) sums[j] *= a->scale;
    bst_store(bst_at(a->out, row * a->out_stride + column, a->out_type), sums, a->out_type, width);
}

void BST_CPU(bst__low_rank_cpu)(void *context, int64_t begin, int64_t end) {
    const low_rank_cpu *a = context;
    float x[DEPTH];
    for (int64_t row = begin; row < end; row++)
        for (int64_t j = 0; j < a->rank; j += WIDTH) {
            float sums[WIDTH] = {0};
            const int64_t width = bst__lesser(WIDTH, a->rank - j);
            for (int64_t i = 0; i < a->k; i += DEPTH) {
                const int64_t n = bst__lesser(DEPTH, a->k - i);
                bst_load(x, bst_at(a->dy, row * a->dy_stride + i, a->dtype), a->dtype, n);
                for (int64_t e = 0; e < n; e++) add(sums, x[e], a->y + (i + e) * a->rank + j, width);
            }
            store(a, row, j, sums, width);
        }
}

void BST_CPU(bst__low_rank_transposed_cpu)(void *context, int64_t begin, int64_t end) {
    const low_rank_cpu *a = context;
    float x[DEPTH];
    for (int64_t first = begin; first < end; first += DEPTH)
        for (int64_t j = 0; j < a->rank; j += WIDTH) {
            float sums[DEPTH][WIDTH] = {{0}};
            const int64_t n = bst__lesser(DEPTH, end - first), width = bst__lesser(WIDTH, a->rank - j);
            for (int64_t row = 0; row < a->k; row++) {
                bst_load(x, bst_at(a->dy, row * a->dy_stride + first, a->dtype), a->dtype, n);
                for (int64_t e = 0; e < n; e++) add(sums[e], x[e], a->y + row * a->rank + j, width);
            }
            for (int64_t e = 0; e < n; e++) store(a, first + e, j, sums[e], width);
        }
}
