/* search.c - rounds of measurements.
 *
 * All candidates run in every round, so that what changes with time (clocks, heat, other processes) meets all of them;
 * each round begins with another one, so that none is always behind the same. A first round only warms up: kernels are
 * compiled and loaded in it, and those that do not run drop out. */
#include "cuda/search.h"

enum { LEAST_ROUNDS = 5 };
/* A race that has taken this long on the device ends after LEAST_ROUNDS; one whose first round takes as long is not
 * worth it. */
static const float LONGEST_MS = 1500.0f;
/* Whoever is so much slower than the default in the first round does not run again. */
static const float HOPELESS = 1.25f;

/* Runs a round, and drops who failed. False where there is nothing to compare with. */
static bool run_round(const bst_race *race, bst_times *t, int first, float *ms) {
    if (!race->round(race->context, t->running, first, ms)) return false;
    for (int i = 0; i < race->count; i++) {
        if (t->running[i] && ms[i] == BST_NO_ROOM) t->lacked_room = true;
        if (ms[i] < 0) t->running[i] = false;
    }
    return t->running[0];
}

static bool any_rival(const bst_times *t, int count) {
    for (int i = 1; i < count; i++)
        if (t->running[i]) return true;
    return false;
}

int bst__search(const bst_race *race, bst_times *t) {
    float ms[BST_MOST_CANDIDATES], total = 0;
    for (int i = 0; i < race->count; i++) t->running[i] = true;
    t->rounds = 0;
    if (!run_round(race, t, 0, ms)) return -1;
    while (any_rival(t, race->count) && t->rounds < BST_MOST_ROUNDS) {
        if (t->rounds >= LEAST_ROUNDS && total > LONGEST_MS) break;
        if (!run_round(race, t, t->rounds % race->count, ms)) return -1;
        for (int i = 0; i < race->count; i++) {
            if (!t->running[i]) continue;
            t->ms[i][t->rounds] = ms[i];
            total += ms[i];
            if (t->rounds == 0 && ms[i] > HOPELESS * ms[0]) t->running[i] = false;
        }
        t->rounds++;
        if (t->rounds == 1 && total > LONGEST_MS) return 0;
    }
    return t->rounds >= LEAST_ROUNDS ? bst__verdict(t, race->count) : 0;
}
