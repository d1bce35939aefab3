/* cross_entropy_ring.cu - loss and gradient of wide rows with one read and one write per logit, on sm_90 and later.
 *
 * Macros: VOCAB; TYPE (code of dtype.h); VEC elements of 16 bytes; THREADS of a block, its producer warp among them;
 * BLOCKS of a multiprocessor; CLUSTER blocks that share a row; SLOTS of a block's ring; STAGED: gradients leave through
 * shared memory, by bulk copies; AHEAD: a consumer begins a row before it ends the one before; FOLDED: one stride
 * describes all rows; HAS_WEIGHT, SMOOTH, SOFTCAP, Z_LOSS: options in use; NEGATIVE: logit_scale <= 0; PEEL 0; MODE
 * LOSS_AND_GRADIENT.
 *
 * Bytes: one read and one write per logit. Each block of a cluster has a slice of the row and each warp a part of the
 * slice, packed in registers between its uses. A block has one producer warp, which copies rows into the ring's slots,
 * and WARPS consumer warps. A consumer sends its part's maximum and sum to every block of the cluster and goes on to
 * the next row while they travel: nothing but their arrival is waited for. So three rows are in flight, with AHEAD and
 * two slots, a column being one iteration of the consumers:
 *
 *                                          n                  n + 1              n + 2
 *   producer    bulk copy into a slot      row n + 1          row n + 2          row n + 3          waits: slot empty
 *   consumers   slot to registers, sums,   row n              row n + 1          row n + 2          wait: slot full
 *               partials to the cluster
 *               gradients to `staged`      row n - 1          row n              row n + 1          wait: partials
 *   bulk write  staged to memory           row n - 1          row n              row n + 1
 *
 * Rows are handed out in order, by tickets that block 0 draws from a counter in memory: clusters that drift apart cost
 * the memory 5 % of its speed. No result depends on who has which row.
 * Measured on an H200, bf16, with divisors and reduce: 519 us at 4096 x 128256 (0.96 of the copy bandwidth), 615 at
 * 4096 x 151936 (0.96), 141 at 1024 x 128256 (0.88), 538 at 2048 x 262144 (0.94). */
#define VECTORS (VOCAB / VEC)
#define SLICE   ((VECTORS + CLUSTER - 1) / CLUSTER) /* vectors of a block */
#define WARPS   (THREADS / 32 - 1)
#define PART    ((SLICE + WARPS - 1) / WARPS) /* of a warp */
#define EACH    ((PART + 31) / 32)            /* of a lane */
#define STEP    32
#include "cross_entropy_row.cuh"

#define NONE          0xffffffffu /* no row, or no target in the vocabulary */
#define PREFETCH      2           /* tickets drawn before they are needed */
#define TICKETS       8           /* room for them */
#define IN_FLIGHT     BST_CROSS_ENTROPY_IN_FLIGHT
#define ROW_NUMBERS   BST_CROSS_ENTROPY_ROW_NUMBERS(CLUSTER *WARPS, SMOOTH)
#define PARTIAL_BYTES (ROW_NUMBERS * 4u)

/* A warp that sends the partials of row n has ended row n - 2, for which every warp of the cluster has sent its own,
 * and had then ended row n - 4: so the room of row n - IN_FLIGHT is free. And block 0 draws ticket n + PREFETCH when
 * its warps have emptied the slot of row n - SLOTS, when every block had read
 * the ticket of row n - SLOTS - 2. */
static_assert(IN_FLIGHT >= 4 && TICKETS >= SLOTS + PREFETCH + 2, "room is used again when it is free");

typedef struct ring {
    unsigned char *slots;                    /* [SLOTS][SLICE] vectors */
    unsigned char *staged;                   /* [SLICE] vectors */
    uint32_t *jobs;                          /* [SLOTS][2]: row and target of a slot */
    uint32_t *tickets;                       /* [TICKETS][2]: row and target, as drawn */
    float *partials;                         /* [IN_FLIGHT]: [CLUSTER][WARPS][PARTIAL], the target's logit, unused */
    uint64_t *full, *empty, *drawn, *summed; /* barriers of slots (two), tickets and partials */
} ring;

/* One use of a barrier: the barriers of `count` places serve row n at place n % count, each time in its next phase, the
 * first of which is row `first`'s. */
typedef struct phase {
    uint64_t *barrier;
    unsigned parity;
} phase;

