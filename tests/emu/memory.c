/* memory.c - the emulated chip and its memory, which is the host's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/compile_only.h"
#include "emu.h"

/* "CUDA C++ Programming Guide: Technical Specifications per Compute Capability", shared memory per block. Four
 * processors, so that a kernel that sizes its grid by them goes round its loop on small inputs. */
static const bst_chip chips[] = {
    {.arch = 80, .processors = 4, .shared_memory = 163 * 1024, .l2 = 50 << 20, .arguments = 32764},
    {.arch = 86, .processors = 4, .shared_memory = 99 * 1024, .l2 = 50 << 20, .arguments = 32764},
    {.arch = 89, .processors = 4, .shared_memory = 99 * 1024, .l2 = 50 << 20, .arguments = 32764},
    {.arch = 90, .processors = 4, .shared_memory = 227 * 1024, .l2 = 50 << 20, .arguments = 32764, .warpgroups = true},
    {.arch = 100, .processors = 4, .shared_memory = 227 * 1024, .l2 = 50 << 20, .arguments = 32764},
    {.arch = 120, .processors = 4, .shared_memory = 99 * 1024, .l2 = 50 << 20, .arguments = 32764},
};

bst_status bst__cuda_chip(const char *op, int device, bst_chip *out) {
    const char *text = getenv("BASTILE_EMU_ARCH");
    const int arch = text != NULL && *text != 0 ? atoi(text) : 90;
    if (device != 0) return bst__error(BST_CUDA, "%s: device %d; the emulator has device 0 only", op, device);
    for (size_t i = 0; i < sizeof chips / sizeof *chips; ++i) {
        if (chips[i].arch == arch) {
            *out = chips[i];
            return BST_OK;
        }
    }
    return bst__error(BST_NO_CUDA, "%s: BASTILE_EMU_ARCH=%s; needed is 80, 86, 89, 90, 100 or 120", op, text);
}

bst_status bst__cuda_zero(const bst_exec *exec, const char *op, int device, void *memory, size_t bytes) {
    (void)exec;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    bst_collector collector;
    if (bytes > 0 && !bst__compiling_only(&collector)) memset(memory, 0, bytes);
    return BST_OK;
}

bst_status bst__cuda_read(const bst_exec *exec, const char *op, int device, const void *from, void *to, size_t bytes) {
    (void)exec;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    bst_collector collector;
    memset(to, 0, bytes);
    if (bytes > 0 && !bst__compiling_only(&collector)) memcpy(to, from, bytes);
    return BST_OK;
}

/* Of exactly the asked size, for ASan; filled with NaN in every type. */
bst_status bst__cuda_allocate(const bst_exec *exec, const char *op, int device, size_t bytes, void **out) {
    (void)exec;
    bst_chip chip;
    *out = NULL;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    if (bytes == 0) return BST_OK;
    if (posix_memalign(out, 256, bytes) != 0) {
        *out = NULL;
        return bst__error(BST_NO_MEMORY, "%s: %zu bytes of workspace could not be allocated", op, bytes);
    }
    memset(*out, 0xff, bytes);
    return BST_OK;
}

void bst__cuda_release(const bst_exec *exec, int device, void *memory) {
    (void)exec, (void)device;
    free(memory);
}
