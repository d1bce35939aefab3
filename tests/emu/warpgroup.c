/* warpgroup.c - wgmma.mma_async.m64nNk16 ("PTX ISA: Asynchronous Warpgroup Level Matrix Instructions"): each thread's
 * part of it, made when it is waited for. Until then its sums are garbage, and what it reads is read then. */
#include <string.h>

#include "device/emu_types.h"
#include "emu.h"

enum { K = 16, ROW = 128 }; /* bytes of a box's row, of 64 columns */

static const uint64_t address_bits = (UINT64_C(1) << EMU_ADDRESS_BITS) - 1;

/* 128 bytes are swizzled: the number of eight rows of a tile, whose address 1024 divides, goes into pieces of 16. */
static float element(uint64_t address, bool is_f16) {
    uint16_t bits;
    memcpy(&bits, (const void *)(uintptr_t)(address ^ (address >> 7 & 7) << 4), sizeof bits);
    return is_f16 ? emu_f32_from_f16(bits) : emu_f32_from_bf16(bits);
}

static void need(uint64_t begin, unsigned bytes, const char *what, const char *where) {
    const void *p = (const void *)(uintptr_t)(begin & ~(uint64_t)127);
    if (!emu_is_shared(emu.current->block, p, bytes)) {
        emu_fail(where, "a product of 64 rows: %s is not in shared memory of this block", what);
    }
}

/* The place of these sums, which are garbage from here on. */
static unsigned place_of(emu_thread *t, float *sums, unsigned columns, const char *where) {
    unsigned place = 0;
    while (place < EMU_MOST_SUMS && !(t->sums[place].products && t->sums[place].at == sums)) ++place;
    if (place < EMU_MOST_SUMS && t->sums[place].columns == columns) return place;
    if (place < EMU_MOST_SUMS) emu_fail(where, "a product of 64 rows: other sums are not waited for yet");
    for (place = 0; place < EMU_MOST_SUMS && t->sums[place].products;) ++place;
    if (place == EMU_MOST_SUMS) emu_fail(where, "a product of 64 rows: other sums are not waited for yet");
    emu_sums *own = &t->sums[place];
    own->at = sums, own->columns = columns;
    memcpy(own->before, sums, columns / 2 * sizeof *sums);
    emu_garbage(sums, columns / 2 * sizeof *sums);
    return place;
}

void emu_product(float *sums, int columns, uint64_t a, const unsigned *kept, uint64_t b, int add, int is_f16,
                 int across, const char *where) {
    emu_thread *t = emu.current;
    emu_need_hopper("a product of 64 rows", where);
    if (kept == NULL) need(16 * a, 64 * ROW, "a", where);
    const unsigned rows = across ? (unsigned)(b >> EMU_ADDRESS_BITS) : (unsigned)columns;
    need(16 * (b & address_bits), across ? (unsigned)columns / 64 * rows * ROW - (rows - K) * ROW : rows * ROW, "b",
         where);
    if (t->product_count == EMU_MOST_PRODUCTS) {
        emu_fail(where, "a product of 64 rows: %d of them that nobody has waited for", EMU_MOST_PRODUCTS);
    }
    const unsigned place = place_of(t, sums, (unsigned)columns, where);
    ++t->sums[place].products;
    t->products[t->product_count++] =
        (emu_product_call){a, b, kept, t->product_group, place, add != 0, is_f16 != 0, across != 0};
}

/* Lane l of warp w has rows 16 w + l / 4 and 8 more, and columns 8 j + l % 4 * 2 and the next. */
static unsigned row_of(const emu_thread *t) { return t->index / 32 % 4 * 16 + t->index % 32 / 4; }

/* The rows' sixteen numbers. Of those in registers other lanes of the four have most: they have arrived, too. */
static void first_factor(const emu_thread *t, const emu_product_call *p, unsigned at, float a[2][K]) {
    for (unsigned half = 0; half < 2; ++half) {
        for (unsigned k = 0; k < K; ++k) {
            if (p->kept == NULL) {
                a[half][k] = element(16 * p->a + (row_of(t) + 8 * half) * ROW + 2 * k, p->is_f16);
                continue;
            }
            const emu_thread *of = t - t->index % 4 + k % 8 / 2;
            const unsigned word = of->products[at].kept[k / 8 * 2 + half], bits = k % 2 ? word >> 16 : word & 0xffffu;
            a[half][k] = p->is_f16 ? emu_f32_from_f16(bits) : emu_f32_from_bf16(bits);
        }
    }
}

static void multiply(emu_thread *t, unsigned at) {
    const emu_product_call *p = &t->products[at];
    const uint64_t begin = 16 * (p->b & address_bits), box = (p->b >> EMU_ADDRESS_BITS) * ROW;
    float a[2][K], *sums = t->sums[p->sums].before;
    first_factor(t, p, at, a);
    for (unsigned i = 0; i < t->sums[p->sums].columns / 4; ++i) {
        const unsigned column = i / 2 * 8 + t->index % 4 * 2 + i % 2;
        float b[K];
        for (unsigned k = 0; k < K; ++k) {
            const uint64_t across = begin + column / 64 * box + k * ROW + column % 64 * 2;
            b[k] = element(p->across ? across : begin + column * ROW + 2 * k, p->is_f16);
        }
        for (unsigned half = 0; half < 2; ++half) {
            float *sum = &sums[i / 2 * 4 + 2 * half + i % 2];
            if (!p->add) *sum = 0;
            for (unsigned k = 0; k < K; ++k) *sum += a[half][k] * b[k];
        }
    }
}

/* "setmaxnreg": a group that wants more waits until the others of its block have given up as many, of those that the
 * block was launched with. */
void emu_registers(int count, const char *where) {
    enum { ALL = 65536 };
    emu_block *block = emu.current->block;
    const unsigned threads = emu.launch->block, groups = threads / EMU_GROUP, each = ALL / threads / 8 * 8;
    unsigned sum = 0;
    block->registers[emu.current->index / EMU_GROUP] = (unsigned)count;
    for (unsigned i = 0; i < groups; ++i) {
        if (!block->registers[i]) return;
        sum += block->registers[i];
    }
    if (sum > groups * each) {
        emu_fail(where,
                 "the block's threads have %u registers each, and its warp groups want %u together: they wait for "
                 "ever",
                 each, sum);
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

/* What this thread has waited for: made, sums and products. */
static void finish(emu_thread *t, unsigned newest) {
    unsigned made = 0;
    while (made < t->product_count && t->products[made].group + newest < t->product_group) multiply(t, made++);
    for (unsigned i = 0; i < made; ++i) {
        emu_sums *own = &t->sums[t->products[i].sums];
        if (--own->products == 0) memcpy(own->at, own->before, own->columns / 2 * sizeof *own->at);
    }
    t->made = made;
}

void emu_products_wait(unsigned newest, const char *where) {
    emu_thread *t = emu.current;
    meet(t, where); /* all have begun what they read of each other */
    finish(t, newest);
    meet(t, where);
    t->product_count -= t->made;
    memmove(t->products, t->products + t->made, t->product_count * sizeof *t->products);
}
