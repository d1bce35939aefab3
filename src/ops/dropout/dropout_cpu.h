/* dropout_cpu.h - what dropout.c hands to dropout_cpu.c. */
#ifndef BST_DROPOUT_CPU_H
#define BST_DROPOUT_CPU_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "ops/dropout/dropout_args.h"

/* A tensor's memory as rows. */
typedef struct dropout_matrix {
    void *data; /* NULL: no addend */
    bst_rows rows;
} dropout_matrix;

typedef struct dropout_cpu {
    bst_dtype dtype;
    int64_t columns;
    dropout_matrix of[DROPOUT_TENSORS];
    uint64_t key, offset;
    uint32_t threshold;
    float scale;
} dropout_cpu;

BST_CPU_DECLARE(bst__dropout_cpu); /* over elements */

#endif
