/* source.c - which embedded sources a kernel can see.
 *
 * Only #include "..." counts, wherever it stands: a file that is reached under some macros only is hashed and offered
 * under all, which costs nothing. Names that are not embedded are left for the compiler to complain about. */
#include "cuda/source.h"

#include <stdlib.h>
#include <string.h>

/* Sources are embedded without their folders, and found whether or not the #include spells one. */
static const char *find(const char *name) {
    const char *slash = strrchr(name, '/');
    const char *base = slash ? slash + 1 : name;
    for (const bst_source *s = bst__sources; s->name; s++)
        if (strcmp(s->name, base) == 0) return s->text;
    return NULL;
}

/* The name in `#include "name"` if this line is one, with its length. */
static const char *included(const char *line, size_t *length) {
    line += strspn(line, " \t");
    if (*line++ != '#') return NULL;
    line += strspn(line, " \t");
    if (strncmp(line, "include", 7) != 0) return NULL;
    line += 7;
    line += strspn(line, " \t");
    if (*line++ != '"') return NULL;
    *length = strcspn(line, "\"\n");
    return line[*length] == '"' ? line : NULL;
}

static bst_status add(const char *op, const char *name, size_t length, bst_reached *out) {
    for (int i = 0; i < out->count; i++)
        if (strlen(out->names[i]) == length && memcmp(out->names[i], name, length) == 0) return BST_OK;
    char *copy = strndup(name, length);
    if (!copy) return bst__error(BST_NO_MEMORY, "%s: %zu bytes could not be allocated", op, length + 1);
    const char *text = find(copy);
    if (text && out->count < BST_MAX_REACHED) {
        out->names[out->count] = copy;
        out->texts[out->count++] = text;
        return BST_OK;
    }
    free(copy);
    if (!text) return BST_OK;
    return bst__error(BST_COMPILE, "%s: kernel source %s includes more than %d files", op, out->names[0],
                      BST_MAX_REACHED);
}

bst_status bst__reach(const char *op, const char *file, bst_reached *out) {
    out->count = 0;
    BST_TRY(add(op, file, strlen(file), out));
    if (!out->count) return bst__error(BST_COMPILE, "%s: kernel source %s is not part of this library", op, file);
    for (int i = 0; i < out->count; i++) {
        const char *line = out->texts[i];
        while (line) {
            size_t length = 0;
            const char *name = included(line, &length);
            if (name) BST_TRY(add(op, name, length, out));
            line = strchr(line, '\n');
            if (line) line++;
        }
    }
    return BST_OK;
}

void bst__reached_free(bst_reached *reached) {
    for (int i = 0; i < reached->count; i++) free(reached->names[i]);
    reached->count = 0;
}
