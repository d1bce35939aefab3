/* dropout_args.h - the arguments of dropout's kernel, as host and device see them. */
#ifndef BST_DROPOUT_ARGS_H
#define BST_DROPOUT_ARGS_H

#include "row_map.h"

/* The tensors with rows. */
#define DROPOUT_X       0
#define DROPOUT_ADDEND  1
#define DROPOUT_Y       2
#define DROPOUT_TENSORS 3

/* Random bits of four elements come of one counter. */
#define DROPOUT_FOUR 4

typedef struct dropout_args {
    void *at[DROPOUT_TENSORS]; /* NULL: no addend */
    bst_row_map map[DROPOUT_TENSORS];
    const void *seed;
    int64_t count;      /* elements */
    uint32_t threshold; /* an element whose random bits are below it is lost */
    float scale;        /* of those that stay */
} dropout_args;

static_assert(sizeof(dropout_args) == 120, "host and device must agree");

#endif
