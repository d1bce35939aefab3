/* linear_cross_entropy_chunks.c - see linear_cross_entropy.h. */
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

enum {
    TILE = 128,        /* rows and columns of a tile: what the products round to */
    CHUNK_ROWS = 4096, /* on CUDA by default: more rows make no product faster for its size (bench/NOTES.md) */
    FEWER_ROWS = 1024, /* where no gradient is wanted: no slower in anything measured, from H = 1024 to 4096 */
    LEAST_ROWS = 64
};

/* Waves of tiles, one a multiprocessor at a time, in which dhidden's product is made from chunks of `rows` rows. Its
 * tiles are few: a last wave with little to do costs as much as a full one. */
static int64_t waves(const linear_cross_entropy_chunks *c, int64_t rows) {
    int64_t across = (c->width + TILE - 1) / TILE, whole = c->rows / rows, rest = c->rows % rows;
    int64_t each = ((rows + TILE - 1) / TILE * across + c->processors - 1) / c->processors;
    return whole * each + ((rest + TILE - 1) / TILE * across + c->processors - 1) / c->processors;
}

/* Rows of a chunk: at most `most`, in no more chunks than that needs; whole tiles where they can be, and on CUDA (where
 * `processors` are known) the fewest waves of dhidden's product, if there is one. */
static int64_t even_rows(const linear_cross_entropy_chunks *c, int64_t most) {
    int64_t chunks = (c->rows + most - 1) / most, even = (c->rows + chunks - 1) / chunks;
    int64_t best = (even + TILE - 1) / TILE * TILE;
    if (chunks == 1 || best > most) return even;
    if (c->forward_alone) return best;
    for (int64_t rows = best + TILE; c->processors && rows <= most; rows += TILE)
        if (waves(c, rows) < waves(c, best)) best = rows;
    return best;
}

/* By default on CUDA where hidden alone has a gradient. No sum of dweight asks for many; but the product that makes
 * dhidden, rows x H, has tiles for all of a GPU's multiprocessors from so many elements on. Fewer than the most cost
 * the products a few percent (bench/NOTES.md): that is left to calls whose logits are too many. */
static int64_t rows_of_hidden_alone(int64_t width, bool fits) {
    enum { MOST = 2048, ELEMENTS = 1 << 22 };
    int64_t rows = ELEMENTS / (width > 0 ? width : 1);
    if (fits || rows > MOST) return MOST;
    return rows < FEWER_ROWS ? FEWER_ROWS : rows;
}

/* By default on CUDA: a 64th of the GPU's memory, which on one of 80 GiB costs no time. */
static int64_t usual_bytes(int64_t memory) {
    const int64_t least = INT64_C(256) << 20, most = INT64_C(1664) << 20, part = memory / 64;
    return !memory || part > most ? most : part < least ? least : part;
}

int64_t bst__linear_cross_entropy_chunk_rows(const linear_cross_entropy_chunks *c) {
    bool cpu = !c->processors, by_default = !c->budget;
    int64_t bytes = by_default ? (cpu ? INT64_C(256) << 20 : usual_bytes(c->memory)) : c->budget;
    int64_t most = bytes / c->row_bytes;
    int64_t eighth = (c->rows + LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS - 1) / LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS;
    if (cpu && by_default) {
        /* Less than fits, where no sum of rounded chunks is made: dweight of 16 bits, which a CPU's product rounds at
         * each, is as exact as one product over all rows where it is one. Not under 512 rows where they fit: the
         * threads wait for each other some nine times a chunk, which beside other work takes as long as its products.
         * Not under 256 at all: each chunk reads and writes all of dweight, which at 64 costs a third of these. */
        int64_t fewer = eighth < 512 ? 512 : eighth;
        if (most > fewer && !c->rounded) most = fewer;
        if (most < 256) most = 256;
    } else if (by_default && (c->hidden_alone || c->forward_alone)) {
        int64_t enough = c->hidden_alone ? rows_of_hidden_alone(c->width, most >= c->rows) : FEWER_ROWS;
        if (most > enough) most = enough;
    } else if (by_default && most < c->rows) {
        /* Not so many chunks that dweight would be summed in float32, which takes memory too, where that is all that
         * keeps a small GPU from it. */
        int64_t few = (eighth + TILE - 1) / TILE * TILE, small = few > CHUNK_ROWS ? few : CHUNK_ROWS;
        if (most > small) most = small;
        if (c->rounded && most < few && few <= usual_bytes(0) / c->row_bytes) most = few;
    }
    return even_rows(c, most < LEAST_ROWS ? LEAST_ROWS : most);
}

/* Batches of all lengths have chunks of all sizes, and an allocator that keeps what is freed, as PyTorch's does, has a
 * block for each that was larger than those before it. Steps of 512 rows are 148 MiB of 151936 classes in 16 bits. */
int64_t bst__linear_cross_entropy_memory_rows(const linear_cross_entropy_chunks *c, int64_t rows) {
    enum { STEP = 512 };
    if (!c->processors || c->budget || rows < STEP) return rows;
    int64_t whole = (rows + STEP - 1) / STEP * STEP;
    return whole * c->row_bytes > usual_bytes(c->memory) ? rows : whole;
}
