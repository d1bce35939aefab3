/* gated_delta_rule_pieces.cuh - products of small matrices in shared memory, to nearly the exactness of float32: an
 * element is the sum of 16-bit numbers, each the rounding of what those before it left, and tensor cores multiply them
 * one by one but for the smallest. Two of them have 16 bits, which what is rounded to 16-bit results does not see;
 * float32 has three.
 *
 * Macros: TYPE (of q, k, v), G_TYPE, BETA_TYPE, SKIP_TYPE, Y_TYPE, DK, DV (sizes of heads), VEC (elements of q and k
 * that an access has), PAIRED (whether two elements side by side may be accessed at once,
 * everywhere), ADDITIVE, NORMALIZE, PACKED (one row, of sequences that begin and end at `boundaries`). */
#ifndef BST_GATED_DELTA_RULE_PIECES_CUH
#define BST_GATED_DELTA_RULE_PIECES_CUH

#include "pack.cuh"
#include "reduce.cuh"

#include "gated_delta_rule_args.h"

#define THREADS DELTA_THREADS
#define CHUNK   DELTA_CHUNK
#define PLANES  DELTA_PLANES(TYPE)
#define DKP     DELTA_PADDED(DK)
/* Blocks that a multiprocessor is to hold: of float32 their shared memory does not let it. */
#define PREPARE_BLOCKS 2
#define SCAN_BLOCKS    (PLANES == 2 && BV == 32 ? 2 : 1)
/* A 16-bit input is one bfloat16, or of float16 the sum of two. */
#define DY_PLANES (Y_TYPE == BST_BF16_CODE ? 1 : PLANES)

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

struct tile {
    unsigned char *memory;
    int planes, rows, columns;
};

BST_DEVICE tile tile_at(unsigned char *memory, int planes, int rows, int columns) {
    const tile t = {memory, planes, rows, columns};
    return t;
}
BST_DEVICE unsigned char *end_of(tile t) { return t.memory + DELTA_TILE_BYTES(t.planes, t.rows, t.columns); }
BST_DEVICE unsigned char *place_in(tile t, int plane, int row, int column) {
    return t.memory + (plane * t.rows + row) * DELTA_PITCH(t.columns) + 2 * column;
}

/* The rounding of two numbers to bfloat16; the numbers become what it leaves. */
BST_DEVICE uint32_t take_rounded(float *x, float *y) {
    const uint32_t both = bst_bf16x2(*x, *y);
    *x -= bst_f32_from_bf16(both & 0xffffu);
    *y -= bst_f32_from_bf16(both >> 16);
    return both;
}

BST_DEVICE void write_pair(tile t, int row, int column, float x, float y) {
    BST_EACH(plane, t.planes) {
        const bst_raw raw = {{take_rounded(&x, &y), 0, 0, 0}};
        bst_write(place_in(t, plane, row, column), raw, 4);
    }
}

BST_DEVICE void add_pair(float pair[2], uint32_t both) {
    pair[0] += bst_f32_from_bf16(both & 0xffffu);
    pair[1] += bst_f32_from_bf16(both >> 16);
}

