/* fake_cuda.c - libcuda.so.1, NVRTC and cuBLASLt in one, for a machine without a GPU: nothing is computed, but each
 * product takes the time that the test says, on a clock that events read. Two devices of different names. */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cublaslt_api.h"
#include "cuda/driver_api.h"
#include "cuda/nvrtc_api.h"

#define FAKE __attribute__((visibility("default")))

enum { INVALID_VALUE = 1, FAILED = 13, NO_CONTEXT = 201 };

static fake_cuda state;
static double clock_ms;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of both */

FAKE fake_cuda *fake_cuda_state(void);
fake_cuda *fake_cuda_state(void) { return &state; }

/* Exported under the name that the library looks up, with the type that it declares. */
#define DEFINE(symbol, arguments)   \
    FAKE CUresult symbol arguments; \
    CUresult symbol arguments

static void be_within(const char *function) {
    if (state.within) state.within(function);
}

/* What a function of NVRTC returns where nothing is wrong with its arguments. */
static nvrtcResult result_of(const char *function) {
    be_within(function);
    return state.failing && strcmp(state.failing, function) == 0 ? state.failure : NVRTC_SUCCESS;
}

/* ---- the driver -------------------------------------------------------------------------------------------------- */

struct CUevent_st {
    double ms;
};

DEFINE(cuInit, (unsigned flags)) {
    be_within("cuInit");
    return flags ? INVALID_VALUE : state.start_error;
}

DEFINE(cuDriverGetVersion, (int *version)) {
    *version = 13000;
    return CUDA_SUCCESS;
}

DEFINE(cuGetErrorName, (CUresult error, const char **name)) {
    *name = error ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS";
    return CUDA_SUCCESS;
}

DEFINE(cuGetErrorString, (CUresult error, const char **text)) { return cuGetErrorName(error, text); }

DEFINE(cuDeviceGetCount, (int *count)) {
    *count = 2;
    return CUDA_SUCCESS;
}

DEFINE(cuDeviceGet, (CUdevice * device, int index)) {
    *device = index;
    return CUDA_SUCCESS;
}

DEFINE(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device)) {
    (void)device;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            *value = 132;
            break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
            *value = 1 << 20;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = 9;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            *value = 0;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = 232448;
            break;
        default:
            return INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

DEFINE(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device)) {
    (void)device;
    *bytes = (size_t)80 << 30;
    return CUDA_SUCCESS;
}

DEFINE(cuDeviceGetName, (char *name, int bytes, CUdevice device)) {
    snprintf(name, (size_t)bytes, "Fake %d", device);
    return CUDA_SUCCESS;
}

DEFINE(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device)) {
    be_within("cuDevicePrimaryCtxRetain");
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}

static _Thread_local CUcontext contexts[4];
static _Thread_local int depth;

static CUcontext current(void) { return depth ? contexts[depth - 1] : NULL; }

DEFINE(cuCtxGetCurrent, (CUcontext * context)) {
    *context = current();
    return state.forked ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

DEFINE(cuCtxPushCurrent_v2, (CUcontext context)) {
    if (depth == (int)(sizeof contexts / sizeof *contexts)) return INVALID_VALUE;
    contexts[depth++] = context;
    return CUDA_SUCCESS;
}

DEFINE(cuCtxPopCurrent_v2, (CUcontext * context)) {
    *context = current();
    if (!depth) return INVALID_VALUE;
    depth--;
    return CUDA_SUCCESS;
}

DEFINE(cuThreadExchangeStreamCaptureMode, (int *mode)) {
    static _Thread_local int now;
    int before = now;
    now = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* Code is the options that it was compiled with. */
DEFINE(cuLibraryLoadData, (CUlibrary * library, const void *code, int *jit_options, void **jit_values,
                           unsigned jit_count, int *options, void **values, unsigned count)) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (CUlibrary)(void *)strdup(code);
    return CUDA_SUCCESS;
}

DEFINE(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name)) {
    (void)name;
    *kernel = (CUkernel)(void *)library;
    return CUDA_SUCCESS;
}

DEFINE(cuLibraryUnload, (CUlibrary library)) {
    free(library);
    return CUDA_SUCCESS;
}

DEFINE(cuKernelGetFunction, (CUfunction * function, CUkernel kernel)) {
    *function = (CUfunction)(void *)kernel;
    return CUDA_SUCCESS;
}

DEFINE(cuFuncGetAttribute, (int *value, int attribute, CUfunction function)) {
    (void)attribute, (void)function;
    *value = 0;
    return CUDA_SUCCESS;
}

DEFINE(cuFuncSetAttribute, (CUfunction function, int attribute, int value)) {
    (void)function, (void)attribute, (void)value;
    return CUDA_SUCCESS;
}

