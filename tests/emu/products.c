/* products.c - mma.m16n8k16 of a warp: D += A B, of 16 x 16 and 16 x 8 elements of 16 bits, sums in float32 in the
 * order of k ("PTX ISA: Matrix Fragments for mma.m16n8k16 with floating point type").
 *
 * Here and not in the kernel's text: that is compiled for speed of compilation, and each lane would convert again what
 * all lanes share. */
#include "device/emu_types.h"
#include "emu.h"

static float element(unsigned word, int upper, bool is_f16) {
    const unsigned bits = upper ? word >> 16 : word & 0xffffu;
    return is_f16 ? emu_f32_from_f16(bits) : emu_f32_from_bf16(bits);
}

void emu_convert_factors(emu_warp *warp, const emu_thread lanes[32]) {
    for (int lane = 0; lane < 32; ++lane) {
        const unsigned *a = lanes[lane].words.w, *b = a + 4;
        const bool is_f16 = lanes[lane].operand;
        for (int i = 0; i < 4; ++i) { /* the first or second of a word, of the left or right half */
            const int k = i / 2 * 8 + lane % 4 * 2 + i % 2;
            warp->a[lane / 4][k] = element(a[i / 2 * 2], i % 2, is_f16);
            warp->a[lane / 4 + 8][k] = element(a[i / 2 * 2 + 1], i % 2, is_f16);
            warp->b[lane / 4][k] = element(b[i / 2], i % 2, is_f16);
        }
    }
}

void emu_multiply_add(float d[4], const emu_words *factors, int is_f16, const char *where) {
    emu.current->words = *factors;
    emu_meet_warp(EMU_MULTIPLY_ADD, 0, is_f16, where);
    const emu_warp *warp = &emu.current->block->warps[emu.current->index / 32];
    const int lane = (int)(emu.current->index % 32);
    for (int j = 0; j < 4; ++j) {
        const float *row = warp->a[lane / 4 + j / 2 * 8], *column = warp->b[lane % 4 * 2 + j % 2];
        for (int k = 0; k < 16; ++k) d[j] += row[k] * column[k];
    }
}
