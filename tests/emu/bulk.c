/* bulk.c - bulk copies: each is made at a random later time. The destination of a read holds garbage until then; a
 * write reads its shared source at one random time and writes its global destination at another. */
#include <stdlib.h>
#include <string.h>

#include "emu.h"

static void need(const char *name, const void *shared, const void *global, unsigned bytes, const char *where) {
    if (bytes == 0 || bytes % 16 != 0) emu_fail(where, "%s of %u bytes; needed is a multiple of 16", name, bytes);
    emu_need(name, "shared", shared, bytes, 16, EMU_SHARED, where);
    emu_need(name, "global", global, bytes, 16, EMU_GLOBAL, where);
    emu_touch(shared, bytes);
    emu_touch(global, bytes);
}

static void add(emu_bulk copy, const char *where) {
    if (emu.bulk_count == emu.bulk_room) {
        const unsigned room = emu.bulk_room ? 2 * emu.bulk_room : 16;
        emu_bulk *more = realloc(emu.bulk, room * sizeof *more);
        if (more == NULL) emu_fail(where, "no memory for %u bulk copies in flight", room);
        emu.bulk = more;
        emu.bulk_room = room;
    }
    emu.bulk[emu.bulk_count++] = copy;
}

static void drop(unsigned i) {
    free(emu.bulk[i].snapshot);
    emu.bulk[i] = emu.bulk[--emu.bulk_count];
}

static void read_source(emu_bulk *copy) {
    copy->snapshot = malloc(copy->bytes);
    if (copy->snapshot == NULL) {
        emu_fail(NULL, "no memory for a bulk copy of %u bytes", copy->bytes);
        return;
    }
    memcpy(copy->snapshot, copy->from, copy->bytes);
}

/* One step; true where the copy was the last to use its place in the list. */
static bool step(unsigned i) {
    emu_bulk *copy = &emu.bulk[i];
    if (copy->is_write && copy->snapshot == NULL) {
        read_source(copy);
        return false;
    }
    memcpy(copy->to, copy->snapshot ? copy->snapshot : copy->from, copy->bytes);
    if (!copy->is_write) emu_barrier_complete(copy->barrier, copy->bytes);
    drop(i);
    return true;
}

void emu_bulk_step(void) { (void)step(emu_random(emu.bulk_count)); }

void emu_bulk_read(void *to, const void *from, unsigned bytes, void *barrier, const char *where) {
    need("bst_bulk_read", to, from, bytes, where);
    emu_need("bst_bulk_read", "the barrier", barrier, 8, 8, EMU_SHARED, where);
    emu_touch(barrier, 8);
    emu_garbage(to, bytes);
    add((emu_bulk){.thread = emu.current, .to = to, .from = from, .bytes = bytes, .barrier = barrier}, where);
    emu_yield();
}

void emu_bulk_write(void *to, const void *from, unsigned bytes, const char *where) {
    emu_need_hopper("bst_bulk_write", where);
    need("bst_bulk_write", from, to, bytes, where);
    emu_thread *t = emu.current;
    t->bulk_wrote = true;
    t->bulk_last_write = t->bulk_group;
    add((emu_bulk){.thread = t, .is_write = true, .to = to, .from = from, .bytes = bytes, .group = t->bulk_group},
        where);
    emu_yield();
}

/* Where these bytes of this block's shared memory lie in another's. */
static void *place_in(const char *name, const emu_block *block, const char *argument, const void *shared, size_t bytes,
                      const char *where) {
    emu_need(name, argument, shared, bytes, 8, EMU_SHARED, where);
    void *there = block->memory + ((const unsigned char *)shared - emu.current->block->memory);
    emu_touch(there, bytes);
    return there;
}

/* A block of this cluster, which is there. */
static const emu_block *block_of(const char *name, unsigned rank, const char *where) {
    if (rank >= emu.cluster) emu_fail(where, "%s to rank %u of %u", name, rank, emu.cluster);
    const emu_block *block = &emu.blocks[rank];
    if (emu.current->cluster_waits == 0 && block != emu.current->block) {
        emu_fail(where, "%s to block (%u, %u), which may not have begun: a cluster barrier must come first", name,
                 block->x, block->y);
    }
    if (block->live == 0) {
        emu_fail(where, "%s to block (%u, %u), which has exited: a cluster barrier must come before its end", name,
                 block->x, block->y);
    }
    return block;
}

void emu_barrier_arrive_at(void *barrier, unsigned rank, const char *where) {
    static const char name[] = "bst_barrier_arrive_at";
    emu_barrier_arrive_there(place_in(name, block_of(name, rank, where), "the barrier", barrier, 8, where), where);
}

void emu_bulk_bring(const char *name, unsigned rank, void *to, unsigned char *bytes, unsigned count, void *barrier,
                    const char *where) {
    const emu_block *block = block_of(name, rank, where);
    emu_bulk copy = {.thread = emu.current, .bytes = count, .snapshot = bytes};
    copy.to = place_in(name, block, "shared", to, count, where);
    copy.barrier = place_in(name, block, "the barrier", barrier, 8, where);
    emu_garbage(copy.to, count);
    add(copy, where);
}

void emu_cluster_send(void *shared, void *barrier, unsigned rank, unsigned first, unsigned second, const char *where) {
    static const char name[] = "bst_cluster_send";
    const emu_block *block = block_of(name, rank, where);
    void *to = place_in(name, block, "shared", shared, 8, where),
         *there = place_in(name, block, "the barrier", barrier, 8, where);
    const unsigned words[] = {first, second};
    emu_garbage(to, sizeof words);
    emu_bulk copy = {.thread = emu.current, .to = to, .from = words, .bytes = sizeof words, .barrier = there};
    read_source(&copy);
    add(copy, where);
    emu_yield();
}

void emu_bulk_commit(void) { ++emu.current->bulk_group; }

void emu_bulk_wait(unsigned newest, int read_only) {
    emu_thread *t = emu.current;
    for (unsigned i = emu.bulk_count; i-- > 0;) { /* from the end: drop moves the last one down */
        const emu_bulk *copy = &emu.bulk[i];
        if (copy->thread != t || !copy->is_write || copy->group + newest >= t->bulk_group) continue;
        if (copy->snapshot == NULL) (void)step(i);
        if (!read_only) (void)step(i);
    }
    if (t->bulk_group >= newest && t->bulk_group - newest > t->bulk_read_before) {
        t->bulk_read_before = t->bulk_group - newest;
    }
    emu_yield();
}

/* A write that was not waited for is an error even where it happens to have been made; a read only while it is on its
 * way, as any thread of the block may have waited for its barrier. */
void emu_bulk_exit(emu_thread *thread) {
    if (thread->bulk_wrote && thread->bulk_read_before <= thread->bulk_last_write) {
        emu_fail(NULL, "the thread ends before bst_bulk_wait or bst_bulk_wait_read for its last bulk write");
    }
    if (thread->block->live > 1) return;
    for (unsigned i = 0; i < emu.bulk_count; ++i) {
        const emu_bulk *copy = &emu.bulk[i];
        if (!copy->is_write && emu_is_shared(thread->block, copy->to, copy->bytes)) {
            emu_fail(NULL,
                     "the block ends while a bulk read or a bst_cluster_send into its shared memory is in flight");
        }
    }
}

void emu_bulk_end(void) {
    while (emu.bulk_count > 0) {
        if (emu.status == BST_OK) {
            (void)step(emu.bulk_count - 1);
        } else {
            drop(emu.bulk_count - 1);
        }
    }
}
