/* rms_norm.c - RMSNorm, alone or after the addition of a residual: its description, then the kernels of the tensors'
 * device. */
#include "ops/rms_norm/rms_norm.h"

#include <inttypes.h>

#include "core/describe.h"
#include "ops/rms_norm/rms_norm_cpu.h"

/* ---- what forward and backward have in common -------------------------------------------------------------------- */

/* Places of tensors: of both, of forward, of backward; and of attributes. */
enum { X, WEIGHT, BOTH, RESIDUAL = BOTH, SUM, Y, NEW_RSTD };
enum { RSTD = BOTH, DY, DSUM, DX, DWEIGHT };
enum { CASTING, EPS };

static bst_status check_width(const char *op, const bst_view *v) {
    int64_t columns = v[X].rows.columns;
    if (columns >= 1 && columns <= 65536) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: x has rows of %" PRId64 " elements; 1 to 65536 are supported", op, columns);
}

#define INPUT     {"x", BST_IN, BST_FLOATS, "*H", BST_ROWS, .check = check_width}
#define OF_COLUMN {"weight", BST_IN | BST_OPTIONAL, BST_FLOATS, "H", BST_CONTIGUOUS}
#define AS_X      BST_LIKE(X), BST_TYPE_OF(X, "as x has it")
#define CASTINGS  {"casting", 'i', BST_CASTING_LLAMA, BST_CASTING_NONE, "0 (llama), 1 (gemma) or 2 (none)"}

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    bool promoted = attributes[CASTING].i == BST_CASTING_LLAMA && v[WEIGHT].dtype != v[X].dtype;
    return promoted ? BST_F32 : v[X].dtype;
}

/* The sum of two types has the wider one, which x is to have. */
static bst_dtype residual_type(const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return v[X].dtype == BST_F32 ? v[RESIDUAL].dtype : v[X].dtype;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static bst_status run_forward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    rms_norm_forward_call c = {.x = v[X],
                               .residual = v[RESIDUAL],
                               .weight = v[WEIGHT],
                               .y = v[Y],
                               .sum = v[SUM],
                               .rstd = v[NEW_RSTD].data,
                               .casting = (bst_casting)attributes[CASTING].i,
                               .eps = (float)attributes[EPS].d};
    int64_t rows = c.x.rows.rows;
    if (!rows) return BST_OK;
    if (c.x.device.device_type == kDLCUDA) return bst__rms_norm_forward_cuda(exec, &c);
    bst__parallel_for(exec, rows, bst__grain(c.x.rows.columns), BST_CPU_SELECT(bst__rms_norm_forward_cpu), &c);
    return BST_OK;
}

static const bst_function forward = {
    .name = RMS_NORM_FORWARD,
    .arguments =
        (const bst_argument[]){
            [X] = INPUT,
            [WEIGHT] = OF_COLUMN,
            [RESIDUAL] = {"residual", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                          BST_TYPE_RULE(residual_type, "as x has it")},
            [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(X),
                   BST_TYPE_RULE(y_type, "as the inputs have it")},
            [SUM] = {"sum", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, AS_X, BST_WITH(RESIDUAL)},
            [NEW_RSTD] = {"rstd", BST_OUT | BST_OPTIONAL, 1u << BST_F32, "#", BST_CONTIGUOUS},
            {NULL}},
    .attributes = (const bst_attribute_rule[]){[CASTING] = CASTINGS, [EPS] = BST_EPS, {NULL}},
    .run = run_forward,
    BST_TORCH("rms_norm_forward: x weight eps casting -> y rstd",
              "add_rms_norm_forward: x residual! weight eps casting -> y sum rstd")};

bst_status bst_rms_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *residual,
                                const DLTensor *weight, double eps, bst_casting casting, DLTensor *y, DLTensor *sum,
                                DLTensor *rstd) {
    const DLTensor *tensors[] = {[X] = x, [WEIGHT] = weight, [RESIDUAL] = residual,
                                 [Y] = y, [SUM] = sum,       [NEW_RSTD] = rstd};
    return bst__run(&forward, exec, tensors, (bst_attribute[]){[CASTING].i = casting, [EPS].d = eps});
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static bst_status backward_cpu(const bst_exec *exec, const rms_norm_backward_call *c) {
    int64_t rows = c->x.rows.rows, columns = c->x.rows.columns;
    rms_norm_backward_cpu work = {.call = c, .chunks = rows < RMS_NORM_CHUNKS ? rows : RMS_NORM_CHUNKS};
    void *partial = NULL;
    if (c->dweight.data)
        BST_TRY(bst__allocate(exec, RMS_NORM_BACKWARD, c->x.device, (size_t)(work.chunks * columns) * sizeof(float),
                              &partial));
    work.partial = partial;
    bst__parallel_for(exec, work.chunks, bst__grain(columns * (rows / work.chunks)),
                      BST_CPU_SELECT(bst__rms_norm_backward_cpu), &work);
    if (partial)
        bst__parallel_for(exec, columns, bst__grain(work.chunks), BST_CPU_SELECT(bst__rms_norm_dweight_cpu), &work);
    bst__release(exec, c->x.device, partial);
    return BST_OK;
}

static bst_status run_backward(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    rms_norm_backward_call c = {.dy = v[DY],
                                .dsum = v[DSUM],
                                .x = v[X],
                                .weight = v[WEIGHT],
                                .dx = v[DX],
                                .dweight = v[DWEIGHT],
                                .rstd = v[RSTD].data,
                                .casting = (bst_casting)attributes[CASTING].i};
    if (!bst__given(&c.dx) && !bst__given(&c.dweight)) return BST_OK;
    if (!c.x.rows.rows) return c.dweight.data ? bst__zero(exec, RMS_NORM_BACKWARD, &c.dweight) : BST_OK;
    return c.x.device.device_type == kDLCPU ? backward_cpu(exec, &c) : bst__rms_norm_backward_cuda(exec, &c);
}

static const bst_function backward = {
    .name = RMS_NORM_BACKWARD,
    .arguments =
        (const bst_argument[]){[X] = INPUT,
                               [WEIGHT] = OF_COLUMN,
                               [RSTD] = {"rstd", BST_IN, 1u << BST_F32, "#", BST_CONTIGUOUS},
                               [DY] = {"dy", BST_IN, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                                       BST_TYPE_RULE(y_type, "the type of the forward output")},
                               [DSUM] = {"dsum", BST_IN | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, AS_X},
                               [DX] = {"dx", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, AS_X},
                               [DWEIGHT] = {"dweight", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS,
                                            BST_LIKE(WEIGHT), BST_TYPE_OF(WEIGHT, "as weight has it")},
                               {NULL}},
    .attributes = (const bst_attribute_rule[]){[CASTING] = CASTINGS, {NULL}},
    .run = run_backward,
    BST_TORCH("rms_norm_backward: dy x weight rstd casting -> dx? dweight?",
              "add_rms_norm_backward: dy dsum! x weight rstd casting -> dx? dweight?")};

bst_status bst_rms_norm_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *dsum, const DLTensor *x,
                                 const DLTensor *weight, const DLTensor *rstd, bst_casting casting, DLTensor *dx,
                                 DLTensor *dweight) {
    const DLTensor *tensors[] = {[X] = x,       [WEIGHT] = weight, [RSTD] = rstd,      [DY] = dy,
                                 [DSUM] = dsum, [DX] = dx,         [DWEIGHT] = dweight};
    return bst__run(&backward, exec, tensors, (bst_attribute[]){[CASTING].i = casting});
}

const bst_function *const bst__rms_norm[] = {&forward, &backward, NULL};
