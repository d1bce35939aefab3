/* gated_delta_rule.h - linear attention of the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_GATED_DELTA_RULE_H
#define BASTILE_GATED_DELTA_RULE_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Linear attention by the gated delta rule. A head has a state S [K, V], before the first token `initial`, or zeros;
 * for each token, with q and k first divided by sqrt(sum of their squares + eps) where normalize says so,
 *   S := exp(g) S,   S := S + beta k (v - S^T k)^T,   y = scale S^T q + skip v
 * or, where additive says so, S := S + beta k v^T, which is the state space of Mamba-2 (Dao and Gu, 2024); and `final`
 * is S behind the last token. Computed over chunks of 64 tokens, for which g is to be 0 or below, in float32; on CUDA
 * tensor cores multiply parts of 8 bits, two of each number for types of 16 bits and three for float32
 * (docs/gated_delta_rule.md says what becomes of results in float32). BST_UNSUPPORTED where a GPU's blocks have too
 * little shared memory for K: those of compute capability 8.6, 8.9 and 12.0 above 48 in float32.
 * Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
 *
 * cu_seqlens says where the sequences of one packed row begin and end: B is 1, sequence n has the tokens from
 * cu_seqlens[n] to below cu_seqlens[n + 1], and results are those of a call of its own, whose state is zeros at first.
 * cu_seqlens[0] is 0, no number is below the one before it, and the last one is T; equal neighbours are a sequence
 * without tokens. On CUDA nothing looks whether the values are so: others make results that mean nothing, and no access
 * that is out of bounds; on CPU they are refused. Neither initial, final nor their gradients are served beside it. */
typedef struct bst_gated_delta_rule_tensors {
    size_t size;                         /* sizeof(bst_gated_delta_rule_tensors) */
    const DLTensor *q, *k;               /* [B, T, H, K], 1 <= K <= 128 */
    const DLTensor *v;                   /* [B, T, N, V], 1 <= V <= 256; N = H r: head n has q and k of head n / r */
    const DLTensor *g, *beta;            /* [B, T, N], each of any float type */
    const DLTensor *skip;                /* [N], of any float type, or NULL: zeros */
    const DLTensor *initial;             /* [B, N, K, V] float32, or NULL: zeros */
    DLTensor *y, *final;                 /* forward: as v, contiguous; as initial, or NULL */
    const DLTensor *dy, *dfinal;         /* backward: as v; as initial, or NULL: zeros */
    DLTensor *dq, *dk, *dv, *dg, *dbeta; /* backward: as q, k, v, g, beta, contiguous */
    DLTensor *dskip;                     /* backward: as skip, or NULL */
    DLTensor *dinitial;                  /* backward: as initial, or NULL */
    const DLTensor *cu_seqlens;          /* [S + 1] int32: boundaries of sequences, see above; or NULL */
} bst_gated_delta_rule_tensors;

typedef struct bst_gated_delta_rule_options {
    size_t size;   /* sizeof(bst_gated_delta_rule_options) */
    double scale;  /* 0: 1 / sqrt(K) */
    int additive;  /* what a key finds in the state stays there */
    int wide;      /* y is float32, whatever q is */
    int normalize; /* q and k to length 1 */
    double eps;    /* 0: 1e-6 */
} bst_gated_delta_rule_options;

/* q, k and v are of one type, and so are y and dy, unless wide says otherwise; inputs may have any strides, their last
 * dimension being contiguous. Workspace of a token and head of v, for types of 16 bits (float32: half as much again):
 * 516 bytes (additive: 260), and in the backward pass, which makes the states before each chunk again, K V / 8 more. On
 * CUDA each of packed sequences, empty ones too, takes up to 64 tokens' more. */
BST_API bst_status bst_gated_delta_rule_forward(const bst_exec *exec, const bst_gated_delta_rule_tensors *tensors,
                                                const bst_gated_delta_rule_options *options);
BST_API bst_status bst_gated_delta_rule_backward(const bst_exec *exec, const bst_gated_delta_rule_tensors *tensors,
                                                 const bst_gated_delta_rule_options *options);

#ifdef __cplusplus
}
#endif
#endif
