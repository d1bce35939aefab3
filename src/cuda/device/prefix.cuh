/* prefix.cuh - sums of all numbers before each, of an array that the threads of a block share. */
#ifndef BST_PREFIX_CUH
#define BST_PREFIX_CUH

#include "ptx.cuh"

/* What the lanes before this one have of `own`, and all together. By all lanes of a warp. */
BST_DEVICE uint32_t bst_lanes_before(uint32_t own, uint32_t *all) {
    uint32_t sum = 0;
    *all = own;
    BST_EACH(i, 5) { /* of lanes whose numbers differ in the bits up to this one, sum: of those before this lane */
        const uint32_t others = bst_shuffle_xor_u32(*all, 1 << i);
        if (bst_lane() >> i & 1) sum += others;
        *all += others;
    }
    return sum;
}

/* sums[i], i from 1 to `count`, becomes sums[1] + ... + sums[i], and sums[0] 0. By all lanes of one warp, between two
 * barriers of the block. */
BST_DEVICE void bst_prefix_sums(int32_t *sums, int count) {
    const int lane = (int)bst_lane(), each = (count + 31) / 32, first = lane * each;
    const int last = first + each < count ? first + each : count;
    uint32_t own = 0, all;
    for (int i = first; i < last; i++) own += (uint32_t)sums[i + 1];
    uint32_t sum = bst_lanes_before(own, &all);
    for (int i = first; i < last; i++) {
        sum += (uint32_t)sums[i + 1];
        sums[i + 1] = (int32_t)sum;
    }
    if (lane == 0) sums[0] = 0;
}

#endif
