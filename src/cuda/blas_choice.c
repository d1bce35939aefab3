/* blas_choice.c - where the heuristic's first answer is not the best of its answers.
 *
 * Measured on an H200 (cuBLASLt 13.1, bf16, operands distributed as in training, candidates interleaved, medians) on
 * the three products of an output head, V = 128256 and 151936, H = 4096 and 1024, 512 to 16384 tokens. Times relative
 * to the first answer:
 *   logits  m = tokens, n = V, k = H   tiles 201 and 197: 0.94 to 0.97 from 2048 tokens on (H = 1024: 0.88), 197 by 1
 *                                      to 2 % the better of them at 4096, 201 from 5504 on; 512: 1.01
 *   dhidden m = tokens, n = H, k = V   its tiles are few, and what counts is how full the last wave of them is: tile
 *                                      24 where that fills 95 % of all waves (1024, 2048, 3072, 4096, 5120, 5248
 *                                      tokens: the best of all, or within 1 %), else tile 20, a half of 24: 0.94 to
 *                                      0.97 of the first answer at 2752, 5376, 5504, 5632, 6528 and 6784; 16384: tile
 *                                      24 0.94. An H100 at H = 3584, V = 152064 and 4096 tokens took 9.57 ms with tile
 *                                      20 within a training step, 5.8 with the first answer: so where H is no multiple
 *                                      of 1024, the first answer takes tile 20's place
 *   dweight m = V, n = H, k = tokens   tile 29: 0.80 to 0.94 up to 8192 tokens, the more so where dweight is added to
 *                                      or left in float32; 16384: tile 24 0.93 to 0.95. H = 1024: 0.92 to 1.02
 * These products are limited by power; what wins moves fewer bytes for the same arithmetic. Other chips, float32 and
 * other layouts keep the first answer. */
#include "cuda/blas_choice.h"

/* cublasLtMatmulTile_t. */
enum {
    TILE_128x128 = 20,
    TILE_256x128 = 24,
    TILE_128x160 = 29,
    TILE_LOGITS = 201,
    TILE_LOGITS_TOO = 197,
    LARGE = 1024, /* rows or terms from which on the above was measured; tile 20: at multiples of it as widths */
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

/* Whether tiles of 256 x 128 keep all multiprocessors busy in their last wave, or nearly. */
static bool fills_waves(const bst_product *p) {
    int64_t tiles = ((p->m + 127) / 128) * ((p->n + 255) / 256), each = p->processors > 0 ? p->processors : 1;
    return 100 * tiles >= 95 * ((tiles + each - 1) / each * each);
}

int bst__preferred_candidate(const bst_product *p, const uint32_t *tiles, int count) {
    if (p->arch != 90 || !p->halves || count < 2) return 0;
    int64_t vocabulary = p->a_transposed ? p->m : p->b_transposed ? p->n : p->k;
    if (vocabulary < WIDE * 1000) return 0;
    if (p->a_transposed && !p->b_transposed)
        return p->k > 12 * LARGE ? first_of(TILE_256x128, TILE_128x160, tiles, count)
                                 : first_of(TILE_128x160, TILE_256x128, tiles, count);
    if (!p->a_transposed && p->b_transposed) {
        if (p->m < LARGE) return 0;
        return p->m <= 5 * LARGE ? first_of(TILE_LOGITS_TOO, TILE_LOGITS, tiles, count)
                                 : first_of(TILE_LOGITS, TILE_LOGITS_TOO, tiles, count);
    }
    if (!p->a_transposed && !p->b_transposed && p->m >= LARGE) {
        if (p->m > 12 * LARGE || fills_waves(p)) return first_of(TILE_256x128, TILE_128x128, tiles, count);
        return p->n % LARGE ? 0 : first_of(TILE_128x128, TILE_256x128, tiles, count);
    }
    return 0;
}