static CUresult launch(unsigned grid) {
    if (state.refuses) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    state.last_device = (int)(uintptr_t)current() - 1;
    state.last_grid = grid;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static void count_live(int more) {
    pthread_mutex_lock(&lock);
    state.live += more;
    pthread_mutex_unlock(&lock);
}

static double advance(double ms) {
    pthread_mutex_lock(&lock);
    double now = clock_ms += ms;
    pthread_mutex_unlock(&lock);
    return now;
}

DEFINE(cuOccupancyMaxActiveClusters, (int *clusters, CUfunction function, const CUlaunchConfig *config)) {
    (void)function, (void)config;
    state.occupancies++;
    *clusters = state.clusters;
    return CUDA_SUCCESS;
}

DEFINE(cuLaunchKernel,
       (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
        unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra)) {
    (void)function, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared;
    (void)stream, (void)parameters, (void)extra;
    return launch(grid_x);
}

DEFINE(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)) {
    (void)function, (void)parameters, (void)extra;
    return launch(config->gridDimX);
}

DEFINE(cuMemsetD8Async, (CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream)) {
    (void)stream;
    memset((void *)(uintptr_t)memory, value, bytes); /* so that a sanitizer sees what is not ours */
    advance(0.01);
    return CUDA_SUCCESS;
}

DEFINE(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream)) {
    (void)stream;
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    advance(0.01);
    return CUDA_SUCCESS;
}

DEFINE(cuStreamSynchronize, (CUstream stream)) {
    (void)stream;
    state.waits++;
    return CUDA_SUCCESS;
}

DEFINE(cuMemsetD32Async, (CUdeviceptr memory, unsigned value, size_t count, CUstream stream)) {
    return cuMemsetD8Async(memory, (unsigned char)value, 4 * count, stream);
}

DEFINE(cuMemsetD2D8Async,
       (CUdeviceptr memory, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream)) {
    (void)memory, (void)pitch, (void)value, (void)width, (void)height, (void)stream;
    return CUDA_SUCCESS;
}

DEFINE(cuMemAllocAsync, (CUdeviceptr * memory, size_t bytes, CUstream stream)) {
    (void)stream;
    void *got = state.out_of_memory ? NULL : malloc(bytes);
    if (!got) return CUDA_ERROR_OUT_OF_MEMORY;
    *memory = (CUdeviceptr)(uintptr_t)got;
    count_live(1);
    return CUDA_SUCCESS;
}

DEFINE(cuMemFreeAsync, (CUdeviceptr memory, CUstream stream)) {
    (void)stream;
    free((void *)(uintptr_t)memory);
    count_live(-1);
    return CUDA_SUCCESS;
}

DEFINE(cuTensorMapEncodeTiled,
       (void *map, int type, unsigned dims, void *address, const uint64_t *sizes, const uint64_t *strides,
        const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill)) {
    (void)type, (void)sizes, (void)box, (void)steps;
    for (unsigned i = 0; i + 1 < dims; i++)
        if (strides[i] % 16) return INVALID_VALUE;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    memcpy(map, &address, sizeof address);
    return current() ? CUDA_SUCCESS : NO_CONTEXT;
}

DEFINE(cuStreamIsCapturing, (CUstream stream, int *status)) {
    (void)stream;
    *status = state.capturing;
    return CUDA_SUCCESS;
}

DEFINE(cuEventCreate, (CUevent * event, unsigned flags)) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    count_live(1);
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DEFINE(cuEventDestroy_v2, (CUevent event)) {
    free(event);
    count_live(-1);
    return CUDA_SUCCESS;
}

DEFINE(cuEventRecord, (CUevent event, CUstream stream)) {
    (void)stream;
    event->ms = advance(0);
    return CUDA_SUCCESS; /* under capture too: it goes into the graph */
}

DEFINE(cuEventSynchronize, (CUevent event)) {
    (void)event;
    state.waits++;
    return state.capturing ? INVALID_VALUE : CUDA_SUCCESS;
}

DEFINE(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end)) {
    *milliseconds = (float)(end->ms - start->ms);
    return CUDA_SUCCESS;
}

/* ---- NVRTC ------------------------------------------------------------------------------------------------------- */

struct nvrtcProgram_st {
    char options[512];
    const char *log; /* NULL: none */
};

FAKE const char *nvrtcGetErrorString(nvrtcResult result);
const char *nvrtcGetErrorString(nvrtcResult result) { return result ? "an error" : "no error"; }

DEFINE(nvrtcVersion, (int *major, int *minor)) {
    *major = state.nvrtc_major ? state.nvrtc_major : 13, *minor = 0;
    return result_of("nvrtcVersion");
}

DEFINE(nvrtcGetNumSupportedArchs, (int *count)) {
    *count = 1;
    return NVRTC_SUCCESS;
}

DEFINE(nvrtcGetSupportedArchs, (int *archs)) {
    *archs = 90;
    return NVRTC_SUCCESS;
}

DEFINE(nvrtcCreateProgram, (nvrtcProgram * program, const char *source, const char *name, int header_count,
                            const char *const *headers, const char *const *header_names)) {
    (void)source, (void)name, (void)header_count, (void)headers, (void)header_names;
    nvrtcResult result = result_of("nvrtcCreateProgram");
    if (result == NVRTC_SUCCESS) *program = calloc(1, sizeof **program);
    return result;
}

