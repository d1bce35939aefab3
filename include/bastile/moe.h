/* moe.h - mixtures of experts in the C API. bastile.h, whose conventions hold here, includes it. */
#ifndef BASTILE_MOE_H
#define BASTILE_MOE_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A mixture of experts: with T tokens of H numbers, K experts each out of E, and N = T K rows sorted by expert,
 *   sort      indices [T, K]           -> order, position, ends
 *   gather    x [T, H], position       -> rows [N, H]
 *   linear    rows, weight [E, H, 2I]  -> h [N, 2I]
 *   glu       h, bias [E, 2I]          -> y [N, I]
 *   linear    y, weight [E, I, H]      -> y [N, H]
 *   combine   y, weights, bias [E, H]  -> out [T, H]
 * Backward in the other direction: combine_backward, linear of the transposed weight, glu_backward, linear, the
 * products that are the weights' gradients, which are the caller's, and combine_forward without weights, which sums a
 * token's rows. Matrices are contiguous, but for linear's, and for x and dout, whose rows may lie apart. Rows, gate
 * and biases are of one float type, the routing weights of any. N < 2^31, 1 <= E <= 1023.
 * An entry of order, position, indices or ends that no sort gives: BST_INVALID on CPU, before anything is written; on
 * CUDA nothing is read or written for it, and where a row has no pair, or a pair no row, the result is NaN (a sum
 * without weights leaves the pair out, gather the row as it is). That none stands there twice is up to the caller. */

/* Sorts the pairs of token t and choice k, pair = t K + k, by expert, those of one expert in their order. indices [T,
 * K] int64; order [N] int32: the pair of a sorted row; position [T, K] int32: the row of a pair; ends [E] int32: where
 * the rows of an expert end. An index outside [0, E): BST_INVALID on CPU; on CUDA its position is -1, its row lies
 * behind all experts', its token's output is NaN and its pair's gradients are zero. */
BST_API bst_status bst_moe_sort(const bst_exec *exec, const DLTensor *indices, DLTensor *order, DLTensor *position,
                                DLTensor *ends);
/* rows[position[t K + k]] = x[t], K = N / T. position [N], sort's in one dimension. */
BST_API bst_status bst_moe_gather(const bst_exec *exec, const DLTensor *x, const DLTensor *position, DLTensor *rows);

/* Each row of x [N, A] times the matrix of its expert, beside which it may have an adapter:
 *   y[n] = x[n] matrices[e] + scale thin[n] b[e]   where ends[e - 1] <= n < ends[e]
 * matrices [E, A, B], b [E, R, B] and thin [N, R], the adapter's first result, or both NULL; y [N, B] contiguous; all
 * of one float type. Rows of x and of thin may lie apart; of each matrix rows or columns are contiguous, any distance
 * apart, so that a linear layer's weight [E, B, A] is given by its strides. Summed in float32. On Hopper, in 16 bits,
 * of addresses and distances of multiples of 16 bytes, B of multiples of 8 and R to 64, one kernel makes all, rounds y
 * once, and reads ends on the device; elsewhere there are one or two products an expert, the adapter's first, whose
 * result is rounded before the other is added, and on CUDA the host waits for ends: BST_UNSUPPORTED within a graph's
 * capture. Rows that are no expert's, which only CUDA lets pass, are not written. */
BST_API bst_status bst_moe_linear(const bst_exec *exec, const DLTensor *x, const DLTensor *matrices,
                                  const DLTensor *ends, const DLTensor *thin, const DLTensor *b, double scale,
                                  DLTensor *y);

/* y [C, A, B] = x [A, B, C] as another type or the same, rounded: y[c, a, b] = x[a, b, c]. The rows of x fold into two
 * strides; y is contiguous. It brings adapters of all experts that lie in one matrix, each expert's columns E apart
 * (PEFT's second matrices, [B, R E]), to what linear above takes, and their gradients back. */
BST_API bst_status bst_moe_transpose(const bst_exec *exec, const DLTensor *x, DLTensor *y);

/* The experts' gated unit: y [N, I] = act(g) u as bst_glu_joined_forward has it, g and u being the gate's and up's
 * columns of h [N, 2I] plus the bias of the row's expert (bias [E, 2I], of h's layout, or NULL). */
BST_API bst_status bst_moe_glu_forward(const bst_exec *exec, const DLTensor *h, const DLTensor *bias,
                                       const DLTensor *ends, const bst_glu_options *options, DLTensor *y);
/* Its gradients, where each row counts by its routing weight w, y being computed again from h. dy [N, I]: the gradient
 * of w y, divided by w. dh [N, 2I], zero beyond a limit; wy [N, I] = w y; dweights [T, K]: per row the sum of dy y,
 * plus dots [N] float32 where given; dbias [E, 2I]: dh summed over an expert's rows before it is rounded, in a fixed
 * order. Each may be NULL. dh may be h itself, and wy dy itself. options as for forward. */
typedef struct bst_moe_glu_backward_tensors {
    size_t size; /* sizeof(bst_moe_glu_backward_tensors) */
    const DLTensor *dy, *h, *bias, *ends, *order, *weights, *dots;
    DLTensor *dh, *wy, *dweights, *dbias;
} bst_moe_glu_backward_tensors;

BST_API bst_status bst_moe_glu_backward(const bst_exec *exec, const bst_moe_glu_backward_tensors *tensors,
                                        const bst_glu_options *options);

/* out[t] = sum over k of weights[t, k] (y[position[t, k]] + bias[indices[t, k]]), in this order, in float32, rounded
 * once. weights NULL: ones; bias NULL: zeros, and indices is not read. */
BST_API bst_status bst_moe_combine_forward(const bst_exec *exec, const DLTensor *y, const DLTensor *position,
                                           const DLTensor *weights, const DLTensor *bias, const DLTensor *indices,
                                           DLTensor *out);
/* rows[n] = dout of the row's token: the gradient of y, divided by the routing weight. dots [N] float32: its product
 * with the bias of the row's expert, a part of the weight's gradient; dbias [E, H]: the sum over an expert's rows of
 * weight times dout, in a fixed order. Either may be NULL. */
BST_API bst_status bst_moe_combine_backward(const bst_exec *exec, const DLTensor *dout, const DLTensor *order,
                                            const DLTensor *ends, const DLTensor *weights, const DLTensor *bias,
                                            DLTensor *rows, DLTensor *dots, DLTensor *dbias);

#ifdef __cplusplus
}
#endif
#endif
