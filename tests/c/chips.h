/* chips.h - compiling an operator's kernels for every supported chip, without a GPU.
 *
 * A test describes its calls with tensors that have shapes but no real memory; in compile-only mode the operator makes
 * its checks, chooses its configuration for that chip and compiles, and nothing runs. Register spills fail the test,
 * and shared memory that a block of that chip does not have. sm_86 and sm_89 have the registers and the instructions of
 * sm_80: what was compiled for one of the three with the same macros is not compiled for the others again, and its
 * shared memory checked.
 *
 * Each kernel is compiled for every chip. Each variant of it, by its macros, is compiled for sm_90 and for one of the
 * others, which a hash of the macros decides: a mistake that sm_120 alone has is rarely one variant's alone.
 * BASTILE_TEST_EVERY_CHIP=1 (make test-chips) compiles all for all. */
#ifndef BST_TEST_CHIPS_H
#define BST_TEST_CHIPS_H

#include <limits.h>

#include "cuda/cuda.h"
#include "tensors.h"
#ifndef BST_EMULATE
#include "nvrtc_there.h"
#endif

static const int bst_chips[] = {80, 86, 89, 90, 100, 120};

/* A tensor on the device with an address that is aligned as PyTorch's are, and never used. */
typedef struct bst_shape {
    DLTensor tensor;
    int64_t size[4], stride[4];
} bst_shape;

static inline DLTensor *bst_device_tensor(bst_shape *s, DLDataType type, int dims, const int64_t *size) {
    static uintptr_t address = (uintptr_t)1 << 40;
    int64_t step = 1;
    for (int i = dims - 1; i >= 0; i--) {
        s->size[i] = size[i];
        s->stride[i] = step;
        step *= size[i];
    }
    /* Rows that are not a multiple of 16 bytes still begin at an aligned address. */
    s->tensor = (DLTensor){.data = (void *)address,
                           .device = {kDLCUDA, 0},
                           .ndim = dims,
                           .dtype = type,
                           .shape = s->size,
                           .strides = s->stride};
    address += ((uintptr_t)(step * type.bits / 8) + 511) / 256 * 256;
    return &s->tensor;
}

static inline void *bst_fake_allocate(void *user, DLDevice device, size_t bytes) {
    (void)user, (void)device, (void)bytes;
    return (void *)((uintptr_t)1 << 44);
}

static inline bst_status bst_fake_gemm(void *user, const bst_gemm *problem) {
    (void)user, (void)problem;
    return BST_OK;
}

static const bst_exec bst_fake_exec = {
    .size = sizeof bst_fake_exec, .allocate = bst_fake_allocate, .gemm = bst_fake_gemm};

typedef struct bst_compiled {
    int arch, kernels, spilled, most_registers;
} bst_compiled;

/* A kernel compiled for sm_80 or another of its kind, and its static shared memory. */
typedef struct bst_ampere {
    const bst_kernel *kernel;
    int64_t values[BST_MAX_MACROS];
    int fixed;
} bst_ampere;

static bst_ampere bst_amperes[1024];
static int bst_ampere_count;

static inline void bst_check_shared(const bst_launch *launch, int arch, int fixed) {
    bst_chip chip;
    CHECK_OK(bst__cuda_chip("test", 0, &chip));
    if ((int64_t)launch->shared + fixed > chip.shared_memory)
        FAILED("%s on sm_%d: %u + %d bytes of shared memory, the chip has %d", launch->kernel->entry, arch,
               launch->shared, fixed, chip.shared_memory);
}

static inline bool bst_is_ampere(int arch) { return arch == 80 || arch == 86 || arch == 89; }

/* Whether another chip is the one to compile this variant for; never so for a kernel's first. */
static inline bool bst_is_others(const bst_launch *launch, int arch) {
    enum { AMPERE, BLACKWELL, CONSUMER_BLACKWELL, KINDS };
    static const bst_kernel *seen[KINDS][128];
    const char *every = getenv("BASTILE_TEST_EVERY_CHIP");
    if (arch == 90 || (every && *every)) return false;
    const int kind = bst_is_ampere(arch) ? AMPERE : arch == 100 ? BLACKWELL : CONSUMER_BLACKWELL;
    size_t i = 0;
    while (i < 128 && seen[kind][i] && seen[kind][i] != launch->kernel) i++;
    if (i == 128) return false;
    if (!seen[kind][i]) {
        seen[kind][i] = launch->kernel;
        return false;
    }
    uint32_t hash = 2166136261u; /* FNV-1a, Fowler, Noll and Vo */
    for (size_t b = 0; b < sizeof launch->values; b++) hash = (hash ^ ((const uint8_t *)launch->values)[b]) * 16777619u;
    return (hash ^ hash >> 16) % KINDS != (uint32_t)kind;
}

