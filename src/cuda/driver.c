/* driver.c - the CUDA driver, its devices and contexts.
 *
 * Nothing is opened before the first call that names a device, so that a process may load the library, fork, and use
 * the GPU in the child. What fails is tried again at the next call: the driver may be short of descriptors or memory
 * for a moment only. After the first success every function here is free of locks. */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "cuda/fork.h"
#include "cuda/library.h"

enum { OLDEST = 12000 };         /* cuLibraryLoadData: code that is independent of contexts */
enum { WIDE_ARGUMENTS = 12010 }; /* kernels with more than 4 KiB of arguments */

/* ABANDONED: in a child that was forked while another thread of its parent was OPENING. */
typedef enum progress { CLOSED, OPENING, OPEN, ABANDONED } progress;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bst_driver_api api;
static int version;
static progress opened; /* under the lock */

static bst_device devices[BST_MAX_DEVICES];
static atomic_bool known[BST_MAX_DEVICES];

static const char spawn[] = "; a process that has used CUDA cannot use it again in a fork: start it by spawn";

static void in_child(void) {
    bst__free_lock(&lock);
    if (opened == OPENING) opened = ABANDONED;
}
BST_IN_CHILD(in_child)

const bst_driver_api *bst__driver(void) { return &api; }

int bst__driver_version(void) { return version; }

static const char *name_of(CUresult result) {
    const char *name = NULL;
    return api.cuGetErrorName && api.cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "unknown error";
}

/* What to do about an error, where there is more to say than its own text. */
static const char *advice_on(CUresult result) { return result == CUDA_ERROR_NOT_INITIALIZED ? spawn : ""; }

bst_status bst__driver_error(const char *op, const char *call, CUresult result) {
    const char *text = NULL;
    if (api.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) text = "no text";
    bst_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? BST_NO_MEMORY : BST_CUDA;
    return bst__error(status, "%s: %s failed: %s (%d, %s)%s", op, call, name_of(result), (int)result, text,
                      advice_on(result));
}

/* Under the lock. */
static bst_status open_driver(const char *op) {
    static void *handle;
    if (!handle) handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        return bst__error(BST_NO_CUDA,
                          "%s: the CUDA driver could not be opened (%s); a GPU needs NVIDIA's driver, CUDA 12.0 or "
                          "later. CPU tensors work without it",
                          op, why ? why : "no reason given");
    }
    int (*get_version)(int *) = NULL;
    bst_symbol first = {"cuDriverGetVersion", &get_version};
    if (bst__library_symbols(handle, &first, 1) || get_version(&version) != CUDA_SUCCESS || version < OLDEST)
        return bst__error(BST_NO_CUDA,
                          "%s: the CUDA driver is too old: it serves CUDA %d.%d, and 12.0 or later is needed. CPU "
                          "tensors work without it",
                          op, version / 1000, version % 1000 / 10);
    const bst_symbol symbols[] = {
#define SYMBOL(name, symbol, arguments) {symbol, &api.name},
        BST_DRIVER_FUNCTIONS(SYMBOL)
#undef SYMBOL
    };
    const char *missing = bst__library_symbols(handle, symbols, sizeof symbols / sizeof *symbols);
    if (missing)
        return bst__error(BST_NO_CUDA, "%s: the CUDA driver (libcuda.so.1, CUDA %d.%d) lacks %s", op, version / 1000,
                          version % 1000 / 10, missing);
    CUresult result = api.cuInit(0);
    if (result == CUDA_SUCCESS) return BST_OK;
    return bst__error(BST_NO_CUDA, "%s: the CUDA driver does not start: %s%s", op, name_of(result), advice_on(result));
}

/* Under the lock. A driver that was about to start when this process was forked may hold locks of its own for ever. */
static bst_status need_driver(const char *op) {
    if (opened == OPEN) return BST_OK;
    if (opened == ABANDONED)
        return bst__error(BST_CUDA, "%s: the CUDA driver was about to start when this process was forked%s", op, spawn);
    opened = OPENING;
    bst_status status = open_driver(op);
    opened = status == BST_OK ? OPEN : CLOSED;
    return status;
}

