/* optim_cpu.h - what optim.c hands to optim_cpu.c. */
#ifndef BST_OPTIM_CPU_H
#define BST_OPTIM_CPU_H

#include "ops/optim/optim.h"
#include "ops/optim/optim_math.h"

/* Elements of a unit of work, of which a thread takes some: whole blocks of moments of 8 bits, and a tile of what is
 * converted to float32. */
enum { OPTIM_UNIT = 2048 };

typedef struct optim_cpu {
    const optim_step *step;
    const optim_coefficients *coefficient; /* one a tensor */
    const int64_t *first;                  /* the first unit of each tensor, and the number of all */
} optim_cpu;

typedef struct optim_list_cpu {
    const optim_list *list;
    const int64_t *first;
    double *partial;   /* squares: a sum a unit */
    float coefficient; /* scale */
} optim_list_cpu;

BST_CPU_DECLARE(bst__optim_adamw_cpu);   /* over units */
BST_CPU_DECLARE(bst__optim_squares_cpu); /* over units */
BST_CPU_DECLARE(bst__optim_scale_cpu);   /* over units */

#endif