/* Whether this launch is left out: code of sm_80's kind says all about it, or it is another chip's. */
static inline bool bst_known_kernel(void *context, const bst_launch *launch) {
    const bst_compiled *c = context;
    if (bst_is_others(launch, c->arch)) {
        bst_check_shared(launch, c->arch, 0);
        return true;
    }
    if (!bst_is_ampere(c->arch)) return false;
    for (int i = 0; i < bst_ampere_count; i++) {
        const bst_ampere *a = &bst_amperes[i];
        if (a->kernel != launch->kernel || memcmp(a->values, launch->values, sizeof a->values) != 0) continue;
        bst_check_shared(launch, c->arch, a->fixed);
        return true;
    }
    return false;
}

static inline void bst_report_kernel(void *context, const bst_launch *launch, const char *options, const char *log) {
    bst_compiled *c = context;
    c->kernels++;
    for (const char *at = log; (at = strstr(at, "bytes spill stores")); at++) {
        const char *number = at - 1;
        while (number > log && number[-1] >= '0' && number[-1] <= '9') number--;
        if (atoi(number) > 0) {
            c->spilled++;
            FAILED("%s spills registers on sm_%d\n  options: %s\n  %s", launch->kernel->entry, c->arch, options, log);
        }
    }
    const char *used = strstr(log, "Used ");
    if (used && atoi(used + 5) > c->most_registers) c->most_registers = atoi(used + 5);
    if (!used) FAILED("%s on sm_%d: no register count in the report \"%s\"", launch->kernel->entry, c->arch, log);
    const char *number = strstr(log, " bytes smem");
    while (number && number > log && number[-1] >= '0' && number[-1] <= '9') number--;
    int fixed = number ? atoi(number) : 0;
    bst_check_shared(launch, c->arch, fixed);
    if (!bst_is_ampere(c->arch) || bst_ampere_count == sizeof bst_amperes / sizeof *bst_amperes) return;
    bst_ampere *a = &bst_amperes[bst_ampere_count++];
    a->kernel = launch->kernel;
    memcpy(a->values, launch->values, sizeof a->values);
    a->fixed = fixed;
}

/* Runs `calls` in compile-only mode for each chip of these, which are the only ones that the operator has kernels for.
 */
#ifdef BST_EMULATE /* which compiles with the host's compiler: for no chip */
static inline void bst_for_chips(const char *op, void (*calls)(void), int oldest, int newest) {
    (void)calls, (void)oldest, (void)newest;
    printf("     %s: left out, for the emulator compiles for no chip\n", op);
}
#else
static inline void bst_for_chips(const char *op, void (*calls)(void), int oldest, int newest) {
    if (!bst_nvrtc_is_there()) return;
    for (size_t i = 0; i < sizeof bst_chips / sizeof *bst_chips; i++) {
        if (bst_chips[i] < oldest || bst_chips[i] > newest) continue;
        bst_compiled compiled = {.arch = bst_chips[i]};
        bst_compile_only collector = {bst_chips[i], bst_report_kernel, &compiled, bst_known_kernel};
        bst__cuda_compile_only(&collector);
        calls();
        bst__cuda_compile_only(NULL);
        CHECK(compiled.kernels > 0 || bst_chips[i] == 86 || bst_chips[i] == 89);
        printf("     %s: sm_%d, %d kernels, at most %d registers, %d spilled\n", op, bst_chips[i], compiled.kernels,
               compiled.most_registers, compiled.spilled);
    }
}
#endif

static inline void bst_for_every_chip(const char *op, void (*calls)(void)) { bst_for_chips(op, calls, 0, INT_MAX); }

#endif
