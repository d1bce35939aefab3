/* test_shared.c - the shared library as any program has it: what it asks of the program's threads. */
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "bastile.h"
#include "test.h"

/* Adds up the thread-local storage of the object that begins where `info` says. */
typedef struct storage {
    const void *base;
    int objects;
    size_t bytes;
} storage;

static int measure(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    storage *s = context;
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const char *begin = (const char *)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        ours |= info->dlpi_phdr[i].p_type == PT_LOAD && (const char *)s->base >= begin &&
                (const char *)s->base < begin + info->dlpi_phdr[i].p_memsz;
    }
    for (int i = 0; ours && i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS) s->bytes += info->dlpi_phdr[i].p_memsz;
    s->objects += ours;
    return 0;
}

/* Every thread of a program that links the library would pay for it, whether it calls or not. */
TEST(no_thread_local_storage) {
    storage s = {.base = bst_version()};
    dl_iterate_phdr(measure, &s);
    CHECK_EQ_I(s.objects, 1);
    CHECK_EQ_I(s.bytes, 0);
}

TEST(version_of_the_library) {
    CHECK_EQ_I(bst_version_number(), BST_VERSION_NUMBER);
    CHECK(!strcmp(bst_version(), BST_VERSION));
}

static void *fail(void *context) {
    (void)context;
    CHECK_EQ_I(strlen(bst_last_error()), 0);
    CHECK_EQ_I(bst_glu_forward(NULL, NULL, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: a is NULL");
    return NULL;
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SANITIZED
#endif

/* The smallest stack that there is. Sanitizers need more for themselves. */
TEST(threads_with_the_smallest_stack) {
#ifdef SANITIZED
    const size_t bytes = 256 << 10;
#else
    const size_t bytes = (size_t)sysconf(_SC_THREAD_STACK_MIN);
#endif
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    CHECK_EQ_I(pthread_attr_setstacksize(&attributes, bytes), 0);
    int started = pthread_create(&thread, &attributes, fail, NULL);
    CHECK_EQ_I(started, 0);
    if (!started) pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    CHECK_EQ_I(strlen(bst_last_error()), 0); /* a thread's own */
}

enum { HEADS = 2, POSITIONS = 3, D = 64 };
static float heads[9][HEADS * POSITIONS * D];

/* The pass that has the most on its stack. */
static void *call(void *context) {
    int64_t shape[] = {1, HEADS, POSITIONS, D}, table[] = {1, POSITIONS, D}, width[] = {D};
    const DLDataType f32 = {kDLFloat, 32, 1};
    DLTensor t[9];
    for (int i = 0; i < 9; i++) t[i] = (DLTensor){heads[i], {kDLCPU, 0}, 4, f32, shape, NULL, 0};
    for (int i = 5; i < 7; i++) t[i].ndim = 3, t[i].shape = table;
    for (int i = 7; i < 9; i++) t[i].ndim = 1, t[i].shape = width;
    const bst_rope_backward_tensors tensors = {.size = sizeof tensors,
                                               .dq_out = &t[0],
                                               .q = &t[1],
                                               .cos = &t[5],
                                               .sin = &t[6],
                                               .q_weight = &t[7],
                                               .dq = &t[2],
                                               .dq_weight = &t[8]};
    *(bst_status *)context = bst_rope_backward(NULL, &tensors, NULL);
    return NULL;
}

/* bastile.h names what a call takes. */
TEST(calls_on_small_stacks) {
#ifdef SANITIZED
    const size_t bytes = 1 << 20;
#else
    const size_t bytes = 128 << 10;
#endif
    pthread_attr_t attributes;
    pthread_t thread;
    bst_status status = BST_HOST;
    pthread_attr_init(&attributes);
    CHECK_EQ_I(pthread_attr_setstacksize(&attributes, bytes), 0);
    CHECK_EQ_I(pthread_create(&thread, &attributes, call, &status), 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    CHECK_EQ_I(status, BST_OK);
}

int main(void) {
    RUN(no_thread_local_storage);
    RUN(version_of_the_library);
    RUN(threads_with_the_smallest_stack);
    RUN(calls_on_small_stacks);
    return bst_test_report();
}
