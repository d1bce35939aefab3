/* rope.cu - rotary position embedding of q and k in one launch, and its transpose.
 *
 * Macros: DIM of a head, its first ROTARY elements turn; Q_HEADS, K_HEADS; IN_TYPE, OUT_TYPE, TABLE_TYPE (codes of
 * dtype.h); LAYOUT, HALF_TABLES (rope_pieces.cuh); BACKWARD; VEC elements of an access, a divisor of ROTARY / 2 and,
 * where the rest of a head is copied, of DIM; PIECES of a thread; SLOTS heads of a token turned side by side, EACH
 * one after the other but loaded at once; TOKENS of a block. q and k may be written where they were read, unless
 * GATHERED.
 *
 * A thread takes one piece or two (rope_pieces.cuh) at the same place of several heads of one token. Its cos and sin
 * are read once and serve all these heads.
 * Bytes: 2 * size for each element of q and k, and the tables once (batch rows that share them find them in the L2).
 * Measured on an H200, bf16: 83.5 us for 16384 tokens of 32 + 8 heads of 128 (0.95 of the copy bandwidth). */
#include "rope_pieces.cuh"

#define HEADS   (Q_HEADS + K_HEADS)
#define WORKERS (TOKENS * SLOTS * LANES)
#define EVEN    (HEADS % (SLOTS * EACH) == 0) /* every thread has as many heads */

/* (u, v) becomes (u cu + v mu, v cv + u mv). */
BST_DEVICE void turn(float *u, float *v, float cu, float mu, float cv, float mv) {
    const float first = bst_fma(*u, cu, *v * mu);
    *v = bst_fma(*v, cv, *u * mv);
    *u = first;
}

BST_KERNEL(rope, rope_args, (WORKERS + 31) / 32 * 32, 1) {
    const int lane = (int)bst_thread() % LANES, slot = (int)bst_thread() / LANES % SLOTS;
    const uint32_t own = bst_block() * TOKENS + bst_thread() / (LANES * SLOTS);
    /* Threads with nothing to do read what others read: their warp may have shuffles to do, and accesses that depend
     * on nothing are all in flight at once. */
    const bool live = bst_thread() < WORKERS && own < a.tokens;
    const uint32_t token = live ? own : 0;
    const bst_token_place place = bst_place_of_token(token, a.tokens, a.positions);
    const int64_t batch = place.batch, position = place.position;
    const bst_pieces p = bst_pieces_of(lane);
    const bool turning = p.turning, has_right = p.has_right;
    const int left = p.left, right = p.right;
    const bst_pieces from = BACKWARD ? p : bst_nearby(p), to = BACKWARD ? bst_nearby(p) : p;
    const int64_t q_in = bst_token_start(a.q_strides, batch, position),
                  k_in = bst_token_start(a.k_strides, batch, position);
    const int64_t q_out = bst_token_start(a.q_out_strides, batch, position),
                  k_out = bst_token_start(a.k_out_strides, batch, position);
    float c_left[VEC], c_right[VEC], m_left[VEC], m_right[VEC];
    bst_wait_for_previous();
    if (turning) {
        const int64_t c = batch * a.cos_batch + position * a.cos_position;
        const int64_t s = batch * a.sin_batch + position * a.sin_position;
        float s_left[VEC], s_right[VEC];
        bst_load_table(c_left, a.cos, c, left);
        bst_load_table(c_right, a.cos, c, right);
        bst_load_table(s_left, a.sin, s, left);
        bst_load_table(s_right, a.sin, s, right);
        /* What the partner of each element is multiplied by: the first of a pair has -sin1, the second sin2; in the
         * transpose they change places and signs. With whole pairs in each piece, the partner is a neighbour. */
        BST_EACH(j, VEC) {
            const bool whole = WHOLE_PAIRS;
            const int partner = whole ? j ^ 1 : j;
            const float across_left = BACKWARD ? (whole ? s_left[partner] : s_right[j]) : s_left[j];
            const float across_right = BACKWARD ? (whole ? s_right[partner] : s_left[j]) : s_right[j];
            const bool left_first = PIECES == 1 ? p.first : !whole || j % 2 == 0, right_first = whole && j % 2 == 0;
            m_left[j] = left_first == (BACKWARD != 0) ? across_left : -across_left;
            m_right[j] = right_first == (BACKWARD != 0) ? across_right : -across_right;
        }
    }
    for (int first = 0; first < HEADS; first += SLOTS * EACH) {
        bst_raw raw_left[EACH], raw_right[EACH];
        BST_EACH(i, EACH) {
            const int mine = first + i * SLOTS + slot, head = EVEN || mine < HEADS ? mine : 0;
            const bool is_q = head < Q_HEADS;
            const void *in = is_q ? a.q : a.k;
            const int64_t stride = is_q ? a.q_strides.head : a.k_strides.head;
            const int64_t at = (is_q ? q_in : k_in) + (is_q ? head : head - Q_HEADS) * stride;
            raw_left[i] = bst_raw_at(in, at + from.left, IN_TYPE, VEC);
            if (has_right) raw_right[i] = bst_raw_at(in, at + from.right, IN_TYPE, VEC);
        }
        BST_EACH(i, EACH) {
            const int head = first + i * SLOTS + slot;
            if (PIECES == 1) raw_right[i] = bst_partner(raw_left[i], VEC * bst_type_size(IN_TYPE));
            float x[VEC], y[VEC];
            bst_unpack(x, raw_left[i], IN_TYPE, VEC);
            if (PIECES == 1 || has_right) bst_unpack(y, raw_right[i], IN_TYPE, VEC);
            if (!BACKWARD) bst_gather(x, y, p);
            if (turning && WHOLE_PAIRS) {
                BST_UNROLL
                for (int j = 0; j + 1 < VEC; j += 2) {
                    turn(&x[j], &x[j + 1], c_left[j], m_left[j], c_left[j + 1], m_left[j + 1]);
                    turn(&y[j], &y[j + 1], c_right[j], m_right[j], c_right[j + 1], m_right[j + 1]);
                }
            } else if (turning) {
                BST_EACH(j, VEC) turn(&x[j], &y[j], c_left[j], m_left[j], c_right[j], m_right[j]);
            }
            if (BACKWARD) bst_scatter(x, y, p);
            if (!live || !(EVEN || head < HEADS)) continue;
            const bool is_q = head < Q_HEADS;
            void *out = is_q ? a.q_out : a.k_out;
            const int64_t stride = is_q ? a.q_out_strides.head : a.k_out_strides.head;
            const int64_t at = (is_q ? q_out : k_out) + (is_q ? head : head - Q_HEADS) * stride;
            bst_store(out, at + to.left, x, OUT_TYPE, VEC);
            if (has_right) bst_store(out, at + to.right, y, OUT_TYPE, VEC);
        }
    }
}
