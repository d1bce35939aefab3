/* folder.c - finding the cache's folder: $BASTILE_CACHE ("off": none), else $XDG_CACHE_HOME/bastile, else
 * $HOME/.cache/bastile.
 *
 * The path is walked component by component from opened folders, so that nobody can exchange one between a check and
 * its use. A symbolic link on the way is followed if it is ours or root's: any other user who may write there could aim
 * it at another folder of ours. The last component may be no link at all. Missing folders are made below ours and
 * root's only: root with a user's HOME leaves nothing in it. The folder itself must be ours, and nobody else may write
 * to it. */
#include "cuda/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_LINKS = 40 /* as many as Linux follows in a path */ };

/* A path that is being walked. */
typedef struct walk {
    int at;              /* the folder reached; -1: none */
    int links;           /* that were followed */
    char path[PATH_MAX]; /* as it was given */
    char rest[PATH_MAX]; /* what is being walked, */
    char *next;          /* and where in it the next component is */
    char *reason;        /* why it ends */
    size_t reason_bytes;
} walk;

static bool __attribute__((format(printf, 2, 3))) refuse(walk *w, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(w->reason, w->reason_bytes, format, arguments);
    va_end(arguments);
    return false;
}

static bool cannot_open(walk *w) { return refuse(w, "%s cannot be opened: %s", w->path, strerror(errno)); }

bool bst__is_ours(const struct stat *s) { return s->st_uid == geteuid() && !(s->st_mode & (S_IWGRP | S_IWOTH)); }

/* Root can do as it likes with us anyway. */
static bool is_trusted(const struct stat *s) { return s->st_uid == geteuid() || s->st_uid == 0; }

/* Writes the path, or says why there is none. */
static bool find_path(walk *w) {
    const char *own = secure_getenv("BASTILE_CACHE");
    const char *xdg = secure_getenv("XDG_CACHE_HOME"), *home = secure_getenv("HOME");
    int length;
    if (own && *own) {
        if (strcmp(own, "off") == 0) return refuse(w, "BASTILE_CACHE is off");
        length = snprintf(w->path, sizeof w->path, "%s", own);
    } else if (xdg && *xdg == '/') { /* the XDG specification: a relative path is to be ignored */
        length = snprintf(w->path, sizeof w->path, "%s/bastile", xdg);
    } else if (home && *home == '/') {
        length = snprintf(w->path, sizeof w->path, "%s/.cache/bastile", home);
    } else {
        return refuse(w, "none of BASTILE_CACHE, XDG_CACHE_HOME and HOME names a folder");
    }
    if (length < 0 || (size_t)length >= sizeof w->path) return refuse(w, "the cache folder's path is too long");
    return true;
}

/* ---- walking ----------------------------------------------------------------------------------------------------- */

static void go_to(walk *w, int folder) {
    if (w->at >= 0) close(w->at);
    w->at = folder;
}

/* Where a path begins. */
static bool start(walk *w) {
    go_to(w, open(w->rest[0] == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
    return w->at >= 0 || cannot_open(w);
}

/* Takes the next component off the path; NULL where there is none. */
static const char *take_component(walk *w) {
    char *name = w->next + strspn(w->next, "/"), *end = name + strcspn(name, "/");
    w->next = *end ? end + 1 : end;
    *end = '\0';
    return *name ? name : NULL;
}

static bool is_last(const walk *w) { return w->next[strspn(w->next, "/")] == '\0'; }

/* Puts a link's target before what is still to be walked. */
static bool follow(walk *w, int link) {
    struct stat s;
    char joined[PATH_MAX];
    if (fstat(link, &s) != 0) return cannot_open(w);
    if (!S_ISLNK(s.st_mode)) return errno = ENOTDIR, cannot_open(w);
    if (is_last(w)) return refuse(w, "%s is a symbolic link; a folder is needed", w->path);
    if (!is_trusted(&s)) return refuse(w, "%s leads through a symbolic link of another user", w->path);
    if (++w->links > MOST_LINKS) return errno = ELOOP, cannot_open(w);
    ssize_t bytes = readlinkat(link, "", joined, sizeof joined);
    if (bytes < 0) return cannot_open(w);
    if ((size_t)bytes + 1 + strlen(w->next) >= sizeof joined) return errno = ENAMETOOLONG, cannot_open(w);
    joined[bytes] = '/';
    strcpy(joined + bytes + 1, w->next);
    strcpy(w->rest, joined);
    w->next = w->rest;
    return joined[0] == '/' ? start(w) : true;
}

/* O_DIRECTORY, for without it an automounter's folder would not be mounted. */
static int open_component(const walk *w, const char *name) {
    return openat(w->at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static bool create(walk *w, const char *name) {
    struct stat s;
    if (fstat(w->at, &s) != 0) return cannot_open(w);
    if (!is_trusted(&s))
        return refuse(w, "%s does not exist, and %s would have to be made in another user's folder", w->path, name);
    return mkdirat(w->at, name, 0700) == 0 || errno == EEXIST || cannot_open(w);
}

static bool step(walk *w, const char *name) {
    int next = open_component(w, name);
    if (next < 0 && errno == ENOENT) {
        if (!create(w, name)) return false;
        next = open_component(w, name);
    }
    if (next >= 0) return go_to(w, next), true;
    if (errno != ENOTDIR && errno != ELOOP) return cannot_open(w);
    int link = openat(w->at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (link < 0) return cannot_open(w);
    bool followed = follow(w, link);
    close(link);
    return followed;
}

static bool walk_path(walk *w) {
    strcpy(w->rest, w->path);
    w->next = w->rest;
    if (!start(w)) return false;
    for (const char *name; (name = take_component(w));)
        if (!step(w, name)) return false;
    return true;
}

int bst__folder_open(char *reason, size_t bytes) {
    walk w = {.at = -1, .reason = reason, .reason_bytes = bytes};
    struct stat s;
    int folder = -1;
    if (find_path(&w) && walk_path(&w)) {
        folder = openat(w.at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder < 0) {
            cannot_open(&w);
        } else if (fstat(folder, &s) != 0 || !bst__is_ours(&s)) {
            refuse(&w, "%s belongs to another user or may be written to by others; mode 0700 is needed", w.path);
            close(folder);
            folder = -1;
        }
    }
    go_to(&w, -1);
    return folder;
}
