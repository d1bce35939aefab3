/* shared.c - the shared memory of a cluster's blocks: garbage when a block begins, red zones (under ASan) around the
 * dynamic part and each static array, all poisoned once the launch has ended.
 *
 * Each block's part: red zone, dynamic, red zone, then the static arrays with a red zone after each. Addresses are
 * aligned as promised and no better, so that a kernel cannot lean on more. */
#include <stdlib.h>
#include <string.h>

#include "emu.h"
#include "sanitize.h"

/* An address in a block's memory is the same in all of a cluster, as far as swizzles of boxes look at it. */
enum { RED_ZONE = 128, ALIKE = 1024, STATIC_ROOM = EMU_STATIC_LIMIT + EMU_MOST_SITES * 2 * RED_ZONE };

static unsigned char *arena;
static size_t stride; /* from one block's part to the next */

static void poison(const void *p, size_t bytes) {
#ifdef EMU_ASAN
    __asan_poison_memory_region(p, bytes);
#else
    (void)p, (void)bytes;
#endif
}

static void unpoison(const void *p, size_t bytes) {
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(p, bytes);
#else
    (void)p, (void)bytes;
#endif
}

static size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static size_t static_begin(void) { return RED_ZONE + up(emu.launch->shared, RED_ZONE) + RED_ZONE; }

unsigned char *emu_dynamic_of(const emu_block *block) { return block->memory + RED_ZONE; }

bst_status emu_shared_begin(void) {
    stride = up(static_begin() + STATIC_ROOM, ALIKE);
    arena = aligned_alloc(ALIKE, stride * emu.cluster);
    if (arena == NULL) return BST_NO_MEMORY;
    for (unsigned i = 0; i < emu.cluster; ++i) emu.blocks[i].memory = arena + i * stride;
    emu.site_count = emu.static_used = emu.static_end = 0;
    return BST_OK;
}

void emu_garbage(void *p, size_t bytes) {
    /* NaN in every type; or the largest bf16 and nearly the largest float, as NaN vanishes in a maximum. */
    memset(p, emu_random(2) ? 0xff : 0x7f, bytes);
}

void emu_shared_fill(emu_block *block) {
    unpoison(block->memory, stride);
    emu_garbage(block->memory, stride);
    poison(block->memory, stride);
    unpoison(emu_dynamic_of(block), emu.launch->shared);
    for (unsigned s = 0; s < emu.site_count; ++s) unpoison(block->memory + emu.sites[s].offset, emu.sites[s].bytes);
}

void emu_shared_end(void) {
    if (arena == NULL) return;
    unpoison(arena, stride * emu.cluster);
    free(arena);
    arena = NULL;
}

void *emu_shared_site(const void *site, unsigned long bytes, const char *where) {
    for (unsigned s = 0; s < emu.site_count; ++s) {
        if (emu.sites[s].key == site) return emu.current->block->memory + emu.sites[s].offset;
    }
    emu.static_used += (unsigned)up(bytes, 16);
    if (emu.static_used > EMU_STATIC_LIMIT || emu.site_count == EMU_MOST_SITES) {
        emu_fail(where, "static shared memory of %u bytes in %u arrays; at most %d bytes and %d arrays",
                 emu.static_used, emu.site_count + 1, EMU_STATIC_LIMIT, EMU_MOST_SITES);
    }
    if (emu.static_used + emu.launch->shared > (unsigned)emu.chip.shared_memory) {
        emu_fail(where, "%u bytes of static and %u of dynamic shared memory; the chip has %d for a block",
                 emu.static_used, emu.launch->shared, emu.chip.shared_memory);
    }
    const size_t offset = static_begin() + up(emu.static_end, 32) + 16; /* 16-byte aligned, never 32 */
    emu.sites[emu.site_count].key = site;
    emu.sites[emu.site_count].offset = (unsigned)offset;
    emu.sites[emu.site_count].bytes = (unsigned)bytes;
    emu.static_end = (unsigned)(offset - static_begin() + bytes + RED_ZONE);
    ++emu.site_count;
    for (unsigned i = 0; i < emu.cluster; ++i) unpoison(emu.blocks[i].memory + offset, bytes);
    return emu.current->block->memory + offset;
}

bool emu_is_shared(const emu_block *block, const void *p, size_t bytes) {
    const unsigned char *const begin = block != NULL ? block->memory : arena;
    const size_t room = block != NULL ? stride : stride * emu.cluster;
    const uintptr_t at = (uintptr_t)p - (uintptr_t)begin;
    return at < room && bytes <= room - at;
}

void emu_touch(const void *p, size_t bytes) {
#ifdef EMU_ASAN
    const volatile char *bad = __asan_region_is_poisoned((void *)(uintptr_t)p, bytes);
    if (bad != NULL) (void)*bad;
#else
    (void)p, (void)bytes;
#endif
}

void emu_need(const char *name, const char *argument, const void *p, size_t bytes, size_t alignment, int space,
              const char *where) {
    if ((uintptr_t)p % alignment != 0) {
        emu_fail(where, "%s: %s %p is not aligned to %zu bytes", name, argument, p, alignment);
    }
    if (space == EMU_SHARED && !emu_is_shared(emu.current->block, p, bytes)) {
        emu_fail(where, "%s: %s %p is not shared memory of this block", name, argument, p);
    }
    if (space == EMU_GLOBAL && emu_is_shared(NULL, p, 1)) {
        emu_fail(where, "%s: %s %p is shared memory; it must be global", name, argument, p);
    }
    if (emu.launch->overlap && !emu.current->waited_for_previous && emu.chip.arch >= 90 && !emu_is_shared(NULL, p, 1)) {
        emu_fail(where, "%s: global memory is used before bst_wait_for_previous in a launch that may overlap", name);
    }
}

void emu_access(const char *name, const void *p, int bytes, int space, const char *where) {
    if (bytes != 2 && bytes != 4 && bytes != 8 && bytes != 16) emu_fail(where, "%s of %d bytes", name, bytes);
    emu_need(name, "the address", p, (size_t)bytes, (size_t)bytes, space, where);
    if (emu_random(16) == 0) emu_yield();
}
