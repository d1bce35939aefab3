/* dequantize_4bit_cpu.h - what dequantize_4bit.c hands to dequantize_4bit_cpu.c. */
#ifndef BST_DEQUANTIZE_4BIT_CPU_H
#define BST_DEQUANTIZE_4BIT_CPU_H

#include "core/cpu_kernel.h"

typedef struct dequantize_4bit_cpu {
    const uint8_t *packed;
    const void *absmax; /* float32, or bytes where nested_code is there */
    const float *code, *nested_code, *nested_absmax, *offset;
    void *weight;
    bst_dtype dtype;
    int64_t count, blocksize, nested_blocksize;
} dequantize_4bit_cpu;

BST_CPU_DECLARE(bst__dequantize_4bit_cpu); /* over blocks */

#endif
