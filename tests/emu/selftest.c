/* selftest.c - shows that the emulator runs right kernels rightly in every order it chooses, and that it sees each
 * mistake it claims to see: the same kernel with one barrier or wait taken out. A line per check; exit status 0 where
 * all hold. It is linked with the emulator and src/core, and brings its own embedded source, read from selftest.cu. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/cuda.h"
#include "device/emu_types.h"
#include "sanitize.h"

static char kernel_text[32768];
const bst_source bst__sources[] = {{"selftest.cu", kernel_text}, {"bad.cu", "#include \"ptx.cuh\"\nnonsense;\n"}, {0}};

typedef struct arguments {
    const float *x;
    float *y;
    uint32_t *counter;
    int64_t count;
} arguments;

enum { SEEDS = 24, LENGTH = 1024 };
static float *x, *y; /* LENGTH elements each */
static uint32_t counter;
static int failures;

static void check(bool holds, const char *what) {
    printf("%s  %s\n", holds ? "ok  " : "FAIL", what);
    if (!holds) ++failures;
}

/* ---- launching --------------------------------------------------------------------------------------------------- */

static bst_status launch(const char *entry, const char *macro, int64_t value, bst_launch geometry) {
    const bst_kernel kernel = {.file = "selftest.cu", .entry = entry, .macros = {"RIGHT", "WRONG"}};
    geometry.kernel = &kernel;
    geometry.values[0] = strcmp(macro, "RIGHT") == 0 ? value : 1;
    geometry.values[1] = strcmp(macro, "WRONG") == 0 ? value : 0;
    for (int i = 0; i < LENGTH; ++i) y[i] = -1.0f;
    counter = 0;
    const arguments a = {x, y, &counter, LENGTH};
    return bst__cuda_launch(NULL, "selftest", 0, &geometry, &a, sizeof a);
}

static void set_seed(int seed) {
    char text[16];
    snprintf(text, sizeof text, "%d", seed);
    setenv("BASTILE_EMU_SEED", text, 1);
}

typedef bool (*answer)(void);

/* In how many of the SEEDS schedules the launch succeeds with the right answer. */
static int right_in(const char *entry, const char *macro, int64_t value, bst_launch geometry, answer is_right) {
    int right = 0;
    for (int seed = 0; seed < SEEDS; ++seed) {
        set_seed(seed);
        const bst_status status = launch(entry, macro, value, geometry);
        if (status == BST_OK && is_right()) ++right;
        if (status != BST_OK && status != BST_CUDA) {
            printf("      %s\n", bst_last_error());
            break;
        }
    }
    return right;
}

/* The right kernel is right in all schedules; the wrong one gives a wrong answer in at least one. */
static void check_schedules(const char *entry, const char *macro, int64_t good, int64_t bad, bst_launch geometry,
                            answer is_right, const char *without) {
    char line[160];
    int right = right_in(entry, macro, good, geometry, is_right);
    snprintf(line, sizeof line, "%s: right in %d of %d schedules", entry, right, SEEDS);
    check(right == SEEDS, line);
    right = right_in(entry, macro, bad, geometry, is_right);
    snprintf(line, sizeof line, "%s without %s: wrong in %d of %d schedules", entry, without, SEEDS - right, SEEDS);
    check(right < SEEDS, line);
}

/* The launch fails with `status` and a message that says each of the words. */
static void check_error(bst_status status, bst_status wanted, const char *what, const char *word, const char *word2) {
    const char *message = bst_last_error();
    const bool holds = status == wanted && strstr(message, word) != NULL && strstr(message, word2) != NULL;
    check(holds, what);
    if (!holds) printf("      status %d: %s\n", (int)status, status == BST_OK ? "" : message);
}

static const bst_launch one_warp = {.grid_x = 1, .block = 32, .shared = 1024};
static const bst_launch two_warps = {.grid_x = 1, .block = 64};

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static bool sums_of_128(void) {
    for (int b = 0; b < 4; ++b) {
        float sum = 0;
        for (int i = 0; i < 128; ++i) sum += x[128 * b + i]; /* small integers: exact in any order */
        if (y[b] != sum) return false;
    }
    return y[4] == -1.0f;
}

