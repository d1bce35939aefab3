/* linear_divergence.h - what the parts of linear_divergence hand to each other: rows of logits, a chunk at a time. */
#ifndef BST_LINEAR_DIVERGENCE_H
#define BST_LINEAR_DIVERGENCE_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "ops/linear_divergence/linear_divergence_args.h"

/* One chunk of rows. Its pointers are at the chunk's first row. */
typedef struct linear_divergence_rows {
    DLDevice device;
    bst_dtype teacher_type, dtype; /* of the teacher's logits and of dlogits; the student's are float32 */
    int64_t rows, vocabulary;
    /* The members that the kernels get as they are: pointers, strides in elements, what makes z, beta. dlogits NULL: no
     * gradient. */
    linear_divergence_args args;
    int kind; /* of linear_divergence_math.h */
    bool student_capped, teacher_capped;
    bool saved; /* the sums are read: this is a backward pass */
    bool in_place;
    bool some_left_out; /* the teacher's logits are of some classes: DIVERGENCE_LEFT_OUT stands for others */
} linear_divergence_rows;

/* Rows of classes left out, but for some. */
typedef struct linear_divergence_spread {
    DLDevice device;
    bst_dtype dtype; /* of the numbers */
    int64_t rows;
    linear_divergence_spread_args args;
} linear_divergence_spread;

bst_status bst__linear_divergence_rows_cuda(const bst_exec *exec, const char *op, const linear_divergence_rows *call);
bst_status bst__linear_divergence_spread_cuda(const bst_exec *exec, const char *op,
                                              const linear_divergence_spread *call);
BST_CPU_DECLARE(bst__linear_divergence_rows_cpu);   /* over rows; the context is a linear_divergence_rows */
BST_CPU_DECLARE(bst__linear_divergence_spread_cpu); /* over rows; the context is a linear_divergence_spread */

#endif
