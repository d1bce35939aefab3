/* run.c - runs a launch: clusters one after another in a random order, the threads of a cluster's blocks in a random
 * order, each until it waits, exits or yields. Bulk copies move on between threads. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"
#include "sanitize.h"

emu_state emu;

static void waited_for_previous(void) { emu.current->waited_for_previous = true; }

emu_runtime emu_device = {
    .shared = emu_shared_site,
    .access = emu_access,
    .waited_for_previous = waited_for_previous,
    .sync = emu_sync,
    .warp = emu_meet_warp,
    .gather = emu_gather_warp,
    .multiply_add = emu_multiply_add,
    .copy_async16 = emu_copy_async16,
    .copy_commit = emu_copy_commit,
    .copy_wait = emu_copy_wait,
    .barrier_init = emu_barrier_init,
    .barrier_arrive = emu_barrier_arrive,
    .barrier_wait = emu_barrier_wait,
    .barrier_arrive_at = emu_barrier_arrive_at,
    .bulk_read = emu_bulk_read,
    .bulk_write = emu_bulk_write,
    .box_read = emu_box_read,
    .bulk_commit = emu_bulk_commit,
    .bulk_wait = emu_bulk_wait,
    .product = emu_product,
    .products_commit = emu_products_commit,
    .registers = emu_registers,
    .products_wait = emu_products_wait,
    .cluster_arrive = emu_cluster_arrive,
    .cluster_wait = emu_cluster_wait,
    .cluster_send = emu_cluster_send,
};

/* Marsaglia, "Xorshift RNGs", 2003, with Vigna's multiplier. */
unsigned emu_random(unsigned below) {
    emu.random ^= emu.random >> 12;
    emu.random ^= emu.random << 25;
    emu.random ^= emu.random >> 27;
    const uint64_t high = (emu.random * 0x2545f4914f6cdd1dull) >> 32;
    return (unsigned)(high * below >> 32);
}

const char *emu_base(const char *where) {
    const char *slash = strrchr(where, '/');
    return slash != NULL ? slash + 1 : where;
}

/* ---- failure ----------------------------------------------------------------------------------------------------- */

static void describe(char *out, size_t room, const char *text) {
    const emu_thread *t = emu.current;
    char thread[96] = "";
    if (t != NULL) {
        snprintf(thread, sizeof thread, ", block (%u, %u), thread %u", t->block->x, t->block->y, t->index);
    }
    snprintf(out, room, "kernel %s of %s%s: %s (BASTILE_EMU_SEED=%llu, launch %llu)", emu.launch->kernel->entry,
             emu.launch->kernel->file, thread, text, emu.seed, emu.launch_number);
}

void emu_fail(const char *where, const char *format, ...) {
    char text[512];
    int used = where != NULL ? snprintf(text, sizeof text, "at %s: ", emu_base(where)) : 0;
    if (used < 0 || used >= (int)sizeof text) used = 0;
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, list);
    va_end(list);
    if (emu.status == BST_OK) {
        emu.status = BST_CUDA;
        describe(emu.message, sizeof emu.message, text);
    }
    if (emu.current != NULL) fiber_leave();
}

void emu_fail_launch(const char *format, ...) {
    if (emu.status != BST_OK) return;
    char text[800];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    emu.current = NULL;
    emu.status = BST_CUDA;
    describe(emu.message, sizeof emu.message, text);
}

#ifdef EMU_ASAN
/* A sanitizer ends the process; which thread of which kernel it was stands below its report. */
static void at_death(void) {
    if (emu.launch == NULL) return;
    char text[512];
    describe(text, sizeof text, "ended by a sanitizer");
    fprintf(stderr, "emulator: %s\n", text);
}
static void set_death_callback(void) { __sanitizer_set_death_callback(at_death); }
#endif

static const char *wait_text(emu_wait wait) {
    switch (wait) {
        case EMU_WAIT_SYNC:
            return "wait in bst_sync";
        case EMU_WAIT_WARP:
            return "wait for their warp";
        case EMU_WAIT_GROUP:
            return "wait for their four warps";
        case EMU_WAIT_BARRIER:
            return "wait for an mbarrier";
        case EMU_WAIT_CLUSTER:
            return "wait for the cluster";
        case EMU_EXITED:
            return "have exited";
        case EMU_WAIT_NOTHING:
            break;
    }
    return "can run";
}

