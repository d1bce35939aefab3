/* source.h - the device code inside the library: lookup, and what a kernel's file includes. */
#ifndef BST_SOURCE_H
#define BST_SOURCE_H

#include "cuda/cuda.h"

#define BST_MAX_REACHED 32

/* A file and all embedded files that it includes, directly or not. The file itself is first. */
typedef struct bst_reached {
    int count;
    char *names[BST_MAX_REACHED];       /* as the #include spells it; owned */
    const char *texts[BST_MAX_REACHED]; /* embedded */
} bst_reached;

/* BST_COMPILE where the file is not embedded or includes too many. Ended by bst__reached_free, also after a failure. */
bst_status bst__reach(const char *op, const char *file, bst_reached *out);
void bst__reached_free(bst_reached *reached);

#endif