BST_DEVICE void read_pair(float pair[2], tile t, int row, int column) {
    pair[0] = pair[1] = 0;
    BST_EACH(plane, t.planes) add_pair(pair, bst_read(place_in(t, plane, row, column), 4).w[0]);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Of a matrix [m, n] of sums, multiples of 16, warp w has row tiles w % 4, + 4 .. and pairs of column tiles w / 4,
 * + ACROSS ..: a place is two elements of a row side by side. */
#define ACROSS          (THREADS / 128)
#define TILES_DOWN(m)   (((m) + 63) / 64)
#define PAIRS_ACROSS(n) (((n) + 16 * ACROSS - 1) / (16 * ACROSS))
#define SUMS(m, n)      (TILES_DOWN(m) * PAIRS_ACROSS(n) * 8)

struct place {
    int row, column, at;
    int across, half, lower; /* constants, which row and column are not */
};

BST_DEVICE place place_of(int n, int down, int across, int half, int lower) {
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    const place p = {16 * (warp % 4 + 4 * down) + 8 * lower + lane / 4,
                     16 * (warp / 4 + ACROSS * across) + 8 * half + 2 * (lane % 4),
                     ((down * PAIRS_ACROSS(n) + across) * 2 + half) * 4 + 2 * lower,
                     across,
                     half,
                     lower};
    return p;
}

/* For each of the thread's places: sums[p.at] and the next one are at p.row, p.column and the next one. */
#define EACH_PLACE(p, m, n)                \
    BST_EACH(down_, TILES_DOWN(m))         \
        BST_EACH(across_, PAIRS_ACROSS(n)) \
            BST_EACH(half_, 2)             \
                BST_EACH(lower_, 2)        \
                    if (const place p = place_of(n, down_, across_, half_, lower_); p.row < (m) && p.column < (n))

BST_DEVICE void clear(float *sums, int count) {
    BST_EACH(i, count) sums[i] = 0;
}

/* Matrices of 8 x 8 of a tile's plane: rows and columns of the stored tile from (row, column) on, the four of a factor
 * from the left in the order of bst_multiply_add; of one from the right those of two results side by side. */
BST_DEVICE void load_left(uint32_t v[4], tile t, int plane, int row, int depth, bool transposed) {
    const int lane = (int)bst_lane();
    if (transposed)
        bst_load_matrices_transposed(v, place_in(t, plane, depth + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
    else
        bst_load_matrices(v, place_in(t, plane, row + lane % 16, depth + lane / 16 * 8));
}
BST_DEVICE void load_right(uint32_t v[4], tile t, int plane, int column, int depth, bool transposed) {
    const int lane = (int)bst_lane();
    if (transposed)
        bst_load_matrices(v, place_in(t, plane, column + lane / 16 * 8 + lane % 8, depth + lane / 8 % 2 * 8));
    else
        bst_load_matrices_transposed(v, place_in(t, plane, depth + lane % 16, column + lane / 16 * 8));
}

/* sums [m, n] += op(a) [m, k] op(b) [k, n]; a tile that is transposed is stored the other way round. All sizes are
 * constants. The smallest terms come first. */
BST_DEVICE void multiply(float *sums, int m, int n, int k, tile a, bool a_transposed, tile b, bool b_transposed) {
    const int warp = (int)bst_thread() / 32, first = warp % 4, second = warp / 4;
    BST_UNROLL_TWICE
    for (int depth = 0; depth < k; depth += 16) {
        uint32_t left[TILES_DOWN(DELTA_MOST_KEY)][3][4];
        BST_EACH(i, TILES_DOWN(m))
            if (first + 4 * i < m / 16)
                BST_EACH(plane, a.planes)
                    load_left(left[i][plane], a, plane, 16 * (first + 4 * i), depth, a_transposed);
        BST_EACH(j, PAIRS_ACROSS(n))
            if (second + ACROSS * j < n / 16) {
                uint32_t right[3][4];
                BST_EACH(plane, b.planes)
                    load_right(right[plane], b, plane, 16 * (second + ACROSS * j), depth, b_transposed);
                BST_EACH(i, TILES_DOWN(m))
                    if (first + 4 * i < m / 16)
                        BST_EACH(less, PLANES)
                            BST_EACH(plane, PLANES - less) {
                                const int other = PLANES - 1 - less - plane;
                                if (plane < a.planes && other < b.planes)
                                    BST_EACH(half, 2)
                                        bst_multiply_add(sums + ((i * PAIRS_ACROSS(n) + j) * 2 + half) * 4,
                                                         left[i][plane], right[other] + 2 * half, false);
                            }
            }
    }
}

/* ---- between memory and tiles ------------------------------------------------------------------------------------ */

/* exp(v). */
BST_DEVICE float exponential(float v) { return bst_exp2(v * 1.4426950408889634f); }

BST_DEVICE int64_t token_at(const delta_input *in, int64_t batch, int64_t token, int64_t head) {
    return batch * in->map.batch + token * in->map.token + head * in->map.head;
}

BST_DEVICE float number_at(const delta_input *in, int64_t batch, int64_t token, int64_t head, int type) {
    float v;
    bst_load(&v, in->data, token_at(in, batch, token, head), type, 1);
    return v;
}

/* A chunk of q or k: `count` rows, and beyond them zeros, PARTS threads each. NORMALIZE: each divided by its length,
 * inverse lengths being left in `inverses` unless it is NULL. `factors`, if any, multiply rows. */
#define PARTS (THREADS / CHUNK)
BST_DEVICE void load_keys(tile t, const delta_input *in, int64_t batch, int64_t first, int64_t head, int count,
                          float eps, const float *factors, float *inverses) {
    const int row = (int)bst_thread() / PARTS, part = (int)bst_thread() % PARTS;
    const int64_t at = token_at(in, batch, first + row, head);
    float v[(DKP + 8 * PARTS - 1) / (8 * PARTS)][8], sum = 0;
    BST_EACH(i, (DKP + 8 * PARTS - 1) / (8 * PARTS)) {
        const int column = 8 * (part + PARTS * i);
        BST_EACH(j, 8 / VEC) {
            float *const some = v[i] + j * VEC;
            if (row < count && column + j * VEC < DK)
                bst_load(some, in->data, at + column + j * VEC, TYPE, VEC);
            else
                clear(some, VEC);
        }
        BST_EACH(j, 8) sum = bst_fma(v[i][j], v[i][j], sum);
    }
    float factor = factors ? factors[row] : 1.0f;
    if (NORMALIZE) {
        sum = bst_warp_reduce(sum, PARTS, false);
        const float inverse = bst_rsqrt(sum + eps);
        if (inverses && part == 0) inverses[row] = inverse;
        factor *= inverse;
    }
    BST_EACH(i, (DKP + 8 * PARTS - 1) / (8 * PARTS)) {
        const int column = 8 * (part + PARTS * i);
        if (column < DKP)
            BST_EACH(plane, t.planes) {
                bst_raw raw;
                BST_EACH(j, 4) {
                    if (plane == 0) v[i][2 * j] *= factor, v[i][2 * j + 1] *= factor;
                    raw.w[j] = take_rounded(&v[i][2 * j], &v[i][2 * j + 1]);
                }
                bst_write(place_in(t, plane, row, column), raw, 16);
            }
    }
}

/* Two elements of a row of values; what is beyond its end is zero. */
BST_DEVICE void load_values(float pair[2], const delta_input *in, int64_t batch, int64_t token, int64_t head,
                            int column, bool is_there, int type) {
    pair[0] = pair[1] = 0;
    if (!is_there) return;
    const int64_t at = token_at(in, batch, token, head) + column;
    if (PAIRED) {
        if (column < DV) bst_load(pair, in->data, at, type, 2);
    } else {
        BST_EACH(i, 2)
            if (column + i < DV) bst_load(pair + i, in->data, at + i, type, 1);
    }
}

/* To a row of so many elements that begins at element `at`. */
BST_DEVICE void store_pair(void *out, int64_t at, int column, int columns, const float pair[2], int type) {
    if (PAIRED) {
        if (column < columns) bst_store(out, at + column, pair, type, 2);
    } else {
        BST_EACH(i, 2)
            if (column + i < columns) bst_store(out, at + column + i, pair + i, type, 1);
    }
}

/* A tile from memory and to it: `columns` of rows of `pitch` 16-bit numbers, plane behind plane. */
BST_DEVICE void ask_for_tile(tile t, const void *from, int64_t pitch) {
    const int pieces = t.columns / 8;
    for (int i = (int)bst_thread(); i < t.planes * t.rows * pieces; i += THREADS) {
        const int row = i / pieces, column = i % pieces * 8;
        bst_copy_async16(place_in(t, 0, row, column), (const char *)from + 2 * (row * pitch + column));
    }
    bst_copy_async_commit();
}
BST_DEVICE void store_tile(tile t, void *to, int64_t pitch) {
    const int pieces = t.columns / 8;
    for (int i = (int)bst_thread(); i < t.planes * t.rows * pieces; i += THREADS) {
        const int row = i / pieces, column = i % pieces * 8;
        bst_write((char *)to + 2 * (row * pitch + column), bst_read(place_in(t, 0, row, column), 16), 16);
    }
}
BST_DEVICE const void *square_of(const void *all, int64_t chunk) {
    return (const char *)all + chunk * (2 * PLANES * CHUNK * CHUNK);
}

BST_DEVICE float skip_of(const delta_args *a, int64_t head) {
    float skip = 0;
    if (a->skip) bst_load(&skip, a->skip, head, SKIP_TYPE, 1);
    return skip;
}

/* ---- a chunk's numbers ------------------------------------------------------------------------------------------- */

struct chunk_numbers {
    float sum[CHUNK];  /* of g so far */
    float rise[CHUNK]; /* its exponential */
    float fall[CHUNK]; /* that of what is left to the chunk's end */
    float beta[CHUNK];
};

/* `chunk`: of the head's, or its slot. */
BST_DEVICE void load_numbers(chunk_numbers *numbers, const delta_args *a, int64_t batch, int64_t head, int64_t chunk,
                             int64_t first, int count) {
    const int row = (int)bst_thread();
    if (row >= CHUNK) return;
    const float *const sums = a->sums + ((batch * a->heads + head) * a->chunks + chunk) * CHUNK;
    numbers->sum[row] = sums[row];
    numbers->rise[row] = exponential(sums[row]);
    numbers->fall[row] = exponential(sums[CHUNK - 1] - sums[row]);
    numbers->beta[row] = row < count ? number_at(&a->beta, batch, first + row, head, BETA_TYPE) : 0;
}

/* ---- where they are ---------------------------------------------------------------------------------------------- */

/* Where a packed sequence begins, or the one before it ends. Whatever is written there, it is among the tokens. */
BST_DEVICE int64_t boundary_at(const delta_args *a, int64_t sequence) {
    const int64_t at = a->boundaries[sequence];
    return at < 0 ? 0 : at < a->tokens ? at : a->tokens;
}

/* The tokens of a packed sequence, its chunks, and the slot of the first one among those of a head. Else a row is all
 * of it, as the arguments say, and this is zeros. */
struct span {
    int64_t begin, end, slot;
    int chunks;
};
BST_DEVICE span span_of(const delta_args *a, int64_t sequence) {
    span s = {0, 0, 0, 0};
    if (PACKED) {
        s.begin = boundary_at(a, sequence), s.end = boundary_at(a, sequence + 1);
        s.chunks = s.end > s.begin ? (int)((s.end - s.begin + CHUNK - 1) / CHUNK) : 0;
        s.slot = s.begin / CHUNK + sequence;
    }
    return s;
}
BST_DEVICE int chunks_of(const delta_args *a, span s) { return PACKED ? s.chunks : a->chunks; }
/* Of a chunk. */
BST_DEVICE int tokens_of(const delta_args *a, span s, int64_t first) {
    const int64_t left = (PACKED ? s.end : a->tokens) - first;
    return left < CHUNK ? (int)left : CHUNK;
}

/* The sequence that a slot belongs to, or would: the last one whose slots begin there or before. A warp asks for 32 at
 * a time. */
BST_DEVICE int sequence_of(const delta_args *a, int64_t slot) {
    int first = 0, count = a->sequences;
    while (count > 1) {
        const int step = (count + 31) / 32, n = step * (int)bst_lane();
        const bool is_before = n < count && boundary_at(a, first + n) / CHUNK + first + n <= slot;
        const int last = (int)bst_warp_max_u32(is_before ? n : 0);
        first += last;
        count = count - last < step ? count - last : step;
    }
    return first;
}

/* The tokens of a packed sequence's chunk, by its slot. Of a slot that no chunk has: none. */
BST_DEVICE void find_tokens(const delta_args *a, int64_t slot, int64_t *first, int *count) {
    const span s = span_of(a, sequence_of(a, slot));
    *first = s.begin + (slot - s.slot) * CHUNK;
    *count = *first < s.begin || *first >= s.end ? 0 : tokens_of(a, s, *first);
}

#endif
