/* attention.h - attention of the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_ATTENTION_H
#define BASTILE_ATTENTION_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attention within the segments that cuts makes of a batch's tokens. Query i of a segment, counted there, has of its
 * segment's keys j
 *   y_i = sum_j p_ij v_j,   p_ij = exp(s_ij - lse_i),   s_ij = scale q_i . k_j,   lse_i = ln sum_j exp(s_ij)
 * over all of them, or where causal says so over those with
 *   j <= place_i = i + (keys of the segment - its queries)
 * so that its last query sees all, and with as many of both each query what is not behind it; and with a window over
 * those with |j - place_i| < window alone. A query that sees no key has y = 0 and lse = +infinity, and no gradient goes
 * through it; a key that nobody sees has gradients of 0. All in float32, rounded once; the order of every sum is fixed.
 * What is not finite may reach all of its segment, seen or not, and on CUDA those before it, whose last tiles it is
 * multiplied by 0 in.
 * Vaswani et al., "Attention Is All You Need", 2017; segments as in Dao, "FlashAttention-2", 2023.
 *
 * Segment n has the queries from cuts[0][n] to below cuts[0][n + 1], and likewise keys by cuts[1]; either may be none.
 * Without cuts, T queries and S keys are `rows` segments, all as long. Each row of cuts begins with 0, does not fall,
 * and ends with T or S. On CPU others are BST_INVALID, before anything is written; on CUDA nothing looks whether the
 * values are so: others make results that mean nothing, and no access that is out of bounds. */
typedef struct bst_segment_attention_tensors {
    size_t size;            /* sizeof(bst_segment_attention_tensors) */
    const DLTensor *q;      /* [T, H, D], D >= 1 */
    const DLTensor *k, *v;  /* [S, G, D]; H = G r: head h of q has k and v of head h / r */
    const DLTensor *cuts;   /* [2, N + 1] int32, N >= 1, or NULL */
    DLTensor *y;            /* as q; forward writes it, contiguous; backward reads it as it was written */
    DLTensor *lse;          /* [H, T] float32, likewise */
    const DLTensor *dy;     /* backward: as q */
    DLTensor *dq, *dk, *dv; /* backward: as q, k, v, contiguous; dk and dv are summed over the heads that share them */
} bst_segment_attention_tensors;

typedef struct bst_segment_attention_options {
    size_t size;  /* sizeof(bst_segment_attention_options) */
    double scale; /* 0: 1 / sqrt(D) */
    int causal;   /* 0: a query sees all keys of its segment */
    int rows;     /* without cuts: how many segments there are, which divides T and S; 0: one. With cuts: 0 */
    int window;   /* how many keys a query sees at most, itself among them; not causal: to either side. 0: all */
} bst_segment_attention_options;

/* q, k, v, y and dy are of one float type; of inputs but lse and cuts, which are contiguous, the last dimension is
 * contiguous, and strides may be any else. options NULL: the usual scale, not causal. On CUDA weights and what they
 * multiply are rounded to q's type. BST_UNSUPPORTED there but on compute capability 9.0 (Hopper), in bfloat16 or
 * float16, for D that 8 divides, up to 256 (computed as 64, 128 or 256), up to 1023 segments, addresses that 16 bytes
 * divide, and tokens and heads multiples of 16 bytes apart. */
BST_API bst_status bst_segment_attention_forward(const bst_exec *exec, const bst_segment_attention_tensors *tensors,
                                                 const bst_segment_attention_options *options);
BST_API bst_status bst_segment_attention_backward(const bst_exec *exec, const bst_segment_attention_tensors *tensors,
                                                  const bst_segment_attention_options *options);

/* Attention of one query a row, as of a token of a text that is generated, over keys and values of the row's own:
 * y = softmax(scale q k^T + bias) v. Heads that share keys read them once. */
typedef struct bst_token_attention_tensors {
    size_t size;           /* sizeof(bst_token_attention_tensors) */
    const DLTensor *q;     /* [B, H, D], D >= 1 */
    const DLTensor *k, *v; /* [B, G, S, D]; H = G r: head h of q has k and v of head h / r */
    const DLTensor *bias;  /* [B, S], added to all heads' scores; NULL: none. -infinity: what is there is not seen */
    DLTensor *y;           /* [B, H, D], contiguous; zeros where nothing is seen */
} bst_token_attention_tensors;

typedef struct bst_token_attention_options {
    size_t size;  /* sizeof(bst_token_attention_options) */
    double scale; /* 0: 1 / sqrt(D) */
} bst_token_attention_options;

/* All of one float type; of inputs the last dimension is contiguous, and strides may be any else. Sums are in float32,
 * y is rounded once. options NULL: the usual scale. On CUDA weights are rounded to q's type, and there is
 * BST_UNSUPPORTED but in bfloat16 or float16, for D that 8 divides, up to 256, addresses that 16 bytes divide, and
 * rows, heads and keys multiples of 16 bytes apart. */
BST_API bst_status bst_token_attention(const bst_exec *exec, const bst_token_attention_tensors *tensors,
                                       const bst_token_attention_options *options);

#ifdef __cplusplus
}
#endif
#endif
