/* test_jit.c - compiling kernels by NVRTC without a GPU, and what is said where NVRTC or the driver is missing.
 *
 * Where there is no NVRTC, what compiles is left out (nvrtc_there.h). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "cuda/cuda.h"
#include "nvrtc_there.h"

/* ---- kernels of this test ---------------------------------------------------------------------------------------- */

static const char scale_cu[] =
    "#include \"scale_args.h\"\n"
    "#include \"helper.cuh\"\n"
    "extern \"C\" __global__ void scale(const scale_args a) {\n"
    "    extern __shared__ float buffer[];\n"
    "    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "    buffer[threadIdx.x] = i < a.count ? a.x[i] : 0.0f;\n"
    "    __syncthreads();\n"
    "    if (i < a.count) a.y[i] = HELPED(buffer[threadIdx.x]);\n"
    "}\n";
static const char scale_args_h[] =
    "typedef struct scale_args { const float *x; float *y; unsigned count; } scale_args;\n";
static const char helper_cuh[] =
    "#ifndef HELPED\n"
    "#define HELPED(v) (DEEPER(v) + OFFSET)\n"
    "#include \"deeper.cuh\"\n"
    "#endif\n"
    "#ifdef NEVER\n#include \"not_embedded.h\"\n#endif\n";
static const char deeper_cuh[] = "#include \"helper.cuh\"\n#define DEEPER(v) ((v) * FACTOR)\n";
static const char broken_good[] = "extern \"C\" __global__ void broken(int *x) { *x = A; }           \n";
static const char broken_bad[] = "extern \"C\" __global__ void broken(int *x) { *x = no_such_name; }\n";
_Static_assert(sizeof broken_good == sizeof broken_bad, "one is copied over the other");
static char broken_cu[sizeof broken_good];
static const char slow_cu[] =
    "extern \"C\" __global__ void slow(float *x) {\n"
    "    float v = *x;\n"
    "#pragma unroll\n"
    "    for (int i = 0; i < STEPS; i++) v = v * v / (x[i] + v);\n"
    "    *x = v;\n"
    "}\n";

const bst_source bst__sources[] = {
    {"scale.cu", scale_cu},
    {"scale_args.h", scale_args_h},
    {"helper.cuh", helper_cuh},
    {"deeper.cuh", deeper_cuh},
    {"broken.cu", broken_cu},
    {"slow.cu", slow_cu},
    {NULL, NULL},
};

typedef struct scale_args {
    const float *x;
    float *y;
    unsigned count;
} scale_args;

static const bst_kernel scale = {"scale.cu", "scale", {"FACTOR", "OFFSET"}};
static const bst_kernel broken = {"broken.cu", "broken", {"A"}};
static const bst_kernel slow = {"slow.cu", "slow", {"STEPS"}};
static const bst_kernel absent = {"absent.cu", "absent", {NULL}};

static bst_launch launch_of(int64_t factor, int64_t offset) {
    return (bst_launch){.kernel = &scale, .values = {factor, offset}, .grid_x = 1, .block = 64, .shared = 256};
}

/* ---- the collector ----------------------------------------------------------------------------------------------- */

typedef struct reports {
    int count;
    int64_t factor;
    char options[512], log[4096];
} reports;

static void keep(void *context, const bst_launch *launch, const char *options, const char *log) {
    reports *r = context;
    r->count++;
    r->factor = launch->values[0];
    snprintf(r->options, sizeof r->options, "%s", options);
    snprintf(r->log, sizeof r->log, "%s", log);
}

static void collect(int arch, reports *r) {
    *r = (reports){0};
    bst_compile_only collector = {arch, keep, r};
    bst__cuda_compile_only(&collector);
}

static bst_status compile(const bst_launch *launch) {
    scale_args arguments = {0};
    return bst__cuda_launch(NULL, "a_test", 0, launch, &arguments, sizeof arguments);
}

/* Ends the test, with the reason, where a compilation that must succeed fails. */
static void must_compile(const bst_launch *launch) {
    if (compile(launch) == BST_OK) return;
    printf("%s\n", bst_last_error());
    exit(EXIT_FAILURE);
}

/* ---- what is missing --------------------------------------------------------------------------------------------- */

