/* test_launch.c - kernels and matrix products on a driver that is none (fake_cuda.c): where they are launched, and with
 * autotuning how often a product runs on the caller's memory, which algorithm is taken, what is left alone. */
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache_folder.h"
#include "cuda/autotune.h"
#include "cuda/compile_only.h"
#include "cuda/cuda.h"
#include "cuda/device/tensor_map.h"
#include "cuda/driver.h"
#include "fake_library.h"
#include "tensors.h"

const bst_source bst__sources[] = {{"toy.cu", "extern \"C\" __global__ void toy() {}\n"}, {NULL, NULL}};

static fake_cuda *fake;

/* Of algorithm 0, the default, which 2 beats by most; 3 does not run, and 1 is too slow to be measured to the end. */
static const double times[8] = {1.0, 1.5, 0.7, -1.0, 0.8};

static void begin(void) {
    snprintf(root, sizeof root, "/tmp/bastile-launch-XXXXXX");
    if (!mkdtemp(root)) abort();
    snprintf(folder, sizeof folder, "%s/cache", root);
    setenv("BASTILE_CACHE", folder, 1);
    *fake = (fake_cuda){0};
    memcpy(fake->product_ms, times, sizeof times);
    bst__set_search_time(60);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
}

static void end(void) {
    char command[160];
    CHECK_EQ_I(fake->live, 0); /* whatever was taken for measurements has been given back */
    bst_autotune_clear();
    snprintf(command, sizeof command, "rm -rf %s", root);
    if (system(command) != 0) abort();
}

static int choices(void) { return count_files(".choice"); }

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

enum { WIDTH, BROKEN };
static const bst_kernel toy = {"toy.cu", "toy", {"WIDTH", "BROKEN"}};

static bst_status launch_on(int device, const bst_launch *l) {
    int64_t arguments = 0;
    return bst__cuda_launch(NULL, "a_test", device, l, &arguments, sizeof arguments);
}

/* Every width is another kernel; no two tests share one. */
static bst_status launch(int device, int width, unsigned grid) {
    return launch_on(device, &(bst_launch){.kernel = &toy, .values = {width}, .block = 128, .grid_x = grid});
}

TEST(an_error_of_a_launch_is_an_error) {
    begin();
    fake->refuses = true;
    CHECK_EQ_I(launch(0, 1, 8), BST_CUDA);
    CHECK_STR(bst_last_error(), "a_test: cuLaunchKernel failed");
    CHECK_OK(launch(0, 1, 0)); /* nothing to launch */
    end();
}

TEST(a_fork_is_told_to_spawn) {
    begin();
    fake->forked = true;
    CHECK_EQ_I(launch(0, 2, 8), BST_CUDA);
    CHECK_STR(bst_last_error(), "a process that has used CUDA cannot use it again in a fork: start it by spawn");
    fake->forked = false;
    end();
}

/* Whichever device the caller's thread is at: it stays there. */
TEST(a_launch_is_on_the_device_of_its_tensors) {
    begin();
    bst_device *any;
    CHECK_OK(bst__device("a_test", 0, &any)); /* opens the driver */
    const bst_driver_api *driver = bst__driver();
    for (int there = 0; there < 2; there++) {
        CUcontext mine, now = NULL;
        CHECK_EQ_I(driver->cuDevicePrimaryCtxRetain(&mine, there), CUDA_SUCCESS);
        CHECK_EQ_I(driver->cuCtxPushCurrent(mine), CUDA_SUCCESS);
        for (int device = 0; device < 2; device++) {
            CHECK_OK(launch(device, 3, 8));
            CHECK_EQ_I(fake->last_device, device);
            CHECK_EQ_I(driver->cuCtxGetCurrent(&now), CUDA_SUCCESS);
            CHECK(now == mine);
        }
        CHECK_EQ_I(driver->cuCtxPopCurrent(&now), CUDA_SUCCESS);
    }
    end();
}

