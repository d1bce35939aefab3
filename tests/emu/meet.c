/* meet.c - where threads wait for each other: the block, the warp, the cluster.
 *
 * A block or a warp meets at one place in the text. Where threads come together from two places the kernel relies on
 * what CUDA does not promise ("CUDA C++ Programming Guide: Synchronization Functions"), and that is an error here. */
#include <string.h>

#include "emu.h"

static bool same(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }

void emu_sync(const char *where) {
    emu_block *block = emu.current->block;
    if (block->sync_arrived == 0) {
        block->sync_where = where;
    } else if (!same(block->sync_where, where)) {
        emu_fail(where, "divergent bst_sync: other threads of the block wait in the one at %s",
                 emu_base(block->sync_where));
    }
    if (++block->sync_arrived < emu.launch->block) {
        emu_sleep(EMU_WAIT_SYNC, where);
        return;
    }
    block->sync_arrived = 0;
    for (unsigned i = 0; i < emu.launch->block; ++i) {
        if (block->threads[i].wait == EMU_WAIT_SYNC) emu_wake(&block->threads[i]);
    }
    emu_yield(); /* the last to come is not the first to go */
}

unsigned emu_meet_warp(int kind, unsigned value, int operand, const char *where) {
    emu_thread *t = emu.current;
    emu_thread *lanes = &t->block->threads[t->index & ~31u];
    emu_warp *warp = &t->block->warps[t->index / 32];
    if ((t->index | 31u) >= emu.launch->block) {
        emu_fail(where, "all 32 lanes must take part, but a block of %u threads ends inside this warp",
                 emu.launch->block);
    }
    if (operand < 0 || operand > 31) emu_fail(where, "a shuffle by %d; needed is 0 to 31", operand);
    if (warp->arrived == 0) {
        warp->where = where;
        warp->kind = kind;
    } else if (warp->kind != kind || !same(warp->where, where)) {
        emu_fail(where, "divergent warp: other lanes wait at %s", emu_base(warp->where));
    }
    t->value = value;
    t->operand = operand;
    if (++warp->arrived < 32) {
        emu_sleep(EMU_WAIT_WARP, where);
        return t->value;
    }
    warp->arrived = 0;
    unsigned result[32];
    for (int i = 0; i < 32; ++i) {
        result[i] = lanes[kind == EMU_SHUFFLE_XOR ? i ^ lanes[i].operand : i].value;
    }
    /* Every lane has read what was there before: it is here. */
    for (int i = 0; kind == EMU_GATHER && i < 32; ++i) warp->words[i] = lanes[i].words;
    if (kind == EMU_MULTIPLY_ADD) emu_convert_factors(warp, lanes);
    for (int i = 0; i < 32; ++i) {
        lanes[i].value = result[i];
        if (&lanes[i] != t) emu_wake(&lanes[i]);
    }
    emu_yield();
    return t->value;
}

const emu_words *emu_gather_warp(const emu_words *own, const char *where) {
    emu_thread *t = emu.current;
    t->words = *own;
    emu_meet_warp(EMU_GATHER, 0, 0, where);
    return t->block->warps[t->index / 32].words;
}

/* Completes the phase once every thread that has not exited has arrived ("PTX ISA: barrier.cluster"). */
void emu_cluster_check(void) {
    if (emu.cluster_arrived == 0 || emu.cluster_arrived < emu.live) return;
    emu.cluster_arrived = 0;
    ++emu.cluster_phase;
    for (unsigned b = 0; b < emu.cluster; ++b) {
        for (unsigned i = 0; i < emu.launch->block; ++i) {
            if (emu.blocks[b].threads[i].wait == EMU_WAIT_CLUSTER) emu_wake(&emu.blocks[b].threads[i]);
        }
    }
}

void emu_cluster_arrive(const char *where) {
    emu_need_hopper("bst_cluster_arrive", where);
    emu_thread *t = emu.current;
    if (t->cluster_arrivals != t->cluster_waits) emu_fail(where, "bst_cluster_arrive twice without bst_cluster_wait");
    ++t->cluster_arrivals;
    ++emu.cluster_arrived;
    emu_cluster_check();
    emu_yield();
}

void emu_cluster_wait(const char *where) {
    emu_thread *t = emu.current;
    if (t->cluster_arrivals == t->cluster_waits) emu_fail(where, "bst_cluster_wait without bst_cluster_arrive");
    if (emu.cluster_phase < t->cluster_arrivals) emu_sleep(EMU_WAIT_CLUSTER, where);
    ++t->cluster_waits;
}
