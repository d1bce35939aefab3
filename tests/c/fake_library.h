/* fake_library.h - loading fake_cuda.c in place of NVIDIA's three libraries. FAKE_CUDA is its path. */
#ifndef BST_FAKE_LIBRARY_H
#define BST_FAKE_LIBRARY_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_cuda.h"

/* Loaded under its soname, it is what the library finds for the driver. Ends the test where that fails. */
static inline fake_cuda *load_fake_cuda(void) {
    void *library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    fake_cuda *(*state)(void) = NULL;
    if (library) *(void **)&state = dlsym(library, "fake_cuda_state");
    if (!state) {
        printf("%s\n", dlerror());
        exit(EXIT_FAILURE);
    }
    setenv("BASTILE_NVRTC", FAKE_CUDA, 1);
    setenv("BASTILE_CUBLASLT", FAKE_CUDA, 1);
    return state();
}

#endif
