/* pack.cuh - between memory and float registers: vectors of n elements of a type, n * size at most 16 bytes.
 *
 * `type` is a code of dtype.h and `n` a power of two; both are constants at every call, so that each branch below folds
 * away. Kernels keep rows packed as they were read (bst_raw) and unpack a vector at a time: half the registers. */
#ifndef BST_PACK_CUH
#define BST_PACK_CUH

#include "ptx.cuh"

#include "dtype.h"

BST_DEVICE int bst_type_size(int type) { return type == BST_F32_CODE ? 4 : 2; }

BST_DEVICE const void *bst_at(const void *base, int64_t index, int type) {
    return (const char *)base + index * bst_type_size(type);
}

BST_DEVICE void *bst_at_out(void *base, int64_t index, int type) { return (char *)base + index * bst_type_size(type); }

BST_DEVICE float bst_half_to_float(uint32_t low16, int type) {
    return type == BST_BF16_CODE ? bst_f32_from_bf16(low16) : bst_f32_from_f16(low16);
}

BST_DEVICE uint32_t bst_half_pair(float low, float high, int type) {
    return type == BST_BF16_CODE ? bst_bf16x2(low, high) : bst_f16x2(low, high);
}

BST_DEVICE void bst_unpack(float *out, bst_raw raw, int type, int n) {
    BST_EACH(i, n) {
        if (type == BST_F32_CODE)
            out[i] = bst_from_bits(raw.w[i & 3]);
        else
            out[i] = bst_half_to_float(i & 1 ? raw.w[i / 2] >> 16 : raw.w[i / 2] & 0xffffu, type);
    }
}

BST_DEVICE bst_raw bst_pack(const float *in, int type, int n) {
    bst_raw raw = {{0, 0, 0, 0}};
    BST_EACH(i, n) {
        if (type == BST_F32_CODE)
            raw.w[i & 3] = bst_bits(in[i]);
        else if (!(i & 1))
            raw.w[i / 2] = bst_half_pair(in[i], n > 1 ? in[i + (n > 1)] : 0.0f, type);
    }
    return raw;
}

/* n values rounded through `type`, two at a time. */
BST_DEVICE void bst_round_all(float *v, int type, int n) {
    if (type == BST_F32_CODE) return;
    bst_raw raw = bst_pack(v, type, n);
    bst_unpack(v, raw, type, n);
}

/* n consecutive elements from memory, and to it. */
BST_DEVICE bst_raw bst_raw_at(const void *base, int64_t index, int type, int n) {
    return bst_read(bst_at(base, index, type), n * bst_type_size(type));
}

BST_DEVICE void bst_load(float *out, const void *base, int64_t index, int type, int n) {
    bst_unpack(out, bst_raw_at(base, index, type, n), type, n);
}

BST_DEVICE void bst_store(void *base, int64_t index, const float *in, int type, int n) {
    bst_write(bst_at_out(base, index, type), bst_pack(in, type, n), n * bst_type_size(type));
}

/* The same for data that is touched once: it does not displace what the caches hold. Not always the faster way: on an
 * H200 at 16384 rows, plain accesses are better for rms_norm's forward (67.0 us, 69.2 with both of these), rope (83.7,
 * 87.6), qk_norm_rope's forward (84.0, 90.2) and the reads of glu (747, 761). */
BST_DEVICE bst_raw bst_raw_once(const void *base, int64_t index, int type, int n) {
    return bst_read_once(bst_at(base, index, type), n * bst_type_size(type));
}

BST_DEVICE void bst_store_once(void *base, int64_t index, const float *in, int type, int n) {
    bst_write_once(bst_at_out(base, index, type), bst_pack(in, type, n), n * bst_type_size(type));
}

#endif
