/* heads.h - what operators on attention heads share: q and k [B, heads, S, D] with any strides but a contiguous last
 * dimension, and rotary tables [B or 1, S, R]. */
#ifndef BST_HEADS_H
#define BST_HEADS_H

#include "core/core.h"

/* The widest head: a block of 1024 threads then has one for each pair. */
enum { BST_MOST_HEAD_DIM = 2048 };

/* Reads a tensor of heads. */
bst_status bst__heads(const char *op, const char *name, const DLTensor *tensor, bst_view *out);
/* The same for one that has `in`'s shape and device. */
bst_status bst__heads_like(const char *op, const char *name, const DLTensor *tensor, const bst_view *in,
                           const char *in_name, bst_view *out);
/* Reads k, or its gradient, which goes with q: NULL leaves `out` empty, for q may be alone. */
bst_status bst__heads_beside(const char *op, const char *name, const DLTensor *tensor, const bst_view *q,
                             const char *q_name, bst_view *out);
/* Reads a table of cosines or sines for q. A table that all batch rows share gets the batch stride 0. */
bst_status bst__rotary_table(const char *op, const char *name, const DLTensor *tensor, const bst_view *q,
                             const char *q_name, bst_view *out);

/* The largest power of two, at most `most` elements, that divides the address and every stride in use. */
int64_t bst__aligned(const bst_view *v, int64_t most);
/* Elements of an access, at most `most`, such that pieces of that size (rotary.cuh) cover a head. */
int64_t bst__rotary_vector(int64_t dim, int64_t rotary, int64_t most);
/* Pieces that a thread then takes, 1 or 2, and the threads of a head. */
int64_t bst__rotary_pieces(int64_t dim, int64_t rotary, int64_t vec, bool interleaved);
int64_t bst__rotary_lanes(int64_t dim, int64_t rotary, int64_t vec, int64_t pieces);

#endif
