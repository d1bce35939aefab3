/* launch.c - queueing kernels, fills and workspace on a stream.
 *
 * Calls of the driver on the path of a launch: cuCtxGetCurrent (a thread-local read), cuLaunchKernel. */
#include <assert.h>
#include <string.h>

#include "cuda/jit.h"

#include "cuda/device/tensor_map.h"

static CUstream stream_of(const bst_exec *exec) { return exec ? exec->stream : NULL; }

/* Launches a grid that is not empty. The device's context is current. */
static bst_status submit(const char *op, const bst_device *device, CUstream stream, const bst_launch *l,
                         const void *arguments) {
    CUfunction function;
    unsigned most_blocks;
    void *parameters[1] = {(void *)arguments}; /* only read */
    BST_TRY(bst__jit_function(op, device, l, &function, &most_blocks));
    unsigned grid_x = l->grid_x < most_blocks ? l->grid_x : most_blocks;
    unsigned grid_y = l->grid_y ? l->grid_y : 1;
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = {grid_x, grid_y, 1, l->block, 1, 1, l->shared, stream, attributes, 0};
    if (l->cluster > 1) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        a->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        a->value.clusterDim.x = l->cluster;
        a->value.clusterDim.y = a->value.clusterDim.z = 1;
    }
    /* Chips before Hopper have no dependent launches; a kernel that asks for one runs after the other there. */
    if (l->overlap && device->chip.arch >= 90) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        a->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        a->value.programmaticStreamSerializationAllowed = 1;
    }
    if (config.numAttrs)
        BST_DRIVER_TRY(op, cuLaunchKernelEx, &config, function, parameters, NULL);
    else
        BST_DRIVER_TRY(op, cuLaunchKernel, function, grid_x, grid_y, 1, l->block, 1, 1, l->shared, stream, parameters,
                       NULL);
    return BST_OK;
}

bst_status bst__cuda_chip(const char *op, int device, bst_chip *out) {
    bst_collector collector;
    if (bst__compiling_only(&collector) && collector.request.arch)
        return bst__chip_of_arch(op, collector.request.arch, out);
    bst_device *d;
    BST_TRY(bst__device(op, device, &d));
    *out = d->chip;
    return BST_OK;
}

bst_status bst__cuda_launch(const bst_exec *exec, const char *op, int device, const bst_launch *launch,
                            const void *arguments, size_t bytes) {
    (void)bytes; /* the driver knows from the kernel how much to copy */
    if (!launch->grid_x) return BST_OK;
    bst_collector collector;
    if (bst__compiling_only(&collector)) return bst__jit_compile_only(op, &collector, device, launch);
    bst_scope scope;
    BST_TRY(bst__enter(op, device, &scope));
    bst_status status = submit(op, scope.device, stream_of(exec), launch, arguments);
    bst__leave(scope);
    return status;
}

bst_status bst__cuda_map_boxes(const char *op, int device, const bst_boxes *boxes, struct bst_tensor_map *out) {
    bst_collector collector;
    *out = (struct bst_tensor_map){{0}};
    if (bst__compiling_only(&collector)) return BST_OK;
    const uint64_t strides[] = {boxes->strides[0] * 2, boxes->strides[1] * 2};
    const uint32_t box[] = {BST_BOX_COLUMNS, boxes->rows, 1}, steps[] = {1, 1, 1};
    int type = boxes->dtype == BST_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    bst_scope scope;
    BST_TRY(bst__enter(op, device, &scope)); /* a thread's first call of the driver may be this */
    CUresult result = bst__driver()->cuTensorMapEncodeTiled(
        out, type, boxes->dims, boxes->data, boxes->sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    bst__leave(scope);
    return result == CUDA_SUCCESS ? BST_OK : bst__driver_error(op, "cuTensorMapEncodeTiled", result);
}

/* Waits for the stream. Its capture would break. */
static bst_status read_back(const char *op, CUstream stream, const void *from, void *to, size_t bytes) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    BST_DRIVER_TRY(op, cuStreamIsCapturing, stream, &status);
    if (status != CU_STREAM_CAPTURE_STATUS_NONE)
        return bst__error(BST_UNSUPPORTED,
                          "%s: the host waits for the device here, which a graph that is captured cannot; call it "
                          "outside of the capture",
                          op);
    BST_DRIVER_TRY(op, cuMemcpyDtoHAsync, to, (CUdeviceptr)(uintptr_t)from, bytes, stream);
    BST_DRIVER_TRY(op, cuStreamSynchronize, stream);
    return BST_OK;
}

bst_status bst__cuda_read(const bst_exec *exec, const char *op, int device, const void *from, void *to, size_t bytes) {
    bst_collector collector;
    memset(to, 0, bytes);
    if (!bytes || bst__compiling_only(&collector)) return BST_OK;
    bst_scope scope;
    BST_TRY(bst__enter(op, device, &scope));
    bst_status status = read_back(op, stream_of(exec), from, to, bytes);
    bst__leave(scope);
    return status;
}

bst_status bst__cuda_zero(const bst_exec *exec, const char *op, int device, void *memory, size_t bytes) {
    bst_collector collector;
    if (!bytes || bst__compiling_only(&collector)) return BST_OK;
    bst_scope scope;
    BST_TRY(bst__enter(op, device, &scope));
    CUresult result = bst__driver()->cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, 0, bytes, stream_of(exec));
    bst__leave(scope);
    return result == CUDA_SUCCESS ? BST_OK : bst__driver_error(op, "cuMemsetD8Async", result);
}

bst_status bst__cuda_allocate(const bst_exec *exec, const char *op, int device, size_t bytes, void **out) {
    bst_collector collector;
    bst_scope scope;
    CUdeviceptr memory = 0;
    *out = NULL;
    if (!bytes) return BST_OK;
    if (bst__compiling_only(&collector)) return *out = bst__no_memory(bytes), BST_OK;
    BST_TRY(bst__enter(op, device, &scope));
    CUresult result = bst__driver()->cuMemAllocAsync(&memory, bytes, stream_of(exec));
    bst__leave(scope);
    *out = (void *)(uintptr_t)memory;
    return result == CUDA_SUCCESS ? BST_OK : bst__driver_error(op, "cuMemAllocAsync", result);
}

void bst__cuda_release(const bst_exec *exec, int device, void *memory) {
    bst_collector collector;
    bst_scope scope;
    /* What cannot be entered cannot have been allocated from. */
    if (!memory || bst__compiling_only(&collector) || bst__enter("release", device, &scope) != BST_OK) return;
    bst__driver()->cuMemFreeAsync((CUdeviceptr)(uintptr_t)memory, stream_of(exec));
    bst__leave(scope);
}
