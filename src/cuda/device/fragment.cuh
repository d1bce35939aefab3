/* fragment.cuh - of what products of tensor cores leave in a warp's registers, rows of 16-bit numbers to memory. */
#ifndef BST_FRAGMENT_CUH
#define BST_FRAGMENT_CUH

#include "pack.cuh"

/* Each of four lanes has a pair of the first eight columns, of the second, third and fourth; exchanged, this lane has
 * all of the eight that are its number. */
BST_DEVICE bst_raw bst_tile_exchanged(const uint32_t pairs[4]) {
    const bool odd = bst_lane() % 2, upper = bst_lane() % 4 / 2;
    uint32_t first = bst_shuffle_xor_u32(odd ? pairs[0] : pairs[1], 1);
    uint32_t second = bst_shuffle_xor_u32(odd ? pairs[2] : pairs[3], 1);
    const uint32_t a = odd ? first : pairs[0], b = odd ? pairs[1] : first;
    const uint32_t c = odd ? second : pairs[2], d = odd ? pairs[3] : second;
    first = bst_shuffle_xor_u32(upper ? a : c, 2);
    second = bst_shuffle_xor_u32(upper ? b : d, 2);
    return {{upper ? first : a, upper ? second : b, upper ? c : first, upper ? d : second}};
}

/* y's row that begins at this element, its `width` columns (a constant) from `column` on, below `columns`: of
 * them sums has this lane's quarter, of the upper or lower half of its rows, as products leave them. By all lanes. */
BST_DEVICE void bst_tile_store_row(void *y, int64_t begin, const float *sums, int half, int column, int columns,
                                   int width, bool is_row, int type) {
    BST_EACH(i, width / 32) {
        uint32_t pairs[4];
        BST_EACH(j, 4) {
            const float *pair = sums + 16 * i + 4 * j + 2 * half;
            pairs[j] = bst_half_pair(pair[0], pair[1], type);
        }
        const bst_raw raw = bst_tile_exchanged(pairs);
        const int c = column + 32 * i + (int)bst_lane() % 4 * 8;
        if (is_row && c < columns) bst_write((char *)y + 2 * (begin + c), raw, 16);
    }
}

#endif
