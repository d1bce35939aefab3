/* cache.c - one file per compiled kernel, and per measured choice, in a folder that only we can write to (folder.c).
 *
 * An entry is code that will run with our rights: it is used only if its file belongs to us and nobody else may write
 * to it, which is asked of the opened descriptor.
 *
 * Entry: a header (magic, key, length, checksum) and the bytes. It is written under a temporary name, flushed and then
 * renamed, so that no name ever stands for half a file; one that does not check is deleted and made anew. A lock file
 * per key makes processes wait for the one that compiles; nobody waits for ever, and work done twice is harmless.
 *
 * Names are a key in hexadecimal and a suffix, and nothing else in the folder is ever deleted: the user may keep other
 * things there. A file's time of modification is when it was last used; where all entries together grow beyond a limit
 * ($BASTILE_CACHE_MIB), those that were not used for longest leave. */
#include "cuda/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cuda/folder.h"

static const char magic[8] = "BSTCUB2";

typedef struct header {
    char magic[sizeof magic];
    bst_digest key;
    uint64_t length;
    bst_digest checksum; /* of the bytes after the header */
} header;
_Static_assert(sizeof(header) == 48, "the header is a file format");

enum {
    LARGEST = 256 << 20,  /* bytes of an entry; more is damage */
    LONGEST_WAIT = 60,    /* seconds for another process's compilation: the slowest kernels take a few */
    STALE = 3600,         /* seconds after which a temporary file's writer, or a lock's holder, is dead */
    FRESH = 3600,         /* seconds within which a use need not be noted again */
    LIMIT_MIB = 256,      /* of all entries together: some 20000 kernels, of 4 to 34 KiB each */
    SPARE = 16,           /* of the limit, one part in so many: what a process stores before it looks again */
    BLOCK = 4096,         /* bytes of the disk that a file takes, at least */
    NAME_BYTES = 32 + 32, /* a key in hexadecimal and a suffix */
};

const char *bst__cache_reason(void) {
    const bst_thread *thread = bst__thread();
    return thread ? thread->cache_reason.text : "";
}

static void __attribute__((format(printf, 1, 2))) give_reason(const char *format, ...) {
    bst_thread *thread = bst__thread();
    if (!thread) return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(thread->cache_reason.text, sizeof thread->cache_reason.text, format, arguments);
    va_end(arguments);
}

