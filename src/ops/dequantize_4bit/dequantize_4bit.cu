/* dequantize_4bit.cu - weight[e] = code[q(e)] * absmax[e / blocksize], rounded once, of one weight or several; q(e) is
 * the upper half of byte e / 2 where e is even, else the lower.
 *
 * Macros: TABLE weights at most; TYPE of them (a code of dtype.h); VEC elements of an access; THREADS of a block; EACH
 * accesses of a thread; SHIFT: blocksize is 1 << SHIFT, no less than VEC; NESTED: absmax is a byte, and stands for
 * nested_code[absmax] * nested_absmax[block >> NESTED_SHIFT], rounded, plus offset.
 *
 * Reads packed and absmax once each, writes weight. Bytes: 1/2 + size an element, and 1 or 4 a block (2.5 in bf16; with
 * blocks of 64 and nested absmax 2.52). The weight is left in the caches: a product reads it next. Measured on an H200,
 * bf16, nested: 35.1 us at 12288 x 4096, 3.6 TB/s; filling that weight with zeros takes 30.5. Not nested: 33.1. */
#include "pack.cuh"

#include "dequantize_4bit_args.h"

enum { CODES = 16 };

DEQUANTIZE_4BIT_ARGS(dequantize_4bit_args, TABLE);

BST_DEVICE float one_float(const void *base, int64_t index) {
    float v;
    bst_load(&v, base, index, BST_F32_CODE, 1);
    return v;
}

BST_DEVICE float scale_of(const dequantize_4bit_item *w, int64_t block) {
    if (!NESTED) return one_float(w->absmax, block);
    const float code = one_float(w->nested_code, ((const uint8_t *)w->absmax)[block]);
    return bst_product(code, one_float(w->nested_absmax, block >> NESTED_SHIFT)) + one_float(w->offset, 0);
}

/* The VEC / 2 bytes from element e on, in the order of memory, lowest first. */
BST_DEVICE uint32_t bytes_at(const dequantize_4bit_item *w, int64_t e) {
    const uint8_t *packed = (const uint8_t *)w->packed + e / 2;
    if (VEC >= 4) return bst_read_once(packed, VEC / 2).w[0];
    return *packed;
}

BST_KERNEL(dequantize_4bit, dequantize_4bit_args, THREADS, 1) {
    BST_SHARED(float, code, CODES);
    const dequantize_4bit_item *w = &a.item[0];
    BST_UNROLL
    for (int i = 1; i < TABLE; i++)
        if ((int64_t)bst_block() >= a.item[i].first) w = &a.item[i];
    /* Blocks of a grid, in 32 bits: in 64 it is 43 to 48 registers in place of 32, and 38.4 us in place of 35.1. */
    const uint32_t block = bst_block() - (uint32_t)w->first;
    const int64_t first = ((int64_t)block * EACH * THREADS + bst_thread()) * VEC;
    bst_wait_for_previous();
    if (bst_thread() < CODES) code[bst_thread()] = one_float(w->code, bst_thread());
    uint32_t bytes[EACH];
    float scale[EACH];
    /* What lies in front of the last vector has whole vectors; that one may be a part. */
    BST_EACH(i, EACH) {
        const int64_t e = first + (int64_t)i * THREADS * VEC;
        if (e + VEC <= w->count) bytes[i] = bytes_at(w, e);
        if (e < w->count) scale[i] = scale_of(w, e >> SHIFT);
    }
    bst_sync();
    BST_EACH(i, EACH) {
        const int64_t e = first + (int64_t)i * THREADS * VEC;
        if (e + VEC <= w->count) {
            float v[VEC];
            BST_EACH(j, VEC) {
                const int half = VEC == 1 ? 1 - (int)(e & 1) : 1 - (j & 1);
                v[j] = code[bytes[i] >> (j / 2 * 8 + half * 4) & 15u] * scale[i];
            }
            bst_store(w->weight, e, v, TYPE, VEC);
        } else if (VEC > 1 && e < w->count) {
            BST_ROLLED
            for (int64_t left = e; left < w->count; left++) {
                const uint32_t byte = ((const uint8_t *)w->packed)[left / 2];
                const float v = code[left & 1 ? byte & 15u : byte >> 4] * scale[i];
                bst_store(w->weight, left, &v, TYPE, 1);
            }
        }
    }
}