/* What a kernel's configuration depends on. The caller holds the lock. */
static bst_status describe(const char *op, int index, bst_device *device) {
    int count = 0, major = 0, minor = 0, l2 = 0;
    BST_DRIVER_TRY(op, cuDeviceGetCount, &count);
    if (index < 0 || index >= count || index >= BST_MAX_DEVICES)
        return bst__error(BST_INVALID, "%s: device cuda:%d does not exist; this process sees %d", op, index, count);
    device->index = index;
    BST_DRIVER_TRY(op, cuDeviceGet, &device->handle, index);
    bst_chip *chip = &device->chip;
    const struct {
        int attribute, *value;
    } wanted[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &chip->processors},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &chip->shared_memory},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &l2},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        BST_DRIVER_TRY(op, cuDeviceGetAttribute, wanted[i].value, wanted[i].attribute, device->handle);
    size_t memory = 0;
    BST_DRIVER_TRY(op, cuDeviceTotalMem, &memory, device->handle);
    chip->arch = major * 10 + minor;
    chip->l2 = l2;
    chip->memory = (int64_t)memory;
    chip->warpgroups = chip->arch == 90;
    chip->arguments = version < WIDE_ARGUMENTS ? 4096 : 32764;
    if (chip->arch >= 80) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: device cuda:%d is of compute capability %d.%d; 8.0 or later is needed", op,
                      index, major, minor);
}

bst_status bst__device(const char *op, int index, bst_device **out) {
    if (index >= 0 && index < BST_MAX_DEVICES && atomic_load_explicit(&known[index], memory_order_acquire)) {
        *out = &devices[index];
        return BST_OK;
    }
    pthread_mutex_lock(&lock);
    bst_device found = {0};
    bst_status status = need_driver(op);
    if (status == BST_OK) status = describe(op, index, &found);
    if (status == BST_OK && !known[index]) {
        devices[index].index = found.index;
        devices[index].handle = found.handle;
        devices[index].chip = found.chip;
        atomic_store_explicit(&known[index], true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    if (status == BST_OK) *out = &devices[index];
    return status;
}

/* The primary context is the one that every CUDA library of the process shares. It is kept until the process ends. */
static bst_status retain(const char *op, bst_device *device, CUcontext *out) {
    pthread_mutex_lock(&lock);
    CUcontext context = atomic_load(&device->context);
    CUresult result = context ? CUDA_SUCCESS : api.cuDevicePrimaryCtxRetain(&context, device->handle);
    if (result == CUDA_SUCCESS) atomic_store(&device->context, context);
    pthread_mutex_unlock(&lock);
    *out = context;
    return result == CUDA_SUCCESS ? BST_OK : bst__driver_error(op, "cuDevicePrimaryCtxRetain", result);
}

bst_status bst__enter(const char *op, int index, bst_scope *scope) {
    bst_device *device;
    scope->pushed = false;
    BST_TRY(bst__device(op, index, &device));
    scope->device = device;
    CUcontext wanted = atomic_load_explicit(&device->context, memory_order_acquire), current = NULL;
    if (!wanted) BST_TRY(retain(op, device, &wanted));
    BST_DRIVER_TRY(op, cuCtxGetCurrent, &current);
    if (current == wanted) return BST_OK;
    BST_DRIVER_TRY(op, cuCtxPushCurrent, wanted);
    scope->pushed = true;
    return BST_OK;
}

void bst__leave(bst_scope scope) {
    CUcontext popped;
    if (scope.pushed) api.cuCtxPopCurrent(&popped);
}

int bst__capture_relax(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    api.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void bst__capture_restore(int mode) { api.cuThreadExchangeStreamCaptureMode(&mode); }
