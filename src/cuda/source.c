/* source.c - see source.h. */
#include "cuda/source.h"

#include <string.h>

static bool is_kernel_file(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot && strcmp(dot, ".cu") == 0;
}

bst_status bst__texts(const char *op, const char *file, bst_texts *out) {
    out->names[0] = NULL;
    out->count = 1;
    for (const bst_source *s = bst__sources; s->name; s++) {
        bool is_file = strcmp(s->name, file) == 0;
        if (!is_file && is_kernel_file(s->name)) continue;
        if (!is_file && out->count == BST_MAX_TEXTS)
            return bst__error(BST_COMPILE, "%s: more than %d sources are part of this library", op, BST_MAX_TEXTS);
        int at = is_file ? 0 : out->count++;
        out->names[at] = s->name;
        out->texts[at] = s->text;
    }
    if (out->names[0]) return BST_OK;
    return bst__error(BST_COMPILE, "%s: kernel source %s is not part of this library", op, file);
}
