/* swiglu_cpu.h - what swiglu.c hands to swiglu_cpu.c. */
#ifndef BST_SWIGLU_CPU_H
#define BST_SWIGLU_CPU_H

#include "core/cpu_kernel.h"

/* A tensor's memory as rows. Tensors without gaps are one long row each. */
typedef struct swiglu_matrix {
    void *data; /* NULL: not wanted */
    bst_rows rows;
} swiglu_matrix;

typedef struct swiglu_cpu {
    bst_dtype dtype;
    swiglu_matrix gate, up, y;
    swiglu_matrix dy, dgate, dup; /* backward alone */
} swiglu_cpu;

BST_CPU_DECLARE(bst__swiglu_forward_cpu);  /* over elements */
BST_CPU_DECLARE(bst__swiglu_backward_cpu); /* over elements */

#endif