static int open_folder(void) {
    char reason[sizeof(bst_message)] = "";
    int folder = bst__folder_open(reason, sizeof reason);
    if (folder < 0) give_reason("%s", reason);
    return folder;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

enum { KEY_DIGITS = 2 * sizeof(bst_digest), RANDOM_DIGITS = 16 };
static const char digits[] = "0123456789abcdef", lock_suffix[] = ".lock", temporary_suffix[] = ".tmp";

static void entry_name(const bst_digest *key, const char *suffix, char name[NAME_BYTES]) {
    for (size_t i = 0; i < sizeof key->bytes; i++) snprintf(name + 2 * i, 3, "%02x", (unsigned)key->bytes[i]);
    snprintf(name + 2 * sizeof key->bytes, NAME_BYTES - 2 * sizeof key->bytes, "%s", suffix);
}

typedef enum name_kind { FOREIGN, ENTRY, LOCK, TEMPORARY } name_kind;

/* What a name in the folder stands for. FOREIGN: it is none of ours. */
static name_kind kind_of(const char *name) {
    if (strspn(name, digits) != KEY_DIGITS) return FOREIGN;
    const char *suffix = name + KEY_DIGITS;
    if (strcmp(suffix, BST_CACHE_CODE) == 0 || strcmp(suffix, BST_CACHE_CHOICE) == 0) return ENTRY;
    if (strcmp(suffix, lock_suffix) == 0) return LOCK;
    return *suffix == '.' && strspn(suffix + 1, digits) == RANDOM_DIGITS &&
                   strcmp(suffix + 1 + RANDOM_DIGITS, temporary_suffix) == 0
               ? TEMPORARY
               : FOREIGN;
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
    bst_hash h = BST_HASH_BEGIN;
    bst__hash_add(&h, data, bytes);
    return bst__hash_end(h);
}

typedef enum verdict { GOOD, BAD, UNREADABLE } verdict;

/* Reads an opened entry. BAD: something about it is not as it must be. UNREADABLE: that says nothing of it. */
static verdict read_entry(int file, const bst_digest *key, bst_blob *out) {
    struct stat s;
    header h;
    if (fstat(file, &s) != 0) return UNREADABLE;
    if (!S_ISREG(s.st_mode) || !bst__is_ours(&s)) return BAD;
    if (s.st_size <= (off_t)sizeof h || s.st_size > LARGEST || !read_all(file, &h, sizeof h)) return BAD;
    size_t bytes = (size_t)s.st_size - sizeof h;
    if (memcmp(h.magic, magic, sizeof magic) != 0 || memcmp(&h.key, key, sizeof *key) != 0 || h.length != bytes)
        return BAD;
    void *data = malloc(bytes);
    if (!data) return UNREADABLE;
    if (read_all(file, data, bytes)) {
        bst_digest sum = checksum(data, bytes);
        if (memcmp(&sum, &h.checksum, sizeof sum) == 0) {
            if (time(NULL) - s.st_mtime > FRESH) futimens(file, NULL); /* where that is not possible, it leaves early */
            *out = (bst_blob){data, bytes};
            return GOOD;
        }
    }
    free(data);
    return BAD;
}

/* The entry, if the folder has a good one; a bad one is deleted. One that cannot be opened stays: that says nothing of
 * it, where this process has too many files open. */
static bool load(int folder, const bst_digest *key, const char *kind, bst_blob *out) {
    char name[NAME_BYTES];
    entry_name(key, kind, name);
    /* O_NONBLOCK: a FIFO under this name must not hold us up. */
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return false;
    verdict found = read_entry(file, key, out);
    close(file);
    if (found == BAD) unlinkat(folder, name, 0);
    return found == GOOD;
}

/* ---- removing ---------------------------------------------------------------------------------------------------- */

typedef void (*visitor)(void *context, int folder, const char *name, const struct stat *s);

/* Calls a visitor for each file in the folder whose name is ours and of one of these kinds (a bit each). */
static void visit(int folder, unsigned kinds, visitor see, void *context) {
    int again = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = again < 0 ? NULL : fdopendir(again);
    if (!list) {
        if (again >= 0) close(again);
        return;
    }
    for (struct dirent *entry; (entry = readdir(list));) {
        struct stat s;
        if (kinds >> kind_of(entry->d_name) & 1u && fstatat(folder, entry->d_name, &s, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(s.st_mode))
            see(context, folder, entry->d_name, &s);
    }
    closedir(list);
}

/* What is known of an entry that may have to leave. */
typedef struct entry {
    char name[NAME_BYTES];
    struct timespec used;
    int64_t bytes;
} entry;

typedef struct survey {
    time_t now;
    entry *entries;
    size_t count, room;
    int64_t bytes; /* of them all */
} survey;

static int64_t on_disk(int64_t bytes) { return (bytes + BLOCK - 1) / BLOCK * BLOCK; }

/* An entry that there is no memory to note stays, and does not count. */
static void note(survey *v, const char *name, const struct stat *s) {
    if (v->count == v->room) {
        size_t room = v->room ? 2 * v->room : 256;
        entry *more = realloc(v->entries, room * sizeof *more);
        if (!more) return;
        v->entries = more;
        v->room = room;
    }
    entry *l = &v->entries[v->count++];
    memcpy(l->name, name, strlen(name) + 1); /* a key and a suffix: it fits */
    l->used = s->st_mtim;
    l->bytes = on_disk(s->st_size);
    v->bytes += l->bytes;
}

static void survey_one(void *context, int folder, const char *name, const struct stat *s) {
    survey *v = context;
    if (kind_of(name) == ENTRY)
        note(v, name, s);
    else if (v->now - s->st_mtime > STALE)
        unlinkat(folder, name, 0); /* a writer that was killed has left it behind */
}

static int by_use(const void *a, const void *b) {
    const struct timespec *x = &((const entry *)a)->used, *y = &((const entry *)b)->used;
    if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? -1 : 1;
    return (x->tv_nsec > y->tv_nsec) - (x->tv_nsec < y->tv_nsec);
}

/* $BASTILE_CACHE_MIB in bytes; 0: no limit. Not by strtoll, which asks newer systems for a glibc of their own age. */
static int64_t limit(void) {
    const char *text = secure_getenv("BASTILE_CACHE_MIB");
    int64_t mib = text && *text ? 0 : LIMIT_MIB;
    for (; text && *text; text++) {
        if (*text < '0' || *text > '9' || mib > (INT64_MAX >> 20) / 10 - 1) return (int64_t)LIMIT_MIB << 20;
        mib = 10 * mib + (*text - '0');
    }
    return mib << 20;
}

/* Removes what dead writers have left, and makes room for an entry. A process counts what is there at its first entry,
 * and again whenever it has stored a part of the limit; up to that much is kept free, so that it stays below. */
static void tidy(int folder, int64_t incoming) {
    static atomic_llong unseen = INT64_MAX / 2; /* bytes stored since this process last looked */
    int64_t most = limit(), spare = most / SPARE;
    incoming = on_disk(incoming);
    bool look = most && atomic_fetch_add(&unseen, incoming) > spare - incoming;
    survey v = {.now = time(NULL)};
    visit(folder, 1u << TEMPORARY | 1u << LOCK | (look ? 1u << ENTRY : 0), survey_one, &v);
    if (!look) return;
    atomic_store(&unseen, incoming);
    if (v.count) qsort(v.entries, v.count, sizeof *v.entries, by_use);
    for (size_t i = 0; i < v.count && v.bytes + incoming > most - spare; i++)
        if (unlinkat(folder, v.entries[i].name, 0) == 0) v.bytes -= v.entries[i].bytes;
    free(v.entries);
}

typedef struct clearing {
    const char *kind;
    int count;
} clearing;

static void clear_one(void *context, int folder, const char *name, const struct stat *s) {
    clearing *c = context;
    (void)s;
    if (strcmp(name + KEY_DIGITS, c->kind) == 0) c->count += unlinkat(folder, name, 0) == 0;
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

/* Whether this process may write a file of so many bytes. To try would end it, by SIGXFSZ. */
static bool may_write(size_t bytes) {
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur == RLIM_INFINITY || bytes <= most.rlim_cur) return true;
    give_reason("an entry of %zu bytes is larger than a file of this process may be (RLIMIT_FSIZE)", bytes);
    return false;
}

static void store(int folder, const bst_digest *key, const char *kind, const bst_blob *blob) {
    header h = {.key = *key, .length = blob->bytes, .checksum = checksum(blob->data, blob->bytes)};
    memcpy(h.magic, magic, sizeof magic);
    give_reason("%s", ""); /* `make` may have got another entry, with a reason of its own */
    if (!may_write(sizeof h + blob->bytes)) return;
    /* A random name, for writers may be on several machines that share a home. */
    uint64_t random = 0;
    char suffix[32], temporary[NAME_BYTES], name[NAME_BYTES];
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint64_t)getpid();
    snprintf(suffix, sizeof suffix, ".%0*llx%s", RANDOM_DIGITS, (unsigned long long)random, temporary_suffix);
    entry_name(key, suffix, temporary);
    entry_name(key, kind, name);
    tidy(folder, (int64_t)(sizeof h + blob->bytes));
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

/* Takes the key's lock if it is free: its descriptor, or -1 with EAGAIN where another process holds it. Whoever ends
 * deletes the lock's name, so a late comer may hold one that no longer has a name; it then finds the entry stored.
 *
 * A record lock belongs to the process and ends with it. One of flock belongs to the opened file, which a forked worker
 * shares: it would outlive its maker. What a record lock lacks, that it keeps threads of one process apart, is no
 * matter: at most, work is done twice. */
static int try_lock(int folder, const char *name) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int file = openat(folder, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0 || fcntl(file, F_SETLK, &whole) == 0) return file;
    int error = errno == EACCES ? EAGAIN : errno;
    close(file);
    errno = error;
    return -1;
}

/* Waits for the key's lock, or for the entry to appear, which is as good (true, *out filled). *held: the lock's
 * descriptor, or -1 where there is none, because of the entry, the time, or a file system without locks. */
static bool wait_for_lock(int folder, const bst_digest *key, const char *kind, const char *name, int *held,
                          bst_blob *out) {
    struct timespec start, now, pause = {0, 1000000};
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        *held = try_lock(folder, name);
        if (*held < 0 && errno != EAGAIN) return false;
        /* Also with the lock in hand: its last holder may have stored the entry since we looked. */
        if (load(folder, key, kind, out)) return true;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (*held >= 0 || now.tv_sec - start.tv_sec > LONGEST_WAIT) return false;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 32000000) pause.tv_nsec *= 2;
    }
}

bst_status bst__cache_get(const bst_digest *key, const char *kind, bst_cache_make make, void *context, bst_blob *out) {
    give_reason("%s", "");
    int folder = open_folder();
    if (folder < 0) return make(context, out);
    bst_status status = BST_OK;
    if (!load(folder, key, kind, out)) {
        char lock_name[NAME_BYTES];
        int held = -1;
        entry_name(key, lock_suffix, lock_name);
        if (!wait_for_lock(folder, key, kind, lock_name, &held, out)) {
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
    clearing c = {.kind = kind};
    visit(folder, 1u << ENTRY, clear_one, &c);
    close(folder);
    return c.count;
}
