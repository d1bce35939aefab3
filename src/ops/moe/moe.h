/* moe.h - what the files of this room share: the places of arguments, and what moe.c calls for views and attributes
 * that it has checked and that are not empty: the launches of moe_cuda.c, the CPU's kernels of moe_cpu.c. */
#ifndef BST_MOE_H
#define BST_MOE_H

#include "core/cpu_kernel.h"
#include "core/describe.h"
#include "ops/glu/glu.h"
#include "ops/moe/moe_args.h"

enum { SORT_INDICES, SORT_ORDER, SORT_POSITION, SORT_ENDS };
enum { GATHER_X, GATHER_POSITION, GATHER_ROWS };
enum { TURN_X, TURN_Y };
enum { GLU_H, GLU_ENDS, GLU_BIAS, GLU_BOTH, GLU_Y = GLU_BOTH };
enum { GLU_DY = GLU_BOTH, GLU_ORDER, GLU_WEIGHTS, GLU_DOTS, GLU_WY, GLU_DH, GLU_DWEIGHTS, GLU_DBIAS };
enum { SUM_Y, SUM_POSITION, SUM_WEIGHTS, SUM_BIAS, SUM_INDICES, SUM_OUT };
enum { BACK_DOUT, BACK_ORDER, BACK_ENDS, BACK_WEIGHTS, BACK_BIAS, BACK_ROWS, BACK_DOTS, BACK_DBIAS };

/* The attribute of the sort, and that of the transposition. Those of the gated unit are glu's. */
enum { EXPERTS };
enum { TYPE_OF_Y };

bst_run bst__moe_sort_cuda, bst__moe_gather_cuda, bst__moe_transpose_cuda, bst__moe_glu_forward_cuda,
    bst__moe_glu_backward_cuda, bst__moe_combine_forward_cuda, bst__moe_combine_backward_cuda;

extern const bst_function bst__moe_linear;

/* Checks that several functions make. Pairs and rows are counted in 32 bits; ends: on CPU they must not fall, and the
 * last is the last row's. */
bst_status bst__moe_need_countable(const char *op, const char *name, const char *what, int64_t count);
bst_status bst__moe_need_experts(const char *op, int64_t experts);
bst_status bst__moe_check_ends(const char *op, const bst_view *ends, int64_t rows);

/* Workspace for the partial sums of `chunk` rows each; NULL where no gradient of biases is wanted. */
static inline bst_status bst__moe_partial_sums(const bst_exec *exec, const char *op, const bst_view *dbias,
                                               int64_t rows, int64_t chunk, void **out) {
    *out = NULL;
    if (!dbias->data) return BST_OK;
    int64_t slots = (rows + chunk - 1) / chunk + dbias->size[0];
    return bst__allocate(exec, op, dbias->device, (size_t)(slots * dbias->size[1]) * sizeof(float), out);
}

/* Rows that add up to one partial sum of the biases' gradients on CPU: a fixed number, so that the order of a sum does
 * not depend on the number of threads. */
enum { MOE_CHUNK = 32 };

/* A call on CPU. */
typedef struct moe_cpu {
    const bst_view *v;
    bst_unit unit;
    /* Of what goes over sorted rows, chunk by chunk: */
    const bst_view *ends, *dbias;
    int64_t rows, columns;
    float *partial; /* [chunks + experts, columns]: that of chunk c and expert e is row c + e; NULL: not wanted */
} moe_cpu;

BST_CPU_DECLARE(bst__moe_gather_cpu);           /* over tokens */
BST_CPU_DECLARE(bst__moe_transpose_cpu);        /* over rows of y */
BST_CPU_DECLARE(bst__moe_glu_forward_cpu);      /* over rows */
BST_CPU_DECLARE(bst__moe_glu_backward_cpu);     /* over chunks */
BST_CPU_DECLARE(bst__moe_combine_forward_cpu);  /* over tokens */
BST_CPU_DECLARE(bst__moe_combine_backward_cpu); /* over chunks */
BST_CPU_DECLARE(bst__moe_bias_sum_cpu);         /* over experts */

#endif
