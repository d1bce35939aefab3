/* glu_cpu.h - what glu.c hands to glu_cpu.c. */
#ifndef BST_GLU_CPU_H
#define BST_GLU_CPU_H

#include "core/activation.h"
#include "core/cpu_kernel.h"
#include "ops/glu/glu_args.h"

/* A tensor's memory as rows. Tensors without gaps are one long row each. */
typedef struct glu_matrix {
    void *data; /* NULL: not wanted */
    bst_rows rows;
} glu_matrix;

typedef struct glu_cpu {
    bst_dtype dtype;
    bst_unit unit;
    int64_t columns;            /* of y's rows */
    glu_matrix of[GLU_TENSORS]; /* DY, DGATE and DUP: backward alone */
} glu_cpu;

BST_CPU_DECLARE(bst__glu_forward_cpu);  /* over elements of y */
BST_CPU_DECLARE(bst__glu_backward_cpu); /* likewise */

#endif
