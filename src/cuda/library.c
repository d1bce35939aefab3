/* library.c - finding NVIDIA's libraries at run time. Nothing here runs when our own library is loaded. */
#include "cuda/library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct folder {
    struct folder *next;
    char path[];
} folder;

/* Folders are searched in the order in which they were added, and kept as long as the process lives. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static folder *folders;

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

static void *open_in(const char *path, const char *soname) {
    char file[4096];
    int length = snprintf(file, sizeof file, "%s/%s", path, soname);
    if (length < 0 || (size_t)length >= sizeof file) return NULL;
    return dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

static void *open_any(const bst_library_name *name) {
    void *handle = NULL;
    /* One that is loaded already comes first: two versions in one process would cost memory and could disagree. */
    for (int i = 0; !handle && i < BST_SONAMES; i++)
        handle = dlopen(name->sonames[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    pthread_mutex_lock(&lock);
    for (const folder *f = folders; f; f = f->next)
        for (int i = 0; !handle && i < BST_SONAMES; i++) handle = open_in(f->path, name->sonames[i]);
    pthread_mutex_unlock(&lock);
    for (int i = 0; !handle && i < BST_SONAMES; i++) handle = dlopen(name->sonames[i], RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; !handle && i < BST_SONAMES; i++) handle = open_in("/usr/local/cuda/lib64", name->sonames[i]);
    return handle;
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
    *handle = open_any(name);
    if (*handle) return BST_OK;
    return bst__error(
        BST_NO_CUDA,
        "%s: %s (%s or %s) was not found among the loaded libraries, in the folders given to "
        "bst_add_library_path (%d), by the loader or in /usr/local/cuda/lib64; install it (pip install %s) or "
        "set %s to its path. CPU tensors work without it",
        op, name->title, name->sonames[0], name->sonames[1], count_folders(), name->package, name->variable);
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