TEST(a_library_path_is_absolute) {
    CHECK_EQ_I(bst_add_library_path(NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "folder is NULL");
    CHECK_EQ_I(bst_add_library_path("lib"), BST_INVALID);
    CHECK_STR(bst_last_error(), "\"lib\"; an absolute path is needed");
    CHECK_EQ_I(bst_add_library_path("/nowhere"), BST_OK);
    CHECK_EQ_I(bst_add_library_path("/nowhere"), BST_OK);
}

/* Before NVRTC is opened for the first time. */
TEST(a_missing_nvrtc_is_explained) {
    reports r;
    bst_launch launch = launch_of(1, 1);
    const char *path = getenv("BASTILE_NVRTC");
    char *kept = path ? strdup(path) : NULL;
    setenv("BASTILE_NVRTC", "/nowhere/libnvrtc.so", 1);
    collect(90, &r);
    CHECK_EQ_I(compile(&launch), BST_NO_CUDA);
    CHECK_STR(bst_last_error(), "a_test: NVRTC could not be opened from BASTILE_NVRTC=/nowhere/libnvrtc.so");
    unsetenv("BASTILE_NVRTC");
    bst_status status = compile(&launch); /* found only where the system has one of its own */
    if (status != BST_OK) {
        CHECK_EQ_I(status, BST_NO_CUDA);
        CHECK_STR(bst_last_error(), "a_test: NVRTC (libnvrtc.so.13 or libnvrtc.so.12) was not found");
        CHECK_STR(bst_last_error(), "the folders given to bst_add_library_path (1)");
        CHECK_STR(bst_last_error(), "pip install nvidia-cuda-nvrtc");
        CHECK_STR(bst_last_error(), "CPU tensors work");
        CHECK_EQ_I(r.count, 0);
    }
    bst__cuda_compile_only(NULL);
    if (kept) setenv("BASTILE_NVRTC", kept, 1);
    free(kept);
}

static bool have_gpu(void) {
    bst_chip chip;
    return bst__cuda_chip("a_test", 0, &chip) == BST_OK;
}

TEST(a_missing_driver_is_explained) {
    if (have_gpu()) return;
    bst_chip chip;
    bst_launch launch = launch_of(1, 1);
    void *memory = &chip;
    for (int twice = 0; twice < 2; twice++) {
        CHECK_EQ_I(bst__cuda_chip("a_test", 0, &chip), BST_NO_CUDA);
        CHECK_STR(bst_last_error(), "a_test: ");
        CHECK_STR(bst_last_error(), "CUDA driver");
    }
    CHECK_EQ_I(compile(&launch), BST_NO_CUDA);
    CHECK_EQ_I(bst__cuda_zero(NULL, "a_test", 0, memory, 4), BST_NO_CUDA);
    CHECK_EQ_I(bst__cuda_allocate(NULL, "a_test", 0, 4, &memory), BST_NO_CUDA);
    CHECK(memory == NULL);
}

/* ---- compiling --------------------------------------------------------------------------------------------------- */

TEST(a_kernel_compiles_for_each_chip) {
    static const struct {
        int arch;
        const char *target;
    } chips[] = {{80, "sm_80"}, {86, "sm_86"}, {89, "sm_89"}, {90, "sm_90a"}, {100, "sm_100a"}, {120, "sm_120"}};
    for (size_t i = 0; i < sizeof chips / sizeof *chips; i++) {
        reports r;
        bst_chip chip;
        char option[64], target[32];
        collect(chips[i].arch, &r);
        CHECK_EQ_I(bst__cuda_chip("a_test", 5, &chip), BST_OK);
        CHECK_EQ_I(chip.arch, chips[i].arch);
        CHECK(chip.processors >= 80 && chip.shared_memory >= 99 << 10 && chip.l2 >= 6 << 20);
        bst_launch launch = launch_of(3, -4);
        must_compile(&launch);
        CHECK_EQ_I(r.count, 1);
        CHECK_EQ_I(r.factor, 3);
        snprintf(option, sizeof option, "--gpu-architecture=%s ", chips[i].target);
        snprintf(target, sizeof target, "'scale' for '%s'", chips[i].target);
        CHECK_STR(r.options, option);
        CHECK_STR(r.options, " -DFACTOR=3 -DOFFSET=-4 --ptxas-options=-v");
        CHECK_STR(r.log, target);
        CHECK_STR(r.log, "0 bytes spill stores, 0 bytes spill loads");
        const char *used = strstr(r.log, "Used ");
        CHECK(used && atoi(used + 5) > 4 && atoi(used + 5) < 64 && strstr(used, " registers"));
        bst__cuda_compile_only(NULL);
    }
}

TEST(an_unknown_chip_is_refused) {
    reports r;
    bst_chip chip;
    bst_launch launch = launch_of(1, 1);
    collect(999, &r);
    CHECK_EQ_I(bst__cuda_chip("a_test", 0, &chip), BST_INVALID);
    CHECK_STR(bst_last_error(), "a_test: arch is 999; 80, 86, 89, 90, 100 or 120 is needed");
    CHECK_EQ_I(compile(&launch), BST_NO_CUDA);
    CHECK_STR(bst_last_error(), "cannot compile for this GPU (sm_999)");
    bst__cuda_compile_only(NULL);
}

/* More kernels than the table's first size, each twice; then again for another collector. */
TEST(each_specialisation_is_compiled_once) {
    enum { KERNELS = 70 };
    reports r;
    for (int collector = 0; collector < 2; collector++) {
        int kernels = collector ? 2 : KERNELS;
        collect(80, &r);
        for (int again = 0; again < 2; again++)
            for (int i = 0; i < kernels; i++) {
                bst_launch launch = launch_of(i, 1000 + i / 2);
                must_compile(&launch);
                CHECK_EQ_I(r.count, again ? kernels : i + 1);
            }
    }
    /* What is not a macro is no reason to compile. */
    bst_launch launch = launch_of(1, 1000);
    launch.grid_x = 77, launch.shared = 512, launch.values[5] = 9;
    must_compile(&launch);
    CHECK_EQ_I(r.count, 2);
    /* Nothing to do is nothing to compile. */
    launch = launch_of(12345, 1);
    launch.grid_x = 0;
    must_compile(&launch);
    CHECK_EQ_I(r.count, 2);
    bst__cuda_compile_only(NULL);
}

TEST(a_compile_error_names_everything_and_stays) {
    reports r;
    bst_launch launch = {.kernel = &broken, .values = {7}, .grid_x = 1, .block = 32};
    memcpy(broken_cu, broken_bad, sizeof broken_cu);
    collect(90, &r);
    CHECK_EQ_I(compile(&launch), BST_COMPILE);
    CHECK_STR(bst_last_error(), "a_test: kernel broken of broken.cu does not compile for sm_90a by NVRTC ");
    CHECK_STR(bst_last_error(), "broken.cu(1): error: identifier \"no_such_name\" is undefined");
    CHECK_STR(bst_last_error(), "-DA=7");
    char first[1024];
    snprintf(first, sizeof first, "%s", bst_last_error());
    /* Mended, and yet not tried again; the message is the same under another operator's name. */
    memcpy(broken_cu, broken_good, sizeof broken_cu);
    bst__error(BST_INVALID, "something else");
    CHECK_EQ_I(bst__cuda_launch(NULL, "other", 0, &launch, NULL, 0), BST_COMPILE);
    CHECK(strncmp(bst_last_error(), "other: ", 7) == 0 && strcmp(bst_last_error() + 7, first + 8) == 0);
    CHECK_EQ_I(r.count, 0);
    /* The failure was that specialisation's alone. */
    launch.values[0] = 8;
    must_compile(&launch);
    CHECK_EQ_I(r.count, 1);
    bst__cuda_compile_only(NULL);
}

TEST(a_source_that_is_not_there_is_named) {
    reports r;
    bst_launch launch = {.kernel = &absent, .grid_x = 1, .block = 32};
    collect(90, &r);
    CHECK_EQ_I(compile(&launch), BST_COMPILE);
    CHECK_STR(bst_last_error(), "a_test: kernel source absent.cu is not part of this library");
    bst__cuda_compile_only(NULL);
}

enum { FIRST = 500, KINDS = 4 };
static atomic_int failures, done[KINDS];

static void mark(void *context, const bst_launch *launch, const char *options, const char *log) {
    (void)options, (void)log;
    ++*(int *)context;
    atomic_store(&done[launch->values[0] - FIRST], 1);
}

/* A launch that returns before its kernel is compiled has failed, whoever compiles it. */
static void *compile_all_kinds(void *context) {
    (void)context;
    for (int i = 0; i < KINDS; i++) {
        bst_launch launch = launch_of(FIRST + i, 0);
        if (compile(&launch) != BST_OK || !atomic_load(&done[i])) atomic_fetch_add(&failures, 1);
    }
    return NULL;
}

TEST(threads_compile_each_kernel_once) {
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    int count = 0;
    bst_compile_only collector = {89, mark, &count};
    bst__cuda_compile_only(&collector);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, compile_all_kinds, NULL) != 0) abort();
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECK_EQ_I(atomic_load(&failures), 0);
    CHECK_EQ_I(count, KINDS); /* reports do not overlap, so an int will do: TSan would say */
    bst__cuda_compile_only(NULL);
}

