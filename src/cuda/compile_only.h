/* compile_only.h - the mode in which kernels are compiled for a chip that need not be there. */
#ifndef BST_COMPILE_ONLY_H
#define BST_COMPILE_ONLY_H

#include "cuda/cuda.h"

typedef struct bst_collector {
    bst_compile_only request;
    int generation; /* from 1: kernels reported to an earlier collector are reported again to this one */
} bst_collector;

/* Whether the mode is on, and with which collector. On the path of every launch: one load of an atomic variable. */
bool bst__compiling_only(bst_collector *out);
/* What bst__cuda_chip says of a chip in this mode. */
bst_status bst__chip_of_arch(const char *op, int arch, bst_chip *out);
/* An address that looks like memory of a device and stands for none. */
void *bst__no_memory(size_t bytes);
/* Passes a report on; reports do not overlap. */
void bst__report(const bst_collector *collector, const bst_launch *launch, const char *options, const char *log);

#endif
