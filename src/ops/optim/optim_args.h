/* optim_args.h - the arguments of the optimiser's kernels, as host and device see them.
 *
 * A call has lists of tensors. They travel as a table in the kernel's arguments: no copy to the device has to be waited
 * for, kept alive or captured, and pointers may change from step to step. */
#ifndef BST_OPTIM_ARGS_H
#define BST_OPTIM_ARGS_H

#ifndef BST_DEVICE
#include <assert.h>

#include "core/core.h"
#endif

/* Elements of a block of moments of 8 bits, which share a scale; what each thread takes at a time; numbers that the
 * first kernel leaves of each tensor. */
#define OPTIM_BLOCK       256
#define OPTIM_EACH        8
#define OPTIM_COEFFICIENT 8

/* Moments of 8 bits, among the codes of dtype.h. */
#define OPTIM_U8_CODE BST_U8_CODE

/* Tensors of a table: those that 4 KiB of arguments hold, all that every driver takes, or 32,764 bytes, from CUDA 12.1
 * on. OPTIM_STEPS, OPTIM_GRADIENTS and OPTIM_WIDE_GRADIENTS: of the tables that hold less of each. */
#define OPTIM_TENSORS        52
#define OPTIM_WIDE_TENSORS   428
#define OPTIM_STEPS          480
#define OPTIM_GRADIENTS      192
#define OPTIM_WIDE_GRADIENTS 1600

/* One parameter with its gradient and its state. */
typedef struct optim_tensor {
    void *parameter, *gradient, *exp_avg, *exp_avg_sq;
    float *master;                           /* NULL: none */
    float *exp_avg_scale, *exp_avg_sq_scale; /* moments of 8 bits alone */
    int64_t count;
    uint32_t number;  /* which tensor of the call: its coefficients, its random numbers */
    uint32_t aligned; /* whether all of it begins at multiples of 16 bytes */
} optim_tensor;

/* The first kernel: a step more for each tensor, and what the second one multiplies with. */
typedef struct optim_begin_args {
    double lr, beta1, beta2, eps, weight_decay;
    const float *device_lr, *grad_scale, *found_inf, *clip; /* NULL: not given */
    float *coefficient;                                     /* [tensors, OPTIM_COEFFICIENT] */
    int64_t tensors;
    float *step[OPTIM_STEPS];
} optim_begin_args;

/* The head of the second one's arguments; the table follows: the first block of each tensor, then the tensors. */
typedef struct optim_adamw_head {
    const float *coefficient;
    uint64_t seed;
    float beta1_rest, beta2_rest; /* 1 - beta */
    uint32_t tensors, first_number;
} optim_adamw_head;

typedef struct optim_gradient {
    void *data;
    int64_t count;
} optim_gradient;

typedef struct optim_gradients_head {
    float *partial;           /* squares: a sum a block */
    const float *coefficient; /* scale */
    uint32_t tensors, unused;
} optim_gradients_head;

typedef struct optim_norm_args {
    const float *partial, *grad_scale;
    float *norm, *coefficient; /* the latter NULL: not wanted */
    int64_t parts;
    double max_norm;
} optim_norm_args;

/* Arguments as a kernel has them, for its TABLE of tensors; the host lays them out alike. */
#define OPTIM_ADAMW_ARGS(name, table) \
    typedef struct name {             \
        optim_adamw_head head;        \
        uint32_t first[table];        \
        optim_tensor tensor[table];   \
    } name
#define OPTIM_GRADIENTS_ARGS(name, table) \
    typedef struct name {                 \
        optim_gradients_head head;        \
        uint32_t first[table];            \
        optim_gradient tensor[table];     \
    } name

static_assert(sizeof(optim_tensor) == 72, "host and device must agree");
static_assert(sizeof(optim_begin_args) <= 4096, "all drivers take it");
static_assert(sizeof(optim_adamw_head) == 32, "host and device must agree");
static_assert(32 + OPTIM_TENSORS * 76 <= 4096 && 32 + OPTIM_WIDE_TENSORS * 76 <= 32764, "drivers take it");
static_assert(24 + OPTIM_GRADIENTS * 20 <= 4096 && 24 + OPTIM_WIDE_GRADIENTS * 20 <= 32764, "drivers take it");
static_assert(OPTIM_TENSORS % 2 == 0 && OPTIM_WIDE_TENSORS % 2 == 0, "the tensors begin at a multiple of 8 bytes");
static_assert(sizeof(optim_norm_args) == 48, "host and device must agree");

#endif
