/* glu_cpu.h - what glu.c hands to glu_cpu.c. */
#ifndef BST_GLU_CPU_H
#define BST_GLU_CPU_H

#include "core/cpu_kernel.h"

/* A tensor's memory as rows. Tensors without gaps are one long row each. */
typedef struct glu_matrix {
    void *data; /* NULL: not wanted */
    bst_rows rows;
} glu_matrix;

typedef struct glu_cpu {
    bst_dtype dtype;
    int activation;
    glu_matrix gate, up, y;
    glu_matrix dy, dgate, dup; /* backward alone */
} glu_cpu;

BST_CPU_DECLARE(bst__glu_forward_cpu);  /* over elements */
BST_CPU_DECLARE(bst__glu_backward_cpu); /* over elements */

#endif
