/* search.c - rounds of measurements.
 *
 * All candidates run in every round, so that what changes with time (clocks, heat, other processes) meets all of them;
 * each round begins with another one, so that none is always behind the same. A first round only warms up: those
 * that do not run drop out in it.
 *
 * A candidate wins if even the slower quarter of its rounds is faster than the faster quarter of the default's, by more
 * than MARGIN. So noise on either side is for the default: where nothing stands out, nothing changes. Of several
 * winners the one with the lowest median is taken. */
#include "cuda/search.h"

#include <string.h>

enum { LEAST_ROUNDS = 5 };
/* A race that has taken this long on the device ends after LEAST_ROUNDS; one whose first round takes as long is not
 * worth it. */
static const float LONGEST_MS = 1500.0f;
/* Whoever is so much slower than the default in the first round does not run again. */
static const float HOPELESS = 1.25f;
static const float MARGIN = 0.02f;

typedef struct quartiles {
    float lower, median, upper;
} quartiles;

static quartiles quartiles_of(const bst_times *t, int candidate) {
    if (!t->rounds) return (quartiles){0, 0, 0}; /* no rival ran, so nothing was measured */
    float sorted[BST_MOST_ROUNDS];
    memcpy(sorted, t->ms[candidate], sizeof sorted);
    for (int i = 1; i < t->rounds; i++)
        for (int j = i; j > 0 && sorted[j] < sorted[j - 1]; j--) {
            float smaller = sorted[j];
            sorted[j] = sorted[j - 1];
            sorted[j - 1] = smaller;
        }
    int quarter = t->rounds / 4;
    return (quartiles){sorted[quarter], sorted[t->rounds / 2], sorted[t->rounds - 1 - quarter]};
}

float bst__median(const bst_times *times, int candidate) { return quartiles_of(times, candidate).median; }

int bst__verdict(const bst_times *times, int count) {
    float limit = quartiles_of(times, 0).lower * (1.0f - MARGIN), best_median = 0;
    int best = 0;
    for (int i = 1; i < count; i++) {
        if (!times->running[i]) continue;
        quartiles q = quartiles_of(times, i);
        if (q.upper < limit && (best == 0 || q.median < best_median)) best = i, best_median = q.median;
    }
    return best;
}

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
