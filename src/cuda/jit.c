/* jit.c - the table of compiled kernels: found by kernel, chip and macro values, compiled on a miss.
 *
 * A hit costs a hash over the values and some loads of atomic variables: no lock, no allocation, no text. Entries are
 * never removed, and a table that has been outgrown is kept, for a reader may still be in it. */
#include "cuda/jit.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fork.h"
#include "cuda/nvrtc.h"

typedef enum stage { IDLE, BUILDING, BUILT, FAILED } stage;

/* What has been done with a function on a device. */
enum { HAS_FUNCTION = 1, HAS_SHARED = 2, HAS_CLUSTER = 4, HAS_RESIDENT = 8 };

enum { IN_CACHE = -1 };

typedef struct key {
    const bst_kernel *kernel;
    const int64_t *values;
    int count, arch;
    int generation; /* 0: code to run; IN_CACHE: code that was stored; else of a collector */
    uint64_t hash;
} key;

struct bst_jit_entry {
    key key;
    int64_t values[BST_MAX_MACROS]; /* where key.values points */
    _Atomic(stage) stage;           /* changed under the lock */
    bst_status status;              /* FAILED: what every call gets; under the lock */
    char *failure;
    CUkernel code;                                  /* BUILT, generation 0 */
    _Atomic(CUfunction) functions[BST_MAX_DEVICES]; /* where `prepared` says so */
    atomic_uint prepared[BST_MAX_DEVICES];
    atomic_uint resident[BST_MAX_DEVICES]; /* blocks that the device holds at once, in clusters: where it says so */
};

typedef struct table {
    struct table *outgrown;
    size_t mask, used;
    _Atomic(bst_jit_entry *) slots[];
} table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t built = PTHREAD_COND_INITIALIZER;
static _Atomic(table *) entries;
static _Atomic(int64_t) compiled_count, cached_count;

/* The thread that was building a kernel is not in the child, where the next call begins anew. */
static void in_child(void) {
    built = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    bst__free_lock(&lock);
    table *t = atomic_load(&entries);
    for (size_t i = 0; t && i <= t->mask; i++) {
        bst_jit_entry *e = atomic_load(&t->slots[i]);
        if (e && e->stage == BUILDING) e->stage = IDLE;
    }
}
BST_IN_CHILD(in_child)

/* ---- the table --------------------------------------------------------------------------------------------------- */

