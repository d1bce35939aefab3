/* gated_delta_rule_args.h - the arguments of the gated delta rule's kernels, as host and device see them, and the sizes
 * that both depend on. */
#ifndef BST_GATED_DELTA_RULE_ARGS_H
#define BST_GATED_DELTA_RULE_ARGS_H

/* Tokens of a chunk, within which all is products of matrices. */
#define DELTA_CHUNK        64
#define DELTA_THREADS      256
#define DELTA_SYSTEM_PITCH (DELTA_CHUNK + 8) /* floats of a row of A, and of its inverse, while that is made */
/* The widest heads: of keys, whose gradients a thread has in its registers, and of values. */
#define DELTA_MOST_KEY   128
#define DELTA_MOST_VALUE 256

/* A matrix in shared memory: so many planes of 16-bit numbers whose sum an element is, and bytes from row to row, which
 * put the eight rows of a tensor core's matrix into different banks. */
#define DELTA_PLANES(type)                      ((type) == BST_F32_CODE ? 3 : 2)
#define DELTA_PITCH(columns)                    (2 * (columns) + 16)
#define DELTA_TILE_BYTES(planes, rows, columns) ((planes) * (rows) * DELTA_PITCH(columns))
#define DELTA_PADDED(size)                      (((size) + 15) / 16 * 16)

/* Where a tensor [B, tokens, heads, ...] begins: strides in elements. */
typedef struct delta_map {
    int64_t batch, token, head;
} delta_map;

typedef struct delta_input {
    const void *data;
    delta_map map;
} delta_input;

/* What all kernels read. Of each head of values and chunk: its inverse and its scores, [planes, CHUNK, CHUNK] in 16
 * bits, and sums of g, [CHUNK].
 *
 * Sequences that are packed in one row have chunks of their own, from their first tokens on. How many is not known to
 * the host, so each head has slots for as many as there can be, in place of chunks: those of sequence n begin at slot
 * boundaries[n] / CHUNK + n. From there to where those of n + 1 begin it is at least as many as n has chunks, so no
 * slot is two sequences'; and all are below tokens / CHUNK + sequences. */
typedef struct delta_args {
    delta_input q, k, v, g, beta;
    const void *skip; /* or NULL */
    void *inverse, *scores;
    float *sums;
    int64_t tokens;
    int32_t heads, key_heads, chunks; /* chunks of a row, or the slots of all sequences */
    float scale, eps;
    int32_t sequences;         /* of a packed row */
    const int32_t *boundaries; /* [sequences + 1]: where each begins, and the last one ends; or NULL */
} delta_args;

/* States are [heads of all batches, key, value] in float32; those of each chunk's beginning [.., chunks, planes, padded
 * key, slices of values] in 16 bits. NULL: not given, or not wanted. */
typedef struct delta_scan_args {
    delta_args of;
    const float *initial;
    void *y;
    float *final;
    void *states;
} delta_scan_args;

typedef struct delta_backward_args {
    delta_args of;
    delta_input dy;
    const float *dfinal;
    void *dv;
    float *dinitial;
    const void *states;
    void *dstates;
    void *dq, *dk, *dg, *dbeta;
    float *dskip; /* [B or sequences, slices, heads], or NULL */
} delta_backward_args;

static_assert(sizeof(delta_args) == 232, "host and device must agree");
static_assert(sizeof(delta_scan_args) == 264, "host and device must agree");
static_assert(sizeof(delta_backward_args) == 344, "host and device must agree");

#endif