static bool turned_twice(void) {
    for (int i = 0; i < 128; ++i) {
        if (y[i] != x[(i + 2) % 128]) return false;
    }
    return true;
}

static bool turned_by_four(void) {
    for (int i = 0; i < 128; ++i) {
        if (y[i] != x[(i + 4) % 128]) return false;
    }
    return true;
}

static bool copied(void) { return memcmp(x, y, 128 * sizeof *x) == 0; }

static unsigned were_last; /* a set of the blocks that were */

static bool sum_of_8(void) {
    were_last |= 1u << (unsigned)y[9];
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += x[i];
    return y[8] == sum;
}

static bool sums_over_clusters(void) {
    for (int b = 0; b < 8; ++b) {
        const float *first = x + b / 4 * 4;
        if (y[b] != first[0] + first[1] + first[2] + first[3]) return false;
    }
    return true;
}

static bool doubled(void) {
    for (int i = 0; i < 256; ++i) {
        if (y[i] != 2.0f * x[i]) return false;
    }
    return true;
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static void check_barriers(void) {
    check_schedules("reduce", "RIGHT", 1, 0, (bst_launch){.grid_x = 4, .block = 128}, sums_of_128, "its barrier");
    check_schedules("reuse", "RIGHT", 1, 0, (bst_launch){.grid_x = 1, .block = 128, .shared = 512}, turned_twice,
                    "the barrier after reading");
    check_schedules("async", "RIGHT", 1, 0, one_warp, copied, "the wait for its group");
    check_schedules("prefetch", "RIGHT", 1, 0, one_warp, turned_by_four, "the barrier before its copy");

    check(launch("divergent", "RIGHT", 1, two_warps) == BST_OK, "a barrier that all threads reach");
    check_error(launch("divergent", "RIGHT", 0, two_warps), BST_CUDA, "a barrier that not all threads reach",
                "threads 0-39 wait in bst_sync at selftest.cu:", "threads 40-63 have exited");
    check(launch("two_places", "RIGHT", 1, two_warps) == BST_OK, "a barrier at one place");
    check_error(launch("two_places", "RIGHT", 0, two_warps), BST_CUDA, "a barrier at two places", "divergent bst_sync",
                "BASTILE_EMU_SEED=");
    check(launch("lost_lane", "RIGHT", 1, two_warps) == BST_OK && y[40] == x[43], "a shuffle of all lanes");
    check_error(launch("lost_lane", "RIGHT", 0, two_warps), BST_CUDA, "a shuffle without one of its lanes",
                "wait for their warp at selftest.cu:", "threads 37-37 have exited");
    check_error(launch("reduce", "RIGHT", 1, (bst_launch){.grid_x = 1, .block = 40}), BST_CUDA,
                "a shuffle in a warp that is not whole", "all 32 lanes", "a block of 40 threads");
}

static void check_memory(void) {
    check(launch("misaligned", "RIGHT", 1, one_warp) == BST_OK && y[0] == x[4], "an aligned read");
    check_error(launch("misaligned", "RIGHT", 0, one_warp), BST_CUDA, "a misaligned read", "bst_read",
                "not aligned to 16");
    check(launch("wrong_space", "RIGHT", 1, one_warp) == BST_OK && y[7] == 1.0f, "a read of shared memory");
    check_error(launch("wrong_space", "RIGHT", 0, one_warp), BST_CUDA, "bst_read_once of shared memory",
                "bst_read_once", "must be global");
    bst_launch overlap = one_warp;
    overlap.overlap = true;
    check(launch("overlapping", "RIGHT", 1, overlap) == BST_OK && copied(), "an overlapping launch that waits first");
    check_error(launch("overlapping", "RIGHT", 0, overlap), BST_CUDA, "an overlapping launch that does not",
                "before bst_wait_for_previous", "kernel overlapping");
    const int right = right_in("last_block", "RIGHT", 1, (bst_launch){.grid_x = 8, .block = 32}, sum_of_8);
    check(right == SEEDS, "the last block adds up what all wrote");
    check((were_last & (were_last - 1)) != 0, "another block is the last in another schedule");
}

/* What a sanitizer does in a kernel ends the process, so a child runs it; its report is searched for two words. */
static void check_overflow(void) {
    check(launch("overflow", "RIGHT", 1, one_warp) == BST_OK && y[31] == 1.0f, "shared arrays within their bounds");
#ifdef EMU_ASAN
    int ends[2];
    char report[65536];
    size_t length = 0;
    fflush(stdout);
    if (pipe(ends) != 0) exit(1);
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        (void)launch("overflow", "RIGHT", 0, one_warp);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], report + length, sizeof report - 1 - length)) > 0;) length += (size_t)got;
    report[length] = 0;
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const bool seen = strstr(report, "AddressSanitizer: use-after-poison") != NULL &&
                      strstr(report, "emulator: kernel overflow of selftest.cu") != NULL;
    check(seen && status != 0, "a write beyond a shared array ends in ASan's report, which names the kernel");
    if (!seen) printf("%s\n", report);
