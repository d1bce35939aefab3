/* ring.cuh - rings of shared memory, whose stages are filled ahead of their use. */
#ifndef BST_RING_CUH
#define BST_RING_CUH

#include "ptx.cuh"

/* Where a consumer or a producer is in a ring of `stages` (a constant): the stage, and the parity of the phase of its
 * mbarriers, which changes each time round. */
typedef struct bst_stage {
    int index;
    unsigned parity;
} bst_stage;

BST_DEVICE void bst_next_stage(bst_stage *at, int stages) {
    if (++at->index == stages) at->index = 0, at->parity ^= 1;
}
/* The stage that was used before this one, which is free to be filled again. */
BST_DEVICE int bst_stage_before(const bst_stage *at, int stages) { return at->index ? at->index - 1 : stages - 1; }

/* Place `index` of this thread in a ring where each of `threads` copies its own vectors of 16 bytes into its own places
 * (bst_copy_async16) and reads nobody else's: waiting for its own copies is all the synchronisation there is. Places of
 * one index lie side by side, so that there are no bank conflicts. */
BST_DEVICE unsigned char *bst_own_place(unsigned char *ring, int index, int threads) {
    return ring + (index * threads + (int)bst_thread()) * 16;
}

#endif
