/* linear_logprobs.h - what the parts of linear_logprobs hand to each other: rows of logits, a chunk at a time. */
#ifndef BST_LINEAR_LOGPROBS_H
#define BST_LINEAR_LOGPROBS_H

#include "core/cpu_kernel.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_logprobs/linear_logprobs_args.h"

/* One chunk of rows. Its pointers are at the chunk's first row. */
typedef struct linear_logprobs_rows {
    DLDevice device;
    bst_dtype dtype; /* of the logits */
    int64_t rows, vocabulary;
    void *logits; /* [rows, vocabulary], `stride` elements between rows; backward writes their gradient here */
    int64_t stride;
    const int64_t *target;
    bst_loss z; /* ignore_index, and what makes z of logits: softcap and logit_scale, divided by the temperature */
    /* [rows, 2]: the largest z of a row, and the sum of the others' exponentials relative to it, others than the
     * target's. Forward writes them (or NULL), backward reads them. */
    float *pairs;
    bool backward;
    linear_logprobs_args args; /* what the kernels get beside these, but for `row` */
} linear_logprobs_rows;

/* Forward of all rows without their logits, where the chip can and it pays: then `done` is set. `call` is at the first
 * row, and its logits are NULL; rows at a time are what `budget` bytes (0: the default) hold the sums of. */
bst_status bst__linear_logprobs_tiles_cuda(const bst_exec *exec, const char *op, const bst_view *hidden,
                                           const bst_view *weight, const linear_logprobs_rows *call, int64_t budget,
                                           bool *done);
/* `call`, from row `first` on, `rows` of them. */
linear_logprobs_rows bst__linear_logprobs_part(const linear_logprobs_rows *call, int64_t first, int64_t rows);
bst_status bst__linear_logprobs_rows_cuda(const bst_exec *exec, const char *op, const linear_logprobs_rows *call);
BST_CPU_DECLARE(bst__linear_logprobs_rows_cpu); /* over rows; the context is a linear_logprobs_rows */

#endif
