/* test_tuned.c - what autotuning launches, and when, on a driver that is none (fake_cuda.c): how often a kernel runs on
 * the caller's memory, which alternative is taken, what is left alone. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache_folder.h"
#include "cuda/autotune.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "fake_library.h"
#include "tensors.h"

const bst_source bst__sources[] = {{"toy.cu", "extern \"C\" __global__ void toy() {}\n"}, {NULL, NULL}};

static fake_cuda *fake;

/* ---- a kernel with alternatives ---------------------------------------------------------------------------------- */

enum { WIDTH, THREADS, BROKEN };
static const bst_kernel toy = {"toy.cu", "toy", {"WIDTH", "THREADS", "BROKEN"}};

/* 128 threads; alternatives: 256, the same again, 512, one that does not compile, 64. */
static bool offer(bst_launch *l, int number, int64_t count) {
    static const int threads[] = {256, 128, 512, 1024, 64};
    if (number > 5) return false;
    l->values[THREADS] = threads[number - 1];
    l->values[BROKEN] = number == 4;
    l->block = (unsigned)threads[number - 1];
    l->grid_x = (unsigned)((count + l->block - 1) / l->block);
    return true;
}

/* A call for `count` elements; every width is another problem. */
static bst_status call_on(int device, int width, int64_t count, bool once) {
    bst_launch l = {.kernel = &toy, .values = {width, 128}, .block = 128, .grid_x = (unsigned)((count + 127) / 128)};
    bst_alternatives a = {offer, count, once};
    int64_t arguments = count;
    return bst__cuda_launch_tuned(NULL, "a_test", device, &l, &a, &arguments, sizeof arguments);
}

static bst_status call(int width, int64_t count) { return call_on(0, width, count, false); }

/* By threads: 512 is the fastest; 64 does not launch. */
static double fastest_512(const char *options, unsigned block) {
    CHECK(!strstr(options, "-DBROKEN=1"));
    return block == 512 ? 0.8 : block == 256 ? 0.9 : block == 128 ? 1.0 : -1.0;
}

static double fastest_128(const char *options, unsigned block) {
    (void)options;
    return block == 128 ? 1.0 : 1.1;
}

static void begin(double (*kernel_ms)(const char *options, unsigned block)) {
    static const double products[8] = {1.0, 1.5, 0.7, -1.0, 0.8};
    snprintf(root, sizeof root, "/tmp/bastile-tuned-XXXXXX");
    if (!mkdtemp(root)) abort();
    snprintf(folder, sizeof folder, "%s/cache", root);
    setenv("BASTILE_CACHE", folder, 1);
    *fake = (fake_cuda){.kernel_ms = kernel_ms};
    memcpy(fake->product_ms, products, sizeof products);
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

/* The number of launches of one call. */
static int launches_of(int width, int64_t count, bool once) {
    int before = fake->launches;
    CHECK_OK(call_on(0, width, count, once));
    return fake->launches - before;
}

#define CHECK_TOOK(threads) CHECK_STR(fake->last_options, "-DTHREADS=" #threads " ")

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

TEST(off_it_launches_the_default_once) {
    begin(fastest_512);
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(fake->waits, 0);
    CHECK_EQ_I(choices(), 0);
    end();
}

TEST(the_first_call_measures_and_every_call_takes_the_fastest) {
    begin(fastest_512);
    /* Three that run: ten rounds, then the result; one more that was tried and did not compile, one that did not
     * launch. */
    CHECK_EQ_I(launches_of(1, 1000, false), 3 * 10 + 1);
    CHECK_TOOK(512);
    int waits = fake->waits;
    CHECK(waits > 0);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(512);
    CHECK_EQ_I(fake->waits, waits);
    CHECK_EQ_I(choices(), 1);
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(128);
    end();
}

TEST(the_default_stays_where_it_is_the_fastest) {
    begin(fastest_128);
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(choices(), 1);
    end();
}

/* 1000 elements: 8 blocks; 1900: 15; 2000: 16. */
TEST(lengths_of_one_magnitude_share_a_choice) {
    begin(fastest_512);
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_EQ_I(launches_of(1, 1900, false), 1);
    CHECK_TOOK(512);
    CHECK(launches_of(1, 2000, false) > 1);
    CHECK_EQ_I(choices(), 2);
    CHECK(launches_of(2, 1000, false) > 1);
    CHECK_EQ_I(choices(), 3);
    CHECK_EQ_I(launches_of(1, 0, false), 0);
    end();
}

TEST(what_overwrites_its_input_runs_once) {
    begin(fastest_512);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_I(launches_of(1, 1000, true), 1);
        CHECK_TOOK(128);
    }
    CHECK_EQ_I(choices(), 0);
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_EQ_I(launches_of(1, 1000, true), 1);
    CHECK_TOOK(512);
    end();
}

