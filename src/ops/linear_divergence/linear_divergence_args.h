/* linear_divergence_args.h - the arguments of the divergence kernels, as host and device see them. */
#ifndef BST_LINEAR_DIVERGENCE_ARGS_H
#define BST_LINEAR_DIVERGENCE_ARGS_H

/* z = scale u of a logit, or with a softcap of u = tanh(inner logit); power u = z in the kernel's units. */
typedef struct divergence_map {
    float inner, scale, power;
} divergence_map;

/* What is saved of a row: the student's largest z and sum of e^(z - that), the teacher's, and divergence_row's mean. */
#define LINEAR_DIVERGENCE_SUMS 5

typedef struct linear_divergence_args {
    const float *student; /* [rows, VOCAB], student_stride elements apart */
    const void *teacher;
    void *dlogits;
    const uint8_t *mask;         /* NULL: all rows count */
    float *divergence, *entropy; /* [rows]; NULL: not wanted */
    float *sums;                 /* [rows, LINEAR_DIVERGENCE_SUMS]; read where SAVED, else written, or NULL */
    const float *grad;           /* [rows], multiplies dlogits; NULL: ones */
    int64_t student_stride, teacher_stride, dlogits_stride;
    divergence_map of_student, of_teacher;
    float slope; /* of the student's z where tanh's is one */
    float beta, rest;
    int32_t unused;
} linear_divergence_args;

typedef struct linear_divergence_spread_args {
    const void *values;     /* [rows, count] */
    const int64_t *indices; /* [rows, count], without gaps */
    float *out;             /* [rows, columns] */
    int64_t count, columns, values_stride, out_stride;
} linear_divergence_spread_args;

#define LINEAR_DIVERGENCE_THREADS 512 /* of a block, which has a row */
#define LINEAR_DIVERGENCE_BATCH   2   /* vectors of each of the two that a thread loads before it uses the first */

static_assert(sizeof(linear_divergence_args) == 128, "host and device must agree");
static_assert(sizeof(linear_divergence_spread_args) == 56, "host and device must agree");

#endif
