/* memory.c - workspace by the caller's allocator or the default one. */
#include <stdlib.h>
#include <string.h>

#include "core/core.h"
#include "cuda/cuda.h"

bst_status bst__allocate(const bst_exec *exec, const char *op, DLDevice device, size_t bytes, void **out) {
    *out = NULL;
    if (!bytes) return BST_OK;
    if (exec && exec->allocate)
        *out = exec->allocate(exec->user, device, bytes);
    else if (device.device_type == kDLCUDA)
        return bst__cuda_allocate(exec, op, device.device_id, bytes, out);
    else
        *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*out) return BST_OK;
    return bst__error(BST_NO_MEMORY, "%s: %zu bytes of workspace could not be allocated", op, bytes);
}

void bst__release(const bst_exec *exec, DLDevice device, void *memory) {
    if (!memory) return;
    if (exec && exec->allocate) {
        if (exec->release) exec->release(exec->user, device, memory);
    } else if (device.device_type == kDLCUDA) {
        bst__cuda_release(exec, device.device_id, memory);
    } else {
        free(memory);
    }
}

bst_status bst__zero(const bst_exec *exec, const char *op, const bst_view *v) {
    size_t bytes = (size_t)(v->count * bst__dtype_size(v->dtype));
    if (!bytes) return BST_OK;
    if (v->device.device_type == kDLCUDA) return bst__cuda_zero(exec, op, v->device.device_id, v->data, bytes);
    memset(v->data, 0, bytes);
    return BST_OK;
}
