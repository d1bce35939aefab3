/* low_rank_cpu.c - products of dy, of 16 bits, and of dy transposed with a thin matrix, on CPU: sums in float32, which
 * a framework's own product may not leave in that type; what adapters add to results, in the same; and thin matrices
 * of float32 in pieces. */
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

/* ---- what adapters add ------------------------------------------------------------------------------------------- */

/* The rank of a row of thin is that of a layer: its row of a. */
static const void *row_of_a(const low_rank_sums *s, int64_t rank) {
    const low_rank_layer *layer = s->layer;
    while (rank >= layer->first + layer->rank) layer++;
    return bst_at(layer->a, (rank - layer->first) * s->width, s->factor_type);
}

void BST_CPU(bst__low_rank_thin_cpu)(void *context, int64_t begin, int64_t end) {
    enum { PIECE = 1024 }; /* of a row, that is float32 at a time */
    const low_rank_sums *s = context;
    float a[PIECE], x[PIECE];
    for (int64_t i = begin; i < end; i++) {
        const int64_t rank = i % s->ranks, first = i / s->ranks * LOW_RANK_CPU_ROWS;
        const int64_t rows = bst__lesser(LOW_RANK_CPU_ROWS, s->rows - first);
        const void *of_a = row_of_a(s, rank);
        double sums[LOW_RANK_CPU_ROWS] = {0};
        BST_TILES(at, n, 0, s->width, PIECE) {
            bst_load(a, bst_at(of_a, at, s->factor_type), s->factor_type, n);
            for (int64_t row = 0; row < rows; row++) {
                bst_load(x, bst_at(s->x, (first + row) * s->x_stride + at, s->dtype), s->dtype, n);
                sums[row] += bst_sum_of_products(x, a, n);
            }
        }
        for (int64_t row = 0; row < rows; row++) s->thin[(first + row) * s->ranks + rank] = (float)sums[row];
    }
}

/* Some columns of a layer, and some of its ranks, ranks first. */
static void load_across(const low_rank_sums *s, const low_rank_layer *layer, int64_t column, int64_t columns,
                        int64_t rank, int64_t ranks, float out[][LOW_RANK_CPU_COLUMNS]) {
    float b[DEPTH];
    for (int64_t c = 0; c < columns; c++) {
        bst_load(b, bst_at(layer->b, (column + c) * layer->rank + rank, s->factor_type), s->factor_type, ranks);
        for (int64_t r = 0; r < ranks; r++) out[r][c] = b[r];
    }
}

static void expand(const low_rank_sums *s, const low_rank_layer *layer, int64_t column) {
    const int64_t columns = bst__lesser(LOW_RANK_CPU_COLUMNS, layer->columns - column);
    float b[DEPTH][LOW_RANK_CPU_COLUMNS], y[LOW_RANK_CPU_COLUMNS];
    memset(b, 0, sizeof b); /* columns that there are not */
    for (int64_t first = 0; first < s->rows; first += LOW_RANK_CPU_ROWS) {
        const int64_t rows = bst__lesser(LOW_RANK_CPU_ROWS, s->rows - first);
        float sums[LOW_RANK_CPU_ROWS][LOW_RANK_CPU_COLUMNS] = {{0}};
        BST_TILES(rank, ranks, 0, layer->rank, DEPTH) {
            if (!first || layer->rank > DEPTH) load_across(s, layer, column, columns, rank, ranks, b);
            for (int64_t row = 0; row < rows; row++) {
                const float *thin = s->thin + (first + row) * s->ranks + layer->first + rank;
                for (int64_t r = 0; r < ranks; r++)
                    for (int c = 0; c < LOW_RANK_CPU_COLUMNS; c++) sums[row][c] += thin[r] * b[r][c];
            }
        }
        for (int64_t row = 0; row < rows; row++) {
            bst_load(y, bst_at(layer->y, (first + row) * layer->y_stride + column, s->dtype), s->dtype, columns);
            for (int64_t c = 0; c < columns; c++) y[c] += layer->scale * sums[row][c];
            bst_store(bst_at(layer->out, (first + row) * layer->out_stride + column, s->dtype), y, s->dtype, columns);
        }
    }
}

void BST_CPU(bst__low_rank_expand_cpu)(void *context, int64_t begin, int64_t end) {
    const low_rank_sums *s = context;
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        const low_rank_layer *layer = &s->layer[i];
        const int64_t tiles = bst__divided_up(layer->columns, LOW_RANK_CPU_COLUMNS);
        for (int64_t tile = begin > 0 ? begin : 0; tile < end && tile < tiles; tile++)
            expand(s, layer, tile * LOW_RANK_CPU_COLUMNS);
        begin -= tiles, end -= tiles;
    }
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

void BST_CPU(bst__low_rank_split_cpu)(void *context, int64_t begin, int64_t end) {
    const low_rank_split_args *a = context;
    const int64_t tiles = bst__divided_up(a->ranks, BST_TILE);
    float rest[BST_TILE], piece[BST_TILE];
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i % tiles * BST_TILE, n = bst__lesser(a->ranks - first, BST_TILE);
        const int64_t group = i / tiles % a->groups, row = i / tiles / a->groups;
        const float *x = a->x + row * a->x_stride[0] + group * a->x_stride[1] + first;
        for (int64_t j = 0; j < n; j++) rest[j] = x[j];
        for (int32_t part = 1; part < a->parts; part++)
            for (int64_t j = 0; j < n; j++) rest[j] += x[part * a->x_stride[2] + j];
        for (int64_t j = 0; j < n; j++) rest[j] *= a->scale;
        if (a->sum) memcpy(a->sum + row * a->sum_stride[0] + group * a->sum_stride[1] + first, rest, (size_t)n * 4);
        for (int p = 0; a->repeated && p < LOW_RANK_PIECES; p++) {
            const int64_t at = row * a->repeated_stride[0] + group * a->repeated_stride[1] + p * a->repeated_stride[2];
            bst_store(bst_at(a->repeated, at + first, BST_BF16), rest, BST_BF16, n);
        }
        for (int p = 0; a->pieces && p < LOW_RANK_PIECES; p++) {
            const int64_t at = row * a->pieces_stride[0] + group * a->pieces_stride[1] + p * a->pieces_stride[2];
            for (int64_t j = 0; j < n; j++) piece[j] = bst_from_bits(bst_bits(rest[j]) & 0xffff0000u);
            bst_store(bst_at(a->pieces, at + first, BST_BF16), piece, BST_BF16, n);
            for (int64_t j = 0; j < n; j++) rest[j] -= piece[j];
        }
    }
}