TEST(under_capture_nothing_is_measured) {
    begin(fastest_512);
    fake->capturing = true;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_I(launches_of(1, 1000, false), 1);
        CHECK_TOOK(128);
    }
    CHECK_EQ_I(fake->waits, 0);
    CHECK_EQ_I(choices(), 0);
    fake->capturing = false;
    CHECK(launches_of(1, 1000, false) > 1);
    fake->capturing = true;
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(512);
    end();
}

TEST(without_memory_or_time_the_default_is_taken) {
    begin(fastest_512);
    fake->out_of_memory = true;
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(128);
    fake->out_of_memory = false;
    bst__set_search_time(0);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(choices(), 0);
    bst__set_search_time(60);
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_TOOK(512);
    end();
}

/* Only the default is compiled when NVRTC has no memory left: it is taken, and the next process looks again. */
TEST(what_could_not_be_compiled_for_lack_of_memory_has_not_lost) {
    enum { OTHER = 6000, OUT_OF_MEMORY = 1 }; /* a width that no other test has */
    begin(fastest_512);
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(launches_of(OTHER, 1000, false), 1);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    fake->failing = "nvrtcCompileProgram";
    fake->failure = OUT_OF_MEMORY;
    CHECK_EQ_I(launches_of(OTHER, 1000, false), 1 + 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(choices(), 0);
    fake->failing = NULL;
    CHECK_EQ_I(launches_of(OTHER, 1000, false), 1);
    CHECK_EQ_I(bst_autotune_clear(), 1); /* as in a new process */
    CHECK(launches_of(OTHER, 1000, false) > 1);
    CHECK_TOOK(512);
    CHECK_EQ_I(choices(), 1);
    end();
}

static double none_runs(const char *options, unsigned block) {
    (void)options, (void)block;
    return -1.0;
}

TEST(an_error_of_the_default_is_an_error) {
    begin(none_runs);
    CHECK_EQ_I(call(1, 1000), BST_CUDA);
    CHECK_STR(bst_last_error(), "a_test: cuLaunchKernel failed");
    CHECK_EQ_I(choices(), 0);
    end();
}

/* One alternative does not compile, and one does not launch; the call succeeds. */
TEST(what_drops_out_is_no_error_of_the_call) {
    begin(fastest_512);
    CHECK_EQ_I(bst_set_autotune(2), BST_INVALID);
    CHECK_OK(call(0, 1000));
    CHECK_STR(bst_last_error(), "bst_set_autotune: on is 2");
    end();
}

TEST(a_fork_is_told_to_spawn) {
    begin(fastest_128);
    fake->forked = true;
    CHECK_EQ_I(call(0, 1000), BST_CUDA);
    CHECK_STR(bst_last_error(), "a process that has used CUDA cannot use it again in a fork: start it by spawn");
    fake->forked = false;
    end();
}

/* Whichever device the caller's thread is at: it stays there. */
TEST(a_launch_is_on_the_device_of_its_tensors) {
    begin(fastest_512);
    bst_device *any;
    CHECK_OK(bst__device("a_test", 0, &any)); /* opens the driver */
    const bst_driver_api *driver = bst__driver();
    for (int there = 0; there < 2; there++) {
        CUcontext mine, now = NULL;
        CHECK_EQ_I(driver->cuDevicePrimaryCtxRetain(&mine, there), CUDA_SUCCESS);
        CHECK_EQ_I(driver->cuCtxPushCurrent(mine), CUDA_SUCCESS);
        for (int device = 0; device < 2; device++) {
            CHECK_OK(call_on(device, 1, 1000, false));
            CHECK_EQ_I(fake->last_device, device);
            CHECK_EQ_I(driver->cuCtxGetCurrent(&now), CUDA_SUCCESS);
            CHECK(now == mine);
        }
        CHECK_EQ_I(driver->cuCtxPopCurrent(&now), CUDA_SUCCESS);
    }
    end();
}

/* Clusters that stay until all work is done: as many as the device holds; it is asked once for each kernel. */
TEST(a_resident_launch_has_as_many_clusters_as_fit) {
    begin(fastest_128);
    int64_t arguments = 0;
    bst_launch l = {.kernel = &toy, .values = {77, 128}, .block = 128, .grid_x = 40, .cluster = 4, .resident = true};
    fake->clusters = 3;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(bst__cuda_launch(NULL, "a_test", 0, &l, &arguments, sizeof arguments));
        CHECK_EQ_I(fake->last_grid, 12);
    }
    CHECK_EQ_I(fake->occupancies, 1);
    l.grid_x = 8; /* fewer than fit */
    CHECK_OK(bst__cuda_launch(NULL, "a_test", 0, &l, &arguments, sizeof arguments));
    CHECK_EQ_I(fake->last_grid, 8);
    l.resident = false;
    l.grid_x = 40;
    CHECK_OK(bst__cuda_launch(NULL, "a_test", 0, &l, &arguments, sizeof arguments));
    CHECK_EQ_I(fake->last_grid, 40);
    /* None fits: the launch itself is to say why. */
    fake->clusters = 0;
    l.values[WIDTH] = 78;
    l.resident = true;
    CHECK_OK(bst__cuda_launch(NULL, "a_test", 0, &l, &arguments, sizeof arguments));
    CHECK_EQ_I(fake->last_grid, 40);
    end();
}

