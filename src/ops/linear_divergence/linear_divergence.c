/* linear_divergence.c - the divergence of a student from a teacher under their output heads, a chunk of rows at a time.
 *
 * A chunk is: the student's logits and the teacher's, each by its head (linear_cross_entropy_head.h) and in float32,
 * for what counts is their difference; one kernel over both, for the divergence and the gradient of the student's.
 * Forward may save that gradient, of which backward then makes two products, or make these itself, chunk by chunk; else
 * backward makes both logits again. Nothing waits for the device. */
#include <inttypes.h>
#include <math.h>

#include "cuda/cuda.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_head.h"
#include "ops/linear_divergence/linear_divergence.h"
#include "ops/linear_divergence/linear_divergence_math.h"

typedef bst_linear_divergence_tensors given_tensors;
typedef bst_linear_divergence_options given_options;
static const char forward_op[] = "linear_divergence_forward", backward_op[] = "linear_divergence_backward";

static_assert(BST_DIVERGENCE_FORWARD == DIVERGENCE_FORWARD && BST_DIVERGENCE_REVERSE == DIVERGENCE_REVERSE &&
                  BST_DIVERGENCE_JSD == DIVERGENCE_JSD,
              "bastile.h and kernels must agree");

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { HIDDEN, WEIGHT, BIAS, T_HIDDEN, T_WEIGHT, T_BIAS, T_LOGITS, T_INDICES, MASK, INPUTS };
/* Forward's others. */
enum { DIVERGENCE_AT = INPUTS, ENTROPY, SUMS, DLOGITS, DHIDDEN_AHEAD, DWEIGHT_AHEAD, DBIAS_AHEAD };
/* Backward's. */
enum { SUMS_WERE = INPUTS, GRAD, SCALE, DLOGITS_WERE, DHIDDEN, DWEIGHT, DBIAS };
enum { KIND, BETA, TEMPERATURE, SCALE_AT, SOFTCAP_AT, T_SCALE, T_SOFTCAP, CHUNK_BYTES, FLOAT32_DWEIGHT };

