/* stopwatch.h - the clock of a race on a GPU: events on the caller's stream. */
#ifndef BST_STOPWATCH_H
#define BST_STOPWATCH_H

#include "cuda/autotune.h"
#include "cuda/driver.h"

/* Cleared but for the first members, which its owner fills. The device's context is current throughout. */
typedef struct bst_stopwatch {
    const bst_exec *exec;
    const char *op;
    const bst_device *device;
    int count;
    bst_status (*queue)(void *context, int candidate); /* queues one candidate on exec's stream */
    void *context;
    CUevent events[2 * BST_MOST_CANDIDATES];
    void *flush; /* memory that is written between two measurements */
} bst_stopwatch;

/* The machine that is measured, for keys. */
bst_status bst__stopwatch_machine(const char *op, const bst_device *device, int library, bst_machine *out);
/* Whether exec's stream may be waited for: it is not being captured. */
bool bst__stopwatch_allowed(const bst_exec *exec);
/* A bst_race's round, with a bst_stopwatch for context. */
bool bst__stopwatch_round(void *stopwatch, const bool *running, int first, float *ms);
/* Frees what rounds have taken. */
void bst__stopwatch_end(bst_stopwatch *stopwatch);

#endif
