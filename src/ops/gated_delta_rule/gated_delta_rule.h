/* gated_delta_rule.h - what gated_delta_rule.c hands to the kernels of a device. */
#ifndef BST_GATED_DELTA_RULE_H
#define BST_GATED_DELTA_RULE_H

#include <assert.h>

#include "core/cpu_kernel.h"
#include "ops/gated_delta_rule/gated_delta_rule_args.h"

/* q, k [B, T, key heads, K]; v, y [B, T, heads, V]; g, beta [B, T, heads]; states [B, heads, K, V] float32. What the
 * backward pass alone has is empty in a forward pass, and y and final in a backward one. */
typedef struct delta_call {
    const char *op;
    bst_view q, k, v, g, beta, skip, initial, y, final;
    bst_view dy, dfinal, dq, dk, dv, dg, dbeta, dskip, dinitial;
    int64_t batches, tokens, heads, key_heads, key, value, chunks;
    const int32_t *boundaries; /* of the sequences that the tokens of the one batch are, or NULL */
    int64_t sequences;         /* so many; or the batches */
    float scale, eps;
    bool additive, normalize;
    int64_t strips, floats; /* on CPU: heads of keys lie in so many strips, each with so many floats of workspace */
    float *work, *skipped;  /* [sequences, heads], what each has of dskip */
} delta_call;

/* Over strips. */
BST_CPU_DECLARE(bst__delta_forward_cpu);
BST_CPU_DECLARE(bst__delta_backward_cpu);
BST_CPU_DECLARE(bst__delta_skip_cpu); /* dskip, at the end */

/* What a strip has of it. Sizes: C a chunk, T all tokens, K and V of heads. */
typedef struct delta_workspace {
    float *k, *q, *k_columns;    /* [C, K], [C, K], [K, C] */
    float *a, *p;                /* [C, C] */
    float *r, *v, *left, *state; /* [C, V] three times, [K, V] */
    float *dy, *dv, *dx, *read;  /* [C, V] */
    float *da, *dp;              /* [C, C] */
    float *dstate, *columns;     /* [K, V], [V, C or K] */
    float *dq_here, *dk_here;    /* [C, K] */
    float *dq, *dk, *states;     /* [T, K], [T, K], [chunks, K, V] */
    double sum[DELTA_CHUNK];     /* of g, whose differences count */
    float rise[DELTA_CHUNK], fall[DELTA_CHUNK], beta[DELTA_CHUNK];
} delta_workspace;

/* Shares out the floats behind `work`, or none where it is NULL; returns how many it takes. */
static inline int64_t bst__delta_share_out(const delta_call *c, bool backward, float *work, delta_workspace *w) {
    const int64_t keys = DELTA_CHUNK * c->key, values = DELTA_CHUNK * c->value, square = DELTA_CHUNK * DELTA_CHUNK;
    const int64_t all_keys = c->tokens * c->key, state = c->key * c->value;
    const struct {
        float **place;
        int64_t floats;
    } parts[] = {{&w->k, keys},
                 {&w->q, keys},
                 {&w->k_columns, keys},
                 {&w->a, square},
                 {&w->p, square},
                 {&w->r, values},
                 {&w->v, values},
                 {&w->left, values},
                 {&w->state, state},
                 /* of a backward pass alone */
                 {&w->dy, values},
                 {&w->dv, values},
                 {&w->dx, values},
                 {&w->read, values},
                 {&w->da, square},
                 {&w->dp, square},
                 {&w->dstate, state},
                 {&w->columns, values > state ? values : state},
                 {&w->dq_here, keys},
                 {&w->dk_here, keys},
                 {&w->dq, all_keys},
                 {&w->dk, all_keys},
                 {&w->states, c->chunks * state}};
    const int of_both = 9, all = (int)(sizeof parts / sizeof *parts);
    int64_t taken = 0;
    for (int i = 0; i < (backward ? all : of_both); i++) {
        *parts[i].place = work ? work + taken : NULL;
        taken += parts[i].floats;
    }
    return taken;
}

bst_status bst__delta_forward_cuda(const bst_exec *exec, const delta_call *call);
bst_status bst__delta_backward_cuda(const bst_exec *exec, const delta_call *call);

#endif