#define PER_ROW(name, flags) BST_HEAD_FLOATS(name, flags, "T")
#define GRADIENT(name, of)   BST_HEAD_GRADIENT(name, of, BST_AS_INPUTS(of))
#define OF_TEACHER           BST_TYPE_OF(T_HIDDEN, "the type of teacher_hidden")
#define OPTIONAL(name, place, types, shape, layout, ...) \
    [place] = BST_HEAD_ARGUMENT(name, BST_IN | BST_OPTIONAL, types, shape, layout, ##__VA_ARGS__)
#define OPTIONAL_INPUTS                                                                                 \
    OPTIONAL(teacher_hidden, T_HIDDEN, BST_FLOATS, "TG", BST_ROWS),                                     \
        OPTIONAL(teacher_weight, T_WEIGHT, BST_FLOATS, "VG", BST_ROWS, BST_WITH(T_HIDDEN), OF_TEACHER), \
        OPTIONAL(teacher_bias, T_BIAS, BST_FLOATS, "V", BST_CONTIGUOUS, OF_TEACHER),                    \
        OPTIONAL(teacher_logits, T_LOGITS, BST_FLOATS, "TK", BST_ROWS),                                 \
        OPTIONAL(teacher_indices, T_INDICES, 1u << BST_I64, NULL, BST_CONTIGUOUS, BST_LIKE(T_LOGITS)),  \
        OPTIONAL(mask, MASK, 1u << BST_U8, "T", BST_CONTIGUOUS)

static const bst_argument forward_arguments[] = {
    BST_HEAD,
    OPTIONAL_INPUTS,
    [DIVERGENCE_AT] = PER_ROW(divergence, BST_OUT),
    [ENTROPY] = PER_ROW(entropy, BST_OUT | BST_OPTIONAL),
    [SUMS] = BST_HEAD_FLOATS(sums, BST_OUT | BST_OPTIONAL, "T5"),
    [DLOGITS] = BST_HEAD_LOGITS(dlogits, BST_OUT | BST_OPTIONAL),
    [DHIDDEN_AHEAD] = BST_HEAD_FLOATS(dhidden, BST_OUT | BST_OPTIONAL, "TH"),
    [DWEIGHT_AHEAD] = BST_HEAD_FLOATS(dweight, BST_OUT | BST_OPTIONAL, "VH"),
    [DBIAS_AHEAD] = BST_HEAD_FLOATS(dbias, BST_OUT | BST_OPTIONAL, "V", BST_LIKE(BIAS)),
    {NULL},
};

static bst_dtype dweight_type(const bst_view *v, const bst_attribute *attributes) {
    return attributes[FLOAT32_DWEIGHT].i == 2 ? BST_F32 : v[WEIGHT].dtype;
}

static const bst_argument backward_arguments[] = {
    BST_HEAD,
    OPTIONAL_INPUTS,
    [SUMS_WERE] = BST_HEAD_FLOATS(sums, BST_IN | BST_OPTIONAL, "T5"),
    [GRAD] = PER_ROW(grad, BST_IN | BST_OPTIONAL),
    [SCALE] = BST_HEAD_FLOATS(scale, BST_IN | BST_OPTIONAL, "."),
    [DLOGITS_WERE] = BST_HEAD_LOGITS(dlogits, BST_IN | BST_OPTIONAL),
    [DHIDDEN] = GRADIENT(dhidden, HIDDEN),
    [DWEIGHT] =
        BST_HEAD_GRADIENT(dweight, WEIGHT, BST_TYPE_RULE(dweight_type, "as weight has it, or the one asked for")),
    [DBIAS] = GRADIENT(dbias, BIAS),
    {NULL},
};

static const char *const meanings[] = {BST_HEAD_MEANINGS, "Gthe last dimension of teacher_hidden",
                                       "Kthe columns of teacher_logits", NULL};

static const bst_attribute_rule rules[] = {
    [KIND] = BST_OPTION('i', kind, BST_DIVERGENCE_FORWARD, BST_DIVERGENCE_JSD, "0 (forward), 1 (reverse) or 2 (jsd)"),
    [BETA] = BST_OPTION('d', beta, 0, 1, "a number from 0 to 1", BST_USUAL(0.5)), /* of jsd alone */
    [TEMPERATURE] = BST_TEMPERATURE,
    [SCALE_AT] = BST_LOGIT_SCALE(logit_scale),
    [SOFTCAP_AT] = BST_SOFTCAP(softcap),
    [T_SCALE] = BST_LOGIT_SCALE(teacher_logit_scale),
    [T_SOFTCAP] = BST_SOFTCAP(teacher_softcap),
    [CHUNK_BYTES] = BST_CHUNK_BYTES,
    [FLOAT32_DWEIGHT] = BST_FLOAT32_DWEIGHT,
    {NULL},
};

static bst_status check_indices(const char *op, const bst_view *v) {
    const bst_view *given = &v[T_INDICES];
    const int64_t *index = given->data;
    if (given->device.device_type == kDLCUDA) return BST_OK; /* a look would wait for the device */
    for (int64_t i = 0; i < given->count; i++)
        if (index[i] < 0 || index[i] >= v[WEIGHT].size[0])
            return bst__error(BST_INVALID,
                              "%s: teacher_indices[%" PRId64 "] is %" PRId64 "; 0 to %" PRId64 " (weight has %" PRId64
                              " rows) are needed",
                              op, i, index[i], v[WEIGHT].size[0] - 1, v[WEIGHT].size[0]);
    return BST_OK;
}

static bst_status check_teacher(const char *op, const bst_view *v) {
    bool head = bst__given(&v[T_HIDDEN]), logits = bst__given(&v[T_LOGITS]);
    if (head == logits)
        return bst__error(
            BST_INVALID,
            "%s: teacher_hidden and teacher_logits are %s; the teacher's hidden states and weight, or its "
            "logits, are needed",
            op, head ? "both given" : "both NULL");
    if (!head && bst__given(&v[T_BIAS]))
        return bst__error(BST_INVALID, "%s: teacher_bias is given without teacher_weight, to which it belongs", op);
    if (head) return bst__head_check_weight(op, &v[T_WEIGHT]);
    if (bst__given(&v[T_INDICES])) return check_indices(op, v);
    return bst__need_size(op, "teacher_logits", &v[T_LOGITS], 1, v[WEIGHT].size[0],
                          "the rows of weight (the largest alone need teacher_indices)");
}

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    double beta = attributes[BETA].d;
    BST_TRY(bst__head_check_weight(op, &v[WEIGHT]));
    if (attributes[KIND].i == BST_DIVERGENCE_JSD && !(beta > 0 && beta < 1))
        return bst__error(BST_INVALID, "%s: beta is %g; for jsd a number between 0 and 1 is needed", op, beta);
    if (v[HIDDEN].device.device_type == kDLCUDA) BST_TRY(bst__cuda_need_rows(op, v[HIDDEN].size[0], 1));
    if (op == backward_op && bst__given(&v[DLOGITS_WERE])) {
        if (bst__given(&v[SCALE])) return BST_OK;
        return bst__error(BST_INVALID, "%s: scale is NULL; it is needed where dlogits is given", op);
    }
    if (op == backward_op && !(bst__given(&v[GRAD]) && bst__given(&v[SUMS_WERE])))
        return bst__error(BST_INVALID, "%s: %s is NULL; it is needed where dlogits is not given", op,
                          bst__given(&v[GRAD]) ? "sums" : "grad");
    return check_teacher(op, v);
}

