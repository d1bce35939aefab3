/* causal_conv1d.c - the causal convolution of each channel with a window of its own, and SiLU after it: its
 * description, then the kernels of the tensors' device. */
#include "ops/causal_conv1d/causal_conv1d.h"

#include <inttypes.h>

#include "core/options.h"

typedef bst_causal_conv1d_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* So that the elements of a weight, and those of a partial row, are counted in 32 bits. */
enum { MOST_CHANNELS = 1 << 24 };

static bst_status check_channels(const char *op, const bst_view *v) {
    if (v[X].size[2] <= MOST_CHANNELS) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: x has %" PRId64 " channels; at most %d are supported", op, v[X].size[2],
                      MOST_CHANNELS);
}

static bst_status check_taps(const char *op, const bst_view *v) {
    int64_t taps = v[WEIGHT].size[1];
    if (taps >= 1 && taps <= CAUSAL_CONV1D_MOST_TAPS) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: weight has windows of %" PRId64 " tokens; 1 to %d are supported", op, taps,
                      CAUSAL_CONV1D_MOST_TAPS);
}

#define INPUTS                                                                                                   \
    [X] = {"x", BST_IN, BST_FLOATS, "BTC", BST_ROWS, .check = check_channels}, [WEIGHT] = {"weight",             \
                                                                                           BST_IN,               \
                                                                                           BST_FLOATS,           \
                                                                                           "CK",                 \
                                                                                           BST_CONTIGUOUS,       \
                                                                                           .check = check_taps}, \
    [BIAS] = {"bias", BST_IN | BST_OPTIONAL, BST_FLOATS,                                                         \
              "C",    BST_CONTIGUOUS,        BST_TYPE_OF(WEIGHT, "the type of weight")},                         \
    [SEQ_IDX] = {"seq_idx", BST_IN | BST_OPTIONAL, 1u << BST_I32, "BT", BST_CONTIGUOUS}
#define AS_X         BST_LIKE(X), BST_TYPE_OF(X, "the type of x")
#define GRADIENT(of) BST_CONTIGUOUS, BST_LIKE(of), BST_TYPE_OF(of, "as the inputs have it")
#define WANTED       BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL

static const bst_argument forward_arguments[] = {
    INPUTS,
    [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, AS_X},
    {NULL},
};

static const bst_argument backward_arguments[] = {
    INPUTS,
    [DY] = {"dy", BST_IN, BST_FLOATS, NULL, BST_ROWS, AS_X},
    [DX] = {"dx", WANTED, GRADIENT(X)},
    [DWEIGHT] = {"dweight", WANTED, GRADIENT(WEIGHT)},
    [DBIAS] = {"dbias", WANTED, GRADIENT(BIAS)},
    {NULL},
};

static const bst_attribute_rule rules[] = {[SILU] = BST_OPTION('b', silu), {NULL}};

/* ---- what runs --------------------------------------------------------------------------------------------------- */

static bool on_cuda(const bst_view *v) { return v[X].device.device_type == kDLCUDA; }

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    if (!v[X].count) return BST_OK;
    if (on_cuda(v)) return bst__causal_conv1d_forward_cuda(exec, op, v, attributes);
    causal_conv1d_cpu work = {.v = v, .silu = attributes[SILU].i};
    int64_t each = v[X].size[2] * (v[WEIGHT].size[1] + 2);
    return BST_CPU_RUN(exec, v[X].rows.rows, each, bst__causal_conv1d_forward_cpu, &work);
}

/* Chunks of tokens, each with its own partial sums: a fixed number, so that the order of the sum, and with it the
 * result, does not depend on the number of threads. */
enum { CHUNKS = 32 };

static bst_status backward_cpu(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    int64_t tokens = v[X].rows.rows;
    causal_conv1d_cpu work = {.v = v,
                              .silu = attributes[SILU].i,
                              .chunks = bst__lesser(tokens, CHUNKS),
                              .width = v[DWEIGHT].count + v[DBIAS].count};
    void *partial;
    BST_TRY(bst__allocate(exec, op, v[X].device, (size_t)(work.chunks * work.width) * sizeof(float), &partial));
    work.partial = partial;
    int64_t each = v[X].size[2] * (3 * v[WEIGHT].size[1] + 4) * (tokens / work.chunks);
    bst_status status = BST_CPU_RUN(exec, work.chunks, each, bst__causal_conv1d_backward_cpu, &work);
    if (status == BST_OK) status = BST_CPU_RUN(exec, work.width, work.chunks, bst__causal_conv1d_sums_cpu, &work);
    bst__release(exec, v[X].device, partial);
    return status;
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    if (!v[X].count) {
        BST_TRY(bst__zero(exec, op, &v[DWEIGHT]));
        return bst__zero(exec, op, &v[DBIAS]);
    }
    if (!v[DX].data && !v[DWEIGHT].data && !v[DBIAS].data) return BST_OK;
    if (on_cuda(v)) return bst__causal_conv1d_backward_cuda(exec, op, v, attributes);
    return backward_cpu(exec, op, v, attributes);
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

static const bst_function forward = {
    .name = "causal_conv1d_forward",
    .arguments = forward_arguments,
    .attributes = rules,
    .run = run_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("causal_conv1d_forward: x weight bias seq_idx silu -> y"),
};

static const bst_function backward = {
    .name = "causal_conv1d_backward",
    .arguments = backward_arguments,
    .attributes = rules,
    .run = run_backward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("causal_conv1d_backward: dy x weight bias seq_idx silu -> dx? dweight? dbias?"),
};

const bst_function *const bst__causal_conv1d[] = {&forward, &backward, NULL};

bst_status bst_causal_conv1d_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *weight,
                                     const DLTensor *bias, const DLTensor *seq_idx,
                                     const bst_causal_conv1d_options *options, DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [WEIGHT] = weight, [BIAS] = bias, [SEQ_IDX] = seq_idx, [Y] = y};
    return bst__call(&forward, exec, tensors, options, NULL);
}

bst_status bst_causal_conv1d_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *x,
                                      const DLTensor *weight, const DLTensor *bias, const DLTensor *seq_idx,
                                      const bst_causal_conv1d_options *options, DLTensor *dx, DLTensor *dweight,
                                      DLTensor *dbias) {
    const DLTensor *tensors[] = {[X] = x,   [WEIGHT] = weight, [BIAS] = bias,       [SEQ_IDX] = seq_idx,
                                 [DY] = dy, [DX] = dx,         [DWEIGHT] = dweight, [DBIAS] = dbias};
    return bst__call(&backward, exec, tensors, options, NULL);
}
