/* heads.h - what operators on attention heads share: q and k [B, heads, S, D] with any strides but a contiguous last
 * dimension, and rotary tables [B or 1, S, R]. */
#ifndef BST_HEADS_H
#define BST_HEADS_H

#include "core/core.h"

/* The widest head: a block of 1024 threads then has one for each pair. */
enum { BST_MOST_HEAD_DIM = 2048 };

/* What the tables of descriptions leave open: heads that a kernel serves, views[0], called q; and a table, called cos,
 * whose size R is even, at least 2 and no more than a head. */
bst_status bst__need_heads(const char *op, const bst_view *views);
bst_status bst__need_rotary(const char *op, const bst_view *heads, const bst_view *table);
/* What their symbols mean: B, S, D and R. */
extern const char *const bst__head_symbols[];

/* The largest power of two, at most `most` elements, that divides the address and every stride in use. */
int64_t bst__aligned(const bst_view *v, int64_t most);
/* Elements of an access, at most `most`, such that pieces of that size (rotary.cuh) cover a head. */
int64_t bst__rotary_vector(int64_t dim, int64_t rotary, int64_t most);
/* Pieces that a thread then takes, 1 or 2, and the threads of a head. */
int64_t bst__rotary_pieces(int64_t dim, int64_t rotary, int64_t vec, bool interleaved);
int64_t bst__rotary_lanes(int64_t dim, int64_t rotary, int64_t vec, int64_t pieces);

#endif
