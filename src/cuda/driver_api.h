/* driver_api.h - the part of the CUDA driver's interface that we use, declared here so that no CUDA header is needed.
 *
 * Names, values and layouts are those of NVIDIA's CUDA Driver API Reference (version 12.0 and later, where every
 * function below exists). Types that we only pass on are opaque. */
#ifndef BST_DRIVER_API_H
#define BST_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUfunc_st *CUfunction;
typedef struct CUkern_st *CUkernel;
typedef struct CUlib_st *CUlibrary;
typedef struct CUevent_st *CUevent;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
};

/* CUdevice_attribute */
enum {
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

/* CUfunction_attribute */
enum {
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14,
};

/* CUlaunchAttributeID */
enum {
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
};

/* CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill */
enum {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0,
};

/* CUstreamCaptureMode */
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
/* CUstreamCaptureStatus */
enum { CU_STREAM_CAPTURE_STATUS_NONE = 0 };

typedef union CUlaunchAttributeValue {
    char pad[64];
    void *event; /* of other attributes; it gives the union its alignment */
    struct {
        unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
} CUlaunchAttributeValue;

typedef struct CUlaunchAttribute {
    int id;
    char pad[8 - sizeof(int)];
    CUlaunchAttributeValue value;
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ;
    unsigned blockDimX, blockDimY, blockDimZ;
    unsigned sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

/* X(member, exported symbol, arguments): the symbol carries the version of the interface that these arguments are. */
#define BST_DRIVER_FUNCTIONS(X)                                                                                      \
    X(cuInit, "cuInit", (unsigned flags))                                                                            \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                                      \
    X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char **name))                                         \
    X(cuGetErrorString, "cuGetErrorString", (CUresult error, const char **text))                                     \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                            \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int index))                                                    \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                    \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, CUdevice device))                                     \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int bytes, CUdevice device))                                  \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                  \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (CUcontext * context))                                                     \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                                  \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                                  \
    X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int *mode))                           \
    X(cuLibraryLoadData, "cuLibraryLoadData",                                                                        \
      (CUlibrary * library, const void *code, int *jit_options, void **jit_values, unsigned jit_count, int *options, \
       void **values, unsigned count))                                                                               \
    X(cuLibraryGetKernel, "cuLibraryGetKernel", (CUkernel * kernel, CUlibrary library, const char *name))            \
    X(cuLibraryUnload, "cuLibraryUnload", (CUlibrary library))                                                       \
    X(cuKernelGetFunction, "cuKernelGetFunction", (CUfunction * function, CUkernel kernel))                          \
    X(cuFuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, CUfunction function))                    \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                     \
    X(cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters",                                                  \
      (int *clusters, CUfunction function, const CUlaunchConfig *config))                                            \
    X(cuLaunchKernel, "cuLaunchKernel",                                                                              \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
       unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra))                         \
    X(cuLaunchKernelEx, "cuLaunchKernelEx",                                                                          \
      (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))                          \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream))  \
    X(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr memory, unsigned value, size_t count, CUstream stream))     \
    X(cuMemsetD2D8Async, "cuMemsetD2D8Async",                                                                        \
      (CUdeviceptr memory, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream))         \
    X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *to, CUdeviceptr from, size_t bytes, CUstream stream))        \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                                 \
    X(cuMemAllocAsync, "cuMemAllocAsync", (CUdeviceptr * memory, size_t bytes, CUstream stream))                     \
    X(cuMemFreeAsync, "cuMemFreeAsync", (CUdeviceptr memory, CUstream stream))                                       \
    X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                              \
      (void *map, int type, unsigned dims, void *address, const uint64_t *sizes, const uint64_t *strides,            \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))            \
    X(cuStreamIsCapturing, "cuStreamIsCapturing", (CUstream stream, int *status))                                    \
    X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                                             \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                                          \
    X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                                              \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                                     \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *milliseconds, CUevent start, CUevent end))

typedef struct bst_driver_api {
#define BST_DECLARE(name, symbol, arguments) CUresult(*name) arguments;
    BST_DRIVER_FUNCTIONS(BST_DECLARE)
#undef BST_DECLARE
} bst_driver_api;

#endif
