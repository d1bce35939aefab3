/* philox.h - random numbers as a function of a key and a counter: the same text for CPU and CUDA. Kernels include it
 * after ptx.cuh. */
#ifndef BST_PHILOX_H
#define BST_PHILOX_H

#ifndef BST_DEVICE
#include "core/cpu_kernel.h"
#endif

/* Philox 4x32, of the seven rounds that its authors found to pass all tests (Salmon et al., "Parallel Random Numbers:
 * As Easy as 1, 2, 3", 2011): 128 bits of a key of 64 and the counter x0 to x3, which they take the place of. */
#define BST_PHILOX_ROUNDS(key, x0, x1, x2, x3)                                         \
    uint32_t k0 = (uint32_t)(key), k1 = (uint32_t)((key) >> 32);                       \
    for (int round = 0; round < 7; round++) {                                          \
        const uint64_t a = (uint64_t)0xd2511f53u * x0, b = (uint64_t)0xcd9e8d57u * x2; \
        x0 = (uint32_t)(b >> 32) ^ x1 ^ k0;                                            \
        x1 = (uint32_t)b;                                                              \
        x2 = (uint32_t)(a >> 32) ^ x3 ^ k1;                                            \
        x3 = (uint32_t)a;                                                              \
        k0 += 0x9e3779b9u;                                                             \
        k1 += 0xbb67ae85u;                                                             \
    }

BST_INLINE void bst_philox(uint32_t out[4], uint64_t key, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    BST_PHILOX_ROUNDS(key, x0, x1, x2, x3)
    out[0] = x0, out[1] = x1, out[2] = x2, out[3] = x3;
}

#ifndef BST_DEVICE
/* By value, for a loop that the compiler is to make vectors of: an array keeps it from that. (NVRTC takes more
 * registers for this one.) */
typedef struct bst_words {
    uint32_t a, b, c, d;
} bst_words;

static inline bst_words bst_philox_words(uint64_t key, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    BST_PHILOX_ROUNDS(key, x0, x1, x2, x3)
    return (bst_words){x0, x1, x2, x3};
}
#endif

#endif
