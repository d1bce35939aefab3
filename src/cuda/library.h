/* library.h - finding NVIDIA's libraries at run time: NVRTC and cuBLASLt. */
#ifndef BST_LIBRARY_H
#define BST_LIBRARY_H

#include "core/core.h"

#define BST_SONAMES 2

/* What to look for. `sonames` are in order of preference. */
typedef struct bst_library_name {
    const char *title; /* "NVRTC", for messages */
    const char
        *variable;       /* environment variable that may hold the file's path; nothing else is tried where it is set */
    const char *package; /* "nvidia-cuda-nvrtc", for messages */
    const char *sonames[BST_SONAMES];
} bst_library_name;

/* Opens a library: the file that the variable names; else one that the process has already loaded; else one in a folder
 * given to bst_add_library_path; else by the loader; else in /usr/local/cuda/lib64. BST_NO_CUDA says what was tried. */
bst_status bst__library_open(const char *op, const bst_library_name *name, void **handle);

/* One function to look up, and where its pointer goes. */
typedef struct bst_symbol {
    const char *name;
    void *slot; /* the address of a function pointer */
} bst_symbol;

/* Fills every slot. Returns the first name that the library lacks, or NULL. */
const char *bst__library_symbols(void *handle, const bst_symbol *symbols, size_t count);

#endif
