/* jit.h - the table of compiled kernels. */
#ifndef BST_JIT_H
#define BST_JIT_H

#include "cuda/compile_only.h"
#include "cuda/driver.h"

typedef struct bst_jit_entry bst_jit_entry;

/* The function of a launch's kernel on a device, ready for `launch->shared` and `launch->cluster`. The device's context
 * is current. `most_blocks`: of a launch that is `resident`, else UINT32_MAX. A kernel is compiled once a process
 * (other threads that want it wait) and, by the cache, once a machine; where it does not compile, every later call gets
 * the same error without trying again. */
bst_status bst__jit_function(const char *op, const bst_device *device, const bst_launch *launch, CUfunction *out,
                             unsigned *most_blocks);

/* Compiles a launch's kernel for the collector's chip, reports it, and loads nothing; once for each kernel. Ahead: for
 * this device's chip into the table, or for a named one into the cache. */
bst_status bst__jit_compile_only(const char *op, const bst_collector *collector, int device, const bst_launch *launch);

#endif
