/* cross_entropy_cpu.h - what cross_entropy.c hands to cross_entropy_cpu.c. */
#ifndef BST_CROSS_ENTROPY_CPU_H
#define BST_CROSS_ENTROPY_CPU_H

#include "core/cpu_kernel.h"
#include "ops/cross_entropy/cross_entropy.h"

typedef struct scale_cpu {
    bst_view tensor;
    float scale;
} scale_cpu;

BST_CPU_DECLARE(bst__cross_entropy_rows_cpu); /* over rows; the context is a bst_cross_entropy_rows_call */
BST_CPU_DECLARE(bst__scale_cpu);              /* over elements */

#endif