DEFINE(nvrtcDestroyProgram, (nvrtcProgram * program)) {
    free(*program);
    return NVRTC_SUCCESS;
}

/* -DBROKEN=1 does not compile. */
DEFINE(nvrtcCompileProgram, (nvrtcProgram program, int option_count, const char *const *options)) {
    for (int i = 0; i < option_count; i++) {
        size_t used = strlen(program->options);
        snprintf(program->options + used, sizeof program->options - used, "%s ", options[i]);
    }
    if (strstr(program->options, "-DBROKEN=1 ")) {
        program->log = "toy.cu(1): error: BROKEN is 1\n";
        return NVRTC_ERROR_COMPILATION;
    }
    nvrtcResult result = result_of("nvrtcCompileProgram");
    if (result != NVRTC_SUCCESS) program->log = state.log;
    return result;
}

DEFINE(nvrtcGetCUBINSize, (nvrtcProgram program, size_t *bytes)) {
    *bytes = strlen(program->options) + 1;
    return result_of("nvrtcGetCUBINSize");
}

DEFINE(nvrtcGetCUBIN, (nvrtcProgram program, char *cubin)) {
    memcpy(cubin, program->options, strlen(program->options) + 1);
    return result_of("nvrtcGetCUBIN");
}

DEFINE(nvrtcGetProgramLogSize, (nvrtcProgram program, size_t *bytes)) {
    *bytes = program->log ? strlen(program->log) + 1 : 0;
    return NVRTC_SUCCESS;
}

DEFINE(nvrtcGetProgramLog, (nvrtcProgram program, char *log)) {
    memcpy(log, program->log, strlen(program->log) + 1);
    return NVRTC_SUCCESS;
}

/* ---- cuBLASLt ---------------------------------------------------------------------------------------------------- */

FAKE const char *cublasLtGetStatusString(cublasStatus_t status);
const char *cublasLtGetStatusString(cublasStatus_t status) { return status ? "an error" : "success"; }

FAKE size_t cublasLtGetVersion(void);
size_t cublasLtGetVersion(void) { return 130100; }

DEFINE(cublasLtCreate, (cublasLtHandle_t * handle)) {
    be_within("cublasLtCreate");
    *handle = (cublasLtHandle_t)(void *)&state;
    return CUBLAS_STATUS_SUCCESS;
}

/* Descriptors are told apart by nobody. */
#define MAKES(symbol, type, ...)                 \
    DEFINE(symbol, (type * made, __VA_ARGS__)) { \
        *made = (type)(void *)&state;            \
        return CUBLAS_STATUS_SUCCESS;            \
    }
#define TAKES(symbol, ...) \
    DEFINE(symbol, (__VA_ARGS__)) { return CUBLAS_STATUS_SUCCESS; }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
MAKES(cublasLtMatmulDescCreate, cublasLtMatmulDesc_t, int compute_type, int scale_type)
TAKES(cublasLtMatmulDescDestroy, cublasLtMatmulDesc_t desc)
TAKES(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t desc, int attribute, const void *value, size_t bytes)
MAKES(cublasLtMatrixLayoutCreate, cublasLtMatrixLayout_t, int type, uint64_t rows, uint64_t columns, int64_t ld)
TAKES(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayout_t layout)
TAKES(cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreference_t preference)
TAKES(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulPreference_t preference, int attribute, const void *value,
      size_t bytes)
#pragma GCC diagnostic pop

DEFINE(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference)) {
    *preference = (cublasLtMatmulPreference_t)(void *)&state;
    return CUBLAS_STATUS_SUCCESS;
}

DEFINE(cublasLtMatmulAlgoGetHeuristic,
       (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
        cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,
        cublasLtMatmulHeuristicResult_t *results, int *count)) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    for (*count = 0; *count < wanted && state.product_ms[*count] != 0; ++*count)
        results[*count] =
            (cublasLtMatmulHeuristicResult_t){.algo = {{(uint64_t)*count}}, .workspaceSize = 64 * ((size_t)*count + 1)};
    return CUBLAS_STATUS_SUCCESS;
}

DEFINE(cublasLtMatmulAlgoConfigGetAttribute,
       (const cublasLtMatmulAlgo_t *algo, int attribute, void *value, size_t bytes, size_t *written)) {
    (void)attribute;
    uint32_t tile = 500 + (uint32_t)algo->data[0];
    memcpy(value, &tile, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

DEFINE(cublasLtMatmul,
       (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
        cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
        const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
        const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, CUstream stream)) {
    (void)handle, (void)desc, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c;
    (void)c_layout, (void)d, (void)d_layout, (void)workspace, (void)workspace_bytes, (void)stream;
    double ms = state.product_ms[algo->data[0]];
    if (ms < 0) return FAILED;
    pthread_mutex_lock(&lock);
    clock_ms += ms;
    state.products++;
    state.last_algorithm = (int)algo->data[0];
    pthread_mutex_unlock(&lock);
    return CUBLAS_STATUS_SUCCESS;
}
