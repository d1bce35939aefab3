/* nvrtc.h - compiling a kernel for one chip by NVRTC, opened at the first use. */
#ifndef BST_NVRTC_H
#define BST_NVRTC_H

#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "cuda/source.h"

/* The options of one compilation. */
typedef struct bst_options {
    int count;
    const char *list[BST_MAX_MACROS + 4]; /* into `storage` */
    char joined[2048];                    /* the same in one line, for people and for the cache's key */
    char storage[2048];
} bst_options;

/* Writes a kernel's options for a chip. `report`: ptxas says in the log what registers and spills it made. */
bst_status bst__nvrtc_options(const char *op, const bst_kernel *kernel, int arch, const int64_t *values, bool report,
                              bst_options *out);
/* Opens NVRTC where that has not been done, and says its version; nothing is written where that fails. */
bst_status bst__nvrtc_version(const char *op, int *major, int *minor);
/* Compiles texts->texts[0]. BST_COMPILE, with the first lines of the log in the message, where the source is at
 * fault, and only there: it would fail again. BST_NO_MEMORY and BST_CUDA where NVRTC fails for a reason of its own;
 * BST_NO_CUDA where it is missing or knows neither the chip nor an option. `log`: freed by the caller; NULL where it is
 * not wanted. */
bst_status bst__nvrtc_compile(const char *op, const bst_kernel *kernel, int arch, const bst_options *options,
                              const bst_texts *texts, bst_blob *cubin, char **log);

#endif
