/* dropout_cpu.c - dropout on CPU, a tile at a time: its factors out of random bits, then a product an element. */
#include "ops/dropout/dropout_cpu.h"

#include "core/philox.h"

enum { TILE = 1024, FOURS = TILE / DROPOUT_FOUR + 1 }; /* a tile may begin within four elements */

/* What elements first to first + n - 1 are multiplied with: 0 or the scale. The first of them is returned. */
static const float *factors(float out[FOURS * DROPOUT_FOUR], const dropout_cpu *a, int64_t first, int64_t n) {
    const int64_t within = first % DROPOUT_FOUR, fours = (within + n + DROPOUT_FOUR - 1) / DROPOUT_FOUR;
    const uint64_t from = (uint64_t)(first / DROPOUT_FOUR), key = a->key;
    const uint32_t low = (uint32_t)a->offset, high = (uint32_t)(a->offset >> 32);
    const uint32_t threshold = a->threshold;
    const float scale = a->scale;
    uint32_t words[DROPOUT_FOUR][FOURS];
#pragma omp simd
    for (int64_t i = 0; i < fours; i++) {
        const uint64_t counter = from + (uint64_t)i;
        const bst_words bits = bst_philox_words(key, (uint32_t)counter, (uint32_t)(counter >> 32), low, high);
        words[0][i] = bits.a, words[1][i] = bits.b, words[2][i] = bits.c, words[3][i] = bits.d;
    }
    for (int64_t i = 0; i < fours; i++)
        for (int w = 0; w < DROPOUT_FOUR; w++) out[i * DROPOUT_FOUR + w] = words[w][i] < threshold ? 0.0f : scale;
    return out + within;
}

static void *element(const dropout_cpu *a, int tensor, int64_t e) {
    const dropout_matrix *m = &a->of[tensor];
    return bst_at(m->data, bst__row_start(&m->rows, e / a->columns) + e % a->columns, a->dtype);
}

/* Product and sum are rounded one by one, in loops of their own, for a compiler may make one operation of both: so the
 * bits are those of every other level, and of the kernel. */
void BST_CPU(bst__dropout_cpu)(void *context, int64_t begin, int64_t end) {
    const dropout_cpu *a = context;
    float random[FOURS * DROPOUT_FOUR], x[TILE], addend[TILE];
    for (int64_t e = begin, n; e < end; e += n) {
        n = a->columns - e % a->columns;
        if (n > end - e) n = end - e;
        if (n > TILE) n = TILE;
        const float *factor = factors(random, a, e, n);
        bst_load(x, element(a, DROPOUT_X, e), a->dtype, n);
        for (int64_t i = 0; i < n; i++) x[i] *= factor[i];
        if (a->of[DROPOUT_ADDEND].data) {
            bst_load(addend, element(a, DROPOUT_ADDEND, e), a->dtype, n);
            for (int64_t i = 0; i < n; i++) x[i] += addend[i];
        }
        bst_store(element(a, DROPOUT_Y, e), x, a->dtype, n);
    }
}
