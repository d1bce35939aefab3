/* search.h - finding the fastest of several ways to compute one thing. Nothing here knows what is timed, nor how. */
#ifndef BST_SEARCH_H
#define BST_SEARCH_H

#include <stdbool.h>

enum {
    BST_MOST_CANDIDATES = 8,
    BST_MOST_ROUNDS = 9, /* of measurements */
};

/* What a round writes for a candidate that failed, and for one that did for lack of memory, which it may have again. */
#define BST_FAILED  -1.0f
#define BST_NO_ROOM -2.0f

/* What competes, and the clock. Candidate 0 is the default. */
typedef struct bst_race {
    int count;        /* candidates, at most BST_MOST_CANDIDATES */
    const char *what; /* for people who read a stored choice */
    /* Runs each candidate that is still `running` once, from `first` on and round again, and writes its milliseconds,
     * or BST_FAILED or BST_NO_ROOM. False: nothing can be measured now. */
    bool (*round)(void *context, const bool *running, int first, float *ms);
    void *context;
} bst_race;

/* Milliseconds by candidate and round. */
typedef struct bst_times {
    bool running[BST_MOST_CANDIDATES]; /* measured in every round */
    bool lacked_room;                  /* one dropped out that might be the fastest another time */
    int rounds;
    float ms[BST_MOST_CANDIDATES][BST_MOST_ROUNDS];
} bst_times;

/* The candidate to take: 0 unless another is faster beyond the noise of both. A pure function. */
int bst__verdict(const bst_times *times, int count);
/* The median of a candidate's rounds; 0 where there are none. */
float bst__median(const bst_times *times, int candidate);

/* Runs the race and gives its verdict; -1 where it could not be run. What it measured is left in `times`. */
int bst__search(const bst_race *race, bst_times *times);

#endif
