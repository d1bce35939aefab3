/* linear_divergence_cpu.h - what linear_divergence.c hands to linear_divergence_cpu.c. */
#ifndef BST_LINEAR_DIVERGENCE_CPU_H
#define BST_LINEAR_DIVERGENCE_CPU_H

#include "core/cpu_kernel.h"
#include "ops/linear_divergence/linear_divergence.h"

BST_CPU_DECLARE(bst__linear_divergence_rows_cpu);   /* over rows; the context is a linear_divergence_rows */
BST_CPU_DECLARE(bst__linear_divergence_spread_cpu); /* over rows; the context is a linear_divergence_spread */

#endif
