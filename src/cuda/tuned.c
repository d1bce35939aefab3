/* tuned.c - launches that have alternatives.
 *
 * With autotuning off this is bst__cuda_launch. With it on, a launch costs a hash over its macros' values and a few
 * atomic loads more: choices are found in a table that only grows, and without a lock. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fork.h"
#include "cuda/jit.h"
#include "cuda/nvrtc.h"
#include "cuda/stopwatch.h"

/* Problems that a process remembers: a model has some twenty, for each power of two of its lengths. Any more take the
 * default. */
enum { PLACES = 4096, MOST_PROBLEMS = PLACES / 2 };

/* A problem, and what is known of it. Lengths are told apart by powers of two of the default's grid: a configuration
 * hardly depends on them, and a new length is no new search. */
typedef struct problem {
    const bst_kernel *kernel;
    int64_t values[BST_MAX_MACROS]; /* of the default; zeros behind the last macro */
    int device, magnitude;
    atomic_llong known; /* 0: nothing yet; else of that generation `choice`, see note() */
} problem;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for adding */
static _Atomic(problem *) places[PLACES];
static int problems;

static void in_child(void) { bst__free_lock(&lock); }
BST_IN_CHILD(in_child)

/* ---- the table --------------------------------------------------------------------------------------------------- */

static int magnitude_of(const bst_launch *l) {
    int magnitude = 0;
    for (unsigned blocks = l->grid_x; blocks > 1; blocks /= 2) magnitude++;
    return magnitude;
}

static int count_macros(const bst_kernel *kernel) {
    int count = 0;
    while (count < BST_MAX_MACROS && kernel->macros[count]) count++;
    return count;
}

