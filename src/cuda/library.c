/* library.c - finding NVIDIA's libraries at run time. Nothing here runs when our own library is loaded. */
#include "cuda/library.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fork.h"

typedef struct folder {
    struct folder *next;
    char path[];
} folder;

/* Folders are searched in the order in which they were added, and kept as long as the process lives. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static folder *folders;

static void in_child(void) { bst__free_lock(&lock); }
BST_IN_CHILD(in_child)

bst_status bst_add_library_path(const char *path) {
    const char *op = "bst_add_library_path";
    if (!path) return bst__error(BST_INVALID, "%s: folder is NULL; a path is needed", op);
    /* A relative folder would change its meaning, and whose libraries are loaded, with the working directory. */
    if (path[0] != '/') return bst__error(BST_INVALID, "%s: folder is \"%s\"; an absolute path is needed", op, path);
    size_t bytes = strlen(path) + 1;
    folder *added = malloc(sizeof *added + bytes);
    if (!added) return bst__error(BST_NO_MEMORY, "%s: %zu bytes could not be allocated", op, sizeof *added + bytes);
    added->next = NULL;
    memcpy(added->path, path, bytes);
    pthread_mutex_lock(&lock);
    folder **end = &folders;
    while (*end && strcmp((*end)->path, path) != 0) end = &(*end)->next;
    if (*end)
        free(added);
    else
        *end = added;
    pthread_mutex_unlock(&lock);
    return BST_OK;
}

/* A search for a library, and why a file that is there, or may be, could not be opened. */
typedef struct search {
    void *handle;
    char why[256];
} search;

static void try_file(search *s, const char *file) {
    s->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (s->handle) return;
    const char *why = dlerror();
    /* That there is none in one of the places says nothing; the first other reason is kept. */
    if (why && !s->why[0] && !strstr(why, strerror(ENOENT))) snprintf(s->why, sizeof s->why, ": %s", why);
}

static void try_folder(search *s, const char *path, const char *soname) {
    char file[4096];
    int length = snprintf(file, sizeof file, "%s/%s", path, soname);
    if (length > 0 && (size_t)length < sizeof file) try_file(s, file);
}

static search open_any(const bst_library_name *name) {
    search s = {0};
    /* One that is loaded already comes first: two versions in one process would cost memory and could disagree. */
    for (int i = 0; !s.handle && i < BST_SONAMES; i++)
        s.handle = dlopen(name->sonames[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    pthread_mutex_lock(&lock);
    for (const folder *f = folders; f; f = f->next)
        for (int i = 0; !s.handle && i < BST_SONAMES; i++) try_folder(&s, f->path, name->sonames[i]);
    pthread_mutex_unlock(&lock);
    for (int i = 0; !s.handle && i < BST_SONAMES; i++) try_file(&s, name->sonames[i]);
    for (int i = 0; !s.handle && i < BST_SONAMES; i++) try_folder(&s, "/usr/local/cuda/lib64", name->sonames[i]);
    return s;
}

static int count_folders(void) {
    pthread_mutex_lock(&lock);
    int count = 0;
    for (const folder *f = folders; f; f = f->next) count++;
    pthread_mutex_unlock(&lock);
    return count;
}

bst_status bst__library_open(const char *op, const bst_library_name *name, void **handle) {
    const char *file = secure_getenv(name->variable);
    if (file && *file) {
        *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (*handle) return BST_OK;
        const char *why = dlerror();
        return bst__error(BST_NO_CUDA, "%s: %s could not be opened from %s=%s (%s); unset it to search as usual", op,
                          name->title, name->variable, file, why ? why : "no reason given");
    }
    search s = open_any(name);
    *handle = s.handle;
    if (s.handle) return BST_OK;
    return bst__error(
        BST_NO_CUDA,
        "%s: %s (%s or %s) was not found among the loaded libraries, in the folders given to "
        "bst_add_library_path (%d), by the loader or in /usr/local/cuda/lib64%s; install it (pip install %s) or "
        "set %s to its path. CPU tensors work without it",
        op, name->title, name->sonames[0], name->sonames[1], count_folders(), s.why, name->package, name->variable);
}

const char *bst__library_symbols(void *handle, const bst_symbol *symbols, size_t count) {
    for (size_t i = 0; i < count; i++) {
        void *found = dlsym(handle, symbols[i].name);
        if (!found) return symbols[i].name;
        /* POSIX lets a function's address travel through void *; C does not, so it is copied as bytes. */
        memcpy(symbols[i].slot, &found, sizeof found);
    }
    return NULL;
}
