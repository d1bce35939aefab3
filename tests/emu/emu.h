/* emu.h - the emulator's own parts and the state they share.
 *
 * The emulator implements src/cuda/cuda.h on the CPU: a launch compiles the kernel's text with the host's C++ compiler
 * (compile.c) and runs it (run.c) with one fiber per CUDA thread, in an order that BASTILE_EMU_SEED decides. Launches
 * are synchronous and one at a time; streams mean nothing. */
#ifndef EMU_H
#define EMU_H

#include "cuda/cuda.h"
#include "device/emu_device.h"
#include "fiber.h"

/* A kernel's text compiled for these macros, arch and arguments: loaded once per process. */
bst_status emu_load(const char *op, const bst_launch *launch, const emu_kernel **out);

/* The chip that BASTILE_EMU_ARCH names. */
bst_status emu_chip(const char *op, bst_chip *out);

/* Runs every block of a launch that has been checked. */
bst_status emu_run(const char *op, const bst_launch *launch, const bst_chip *chip, const emu_kernel *kernel,
                   const void *arguments);

/* ---- while a launch runs ----------------------------------------------------------------------------------------- */

typedef struct emu_block emu_block;

/* Why a thread does not run. */
typedef enum emu_wait {
    EMU_WAIT_NOTHING,
    EMU_WAIT_SYNC,
    EMU_WAIT_WARP,
    EMU_WAIT_GROUP,
    EMU_WAIT_BARRIER,
    EMU_WAIT_CLUSTER,
    EMU_EXITED
} emu_wait;

/* A cp.async on its way. */
typedef struct emu_copy {
    void *to;
    const void *from; /* NULL: zeros */
    unsigned group;
} emu_copy;

/* A wgmma on its way. */
typedef struct emu_product_call {
    uint64_t a, b; /* as the kernel's words give them */
    const unsigned *kept;
    unsigned group, sums; /* sums: which of the thread's */
    bool add, is_f16, across;
} emu_product_call;
enum { EMU_MOST_PRODUCTS = 32, EMU_MOST_SUMS = 3, EMU_GROUP = 128, EMU_MOST_GROUPS = 8 };

/* Sums that products on their way add to: what they are without these. */
typedef struct emu_sums {
    float *at;
    unsigned columns, products; /* so many are on their way; none: nothing is here */
    float before[128];
} emu_sums;

/* A CUtensorMap, as the emulator has it. */
typedef struct emu_tensor_map {
    uint64_t mark;
    const void *data;
    uint32_t dims, rows;
    uint64_t sizes[3], strides[2];
} emu_tensor_map;

typedef struct emu_thread {
    fiber *fiber;
    emu_block *block;
    unsigned index;
    emu_wait wait;
    const char *where;   /* of what it waits for */
    const void *barrier; /* EMU_WAIT_BARRIER */
    unsigned value;      /* what it brings to its warp, then what it takes away */
    int operand;
    emu_words words; /* likewise, for EMU_GATHER and EMU_MULTIPLY_ADD */
    bool waited_for_previous;
    unsigned cluster_arrivals, cluster_waits;
    emu_copy *copies;
    unsigned copy_count, copy_room, copy_group; /* copy_group: the one not yet committed */
    unsigned bulk_group, bulk_last_write;       /* likewise; the group of the last write */
    unsigned bulk_read_before;                  /* groups below this one were waited for */
    bool bulk_wrote;
    emu_product_call products[EMU_MOST_PRODUCTS];
    unsigned product_count, product_group; /* as of copies */
    emu_sums sums[EMU_MOST_SUMS];
    unsigned made; /* of the products: those that it has waited for */
} emu_thread;

typedef struct emu_warp {
    unsigned arrived;
    int kind;
    const char *where;
    emu_words words[32];       /* of the last EMU_GATHER */
    float a[16][16], b[8][16]; /* of the last EMU_MULTIPLY_ADD: A's rows, B's columns */
} emu_warp;

struct emu_block {
    unsigned x, y, rank;
    unsigned live; /* threads that have not exited */
    unsigned sync_arrived;
    unsigned group_arrived[EMU_MOST_GROUPS]; /* of four warps */
    unsigned registers[EMU_MOST_GROUPS];     /* of each of their threads; 0: as many as it was launched with */
    const char *sync_where;
    emu_thread *threads;
    emu_warp *warps;
    unsigned char *memory; /* all its shared memory, red zones included */
};

/* A bulk copy on its way. A write is first read from shared memory, then written; what bst_cluster_send sends is a
 * read whose bytes are here already. */
typedef struct emu_bulk {
    emu_thread *thread;
    bool is_write;
    void *to;
    const void *from;
    unsigned char *snapshot;
    unsigned bytes, group;
    void *barrier;
} emu_bulk;

enum { EMU_MOST_CLUSTER = 8, EMU_MOST_SITES = 64, EMU_STATIC_LIMIT = 48 * 1024 };

