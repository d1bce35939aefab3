/* column_sums_args.h - the argument of column_sums.cu, and its launch, as host and device see them. */
#ifndef BST_COLUMN_SUMS_ARGS_H
#define BST_COLUMN_SUMS_ARGS_H

#ifndef BST_DEVICE
#include "core/core.h"
#endif

typedef struct bst_column_sums_args {
    const float *partial;
    void *out[2]; /* of the first SPLIT columns, and of the rest; NULL: not wanted */
    int64_t parts;
} bst_column_sums_args;

static_assert(sizeof(bst_column_sums_args) == 32, "host and device must agree");

#ifndef BST_DEVICE
/* Queues the sums over rows of partial [parts, columns], a workspace of float32, that the kernel before this one writes
 * (and lets this one start, bst_let_next_start): those of the first `split` columns go to out[0], the others to out[1],
 * rounded to `dtype`. Either may be NULL. */
bst_status bst__column_sums(const bst_exec *exec, const char *op, int device, const float *partial, int64_t parts,
                            int64_t columns, int64_t split, bst_dtype dtype, void *const out[2]);
#endif

#endif
