/* test_opening.c - the first use of a GPU: what fails for a while is tried again, and a child that is forked meanwhile
 * does not hang. On a driver that is none (fake_cuda.c); each test is a process of its own, in which nothing is open
 * yet. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chips.h"
#include "cuda/driver.h"
#include "fake_library.h"

const bst_source bst__sources[] = {{"toy.cu", "extern \"C\" __global__ void toy() {}\n"}, {NULL, NULL}};
static const bst_kernel toy = {"toy.cu", "toy", {"WIDTH"}};

static fake_cuda *load(void) {
    fake_cuda *fake = load_fake_cuda();
    *fake = (fake_cuda){.product_ms = {1.0}};
    return fake;
}

static bst_status launch(int64_t width) {
    bst_launch l = {.kernel = &toy, .values = {width}, .block = 32, .grid_x = 1};
    int64_t argument = 0;
    return bst__cuda_launch(NULL, "a_test", 0, &l, &argument, sizeof argument);
}

static bst_status multiply(void) {
    static float memory[16];
    bst_gemm g = {.device = {kDLCUDA, 0}, .m = 2, .n = 2, .k = 2, .a = memory, .b = memory, .out = memory};
    g.lda = g.ldb = g.ldo = 2;
    g.input_type = g.output_type = bst_test_types[0];
    g.alpha = 1;
    return bst__cuda_gemm(NULL, "a_test", &g);
}

/* ---- what fails for a while -------------------------------------------------------------------------------------- */

/* How many files this process may open is cut down to what it has open, and put back. */
static struct rlimit usual;

static void allow_no_more_files(void) {
    int next = dup(0);
    if (next < 0 || getrlimit(RLIMIT_NOFILE, &usual) != 0) abort();
    close(next);
    struct rlimit tight = usual;
    tight.rlim_cur = (rlim_t)next;
    CHECK_EQ_I(setrlimit(RLIMIT_NOFILE, &tight), 0);
}

static void allow_files(void) { CHECK_EQ_I(setrlimit(RLIMIT_NOFILE, &usual), 0); }

TEST(without_descriptors_the_driver_is_not_given_up) {
    bst_device *device;
    allow_no_more_files();
    for (int twice = 0; twice < 2; twice++) {
        CHECK_EQ_I(bst__device("a_test", 0, &device), BST_NO_CUDA);
        CHECK_STR(bst_last_error(), "a_test: the CUDA driver could not be opened (libcuda.so.1: ");
        CHECK_STR(bst_last_error(), strerror(EMFILE));
    }
    allow_files();
    load();
    CHECK_OK(bst__device("a_test", 0, &device));
}

TEST(without_descriptors_nvrtc_is_not_called_missing) {
    int major, minor;
    unsetenv("BASTILE_NVRTC");
    allow_no_more_files();
    CHECK_EQ_I(bst__nvrtc_version("a_test", &major, &minor), BST_NO_CUDA);
    CHECK_STR(bst_last_error(), strerror(EMFILE));
    allow_files();
    load();
    CHECK_OK(bst__nvrtc_version("a_test", &major, &minor));
}

/* 2: out of memory; 304: an operating system call failed, as without descriptors. */
TEST(a_driver_that_does_not_start_is_asked_again) {
    bst_device *device;
    fake_cuda *fake = load();
    for (int i = 0; i < 2; i++) {
        fake->start_error = i ? 304 : CUDA_ERROR_OUT_OF_MEMORY;
        CHECK_EQ_I(bst__device("a_test", 0, &device), BST_NO_CUDA);
        CHECK_STR(bst_last_error(), "a_test: the CUDA driver does not start: CUDA_ERROR_FAKE");
    }
    fake->start_error = 0;
    CHECK_OK(bst__device("a_test", 0, &device));
}

