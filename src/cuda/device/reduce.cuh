/* reduce.cuh - sums and maxima over groups of threads, always in the same order.
 *
 * A group is `threads` consecutive threads of a block, a power of two; a block may hold several groups. `threads` is a
 * constant. Every thread of the block must call, and every thread of a group receives the result. */
#ifndef BST_REDUCE_CUH
#define BST_REDUCE_CUH

#include "ptx.cuh"

BST_DEVICE float bst_combine(float a, float b, bool maximum) { return maximum ? bst_max(a, b) : a + b; }

BST_DEVICE float bst_warp_reduce(float v, int lanes, bool maximum) {
    BST_UNROLL
    for (int mask = 16; mask > 0; mask >>= 1)
        if (mask < lanes) v = bst_combine(v, bst_shuffle_xor(v, mask), maximum);
    return v;
}

/* `scratch`: 32 floats of shared memory; unused where a group fits a warp. A second call may reuse it only after a
 * bst_sync(): two calls in a row alternate between two scratches, or synchronise. */
BST_DEVICE float bst_group_reduce(float v, int threads, float *scratch, bool maximum) {
    v = bst_warp_reduce(v, threads < 32 ? threads : 32, maximum);
    if (threads <= 32) return v;
    int warps = threads / 32;
    int warp = (int)bst_thread() / 32, first = warp / warps * warps;
    if (bst_lane() == 0) scratch[warp] = v;
    bst_sync();
    /* Each lane picks up one warp's value (lanes beyond `warps` repeat them), then the lanes agree by shuffles. */
    v = scratch[first + (int)bst_lane() % warps];
    return bst_warp_reduce(v, warps, maximum);
}

BST_DEVICE float bst_group_sum(float v, int threads, float *scratch) {
    return bst_group_reduce(v, threads, scratch, false);
}

/* The sum over `parts` rows of a [parts, columns] array: warp w of a block of 1024 threads receives that of column
 * `first` + w (columns beyond the last: 0). Each warp adds up every 32nd row. `scratch`: 32 * 33 floats. */
BST_DEVICE float bst_column_sums(const float *rows, int64_t parts, int columns, int first, float *scratch) {
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    float sum = 0;
    if (first + lane < columns)
        for (int64_t part = warp; part < parts; part += 32) sum += rows[part * columns + first + lane];
    scratch[warp * 33 + lane] = sum;
    bst_sync();
    /* Each warp now adds up one column: lane l holds what warp l found there. */
    return bst_warp_reduce(scratch[lane * 33 + warp], 32, false);
}

#endif
