/* autotune.h - whether the fastest algorithm of a matrix product is searched for, and the choices that searches have
 * led to. */
#ifndef BST_AUTOTUNE_H
#define BST_AUTOTUNE_H

#include "cuda/hash.h"
#include "cuda/search.h"

/* Whether a product takes the measured choice, and measures where there is none. One load of an atomic variable. */
bool bst__tuning(void);
/* From 1; another number whenever choices have been forgotten: what was remembered under an older one is void. */
int bst__tuning_generation(void);

/* What measurements depend on beside the problem itself. */
typedef struct bst_machine {
    char chip[128]; /* its name */
    int arch, processors;
    int driver;  /* the driver's CUDA version */
    int library; /* the version of cuBLASLt */
} bst_machine;

/* Begins the key of a choice with the machine and this library's version; the problem is to follow. */
void bst__choice_key(bst_hash *hash, const bst_machine *machine);

/* The candidate to take: the one stored under `key`; else the one that the race finds, which is then stored, unless a
 * candidate lacked memory, of which there may be more another time. -1 where there is neither: the race cannot be run
 * now, or this process has no time left for searches. */
int bst__choice(const bst_digest *key, const bst_race *race);
/* Tests only: so many seconds are left. */
void bst__set_search_time(double seconds);

#endif
