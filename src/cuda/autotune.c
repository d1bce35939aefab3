/* autotune.c - the mode, and choices in the cache's folder.
 *
 * A choice is an entry of the cache (cache.h), with all its care: its key covers everything that the measurement
 * depends on, its text begins "2 of 5: " (candidate 2 won over four others). While one process searches, others that
 * need the same choice wait for it. A process searches one thing at a time, or its searches would disturb each
 * other. */
#include "cuda/autotune.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda/cache.h"
#include "cuda/fork.h"

enum {
    UNREAD = INT32_MIN, /* the environment has not been asked */
    TEXT = 256,         /* bytes of an entry, at most */
    SEARCH_MS = 60000,  /* of a process: lengths that never come back must not cost a search each without end */
};

static atomic_int mode = UNREAD;
static atomic_int generation = 1;
static atomic_int unkept; /* choices of this generation that are in no folder */
static atomic_llong left_ms = SEARCH_MS;
static pthread_mutex_t searching = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void) { bst__free_lock(&searching); }
BST_IN_CHILD(in_child)

static int mode_of_environment(void) {
    const char *on = getenv("BASTILE_AUTOTUNE");
    return on && strcmp(on, "1") == 0;
}

bool bst__tuning(void) {
    int now = atomic_load_explicit(&mode, memory_order_relaxed);
    if (now != UNREAD) return now;
    /* Unless another thread has set it meanwhile. */
    int found = mode_of_environment();
    return atomic_compare_exchange_strong(&mode, &now, found) ? found : now;
}

bst_status bst_set_autotune(int on) {
    if (on < -1 || on > 1)
        return bst__error(BST_INVALID, "bst_set_autotune: on is %d; 1, 0, or -1 for BASTILE_AUTOTUNE is needed", on);
    atomic_store(&mode, on < 0 ? UNREAD : on);
    return BST_OK;
}

int bst__tuning_generation(void) { return atomic_load_explicit(&generation, memory_order_acquire); }

int bst_autotune_clear(void) {
    /* Not while a search is about to store what it found. */
    pthread_mutex_lock(&searching);
    int count = bst__cache_clear(BST_CACHE_CHOICE) + atomic_exchange(&unkept, 0);
    atomic_fetch_add(&generation, 1);
    pthread_mutex_unlock(&searching);
    return count;
}

void bst__choice_key(bst_hash *h, const bst_machine *m) {
    const int numbers[] = {m->arch, m->processors, m->driver, m->library};
    *h = BST_HASH_BEGIN;
    bst__hash_add(h, BST_VERSION, sizeof BST_VERSION);
    bst__hash_add(h, m->chip, strlen(m->chip) + 1);
    bst__hash_add(h, numbers, sizeof numbers);
}

void bst__set_search_time(double seconds) { atomic_store(&left_ms, (long long)(seconds * 1000)); }

/* ---- choices ----------------------------------------------------------------------------------------------------- */

typedef struct job {
    const bst_race *race;
    int for_now; /* what won where it is not to be stored; else -1 */
} job;

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* The status is only for the cache, which stores nothing that failed: no message goes with it. */
static bst_status make(void *context, bst_blob *out) {
    job *j = context;
    if (atomic_load_explicit(&left_ms, memory_order_relaxed) <= 0) return BST_UNSUPPORTED;
    bst_times times = {0};
    long long begin = now_ms();
    int won = bst__search(j->race, &times);
    atomic_fetch_sub(&left_ms, now_ms() - begin);
    if (won < 0) return BST_UNSUPPORTED;
    if (times.lacked_room) return j->for_now = won, BST_NO_MEMORY;
    char *text = malloc(TEXT);
    if (!text) return BST_NO_MEMORY;
    snprintf(text, TEXT, "%d of %d: %s, %.4f ms; the default %.4f ms\n", won, j->race->count, j->race->what,
             (double)bst__median(&times, won), (double)bst__median(&times, 0));
    *out = (bst_blob){text, strlen(text)};
    return BST_OK;
}

/* The candidate that an entry names; -1 where it says nothing of such a race. Not by sscanf, which asks newer systems
 * for a newer glibc than anything else here does. */
static int parse(const bst_blob *entry, int count) {
    for (int won = 0; won < count; won++) {
        char begin[32];
        size_t length = (size_t)snprintf(begin, sizeof begin, "%d of %d:", won, count);
        if (entry->bytes >= length && memcmp(entry->data, begin, length) == 0) return won;
    }
    return -1;
}

int bst__choice(const bst_digest *key, const bst_race *race) {
    job j = {race, -1};
    bst_blob entry;
    int won = -1;
    bst_message message = bst__message(); /* a candidate that fails is no error of the call */
    pthread_mutex_lock(&searching);
    if (bst__cache_get(key, BST_CACHE_CHOICE, make, &j, &entry) == BST_OK) {
        won = parse(&entry, race->count);
        free(entry.data);
        if (won < 0)
            bst__cache_drop(key, BST_CACHE_CHOICE);
        else if (bst__cache_reason()[0])
            atomic_fetch_add(&unkept, 1);
    } else if (j.for_now >= 0) {
        won = j.for_now;
        atomic_fetch_add(&unkept, 1);
    }
    pthread_mutex_unlock(&searching);
    bst__put_back(&message);
    return won;
}