/* In a thread that has none, as one of autograd's is; and leaves none there. */
TEST(a_tensor_map_is_made_in_a_context) {
    begin();
    char memory[16];
    const bst_boxes boxes = {memory, BST_BF16, 2, 64, {64, 64}, {64}};
    struct bst_tensor_map map;
    CUcontext now;
    CHECK_OK(bst__cuda_map_boxes("a_test", 1, &boxes, &map));
    CHECK_EQ_I(bst__driver()->cuCtxGetCurrent(&now), CUDA_SUCCESS);
    CHECK(!now);
    bst_view row = {.data = memory, .dtype = BST_BF16, .dims = 2, .size = {1, 20}, .stride = {21, 1}, .count = 20};
    CHECK_OK(bst__cuda_tensor_map("a_test", 1, &row, 64, &map)); /* its stride says nothing */
    row.size[0] = 2;
    CHECK_EQ_I(bst__cuda_tensor_map("a_test", 1, &row, 64, &map), BST_CUDA);
    end();
}

TEST(the_host_reads_what_is_on_the_device) {
    begin();
    const int there[] = {3, 4};
    int here[] = {0, 7};
    int before = fake->waits;
    CHECK_OK(bst__cuda_read(NULL, "a_test", 0, there, here, sizeof *here));
    CHECK_EQ_I(here[0], 3);
    CHECK_EQ_I(here[1], 7);
    CHECK_EQ_I(fake->waits, before + 1);
    CHECK_OK(bst__cuda_read(NULL, "a_test", 0, NULL, here, 0));
    fake->capturing = true;
    CHECK_EQ_I(bst__cuda_read(NULL, "a_test", 0, there, here, sizeof here), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "a_test: the host waits for the device here, which a graph that is captured cannot");
    fake->capturing = false;
    CHECK_EQ_I(fake->waits, before + 1);
    end();
}

/* Clusters that stay until all work is done: as many as the device holds; it is asked once for each kernel. */
TEST(a_resident_launch_has_as_many_clusters_as_fit) {
    begin();
    bst_launch l = {.kernel = &toy, .values = {77}, .block = 128, .grid_x = 40, .cluster = 4, .resident = true};
    fake->clusters = 3;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(launch_on(0, &l));
        CHECK_EQ_I(fake->last_grid, 12);
    }
    CHECK_EQ_I(fake->occupancies, 1);
    l.grid_x = 8; /* fewer than fit */
    CHECK_OK(launch_on(0, &l));
    CHECK_EQ_I(fake->last_grid, 8);
    l.resident = false;
    l.grid_x = 40;
    CHECK_OK(launch_on(0, &l));
    CHECK_EQ_I(fake->last_grid, 40);
    /* None fits: the launch itself is to say why. */
    fake->clusters = 0;
    l.values[WIDTH] = 78;
    l.resident = true;
    CHECK_OK(launch_on(0, &l));
    CHECK_EQ_I(fake->last_grid, 40);
    end();
}

static void *launch_beside(void *context) {
    (void)context;
    CHECK_OK(launch(0, 6001, 8));
    return NULL;
}

static int64_t made_ready(void) {
    int64_t compiled, cached;
    bst_kernel_counts(&compiled, &cached);
    return compiled + cached;
}

/* Its kernels are there when they are launched, and other threads' run meanwhile. */
TEST(a_thread_compiles_ahead) {
    begin();
    int64_t before = made_ready();
    int device;
    CHECK_EQ_I(bst__compile_ahead(0, 70), BST_INVALID);
    CHECK_STR(bst_last_error(), "compiling ahead: arch is 70; 80, 86, 89, 90, 100 or 120 is needed");
    CHECK(!bst__compiling_ahead(&device));
    CHECK_OK(bst__compile_ahead(1, 0));
    CHECK_OK(bst__compile_ahead(1, 0)); /* said twice, ended once */
    CHECK(bst__compiling_ahead(&device) && device == 1);
    CHECK_OK(launch(1, 6000, 8));
    CHECK_EQ_I(fake->last_grid, 0);
    pthread_t thread;
    if (pthread_create(&thread, NULL, launch_beside, NULL) != 0) abort();
    pthread_join(thread, NULL);
    CHECK_EQ_I(fake->last_grid, 8);
    CHECK_OK(bst__compile_ahead(-1, 0));
    CHECK(!bst__compiling_ahead(&device));
    CHECK_EQ_I(made_ready(), before + 2);
    CHECK_OK(launch(1, 6000, 6));
    CHECK_EQ_I(fake->last_grid, 6);
    CHECK_EQ_I(made_ready(), before + 2);
    end();
}

