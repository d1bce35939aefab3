/* cache.c - one file per compiled kernel, and per measured choice, in a folder that only we can write to.
 *
 * Folder: $BASTILE_CACHE ("off": none), else $XDG_CACHE_HOME/bastile, else $HOME/.cache/bastile. It and its files are
 * used only if they belong to us and nobody else may write to them, which is asked of the opened descriptors: an entry
 * is code that will run with our rights.
 *
 * Entry: a header (magic, key, length, checksum) and the bytes. It is written under a temporary name, flushed and then
 * renamed, so that no name ever stands for half a file; one that does not check is deleted and made anew. A lock file
 * per key makes processes wait for the one that compiles; nobody waits for ever, and work done twice is harmless. */
#include "cuda/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char magic[8] = "BSTCUB1";

typedef struct header {
    char magic[sizeof magic];
    bst_digest key;
    uint64_t length;
    bst_digest checksum; /* of the bytes after the header */
} header;
_Static_assert(sizeof(header) == 80, "the header is a file format");

enum {
    LARGEST = 256 << 20,  /* bytes of an entry; more is damage */
    LONGEST_WAIT = 60,    /* seconds for another process's compilation: the slowest kernels take a few */
    STALE = 3600,         /* seconds after which a temporary file's writer is dead */
    NAME_BYTES = 64 + 32, /* a key in hexadecimal and a suffix */
};

static _Thread_local char reason[PATH_MAX + 128];

const char *bst__cache_reason(void) { return reason; }

static void __attribute__((format(printf, 1, 2))) give_reason(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
}

static bool is_ours(const struct stat *s) { return s->st_uid == geteuid() && !(s->st_mode & (S_IWGRP | S_IWOTH)); }

/* ---- the folder -------------------------------------------------------------------------------------------------- */

/* Writes the folder's path, or says why there is none. */
static bool folder_path(char *path, size_t size) {
    const char *own = secure_getenv("BASTILE_CACHE");
    const char *xdg = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    int length;
    if (own && *own) {
        if (strcmp(own, "off") == 0) return give_reason("BASTILE_CACHE is off"), false;
        length = snprintf(path, size, "%s", own);
    } else if (xdg && *xdg == '/') { /* the XDG specification: a relative path is to be ignored */
        length = snprintf(path, size, "%s/bastile", xdg);
    } else if (home && *home == '/') {
        length = snprintf(path, size, "%s/.cache/bastile", home);
    } else {
        return give_reason("none of BASTILE_CACHE, XDG_CACHE_HOME and HOME names a folder"), false;
    }
    if (length < 0 || (size_t)length >= size) return give_reason("the cache folder's path is too long"), false;
    return true;
}

/* Creates a folder and those above it. Failures show when it is opened. */
static void create_folders(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    mkdir(path, 0700);
}

/* Opens the folder. -1 and a reason where there is none that is ours alone. */
static int open_folder(void) {
    char path[PATH_MAX];
    if (!folder_path(path, sizeof path)) return -1;
    create_folders(path);
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return give_reason("%s cannot be opened: %s", path, strerror(errno)), -1;
    struct stat s;
    if (fstat(folder, &s) == 0 && is_ours(&s)) return folder;
    give_reason("%s belongs to another user or may be written to by others; mode 0700 is needed", path);
    close(folder);
    return -1;
}

static void entry_name(const bst_digest *key, const char *suffix, char name[NAME_BYTES]) {
    for (size_t i = 0; i < sizeof key->bytes; i++) snprintf(name + 2 * i, 3, "%02x", (unsigned)key->bytes[i]);
    snprintf(name + 2 * sizeof key->bytes, NAME_BYTES - 2 * sizeof key->bytes, "%s", suffix);
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static bool read_all(int file, void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t now = read(file, (char *)data + done, bytes - done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        done += (size_t)now;
    }
    return true;
}

static bst_digest checksum(const void *data, size_t bytes) {
    bst_sha256 h;
    bst__sha256_begin(&h);
    bst__sha256_add(&h, data, bytes);
    return bst__sha256_end(&h);
}

/* Reads an opened entry; false where anything about it is not as it must be. */
static bool read_entry(int file, const bst_digest *key, bst_blob *out) {
    struct stat s;
    header h;
    if (fstat(file, &s) != 0 || !S_ISREG(s.st_mode) || !is_ours(&s)) return false;
    if (s.st_size <= (off_t)sizeof h || s.st_size > LARGEST || !read_all(file, &h, sizeof h)) return false;
    size_t bytes = (size_t)s.st_size - sizeof h;
    if (memcmp(h.magic, magic, sizeof magic) != 0 || memcmp(&h.key, key, sizeof *key) != 0 || h.length != bytes)
        return false;
    void *data = malloc(bytes);
    if (!data) return false;
    if (read_all(file, data, bytes)) {
        bst_digest sum = checksum(data, bytes);
        if (memcmp(&sum, &h.checksum, sizeof sum) == 0) {
            *out = (bst_blob){data, bytes};
            return true;
        }
    }
    free(data);
    return false;
}

/* The entry, if the folder has a good one; a bad one is deleted. One that cannot be opened stays: that says nothing of
 * it, where this process has too many files open. */
static bool load(int folder, const bst_digest *key, const char *kind, bst_blob *out) {
    char name[NAME_BYTES];
    entry_name(key, kind, name);
    /* O_NONBLOCK: a FIFO under this name must not hold us up. */
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return false;
    bool good = read_entry(file, key, out);
    close(file);
    if (!good) unlinkat(folder, name, 0);
    return good;
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static bool write_all(int file, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t now = write(file, (const char *)data + done, bytes - done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        done += (size_t)now;
    }
    return true;
}

/* Deletes the files with this ending that were last written before a time; how many there were. */
static int delete_files(int folder, const char *ending, time_t before) {
    int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), count = 0;
    DIR *list = again < 0 ? NULL : fdopendir(again);
    if (!list) {
        if (again >= 0) close(again);
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(list));) {
        const char *suffix = strrchr(entry->d_name, '.');
        struct stat s;
        if (suffix && strcmp(suffix, ending) == 0 && fstatat(folder, entry->d_name, &s, AT_SYMLINK_NOFOLLOW) == 0 &&
            s.st_mtime < before)
            count += unlinkat(folder, entry->d_name, 0) == 0;
    }
    closedir(list);
    return count;
}

