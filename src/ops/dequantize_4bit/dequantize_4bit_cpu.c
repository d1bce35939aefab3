/* dequantize_4bit_cpu.c - 4-bit weights on CPU: a block's sixteen values, rounded, then a look-up an element. */
#include "ops/dequantize_4bit/dequantize_4bit_cpu.h"

enum { CODES = 16 };

/* Volatile: the compiler would make one operation, of one rounding, of product and sum. */
static float scale_of(const dequantize_4bit_weight *a, int64_t block) {
    if (!a->nested_code) return ((const float *)a->absmax)[block];
    const float code = a->nested_code[((const uint8_t *)a->absmax)[block]];
    volatile float product = code * a->nested_absmax[block / a->nested_blocksize];
    return product + *a->offset;
}

void BST_CPU(bst__dequantize_4bit_cpu)(void *context, int64_t begin, int64_t end) {
    const dequantize_4bit_weight *a = context;
    for (int64_t block = begin; block < end; block++) {
        float values[CODES], scale = scale_of(a, block);
        uint16_t halves[CODES];
        for (int i = 0; i < CODES; i++) values[i] = a->code[i] * scale;
        if (a->dtype != BST_F32) bst_store(halves, values, a->dtype, CODES);
        int64_t first = block * a->blocksize, last = first + a->blocksize;
        if (last > a->count) last = a->count;
        const uint8_t *packed = a->packed + first / 2; /* a block begins with a byte */
        float *singles = a->weight;
        uint16_t *out = a->weight;
        for (int64_t e = first; e < last; e++) {
            unsigned at = packed[(e - first) / 2];
            at = e % 2 ? at & 15u : at >> 4;
            if (a->dtype == BST_F32)
                singles[e] = values[at];
            else
                out[e] = halves[at];
        }
    }
}