static key key_of(const bst_launch *launch, int arch, int generation) {
    key k = {.kernel = launch->kernel, .values = launch->values, .arch = arch, .generation = generation};
    uint64_t h = (uint64_t)(uintptr_t)launch->kernel ^ (uint64_t)arch << 48 ^ (uint64_t)generation << 32;
    while (k.count < BST_MAX_MACROS && launch->kernel->macros[k.count]) {
        /* Multiplying by an odd number near 2^64 / golden ratio moves low bits up; the shift brings them down again. */
        h = (h ^ (uint64_t)launch->values[k.count++]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    k.hash = h;
    return k;
}

static bool same(const key *a, const key *b) {
    return a->hash == b->hash && a->kernel == b->kernel && a->arch == b->arch && a->generation == b->generation &&
           memcmp(a->values, b->values, (size_t)a->count * sizeof *a->values) == 0;
}

/* The slot of a key, or the free one where it would go. A table is never full. */
static _Atomic(bst_jit_entry *) *slot_of(table *t, const key *k) {
    for (size_t i = k->hash;; i++) {
        bst_jit_entry *e = atomic_load_explicit(&t->slots[i & t->mask], memory_order_acquire);
        if (!e || same(&e->key, k)) return &t->slots[i & t->mask];
    }
}

static bst_jit_entry *find(const key *k) {
    table *t = atomic_load_explicit(&entries, memory_order_acquire);
    return t ? atomic_load_explicit(slot_of(t, k), memory_order_acquire) : NULL;
}

/* The table with room for one more entry; NULL where there is no memory. Under the lock. */
static table *with_room(void) {
    table *old = atomic_load(&entries);
    if (old && 2 * (old->used + 1) <= old->mask) return old;
    size_t size = old ? 2 * (old->mask + 1) : 64;
    table *t = calloc(1, sizeof *t + size * sizeof *t->slots);
    if (!t) return NULL;
    t->mask = size - 1;
    t->outgrown = old;
    for (size_t i = 0; old && i <= old->mask; i++) {
        bst_jit_entry *e = atomic_load(&old->slots[i]);
        if (!e) continue;
        atomic_store(slot_of(t, &e->key), e);
        t->used++;
    }
    atomic_store_explicit(&entries, t, memory_order_release);
    return t;
}

/* Under the lock. */
static bst_jit_entry *find_or_add(const key *k) {
    bst_jit_entry *e = find(k);
    if (e) return e;
    table *t = with_room();
    e = t ? calloc(1, sizeof *e) : NULL;
    if (!e) return NULL;
    e->key = *k;
    e->key.values = e->values;
    memcpy(e->values, k->values, (size_t)k->count * sizeof *k->values);
    atomic_store_explicit(slot_of(t, &e->key), e, memory_order_release);
    t->used++;
    return e;
}

/* ---- building ---------------------------------------------------------------------------------------------------- */

typedef bst_status (*builder)(const char *op, bst_jit_entry *entry, const void *context);

/* Remembers why a kernel does not compile, without the operator's name: the next call may be another's. */
static stage remember(const char *op, bst_jit_entry *e, bst_status status) {
    if (status == BST_OK) return BUILT;
    /* Whatever is not the kernel's own fault may be mended while the process runs. */
    if (status != BST_COMPILE) return IDLE;
    const char *message = bst_last_error();
    size_t prefix = strlen(op);
    if (strncmp(message, op, prefix) == 0 && strncmp(message + prefix, ": ", 2) == 0) message += prefix + 2;
    e->status = status;
    e->failure = strdup(message);
    return e->failure ? FAILED : IDLE;
}

/* Makes an entry BUILT by `build`, or waits for the thread that is at it. */
static bst_status ensure(const char *op, const key *k, builder build, const void *context, bst_jit_entry **out) {
    pthread_mutex_lock(&lock);
    bst_jit_entry *e = *out = find_or_add(k);
    bst_status status = BST_OK;
    while (e && e->stage == BUILDING) pthread_cond_wait(&built, &lock);
    if (!e) {
        status = bst__error(BST_NO_MEMORY, "%s: %zu bytes could not be allocated", op, sizeof *e);
    } else if (e->stage == FAILED) {
        status = bst__error(e->status, "%s: %s", op, e->failure);
    } else if (e->stage == IDLE) {
        e->stage = BUILDING;
        pthread_mutex_unlock(&lock);
        status = build(op, e, context);
        pthread_mutex_lock(&lock);
        atomic_store_explicit(&e->stage, remember(op, e, status), memory_order_release);
        pthread_cond_broadcast(&built);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

typedef struct job {
    const char *op;
    const key *key;
    bst_options options;
    bst_texts texts;
    bool compiled;
} job;

static bst_status compile(void *context, bst_blob *out) {
    job *j = context;
    j->compiled = true;
    return bst__nvrtc_compile(j->op, j->key->kernel, j->key->arch, &j->options, &j->texts, out, NULL);
}

/* Everything that the code may depend on: no paths, no times. The options name chip and macros. */
static bst_digest digest_of(const job *j, int major, int minor) {
    bst_hash h = BST_HASH_BEGIN;
    bst__hash_add(&h, &major, sizeof major);
    bst__hash_add(&h, &minor, sizeof minor);
    bst__hash_add(&h, j->options.joined, strlen(j->options.joined) + 1);
    for (int i = 0; i < j->texts.count; i++) {
        bst__hash_add(&h, j->texts.names[i], strlen(j->texts.names[i]) + 1);
        bst__hash_add(&h, j->texts.texts[i], strlen(j->texts.texts[i]) + 1);
    }
    return bst__hash_end(h);
}

static bst_status load_error(const char *op, CUresult result, int major, int minor) {
    int driver = bst__driver_version();
    if (major <= driver / 1000) return bst__driver_error(op, "cuLibraryLoadData", result);
    return bst__error(
        BST_NO_CUDA,
        "%s: the driver (CUDA %d.%d) does not load the code of the newer NVRTC %d.%d; install NVRTC %d or "
        "a newer driver",
        op, driver / 1000, driver % 1000 / 10, major, minor, driver / 1000);
}

/* code NULL: it goes into the cache and is not loaded. */
static bst_status build_code(job *j, CUkernel *code) {
    int major, minor;
    BST_TRY(bst__nvrtc_version(j->op, &major, &minor));
    BST_TRY(bst__nvrtc_options(j->op, j->key->kernel, j->key->arch, j->key->values, false, &j->options));
    BST_TRY(bst__texts(j->op, j->key->kernel->file, &j->texts));
    bst_digest digest = digest_of(j, major, minor);
    CUlibrary library = NULL;
    CUresult result;
    do {
        bst_blob cubin;
        BST_TRY(bst__cache_get(&digest, BST_CACHE_CODE, compile, j, &cubin));
        if (!code) {
            free(cubin.data);
            return BST_OK;
        }
        result = bst__driver()->cuLibraryLoadData(&library, cubin.data, NULL, NULL, 0, NULL, NULL, 0);
        free(cubin.data);
        if (result == CUDA_SUCCESS) break;
        /* An entry from disk that the driver refuses is made anew, once. */
        bst__cache_drop(&digest, BST_CACHE_CODE);
    } while (!j->compiled);
    if (result != CUDA_SUCCESS) return load_error(j->op, result, major, minor);
    result = bst__driver()->cuLibraryGetKernel(code, library, j->key->kernel->entry);
    if (result == CUDA_SUCCESS) return BST_OK;
    bst__driver()->cuLibraryUnload(library);
    return bst__driver_error(j->op, "cuLibraryGetKernel", result);
}

static bst_status build(const char *op, bst_jit_entry *e, const void *context) {
    (void)context;
    bool is_loaded = e->key.generation != IN_CACHE; /* else there may be no driver */
    job j = {.op = op, .key = &e->key};
    int mode = is_loaded ? bst__capture_relax() : 0;
    bst_status status = build_code(&j, is_loaded ? &e->code : NULL);
    if (is_loaded) bst__capture_restore(mode);
    if (status == BST_OK) atomic_fetch_add(j.compiled ? &compiled_count : &cached_count, 1);
    return status;
}

/* Readies an entry's function on a device whose context is current. Two threads may do it at once: to the same end. */
static bst_status prepare(const char *op, const bst_device *device, bst_jit_entry *e, const bst_launch *launch,
                          unsigned wanted) {
    CUfunction function = NULL;
    BST_DRIVER_TRY(op, cuKernelGetFunction, &function, e->code);
    if (wanted & HAS_SHARED) {
        int fixed = 0;
        BST_DRIVER_TRY(op, cuFuncGetAttribute, &fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function);
        BST_DRIVER_TRY(op, cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                       device->chip.shared_memory - fixed);
    }
    if (wanted & HAS_CLUSTER)
        BST_DRIVER_TRY(op, cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    if (wanted & HAS_RESIDENT) {
        int clusters = 0;
        CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
        attribute.value.clusterDim.x = launch->cluster;
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
        CUlaunchConfig config = {launch->cluster, 1, 1, launch->block, 1, 1, launch->shared, NULL, &attribute, 1};
        BST_DRIVER_TRY(op, cuOccupancyMaxActiveClusters, &clusters, function, &config);
        /* None: the launch itself will say why. */
        atomic_store_explicit(&e->resident[device->index],
                              clusters > 0 ? (unsigned)clusters * launch->cluster : UINT32_MAX, memory_order_relaxed);
    }
    atomic_store_explicit(&e->functions[device->index], function, memory_order_relaxed);
    atomic_fetch_or_explicit(&e->prepared[device->index], wanted, memory_order_release);
    return BST_OK;
}

bst_status bst__jit_function(const char *op, const bst_device *device, const bst_launch *launch, CUfunction *out,
                             unsigned *most_blocks) {
    key k = key_of(launch, device->chip.arch, 0);
    bst_jit_entry *e = find(&k);
    if (!e || atomic_load_explicit(&e->stage, memory_order_acquire) != BUILT) BST_TRY(ensure(op, &k, build, NULL, &e));
    /* More than 48 KiB, and more than 8 blocks in a cluster, are to be asked for. The limit costs nothing by itself, so
     * it goes to the chip's at the first launch that has any dynamic shared memory. */
    unsigned wanted = HAS_FUNCTION | (launch->shared ? HAS_SHARED : 0) | (launch->cluster > 8 ? HAS_CLUSTER : 0) |
                      (launch->resident ? HAS_RESIDENT : 0);
    if ((atomic_load_explicit(&e->prepared[device->index], memory_order_acquire) & wanted) != wanted) {
        int mode = bst__capture_relax();
        bst_status status = prepare(op, device, e, launch, wanted);
        bst__capture_restore(mode);
        BST_TRY(status);
    }
    *out = atomic_load_explicit(&e->functions[device->index], memory_order_relaxed);
    *most_blocks =
        launch->resident ? atomic_load_explicit(&e->resident[device->index], memory_order_relaxed) : UINT32_MAX;
    return BST_OK;
}

void bst_kernel_counts(int64_t *compiled, int64_t *cached) {
    if (compiled) *compiled = atomic_load(&compiled_count);
    if (cached) *cached = atomic_load(&cached_count);
}

/* ---- compiling only ---------------------------------------------------------------------------------------------- */

typedef struct report_job {
    const bst_collector *collector;
    const bst_launch *launch;
} report_job;

static bst_status build_report(const char *op, bst_jit_entry *e, const void *context) {
    const report_job *r = context;
    bst_options options;
    bst_texts texts;
    bst_blob cubin = {0};
    char *log = NULL;
    BST_TRY(bst__nvrtc_options(op, e->key.kernel, e->key.arch, e->key.values, true, &options));
    BST_TRY(bst__texts(op, e->key.kernel->file, &texts));
    /* No cache: what is wanted is the log. */
    bst_status status = bst__nvrtc_compile(op, e->key.kernel, e->key.arch, &options, &texts, &cubin, &log);
    if (status == BST_OK) bst__report(r->collector, r->launch, options.joined, log ? log : "");
    free(cubin.data);
    free(log);
    return status;
}

bst_status bst__jit_compile_only(const char *op, const bst_collector *collector, int device, const bst_launch *launch) {
    const bst_compile_only *wanted = &collector->request;
    if (wanted->known && wanted->known(wanted->context, launch)) return BST_OK;
    bst_chip chip = {.arch = wanted->arch};
    if (!chip.arch) BST_TRY(bst__cuda_chip(op, device, &chip));
    bool is_ahead = !collector->generation;
    key k = key_of(launch, chip.arch, is_ahead && wanted->arch ? IN_CACHE : collector->generation);
    report_job r = {collector, launch};
    bst_jit_entry *e;
    return ensure(op, &k, is_ahead ? build : build_report, &r, &e);
}