static void store(int folder, const bst_digest *key, const char *kind, const bst_blob *blob) {
    header h = {.key = *key, .length = blob->bytes, .checksum = checksum(blob->data, blob->bytes)};
    memcpy(h.magic, magic, sizeof magic);
    reason[0] = '\0'; /* `make` may have got another entry, with a reason of its own */
    /* A random name, for writers may be on several machines that share a home. */
    uint64_t random = 0;
    char suffix[32], temporary[NAME_BYTES], name[NAME_BYTES];
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint64_t)getpid();
    snprintf(suffix, sizeof suffix, ".%016llx.tmp", (unsigned long long)random);
    entry_name(key, suffix, temporary);
    entry_name(key, kind, name);
    delete_files(folder, ".tmp", time(NULL) - STALE); /* what writers that were killed have left behind */
    int file = openat(folder, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) {
        give_reason("the cache folder cannot be written to: %s", strerror(errno));
        return;
    }
    bool written = write_all(file, &h, sizeof h) && write_all(file, blob->data, blob->bytes) && fsync(file) == 0;
    if (close(file) != 0) written = false;
    if (written && renameat(folder, temporary, folder, name) == 0) return;
    give_reason("an entry could not be written to the cache folder: %s", strerror(errno));
    unlinkat(folder, temporary, 0);
}

/* ---- one process at a time --------------------------------------------------------------------------------------- */

/* Takes the key's lock if it is free: its descriptor, or -1 with EWOULDBLOCK where another holds it. Whoever ends
 * deletes the lock's name, so a late comer may hold one that no longer has a name; it then finds the entry stored. */
static int try_lock(int folder, const char *name) {
    int file = openat(folder, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0 || flock(file, LOCK_EX | LOCK_NB) == 0) return file;
    int error = errno;
    close(file);
    errno = error;
    return -1;
}

/* Waits for the key's lock, or for the entry to appear, which is as good (true, *out filled). *held: the lock's
 * descriptor, or -1 where there is none, because of the entry, the time, or a file system without locks. */
static bool wait_for_turn(int folder, const bst_digest *key, const char *kind, const char *name, int *held,
                          bst_blob *out) {
    struct timespec start, now, pause = {0, 1000000};
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        *held = try_lock(folder, name);
        if (*held < 0 && errno != EWOULDBLOCK) return false;
        /* Also with the lock in hand: its last holder may have stored the entry since we looked. */
        if (load(folder, key, kind, out)) return true;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (*held >= 0 || now.tv_sec - start.tv_sec > LONGEST_WAIT) return false;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 32000000) pause.tv_nsec *= 2;
    }
}

bst_status bst__cache_get(const bst_digest *key, const char *kind, bst_cache_make make, void *context, bst_blob *out) {
    reason[0] = '\0';
    int folder = open_folder();
    if (folder < 0) return make(context, out);
    bst_status status = BST_OK;
    if (!load(folder, key, kind, out)) {
        char lock_name[NAME_BYTES];
        int held = -1;
        entry_name(key, ".lock", lock_name);
        if (!wait_for_turn(folder, key, kind, lock_name, &held, out)) {
            status = make(context, out);
            if (status == BST_OK) store(folder, key, kind, out);
        }
        if (held >= 0) {
            unlinkat(folder, lock_name, 0);
            close(held);
        }
    }
    close(folder);
    return status;
}

void bst__cache_drop(const bst_digest *key, const char *kind) {
    char name[NAME_BYTES];
    int folder = open_folder();
    if (folder < 0) return;
    entry_name(key, kind, name);
    unlinkat(folder, name, 0);
    close(folder);
}

int bst__cache_clear(const char *kind) {
    int folder = open_folder();
    if (folder < 0) return 0;
    int count = delete_files(folder, kind, INT64_MAX);
    close(folder);
    return count;
}