/* What a named chip's launches would be is in the cache, for a process on that chip. */
TEST(a_chip_that_is_not_there_is_compiled_for) {
    enum { ENTRY = 6100 };
    begin();
    int64_t compiled, cached, read;
    CHECK_OK(bst__compile_ahead(0, 90));
    CHECK_OK(launch(0, ENTRY, 8));
    CHECK_OK(bst__compile_ahead(-1, 0));
    CHECK_EQ_I(fake->last_grid, 0);
    bst_kernel_counts(&compiled, &cached);
    CHECK_OK(launch(0, ENTRY, 8)); /* on an sm_90 */
    CHECK_EQ_I(fake->last_grid, 8);
    int64_t now;
    bst_kernel_counts(&now, &read);
    CHECK_EQ_I(now, compiled);
    CHECK_EQ_I(read, cached + 1);
    end();
}

/* A kernel that is called twice, one that does not compile, and one that another process has compiled. */
TEST(kernels_that_are_made_ready_are_counted) {
    enum { FIRST = 5000, OTHERS = 5001 };
    begin();
    int64_t compiled, cached, before, cached_before;
    bst_kernel_counts(&before, &cached_before);
    pid_t child = fork();
    if (!child) _exit(launch(0, OTHERS, 8) == BST_OK ? 0 : 1);
    int ended = -1;
    waitpid(child, &ended, 0);
    CHECK_EQ_I(ended, 0);
    CHECK_OK(launch(0, FIRST, 8));
    CHECK_OK(launch(0, FIRST, 1));
    CHECK_OK(launch(1, FIRST, 1)); /* the same code on another device */
    bst_launch broken = {.kernel = &toy, .values = {FIRST, 1}, .block = 128, .grid_x = 1};
    CHECK_EQ_I(launch_on(0, &broken), BST_COMPILE);
    bst_kernel_counts(&compiled, &cached);
    CHECK_EQ_I(compiled, before + 1);
    CHECK_EQ_I(cached, cached_before);
    CHECK_OK(launch(0, OTHERS, 8));
    bst_kernel_counts(NULL, &cached);
    bst_kernel_counts(&compiled, NULL);
    CHECK_EQ_I(compiled, before + 1);
    CHECK_EQ_I(cached, cached_before + 1);
    end();
}

/* ---- matrix products --------------------------------------------------------------------------------------------- */

static bst_status multiply(const bst_exec *exec, int device, int64_t m, float beta) {
    static float memory[64];
    bst_gemm g = {.device = {kDLCUDA, device}, .m = m, .n = 4, .k = 4, .a = memory, .b = memory, .out = memory};
    g.lda = g.ldb = g.ldo = 4;
    g.input_type = g.output_type = bst_test_types[0];
    g.alpha = 1;
    g.beta = beta;
    return bst__cuda_gemm(exec, "a_test", &g);
}

/* How often one product of m rows runs; each m is another problem. */
static int products_on(int device, int64_t m) {
    int before = fake->products;
    CHECK_OK(multiply(NULL, device, m, 0));
    return fake->products - before;
}

static int products_of(int64_t m) { return products_on(0, m); }

static int products_that_add(int64_t m) {
    int before = fake->products;
    CHECK_OK(multiply(NULL, 0, m, 1));
    return fake->products - before;
}

TEST(a_product_takes_the_fastest_algorithm) {
    begin();
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(fake->waits, 0);
    CHECK_EQ_I(choices(), 0);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    /* Three in ten rounds, one that fails, and one so slow that it runs twice; then the result. */
    CHECK_EQ_I(products_of(4), 3 * 10 + 2 + 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(choices(), 1);
    int waits = fake->waits;
    CHECK(waits > 0);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(fake->waits, waits);
    CHECK(products_of(5) > 1); /* another shape is another problem */
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    CHECK_EQ_I(bst_autotune_clear(), 2);
    fake->product_ms[2] = 1.0;
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 4);
    end();
}

