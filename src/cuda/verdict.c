/* verdict.c - which candidate the measurements speak for.
 *
 * A candidate wins if even the slower quarter of its rounds is faster than the faster quarter of the default's, by more
 * than MARGIN. So noise on either side is for the default: where nothing stands out, nothing changes. Of several
 * winners the one with the lowest median is taken. */
#include <string.h>

#include "cuda/search.h"

#define MARGIN 0.02f

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
