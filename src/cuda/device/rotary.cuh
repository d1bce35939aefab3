/* rotary.cuh - how the threads of a head share its elements, so that both members of a pair are in one thread.
 *
 * Each takes two pieces of VEC elements, left and right: x1 and x2 of VEC pairs, or, INTERLEAVED, two runs of whole
 * pairs. The last PASSING of the LANES threads take what lies behind the ROTARY elements that turn.
 * Macros of the kernel: DIM, ROTARY, INTERLEAVED, VEC, a divisor of ROTARY / 2 and, where ROTARY < DIM, of DIM. */
#ifndef BST_ROTARY_CUH
#define BST_ROTARY_CUH

#include "ptx.cuh"

/* Pairs of neighbours too badly aligned to be read at once: their members are the two pieces. */
#define SPLIT_PAIRS (INTERLEAVED && VEC == 1)
#define WHOLE_PAIRS (INTERLEAVED && VEC > 1)
#define TURNING     (ROTARY / 2 / VEC)
#define PASSING     ((DIM - ROTARY + 2 * VEC - 1) / (2 * VEC))
#define LANES       (TURNING + PASSING)

typedef struct bst_pieces {
    int left, right; /* their first columns */
    bool turning, has_left, has_right;
} bst_pieces;

/* `lane` may be beyond LANES: it then has no piece. */
BST_DEVICE bst_pieces bst_pieces_of(int lane) {
    bst_pieces p;
    p.turning = lane < TURNING;
    p.has_left = lane < LANES;
    if (p.turning) {
        p.left = SPLIT_PAIRS ? 2 * lane : lane * VEC;
        p.right = SPLIT_PAIRS ? p.left + 1 : p.left + ROTARY / 2;
    } else {
        p.left = ROTARY + (lane - TURNING) * VEC;
        p.right = p.left + PASSING * VEC;
    }
    p.has_right = p.turning || (p.has_left && p.right < DIM);
    return p;
}

#endif
