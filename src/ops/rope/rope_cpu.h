/* rope_cpu.h - what rope.c hands to rope_cpu.c. */
#ifndef BST_ROPE_CPU_H
#define BST_ROPE_CPU_H

#include "core/cpu_kernel.h"

/* in and out: [B, heads, S, D]; data NULL: no such tensor. */
typedef struct rope_pair {
    bst_view in, out;
} rope_pair;

typedef struct rope_cpu {
    rope_pair pair[2]; /* q and k, or their gradients */
    bst_view cos, sin; /* [B, S, R] */
    int64_t positions; /* S */
    bool interleaved, backward;
} rope_cpu;

BST_CPU_DECLARE(bst__rope_cpu); /* over tokens: batch * S + position */

#endif
