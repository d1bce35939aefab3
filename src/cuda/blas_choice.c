/* blas_choice.c - where the heuristic's first answer is not the best of its answers.
 *
 * Measured on an H200 (cuBLASLt 13.1, bf16, operands distributed as in training, candidates interleaved, medians) on the
 * three products of an output head, V = 128256 and 151936, H = 4096 and 1024, 512 to 16384 tokens. Times relative to the
 * first answer:
 *   logits  m = tokens, n = V, k = H   tile 201: 0.94 to 0.97 from 2048 tokens on (H = 1024: 0.88), 197 alike; 512: 1.01
 *   dhidden m = tokens, n = H, k = V   the first answer is the best but at 16384 tokens (tile 24: 0.94)
 *   dweight m = V, n = H, k = tokens   tile 29: 0.80 to 0.94 up to 8192 tokens, the more so where dweight is added to or
 *                                      kept in float32; 16384: tile 24 0.93 to 0.95. H = 1024: 0.92 to 1.02
 * These products are limited by power; what wins moves fewer bytes for the same arithmetic. Other chips, float32 and
 * other layouts keep the first answer. */
#include "cuda/blas_choice.h"

/* cublasLtMatmulTile_t. */
enum {
    TILE_256x128 = 24,
    TILE_128x160 = 29,
    TILE_LOGITS = 201,
    TILE_LOGITS_TOO = 197,
    LARGE = 1024, /* rows or terms from which on the above was measured */
    WIDE = 64     /* columns, in thousands, of a vocabulary that counts as large */
};

static int find(uint32_t tile, const uint32_t *tiles, int count) {
    for (int i = 0; i < count; i++)
        if (tiles[i] == tile) return i;
    return -1;
}

static int first_of(uint32_t one, uint32_t other, const uint32_t *tiles, int count) {
    int at = find(one, tiles, count);
    if (at < 0) at = find(other, tiles, count);
    return at < 0 ? 0 : at;
}

int bst__preferred_candidate(const bst_product *p, const uint32_t *tiles, int count) {
    if (p->arch != 90 || !p->halves || count < 2) return 0;
    int64_t vocabulary = p->a_transposed ? p->m : p->b_transposed ? p->n : p->k;
    if (vocabulary < WIDE * 1000) return 0;
    if (p->a_transposed && !p->b_transposed)
        return p->k > 12 * LARGE ? first_of(TILE_256x128, TILE_128x160, tiles, count)
                                 : first_of(TILE_128x160, TILE_256x128, tiles, count);
    if (!p->a_transposed && p->b_transposed)
        return p->m >= LARGE ? first_of(TILE_LOGITS, TILE_LOGITS_TOO, tiles, count) : 0;
    if (!p->a_transposed && !p->b_transposed && p->m > 12 * LARGE)
        return first_of(TILE_256x128, TILE_256x128, tiles, count);
    return 0;
}