/* ---- the passes -------------------------------------------------------------------------------------------------- */

typedef struct job {
    linear_divergence_rows whole; /* as of the first row */
    bst_head teacher;             /* its rows 0: logits are given */
    const bst_view *given, *indices;
    float *teacher_logits; /* of a chunk; NULL: those that are given are read where they lie */
    int64_t teacher_stride;
    bool saves; /* dlogits are the caller's */
    bool makes; /* dlogits take the student's logits' place, and become gradients of the inputs */
} job;

static bst_status spread_teacher(const bst_head *h, const job *j, int64_t first, int64_t rows) {
    int64_t count = j->given->size[1];
    linear_divergence_spread s = {.device = h->device, .dtype = j->given->dtype, .rows = rows};
    s.args.count = count, s.args.columns = h->vocabulary;
    s.args.values_stride = j->given->stride[0];
    s.args.values = bst_at(j->given->data, first * s.args.values_stride, s.dtype);
    s.args.indices = (const int64_t *)j->indices->data + first * count;
    s.args.out = j->teacher_logits, s.args.out_stride = j->teacher_stride;
    if (h->device.device_type == kDLCUDA) return bst__linear_divergence_spread_cuda(h->exec, h->op, &s);
    return BST_CPU_RUN(h->exec, rows, h->vocabulary, bst__linear_divergence_spread_cpu, &s);
}

static bst_status run_rows(const bst_head *h, void *context, int64_t first, int64_t rows, void *logits,
                           int64_t stride) {
    const job *j = context;
    linear_divergence_rows c = j->whole;
    linear_divergence_args *a = &c.args;
    c.rows = rows;
    a->student = logits, a->student_stride = stride;
    if (j->teacher.rows) BST_TRY(bst__head_logits(&j->teacher, first, rows, j->teacher_logits, j->teacher_stride));
    if (j->indices->data) BST_TRY(spread_teacher(h, j, first, rows));
    if (j->teacher_logits) {
        a->teacher = j->teacher_logits, a->teacher_stride = j->teacher_stride;
    } else {
        a->teacher_stride = j->given->stride[0];
        a->teacher = bst_at(j->given->data, first * a->teacher_stride, c.teacher_type);
    }
    if (a->mask) a->mask += first;
    if (a->divergence) a->divergence += first;
    if (a->entropy) a->entropy += first;
    if (a->sums) a->sums += LINEAR_DIVERGENCE_SUMS * first;
    if (a->grad) a->grad += first;
    if (j->saves) {
        a->dlogits = bst_at(a->dlogits, first * a->dlogits_stride, c.dtype);
    } else if (j->makes) {
        bst_head_place place = bst__head_gradient_place(h, logits, stride);
        a->dlogits = place.at, a->dlogits_stride = place.stride;
        c.in_place = place.at != logits;
    }
    if (c.device.device_type == kDLCUDA) return bst__linear_divergence_rows_cuda(h->exec, h->op, &c);
    return BST_CPU_RUN(h->exec, rows, c.vocabulary, bst__linear_divergence_rows_cpu, &c);
}

