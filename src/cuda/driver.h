/* driver.h - the CUDA driver, opened at the first use of a GPU: its functions, the devices, the current context. */
#ifndef BST_DRIVER_H
#define BST_DRIVER_H

#include <stdatomic.h>

#include "cuda/cuda.h"
#include "cuda/driver_api.h"

/* Device indices are below this. */
#define BST_MAX_DEVICES 64

typedef struct bst_device {
    int index;
    CUdevice handle;
    bst_chip chip;
    _Atomic(CUcontext) context; /* the primary context, once a call has needed it */
} bst_device;

/* The driver's functions; to be called only after bst__device has succeeded once. */
const bst_driver_api *bst__driver(void);
/* The driver's CUDA version as it writes it, 12040 for 12.4. Likewise. */
int bst__driver_version(void);
/* The device behind an index. Opens the driver at the first call; takes no lock once a device is known. */
bst_status bst__device(const char *op, int index, bst_device **out);
/* "norm_forward: cuLaunchKernel: CUDA_ERROR_... (text)". */
bst_status bst__driver_error(const char *op, const char *call, CUresult result);

/* A device whose primary context is current on this thread. `pushed`: leaving has to restore another one. */
typedef struct bst_scope {
    bst_device *device;
    bool pushed;
} bst_scope;

bst_status bst__enter(const char *op, int index, bst_scope *scope);
void bst__leave(bst_scope scope);

/* Loading code and creating handles are not allowed while a stream of this thread is being captured, unless the thread
 * says that it knows what it does: it does, for none of this work belongs into the graph. */
int bst__capture_relax(void);
void bst__capture_restore(int mode);

/* Returns a driver error from the calling function unless the call succeeds. */
#define BST_DRIVER_TRY(op, name, ...)                                              \
    do {                                                                           \
        CUresult bst__r = bst__driver()->name(__VA_ARGS__);                        \
        if (bst__r != CUDA_SUCCESS) return bst__driver_error((op), #name, bst__r); \
    } while (0)

#endif
