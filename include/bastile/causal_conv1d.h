/* causal_conv1d.h - the short convolutions of the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_CAUSAL_CONV1D_H
#define BASTILE_CAUSAL_CONV1D_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bst_causal_conv1d_options {
    size_t size; /* sizeof(bst_causal_conv1d_options) */
    int silu;    /* not 0: y = z / (1 + exp(-z)) */
} bst_causal_conv1d_options;

/* The convolution over time of each channel c with a window of its own, which ends at the token that it is for:
 *   z[b, t, c] = bias[c] + sum over k of weight[c, k] x[b, t - (K - 1) + k, c],   y = z, or SiLU of it
 * where x is 0 before the token's own sequence begins; in float32 from the tensors' own types, and rounded once.
 * x [B, T, C], any strides with C contiguous; weight [C, K], 1 <= K <= 8, bias [C] of its type or NULL; y [B, T, C]
 * contiguous, of x's type. C <= 2^24. As in Mamba: Gu and Dao, 2023.
 *
 * seq_idx, where several sequences stand side by side in a row (packing): int32 [B, T], contiguous, which sequence of
 * its row each token is of; NULL: each row is one. The tokens of a sequence stand next to each other: another begins
 * wherever seq_idx is not what it is at the token before. So x[b, t - j] counts for z[b, t] where seq_idx is the same
 * from t - j to t; to compare these two is enough if no number comes back. The numbers themselves, negative ones too,
 * say nothing more. */
BST_API bst_status bst_causal_conv1d_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *weight,
                                             const DLTensor *bias, const DLTensor *seq_idx,
                                             const bst_causal_conv1d_options *options, DLTensor *y);
/* Its gradients, from x alone, z being computed again: with g = dy, or dy times SiLU's slope at z,
 *   dx[b, t, c] = sum over k of weight[c, k] g[b, t + (K - 1) - k, c],   dweight[c, k] = sum of g times what it met,
 * where g is 0 behind the token's own sequence, dbias = sum of g, these two in float32 in a fixed order. dy as x, dx as
 * y; each gradient may be NULL, and dbias is wanted with bias alone. */
BST_API bst_status bst_causal_conv1d_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *x,
                                              const DLTensor *weight, const DLTensor *bias, const DLTensor *seq_idx,
                                              const bst_causal_conv1d_options *options, DLTensor *dx, DLTensor *dweight,
                                              DLTensor *dbias);

#ifdef __cplusplus
}
#endif
#endif