TEST(the_default_stays_where_it_is_the_fastest) {
    begin();
    fake->product_ms[0] = 0.6;
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 1);
    end();
}

TEST(a_product_that_adds_runs_once) {
    begin();
    CHECK_EQ_I(products_that_add(4), 1);
    CHECK_EQ_I(products_that_add(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 0);
    end();
}

/* Of 1 to 7 terms, then of all others, which are added to them: only the first can be measured. */
TEST(a_product_runs_in_parts) {
    begin();
    static _Alignas(16) char memory[16];
    bst_gemm g = {.device = {kDLCUDA, 0}, .m = 4096, .n = 4096, .k = 49155, .a = memory, .b = memory, .out = memory};
    g.lda = 49160, g.ldb = g.ldo = 4096;
    g.input_type = g.output_type = bst_test_types[1];
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_OK(bst__cuda_gemm(NULL, "a_test", &g));
    CHECK_EQ_I(fake->products, 2);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    CHECK_OK(bst__cuda_gemm(NULL, "a_test", &g));
    CHECK_EQ_I(fake->products, 2 + 3 * 10 + 2 + 1 + 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 1);
    fake->product_ms[0] = -1; /* what fails is told */
    CHECK_EQ_I(bst__cuda_gemm(NULL, "a_test", &g), BST_CUDA);
    end();
}

TEST(a_captured_product_runs_once) {
    begin();
    fake->capturing = true;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_I(products_of(4), 1);
        CHECK_EQ_I(fake->last_algorithm, 0);
    }
    CHECK_EQ_I(fake->waits, 0);
    CHECK_EQ_I(choices(), 0);
    fake->capturing = false;
    CHECK(products_of(4) > 1);
    fake->capturing = true;
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    end();
}

/* Memory of which there is at most so much in one piece, and none of another size. */
typedef struct limits {
    size_t most, not_this;
} limits;

static void *allocate(void *user, DLDevice device, size_t bytes) {
    const limits *l = user;
    (void)device;
    return bytes > l->most || bytes == l->not_this ? NULL : malloc(bytes);
}

static void release(void *user, DLDevice device, void *memory) {
    (void)user, (void)device;
    free(memory);
}

