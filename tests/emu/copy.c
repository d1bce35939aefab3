/* copy.c - cp.async: the destination holds garbage until the thread that issued the copy waits for its group. */
#include <stdlib.h>
#include <string.h>

#include "emu.h"

void emu_copy_async16(void *to, const void *from, const char *where) {
    emu_thread *t = emu.current;
    emu_need("bst_copy_async16", "shared", to, 16, 16, EMU_SHARED, where);
    emu_touch(to, 16);
    emu_need("bst_copy_async16", "global", from, 16, 16, EMU_GLOBAL, where);
    emu_touch(from, 16);
    if (t->copy_count == t->copy_room) {
        const unsigned room = t->copy_room ? 2 * t->copy_room : 16;
        emu_copy *more = realloc(t->copies, room * sizeof *more);
        if (more == NULL) emu_fail(where, "no memory for %u copies in flight", room);
        t->copies = more;
        t->copy_room = room;
    }
    t->copies[t->copy_count++] = (emu_copy){.to = to, .from = from, .group = t->copy_group};
    emu_garbage(to, 16);
    if (emu_random(16) == 0) emu_yield();
}

void emu_copy_commit(void) { ++emu.current->copy_group; }

void emu_copy_wait(unsigned newest) {
    emu_thread *t = emu.current;
    unsigned kept = 0;
    for (unsigned i = 0; i < t->copy_count; ++i) {
        const emu_copy *copy = &t->copies[i];
        if (copy->group + newest >= t->copy_group) { /* among the newest, or not committed */
            t->copies[kept++] = *copy;
        } else {
            memcpy(copy->to, copy->from, 16);
        }
    }
    t->copy_count = kept;
    emu_yield(); /* others must not see the data without a barrier, whoever runs next */
}