/* The running launch. */
typedef struct emu_state {
    const char *op;
    const bst_launch *launch;
    bst_chip chip;
    const emu_kernel *kernel;
    const void *arguments;
    unsigned cluster; /* blocks of a cluster, at least 1 */

    emu_block blocks[EMU_MOST_CLUSTER];
    unsigned live;            /* threads of the cluster that have not exited */
    unsigned cluster_arrived; /* at the cluster barrier, in this phase */
    unsigned cluster_phase;

    emu_thread *current;
    emu_thread **ready;
    unsigned ready_count;

    emu_bulk *bulk;
    unsigned bulk_count, bulk_room;
    unsigned bulk_patience; /* while threads can run, one step of a bulk copy in so many switches */

    /* Static shared arrays, in the order in which they were first reached: the same place in every block. */
    struct {
        const void *key;
        unsigned offset, bytes;
    } sites[EMU_MOST_SITES];
    unsigned site_count, static_used, static_end;

    uint64_t random;
    unsigned long long launch_number, seed;
    bst_status status;
    char message[1024];
} emu_state;

extern emu_state emu;
extern emu_runtime emu_device;

/* A number in [0, below). */
unsigned emu_random(unsigned below);

/* Ends the launch with a message that names the kernel and the current thread. Called on a fiber it does not return. */
void emu_fail(const char *where, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The message for a launch that ends for a reason that is no thread's. */
void emu_fail_launch(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* "reduce.cuh:12" of "/a/b/reduce.cuh:12". */
const char *emu_base(const char *where);

/* Makes the current thread wait until emu_wake. */
void emu_sleep(emu_wait wait, const char *where);
void emu_wake(emu_thread *thread);
/* Lets another thread run first. */
void emu_yield(void);

/* Shared memory (shared.c). */
bst_status emu_shared_begin(void);
void emu_shared_fill(emu_block *block); /* garbage in, red zones up */
void emu_shared_end(void);
unsigned char *emu_dynamic_of(const emu_block *block);
void *emu_shared_site(const void *site, unsigned long bytes, const char *where);
/* Whether these bytes lie in the shared memory of this block; of any block of the cluster where block is NULL. */
bool emu_is_shared(const emu_block *block, const void *p, size_t bytes);
/* Fills with bytes that make a wrong result conspicuous. */
void emu_garbage(void *p, size_t bytes);
/* An ASan report here and now where one of these bytes may not be used. */
void emu_touch(const void *p, size_t bytes);
void emu_access(const char *name, const void *p, int bytes, int space, const char *where);
/* Ends the launch unless p is a place for an access by `name`. */
void emu_need(const char *name, const char *argument, const void *p, size_t bytes, size_t alignment, int space,
              const char *where);

/* Ends the launch on a chip older than Hopper, which has neither mbarriers nor bulk copies nor clusters. */
void emu_need_hopper(const char *name, const char *where);

/* Meeting points (meet.c). */
void emu_sync(const char *where);
unsigned emu_meet_warp(int kind, unsigned value, int operand, const char *where);
const emu_words *emu_gather_warp(const emu_words *own, const char *where);
/* Products of a warp (products.c). */
void emu_convert_factors(emu_warp *warp, const emu_thread lanes[32]);
void emu_multiply_add(float d[4], const emu_words *factors, int is_f16, const char *where);
/* And of four warps (warpgroup.c). */
void emu_product(float *sums, int columns, uint64_t a, const unsigned *kept, uint64_t b, int add, int is_f16,
                 int across, const char *where);
void emu_products_commit(void);
void emu_registers(int count, const char *where);
void emu_products_wait(unsigned newest, const char *where);
void emu_cluster_arrive(const char *where);
void emu_cluster_wait(const char *where);
/* A thread exited: the cluster barrier may be complete without it. */
void emu_cluster_check(void);

/* Copies that take their time (copy.c, bulk.c). */
void emu_copy_async16(void *to, const void *from, const char *where);
void emu_copy_commit(void);
void emu_copy_wait(unsigned newest);
void emu_barrier_init(void *barrier, unsigned arrivals, const char *where);
void emu_barrier_arrive(void *barrier, unsigned expected_bytes, const char *where);
void emu_barrier_wait(void *barrier, unsigned parity, const char *where);
/* At the one that lies there in a block of the cluster, whose place this is. */
void emu_barrier_arrive_there(void *there, const char *where);
/* Bytes of a bulk copy have come. */
void emu_barrier_complete(void *barrier, unsigned bytes);
void emu_bulk_read(void *to, const void *from, unsigned bytes, void *barrier, const char *where);
void emu_bulk_write(void *to, const void *from, unsigned bytes, const char *where);
void emu_box_read(void *to, const void *map, int column, int row, int which, void *barrier, int both,
                  const char *where);
/* Bytes, to be freed, to where `to` lies in this block of the cluster, and then to the barrier likewise. */
void emu_bulk_bring(const char *name, unsigned rank, void *to, unsigned char *bytes, unsigned count, void *barrier,
                    const char *where);
void emu_barrier_arrive_at(void *barrier, unsigned rank, const char *where);
void emu_cluster_send(void *shared, void *barrier, unsigned rank, unsigned first, unsigned second, const char *where);
void emu_bulk_commit(void);
void emu_bulk_wait(unsigned newest, int read_only);
/* Takes one bulk copy, chosen at random, one step further. */
void emu_bulk_step(void);
/* Ends the launch where the thread's bulk copies still need its block. */
void emu_bulk_exit(emu_thread *thread);
/* Completes the writes that have outlived the blocks of the cluster just ended. */
void emu_bulk_end(void);

#endif