#else
    printf("--    a write beyond a shared array: seen only in a build with ASan\n");
#endif
}

static void check_clusters(void) {
    const bst_launch clusters = {.grid_x = 8, .block = 32, .cluster = 4};
    check_schedules("send", "WRONG", 0, 1, clusters, sums_over_clusters, "the wait for what was sent");
    check_error(launch("send", "WRONG", 2, clusters), BST_CUDA, "sending to a block that may not have begun",
                "bst_cluster_send", "may not have begun");
    check_error(launch("send", "WRONG", 3, clusters), BST_CUDA, "a block that ends before what was sent has come",
                "ends while", "bst_cluster_send");
    check_error(launch("send", "WRONG", 4, clusters), BST_CUDA, "sending to a block that has exited",
                "bst_cluster_send", "has exited");
    bst_launch uneven = clusters;
    uneven.grid_x = 6;
    check_error(launch("send", "WRONG", 0, uneven), BST_CUDA, "a grid that clusters do not divide", "clusters of 4",
                "grid of 6");
}

static void check_bulk(void) {
    const bst_launch block = {.grid_x = 1, .block = 128, .shared = 512};
    check_schedules("bulk", "WRONG", 0, 1, block, doubled, "the wait for its mbarrier");
    check(right_in("bulk", "WRONG", 2, block, doubled) < SEEDS, "the source of a bulk write reused too early");
    check_error(launch("bulk", "WRONG", 3, block), BST_CUDA, "a block that ends before its bulk write is read",
                "ends before bst_bulk_wait", "thread 0");
}

static bool rows_times_the_first(void) {
    for (int r = 0; r < 64; ++r) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += x[16 * r + k] * x[k]; /* small integers */
        if (y[r] != sum) return false;
    }
    return true;
}

static void check_products(void) {
    const bst_launch group = {.grid_x = 1, .block = 128, .shared = 1024 + 320 * 128};
    check_schedules("product", "WRONG", 0, 1, group, rows_times_the_first, "the wait for its sums");
    check(right_in("product", "WRONG", 2, group, rows_times_the_first) < SEEDS, "a factor reused too early");
    check_error(launch("product", "WRONG", 3, group), BST_CUDA, "a product of two warps",
                "threads 0-63 wait for their four warps at selftest.cu:", "threads 64-127 have exited");
    check_error(launch("product", "WRONG", 4, group), BST_CUDA, "a thread that ends before its product",
                "ends before it has waited for its products", "kernel product");
}

static bool rows_and_their_firsts(void) {
    for (int r = 0; r < 64; ++r)
        if (y[64 + r] != x[16 * r]) return false;
    return rows_times_the_first();
}

static bool the_first_is_there(void) { return y[0] == x[0]; }

static void check_kept_products(void) {
    const bst_launch group = {.grid_x = 1, .block = 128, .shared = 1024 + 128 * 128};
    const bst_launch three = {.grid_x = 1, .block = 384};
    check_schedules("kept_product", "WRONG", 0, 2, group, rows_and_their_firsts, "the wait for the second sums");
    check(right_in("kept_product", "WRONG", 1, group, rows_and_their_firsts) < SEEDS, "words changed too early");
    check(right_in("registers", "WRONG", 0, three, the_first_is_there) == SEEDS, "registers that there are");
    check_error(launch("registers", "WRONG", 1, three), BST_CUDA, "registers that there are not",
                "its warp groups want 520 together", "wait for ever");
}