TEST(without_memory_or_time_the_default_is_taken) {
    begin();
    limits tight = {.most = 4096}; /* not enough to empty a cache */
    bst_exec exec = {.user = &tight, .allocate = allocate, .release = release};
    CHECK_OK(multiply(&exec, 0, 4, 0));
    CHECK_EQ_I(fake->products, 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    bst__set_search_time(0);
    CHECK_EQ_I(products_of(5), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 0);
    bst__set_search_time(60);
    CHECK_EQ_I(bst_autotune_clear(), 0); /* as in a new process */
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    end();
}

/* The fastest one lacks memory: the next is taken, and the next process looks again. */
TEST(what_lacked_memory_has_not_lost) {
    begin();
    limits but_one = {.most = SIZE_MAX, .not_this = 3 * 64};
    bst_exec exec = {.user = &but_one, .allocate = allocate, .release = release};
    CHECK_OK(multiply(&exec, 0, 4, 0));
    CHECK_EQ_I(fake->last_algorithm, 4);
    CHECK_EQ_I(choices(), 0);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(bst_autotune_clear(), 1); /* as in a new process */
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(choices(), 1);
    end();
}

TEST(an_error_of_the_default_is_an_error) {
    begin();
    fake->product_ms[0] = -1.0;
    CHECK_EQ_I(multiply(NULL, 0, 4, 0), BST_CUDA);
    CHECK_STR(bst_last_error(), "a_test: cublasLtMatmul failed");
    CHECK_EQ_I(choices(), 0);
    end();
}

TEST(what_drops_out_is_no_error_of_the_call) {
    begin();
    CHECK_EQ_I(bst_set_autotune(2), BST_INVALID);
    CHECK(products_of(4) > 1);
    CHECK_STR(bst_last_error(), "bst_set_autotune: on is 2");
    end();
}

TEST(devices_have_choices_of_their_own) {
    begin();
    CHECK(products_on(0, 4) > 1);
    fake->product_ms[0] = 0.1;
    CHECK(products_on(1, 4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 2);
    CHECK_EQ_I(products_on(0, 4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    end();
}

TEST(another_process_has_measured_it) {
    begin();
    pid_t child = fork();
    if (!child) _exit(multiply(NULL, 0, 4, 0) == BST_OK ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ_I(status, 0);
    bst__set_search_time(0); /* not even that it may not measure matters */
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    end();
}

TEST(what_is_forgotten_is_measured_again) {
    begin();
    CHECK(products_of(4) > 1);
    CHECK(products_of(5) > 1);
    CHECK_EQ_I(bst_autotune_clear(), 2);
    fake->product_ms[0] = 0.1;
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 1);
    /* Without a folder, the process remembers. */
    setenv("BASTILE_CACHE", "off", 1);
    CHECK_EQ_I(bst_autotune_clear(), 0);
    fake->product_ms[0] = 1.0;
    CHECK(products_of(4) > 1);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(bst_autotune_clear(), 1);
    CHECK(products_of(4) > 1);
    setenv("BASTILE_CACHE", folder, 1);
    end();
}

/* What newer problems have pushed out of the process's table is found on disk. */
TEST(more_problems_than_it_remembers_are_read_again) {
    begin();
    CHECK(products_of(4) > 1);
    bst__set_search_time(0);
    for (int64_t m = 1000; m < 9000; m++) CHECK_EQ_I(products_that_add(m), 1);
    CHECK_EQ_I(products_of(4), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(choices(), 1);
    end();
}

enum { CALLERS = 6, PROBLEMS = 5 };
static atomic_int failures;

/* Every caller meets the problems in another order. */
static void *multiply_all(void *first) {
    for (int i = 0; i < 20 * PROBLEMS; i++)
        if (multiply(NULL, 0, 4 + (i + *(int *)first) % PROBLEMS, 0) != BST_OK) atomic_fetch_add(&failures, 1);
    return NULL;
}

/* Ten rounds of four candidates for each problem, whoever comes first, and a product for each call. Their times vanish
 * beside the clock's, or what one thread multiplies would count in the measurements of another. */
TEST(threads_measure_each_problem_once) {
    begin();
    for (int i = 0; i < 8; i++) fake->product_ms[i] = i < 3 ? 1e-30 : i == 3 ? -1.0 : i == 4 ? 1e-30 : 0;
    pthread_t threads[CALLERS];
    int first[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        first[i] = i;
        if (pthread_create(&threads[i], NULL, multiply_all, &first[i]) != 0) abort();
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    CHECK_EQ_I(atomic_load(&failures), 0);
    CHECK_EQ_I(choices(), PROBLEMS);
    CHECK_EQ_I(fake->products, PROBLEMS * 4 * 10 + CALLERS * 20 * PROBLEMS);
    end();
}

int main(void) {
    fake = load_fake_cuda();
    RUN(an_error_of_a_launch_is_an_error);
    RUN(a_fork_is_told_to_spawn);
    RUN(a_launch_is_on_the_device_of_its_tensors);
    RUN(a_tensor_map_is_made_in_a_context);
    RUN(the_host_reads_what_is_on_the_device);
    RUN(a_resident_launch_has_as_many_clusters_as_fit);
    RUN(kernels_that_are_made_ready_are_counted);
    RUN(a_thread_compiles_ahead);
    RUN(a_chip_that_is_not_there_is_compiled_for);
    RUN(a_product_takes_the_fastest_algorithm);
    RUN(the_default_stays_where_it_is_the_fastest);
    RUN(a_product_that_adds_runs_once);
    RUN(a_product_runs_in_parts);
    RUN(a_captured_product_runs_once);
    RUN(without_memory_or_time_the_default_is_taken);
    RUN(what_lacked_memory_has_not_lost);
    RUN(an_error_of_the_default_is_an_error);
    RUN(what_drops_out_is_no_error_of_the_call);
    RUN(devices_have_choices_of_their_own);
    RUN(another_process_has_measured_it);
    RUN(what_is_forgotten_is_measured_again);
    RUN(more_problems_than_it_remembers_are_read_again);
    RUN(threads_measure_each_problem_once);
    return bst_test_report();
}
