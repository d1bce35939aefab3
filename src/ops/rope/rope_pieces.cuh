/* rope_pieces.cuh - where the tokens of a tensor are, how the threads of a head share its elements, and how each
 * comes by the partners of its own.
 *
 * PIECES 2: a thread takes two pieces of VEC elements, left and right: x1 and x2 of VEC pairs, or, INTERLEAVED, two
 * runs of whole pairs. The last PASSING of the LANES threads take what lies behind the ROTARY elements that turn.
 * PIECES 1: a thread takes one piece, and the partners of its elements are in the piece of another lane of its warp,
 * which it asks for by shuffles. A warp's access is then one run of memory: on an H200 3 % of rope's time and, with
 * plain accesses and small blocks, 12 % of its forward with a norm. For heads that turn whole by halves, whose LANES
 * are a power of two and at most 32.
 * GATHERED: pairs are neighbours on one side (q, k and their gradients) and halves on the other (the results and
 * theirs). A thread turns VEC pairs by halves; on the neighbours' side these are two pieces in a row.
 * Macros of the kernel: DIM, ROTARY, LAYOUT (rope_args.h), HALF_TABLES: cos and sin have an element a pair;
 * TABLE_TYPE, PIECES, VEC, a divisor of ROTARY / 2 and, where ROTARY < DIM, of DIM. */
#ifndef BST_ROPE_PIECES_CUH
#define BST_ROPE_PIECES_CUH

#include "pack.cuh"
#include "rope_args.h"

#define INTERLEAVED (LAYOUT == ROPE_INTERLEAVED)
#define GATHERED    (LAYOUT == ROPE_INTERLEAVED_TO_HALVES)
/* Pairs of neighbours too badly aligned to be read at once: their members are the two pieces. */
#define SPLIT_PAIRS (INTERLEAVED && VEC == 1)
#define WHOLE_PAIRS (INTERLEAVED && VEC > 1)
#define TURNING     (ROTARY / PIECES / VEC)
#define PASSING     ((DIM - ROTARY + 2 * VEC - 1) / (2 * VEC))
#define LANES       (TURNING + PASSING)

/* ---- tokens ------------------------------------------------------------------------------------------------------ */

typedef struct bst_token_place {
    int64_t batch, position;
} bst_token_place;

/* Where a token is, of `tokens` in batches of `positions`. A division takes some twenty instructions, which the usual
 * single batch is spared. */
BST_DEVICE bst_token_place bst_place_of_token(uint32_t token, uint32_t tokens, uint32_t positions) {
    bst_token_place place = {0, token};
    if (tokens != positions) place.batch = token / positions, place.position = token % positions;
    return place;
}

/* The first head of a token. */
BST_DEVICE int64_t bst_token_start(rope_map m, int64_t batch, int64_t position) {
    return batch * m.batch + position * m.position;
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

typedef struct bst_pieces {
    int left, right;           /* their first columns; PIECES 1: right is the partner's */
    int near_left, near_right; /* the same on the side where pairs are neighbours, if GATHERED */
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
    } else {
        if (p.turning) {
            p.left = SPLIT_PAIRS ? 2 * lane : lane * VEC;
            p.right = SPLIT_PAIRS ? p.left + 1 : p.left + ROTARY / 2;
        } else {
            p.left = ROTARY + (lane - TURNING) * VEC;
            p.right = p.left + PASSING * VEC;
        }
        p.has_right = p.turning || (p.has_left && p.right < DIM);
    }
    p.near_left = GATHERED && p.turning ? 2 * p.left : p.left;
    p.near_right = GATHERED && p.turning ? 2 * p.left + VEC : p.right;
    return p;
}

/* The pieces on the side of q and k. */
BST_DEVICE bst_pieces bst_nearby(bst_pieces p) {
    p.left = p.near_left;
    p.right = p.near_right;
    return p;
}

/* Two pieces of neighbours, as they were read there, become the firsts of their pairs and the seconds. */
BST_DEVICE void bst_gather(float *left, float *right, bst_pieces p) {
    if (!GATHERED || !p.turning) return;
    float both[2 * VEC];
    BST_EACH(j, VEC) both[j] = left[j], both[VEC + j] = right[j];
    BST_EACH(j, VEC) left[j] = both[2 * j], right[j] = both[2 * j + 1];
}

/* And back. */
BST_DEVICE void bst_scatter(float *left, float *right, bst_pieces p) {
    if (!GATHERED || !p.turning) return;
    float both[2 * VEC];
    BST_EACH(j, VEC) both[2 * j] = left[j], both[2 * j + 1] = right[j];
    BST_EACH(j, VEC) left[j] = both[j], right[j] = both[VEC + j];
}

/* What a table that begins at `start` has for the piece at `column`. */
BST_DEVICE void bst_load_table(float *out, const void *base, int64_t start, int column) {
    if (!HALF_TABLES) {
        bst_load(out, base, start + column, TABLE_TYPE, VEC);
    } else if (!INTERLEAVED) {
        bst_load(out, base, start + column % (ROTARY / 2), TABLE_TYPE, VEC);
    } else {
        float pairs[VEC];
        bst_load(pairs, base, start + column / 2, TABLE_TYPE, (VEC + 1) / 2);
        BST_EACH(j, VEC) out[j] = pairs[j / 2];
    }
}

/* PIECES 1: the partner's piece, of `bytes`. Every lane of the warp takes part. */
BST_DEVICE bst_raw bst_partner(bst_raw own, int bytes) {
    bst_raw other = {{0, 0, 0, 0}};
    BST_EACH(i, 4)
        if (4 * i < bytes) other.w[i] = bst_shuffle_xor_u32(own.w[i], LANES / 2);
    return other;
}

#endif