static void check_older_chips(void) {
    static const char *const words[] = {"bst_barrier_init", "bst_bulk_write", "bst_cluster_arrive"};
    const bst_launch block = {.grid_x = 1, .block = 32, .shared = 16};
    setenv("BASTILE_EMU_ARCH", "89", 1);
    for (int i = 0; i < 3; ++i)
        check_error(launch("too_new", "WRONG", i, block), BST_CUDA, words[i], words[i], "sm_89 has no such");
    setenv("BASTILE_EMU_ARCH", "90", 1);
}

static void check_launches(void) {
    const bst_kernel bad = {.file = "bad.cu", .entry = "bad"}, none = {.file = "none.cu", .entry = "none"};
    const bst_kernel reduce = {.file = "selftest.cu", .entry = "reduce", .macros = {"RIGHT", "WRONG"}};
    const arguments a = {x, y, &counter, LENGTH};
    bst_launch l = {.kernel = &bad, .grid_x = 1, .block = 32};
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a), BST_COMPILE, "a text that does not compile",
                "bad.cu", "nonsense");
    l.kernel = &none;
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a), BST_COMPILE, "a text that is not there",
                "op:", "none.cu");
    l.kernel = &reduce;
    l.values[0] = 1;
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, 8), BST_CUDA, "arguments of another size", "takes 32 bytes",
                "given were 8");
    l.block = 256;
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a), BST_CUDA, "more threads than the launch bounds",
                "bounded to 128", "256");
    l.block = 2048;
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a), BST_CUDA, "more threads than a block has", "2048",
                "1024");
    l.block = 128;
    l.shared = 228 * 1024;
    check_error(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a), BST_CUDA, "more shared memory than the chip has",
                "233472", "232448");
    l.grid_x = 0;
    check(bst__cuda_launch(NULL, "op", 0, &l, &a, sizeof a) == BST_OK, "a grid of no blocks does nothing");
    check_error(bst__cuda_launch(NULL, "op", 1, &l, &a, sizeof a), BST_CUDA, "a device that is not there",
                "op:", "device 1");
}

static void check_arithmetic(void) {
    const float saved = x[0];
    const volatile float given = 0.7f; /* so that libm computes what is wanted, not the compiler */
    const float v = given;
    x[0] = v;
    const bst_status status = launch("arithmetic", "RIGHT", 1, one_warp);
    const float wanted[] = {exp2f(v),
                            log2f(v),
                            (float)(1.0 / sqrt((double)v)),
                            sqrtf(v),
                            1.0f / v,
                            v / 3.0f,
                            tanhf(v),
                            v,
                            -INFINITY,
                            v,
                            fmaf(v, v, 1.0f),
                            2.0f,
                            2.0f,
                            0.0f};
    x[0] = saved;
    check(status == BST_OK, "arithmetic");
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
        if (y[i] == wanted[i]) continue;
        printf("      word %zu: %a, needed is %a\n", i, (double)y[i], (double)wanted[i]);
        ++failures;
    }

    bool exact = true;
    for (uint32_t h = 0; h < 65536; ++h) {
        const bool nan16 = (h & 0x7fff) > 0x7c00, nan_b = (h & 0x7fff) > 0x7f80;
        exact = exact && emu_f16_from_f32(emu_f32_from_f16(h)) == (nan16 ? 0x7fffu : h);
        exact = exact && emu_bf16_from_f32(emu_f32_from_bf16(h)) == (nan_b ? 0x7fffu : h);
    }
    check(exact, "every 16-bit float survives the way to float32 and back");
    /* Ties, overflow and subnormals: value, fp16, bf16. */
    static const struct {
        float value;
        uint32_t f16, bf16;
    } rounded[] = {{1.00048828125f, 0x3c00, 0x3f80}, {1.00146484375f, 0x3c02, 0x3f80}, {1.00390625f, 0x3c04, 0x3f80},
                   {1.01171875f, 0x3c0c, 0x3f82},    {65519.0f, 0x7bff, 0x4780},       {-65520.0f, 0xfc00, 0xc780},
                   {0x1p-25f, 0x0000, 0x3300},       {0x1.8p-24f, 0x0002, 0x33c0},     {0x1.ffcp-15f, 0x0400, 0x3880},
                   {-0.0f, 0x8000, 0x8000},          {3.4e38f, 0x7c00, 0x7f80}};
    bool right = true;
    for (size_t i = 0; i < sizeof rounded / sizeof *rounded; ++i) {
        right = right && emu_f16_from_f32(rounded[i].value) == rounded[i].f16;
        right = right && emu_bf16_from_f32(rounded[i].value) == rounded[i].bf16;
    }
    check(right, "rounding to 16 bits: to nearest, ties to even");
}

