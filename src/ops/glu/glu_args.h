/* glu_args.h - the arguments of the kernels of gated units, as host and device see them. */
#ifndef BST_GLU_ARGS_H
#define BST_GLU_ARGS_H

#include "row_map.h"

/* The tensors: gate and up are the API's a and b. Interleaved they are one, in the place of the gate. */
#define GLU_GATE    0
#define GLU_UP      1
#define GLU_Y       2
#define GLU_DY      3
#define GLU_DGATE   4
#define GLU_DUP     5
#define GLU_TENSORS 6

typedef struct glu_args {
    void *at[GLU_TENSORS]; /* NULL: not wanted, or of the backward pass alone */
    bst_row_map map[GLU_TENSORS];
    int64_t count; /* elements of y */
    float alpha, limit;
} glu_args;

static_assert(sizeof(glu_args) == 208, "host and device must agree");

#endif