/* The problem's place, or the free one where it would go. The table is never full. */
static _Atomic(problem *) *place_of(const bst_launch *l, int device, int magnitude) {
    int count = count_macros(l->kernel);
    uint64_t h = (uint64_t)(uintptr_t)l->kernel ^ (uint64_t)device << 48 ^ (uint64_t)magnitude << 56;
    for (int i = 0; i < count; i++) {
        h = (h ^ (uint64_t)l->values[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    for (size_t at = h;; at++) {
        _Atomic(problem *) *place = &places[at % PLACES];
        const problem *p = atomic_load_explicit(place, memory_order_acquire);
        if (!p || (p->kernel == l->kernel && p->device == device && p->magnitude == magnitude &&
                   memcmp(p->values, l->values, (size_t)count * sizeof *l->values) == 0))
            return place;
    }
}

/* The problem of a launch; NULL where there is no more room. */
static problem *problem_of(const bst_launch *l, int device) {
    int magnitude = magnitude_of(l);
    problem *p = atomic_load_explicit(place_of(l, device, magnitude), memory_order_acquire);
    if (p) return p;
    pthread_mutex_lock(&lock);
    _Atomic(problem *) *place = place_of(l, device, magnitude);
    p = atomic_load(place);
    if (!p && problems < MOST_PROBLEMS && (p = calloc(1, sizeof *p))) {
        p->kernel = l->kernel;
        p->device = device;
        p->magnitude = magnitude;
        memcpy(p->values, l->values, (size_t)count_macros(l->kernel) * sizeof *l->values);
        problems++;
        atomic_store_explicit(place, p, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return p;
}

enum { NOTHING = -2, NOT_STORED = -1 /* so far nobody has measured it */ };

static int recall(const problem *p) {
    long long known = atomic_load_explicit(&p->known, memory_order_relaxed);
    return known && known / 16 == bst__tuning_generation() ? (int)(known % 16) - 1 : NOTHING;
}

static void note(problem *p, int generation, int choice) {
    atomic_store_explicit(&p->known, generation * 16LL + choice + 1, memory_order_relaxed);
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

typedef struct contest {
    const bst_exec *exec;
    const char *op;
    const bst_device *device;
    const void *arguments;
    int count;
    bst_launch launches[BST_MOST_CANDIDATES]; /* the default first */
} contest;

static bool same_launch(const bst_launch *a, const bst_launch *b) {
    return memcmp(a->values, b->values, sizeof a->values) == 0 && a->grid_x == b->grid_x && a->grid_y == b->grid_y &&
           a->block == b->block && a->cluster == b->cluster && a->shared == b->shared;
}

/* The default and those alternatives that differ from it and from each other. `numbers`: which ones. */
static int gather(const bst_launch *launch, const bst_alternatives *a, bst_launch *launches, int *numbers) {
    int count = 0;
    bst_launch next = *launch;
    for (int number = 0; count < BST_MOST_CANDIDATES; number++, next = *launch) {
        int at = 0;
        if (number && !a->offer(&next, number, a->count)) break;
        while (at < count && !same_launch(&launches[at], &next)) at++;
        if (at == count) numbers[count] = number, launches[count++] = next;
    }
    return count;
}

static bst_status queue(void *context, int candidate) {
    const contest *c = context;
    return bst__launch(c->exec, c->op, c->device, &c->launches[candidate], c->arguments);
}

static bst_status key_of(const contest *c, int magnitude, bst_digest *out) {
    bst_machine machine;
    int major, minor, macros = count_macros(c->launches[0].kernel);
    const bst_kernel *kernel = c->launches[0].kernel;
    BST_TRY(bst__nvrtc_version(c->op, &major, &minor));
    BST_TRY(bst__stopwatch_machine(c->op, c->device, major * 1000 + minor * 10, &machine));
    bst_sha256 h;
    bst__choice_key(&h, &machine);
    bst__sha256_add(&h, kernel->file, strlen(kernel->file) + 1);
    bst__sha256_add(&h, kernel->entry, strlen(kernel->entry) + 1);
    bst__sha256_add(&h, &magnitude, sizeof magnitude);
    for (int i = 0; i < c->count; i++) {
        const bst_launch *l = &c->launches[i];
        const unsigned geometry[] = {l->block, l->cluster, l->shared};
        bst__sha256_add(&h, l->values, (size_t)macros * sizeof *l->values);
        bst__sha256_add(&h, geometry, sizeof geometry);
    }
    *out = bst__sha256_end(&h);
    return BST_OK;
}

/* Finds out, and notes, what is the fastest: the number of an alternative, 0 where nothing is known. */
static int settle(contest *c, const bst_launch *launch, const bst_alternatives *a, problem *p, bool may_search) {
    int numbers[BST_MOST_CANDIDATES], generation = bst__tuning_generation(), won = 0;
    c->count = gather(launch, a, c->launches, numbers);
    if (c->count > 1) {
        bst_digest key;
        bst_stopwatch watch = {c->exec, c->op, c->device, c->count, queue, c};
        bst_race race = {c->count, launch->kernel->entry, bst__stopwatch_round, &watch};
        if (key_of(c, p->magnitude, &key) != BST_OK) return 0;
        int mode = bst__capture_relax();
        won = bst__choice(&key, &race, may_search);
        bst__stopwatch_end(&watch);
        bst__capture_restore(mode);
    }
    int number = won < 0 ? NOT_STORED : numbers[won];
    note(p, generation, number);
    return number < 0 ? 0 : number;
}

/* The number of the alternative to take. The device's context is current. */
static int choose(const bst_exec *exec, const char *op, const bst_device *device, const bst_launch *launch,
                  const bst_alternatives *a, const void *arguments) {
    problem *p = problem_of(launch, device->index);
    int known = p ? recall(p) : 0;
    if (known >= 0) return known;
    bool may_search = !a->once && bst__may_search() && bst__stopwatch_allowed(exec);
    if (known == NOT_STORED && !may_search) return 0;
    contest c = {exec, op, device, arguments};
    return settle(&c, launch, a, p, may_search);
}

/* ---- launching --------------------------------------------------------------------------------------------------- */

static bst_status compile_all(const char *op, const bst_collector *collector, const bst_launch *launch,
                              const bst_alternatives *a) {
    bst_launch launches[BST_MOST_CANDIDATES];
    int numbers[BST_MOST_CANDIDATES], count = gather(launch, a, launches, numbers);
    for (int i = 0; i < count; i++) BST_TRY(bst__jit_compile_only(op, collector, &launches[i]));
    return BST_OK;
}

bst_status bst__cuda_launch_tuned(const bst_exec *exec, const char *op, int device, const bst_launch *launch,
                                  const bst_alternatives *alternatives, const void *arguments, size_t bytes) {
    bst_collector collector;
    int tuning = bst__tuning();
    if (launch->grid_x && bst__compiling_only(&collector)) return compile_all(op, &collector, launch, alternatives);
    if (tuning == 0 || !launch->grid_x) return bst__cuda_launch(exec, op, device, launch, arguments, bytes);
    bst_device *d;
    bst_scope scope;
    BST_TRY(bst__device(op, device, &d));
    BST_TRY(bst__enter(op, d, &scope));
    int number = tuning < 0 ? -tuning : choose(exec, op, d, launch, alternatives, arguments);
    bst_launch chosen = *launch;
    if (number && !alternatives->offer(&chosen, number, alternatives->count)) chosen = *launch;
    bst_status status = bst__launch(exec, op, d, &chosen, arguments);
    bst__leave(scope);
    return status;
}
