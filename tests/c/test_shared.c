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

static void *fail(void *context) {
    (void)context;
    CHECK_EQ_I(strlen(bst_last_error()), 0);
    CHECK_EQ_I(bst_swiglu_forward(NULL, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "swiglu_forward: a is NULL");
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

int main(void) {
    RUN(no_thread_local_storage);
    RUN(threads_with_the_smallest_stack);
    return bst_test_report();
}
