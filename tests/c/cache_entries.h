/* cache_entries.h - entries of the cache, made in a folder of a test's own and counted. */
#ifndef BST_TEST_CACHE_ENTRIES_H
#define BST_TEST_CACHE_ENTRIES_H

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

#include "cache_folder.h"
#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "test.h"

enum { NOBODY = 65534 };

static inline int remove_one(const char *path, const struct stat *s, int type, struct FTW *ftw) {
    (void)s, (void)type, (void)ftw;
    return remove(path);
}

static inline void remove_folder(const char *path) {
    if (access(path, F_OK) == 0) nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* A new empty place for a test; the cache's folder does not exist yet. */
static inline void begin(void) {
    snprintf(root, sizeof root, "/tmp/bastile-cache-XXXXXX");
    if (!mkdtemp(root) || chmod(root, 0711) != 0) abort();
    snprintf(folder, sizeof folder, "%s/cache", root);
    setenv("BASTILE_CACHE", folder, 1);
}

static inline void end(void) { remove_folder(root); }

static inline bst_digest key_of(int n) {
    bst_digest key = {{0}};
    for (int i = 0; i < 16; i++) key.bytes[i] = (uint8_t)(n * 7 + i);
    return key;
}

/* Where an entry lies: part of the format. */
static inline const char *entry_path(const bst_digest *key) {
    static char path[512];
    int at = snprintf(path, sizeof path, "%s/", folder);
    for (int i = 0; i < 16; i++) at += snprintf(path + at, sizeof path - (size_t)at, "%02x", key->bytes[i]);
    snprintf(path + at, sizeof path - (size_t)at, ".cubin");
    return path;
}

/* What make gives, and how: it adds a byte to <root>/count, so that processes can be counted together. */
typedef struct source {
    size_t bytes;
    unsigned pause_us;
    bst_status status;
} source;

static inline bst_status make(void *context, bst_blob *out) {
    const source *s = context;
    char path[160];
    snprintf(path, sizeof path, "%s/count", root);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file >= 0 && write(file, "x", 1) != 1) abort();
    if (file >= 0) close(file);
    if (s->pause_us) usleep(s->pause_us);
    if (s->status != BST_OK) return bst__error(s->status, "made to fail");
    uint8_t *data = malloc(s->bytes);
    if (!data) abort();
    for (size_t i = 0; i < s->bytes; i++) data[i] = (uint8_t)(i * 31 + i / 256);
    *out = (bst_blob){data, s->bytes};
    return BST_OK;
}

static inline bool is_right(const bst_blob *blob, size_t bytes) {
    if (blob->bytes != bytes) return false;
    const uint8_t *data = blob->data;
    for (size_t i = 0; i < bytes; i++)
        if (data[i] != (uint8_t)(i * 31 + i / 256)) return false;
    return true;
}

static inline int made(void) {
    char path[160];
    struct stat s;
    snprintf(path, sizeof path, "%s/count", root);
    return stat(path, &s) == 0 ? (int)s.st_size : 0;
}

/* Gets a key whose bytes `make` gives in this length, after a pause, and says whether they are right. */
static inline bool get_slowly(int n, size_t bytes, unsigned pause_us) {
    source s = {bytes, pause_us, BST_OK};
    bst_digest key = key_of(n);
    bst_blob blob = {0};
    bool right = bst__cache_get(&key, BST_CACHE_CODE, make, &s, &blob) == BST_OK && is_right(&blob, bytes);
    free(blob.data);
    return right;
}

static inline bool get(int n, size_t bytes) { return get_slowly(n, bytes, 0); }

#endif