enum { SLOW_STEPS = 1500, LONGEST_ORDER = 4 };

typedef struct order {
    int count;
    const bst_kernel *kernels[LONGEST_ORDER];
} order;

/* A kernel that takes NVRTC long: each step is unrolled. */
static void *compile_slow(void *context) {
    bst_launch launch = {.kernel = &slow, .values = {SLOW_STEPS}, .grid_x = 1, .block = 32};
    atomic_store((atomic_bool *)context, true);
    if (compile(&launch) != BST_OK) atomic_fetch_add(&failures, 1);
    return NULL;
}

static void note_order(void *context, const bst_launch *launch, const char *options, const char *log) {
    (void)options, (void)log;
    order *o = context;
    if (o->count < LONGEST_ORDER) o->kernels[o->count++] = launch->kernel;
}

/* Were there a lock around the compiler, a quick kernel that is asked for second would be done second. */
TEST(a_quick_kernel_overtakes_a_slow_one) {
    pthread_t thread;
    atomic_bool begun = false;
    order o = {0};
    bst_compile_only collector = {90, note_order, &o};
    bst_launch quick = launch_of(900, 0);
    atomic_store(&failures, 0);
    bst__cuda_compile_only(&collector);
    if (pthread_create(&thread, NULL, compile_slow, &begun) != 0) abort();
    while (!atomic_load(&begun)) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL); /* into the compiler */
    must_compile(&quick);
    pthread_join(thread, NULL);
    bst__cuda_compile_only(NULL);
    CHECK_EQ_I(atomic_load(&failures), 0);
    CHECK_EQ_I(o.count, 2);
    CHECK(o.kernels[0] == &scale && o.kernels[1] == &slow);
}

