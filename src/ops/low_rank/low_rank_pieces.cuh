/* low_rank_pieces.cuh - matrices of 16-bit elements in shared memory, as tensor cores read them: tiles of large ones,
 * and the rows of thin ones. Macros: TYPE, RANK, THREADS. */
#ifndef BST_LOW_RANK_PIECES_CUH
#define BST_LOW_RANK_PIECES_CUH

#include "pack.cuh"

#include "low_rank_args.h"

#define STEP   LOW_RANK_STEP
#define PITCH  LOW_RANK_PITCH(RANK)
#define EIGHTS (RANK / 8)

/* Where 16 bytes of a row lie: the eight rows of a matrix are to lie in different banks. A row of a tile is `bytes`
 * long, 128 or a multiple. */
BST_DEVICE unsigned char *piece_of_tile(unsigned char *tile, int bytes, int row, int piece) {
    return tile + row * bytes + ((piece ^ (row & 7)) << 4);
}
BST_DEVICE unsigned char *piece_of_thin(unsigned char *thin, int row, int piece) {
    const int pieces = PITCH / 16;
    return thin + row * PITCH + ((piece ^ ((row * pieces / 8) & (pieces - 1))) << 4);
}

BST_DEVICE void copy_or_clear(void *shared, const void *base, int64_t element, bool is_there) {
    const bst_raw zeros = {{0, 0, 0, 0}};
    if (is_there)
        bst_copy_async16(shared, (const char *)base + 2 * element);
    else
        bst_write(shared, zeros, 16);
}

/* `n` rows of RANK elements from row `first` on, below `end`. */
BST_DEVICE void load_thin(unsigned char *shared, const void *from, int64_t stride, int64_t first, int64_t end, int n) {
    for (int i = (int)bst_thread(); i < n * EIGHTS; i += THREADS) {
        const int row = i / EIGHTS, piece = i % EIGHTS;
        copy_or_clear(piece_of_thin(shared, row, piece), from, (first + row) * stride + 8 * piece, first + row < end);
    }
}

/* What multiplies from the right: rows 16 step and on of a thin matrix, all its columns. */
BST_DEVICE void thin_step(uint32_t out[EIGHTS][2], unsigned char *thin, int step) {
    const int lane = (int)bst_lane(), row = step * STEP + lane % 16;
    BST_UNROLL
    for (int n = 0; n < EIGHTS; n += 2) {
        uint32_t v[4];
        const int piece = n + lane / 16;
        bst_load_matrices_transposed(v, piece_of_thin(thin, row, piece < EIGHTS ? piece : n));
        out[n][0] = v[0], out[n][1] = v[1];
        if (n + 1 < EIGHTS) out[n + 1][0] = v[2], out[n + 1][1] = v[3];
    }
}

/* A warp's results, 16 rows of RANK from `first` on, below `end`. */
BST_DEVICE void write_part(float *out, float sums[EIGHTS][4], int64_t first, int64_t end) {
    const int lane = (int)bst_lane();
    BST_EACH(half, 2) {
        const int64_t row = first + 8 * half + lane / 4;
        if (row < end)
            BST_EACH(n, EIGHTS)
                bst_store(out, row * RANK + 8 * n + 2 * (lane % 4), &sums[n][2 * half], BST_F32_CODE, 2);
    }
}

/* Four numbers, at element 4 `at`, of the sum of so many parts, each `apart` elements behind the last. */
BST_DEVICE void sum_parts(float sum[4], const float *parts, int count, int64_t apart, int64_t at) {
    BST_EACH(j, 4) sum[j] = 0;
    BST_UNROLL_FOUR
    for (int p = 0; p < count; p++) {
        float v[4];
        bst_load(v, parts, p * apart + 4 * at, BST_F32_CODE, 4);
        BST_EACH(j, 4) sum[j] += v[j];
    }
}

#endif
