/* rope.cu - rotary embedding of q and k in one launch, alone or after an RMSNorm over each head; its transpose, and the
 * gradients of both.
 *
 * Macros: DIM of a head, its first ROTARY elements turn; Q_HEADS, K_HEADS; IN_TYPE of q and k (TRANSPOSED: of the
 * gradients that come in), W_TYPE, TABLE_TYPE, OUT_TYPE (codes of dtype.h); LAYOUT, HALF_TABLES, VEC elements of an
 * access and PIECES of a thread (rope_pieces.cuh); NORM (rope_args.h); GROUP threads of a head, a power of two, at
 * least LANES; THREADS of a block; rope: EACH, the heads of a group, and TRANSPOSED; rope_norm_backward: WANTS (bits of
 * rope_args.h), BLOCKS that a multiprocessor holds.
 *
 * A group of threads holds a whole head: the mean is a sum over the group. What a group takes of a token, SLOT_HEADS
 * heads of q or of k, is a slot of the token; its weight, cosines and sines are read once for these.
 *
 * rope      one slot a group; all its reads are in flight at once. Bytes: q and k read and written, once each; the
 *           tables once (batch rows that share them find them in the L2). Without a norm q and k may be written where
 *           they were read, unless GATHERED.
 * rope_norm_backward
 *           persistent: a group has one slot, goes from token to token, and has its share of that weight's gradient in
 *           float32 registers. Each head has its place in shared memory, which is filled with that head of the next
 *           token as soon as it has been read. A block writes one partial row at its end. Bytes: q, k, dq_out and
 *           dk_out read, dq and dk written; blocks * DIM * 8 written and read back by column_sums, within the L2.
 * Measured on an H200, bf16, 16384 tokens of 32 + 8 heads of 128: rope 83 us (0.95 of the copy bandwidth), with a norm
 *           85 (0.93), its backward pass 131 (0.90) and 3 us of the sum that no other kernel hides.
 * No floating-point atomics: the order of every sum is fixed by the launch configuration. */
#include "reduce.cuh"
#include "ring.cuh"
#include "rope_pieces.cuh"

#define GROUPS (THREADS / GROUP)
#define NORMED (NORM != ROPE_PLAIN)
#define HELD   (PIECES * VEC) /* elements of a thread: the left piece's, then the right one's */

/* Where the partner of element j is, if this thread has it, and whether j is the first of its pair. */
#define PARTNER(j)      (WHOLE_PAIRS ? (j) ^ 1 : (j) ^ VEC)
#define FIRST(j)        (PIECES == 1 ? p.first : WHOLE_PAIRS ? (j) % 2 == 0 : (j) < VEC)

#define SLOTS_OF(heads) (((heads) + SLOT_HEADS - 1) / SLOT_HEADS)
#ifdef ROPE
#define SLOT_HEADS EACH
#define Q_SLOTS    SLOTS_OF(Q_HEADS)
#define K_SLOTS    SLOTS_OF(K_HEADS)
#else
#define SLOT_HEADS ROPE_BACKWARD_EACH(PIECES)
#define Q_SLOTS    (WANTS & (ROPE_DX | ROPE_DWEIGHT) ? SLOTS_OF(Q_HEADS) : 0)
#define K_SLOTS    (WANTS >> ROPE_OF_K ? SLOTS_OF(K_HEADS) : 0)
#endif
#define SLOTS (Q_SLOTS + K_SLOTS)
#define EVEN  (Q_HEADS % SLOT_HEADS == 0 && K_HEADS % SLOT_HEADS == 0) /* every slot has SLOT_HEADS heads */

/* A slot: up to SLOT_HEADS heads of q or of k, from `first` on. */
typedef struct slot_heads {
    int first, count;
    bool of_q;
} slot_heads;

BST_DEVICE slot_heads slot_at(int slot) {
    slot_heads s;
    s.of_q = slot < Q_SLOTS;
    s.first = (s.of_q ? slot : slot - Q_SLOTS) * SLOT_HEADS;
    const int rest = (s.of_q ? Q_HEADS : K_HEADS) - s.first;
    s.count = rest < SLOT_HEADS ? rest : SLOT_HEADS;
    return s;
}

