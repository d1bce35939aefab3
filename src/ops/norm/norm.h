/* norm.h - what the files of this room share: the places of the description's tensors and attributes, and the
 * kernels. */
#ifndef BST_NORM_H
#define BST_NORM_H

#include "core/cpu_kernel.h"
#include "core/describe.h"

/* Places of tensors: of both passes, of forward, of backward; and of attributes. */
enum { X, WEIGHT, BOTH, RESIDUAL = BOTH, BIAS, AFTER, SUM, Y, NEW_MEAN, NEW_RSTD };
enum { RSTD = BOTH, MEAN, DY, DSUM, DX, DWEIGHT, DBIAS };
enum { CASTING, KIND, EPS };

/* Both need at least one row; backward: at least one of dx, dweight and dbias. */
bst_run bst__norm_forward_cuda, bst__norm_backward_cuda;

typedef struct norm_cpu {
    const bst_view *v;
    const bst_attribute *attributes;
    int64_t chunks;         /* backward: of rows, each with its own partial sums */
    float *dweight, *dbias; /* [chunks, H]; NULL: not wanted */
    const float *partial;   /* for bst__norm_sums_cpu: one of these */
    const bst_view *total;  /* and where their sum goes */
} norm_cpu;

BST_CPU_DECLARE(bst__norm_forward_cpu);  /* a norm_cpu, over rows */
BST_CPU_DECLARE(bst__norm_backward_cpu); /* over chunks of rows */
BST_CPU_DECLARE(bst__norm_sums_cpu);     /* over columns: sums the partial rows */

#endif
