/* causal_conv1d_cuda.c - causal convolutions on CUDA: the launches' geometry and arguments. */
#include <assert.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"
#include "ops/causal_conv1d/causal_conv1d.h"

/* clang-format off */
#define MACROS(X) \
    X(X_TYPE) X(W_TYPE) X(CHANNELS) X(TAPS) X(SILU) X(HAS_BIAS) X(HAS_SEQ_IDX) X(VEC) X(W_VEC) X(THREADS) X(FOLDED)
#define OF_BACKWARD(X) X(DX) X(DW) X(DB)
/* clang-format on */
#define PLACE(name) M_##name,
#define NAME(name)  #name,
enum { MACROS(PLACE) OF_BACKWARD(PLACE) };

static const bst_kernel forward_kernel = {"causal_conv1d.cu", "causal_conv1d_forward", {MACROS(NAME) "FORWARD"}};
static const bst_kernel backward_kernel = {
    "causal_conv1d.cu", "causal_conv1d_backward", {MACROS(NAME) OF_BACKWARD(NAME) "BACKWARD"}};

/* How the work is shared out. Measured as they are (causal_conv1d.cu); no others were tried.
 *
 * ELEMENTS: of a window that a thread holds at most, so that its registers last: forward has the window and the weights
 * there, backward the gradients and their sums too. RUN: tokens of a thread at most; a run reads a few rows of its
 * neighbours' again, and backward leaves a row of sums, so it should be long; shorter where there would be fewer than
 * so many threads for each multiprocessor, but not below eight tokens. */
enum { THREADS = 128, FORWARD_ELEMENTS = 32, BACKWARD_ELEMENTS = 16 };
enum { FORWARD_RUN = 64, BACKWARD_RUN = 128, LEAST_RUN = 8, FORWARD_WANTED = 2048, BACKWARD_WANTED = 1024 };

/* The launch of a call with these tensors, without what is its own of each; sets the arguments that both have. */
static bst_status share_out(bst_launch *l, causal_conv1d_args *args, const char *op, const bst_view *v,
                            const bst_attribute *attributes, bool is_backward) {
    const bst_view *x = &v[X], *weight = &v[WEIGHT];
    const int64_t taps = weight->size[1], tokens = x->size[1],
                  most = is_backward ? BACKWARD_ELEMENTS : FORWARD_ELEMENTS;
    int64_t vec = bst__row_vector(x, &x->rows), w_vec = 16 / bst__dtype_size(weight->dtype);
    bool folded = bst__rows_folded(&x->rows);
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, x->device.device_id, &chip));
    for (int i = BOTH; i <= (is_backward ? DX : Y); i++) {
        if (!v[i].data) continue;
        vec = bst__lesser(vec, bst__row_vector(&v[i], &v[i].rows));
        folded = folded && bst__rows_folded(&v[i].rows);
    }
    while (vec > 1 && vec * taps > most) vec /= 2;
    if (((uintptr_t)weight->data | (uintptr_t)v[BIAS].data) % 16) w_vec = 1;
    const int64_t values[] = {x->dtype,
                              weight->dtype,
                              x->size[2],
                              taps,
                              attributes[SILU].i,
                              v[BIAS].data != NULL,
                              v[SEQ_IDX].data != NULL,
                              vec,
                              bst__lesser(vec, w_vec),
                              THREADS,
                              folded};
    static_assert(sizeof values / sizeof *values == M_DX, "a value for each macro");
    for (int i = 0; i < M_DX; i++) l->values[i] = values[i];
    int64_t vectors = x->size[2] / vec, run = is_backward ? BACKWARD_RUN : FORWARD_RUN;
    int64_t wanted = (int64_t)chip.processors * (is_backward ? BACKWARD_WANTED : FORWARD_WANTED);
    BST_TRY(bst__cuda_need_rows(op, x->rows.rows, bst__divided_up(vectors, THREADS)));
    while (run > LEAST_RUN && bst__divided_up(tokens, run) * x->size[0] < bst__divided_up(wanted, vectors)) run /= 2;
    *args = (causal_conv1d_args){.x = x->data,
                                 .weight = weight->data,
                                 .bias = v[BIAS].data,
                                 .x_map = bst__row_map(&x->rows),
                                 .tokens = tokens,
                                 .run = run,
                                 .runs = bst__divided_up(tokens, run),
                                 .seq_idx = v[SEQ_IDX].data};
    args->all_runs = args->runs * x->size[0];
    l->block = THREADS;
    l->grid_x = (unsigned)bst__divided_up(args->all_runs * vectors, THREADS);
    l->overlap = true;
    return BST_OK;
}

bst_status bst__causal_conv1d_forward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                           const bst_attribute *attributes) {
    bst_launch l = {.kernel = &forward_kernel};
    causal_conv1d_args args;
    BST_TRY(share_out(&l, &args, op, v, attributes, false));
    args.y = v[Y].data;
    return bst__cuda_launch(exec, op, v[X].device.device_id, &l, &args, sizeof args);
}

bst_status bst__causal_conv1d_backward_cuda(const bst_exec *exec, const char *op, const bst_view *v,
                                            const bst_attribute *attributes) {
    const bst_view *dweight = &v[DWEIGHT], *dbias = &v[DBIAS];
    const int device = v[X].device.device_id;
    const int64_t width = dweight->count + dbias->count;
    bst_launch l = {.kernel = &backward_kernel};
    causal_conv1d_args args;
    void *partial = NULL;
    BST_TRY(share_out(&l, &args, op, v, attributes, true));
    l.values[M_DX] = v[DX].data != NULL;
    l.values[M_DW] = dweight->data != NULL;
    l.values[M_DB] = dbias->data != NULL;
    BST_TRY(bst__allocate(exec, op, v[X].device, (size_t)(args.all_runs * width) * sizeof(float), &partial));
    args.dy = v[DY].data;
    args.dy_map = bst__row_map(&v[DY].rows);
    args.y = v[DX].data;
    args.partial = partial;
    bst_status status = bst__cuda_launch(exec, op, device, &l, &args, sizeof args);
    if (status == BST_OK && width)
        status =
            bst__column_sums(exec, op, device, partial, args.all_runs, width, dweight->count ? dweight->count : width,
                             v[WEIGHT].dtype, (void *[]){dweight->count ? dweight->data : dbias->data, dbias->data});
    bst__release(exec, v[X].device, partial);
    return status;
}