/* Another thread may be opening NVRTC at that very moment: what is not learnt is not written. */
TEST(a_version_that_was_not_learnt_is_not_given) {
    int major = -1, minor = -2;
    fake_cuda *fake = load();
    fake->nvrtc_major = 11;
    CHECK_EQ_I(bst__nvrtc_version("a_test", &major, &minor), BST_NO_CUDA);
    CHECK_STR(bst_last_error(), "a_test: NVRTC is of version 11.0; 12.0 or later is needed");
    CHECK(major == -1 && minor == -2);
    fake->nvrtc_major = 12;
    CHECK_OK(bst__nvrtc_version("a_test", &major, &minor));
    CHECK(major == 12 && minor == 0);
}

/* The logs are those of NVRTC 13.0 under a limit on memory, for which it returns "compilation failed". */
TEST(only_what_the_source_is_to_blame_for_is_remembered) {
    enum { OUT_OF_MEMORY = 1, CREATION = 2, COMPILATION = 6, INTERNAL = 11 };
    static const struct {
        const char *function;
        int result;
        const char *log;
        bst_status status;
    } passing[] = {
        {"nvrtcCreateProgram", OUT_OF_MEMORY, NULL, BST_NO_MEMORY},
        {"nvrtcCreateProgram", CREATION, NULL, BST_CUDA},
        {"nvrtcCompileProgram", OUT_OF_MEMORY, NULL, BST_NO_MEMORY},
        {"nvrtcCompileProgram", INTERNAL, "an error\n", BST_CUDA},
        {"nvrtcCompileProgram", COMPILATION, "toy.cu(1): catastrophic error: out of memory\n", BST_NO_MEMORY},
        {"nvrtcCompileProgram", COMPILATION, "LLVM ERROR: out of memory\n", BST_NO_MEMORY},
        {"nvrtcCompileProgram", COMPILATION, "ptxas fatal   : Memory allocation failure\n", BST_NO_MEMORY},
        {"nvrtcCompileProgram", COMPILATION, NULL, BST_CUDA},
        {"nvrtcGetCUBINSize", OUT_OF_MEMORY, NULL, BST_NO_MEMORY},
        {"nvrtcGetCUBIN", OUT_OF_MEMORY, NULL, BST_NO_MEMORY},
        {"nvrtcGetCUBIN", INTERNAL, NULL, BST_CUDA},
    };
    fake_cuda *fake = load();
    for (int i = 0; i < (int)(sizeof passing / sizeof *passing); i++) {
        fake->failing = passing[i].function;
        fake->failure = passing[i].result;
        fake->log = passing[i].log;
        CHECK_EQ_I(launch(i), passing[i].status);
        CHECK_STR(bst_last_error(), "a_test: ");
        CHECK_STR(bst_last_error(), "toy"); /* the kernel, or its source */
        fake->failing = NULL;
        CHECK_OK(launch(i));
    }
    fake->failing = "nvrtcCompileProgram";
    fake->failure = COMPILATION;
    fake->log = "toy.cu(1): error: no\n";
    CHECK_EQ_I(launch(1000), BST_COMPILE);
    fake->failing = NULL;
    CHECK_EQ_I(launch(1000), BST_COMPILE);
}

/* A machine without NVRTC, as long as none can be opened. */
static int calls;

static void call(void) {
    calls++;
    CHECK_OK(launch(1));
}

/* Every operator's test compiles for each chip in this way. */
TEST(without_nvrtc_only_what_needs_it_is_left_out) {
    unsetenv("BASTILE_NVRTC");
    unsetenv("BASTILE_NVRTC_FOLDER");
    allow_no_more_files();
    bst_for_every_chip("toy", call);
    allow_files();
    CHECK_EQ_I(calls, 0);
    CHECK_EQ_I(bst_test_skipped, 1);
    CHECK_EQ_I(bst_test_report(), 77);
}

TEST(where_nvrtc_is_expected_nothing_is_left_out) {
    unsetenv("BASTILE_NVRTC");
    setenv("BASTILE_NVRTC_FOLDER", "", 1); /* as by a command that found none */
    allow_no_more_files();
    CHECK(bst_nvrtc_is_there());
    unsetenv("BASTILE_NVRTC_FOLDER");
    setenv("BASTILE_NVRTC", "/nowhere", 1);
    CHECK(bst_nvrtc_is_there());
    allow_files();
    CHECK_EQ_I(bst_test_skipped, 0);
}