/* As cross-entropy has it, with the temperature in scale and softcap. unit: of powers. */
static divergence_map map_of(double scale, double softcap, double temperature, double unit) {
    double whole = (softcap > 0 ? softcap : scale) / temperature;
    divergence_map m = {0, (float)whole, (float)(whole / unit)};
    if (softcap > 0) m.inner = (float)(scale / softcap);
    return m;
}

static void set_options(job *j, const bst_attribute *attributes) {
    linear_divergence_args *a = &j->whole.args;
    double t = attributes[TEMPERATURE].d, beta = attributes[BETA].d;
    bool of_two = j->whole.device.device_type == kDLCUDA && j->whole.dtype != BST_F32;
    double unit = of_two ? log(2) : 1;
    a->of_student = map_of(attributes[SCALE_AT].d, attributes[SOFTCAP_AT].d, t, unit);
    a->of_teacher = map_of(attributes[T_SCALE].d, attributes[T_SOFTCAP].d, t, unit);
    a->slope = (float)(attributes[SCALE_AT].d / t);
    a->beta = (float)beta, a->rest = (float)(1 - beta);
    j->whole.kind = (int)attributes[KIND].i;
    j->whole.student_capped = attributes[SOFTCAP_AT].d > 0, j->whole.teacher_capped = attributes[T_SOFTCAP].d > 0;
}

/* Both heads, and chunks of both logits that fit `budget`. */
static bst_status begin(bst_head *h, job *j, const bst_view *v, const bst_attribute *attributes, int64_t budget) {
    bool head = bst__given(&v[T_HIDDEN]);
    BST_TRY(bst__head_begin(h, &v[HIDDEN], &v[WEIGHT]));
    h->wide = true;
    j->given = &v[T_LOGITS], j->indices = &v[T_INDICES];
    j->teacher_stride = bst__head_padded(h);
    if (head) {
        j->teacher = (bst_head){.exec = h->exec, .op = h->op, .bias = v[T_BIAS], .wide = true};
        BST_TRY(bst__head_begin(&j->teacher, &v[T_HIDDEN], &v[T_WEIGHT]));
    }
    if (head || j->indices->data) h->beside = j->teacher_stride * (int64_t)sizeof(float);
    BST_TRY(bst__head_choose_chunks(h, &(bst_view){0}, "", budget));
    linear_divergence_rows *c = &j->whole;
    c->device = h->device, c->dtype = h->dtype, c->vocabulary = h->vocabulary;
    c->teacher_type = h->beside ? BST_F32 : j->given->dtype;
    c->args.mask = v[MASK].data;
    c->some_left_out = j->indices->data;
    set_options(j, attributes);
    return BST_OK;
}

static bst_status run(bst_head *h, job *j) {
    void *memory = NULL;
    BST_TRY(bst__allocate(h->exec, h->op, h->device, (size_t)(h->chunk_rows * h->beside), &memory));
    j->teacher_logits = memory;
    bst_status status = bst__head_run(h, false, run_rows, j, j->makes);
    bst__release(h->exec, h->device, memory);
    return status;
}

/* What is saved is of the budget; by default a chunk beside it has no more than dweight takes later. On CUDA dweight is
 * summed in float32, each chunk's reading and writing all of it: larger ones by default, of which 2048 rows of 151936
 * classes take 0.95 of the time that 1408 take, and 3584 no less. */
