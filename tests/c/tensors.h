/* tensors.h - what the operators' C tests share: tensors over arrays, numbers to fill them with, calls that must
 * succeed.
 *
 * In a build with the emulator the arrays pass for memory of the emulated GPU, so the same tests run the CUDA kernels.
 */
#ifndef BST_TEST_TENSORS_H
#define BST_TEST_TENSORS_H

#include "bastile.h"
#include "test.h"

#ifdef BST_EMULATE
static const DLDevice bst_test_device = {kDLCUDA, 0};
#else
static const DLDevice bst_test_device = {kDLCPU, 0};
#endif

static const DLDataType bst_test_types[] = {{kDLFloat, 32, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 16, 1}};
static const DLDataType bst_test_i64 = {kDLInt, 64, 1};

/* Contiguous where strides is NULL. */
static inline DLTensor bst_tensor(void *data, int dims, int64_t *shape, int64_t *strides, DLDataType type) {
    return (DLTensor){
        .data = data, .device = bst_test_device, .ndim = dims, .dtype = type, .shape = shape, .strides = strides};
}

/* The tensors of the fused loss by their names. */
#define LOSS_OF(...) \
    (&(bst_linear_cross_entropy_tensors){.size = sizeof(bst_linear_cross_entropy_tensors), __VA_ARGS__})

/* A contiguous one of float32. */
static inline DLTensor bst_f32(void *data, int dims, int64_t *shape) {
    return bst_tensor(data, dims, shape, NULL, bst_test_types[0]);
}

/* Numbers between -most and most that repeat from run to run. */
static inline void bst_fill(float *out, int64_t count, unsigned seed, float most) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        out[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * most;
    }
}

/* A struct of tensors by name. */
#define BST_NORM_TENSORS(...) (&(bst_norm_backward_tensors){sizeof(bst_norm_backward_tensors), __VA_ARGS__})

/* A call that must succeed. */
#define CHECK_OK(call)                                                                                \
    do {                                                                                              \
        bst_test_checks++;                                                                            \
        bst_status status = (call);                                                                   \
        if (status != BST_OK) FAILED("%s: %s: %s", #call, bst_status_name(status), bst_last_error()); \
    } while (0)

#endif