/* The pieces of a weight, or of a table; zeros where this thread has none. */
BST_DEVICE void load_pieces(float *out, const void *base, int64_t start, bool of_table, bst_pieces p) {
    BST_EACH(j, HELD) out[j] = 0;
    if (of_table) {
        if (p.has_left) bst_load_table(out, base, start, p.left);
        if (p.has_right) bst_load_table(out + VEC, base, start, p.right);
        return;
    }
    if (p.has_left) bst_load(out, base, start + p.near_left, W_TYPE, VEC);
    if (p.has_right) bst_load(out + VEC, base, start + p.near_right, W_TYPE, VEC);
    bst_gather(out, out + VEC, p);
}

/* The same of the partners: what a weight or a table has at theirs. */
BST_DEVICE void load_partners(float *out, const void *base, int64_t start, bool of_table, bst_pieces p) {
    float own[HELD];
    if (PIECES == 1) {
        p.left = p.near_left = p.right;
        load_pieces(out, base, start, of_table, p);
        return;
    }
    load_pieces(own, base, start, of_table, p);
    BST_EACH(j, HELD) out[j] = own[PARTNER(j) % HELD];
}

/* The factor that a weight is. */
BST_DEVICE void as_factor(float *w) {
    BST_EACH(j, HELD)
        if (NORM == ROPE_GEMMA) w[j] += 1.0f;
}

BST_DEVICE int64_t cos_of(const rope_tables *t, int64_t batch, int64_t position) {
    return batch * t->cos_batch + position * t->cos_position;
}

BST_DEVICE int64_t sin_of(const rope_tables *t, int64_t batch, int64_t position) {
    return batch * t->sin_batch + position * t->sin_position;
}

/* The partners of v, a head's pieces as `raw` holds them times `factor`. Every lane of the warp takes part. */
BST_DEVICE void partners_of(float *out, const float *v, const bst_raw *raw, int type, float factor) {
    if (PIECES == 1) bst_unpack(out, bst_partner(raw[0], VEC * bst_type_size(type)), type, VEC);
    BST_EACH(j, HELD) out[j] = PIECES == 1 ? out[j] * factor : v[PARTNER(j) % HELD];
}

/* v[j] becomes own[j] v[j] + across[j] other[j], its partner. What does not turn has no partner, and so nothing of an
 * infinite one; without a norm it stays as it is. */
BST_DEVICE void turn(float *v, const float *other, const float *own, const float *across, bst_pieces p) {
    BST_EACH(j, HELD) {
        const bool passing = PASSING && !p.turning;
        if (NORMED)
            v[j] = bst_fma(passing ? 0.0f : other[j], across[j], v[j] * own[j]);
        else if (!passing)
            v[j] = bst_fma(v[j], own[j], other[j] * across[j]);
    }
}

/* Of a head, of which this thread holds x. Every thread of the block takes part. */
BST_DEVICE float rstd_of(const float *x, float eps, float *scratch) {
    float squares = 0;
    BST_EACH(j, HELD) squares = bst_fma(x[j], x[j], squares);
    const float mean = bst_group_sum(squares, GROUP, scratch) * (1.0f / DIM) + eps;
    const bool narrow = IN_TYPE != BST_F32_CODE && W_TYPE != BST_F32_CODE && OUT_TYPE != BST_F32_CODE;
    return narrow ? bst_rsqrt_near(mean) : bst_rsqrt(mean);
}

BST_DEVICE void store_pieces(void *base, int64_t start, const float *in, int type, bst_pieces p) {
    if (p.has_left) bst_store(base, start + p.left, in, type, VEC);
    if (p.has_right) bst_store(base, start + p.right, in + VEC, type, VEC);
}

BST_DEVICE void read_pieces(bst_raw *out, const void *base, int64_t start, int type, bool wanted, bst_pieces p) {
    const bst_raw none = {{0, 0, 0, 0}};
    out[0] = out[PIECES - 1] = none;
    if (wanted && p.has_left) out[0] = bst_raw_at(base, start + p.left, type, VEC);
    if (wanted && p.has_right) out[PIECES - 1] = bst_raw_at(base, start + p.right, type, VEC);
}

BST_DEVICE void unpack_pieces(float *out, const bst_raw *raw, int type) {
    BST_EACH(i, PIECES) bst_unpack(out + i * VEC, raw[i], type, VEC);
}

