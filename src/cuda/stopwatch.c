/* stopwatch.c - rounds of measurements on a GPU.
 *
 * Before each candidate the second-level cache is filled with zeros, so that none finds what the one before it has left
 * there; that also keeps the device busy while the host queues the next one. A round is queued as a whole, then waited
 * for: within it the device never idles, as in training. */
#include "cuda/stopwatch.h"

static CUstream stream_of(const bst_exec *exec) { return exec ? exec->stream : NULL; }

bst_status bst__stopwatch_machine(const char *op, const bst_device *device, int library, bst_machine *out) {
    *out = (bst_machine){.arch = device->chip.arch,
                         .processors = device->chip.processors,
                         .driver = bst__driver_version(),
                         .library = library};
    BST_DRIVER_TRY(op, cuDeviceGetName, out->chip, sizeof out->chip, device->handle);
    return BST_OK;
}

bool bst__stopwatch_allowed(const bst_exec *exec) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    return bst__driver()->cuStreamIsCapturing(stream_of(exec), &status) == CUDA_SUCCESS &&
           status == CU_STREAM_CAPTURE_STATUS_NONE;
}

static size_t flush_bytes(const bst_stopwatch *s) { return 2 * (size_t)s->device->chip.l2; }

static bool begin(bst_stopwatch *s) {
    DLDevice device = {kDLCUDA, s->device->index};
    if (s->flush) return true;
    for (int i = 0; i < 2 * s->count; i++)
        if (!s->events[i] && bst__driver()->cuEventCreate(&s->events[i], 0) != CUDA_SUCCESS) return false;
    return bst__allocate(s->exec, s->op, device, flush_bytes(s), &s->flush) == BST_OK;
}

/* Queues one candidate between two events; what to write for it meanwhile. */
static float measure(bst_stopwatch *s, int candidate) {
    const bst_driver_api *driver = bst__driver();
    CUstream stream = stream_of(s->exec);
    if (driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)s->flush, 0, flush_bytes(s), stream) != CUDA_SUCCESS ||
        driver->cuEventRecord(s->events[2 * candidate], stream) != CUDA_SUCCESS)
        return BST_FAILED;
    bst_status status = s->queue(s->context, candidate);
    if (status != BST_OK) return status == BST_NO_MEMORY ? BST_NO_ROOM : BST_FAILED;
    return driver->cuEventRecord(s->events[2 * candidate + 1], stream) == CUDA_SUCCESS ? 0.0f : BST_FAILED;
}

bool bst__stopwatch_round(void *stopwatch, const bool *running, int first, float *ms) {
    bst_stopwatch *s = stopwatch;
    if (!begin(s)) return false;
    for (int i = 0; i < s->count; i++) {
        int candidate = (first + i) % s->count;
        ms[candidate] = running[candidate] ? measure(s, candidate) : BST_FAILED;
    }
    for (int i = 0; i < s->count; i++) {
        if (ms[i] < 0) continue;
        if (bst__driver()->cuEventSynchronize(s->events[2 * i + 1]) != CUDA_SUCCESS ||
            bst__driver()->cuEventElapsedTime(&ms[i], s->events[2 * i], s->events[2 * i + 1]) != CUDA_SUCCESS)
            ms[i] = BST_FAILED;
    }
    return true;
}

void bst__stopwatch_end(bst_stopwatch *s) {
    for (int i = 0; i < 2 * s->count; i++)
        if (s->events[i]) bst__driver()->cuEventDestroy(s->events[i]);
    bst__release(s->exec, (DLDevice){kDLCUDA, s->device->index}, s->flush);
}
