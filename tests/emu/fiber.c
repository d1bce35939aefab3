/* fiber.c - see fiber.h. A switch of our own on x86-64, as swapcontext makes two system calls and under ASan forgets
 * the red zones of the stack it switches to; ucontext elsewhere, or where EMU_UCONTEXT is defined. */
#include "fiber.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sanitize.h"

#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT 1
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif

/* Enough for a kernel's arrays with ASan's red zones, and for an ASan report. Only touched pages cost memory. */
enum { STACK_BYTES = 320 * 1024, GUARD_BYTES = 64 * 1024 };
/* Stacks begin this much below their tops, each another: at one place of a page all would share a few cache lines. */
enum { COLOUR_BYTES = 17 * 64, MOST_COLOUR_BYTES = 64 * 1024 };

struct fiber {
    void (*body)(void *);
    void *context;
    bool finished;
    unsigned char *stack; /* its lowest usable byte */
    size_t colour;        /* bytes at its top that are not used */
    void *fake_stack;     /* ASan's, while the fiber does not run */
    fiber *next;          /* in the pool */
#ifdef EMU_UCONTEXT
    ucontext_t state;
#else
    void *stack_pointer;
#endif
};

static fiber *pool;
static fiber *running;

static struct {
    const void *stack; /* bounds and fake stack of the host's stack, as ASan reports them */
    size_t stack_bytes;
    void *fake_stack;
#ifdef EMU_UCONTEXT
    ucontext_t state;
#else
    void *stack_pointer;
#endif
} host;

#ifndef EMU_UCONTEXT
/* System V ABI, "Register Usage": what a function must leave as it found it, but for the floating-point control words,
 * which no kernel changes. */
__asm__(
    ".text\n"
    ".hidden emu__switch\n"
    ".globl emu__switch\n"
    ".type emu__switch, @function\n"
    "emu__switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size emu__switch, . - emu__switch\n");
void emu__switch(void **save, void *load);
#endif

/* Says to ASan that the stack changes; `fake_stack` NULL: the stack left behind is finished with. */
static inline void switch_begins(void **fake_stack, const void *stack, size_t bytes) {
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#else
    (void)fake_stack, (void)stack, (void)bytes;
#endif
}

static inline void switch_ended(void *fake_stack, const void **old_stack, size_t *old_bytes) {
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, old_stack, old_bytes);
#else
    (void)fake_stack, (void)old_stack, (void)old_bytes;
#endif
}

EMU_NO_ASAN static void to_host(fiber *f) {
    switch_begins(f->finished ? NULL : &f->fake_stack, host.stack, host.stack_bytes);
#ifdef EMU_UCONTEXT
    swapcontext(&f->state, &host.state);
#else
    emu__switch(&f->stack_pointer, host.stack_pointer);
#endif
    switch_ended(f->fake_stack, &host.stack, &host.stack_bytes);
}

/* The first thing on a new stack. Never returns; not instrumented, so that it leaves no poison behind. */
EMU_NO_ASAN static void start(void) {
    switch_ended(NULL, &host.stack, &host.stack_bytes);
    fiber *f = running;
    f->body(f->context);
    f->finished = true;
    to_host(f);
    __builtin_unreachable();
}

static fiber *with_stack(void) {
    fiber *f = pool;
    if (f != NULL) {
        pool = f->next;
        return f;
    }
    f = calloc(1, sizeof *f);
    unsigned char *memory = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f == NULL || memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) {
        if (memory != MAP_FAILED) munmap(memory, GUARD_BYTES + STACK_BYTES);
        free(f);
        return NULL;
    }
    static size_t colour;
    f->stack = memory + GUARD_BYTES;
    f->colour = colour = (colour + COLOUR_BYTES) % MOST_COLOUR_BYTES;
    return f;
}

fiber *fiber_new(void (*body)(void *context), void *context) {
    fiber *f = with_stack();
    if (f == NULL) return NULL;
    f->body = body;
    f->context = context;
    f->finished = false;
    f->fake_stack = NULL;
#ifdef EMU_UCONTEXT
    getcontext(&f->state);
    f->state.uc_stack.ss_sp = f->stack;
    f->state.uc_stack.ss_size = STACK_BYTES - f->colour;
    f->state.uc_link = NULL;
    makecontext(&f->state, start, 0);
#else
    /* What emu__switch pops: six registers, the address of `start`, and above it a return address of zero, which ends
     * a stack trace. */
    void **top = (void **)(void *)(f->stack + STACK_BYTES - f->colour) - 8;
    memset(top, 0, 8 * sizeof *top);
    void (*const entry)(void) = start;
    memcpy(&top[6], &entry, sizeof entry);
    f->stack_pointer = top;
#endif
    return f;
}

void fiber_run(fiber *f) {
    running = f;
    switch_begins(&host.fake_stack, f->stack, STACK_BYTES);
#ifdef EMU_UCONTEXT
    swapcontext(&host.state, &f->state);
#else
    emu__switch(&host.stack_pointer, f->stack_pointer);
#endif
    switch_ended(host.fake_stack, NULL, NULL);
    running = NULL;
}

void fiber_leave(void) { to_host(running); }

void fiber_free(fiber *f) {
    if (f == NULL) return;
#ifdef EMU_ASAN
    if (!f->finished) __asan_unpoison_memory_region(f->stack, STACK_BYTES);
#endif
    f->next = pool;
    pool = f;
}
