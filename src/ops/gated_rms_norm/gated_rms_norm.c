/* gated_rms_norm.c - the RMS norm with a gate: its description, then the kernels of the tensors' device. */
#include "ops/gated_rms_norm/gated_rms_norm.h"

#include <inttypes.h>

#include "core/options.h"

typedef bst_gated_rms_norm_backward_tensors given_tensors;
typedef bst_gated_rms_norm_options given_options;

/* ---- what forward and backward have in common -------------------------------------------------------------------- */

static bst_status check_width(const char *op, const bst_view *v) {
    int64_t columns = v[X].rows.columns;
    if (columns >= 1 && columns <= 65536) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: x has rows of %" PRId64 " elements; 1 to 65536 are supported", op, columns);
}

static bst_status check_group(const char *op, const bst_view *v, const bst_attribute *attributes) {
    int64_t columns = v[X].rows.columns, group = attributes[GROUP].i;
    if (!group || (group <= columns && columns % group == 0)) return BST_OK;
    return bst__error(BST_INVALID, "%s: group is %" PRId64 ", and x has rows of %" PRId64 "; a divisor is needed", op,
                      group, columns);
}

static bst_dtype y_type(const bst_view *v, const bst_attribute *attributes) {
    bool promoted = attributes[PROMOTE].i && v[WEIGHT].dtype != v[X].dtype;
    return promoted ? BST_F32 : v[X].dtype;
}

#define OF_X               {"x", BST_IN, BST_FLOATS, "*H", BST_ROWS, .check = check_width, BST_AT(x)}
#define OF_GATE            {"gate", BST_IN, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X), BST_AT(gate)}
#define OF_WEIGHT          {"weight", BST_IN, BST_FLOATS, "H", BST_CONTIGUOUS, BST_AT(weight)}
#define GRADIENT(name, of) #name, BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), BST_AT(name)

static const bst_attribute_rule rules[] = {
    [ACTIVATION] = BST_OPTION('i', activation, BST_NORM_GATE_SILU, BST_NORM_GATE_SIGMOID, "0 (silu) or 1 (sigmoid)"),
    [GATE_FIRST] = BST_OPTION('b', gate_first),
    [GROUP] = BST_OPTION('i', group, 0, 65536, "0 to 65536"),
    [PROMOTE] = BST_OPTION('b', promote),
    [EPS] = {"eps", 'd', BST_EPS_BOUNDS},
    {NULL}};

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    if (!v[X].rows.rows) return BST_OK;
    if (v[X].device.device_type == kDLCUDA) return bst__gated_rms_norm_forward_cuda(exec, op, v, attributes);
    gated_rms_norm_cpu work = {.v = v, .attributes = attributes};
    return BST_CPU_RUN(exec, v[X].rows.rows, v[X].rows.columns, bst__gated_rms_norm_forward_cpu, &work);
}

static const bst_function forward = {
    .name = "gated_rms_norm_forward",
    .arguments = (const bst_argument[]){[X] = OF_X,
                                        [GATE] = OF_GATE,
                                        [WEIGHT] = OF_WEIGHT,
                                        [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(X),
                                               BST_TYPE_RULE(y_type, "as the inputs have it")},
                                        {NULL}},
    .attributes = rules,
    .check = check_group,
    .run = run_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("gated_rms_norm_forward: x gate weight eps activation gate_first group promote -> y")};

bst_status bst_gated_rms_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *gate,
                                      const DLTensor *weight, double eps, const bst_gated_rms_norm_options *options,
                                      DLTensor *y) {
    const DLTensor *tensors[] = {[X] = x, [GATE] = gate, [WEIGHT] = weight, [Y] = y};
    return bst__call(&forward, exec, tensors, options, (bst_attribute[]){[EPS].d = eps});
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Row chunks, each with its own partial sums: a fixed number, so that the order of the sum, and with it the result,
 * does not depend on the number of threads. */
enum { CHUNKS = 32 };

static bst_status backward_cpu(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    int64_t rows = v[X].rows.rows, columns = v[X].rows.columns;
    gated_rms_norm_cpu work = {.v = v, .attributes = attributes, .chunks = rows < CHUNKS ? rows : CHUNKS};
    size_t bytes = v[DWEIGHT].data ? (size_t)(work.chunks * columns) * sizeof(float) : 0;
    void *partial;
    BST_TRY(bst__allocate(exec, op, v[X].device, bytes, &partial));
    if (bytes) work.partial = partial;
    BST_CPU_RUN(exec, work.chunks, columns * (rows / work.chunks), bst__gated_rms_norm_backward_cpu, &work);
    if (bytes) BST_CPU_RUN(exec, columns, work.chunks, bst__gated_rms_norm_sums_cpu, &work);
    bst__release(exec, v[X].device, partial);
    return BST_OK;
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    if (!bst__given(&v[DX]) && !bst__given(&v[DGATE]) && !bst__given(&v[DWEIGHT])) return BST_OK;
    if (!v[X].rows.rows) return bst__zero(exec, op, &v[DWEIGHT]);
    bool cpu = v[X].device.device_type == kDLCPU;
    return cpu ? backward_cpu(exec, op, v, attributes) : bst__gated_rms_norm_backward_cuda(exec, op, v, attributes);
}

static const bst_function backward = {
    .name = "gated_rms_norm_backward",
    .arguments =
        (const bst_argument[]){[X] = OF_X,
                               [GATE] = OF_GATE,
                               [WEIGHT] = OF_WEIGHT,
                               [DY] = {"dy", BST_IN, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(X),
                                       BST_TYPE_RULE(y_type, "the type of the forward output"), BST_AT(dy)},
                               [DX] = {GRADIENT(dx, X), BST_TYPE_OF(X, "as x has it")},
                               [DGATE] = {GRADIENT(dgate, GATE), BST_TYPE_OF(GATE, "as gate has it")},
                               [DWEIGHT] = {GRADIENT(dweight, WEIGHT), BST_TYPE_OF(WEIGHT, "as weight has it")},
                               {NULL}},
    .attributes = rules,
    .check = check_group,
    .run = run_backward,
    BST_GIVEN,
    BST_TORCH("gated_rms_norm_backward: dy x gate weight eps activation gate_first group promote -> dx? dgate? "
              "dweight?")};

bst_status bst_gated_rms_norm_backward(const bst_exec *exec, const bst_gated_rms_norm_backward_tensors *tensors,
                                       double eps, const bst_gated_rms_norm_options *options) {
    return bst__call_struct(&backward, exec, tensors, options, (bst_attribute[]){[EPS].d = eps});
}

const bst_function *const bst__gated_rms_norm[] = {&forward, &backward, NULL};
