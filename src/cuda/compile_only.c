/* compile_only.c - compiling and running nothing: the collector that is set, the threads that compile ahead, and the
 * chips that they may ask for. */
#include "cuda/compile_only.h"

#include <pthread.h>
#include <stdatomic.h>

#include "cuda/fork.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t reporting = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool on;
static atomic_int modes;      /* the collector, and threads that compile ahead */
static bst_collector current; /* under the lock */

static void in_child(void) {
    bst__free_lock(&lock);
    bst__free_lock(&reporting);
}
BST_IN_CHILD(in_child)

void bst__cuda_compile_only(const bst_compile_only *collector) {
    pthread_mutex_lock(&lock);
    if (collector) {
        current.request = *collector;
        current.generation++;
    }
    bool was_on = atomic_exchange(&on, collector != NULL);
    atomic_fetch_add(&modes, (collector != NULL) - was_on);
    pthread_mutex_unlock(&lock);
}

bst_status bst__compile_ahead(int device, int arch) {
    bst_chip chip;
    if (arch) BST_TRY(bst__chip_of_arch("compiling ahead", arch, &chip));
    bst_thread *thread = bst__thread();
    if (!thread) return bst__error(BST_NO_MEMORY, "compiling ahead: %zu bytes could not be allocated", sizeof *thread);
    atomic_fetch_add(&modes, (device >= 0) - thread->ahead.on);
    thread->ahead.on = device >= 0;
    thread->ahead.device = device;
    thread->ahead.arch = arch;
    return BST_OK;
}

bool bst__compiling_ahead(int *device) {
    if (!atomic_load_explicit(&modes, memory_order_acquire)) return false;
    const bst_thread *thread = bst__thread();
    if (!thread || !thread->ahead.on) return false;
    *device = thread->ahead.device;
    return true;
}

bool bst__compiling_only(bst_collector *out) {
    if (!atomic_load_explicit(&modes, memory_order_acquire)) return false;
    const bst_thread *thread = bst__thread();
    if (thread && thread->ahead.on) {
        *out = (bst_collector){.request.arch = thread->ahead.arch};
        return true;
    }
    if (!atomic_load_explicit(&on, memory_order_acquire)) return false;
    pthread_mutex_lock(&lock);
    *out = current;
    bool is_on = on;
    pthread_mutex_unlock(&lock);
    return is_on;
}

bst_status bst__chip_of_arch(const char *op, int arch, bst_chip *out) {
    static const bst_chip chips[] = {
        {80, 108, 166912, 40 << 20, 32764, false, 0},   /* A100 */
        {86, 84, 101376, 6 << 20, 32764, false, 0},     /* RTX A6000 */
        {89, 142, 101376, 96 << 20, 32764, false, 0},   /* L40S */
        {90, 132, 232448, 50 << 20, 32764, true, 0},    /* H100, H200 */
        {100, 148, 232448, 126 << 20, 32764, false, 0}, /* B200 */
        {120, 170, 101376, 96 << 20, 32764, false, 0},  /* RTX 5090 */
    };
    for (size_t i = 0; i < sizeof chips / sizeof *chips; i++) {
        if (chips[i].arch != arch) continue;
        *out = chips[i];
        return BST_OK;
    }
    return bst__error(BST_INVALID, "%s: arch is %d; 80, 86, 89, 90, 100 or 120 is needed", op, arch);
}

void *bst__no_memory(size_t bytes) {
    static atomic_uintptr_t next = (uintptr_t)1 << 46;
    return (void *)atomic_fetch_add(&next, (bytes + 255) / 256 * 256);
}

void bst__report(const bst_collector *collector, const bst_launch *launch, const char *options, const char *log) {
    if (!collector->request.report) return;
    pthread_mutex_lock(&reporting);
    collector->request.report(collector->request.context, launch, options, log);
    pthread_mutex_unlock(&reporting);
}
