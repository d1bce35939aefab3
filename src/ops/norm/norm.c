/* norm.c - norms, alone or after the addition of a residual: their description, then the kernels of the tensors'
 * device. */
#include "ops/norm/norm.h"

#include <inttypes.h>

#include "core/options.h"

typedef bst_norm_backward_tensors given_tensors;
typedef bst_norm_options given_options;

/* ---- what forward and backward have in common -------------------------------------------------------------------- */

static bst_status check_width(const char *op, const bst_view *v) {
    int64_t columns = v[X].rows.columns;
    if (columns >= 1 && columns <= 65536) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: x has rows of %" PRId64 " elements; 1 to 65536 are supported", op, columns);
}

#define INPUT          {"x", BST_IN, BST_FLOATS, "*H", BST_ROWS, .check = check_width, BST_AT(x)}
#define OF_COLUMN      {"weight", BST_IN | BST_OPTIONAL, BST_FLOATS, "H", BST_CONTIGUOUS, BST_AT(weight)}
#define OF_WEIGHT      BST_TYPE_OF(WEIGHT, "as weight has it, or without one x")
#define AS_X           BST_LIKE(X), BST_TYPE_OF(X, "as x has it")
#define MEAN_OF(flags) {"mean", flags | BST_OPTIONAL, 1u << BST_F32, "#", BST_CONTIGUOUS, BST_AT(mean)}
#define KINDS          BST_OPTION('i', kind, BST_NORM_RMS, BST_NORM_LAYER, "0 (rms) or 1 (layer)")
#define CASTINGS \
    BST_OPTION('i', casting, BST_CASTING_LLAMA, BST_CASTING_FLOAT32, "0 (llama), 1 (gemma), 2 (none) or 3 (float32)")

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    bool rounds_n = attributes[KIND].i == BST_NORM_RMS && attributes[CASTING].i == BST_CASTING_LLAMA;
    bool promoted = rounds_n && v[WEIGHT].dtype != v[X].dtype;
    return promoted || attributes[CASTING].i == BST_CASTING_FLOAT32 ? BST_F32 : v[X].dtype;
}

/* The sum of two types has the wider one, which x is to have. */
static bst_dtype residual_type(const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return v[X].dtype == BST_F32 ? v[RESIDUAL].dtype : v[X].dtype;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* The mean of a row is one of LAYER's results, and its backward pass needs it. */
static bst_status check_mean(const char *op, const bst_view *mean, const bst_attribute *attributes, bool needed) {
    bool layer = attributes[KIND].i == BST_NORM_LAYER;
    if (!layer && bst__given(mean)) return bst__error(BST_INVALID, "%s: mean is given, but kind is 0 (rms)", op);
    if (!layer || !needed || bst__given(mean)) return BST_OK;
    return bst__error(BST_INVALID, "%s: mean is NULL; a tensor is needed where kind is 1 (layer)", op);
}

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    BST_TRY(check_mean(op, &v[NEW_MEAN], attributes, false));
    if (!v[X].rows.rows) return BST_OK;
    if (v[X].device.device_type == kDLCUDA) return bst__norm_forward_cuda(exec, op, v, attributes);
    norm_cpu work = {.v = v, .attributes = attributes};
    return BST_CPU_RUN(exec, v[X].rows.rows, v[X].rows.columns, bst__norm_forward_cpu, &work);
}

static const bst_function forward = {
    .name = "norm_forward",
    .arguments =
        (const bst_argument[]){
            [X] = INPUT,
            [WEIGHT] = OF_COLUMN,
            [RESIDUAL] = {"residual", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                          BST_TYPE_RULE(residual_type, "as x has it")},
            [BIAS] = {"bias", BST_IN | BST_OPTIONAL, BST_FLOATS, "H", BST_CONTIGUOUS, OF_WEIGHT},
            [AFTER] = {"after", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                       BST_TYPE_RULE(y_type, "the type of y")},
            [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(X),
                   BST_TYPE_RULE(y_type, "as the inputs have it")},
            [SUM] = {"sum", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, AS_X, BST_WITH(RESIDUAL)},
            [NEW_MEAN] = MEAN_OF(BST_OUT),
            [NEW_RSTD] = {"rstd", BST_OUT | BST_OPTIONAL, 1u << BST_F32, "#", BST_CONTIGUOUS},
            {NULL}},
    .attributes =
        (const bst_attribute_rule[]){
            [CASTING] = CASTINGS, [KIND] = KINDS, [EPS] = {"eps", 'd', BST_EPS_BOUNDS}, {NULL}},
    .run = run_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("rms_norm_forward: x weight eps casting -> y rstd",
              "add_rms_norm_forward: x residual! weight eps casting -> y sum rstd",
              "norm_forward: x weight bias eps kind casting -> y mean rstd",
              "add_norm_forward: x residual! weight bias eps kind casting -> y sum mean rstd",
              "rms_norm_add_forward: x weight after! eps casting -> y rstd")};