TEST(devices_have_choices_of_their_own) {
    begin(fastest_512);
    CHECK_OK(call_on(0, 1, 1000, false));
    fake->kernel_ms = fastest_128;
    CHECK_OK(call_on(1, 1, 1000, false));
    CHECK_TOOK(128);
    CHECK_EQ_I(choices(), 2);
    CHECK_OK(call_on(0, 1, 1000, false));
    CHECK_TOOK(512);
    end();
}

TEST(another_process_has_measured_it) {
    begin(fastest_512);
    pid_t child = fork();
    if (!child) _exit(call(1, 1000) == BST_OK && call(2, 1000) == BST_OK ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ_I(status, 0);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(512);
    CHECK_EQ_I(launches_of(2, 1000, true), 1); /* not even that it may not measure matters */
    CHECK_TOOK(512);
    end();
}

TEST(what_is_forgotten_is_measured_again) {
    begin(fastest_512);
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK(launches_of(2, 1000, false) > 1);
    CHECK_EQ_I(bst_autotune_clear(), 2);
    fake->kernel_ms = fastest_128;
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_TOOK(128);
    CHECK_EQ_I(choices(), 1);
    /* Without a folder, the process remembers. */
    setenv("BASTILE_CACHE", "off", 1);
    CHECK_EQ_I(bst_autotune_clear(), 0);
    fake->kernel_ms = fastest_512;
    CHECK(launches_of(1, 1000, false) > 1);
    CHECK_EQ_I(launches_of(1, 1000, false), 1);
    CHECK_TOOK(512);
    CHECK_EQ_I(bst_autotune_clear(), 1);
    CHECK(launches_of(1, 1000, false) > 1);
    setenv("BASTILE_CACHE", folder, 1);
    end();
}

enum { CALLERS = 6, WIDTHS = 5 };
static atomic_int failures;

/* Every caller meets the problems in another order. */
static void *call_all(void *first) {
    for (int i = 0; i < 20 * WIDTHS; i++)
        if (call(1 + (i + *(int *)first) % WIDTHS, 1000) != BST_OK) atomic_fetch_add(&failures, 1);
    return NULL;
}

/* The clock stands still: what one thread launches would count in the measurements of another. */
static double no_time(const char *options, unsigned block) {
    (void)options;
    return block == 64 ? -1.0 : 0.0;
}

/* Ten rounds of three candidates for each problem, whoever comes first, and a launch for each call. */
TEST(threads_measure_each_problem_once) {
    begin(no_time);
    pthread_t threads[CALLERS];
    int first[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        first[i] = i;
        if (pthread_create(&threads[i], NULL, call_all, &first[i]) != 0) abort();
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    CHECK_EQ_I(atomic_load(&failures), 0);
    CHECK_EQ_I(choices(), WIDTHS);
    CHECK_EQ_I(fake->launches, WIDTHS * 3 * 10 + CALLERS * 20 * WIDTHS);
    end();
}

TEST(more_problems_than_it_remembers_take_the_default) {
    begin(fastest_512);
    setenv("BASTILE_CACHE", "off", 1);
    bst__set_search_time(0);
    for (int width = 1000; width < 4000; width++) CHECK_EQ_I(launches_of(width, 1000, true), 1);
    bst__set_search_time(60);
    CHECK_EQ_I(launches_of(3999, 1000, false), 1);
    CHECK_TOOK(128);
    CHECK(launches_of(1000, 1000, false) > 1);
    CHECK_TOOK(512);
    end();
}

/* ---- matrix products --------------------------------------------------------------------------------------------- */

static int products_of(int64_t m, float beta) {
    static float memory[64];
    int before = fake->products;
    bst_gemm g = {.device = {kDLCUDA, 0}, .m = m, .n = 4, .k = 4, .a = memory, .b = memory, .out = memory};
    g.lda = g.ldb = g.ldo = 4;
    g.input_type = g.output_type = bst_test_types[0];
    g.alpha = 1;
    g.beta = beta;
    CHECK_OK(bst__cuda_gemm(NULL, "a_test", &g));
    return fake->products - before;
}

TEST(a_product_takes_the_fastest_algorithm) {
    begin(fastest_512);
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(products_of(4, 0), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(fake->waits, 0);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    /* Three in ten rounds, one that fails, and one so slow that it runs twice; then the result. */
    CHECK_EQ_I(products_of(4, 0), 3 * 10 + 2 + 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK_EQ_I(choices(), 1);
    CHECK_EQ_I(products_of(4, 0), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    CHECK(products_of(5, 0) > 1); /* another shape is another problem */
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(products_of(4, 0), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    CHECK_EQ_I(bst_autotune_clear(), 2);
    fake->product_ms[2] = 1.0;
    CHECK(products_of(4, 0) > 1);
    CHECK_EQ_I(fake->last_algorithm, 4);
    end();
}

TEST(a_product_that_adds_runs_once) {
    begin(fastest_512);
    CHECK_EQ_I(products_of(4, 1), 1);
    CHECK_EQ_I(products_of(4, 1), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(choices(), 0);
    end();
}

TEST(a_captured_product_runs_once) {
    begin(fastest_512);
    fake->capturing = true;
    CHECK_EQ_I(products_of(4, 0), 1);
    CHECK_EQ_I(fake->last_algorithm, 0);
    CHECK_EQ_I(fake->waits, 0);
    fake->capturing = false;
    CHECK(products_of(4, 0) > 1);
    fake->capturing = true;
    CHECK_EQ_I(products_of(4, 0), 1);
    CHECK_EQ_I(fake->last_algorithm, 2);
    end();
}

/* A kernel that is called twice, one that does not compile, and one that another process has compiled. */
TEST(kernels_that_are_made_ready_are_counted) {
    enum { FIRST = 5000, OTHERS = 5001 }; /* widths that no other test has */
    begin(fastest_128);
    CHECK_OK(bst_set_autotune(0));
    int64_t compiled, cached, before, cached_before;
    bst_kernel_counts(&before, &cached_before);
    pid_t child = fork();
    if (!child) _exit(call(OTHERS, 1000) == BST_OK ? 0 : 1);
    int ended = -1;
    waitpid(child, &ended, 0);
    CHECK_EQ_I(ended, 0);
    CHECK_OK(call(FIRST, 1000));
    CHECK_OK(call(FIRST, 10));
    CHECK_OK(call_on(1, FIRST, 10, false)); /* the same code on another device */
    bst_launch broken = {.kernel = &toy, .values = {FIRST, 128, 1}, .block = 128, .grid_x = 1};
    CHECK_EQ_I(bst__cuda_launch(NULL, "a_test", 0, &broken, &compiled, sizeof compiled), BST_COMPILE);
    bst_kernel_counts(&compiled, &cached);
    CHECK_EQ_I(compiled, before + 1);
    CHECK_EQ_I(cached, cached_before);
    CHECK_OK(call(OTHERS, 1000));
    bst_kernel_counts(NULL, &cached);
    bst_kernel_counts(&compiled, NULL);
    CHECK_EQ_I(compiled, before + 1);
    CHECK_EQ_I(cached, cached_before + 1);
    end();
}

int main(void) {
    fake = load_fake_cuda();
    unsetenv("BASTILE_ALTERNATIVE");
    RUN(off_it_launches_the_default_once);
    RUN(the_first_call_measures_and_every_call_takes_the_fastest);
    RUN(the_default_stays_where_it_is_the_fastest);
    RUN(lengths_of_one_magnitude_share_a_choice);
    RUN(what_overwrites_its_input_runs_once);
    RUN(under_capture_nothing_is_measured);
    RUN(without_memory_or_time_the_default_is_taken);
    RUN(what_could_not_be_compiled_for_lack_of_memory_has_not_lost);
    RUN(an_error_of_the_default_is_an_error);
    RUN(what_drops_out_is_no_error_of_the_call);
    RUN(a_fork_is_told_to_spawn);
    RUN(a_launch_is_on_the_device_of_its_tensors);
    RUN(a_resident_launch_has_as_many_clusters_as_fit);
    RUN(devices_have_choices_of_their_own);
    RUN(another_process_has_measured_it);
    RUN(what_is_forgotten_is_measured_again);
    RUN(threads_measure_each_problem_once);
    RUN(more_problems_than_it_remembers_take_the_default);
    RUN(a_product_takes_the_fastest_algorithm);
    RUN(a_product_that_adds_runs_once);
    RUN(a_captured_product_runs_once);
    RUN(kernels_that_are_made_ready_are_counted);
    return bst_test_report();
}
