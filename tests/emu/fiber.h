/* fiber.h - threads of control that switch only when they say so: one for each CUDA thread.
 *
 * Not for use from two operating-system threads at once. Stacks come from a pool and have a guard page below. */
#ifndef EMU_FIBER_H
#define EMU_FIBER_H

typedef struct fiber fiber;

/* A fiber that will call body(context); NULL where there is no memory. */
fiber *fiber_new(void (*body)(void *context), void *context);
/* Runs it until it leaves or its body returns, after which it must not run again. */
void fiber_run(fiber *f);
/* Goes back to whoever called fiber_run, until the next fiber_run. */
void fiber_leave(void);
/* Takes a fiber back, finished or not. */
void fiber_free(fiber *f);

#endif
