/* source.h - the device code inside the library, as NVRTC takes it: a kernel's file, and headers from memory. */
#ifndef BST_SOURCE_H
#define BST_SOURCE_H

#include "cuda/cuda.h"

#define BST_MAX_TEXTS 64

/* A kernel's file, first, and every embedded header, whether or not it includes it: to hand over one more costs
 * nothing, and what an #include means is left to the compiler. */
typedef struct bst_texts {
    int count;
    const char *names[BST_MAX_TEXTS], *texts[BST_MAX_TEXTS];
} bst_texts;

/* BST_COMPILE where the file is not embedded. */
bst_status bst__texts(const char *op, const char *file, bst_texts *out);

#endif
