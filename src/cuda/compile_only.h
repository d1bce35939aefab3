/* compile_only.h - the modes in which calls compile what they would launch, and run nothing: for tests a collector, of
 * the whole process; for warming up, of one thread, whose kernels end up where a step finds them. */
#ifndef BST_COMPILE_ONLY_H
#define BST_COMPILE_ONLY_H

#include "cuda/cuda.h"

typedef struct bst_collector {
    bst_compile_only request; /* of a thread that compiles ahead: arch alone, 0 for the device's own */
    int generation; /* from 1: kernels reported to an earlier collector are reported again to this one; 0: ahead */
} bst_collector;

/* Whether the mode is on, and with which collector. On the path of every launch: one load of an atomic variable. */
bool bst__compiling_only(bst_collector *out);
/* From now on this thread compiles ahead for a device (-1: no longer), whose calls' tensors lie nowhere. arch 0: for
 * its chip, so that the kernels are ready to be launched; else for that chip, into the cache alone. */
bst_status bst__compile_ahead(int device, int arch);
/* Whether this thread does, and for which device. */
bool bst__compiling_ahead(int *device);
/* What bst__cuda_chip says of a chip in this mode. */
bst_status bst__chip_of_arch(const char *op, int arch, bst_chip *out);
/* An address that looks like memory of a device and stands for none. */
void *bst__no_memory(size_t bytes);
/* Passes a report on; reports do not overlap. */
void bst__report(const bst_collector *collector, const bst_launch *launch, const char *options, const char *log);

#endif
