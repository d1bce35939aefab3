/* linear_cross_entropy_head.h - the output head a chunk of rows at a time, as operators have it that work on logits and
 * leave none: logits = hidden weight^T (+ bias), something done to them in place, and from the logits' gradient dz
 * the products dhidden = dz weight, dweight += dz^T hidden, and dbias by sums of our own: a product with ones would add
 * a column in one float32 after the other. Nothing waits for the device. Shapes and types the operators' descriptions
 * have checked. */
#ifndef BST_LINEAR_CROSS_ENTROPY_HEAD_H
#define BST_LINEAR_CROSS_ENTROPY_HEAD_H

#include "core/describe.h"

/* What descriptions of operators on the head have in common; their places are called HIDDEN, WEIGHT, TARGET, BIAS, and
 * names are members of given_tensors. */
#define BST_HEAD_ARGUMENT(name, ...) {#name, __VA_ARGS__, BST_AT(name)}
#define BST_AS_HIDDEN                BST_TYPE_OF(HIDDEN, "the type of hidden")
#define BST_HEAD                                                                             \
    [HIDDEN] = BST_HEAD_ARGUMENT(hidden, BST_IN, BST_FLOATS, "TH", BST_ROWS),                \
    [WEIGHT] = BST_HEAD_ARGUMENT(weight, BST_IN, BST_FLOATS, "VH", BST_ROWS, BST_AS_HIDDEN), \
    [BIAS] = BST_HEAD_ARGUMENT(bias, BST_IN | BST_OPTIONAL, BST_FLOATS, "V", BST_CONTIGUOUS, BST_AS_HIDDEN)
#define BST_HEAD_TARGET [TARGET] = BST_HEAD_ARGUMENT(target, BST_IN, 1u << BST_I64, "T", BST_CONTIGUOUS)
#define BST_HEAD_FLOATS(name, flags, shape, ...) \
    BST_HEAD_ARGUMENT(name, flags, 1u << BST_F32, shape, BST_CONTIGUOUS, ##__VA_ARGS__)
#define BST_HEAD_LOGITS(name, flags) \
    BST_HEAD_ARGUMENT(name, flags, BST_FLOATS, "TV", BST_ROWS, BST_AS_HIDDEN, BST_PADDED(8))
#define BST_HEAD_GRADIENT(name, of, ...) \
    BST_HEAD_ARGUMENT(name, BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), __VA_ARGS__)
#define BST_AS_INPUTS(of)   BST_TYPE_OF(of, "as the inputs have it")
#define BST_HEAD_MEANINGS   "Tthe rows of hidden", "Hthe last dimension of hidden", "Vthe rows of weight"
#define BST_TEMPERATURE     BST_OPTION('d', temperature, 1e-6, 1e6, "a number from 1e-6 to 1e6", BST_USUAL(1))
#define BST_CHUNK_BOUNDS    0, (double)INT64_MAX, "a positive number, or 0 for the default,"
#define BST_CHUNK_BYTES     BST_OPTION('i', chunk_bytes, BST_CHUNK_BOUNDS)
#define BST_FLOAT32_DWEIGHT BST_OPTION('i', float32_dweight, 0, 2, "0 (no), 1 (summed in it) or 2 (and left in it)")

typedef struct bst_head {
    /* The caller sets these, before bst__head_begin. */
    const bst_exec *exec;
    const char *op;
    bst_view bias, dhidden, dweight, dbias; /* data NULL where absent or not wanted; the gradients may be float32 */
    bool wide;      /* logits are float32, whatever the inputs' type: see bst__head_gradient_place */
    int64_t beside; /* bytes that a row of a chunk takes beside its logits, for the budget */
    bool exact;     /* dweight is summed in float32 whenever there is more than one chunk, and not from the ninth on */
    /* What the sums of a chunk's logit gradients are multiplied by: the divisor and the upstream gradient, where they
     * are the same for all rows; NULL: one. The logits' own gradients, p - 1 and p, so stay in the range where their
     * type is most exact. Needed by bst__head_run alone. */
    const float *alpha;
    /* bst__head_begin and bst__head_choose_chunks set these. */
    bst_view hidden, weight;
    /* The logits of the last rows, or of all, in memory of the caller's, where chunks before them are worked off too;
     * data NULL: a chunk of workspace. */
    bst_view whole;
    DLDevice device;
    bst_dtype dtype;
    int64_t rows, vocabulary, width, chunk_rows, chunks;
    int64_t memory_rows; /* that a chunk of workspace has room for */
    /* Sums over chunks while they are made. Up to LINEAR_CROSS_ENTROPY_MOST_ROUNDINGS chunks of dweight are added in
     * its own type; more are in `dweight_sum`, in float32 (on CPU, whose products do not write float32 from halves,
     * each is made in `part` first). dbias_sum: float64, and rounded once: PARTS sums on CUDA, of a part of the rows
     * each, or one; NULL: not wanted. */
    float *dweight_sum;
    void *part;
    double *dbias_sum;
} bst_head;

/* What the caller sets, of the views of a call: the gradients are at these places. */
#define BST_HEAD_OF(exec, op, v, dhidden, dweight, dbias) \
    {(exec), (op), (v)[BIAS], (v)[dhidden], (v)[dweight], (v)[dbias]}

/* BST_UNSUPPORTED where weight [V, H] has no or too many rows, or no columns. */
bst_status bst__head_check_weight(const char *op, const bst_view *weight);
/* Takes hidden [T, H] and weight [V, H]. BST_UNSUPPORTED where rows overlap. */
bst_status bst__head_begin(bst_head *h, const bst_view *hidden, const bst_view *weight);
/* Takes `whole` [K, V], the logits of the last K rows, 1 <= K <= T, where it is given (`name` is what messages call
 * it): chunks of K rows at most; else chunks that `chunk_bytes` hold (0: the default). */
bst_status bst__head_choose_chunks(bst_head *h, const bst_view *whole, const char *name, int64_t chunk_bytes);

/* Logits of the rows [first, first + rows), by themselves: for a second head, none of whose gradients are wanted. */
bst_status bst__head_logits(const bst_head *h, int64_t first, int64_t rows, void *logits, int64_t stride);
/* Columns of a chunk in memory. */
int64_t bst__head_padded(const bst_head *h);

/* Where the gradient of a chunk of logits is, and the elements between its rows. Of wide logits and 16-bit inputs it
 * has the upper half of each row's place: whoever writes it there from the row's end on overwrites what has been read,
 * for the gradient of column c begins at float32 column (stride + c) / 2. Else it is where the logits are. */
typedef struct bst_head_place {
    void *at;
    int64_t stride;
} bst_head_place;
bst_head_place bst__head_gradient_place(const bst_head *h, void *logits, int64_t stride);

/* What is done to the rows [first, first + rows), whose logits are at `logits`, `stride` elements apart. */
typedef bst_status (*bst_head_rows)(const bst_head *h, void *context, int64_t first, int64_t rows, void *logits,
                                    int64_t stride);
/* Does it chunk by chunk, those of `whole` last. made: these are there already, and come first. rows NULL: nothing is
 * done to them. gradients: what is in the gradient's place then is dz, and the wanted gradients are made of it. */
bst_status bst__head_run(bst_head *h, bool made, bst_head_rows rows, void *context, bool gradients);

#endif
