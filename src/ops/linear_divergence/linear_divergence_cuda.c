/* linear_divergence_cuda.c - the divergence of rows of logits on CUDA: which kernel, and its launch. */
#include "cuda/cuda.h"
#include "ops/linear_divergence/linear_divergence.h"
#include "ops/linear_divergence/linear_divergence_math.h"

/* Macros of the kernel, in the order of their values. */
enum { VOCAB, T_TYPE, D_TYPE, VEC, S_SOFTCAP, T_SOFTCAP, KIND, ENTROPY, SAVED, LOSS, GRADIENT, IN_PLACE, PARTLY };
static const bst_kernel rows_kernel = {"linear_divergence.cu",
                                       "linear_divergence",
                                       {"VOCAB", "T_TYPE", "D_TYPE", "VEC", "S_SOFTCAP", "T_SOFTCAP", "KIND", "ENTROPY",
                                        "SAVED", "LOSS", "GRADIENT", "IN_PLACE", "PARTLY"}};
static const bst_kernel spread_kernel = {"linear_divergence.cu", "linear_divergence_spread", {"T_TYPE", "SPREAD"}};

/* Whether rows of a type begin where four elements may be read at once. */
static bool by_four(const void *at, int64_t stride, bst_dtype dtype) {
    int64_t bytes = 4 * bst__dtype_size(dtype);
    return (uintptr_t)at % (uintptr_t)bytes == 0 && stride * bst__dtype_size(dtype) % bytes == 0;
}

bst_status bst__linear_divergence_rows_cuda(const bst_exec *exec, const char *op, const linear_divergence_rows *c) {
    const linear_divergence_args *a = &c->args;
    bool wide = by_four(a->student, a->student_stride, BST_F32) &&
                by_four(a->teacher, a->teacher_stride, c->teacher_type) &&
                (!a->dlogits || by_four(a->dlogits, a->dlogits_stride, c->dtype));
    bst_launch l = {
        .kernel = &rows_kernel, .block = LINEAR_DIVERGENCE_THREADS, .grid_x = (unsigned)c->rows, .overlap = true};
    l.values[VOCAB] = c->vocabulary;
    l.values[T_TYPE] = c->teacher_type;
    l.values[D_TYPE] = c->dtype;
    l.values[VEC] = wide ? 4 : 1;
    l.values[S_SOFTCAP] = c->student_capped;
    l.values[T_SOFTCAP] = c->teacher_capped;
    l.values[KIND] = c->kind;
    l.values[ENTROPY] = a->entropy != NULL;
    l.values[SAVED] = c->saved;
    l.values[LOSS] = a->divergence != NULL;
    l.values[GRADIENT] = a->dlogits != NULL;
    l.values[IN_PLACE] = c->in_place;
    l.values[PARTLY] = c->some_left_out;
    return bst__cuda_launch(exec, op, c->device.device_id, &l, a, sizeof *a);
}

bst_status bst__linear_divergence_spread_cuda(const bst_exec *exec, const char *op, const linear_divergence_spread *c) {
    bst_launch l = {.kernel = &spread_kernel,
                    .values = {c->dtype},
                    .block = LINEAR_DIVERGENCE_THREADS,
                    .grid_x = (unsigned)c->rows,
                    .overlap = true};
    return bst__cuda_launch(exec, op, c->device.device_id, &l, &c->args, sizeof c->args);
}