#ifdef ROPE
BST_KERNEL(rope, rope_args, THREADS, 1) {
    BST_SHARED(float, scratch, 64);
    const int lane = (int)bst_thread() % GROUP;
    const uint32_t group = bst_block() * GROUPS + bst_thread() / GROUP;
    /* Groups with nothing to do read what others read: accesses that depend on nothing are all in flight at once. */
    const bool live = group / SLOTS < a.tables.tokens;
    const uint32_t token = live ? group / SLOTS : 0;
    const slot_heads s = slot_at((int)(group % SLOTS));
    const rope_forward_heads h = s.of_q ? a.q : a.k;
    const bst_pieces p = bst_pieces_of(lane), near = bst_nearby(p);
    const bst_pieces from = TRANSPOSED ? p : near, to = TRANSPOSED ? near : p;
    const bst_token_place at_token = bst_place_of_token(token, a.tables.tokens, a.tables.positions);
    const int64_t batch = at_token.batch, position = at_token.position;
    const int64_t x = bst_token_start(h.x_map, batch, position) + s.first * h.x_map.head;
    const int64_t y = bst_token_start(h.y_map, batch, position) + s.first * h.y_map.head;
    bst_raw raw[SLOT_HEADS][PIECES];
    float own[HELD], across[HELD];
    bst_wait_for_previous();
    BST_EACH(i, SLOT_HEADS) {
        const int head = EVEN || i < s.count ? i : 0;
        read_pieces(raw[i], h.x, x + head * h.x_map.head, IN_TYPE, true, from);
    }
    {
        float w[HELD], w_across[HELD], sine[HELD];
        if (NORMED) {
            load_pieces(w, h.weight, 0, false, p);
            load_partners(w_across, h.weight, 0, false, p);
            as_factor(w);
            as_factor(w_across);
        }
        BST_EACH(j, HELD) own[j] = 1, sine[j] = 0; /* of what does not turn */
        if (p.turning) {
            const int64_t at_sine = sin_of(&a.tables, batch, position);
            load_pieces(own, a.tables.cos, cos_of(&a.tables, batch, position), true, p);
            if (TRANSPOSED)
                load_partners(sine, a.tables.sin, at_sine, true, p);
            else
                load_pieces(sine, a.tables.sin, at_sine, true, p);
        }
        BST_EACH(j, HELD) {
            const bool minus = TRANSPOSED ? !(FIRST(j)) : FIRST(j);
            across[j] = (NORMED ? w_across[j] : 1.0f) * (minus ? -sine[j] : sine[j]);
            if (NORMED) own[j] *= w[j];
        }
    }
    BST_EACH(i, SLOT_HEADS) {
        float v[HELD], other[HELD];
        unpack_pieces(v, raw[i], IN_TYPE);
        if (!TRANSPOSED) bst_gather(v, v + VEC, p);
        const float rstd = NORMED ? rstd_of(v, a.eps, scratch + i % 2 * 32) : 1.0f;
        BST_EACH(j, HELD) v[j] *= rstd;
        partners_of(other, v, raw[i], IN_TYPE, rstd);
        turn(v, other, own, across, p);
        if (TRANSPOSED) bst_scatter(v, v + VEC, p);
        if (live && (EVEN || i < s.count)) store_pieces(h.y, y + i * h.y_map.head, v, OUT_TYPE, to);
    }
}
#endif

#ifdef BACKWARD
#define BYTES(type) ((type) == BST_F32_CODE ? 4 : 2)
/* Through shared memory where both inputs come in accesses of 16 bytes; else straight into registers. */
#define RING (VEC * BYTES(IN_TYPE) == 16 && VEC * BYTES(OUT_TYPE) == 16)
/* Where the first head of a slot lies in q and its incoming gradient, or in k and its. */
typedef struct slot_source {
    const void *x, *dy;
    bool live;
} slot_source;

