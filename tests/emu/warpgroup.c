/* warpgroup.c - wgmma.mma_async.m64n256k16 ("PTX ISA: Asynchronous Warpgroup Level Matrix Instructions"): each thread's
 * part of it, made when it is waited for. Until then its sums are garbage, and what it reads is read then. */
#include <string.h>

#include "device/emu_types.h"
#include "emu.h"

enum { K = 16, COLUMNS = 256, BOX_BYTES = 64 * 64 * 2 }; /* of 64 rows that are summed over */

/* 128 bytes are swizzled: the number of eight rows of a tile, whose address 1024 divides, goes into pieces of 16. */
static float element(uint64_t address, bool is_f16) {
    uint16_t bits;
    memcpy(&bits, (const void *)(uintptr_t)(address ^ (address >> 7 & 7) << 4), sizeof bits);
    return is_f16 ? emu_f32_from_f16(bits) : emu_f32_from_bf16(bits);
}

static void need(uint64_t begin, unsigned bytes, const char *what, const char *where) {
    const void *p = (const void *)(uintptr_t)(begin & ~(uint64_t)127);
    if (!emu_is_shared(emu.current->block, p, bytes)) {
        emu_fail(where, "bst_product_64x256: %s is not in shared memory of this block", what);
    }
}

void emu_product(float *sums, uint64_t a, uint64_t b, int add, int is_f16, int across, const char *where) {
    emu_thread *t = emu.current;
    emu_need_hopper("bst_product_64x256", where);
    need(16 * a, 64 * 128, "a", where);
    need(16 * b, COLUMNS * 128, "b", where);
    if (t->product_count == EMU_MOST_PRODUCTS) {
        emu_fail(where, "bst_product_64x256: %d products that nobody has waited for", EMU_MOST_PRODUCTS);
    }
    if (t->product_count == 0) {
        t->sums = sums;
        memcpy(t->sums_before, sums, sizeof t->sums_before);
        emu_garbage(sums, sizeof t->sums_before);
    } else if (t->sums != sums) {
        emu_fail(where, "bst_product_64x256: other sums are not waited for yet");
    }
    t->products[t->product_count++] = (emu_product_call){a, b, t->product_group, add != 0, is_f16 != 0, across != 0};
}

/* Lane l of warp w has rows 16 w + l / 4 and 8 more, and columns 8 j + l % 4 * 2 and the next. */
static void multiply(emu_thread *t, const emu_product_call *p) {
    const unsigned lane = t->index % 32, row = t->index / 32 % 4 * 16 + lane / 4;
    float a[2][K], *sums = t->sums_before;
    for (unsigned half = 0; half < 2; ++half) {
        for (unsigned k = 0; k < K; ++k) a[half][k] = element(16 * p->a + (row + 8 * half) * 128 + 2 * k, p->is_f16);
    }
    for (unsigned i = 0; i < COLUMNS / 4; ++i) {
        const unsigned column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        const uint64_t box = 16 * p->b + column / 64 * BOX_BYTES + column % 64 * 2, of_row = 16 * p->b + column * 128;
        float b[K];
        for (unsigned k = 0; k < K; ++k) b[k] = element(p->across ? box + k * 128 : of_row + 2 * k, p->is_f16);
        for (unsigned half = 0; half < 2; ++half) {
            float *sum = &sums[i / 2 * 4 + 2 * half + i % 2];
            if (!p->add) *sum = 0;
            for (unsigned k = 0; k < K; ++k) *sum += a[half][k] * b[k];
        }
    }
}

void emu_products_commit(void) { ++emu.current->product_group; }

/* The four warps make a product together: where one thread has waited for it, all have. */
static void meet(emu_thread *t, const char *where) {
    emu_block *block = t->block;
    const unsigned group = t->index / EMU_GROUP, first = group * EMU_GROUP;
    if (first + EMU_GROUP > emu.launch->block) emu_fail(where, "bst_products_wait: there are no four warps here");
    if (++block->group_arrived[group] < EMU_GROUP) {
        emu_sleep(EMU_WAIT_GROUP, where);
        return;
    }
    block->group_arrived[group] = 0;
    for (unsigned i = first; i < first + EMU_GROUP; ++i) {
        if (i != t->index) emu_wake(&block->threads[i]);
    }
    emu_yield();
}

void emu_products_wait(unsigned newest, const char *where) {
    emu_thread *t = emu.current;
    unsigned made = 0;
    while (made < t->product_count && t->products[made].group + newest < t->product_group) {
        multiply(t, &t->products[made++]);
    }
    t->product_count -= made;
    memmove(t->products, t->products + made, t->product_count * sizeof *t->products);
    if (made > 0 && t->product_count == 0) memcpy(t->sums, t->sums_before, sizeof t->sums_before);
    meet(t, where);
}
