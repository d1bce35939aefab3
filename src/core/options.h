/* options.h - structs that callers fill, and that may grow: the first member is `size_t size`, which the caller sets to
 * the struct's sizeof as he compiled it, and every other member means the usual where it is zero.
 *
 * A new member goes to the end, and never into what was padding before: there it would be overlooked by a library that
 * does not know it. */
#ifndef BST_OPTIONS_H
#define BST_OPTIONS_H

#include "core/core.h"

/* Reads `given`, the caller's argument `name`, into the struct at `own`, of `bytes` bytes as we know it: members that the
 * caller's struct does not have are zero, and own's size is `bytes`. NULL given: all members are zero. BST_INVALID where
 * its size is not set; BST_UNSUPPORTED where it sets a member that this library does not know.
 *
 *     bst_glu_options own;
 *     BST_TRY(bst__options(op, "options", options, &own, sizeof own)); */
bst_status bst__options(const char *op, const char *name, const void *given, void *own, size_t bytes);

#endif
