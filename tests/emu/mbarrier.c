/* mbarrier.c - barriers in shared memory. All their state is in their 64 bits, as on a chip, behind a mark that tells
 * an initialised one from garbage. */
#include <string.h>

#include "emu.h"

enum { MARK = 0xb5, MOST_ARRIVALS = 4095, MOST_BYTES = (1 << 20) - 1 };

typedef struct state {
    unsigned phase, expected, pending;
    int bytes; /* still to come; below zero where they came before they were expected */
} state;

static bool load(const void *barrier, state *s) {
    uint64_t u;
    memcpy(&u, barrier, sizeof u);
    s->phase = u >> 55 & 1;
    s->expected = u >> 43 & 0xfff;
    s->pending = u >> 31 & 0xfff;
    s->bytes = (int)(u & 0x7fffffff) - (1 << 30);
    return u >> 56 == MARK;
}

static void store(void *barrier, state s) {
    const uint64_t u = (uint64_t)MARK << 56 | (uint64_t)s.phase << 55 | (uint64_t)s.expected << 43 |
                       (uint64_t)s.pending << 31 | (uint64_t)(s.bytes + (1 << 30));
    memcpy(barrier, &u, sizeof u);
}

static state need(const char *name, const void *barrier, const char *where) {
    state s;
    emu_need(name, "the barrier", barrier, 8, 8, EMU_SHARED, where);
    emu_touch(barrier, 8);
    if (!load(barrier, &s)) {
        emu_fail(where, "%s: the mbarrier is not initialised, or its initialisation is not waited for", name);
    }
    return s;
}

static void end_phase_if_complete(void *barrier, state s) {
    if (s.pending == 0 && s.bytes == 0) {
        s.phase ^= 1;
        s.pending = s.expected;
        for (unsigned b = 0; b < emu.cluster; ++b) {
            for (unsigned i = 0; i < emu.launch->block; ++i) {
                emu_thread *t = &emu.blocks[b].threads[i];
                if (t->wait == EMU_WAIT_BARRIER && t->barrier == barrier) emu_wake(t);
            }
        }
    }
    store(barrier, s);
}

void emu_need_hopper(const char *name, const char *where) {
    if (emu.chip.arch < 90) emu_fail(where, "%s: sm_%d has no such instruction", name, emu.chip.arch);
}

void emu_barrier_init(void *barrier, unsigned arrivals, const char *where) {
    emu_need_hopper("bst_barrier_init", where);
    emu_need("bst_barrier_init", "the barrier", barrier, 8, 8, EMU_SHARED, where);
    emu_touch(barrier, 8);
    if (arrivals < 1 || arrivals > MOST_ARRIVALS) {
        emu_fail(where, "bst_barrier_init for %u arrivals; needed is 1 to %d", arrivals, MOST_ARRIVALS);
    }
    store(barrier, (state){.expected = arrivals, .pending = arrivals});
    emu_yield();
}

static void arrive(void *barrier, state s, unsigned expected_bytes, const char *where) {
    if (s.pending == 0) emu_fail(where, "more arrivals at an mbarrier than the %u it was initialised for", s.expected);
    if (expected_bytes > MOST_BYTES) emu_fail(where, "an mbarrier cannot expect %u bytes", expected_bytes);
    s.bytes += (int)expected_bytes;
    --s.pending;
    end_phase_if_complete(barrier, s);
    emu_yield();
}

void emu_barrier_arrive(void *barrier, unsigned expected_bytes, const char *where) {
    arrive(barrier, need("bst_barrier_arrive", barrier, where), expected_bytes, where);
}

void emu_barrier_arrive_there(void *there, const char *where) {
    state s;
    if (!load(there, &s)) emu_fail(where, "bst_barrier_arrive_at: the mbarrier is not initialised");
    arrive(there, s, 0, where);
}

void emu_barrier_wait(void *barrier, unsigned parity, const char *where) {
    state s = need("bst_barrier_wait", barrier, where);
    while (s.phase == (parity & 1)) {
        emu.current->barrier = barrier;
        emu_sleep(EMU_WAIT_BARRIER, where);
        s = need("bst_barrier_wait", barrier, where);
    }
}

void emu_barrier_complete(void *barrier, unsigned bytes) {
    state s;
    if (!load(barrier, &s)) {
        emu_fail_launch("the mbarrier of a bulk copy was overwritten while the copy was in flight");
        return;
    }
    s.bytes -= (int)bytes;
    end_phase_if_complete(barrier, s);
}