/* What is only compiled is not ready to be launched. */
TEST(only_kernels_that_are_ready_count) {
    int64_t compiled = -1, cached = -1;
    bst_kernel_counts(&compiled, &cached);
    CHECK_EQ_I(compiled, 0);
    CHECK_EQ_I(cached, 0);
    bst_kernel_counts(NULL, NULL);
}

TEST(compiling_only_touches_no_device) {
    reports r;
    void *one = NULL, *two = NULL;
    collect(90, &r);
    CHECK_EQ_I(bst__cuda_allocate(NULL, "a_test", 0, 1000, &one), BST_OK);
    CHECK_EQ_I(bst__cuda_allocate(NULL, "a_test", 0, 1, &two), BST_OK);
    CHECK(one && (uintptr_t)one % 256 == 0 && (uintptr_t)two % 256 == 0 && (uintptr_t)two >= (uintptr_t)one + 1000);
    CHECK_EQ_I(bst__cuda_zero(NULL, "a_test", 0, one, 1000), BST_OK);
    bst__cuda_release(NULL, 0, one);
    bst_gemm g = {.device = {kDLCUDA, 0}, .m = 2, .n = 2, .k = 2, .input_type = {kDLBfloat, 16, 1}, .alpha = 1};
    g.output_type = (DLDataType){kDLFloat, 32, 1};
    CHECK_EQ_I(bst__cuda_gemm(NULL, "a_test", &g), BST_OK);
    g.output_type = (DLDataType){kDLFloat, 16, 1};
    CHECK_EQ_I(bst__cuda_gemm(NULL, "a_test", &g), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "a_test: the output of a matrix product must be of its inputs' type or float32");
    g.input_type = (DLDataType){kDLInt, 8, 1};
    CHECK_EQ_I(bst__cuda_gemm(NULL, "a_test", &g), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "float32, bfloat16 or float16 is needed");
    g.input_type = g.output_type;
    g.beta = 1;
    g.device_alpha = one;
    CHECK_EQ_I(bst__cuda_gemm(NULL, "a_test", &g), BST_OK);
    bst__cuda_compile_only(NULL);
}

int main(void) {
    RUN(a_library_path_is_absolute);
    RUN(a_missing_nvrtc_is_explained);
    RUN(a_missing_driver_is_explained);
    RUN(a_source_that_is_not_there_is_named);
    if (bst_nvrtc_is_there()) {
        RUN(a_kernel_compiles_for_each_chip);
        RUN(an_unknown_chip_is_refused);
        RUN(each_specialisation_is_compiled_once);
        RUN(a_compile_error_names_everything_and_stays);
        RUN(threads_compile_each_kernel_once);
        RUN(a_quick_kernel_overtakes_a_slow_one);
    }
    RUN(only_kernels_that_are_ready_count);
    RUN(compiling_only_touches_no_device);
    return bst_test_report();
}
