/* dequantize_4bit_cpu.h - a weight, all of it checked, as the kernels of both devices are given it. */
#ifndef BST_DEQUANTIZE_4BIT_CPU_H
#define BST_DEQUANTIZE_4BIT_CPU_H

#include "core/cpu_kernel.h"

typedef struct dequantize_4bit_weight {
    const uint8_t *packed;
    const void *absmax; /* float32, or bytes where nested_code is there */
    const float *code, *nested_code, *nested_absmax, *offset;
    void *weight;
    bst_dtype dtype;
    int64_t count, blocksize, nested_blocksize;
} dequantize_4bit_weight;

BST_CPU_DECLARE(bst__dequantize_4bit_cpu); /* of one weight, over its blocks */

#endif
