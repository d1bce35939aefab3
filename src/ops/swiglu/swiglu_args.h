/* swiglu_args.h - the arguments of the SwiGLU kernels, as host and device see them. */
#ifndef BST_SWIGLU_ARGS_H
#define BST_SWIGLU_ARGS_H

#include "row_map.h"

/* gate is the API's a, up its b. */
typedef struct swiglu_forward_args {
    const void *gate, *up;
    void *y;
    int64_t count; /* elements of each */
    bst_row_map gate_map, up_map;
} swiglu_forward_args;

typedef struct swiglu_backward_args {
    const void *dy, *gate, *up;
    void *dgate, *dup, *y; /* NULL: not wanted */
    int64_t count;
    bst_row_map dy_map, gate_map, up_map, dgate_map, dup_map, y_map;
} swiglu_backward_args;

static_assert(sizeof(swiglu_forward_args) == 80, "host and device must agree");
static_assert(sizeof(swiglu_backward_args) == 200, "host and device must agree");

#endif