BST_DEVICE phase phase_of(uint64_t *barriers, unsigned count, unsigned n, unsigned first) {
    phase p = {&barriers[n % count], (n - first) / count & 1u};
    return p;
}
/* The phase before, of the row `count` earlier. */
BST_DEVICE phase before(phase p) {
    p.parity ^= 1u;
    return p;
}
BST_DEVICE phase full(const ring *r, unsigned n) { return phase_of(r->full, SLOTS, n, 0); }
BST_DEVICE phase empty(const ring *r, unsigned n) { return phase_of(r->empty, SLOTS, n, 0); }
BST_DEVICE phase drawn(const ring *r, unsigned n) { return phase_of(r->drawn, TICKETS, n, 1); }
BST_DEVICE phase summed(const ring *r, unsigned n) { return phase_of(r->summed, IN_FLIGHT, n, 0); }
BST_DEVICE void wait(phase p) { bst_barrier_wait(p.barrier, p.parity); }
BST_DEVICE void wait_cluster(phase p) { bst_barrier_wait_cluster(p.barrier, p.parity); }
BST_DEVICE void arrive(phase p) { bst_barrier_arrive(p.barrier); }
BST_DEVICE void expect(phase p, unsigned bytes) { bst_barrier_expect(p.barrier, bytes); }

/* What a block or a warp has of a row, in vectors. */
typedef struct piece {
    int first, count;
} piece;

BST_DEVICE piece piece_of(int index, int size, int whole) {
    int left = whole - index * size;
    piece p = {index * size, left < 0 ? 0 : left < size ? left : size};
    return p;
}

/* ---- the producer: one lane -------------------------------------------------------------------------------------- */

BST_DEVICE uint32_t target_of(const cross_entropy_rows_args *a, uint32_t row) {
    int64_t target = a->target[row];
    return in_vocabulary(a, target) ? (uint32_t)target : NONE;
}

/* Block 0 draws the cluster's row number n and tells the cluster. Each cluster's first is its own number. */
BST_DEVICE void draw(const cross_entropy_rows_args *a, const ring *r, unsigned n) {
    uint32_t row = bst_blocks() / CLUSTER + bst_atomic_add_u32(a->tickets, 1), target = NONE;
    if (row < a->rows)
        target = target_of(a, row);
    else
        row = NONE;
    for (unsigned rank = 0; rank < CLUSTER; rank++)
        bst_cluster_send(&r->tickets[2 * (n % TICKETS)], drawn(r, n).barrier, rank, row, target);
}

/* Fills the slot of row number n with a row, or with word that there is none. */
BST_DEVICE void fill(const cross_entropy_rows_args *a, const ring *r, unsigned n, piece slice, uint32_t row,
                     uint32_t target) {
    unsigned slot = n % SLOTS;
    r->jobs[2 * slot] = row;
    r->jobs[2 * slot + 1] = target;
    if (target == NONE) {
        arrive(full(r, n));
        return;
    }
    int64_t at = bst_row_start(&a->logits_map, row, FOLDED) + (int64_t)slice.first * VEC;
    expect(full(r, n), (unsigned)slice.count * 16u);
    bst_bulk_read(r->slots + slot * (SLICE * 16), bst_at(a->logits, at, TYPE), (unsigned)slice.count * 16u,
                  full(r, n).barrier);
}

BST_DEVICE void produce(const cross_entropy_rows_args *a, const ring *r, unsigned rank, piece slice) {
    uint32_t row = bst_block() / CLUSTER, target = target_of(a, row);
    fill(a, r, 0, slice, row, target);
    for (unsigned n = 1; rank == 0 && n <= PREFETCH; n++) draw(a, r, n);
    for (unsigned n = 1;; n++) {
        unsigned place = n % TICKETS;
        if (n >= SLOTS) wait(before(empty(r, n)));
        wait_cluster(drawn(r, n));
        row = r->tickets[2 * place];
        target = r->tickets[2 * place + 1];
        expect(drawn(r, n), 8);
        fill(a, r, n, slice, row, target);
        if (row == NONE) {
            /* Tickets in flight must arrive before the block ends. */
            for (unsigned i = n + 1; i < n + PREFETCH; i++) wait_cluster(drawn(r, i));
            return;
        }
        if (rank == 0) draw(a, r, n + PREFETCH);
    }
}

/* ---- the consumers ----------------------------------------------------------------------------------------------- */

/* A row between its two halves. */
typedef struct begun {
    registers h;
    uint32_t row, target;
} begun;

