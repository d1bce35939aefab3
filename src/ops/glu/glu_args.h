/* glu_args.h - the arguments of the kernels of gated units, as host and device see them. */
#ifndef BST_GLU_ARGS_H
#define BST_GLU_ARGS_H

#include "row_map.h"

/* gate is the API's a, up its b. */
typedef struct glu_forward_args {
    const void *gate, *up;
    void *y;
    int64_t count; /* elements of each */
    bst_row_map gate_map, up_map;
} glu_forward_args;

typedef struct glu_backward_args {
    const void *dy, *gate, *up;
    void *dgate, *dup, *y; /* NULL: not wanted */
    int64_t count;
    bst_row_map dy_map, gate_map, up_map, dgate_map, dup_map, y_map;
} glu_backward_args;

static_assert(sizeof(glu_forward_args) == 80, "host and device must agree");
static_assert(sizeof(glu_backward_args) == 200, "host and device must agree");

#endif
