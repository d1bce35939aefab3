/* emu_device.h - the seam between a kernel compiled for the CPU and the emulator that runs it.
 *
 * The kernel's shared object defines `emu_current`, which the emulator points at its one emu_runtime, and one
 * emu_kernel per BST_KERNEL. The emulator keeps the coordinates those of the thread it runs. `where` is "file:line" of
 * the call. */
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H

/* What memory an access may go to. */
enum { EMU_ANY, EMU_GLOBAL, EMU_SHARED };
/* What the lanes of a warp meet for. */
enum { EMU_SYNC_WARP, EMU_SHUFFLE_XOR, EMU_GATHER, EMU_MULTIPLY_ADD };

/* What a lane gives to all others at once, in one meeting: a shuffle a word would switch threads for each. */
enum { EMU_LANE_WORDS = 6 };
/* Of an address in units of 16 bytes, where a product reads: above are rows. */
enum { EMU_ADDRESS_BITS = 48 };
typedef struct emu_words {
    unsigned w[EMU_LANE_WORDS];
} emu_words;

typedef struct emu_runtime {
    unsigned thread, threads, block_x, block_y, blocks_x, blocks_y, cluster_rank;
    unsigned char *dynamic_shared;

    /* The static array whose declaration is identified by the address `site`. */
    void *(*shared)(const void *site, unsigned long bytes, const char *where);
    /* Checks an access of 2, 4, 8 or 16 bytes, and now and then lets another thread run first. */
    void (*access)(const char *name, const void *p, int bytes, int space, const char *where);
    void (*waited_for_previous)(void);

    void (*sync)(const char *where);
    unsigned (*warp)(int kind, unsigned value, int operand, const char *where);
    /* What each of the 32 lanes gave: theirs until this lane meets the others again. */
    const emu_words *(*gather)(const emu_words *own, const char *where);
    /* A lane's part of mma.m16n8k16: four words of A, two of B. */
    void (*multiply_add)(float d[4], const emu_words *factors, int is_f16, const char *where);

    void (*copy_async16)(void *to, const void *from, const char *where);
    void (*copy_commit)(void);
    void (*copy_wait)(unsigned newest);

    void (*barrier_init)(void *barrier, unsigned arrivals, const char *where);
    void (*barrier_arrive)(void *barrier, unsigned expected_bytes, const char *where);
    void (*barrier_wait)(void *barrier, unsigned parity, const char *where);
    void (*barrier_arrive_at)(void *barrier, unsigned rank, const char *where);

    void (*bulk_read)(void *to, const void *from, unsigned bytes, void *barrier, const char *where);
    void (*bulk_write)(void *to, const void *from, unsigned bytes, const char *where);
    /* A box of a tensor map; both: into each of the two blocks of a cluster. */
    void (*box_read)(void *to, const void *map, int column, int row, int which, void *barrier, int both,
                     const char *where);
    void (*bulk_commit)(void);
    void (*bulk_wait)(unsigned newest, int read_only);

    /* A thread's part of wgmma.mma_async of so many columns; a, b: addresses in units of 16 bytes, above
     * EMU_ADDRESS_BITS the rows of b's boxes; kept: a's words in registers, or NULL. */
    void (*product)(float *sums, int columns, unsigned long a, const unsigned *kept, unsigned long b, int add,
                    int is_f16, int across, const char *where);
    void (*products_commit)(void);
    /* Registers of a thread of this warp group from here on. */
    void (*registers)(int count, const char *where);
    void (*products_wait)(unsigned newest, const char *where);

    void (*cluster_arrive)(const char *where);
    void (*cluster_wait)(const char *where);
    void (*cluster_send)(void *shared, void *barrier, unsigned rank, unsigned first, unsigned second,
                         const char *where);
} emu_runtime;

typedef struct emu_kernel {
    void (*run)(const void *arguments);
    unsigned long argument_bytes;
    unsigned threads; /* the most a block may have */
} emu_kernel;

#endif