static int64_t budget_beside(const bst_view *v, int64_t chunk_bytes) {
    const bst_view *saved = &v[DLOGITS];
    bool sums = v[HIDDEN].device.device_type == kDLCUDA && bst__given(&v[DWEIGHT_AHEAD]);
    if (!bst__given(saved)) return chunk_bytes || !sums ? chunk_bytes : INT64_C(2560) << 20;
    if (!chunk_bytes) return INT64_C(1) << 30;
    int64_t left = chunk_bytes - saved->size[0] * saved->stride[0] * bst__dtype_size(saved->dtype);
    return left > 1 ? left : 1;
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    bst_head h = BST_HEAD_OF(exec, op, v, DHIDDEN_AHEAD, DWEIGHT_AHEAD, DBIAS_AHEAD);
    h.exact = true;
    bool makes = h.dhidden.data || h.dweight.data || h.dbias.data;
    job j = {.saves = bst__given(&v[DLOGITS]), .makes = makes};
    linear_divergence_args *a = &j.whole.args;
    if (j.saves && makes)
        return bst__error(BST_INVALID,
                          "%s: dlogits and other gradients are both given; keep the one or make the others", op);
    BST_TRY(begin(&h, &j, v, attributes, budget_beside(v, attributes[CHUNK_BYTES].i)));
    a->divergence = v[DIVERGENCE_AT].data, a->entropy = v[ENTROPY].data, a->sums = v[SUMS].data;
    if (j.saves) a->dlogits = v[DLOGITS].data, a->dlogits_stride = v[DLOGITS].stride[0];
    return run(&h, &j);
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    bst_head h = BST_HEAD_OF(exec, op, v, DHIDDEN, DWEIGHT, DBIAS);
    h.exact = attributes[FLOAT32_DWEIGHT].i || v[HIDDEN].device.device_type == kDLCPU;
    job j = {.makes = true};
    if (bst__given(&v[DLOGITS_WERE])) {
        h.alpha = v[SCALE].data;
        BST_TRY(bst__head_begin(&h, &v[HIDDEN], &v[WEIGHT]));
        BST_TRY(bst__head_choose_chunks(&h, &v[DLOGITS_WERE], "dlogits", 0));
        return bst__head_run(&h, true, NULL, NULL, true);
    }
    BST_TRY(begin(&h, &j, v, attributes, attributes[CHUNK_BYTES].i));
    j.whole.saved = true;
    j.whole.args.sums = v[SUMS_WERE].data, j.whole.args.grad = v[GRAD].data;
    return run(&h, &j);
}

#define TEACHER "teacher_hidden teacher_weight teacher_bias teacher_logits teacher_indices mask"
#define OPTIONS \
    "kind beta temperature logit_scale softcap teacher_logit_scale teacher_softcap chunk_bytes float32_dweight"
static const bst_function forward = {
    .name = forward_op,
    .meanings = meanings,
    .arguments = forward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_forward,
    BST_GIVEN,
    BST_TORCH("linear_divergence_forward: hidden weight bias " TEACHER " " OPTIONS
              " -> divergence entropy? sums? dlogits? dhidden? dweight? dbias?"),
};

static const bst_function backward = {
    .name = backward_op,
    .meanings = meanings,
    .arguments = backward_arguments,
    .attributes = rules,
    .check = check,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH(
        "linear_divergence_backward: hidden weight bias " TEACHER " sums grad " OPTIONS " -> dhidden? dweight? dbias?",
        "linear_divergence_backward_kept: hidden weight bias scale! dlogits! " OPTIONS " -> dhidden? dweight? dbias?"),
};

const bst_function *const bst__linear_divergence[] = {&forward, &backward, NULL};

bst_status bst_linear_divergence_forward(const bst_exec *exec, const bst_linear_divergence_tensors *tensors,
                                         const bst_linear_divergence_options *options) {
    return bst__call_struct(&forward, exec, tensors, options, NULL);
}

bst_status bst_linear_divergence_backward(const bst_exec *exec, const bst_linear_divergence_tensors *tensors,
                                          const bst_linear_divergence_options *options) {
    return bst__call_struct(&backward, exec, tensors, options, NULL);
}