/* out[m, n] = 0.5 op(a) op(b) + 2 out for each transposition, with padded rows; small integers, so exact. */
static void check_gemm(void) {
    enum { M = 5, N = 7, K = 9, LD = 11 };
    bool right = true;
    for (int which = 0; which < 4; ++which) {
        const int ta = which & 1, tb = which >> 1;
        float out[M * LD], wanted[M * LD];
        for (int i = 0; i < M * LD; ++i) out[i] = wanted[i] = (float)i;
        for (int i = 0; i < M; ++i) {
            for (int j = 0; j < N; ++j) {
                float sum = 0;
                for (int p = 0; p < K; ++p)
                    sum += x[ta ? p * LD + i : i * LD + p] * x[500 + (tb ? j * LD + p : p * LD + j)];
                wanted[i * LD + j] = 0.5f * sum + 2.0f * wanted[i * LD + j];
            }
        }
        const DLDataType f32 = {.code = kDLFloat, .bits = 32, .lanes = 1};
        const bst_gemm g = {.device = {kDLCUDA, 0},
                            .m = M,
                            .n = N,
                            .k = K,
                            .a = x,
                            .b = x + 500,
                            .out = out,
                            .lda = LD,
                            .ldb = LD,
                            .ldo = LD,
                            .a_transposed = ta,
                            .b_transposed = tb,
                            .input_type = f32,
                            .output_type = f32,
                            .alpha = 0.5f,
                            .beta = 2.0f};
        right = right && bst__cuda_gemm(NULL, "gemm", &g) == BST_OK && memcmp(out, wanted, sizeof out) == 0;
    }
    check(right, "matrix products in all transpositions");

    const uint16_t half[2] = {0x3c00, 0x4000}; /* 1, 2 in fp16 */
    const float alpha = 0.25f;
    float out = NAN; /* beta 0: must not be read */
    bst_gemm g = {.device = {kDLCUDA, 0},
                  .m = 1,
                  .n = 1,
                  .k = 2,
                  .a = half,
                  .b = half,
                  .out = &out,
                  .lda = 2,
                  .ldb = 1,
                  .ldo = 1,
                  .input_type = {kDLFloat, 16, 1},
                  .output_type = {kDLFloat, 32, 1},
                  .alpha = 9.0f,
                  .device_alpha = &alpha};
    check(bst__cuda_gemm(NULL, "gemm", &g) == BST_OK && out == 1.25f, "fp16 into float32, scaled by device_alpha");
    g.beta = 1.0f;
    check(bst__cuda_gemm(NULL, "gemm", &g) == BST_OK && out == 2.5f, "the same, added to what was there");
}

static bool read_kernels(void) {
    FILE *file = fopen(BST_EMU_DIR "/selftest.cu", "rb");
    if (file == NULL) return false;
    const size_t length = fread(kernel_text, 1, sizeof kernel_text, file);
    fclose(file);
    return length > 0 && length < sizeof kernel_text;
}

int main(void) {
    setenv("BASTILE_EMU_ARCH", "90", 1);
    x = aligned_alloc(256, LENGTH * sizeof *x);
    y = aligned_alloc(256, LENGTH * sizeof *y);
    if (x == NULL || y == NULL || !read_kernels()) return 1;
    for (int i = 0; i < LENGTH; ++i) x[i] = (float)(i * 37 % 101 + 1);
    check_barriers();
    check_memory();
    check_overflow();
    check_clusters();
    check_bulk();
    check_products();
    check_kept_products();
    check_older_chips();
    check_launches();
    check_arithmetic();
    check_gemm();
    printf("%d failed\n", failures);
    free(x);
    free(y);
    return failures != 0;
}