BST_DEVICE slot_source source_of(const rope_norm_backward_args *a, slot_heads s, uint32_t token) {
    slot_source from = {a->q.x, a->q.dy, token < a->tables.tokens};
    if (!from.live) return from;
    const bst_token_place at_token = bst_place_of_token(token, a->tables.tokens, a->tables.positions);
    const int64_t batch = at_token.batch, position = at_token.position;
    const rope_norm_backward_heads *q = &a->q, *k = &a->k;
    from.x = s.of_q ? bst_at(q->x, bst_token_start(q->x_map, batch, position) + s.first * q->x_map.head, IN_TYPE)
                    : bst_at(k->x, bst_token_start(k->x_map, batch, position) + s.first * k->x_map.head, IN_TYPE);
    from.dy = s.of_q ? bst_at(q->dy, bst_token_start(q->dy_map, batch, position) + s.first * q->dy_map.head, OUT_TYPE)
                     : bst_at(k->dy, bst_token_start(k->dy_map, batch, position) + s.first * k->dy_map.head, OUT_TYPE);
    return from;
}

#if RING
BST_DEVICE unsigned char *place(unsigned char *ring, int i, int input, int piece) {
    return bst_own_place(ring, (i * 2 + input) * PIECES + piece, THREADS);
}

BST_DEVICE void prefetch(unsigned char *ring, int i, const slot_source *from, bool wanted, bst_pieces p) {
    if (wanted && p.has_left) {
        bst_copy_async16(place(ring, i, 0, 0), bst_at(from->x, p.near_left, IN_TYPE));
        bst_copy_async16(place(ring, i, 1, 0), bst_at(from->dy, p.left, OUT_TYPE));
    }
    if (wanted && p.has_right) {
        bst_copy_async16(place(ring, i, 0, PIECES - 1), bst_at(from->x, p.near_right, IN_TYPE));
        bst_copy_async16(place(ring, i, 1, PIECES - 1), bst_at(from->dy, p.right, OUT_TYPE));
    }
    bst_copy_async_commit();
}
#endif

/* Adds up the groups of the block, kind by kind, into its row of the partial sums. */
BST_DEVICE void store_partial(float *out, float *sums, float *dw, bst_pieces p) {
    float *mine = sums + (int)bst_thread() / GROUP * DIM;
    bst_scatter(dw, dw + VEC, p);
    bst_sync(); /* of `sums`, others may still read what came before */
    BST_EACH(j, VEC) {
        if (p.has_left) mine[p.near_left + j] = dw[j];
        if (p.has_right) mine[p.near_right + j] = dw[VEC + j];
    }
    bst_sync();
    for (int c = (int)bst_thread(); c < 2 * DIM; c += THREADS) {
        float sum = 0;
        for (int g = 0; g < GROUPS; g++) {
            const bool of_q = (bst_block() * GROUPS + g) % SLOTS < Q_SLOTS;
            if (of_q == (c < DIM)) sum += sums[g * DIM + c % DIM];
        }
        out[c] = sum;
    }
}

