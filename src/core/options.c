/* options.c - see options.h. */
#include "core/options.h"

#include <string.h>

/* No struct of ours comes near. What is larger was never set, and reading so far might leave the caller's memory. */
enum { MOST_BYTES = 4096 };

bst_status bst__options(const char *op, const char *name, const void *given, void *own, size_t bytes) {
    memset(own, 0, bytes);
    memcpy(own, &bytes, sizeof bytes);
    if (!given) return BST_OK;
    size_t size;
    memcpy(&size, given, sizeof size);
    if (size < sizeof size || size > MOST_BYTES)
        return bst__error(BST_INVALID, "%s: %s->size is %zu; it must be set to sizeof *%s, here %zu", op, name, size,
                          name, bytes);
    for (size_t i = bytes; i < size; i++)
        if (((const unsigned char *)given)[i])
            return bst__error(BST_UNSUPPORTED,
                              "%s: %s has %zu bytes, of which %s knows %zu, and byte %zu is not 0; a newer library is "
                              "needed for what is set there",
                              op, name, size, "bastile " BST_VERSION, bytes, i);
    size_t known = size < bytes ? size : bytes;
    memcpy((char *)own + sizeof size, (const char *)given + sizeof size, known - sizeof size);
    return BST_OK;
}