/* Takes a row out of its slot and sends the warp's partials. */
BST_DEVICE void begin_row(const cross_entropy_rows_args *a, const ring *r, unsigned n, unsigned rank, piece slice,
                          piece part, begun *b) {
    const unsigned char *slot = r->slots + n % SLOTS * (SLICE * 16);
    unsigned lane = bst_lane(), warp = bst_thread() / 32;
    partial p = nothing();
    int column = (slice.first + part.first) * VEC;
    float hit = 0.0f;
    /* One warp of the cluster sends the target's logit, where there is one the warp that has it. */
    bool sends = rank == 0 && warp == 0;
    if (b->target != NONE) {
        int at = (int)b->target - slice.first * VEC, within = at - part.first * VEC;
        sends = (unsigned)within < (unsigned)(part.count * VEC);
        if (sends) {
            bst_load(&hit, slot, at, TYPE, 1);
            bst_sync_warp();
            /* By the lane that reads it: the order of one lane is all it takes. */
            if (PATCHED && within / VEC % 32 == (int)lane) {
                leave_out((void *)slot, at);
                bst_fence_async(); /* the slot's next contents are a bulk copy */
            }
        }
        BST_EACH(i, EACH)
            if ((int)lane + i * 32 < part.count)
                b->h.raw[i] = bst_read(slot + (part.first + (int)lane + i * 32) * 16, 16);
    }
    bst_sync_warp(); /* the part is in registers */
    if (lane == 0) arrive(empty(r, n));
    if (b->target != NONE) p = registers_sums(a, &b->h, (int)lane, part.count, column, (int)b->target);
    p = warp_total(p, 32);
    if (lane >= CLUSTER) return;
    float *row = r->partials + n % IN_FLIGHT * ROW_NUMBERS, *to = row + (rank * WARPS + warp) * PARTIAL;
    bst_cluster_send(to, summed(r, n).barrier, lane, bst_bits(p.reference), bst_bits(p.others));
    if (SMOOTH) bst_cluster_send(to + 2, summed(r, n).barrier, lane, bst_bits(p.weights), bst_bits(p.weighted));
    if (sends) bst_cluster_send(row + CLUSTER * WARPS * PARTIAL, summed(r, n).barrier, lane, bst_bits(hit), 0);
}

/* The total of a row's warps, in each lane. */
BST_DEVICE partial ring_total(const ring *r, unsigned n, float *hit) {
    const float *from = r->partials + n % IN_FLIGHT * ROW_NUMBERS;
    partial p = nothing();
    *hit = from[CLUSTER * WARPS * PARTIAL];
    for (int i = (int)bst_lane(); i < CLUSTER * WARPS; i += 32) p.reference = bst_max(p.reference, from[i * PARTIAL]);
    p.reference = bst_warp_reduce(p.reference, 32, true);
    for (int i = (int)bst_lane(); i < CLUSTER * WARPS; i += 32) {
        float step = from[i * PARTIAL] - p.reference;
        p.others += from[i * PARTIAL + 1] * far_power(step);
        if (SMOOTH) p.weighted += bst_fma(from[i * PARTIAL + 2], bst_max(step, LOWEST), from[i * PARTIAL + 3]);
    }
    p.others = bst_warp_reduce(p.others, 32, false);
    if (SMOOTH) p.weighted = bst_warp_reduce(p.weighted, 32, false);
    return p;
}

/* Writes the part's gradients; zeros without `t`. */
BST_DEVICE void write_part(const cross_entropy_rows_args *a, const ring *r, const row_terms *t, const begun *b,
                           piece slice, piece part) {
    int lane = (int)bst_lane(), first = slice.first + part.first;
    float share = t ? registers_share(t, &b->h) : 0.0f;
    void *out = bst_at_out(a->dlogits, bst_row_start(&a->dlogits_map, b->row, FOLDED) + (int64_t)first * VEC, TYPE);
    unsigned char *staged = r->staged + part.first * 16;
    if (STAGED) {
        if (lane == 0) bst_bulk_wait_read(0);
        bst_sync_warp();
    }
    BST_EACH(i, EACH) {
        int at = lane + i * 32;
        if (at >= part.count) continue;
        bst_raw v = {{0, 0, 0, 0}};
        if (t) v = registers_gradient(a, t, share, &b->h, i, (first + at) * VEC, (int)b->target);
        bst_write(STAGED ? staged + at * 16 : (unsigned char *)out + (size_t)at * 16, v, 16);
    }
    int within = (int)b->target - first * VEC;
    if (PATCHED && t && (unsigned)within < (unsigned)(part.count * VEC) && within / VEC % 32 == lane)
        bst_store(STAGED ? staged : out, within, &t->at_target, TYPE, 1);
    if (!STAGED) return;
    bst_fence_async();
    bst_sync_warp();
    if (lane == 0 && part.count) {
        bst_bulk_write(out, staged, (unsigned)part.count * 16u);
        bst_bulk_commit();
    }
}