/* With z = n w, n = x rstd: dz is dy turned back, m = dz w, dx = rstd (m - n mean(m n)), dweight = sum of dz n. */
BST_KERNEL(rope_norm_backward, rope_norm_backward_args, THREADS, BLOCKS) {
    BST_SHARED(float, scratch, 64);
    BST_DYNAMIC_SHARED(memory);
    const int lane = (int)bst_thread() % GROUP;
    const uint32_t group = bst_block() * GROUPS + bst_thread() / GROUP, step = bst_blocks() * GROUPS / SLOTS;
    const slot_heads s = slot_at((int)(group % SLOTS));
    const bst_pieces p = bst_pieces_of(lane);
    const bool dx_wanted = s.of_q ? WANTS & ROPE_DX : WANTS >> ROPE_OF_K & ROPE_DX;
    const void *weight = s.of_q ? a.q.weight : a.k.weight;
    const int64_t x_head = s.of_q ? a.q.x_map.head : a.k.x_map.head;
    const int64_t dy_head = s.of_q ? a.q.dy_map.head : a.k.dy_map.head;
    float dw[HELD];
    BST_EACH(j, HELD) dw[j] = 0;
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the partial rows: it waits for this kernel's end on the multiprocessor */
    /* The groups beyond the last whole token stay idle, but take part in every sum and barrier. */
    uint32_t token = group / SLOTS < step ? group / SLOTS : a.tables.tokens;
#if RING
    slot_source first = source_of(&a, s, token);
    for (int i = 0; i < SLOT_HEADS; i++) {
        prefetch(memory, i, &first, first.live && i < s.count, p);
        first.x = bst_at(first.x, x_head, IN_TYPE);
        first.dy = bst_at(first.dy, dy_head, OUT_TYPE);
    }
#endif
    for (uint32_t done = 0; done < a.tables.tokens; done += step) {
        const bool live = token < a.tables.tokens;
        const uint32_t next = live ? token + step : token;
        slot_source from = source_of(&a, s, RING ? next : token);
        const bst_token_place at_token = bst_place_of_token(token, a.tables.tokens, a.tables.positions);
        const int64_t batch = at_token.batch, position = at_token.position;
        float c[HELD], back[HELD];
        BST_EACH(j, HELD) c[j] = 1, back[j] = 0; /* of what does not turn */
        if (live && p.turning) {
            load_pieces(c, a.tables.cos, cos_of(&a.tables, batch, position), true, p);
            load_partners(back, a.tables.sin, sin_of(&a.tables, batch, position), true, p);
        }
        BST_EACH(j, HELD) back[j] = FIRST(j) ? back[j] : -back[j];
        BST_ROLLED
        for (int i = 0; i < SLOT_HEADS; i++) {
            const bool wanted = live && i < s.count;
            const bst_raw none = {{0, 0, 0, 0}};
            bst_raw raw_x[PIECES], raw_dy[PIECES];
            float n[HELD], m[HELD], w[HELD], other[HELD];
#if RING
            bst_copy_async_wait(SLOT_HEADS - 1);
            BST_EACH(piece, PIECES) {
                const bool mine = wanted && (piece ? p.has_right : p.has_left);
                raw_x[piece] = mine ? bst_read(place(memory, i, 0, piece), 16) : none;
                raw_dy[piece] = mine ? bst_read(place(memory, i, 1, piece), 16) : none;
            }
            prefetch(memory, i, &from, from.live && i < s.count, p);
#else
            read_pieces(raw_x, from.x, 0, IN_TYPE, wanted, bst_nearby(p));
            read_pieces(raw_dy, from.dy, 0, OUT_TYPE, wanted, p);
#endif
            from.x = bst_at(from.x, x_head, IN_TYPE);
            from.dy = bst_at(from.dy, dy_head, OUT_TYPE);
            load_pieces(w, weight, 0, false, p);
            as_factor(w);
            unpack_pieces(n, raw_x, IN_TYPE);
            bst_gather(n, n + VEC, p);
            const float rstd = rstd_of(n, a.eps, scratch);
            unpack_pieces(m, raw_dy, OUT_TYPE);
            partners_of(other, m, raw_dy, OUT_TYPE, 1.0f);
            turn(m, other, c, back, p);
            unpack_pieces(n, raw_x, IN_TYPE);
            bst_gather(n, n + VEC, p);
            float projection = 0;
            BST_EACH(j, HELD) {
                n[j] *= rstd;
                if (WANTS & (ROPE_DWEIGHT | ROPE_DWEIGHT << ROPE_OF_K)) dw[j] = bst_fma(m[j], n[j], dw[j]);
                m[j] *= w[j];
                projection = bst_fma(m[j], n[j], projection);
            }
            if (!(WANTS & (ROPE_DX | ROPE_DX << ROPE_OF_K))) continue;
            projection = bst_group_sum(projection, GROUP, scratch + 32) * (1.0f / DIM);
            BST_EACH(j, HELD) m[j] = rstd * bst_fma(-projection, n[j], m[j]);
            if (!dx_wanted || !wanted) continue;
            bst_scatter(m, m + VEC, p);
            const rope_norm_backward_heads *q = &a.q, *k = &a.k;
            const int head = s.first + i;
            const int64_t at = s.of_q ? bst_token_start(q->dx_map, batch, position) + head * q->dx_map.head
                                      : bst_token_start(k->dx_map, batch, position) + head * k->dx_map.head;
            store_pieces(s.of_q ? q->dx : k->dx, at, m, IN_TYPE, bst_nearby(p));
        }
        token = next;
    }
    if (WANTS & (ROPE_DWEIGHT | ROPE_DWEIGHT << ROPE_OF_K))
        store_partial(a.partial + (int64_t)bst_block() * 2 * DIM, (float *)memory, dw, p);
}
#endif
