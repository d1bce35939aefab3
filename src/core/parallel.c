/* parallel.c - running a body over a range on the caller's threads, or on threads of our own.
 *
 * Our own threads are started for one call and joined at its end: a C program that calls often passes its pool instead,
 * and nothing of ours outlives the call. */
#include <pthread.h>
#include <unistd.h>

#include "core/core.h"

enum { MAX_THREADS = 64 };

typedef struct range {
    bst_body body;
    void *context;
    int64_t begin, end;
} range;

static void *run(void *argument) {
    const range *r = argument;
    r->body(r->context, r->begin, r->end);
    return NULL;
}

int64_t bst__grain(int64_t work) {
    /* 16384 elements take some microseconds: about what waking a thread costs. */
    int64_t rows = work > 0 ? 16384 / work : 16384;
    return rows > 1 ? rows : 1;
}

int64_t bst__processors(void) {
    int64_t processors = sysconf(_SC_NPROCESSORS_ONLN);
    return processors < 1 ? 1 : processors < MAX_THREADS ? processors : MAX_THREADS;
}

bst_status bst__parallel_for(const bst_exec *exec, int64_t count, int64_t grain, bst_body body, void *context) {
    if (count <= 0) return BST_OK;
    if (grain < 1) grain = 1;
    if (exec && exec->parallel_for) return exec->parallel_for(exec->user, count, grain, body, context), BST_OK;
    int64_t threads = bst__processors();
    if (threads > count / grain) threads = count / grain;
    if (threads <= 1) return body(context, 0, count), BST_OK;
    range ranges[MAX_THREADS];
    pthread_t started[MAX_THREADS];
    bool joinable[MAX_THREADS];
    int64_t step = (count + threads - 1) / threads;
    for (int64_t t = 0; t < threads; t++) {
        int64_t begin = t * step, end = begin + step < count ? begin + step : count;
        ranges[t] = (range){body, context, begin < count ? begin : count, end};
        /* The last range is this thread's; so is one whose thread could not be started. */
        joinable[t] = t + 1 < threads && pthread_create(&started[t], NULL, run, &ranges[t]) == 0;
        if (!joinable[t]) run(&ranges[t]);
    }
    for (int64_t t = 0; t < threads; t++)
        if (joinable[t]) pthread_join(started[t], NULL);
    return BST_OK;
}