BST_DEVICE void end_row(const cross_entropy_rows_args *a, const bst_cross_entropy_divisors *divide, const ring *r,
                        unsigned n, unsigned rank, piece slice, piece part, const begun *b) {
    bool leader = bst_thread() == 0;
    wait_cluster(summed(r, n));
    float hit;
    partial p = ring_total(r, n, &hit);
    if (leader) expect(summed(r, n), PARTIAL_BYTES);
    if (b->target == NONE) {
        write_part(a, r, 0, b, slice, part);
        if (leader && rank == 0) skip(a, b->row, a->target[b->row]);
        return;
    }
    int at = (int)b->target - (slice.first + part.first) * VEC;
    bool owner = (unsigned)at < (unsigned)(part.count * VEC), first = rank == 0 && bst_thread() / 32 == 0;
    row_terms terms = terms_of(a, divide, b->row, (int)b->target, p, hit, owner || (first && a->lse));
    if (bst_lane() == 0 && owner && a->loss_rows) a->loss_rows[b->row] = terms.loss;
    if (leader && rank == 0) store_lse(a, b->row, &terms);
    write_part(a, r, &terms, b, slice, part);
}

BST_DEVICE void consume(const cross_entropy_rows_args *a, const ring *r, unsigned rank, piece slice) {
    piece part = piece_of((int)bst_thread() / 32, PART, slice.count);
    bst_cross_entropy_divisors divide = divisors_of(a);
    begun now, last;
    last.row = NONE;
    for (unsigned n = 0;; n++) {
        wait(full(r, n));
        now.row = r->jobs[2 * (n % SLOTS)];
        now.target = r->jobs[2 * (n % SLOTS) + 1];
        if (now.row != NONE) begin_row(a, r, n, rank, slice, part, &now);
        if (AHEAD) {
            if (last.row != NONE) end_row(a, &divide, r, n - 1, rank, slice, part, &last);
            last = now;
        } else if (now.row != NONE) {
            end_row(a, &divide, r, n, rank, slice, part, &now);
        }
        if (now.row == NONE) break;
    }
    if (STAGED && bst_lane() == 0) bst_bulk_wait(0);
}

BST_KERNEL(cross_entropy_ring, cross_entropy_rows_args, THREADS, BLOCKS) {
    BST_DYNAMIC_SHARED(slots);
    BST_SHARED(uint64_t, full, SLOTS);
    BST_SHARED(uint64_t, empty, SLOTS);
    BST_SHARED(uint64_t, drawn, TICKETS);
    BST_SHARED(uint64_t, summed, IN_FLIGHT);
    BST_SHARED(uint32_t, jobs, 2 * SLOTS);
    BST_SHARED(uint32_t, tickets, 2 * TICKETS);
    BST_SHARED(float, partials, IN_FLIGHT *ROW_NUMBERS);
    ring r = {slots, slots + SLOTS * SLICE * 16, jobs, tickets, partials, full, empty, drawn, summed};
    unsigned rank = bst_cluster_rank();
    if (bst_thread() == 0) {
        for (int i = 0; i < SLOTS; i++) {
            bst_barrier_init(&full[i], 1);
            bst_barrier_init(&empty[i], WARPS);
        }
        for (int i = 0; i < TICKETS; i++) bst_barrier_init(&drawn[i], 1);
        for (int i = 0; i < IN_FLIGHT; i++) bst_barrier_init(&summed[i], 1);
        bst_barrier_fence_init();
        for (int i = 0; i < TICKETS; i++) bst_barrier_expect(&drawn[i], 8);
        for (int i = 0; i < IN_FLIGHT; i++) bst_barrier_expect(&summed[i], PARTIAL_BYTES);
    }
    bst_cluster_sync(); /* every block has begun and has its barriers */
    bst_wait_for_previous();
    piece slice = piece_of((int)rank, SLICE, VECTORS);
    if (bst_thread() / 32 < WARPS)
        consume(&a, &r, rank, slice);
    else if (bst_lane() == 0)
        produce(&a, &r, rank, slice);
    bst_cluster_sync(); /* no block ends while others may write into it */
}
