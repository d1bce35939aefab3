/* linear_cross_entropy.h - how many rows of logits exist at a time. */
#ifndef BST_LINEAR_CROSS_ENTROPY_H
#define BST_LINEAR_CROSS_ENTROPY_H

#include "core/core.h"

/* Chunks up to which dweight is rounded to its type at each: eight roundings of partial sums add less to its error than
 * the rounding of the logits does. Beyond, it is summed in float32. */
enum { LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS = 8 };

/* What the choice depends on. */
typedef struct linear_cross_entropy_chunks {
    int64_t rows, width; /* T, at least 1; H */
    int64_t row_bytes;   /* of a row of logits in memory */
    int64_t budget;      /* bytes of workspace; 0: the default */
    bool rounded;        /* dweight is wanted, and in 16 bits */
    int processors;      /* multiprocessors; 0 on CPU */
} linear_cross_entropy_chunks;

/* Rows of a chunk; a pure function. */
int64_t bst__linear_cross_entropy_chunk_rows(const linear_cross_entropy_chunks *c);

#endif
