/* segment_attention.h - what segment_attention.c hands to the kernels of a device. */
#ifndef BST_SEGMENT_ATTENTION_H
#define BST_SEGMENT_ATTENTION_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "core/describe.h"
#include "ops/segment_attention/segment_attention_args.h"

/* q, dy [T, H, D], k, v [S, G, D], of any strides but their last; y [T, H, D], in a backward pass of any strides
 * likewise; cuts [2, N + 1], or without data where all segments are as long; lse [H, T] and gradients contiguous. What
 * the backward pass alone has is empty in a forward pass. There are queries, and heads of them; keys there may be none.
 */
typedef struct segment_attention_call {
    const char *op;
    bst_view q, k, v, cuts, y, lse; /* of a forward pass y and lse are outputs */
    bst_view dy, dq, dk, dv;
    int64_t queries, keys, heads, groups, dim, segments; /* T, S, H, G, D, N */
    int64_t window;                                      /* 0: none */
    float scale;
    bool causal;
} segment_attention_call;

/* On CPU: queries and keys whose scores are a tile, and columns that rows are padded to a multiple of. */
enum { SEGMENT_CPU_QUERIES = 64, SEGMENT_CPU_KEYS = 64, SEGMENT_CPU_COLUMNS = 32 };

typedef struct segment_attention_work {
    const segment_attention_call *call;
    int64_t strips, floats; /* work lies in so many strips, each with so many floats */
    float *work;
    float *delta; /* [H, T]: of each query dy . y; of a backward pass */
} segment_attention_work;

/* What a strip has of it: rows of a head, `pitch` apart, the columns of keys and values, and a tile twice. */
typedef struct segment_attention_tiles {
    int64_t pitch;
    float *q, *dy, *k, *v, *sums, *more; /* [QUERIES or KEYS, pitch] */
    float *k_columns, *v_columns;        /* [D, KEYS] */
    float *p, *dp;                       /* [QUERIES, KEYS] */
} segment_attention_tiles;

/* Shares out the floats behind `work`, or none where it is NULL; returns how many it takes. */
static inline int64_t bst__segment_attention_share_out(const segment_attention_call *c, float *work,
                                                       segment_attention_tiles *t) {
    const int64_t pitch = bst__divided_up(c->dim, SEGMENT_CPU_COLUMNS) * SEGMENT_CPU_COLUMNS;
    const int64_t queries = SEGMENT_CPU_QUERIES * pitch, keys = SEGMENT_CPU_KEYS * pitch;
    const int64_t both = queries > keys ? queries : keys, square = SEGMENT_CPU_QUERIES * SEGMENT_CPU_KEYS;
    const struct {
        float **place;
        int64_t floats;
    } parts[] = {{&t->q, queries}, {&t->dy, queries},     {&t->k, keys},         {&t->v, keys},   {&t->sums, both},
                 {&t->more, keys}, {&t->k_columns, keys}, {&t->v_columns, keys}, {&t->p, square}, {&t->dp, square}};
    int64_t taken = 0;
    t->pitch = pitch;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].place = work ? work + taken : NULL;
        taken += parts[i].floats;
    }
    return taken;
}

/* One query a row: q [B, H, D], k, v [B, G, S, D], of any strides but their last, bias [B, S] likewise, or without
 * data; y [B, H, D], contiguous. */
typedef struct token_attention_call {
    bst_view q, k, v, bias, y;
    int64_t rows, heads, groups, keys, dim;
    float scale;
    int64_t strips; /* on CPU: of work, D twice and S floats each */
    float *work;
} token_attention_call;

BST_CPU_DECLARE(bst__token_attention_cpu); /* over strips, between which rows' heads are shared out */

extern const bst_function bst__token_attention;
/* Of q [..., H, D] and k, which come first: whether heads are of some size, and those of q a multiple of those of k. */
bst_status bst__attention_heads(const char *op, const bst_view *v);

/* Over strips. */
BST_CPU_DECLARE(bst__segment_attention_forward_cpu);
BST_CPU_DECLARE(bst__segment_attention_queries_cpu); /* delta and dq */
BST_CPU_DECLARE(bst__segment_attention_keys_cpu);    /* dk and dv, by delta */

bst_status bst__segment_attention_forward_cuda(const bst_exec *exec, const segment_attention_call *call);
bst_status bst__segment_attention_backward_cuda(const bst_exec *exec, const segment_attention_call *call);

#endif
