/* rotary.cuh - how the threads of a head share its elements, and how each comes by the partners of its own.
 *
 * PIECES 2: a thread takes two pieces of VEC elements, left and right: x1 and x2 of VEC pairs, or, INTERLEAVED, two
 * runs of whole pairs. The last PASSING of the LANES threads take what lies behind the ROTARY elements that turn.
 * PIECES 1: a thread takes one piece, and the partners of its elements are in the piece of another lane of its warp,
 * which it asks for by shuffles. A warp's access is then one run of memory: on an H200 3 % of rope's time and, with
 * plain accesses and small blocks, 12 % of qk_norm_rope's forward. For heads that turn whole, INTERLEAVED 0, whose
 * LANES are a power of two and at most 32.
 * Macros of the kernel: DIM, ROTARY, INTERLEAVED, PIECES, VEC, a divisor of ROTARY / 2 and, where ROTARY < DIM, of
 * DIM. */
#ifndef BST_ROTARY_CUH
#define BST_ROTARY_CUH

#include "ptx.cuh"

/* Pairs of neighbours too badly aligned to be read at once: their members are the two pieces. */
#define SPLIT_PAIRS (INTERLEAVED && VEC == 1)
#define WHOLE_PAIRS (INTERLEAVED && VEC > 1)
#define TURNING     (ROTARY / PIECES / VEC)
#define PASSING     ((DIM - ROTARY + 2 * VEC - 1) / (2 * VEC))
#define LANES       (TURNING + PASSING)

typedef struct bst_pieces {
    int left, right; /* their first columns; PIECES 1: right is the partner's */
    bool turning, has_left, has_right;
    bool first; /* PIECES 1: this thread has x1 of its pairs, not x2 */
} bst_pieces;

/* `lane` may be beyond LANES: it then has no piece. */
BST_DEVICE bst_pieces bst_pieces_of(int lane) {
    bst_pieces p;
    p.turning = lane < TURNING;
    p.has_left = lane < LANES;
    p.first = lane < LANES / 2;
    if (PIECES == 1) {
        p.left = lane * VEC;
        p.right = p.first ? p.left + DIM / 2 : p.left - DIM / 2;
        p.has_right = false;
        return p;
    }
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

/* PIECES 1: the partner's piece, of `bytes`. Every lane of the warp takes part. */
BST_DEVICE bst_raw bst_partner(bst_raw own, int bytes) {
    bst_raw other = {{0, 0, 0, 0}};
    BST_UNROLL
    for (int i = 0; i < 4; i++)
        if (4 * i < bytes) other.w[i] = bst_shuffle_xor_u32(own.w[i], LANES / 2);
    return other;
}

#endif