/* Every thread of the cluster, by runs of threads that wait for the same. */
static void report_deadlock(void) {
    char text[640];
    int used = snprintf(text, sizeof text, "no thread can go on:");
    for (unsigned b = 0; b < emu.cluster; ++b) {
        const emu_block *block = &emu.blocks[b];
        for (unsigned first = 0, last; first < emu.launch->block; first = last + 1) {
            const emu_thread *t = &block->threads[first];
            for (last = first; last + 1 < emu.launch->block; ++last) {
                const emu_thread *next = &block->threads[last + 1];
                if (next->wait != t->wait || (t->wait != EMU_EXITED && strcmp(next->where, t->where) != 0)) break;
            }
            if (used < 0 || used >= (int)sizeof text - 1) break;
            used += snprintf(text + used, sizeof text - (size_t)used, " block (%u, %u) threads %u-%u %s%s%s;", block->x,
                             block->y, first, last, wait_text(t->wait), t->wait != EMU_EXITED ? " at " : "",
                             t->wait != EMU_EXITED ? emu_base(t->where) : "");
        }
    }
    emu_fail_launch("%s", text);
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

static void set_current(emu_thread *t) {
    emu.current = t;
    if (t == NULL) return;
    emu_device.thread = t->index;
    emu_device.block_x = t->block->x;
    emu_device.block_y = t->block->y;
    emu_device.cluster_rank = t->block->rank;
    emu_device.dynamic_shared = emu_dynamic_of(t->block);
}

void emu_wake(emu_thread *thread) {
    thread->wait = EMU_WAIT_NOTHING;
    emu.ready[emu.ready_count++] = thread;
}

void emu_sleep(emu_wait wait, const char *where) {
    emu.current->wait = wait;
    emu.current->where = where;
    fiber_leave();
}

void emu_yield(void) {
    emu_wake(emu.current);
    fiber_leave();
}

static void thread_body(void *context) {
    emu_thread *t = context;
    emu.kernel->run(emu.arguments);
    t->wait = EMU_EXITED;
    emu_bulk_exit(t);
    if (t->product_count > 0) emu_fail(NULL, "the thread ends before it has waited for its products");
    --t->block->live;
    --emu.live;
    emu_cluster_check();
}

static void run_cluster_threads(void) {
    while (emu.status == BST_OK && emu.live > 0) {
        if (emu.bulk_count > 0 && (emu.ready_count == 0 || emu_random(emu.bulk_patience) == 0)) {
            set_current(NULL);
            emu_bulk_step();
            continue;
        }
        if (emu.ready_count == 0) {
            report_deadlock();
            return;
        }
        const unsigned i = emu_random(emu.ready_count);
        emu_thread *t = emu.ready[i];
        emu.ready[i] = emu.ready[--emu.ready_count];
        set_current(t);
        fiber_run(t->fiber);
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static bool begin_block(emu_block *block, unsigned x, unsigned y, unsigned rank) {
    block->x = x;
    block->y = y;
    block->rank = rank;
    block->live = emu.launch->block;
    block->sync_arrived = 0;
    memset(block->group_arrived, 0, sizeof block->group_arrived);
    memset(block->registers, 0, sizeof block->registers);
    memset(block->warps, 0, (emu.launch->block + 31) / 32 * sizeof *block->warps);
    emu_shared_fill(block);
    for (unsigned i = 0; i < emu.launch->block; ++i) {
        emu_thread *t = &block->threads[i];
        emu_copy *const copies = t->copies;
        const unsigned room = t->copy_room;
        *t = (emu_thread){.block = block, .index = i, .copies = copies, .copy_room = room};
        t->fiber = fiber_new(thread_body, t);
        if (t->fiber == NULL) return false;
        emu_wake(t);
    }
    return true;
}

static void end_blocks(void) {
    for (unsigned b = 0; b < emu.cluster; ++b) {
        for (unsigned i = 0; i < emu.launch->block; ++i) {
            fiber_free(emu.blocks[b].threads[i].fiber);
            emu.blocks[b].threads[i].fiber = NULL;
        }
    }
}

static void run_cluster(unsigned index) {
    const unsigned across = emu.launch->grid_x / emu.cluster;
    const unsigned x = index % across * emu.cluster, y = index / across;
    emu.ready_count = 0;
    emu.live = emu.cluster * emu.launch->block;
    emu.cluster_arrived = emu.cluster_phase = 0;
    bool begun = true;
    for (unsigned rank = 0; rank < emu.cluster && begun; ++rank) {
        begun = begin_block(&emu.blocks[rank], x + rank, y, rank);
    }
    if (begun) {
        run_cluster_threads();
    } else {
        emu_fail_launch("no memory for the stacks of %u threads", emu.live);
    }
    set_current(NULL);
    end_blocks();
    emu_bulk_end();
}

static bool allocate_blocks(void) {
    const unsigned threads = emu.launch->block;
    bool complete = true;
    for (unsigned b = 0; b < emu.cluster; ++b) {
        emu.blocks[b].threads = calloc(threads, sizeof(emu_thread));
        emu.blocks[b].warps = calloc((threads + 31) / 32, sizeof(emu_warp));
        complete = complete && emu.blocks[b].threads != NULL && emu.blocks[b].warps != NULL;
    }
    emu.ready = calloc((size_t)threads * emu.cluster, sizeof(emu_thread *));
    return emu_shared_begin() == BST_OK && complete && emu.ready != NULL;
}

static void free_blocks(void) {
    for (unsigned b = 0; b < emu.cluster; ++b) {
        for (unsigned i = 0; emu.blocks[b].threads != NULL && i < emu.launch->block; ++i) {
            free(emu.blocks[b].threads[i].copies);
        }
        free(emu.blocks[b].threads);
        free(emu.blocks[b].warps);
    }
    emu_shared_end();
    free(emu.ready);
    free(emu.bulk);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

static void run_grid(void) {
    const unsigned rows = emu.launch->grid_y ? emu.launch->grid_y : 1;
    const unsigned count = emu.launch->grid_x / emu.cluster * rows;
    unsigned *order = malloc(count * sizeof *order);
    if (order == NULL || !allocate_blocks()) {
        emu_fail_launch("no memory for a block");
    } else {
        for (unsigned i = 0; i < count; ++i) { /* Fisher and Yates' shuffle, inside out */
            const unsigned j = emu_random(i + 1);
            order[i] = order[j];
            order[j] = i;
        }
        for (unsigned i = 0; i < count && emu.status == BST_OK; ++i) run_cluster(order[i]);
    }
    free_blocks();
    free(order);
}

static unsigned long long seed_from_environment(void) {
    const char *text = getenv("BASTILE_EMU_SEED");
    return text != NULL && *text != 0 ? strtoull(text, NULL, 10) : 1;
}

bst_status emu_run(const char *op, const bst_launch *launch, const bst_chip *chip, const emu_kernel *kernel,
                   const void *arguments) {
    static unsigned long long launches;
#ifdef EMU_ASAN
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_death_callback);
#endif
    memset(&emu, 0, sizeof emu);
    emu.op = op;
    emu.launch = launch;
    emu.chip = *chip;
    emu.kernel = kernel;
    emu.arguments = arguments;
    emu.cluster = launch->cluster > 1 ? launch->cluster : 1;
    emu.seed = seed_from_environment();
    emu.launch_number = ++launches;
    emu.random = (emu.seed + 1) * 0x9e3779b97f4a7c15ull ^ emu.launch_number * 0xd1342543de82ef95ull;
    if (emu.random == 0) emu.random = 1;
    static const unsigned patience[] = {4, 64, 1024, 16384};
    emu.bulk_patience = patience[emu_random(4)];
    emu_device.threads = launch->block;
    emu_device.blocks_x = launch->grid_x;
    emu_device.blocks_y = launch->grid_y ? launch->grid_y : 1;
    run_grid();
    emu.launch = NULL;
    return emu.status == BST_OK ? BST_OK : bst__error(emu.status, "%s: %s", op, emu.message);
}