/* ---- forks ------------------------------------------------------------------------------------------------------- */

static const char *place; /* where the thread is held up */
static sem_t reached, released;

static void wait_there(const char *function) {
    if (strcmp(function, place) != 0) return;
    sem_post(&reached);
    while (sem_wait(&released) != 0) continue;
}

/* What opens everything there is. */
static bst_status use_all(void) {
    BST_TRY(launch(1));
    return multiply();
}

static void *use_all_in_a_thread(void *outcome) {
    *(bst_status *)outcome = use_all();
    return NULL;
}

/* A child that is forked while another thread is within a function, and does the same there. */
static void fork_within(const char *function, bst_status expected, const char *message) {
    pthread_t thread;
    bst_status outcome;
    fake_cuda *fake = load();
    place = function;
    fake->within = wait_there;
    if (sem_init(&reached, 0, 0) != 0 || sem_init(&released, 0, 0) != 0) abort();
    if (pthread_create(&thread, NULL, use_all_in_a_thread, &outcome) != 0) abort();
    while (sem_wait(&reached) != 0) continue;
    pid_t child = fork();
    if (!child) {
        alarm(60); /* where it would hang */
        fake->within = NULL;
        for (int twice = 0; twice < 2; twice++) {
            CHECK_EQ_I(use_all(), expected);
            CHECK_STR(bst_last_error(), message);
        }
        fflush(stdout);
        _exit(bst_test_failures > 0);
    }
    int ended = -1;
    waitpid(child, &ended, 0);
    CHECK_EQ_I(ended, 0);
    sem_post(&released);
    pthread_join(thread, NULL);
    CHECK_OK(outcome);
}

/* A driver that has begun to start is of no use in a fork, and may hold locks of its own there. */
TEST(a_fork_while_the_driver_starts) {
    fork_within("cuInit", BST_CUDA, "cannot use it again in a fork: start it by spawn");
}
TEST(a_fork_while_a_context_is_made) { fork_within("cuDevicePrimaryCtxRetain", BST_OK, ""); }
TEST(a_fork_while_nvrtc_is_opened) { fork_within("nvrtcVersion", BST_OK, ""); }
TEST(a_fork_while_a_kernel_compiles) { fork_within("nvrtcCompileProgram", BST_OK, ""); }
TEST(a_fork_while_cublaslt_is_opened) { fork_within("cublasLtCreate", BST_OK, ""); }

/* Runs a test in a process of its own. */
static void apart(void (*test)(void)) {
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        alarm(120);
        test();
        fflush(stdout);
        _exit(bst_test_failures > 0);
    }
    int ended = -1;
    waitpid(child, &ended, 0);
    CHECK_EQ_I(ended, 0);
}

#define RUN_APART(name)                                                          \
    do {                                                                         \
        int before = bst_test_failures;                                          \
        apart(name);                                                             \
        printf("%s %s\n", bst_test_failures == before ? "ok  " : "FAIL", #name); \
    } while (0)

int main(void) {
    setenv("BASTILE_CACHE", "off", 1);
    RUN_APART(without_descriptors_the_driver_is_not_given_up);
    RUN_APART(without_descriptors_nvrtc_is_not_called_missing);
    RUN_APART(a_driver_that_does_not_start_is_asked_again);
    RUN_APART(a_version_that_was_not_learnt_is_not_given);
    RUN_APART(only_what_the_source_is_to_blame_for_is_remembered);
    RUN_APART(without_nvrtc_only_what_needs_it_is_left_out);
    RUN_APART(where_nvrtc_is_expected_nothing_is_left_out);
    RUN_APART(a_fork_while_the_driver_starts);
    RUN_APART(a_fork_while_a_context_is_made);
    RUN_APART(a_fork_while_nvrtc_is_opened);
    RUN_APART(a_fork_while_a_kernel_compiles);
    RUN_APART(a_fork_while_cublaslt_is_opened);
    return bst_test_report();
}
