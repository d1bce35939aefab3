/* launch.c - bst__cuda_launch on the CPU: refuses what a driver would refuse, then runs the launch to its end. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/compile_only.h"
#include "emu.h"

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* "CUDA C++ Programming Guide: Compute Capabilities", and CUDA's limit on the bytes of arguments. */
static bst_status check(const char *op, const bst_launch *l, const bst_chip *chip, size_t argument_bytes) {
    const char *entry = l->kernel->entry;
    const unsigned cluster = l->cluster > 1 ? l->cluster : 1;
    const unsigned long long blocks = (unsigned long long)l->grid_x * (l->grid_y ? l->grid_y : 1);
    if (l->block < 1 || l->block > 1024) {
        return bst__error(BST_CUDA, "%s: kernel %s with blocks of %u threads; at most 1024", op, entry, l->block);
    }
    if (l->grid_x > 0x7fffffffu || l->grid_y > 65535) {
        return bst__error(BST_CUDA, "%s: kernel %s with a grid of %u x %u blocks; at most 2147483647 x 65535", op,
                          entry, l->grid_x, l->grid_y);
    }
    if (blocks > 1u << 24) {
        return bst__error(BST_CUDA, "%s: kernel %s with %llu blocks; the emulator runs at most 16777216", op, entry,
                          blocks);
    }
    if (l->shared > (unsigned)chip->shared_memory) {
        return bst__error(BST_CUDA, "%s: kernel %s with %u bytes of dynamic shared memory; sm_%d has %d", op, entry,
                          l->shared, chip->arch, chip->shared_memory);
    }
    if (cluster > 1 && chip->arch < 90) {
        return bst__error(BST_CUDA, "%s: kernel %s with clusters of %u; sm_%d has none", op, entry, cluster,
                          chip->arch);
    }
    if (cluster > EMU_MOST_CLUSTER || l->grid_x % cluster != 0) {
        return bst__error(BST_CUDA, "%s: kernel %s with clusters of %u in a grid of %u; at most %d, dividing the grid",
                          op, entry, cluster, l->grid_x, EMU_MOST_CLUSTER);
    }
    if (argument_bytes > (size_t)chip->arguments) {
        return bst__error(BST_CUDA, "%s: kernel %s with %zu bytes of arguments; at most %d", op, entry, argument_bytes,
                          chip->arguments);
    }
    return BST_OK;
}

static bst_status load_and_run(const char *op, const bst_launch *launch, const bst_chip *chip, const void *arguments,
                               size_t bytes) {
    const emu_kernel *kernel;
    BST_TRY(emu_load(op, launch, &kernel));
    if (kernel->argument_bytes != bytes) {
        return bst__error(BST_CUDA, "%s: kernel %s takes %lu bytes of arguments, given were %zu", op,
                          launch->kernel->entry, kernel->argument_bytes, bytes);
    }
    if (launch->block > kernel->threads) {
        return bst__error(BST_CUDA, "%s: kernel %s is bounded to %u threads, launched with %u", op,
                          launch->kernel->entry, kernel->threads, launch->block);
    }
    /* A copy of its own size, so that ASan sees what reads beyond it; the caller's may go after a launch. */
    void *copy = malloc(bytes);
    if (copy == NULL) return bst__error(BST_NO_MEMORY, "%s: no memory for a kernel's arguments", op);
    memcpy(copy, arguments, bytes);
    const bst_status status = emu_run(op, launch, chip, kernel, copy);
    free(copy);
    return status;
}

bst_status bst__cuda_launch(const bst_exec *exec, const char *op, int device, const bst_launch *launch,
                            const void *arguments, size_t bytes) {
    (void)exec;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, device, &chip));
    if (launch->grid_x == 0) return BST_OK;
    bst_collector collector;
    const emu_kernel *kernel;
    const bool runs = !bst__compiling_only(&collector);
    if (runs) BST_TRY(check(op, launch, &chip, bytes));
    pthread_mutex_lock(&one_at_a_time);
    const bst_status status = runs ? load_and_run(op, launch, &chip, arguments, bytes) : emu_load(op, launch, &kernel);
    pthread_mutex_unlock(&one_at_a_time);
    return status;
}