bst_status bst_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *residual, const DLTensor *weight,
                            const DLTensor *bias, double eps, const bst_norm_options *options, DLTensor *y,
                            DLTensor *sum, DLTensor *mean, DLTensor *rstd) {
    given_options own;
    BST_TRY(bst__options(forward.name, "options", options, &own, sizeof own));
    const DLTensor *tensors[] = {[X] = x,       [WEIGHT] = weight,   [RESIDUAL] = residual,
                                 [BIAS] = bias, [AFTER] = own.after, [Y] = y,
                                 [SUM] = sum,   [NEW_MEAN] = mean,   [NEW_RSTD] = rstd};
    return bst__call(&forward, exec, tensors, &own, (bst_attribute[]){[EPS].d = eps});
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Row chunks, each with its own partial sums: a fixed number, so that the order of the sum, and with it the result,
 * does not depend on the number of threads. */
enum { CHUNKS = 32 };

static bst_status backward_cpu(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    int64_t rows = v[X].rows.rows, columns = v[X].rows.columns;
    norm_cpu work = {.v = v, .attributes = attributes, .chunks = rows < CHUNKS ? rows : CHUNKS};
    bool want_dw = v[DWEIGHT].data, want_db = v[DBIAS].data;
    size_t each = (size_t)(work.chunks * columns);
    void *partial;
    BST_TRY(bst__allocate(exec, op, v[X].device, each * (want_dw + want_db) * sizeof(float), &partial));
    if (want_dw) work.dweight = partial;
    if (want_db) work.dbias = (float *)partial + (want_dw ? each : 0);
    BST_CPU_RUN(exec, work.chunks, columns * (rows / work.chunks), bst__norm_backward_cpu, &work);
    for (int i = 0; i < 2; i++) {
        work.partial = i ? work.dbias : work.dweight;
        work.total = &v[i ? DBIAS : DWEIGHT];
        if (work.partial) BST_CPU_RUN(exec, columns, work.chunks, bst__norm_sums_cpu, &work);
    }
    bst__release(exec, v[X].device, partial);
    return BST_OK;
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    if (!bst__given(&v[DX]) && !bst__given(&v[DWEIGHT]) && !bst__given(&v[DBIAS])) return BST_OK;
    if (!v[X].rows.rows) {
        BST_TRY(bst__zero(exec, op, &v[DWEIGHT]));
        return bst__zero(exec, op, &v[DBIAS]);
    }
    bool cpu = v[X].device.device_type == kDLCPU;
    return cpu ? backward_cpu(exec, op, v, attributes) : bst__norm_backward_cuda(exec, op, v, attributes);
}

static bst_status check_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    return check_mean(op, &v[MEAN], attributes, true);
}

static const bst_function backward = {
    .name = "norm_backward",
    .arguments =
        (const bst_argument[]){
            [X] = INPUT,
            [WEIGHT] = OF_COLUMN,
            [RSTD] = {"rstd", BST_IN, 1u << BST_F32, "#", BST_CONTIGUOUS, BST_AT(rstd)},
            [MEAN] = MEAN_OF(BST_IN),
            [DY] = {"dy", BST_IN, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                    BST_TYPE_RULE(y_type, "the type of the forward output"), BST_AT(dy)},
            [DSUM] = {"dsum", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, AS_X, BST_AT(dsum)},
            [DX] = {"dx", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, AS_X, BST_AT(dx)},
            [DWEIGHT] = {"dweight", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(WEIGHT),
                         BST_TYPE_OF(WEIGHT, "as weight has it"), BST_AT(dweight)},
            [DBIAS] = {"dbias", BST_OUT | BST_OPTIONAL, BST_FLOATS, "H", BST_CONTIGUOUS, OF_WEIGHT, BST_AT(dbias)},
            {NULL}},
    .attributes = (const bst_attribute_rule[]){[CASTING] = CASTINGS, [KIND] = KINDS, {NULL}},
    .check = check_backward,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH("rms_norm_backward: dy x weight rstd casting -> dx? dweight?",
              "add_rms_norm_backward: dy dsum! x weight rstd casting -> dx? dweight?",
              "norm_backward: dy x weight mean rstd kind casting -> dx? dweight? dbias?",
              "add_norm_backward: dy dsum! x weight mean rstd kind casting -> dx? dweight? dbias?")};

bst_status bst_norm_backward(const bst_exec *exec, const bst_norm_backward_tensors *tensors,
                             const bst_norm_options *options) {
    return bst__call_struct(&backward, exec, tensors, options, NULL);
}

const bst_function *const bst__norm[] = {&forward, &backward, NULL};
