/* linear_logprobs_cpu.h - what linear_logprobs.c hands to linear_logprobs_cpu.c. */
#ifndef BST_LINEAR_LOGPROBS_CPU_H
#define BST_LINEAR_LOGPROBS_CPU_H

#include "core/cpu_kernel.h"
#include "ops/linear_logprobs/linear_logprobs.h"

BST_CPU_DECLARE(bst__linear_logprobs_rows_cpu); /* over rows; the context is a linear_logprobs_rows */

#endif
