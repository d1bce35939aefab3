/* cache.h - compiled kernels and measured choices kept on disk, so that each is made once a machine and not once a
 * process. */
#ifndef BST_CACHE_H
#define BST_CACHE_H

#include "core/core.h"
#include "cuda/hash.h"

/* Bytes from malloc, freed by whoever holds them last. */
typedef struct bst_blob {
    void *data;
    size_t bytes;
} bst_blob;

/* What an entry holds: the end of its file's name. */
#define BST_CACHE_CODE   ".cubin"
#define BST_CACHE_CHOICE ".choice"

typedef bst_status (*bst_cache_make)(void *context, bst_blob *out);

/* The entry of this key, made by `make` where the disk has none that can be trusted; of processes that ask at once, one
 * makes it. A cache that cannot be used costs time, never a failure: the only failures are make's. */
bst_status bst__cache_get(const bst_digest *key, const char *kind, bst_cache_make make, void *context, bst_blob *out);
/* Forgets an entry that was intact and yet could not be used. */
void bst__cache_drop(const bst_digest *key, const char *kind);
/* Forgets every entry of a kind; how many there were. */
int bst__cache_clear(const char *kind);
/* Why this thread's last bst__cache_get could not keep its entry on disk; "" where it could. */
const char *bst__cache_reason(void);

#endif
