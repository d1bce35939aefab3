/* moe.c - a mixture of experts around its grouped products: descriptions, then the launches of moe_cuda.c or the CPU's
 * kernels. */
#include <inttypes.h>

#include "ops/moe/moe.h"

typedef bst_moe_glu_backward_tensors given_tensors;
typedef bst_glu_options given_options;

#define F32 (1u << BST_F32)
#define I32 (1u << BST_I32)
#define I64 (1u << BST_I64)

/* Of descriptions: T tokens of K experts each make N = T K pairs, and as many rows. */
static const char *const meanings[] = {"Ethe experts", NULL};

#define IN(name, types, shape, ...)       {name, BST_IN, types, shape, BST_CONTIGUOUS, ##__VA_ARGS__}
#define OPTIONAL(name, types, shape, ...) {name, BST_IN | BST_OPTIONAL, types, shape, BST_CONTIGUOUS, ##__VA_ARGS__}
#define OUT(name, types, shape)           {name, BST_OUT, types, shape, BST_CONTIGUOUS}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

static bool on_cuda(const bst_view *v) { return v->device.device_type == kDLCUDA; }

bst_status bst__moe_need_countable(const char *op, const char *name, const char *what, int64_t count) {
    if (count <= INT32_MAX) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: %s has %" PRId64 " %s; at most %d are supported", op, name, count, what,
                      INT32_MAX);
}

/* [T, K] with as many elements as there are rows. */
static bst_status need_pairs(const char *op, const char *name, const bst_view *v, int64_t rows) {
    BST_TRY(bst__moe_need_countable(op, name, "elements", v->count));
    if (v->count == rows) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, one a sorted row, are needed", op, name,
                      bst__shape_text(v), rows);
}

bst_status bst__moe_need_experts(const char *op, int64_t experts) {
    if (experts >= 1 && experts <= BST_MOE_MOST_EXPERTS) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: ends has %" PRId64 " elements, one an expert; 1 to %d are supported", op,
                      experts, BST_MOE_MOST_EXPERTS);
}

/* Each row of the matrix that rows are gathered from has as many pairs. */
static bst_status need_pairs_of(const char *op, const char *pairs, const bst_view *v, const char *name,
                                const bst_view *tokens) {
    BST_TRY(bst__moe_need_countable(op, pairs, "elements", v->count));
    if (tokens->size[0] ? v->count % tokens->size[0] == 0 : !v->count) return BST_OK;
    return bst__error(BST_INVALID,
                      "%s: %s has %" PRId64 " elements; a multiple of the rows of %s, %" PRId64 ", is needed", op,
                      pairs, v->count, name, tokens->size[0]);
}

/* On CPU: every entry lies in [0, most). On CUDA, where looking would wait for the device, the kernels look. */
static bst_status check_entries(const char *op, const char *name, const bst_view *v, int64_t most, const char *what) {
    if (on_cuda(v)) return BST_OK;
    const int32_t *narrow = v->data;
    const int64_t *wide = v->data;
    for (int64_t i = 0; i < v->count; i++) {
        int64_t entry = v->dtype == BST_I64 ? wide[i] : narrow[i];
        if (entry < 0 || entry >= most)
            return bst__error(BST_INVALID, "%s: %s, of shape %s, has %" PRId64 "; 0 to %" PRId64 ", %s, are needed", op,
                              name, bst__shape_text(v), entry, most - 1, what);
    }
    return BST_OK;
}

/* Likewise: the ends of the experts' rows do not fall, and the last expert's is the last row's. */
bst_status bst__moe_check_ends(const char *op, const bst_view *v, int64_t rows) {
    if (on_cuda(v)) return BST_OK;
    const int32_t *ends = v->data;
    for (int64_t e = 0; e < v->count; e++) {
        int64_t least = e ? ends[e - 1] : 0;
        if (ends[e] < least || ends[e] > rows || (e == v->count - 1 && ends[e] != rows))
            return bst__error(BST_INVALID,
                              "%s: ends, of shape %s, has %" PRId32 " at %" PRId64
                              "; numbers that do not fall, from 0 to %" PRId64
                              ", the rows, which the last is, are needed",
                              op, bst__shape_text(v), ends[e], e, rows);
    }
    return BST_OK;
}

/* ---- sort -------------------------------------------------------------------------------------------------------- */

static bst_status check_sort(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(bst__need_dims(op, "indices", &v[SORT_INDICES], 2));
    BST_TRY(bst__moe_need_countable(op, "indices", "elements", v[SORT_INDICES].count));
    return bst__moe_need_experts(op, attributes[EXPERTS].i);
}

static void sort_cpu(const bst_view *v, int64_t experts) {
    const int64_t *indices = v[SORT_INDICES].data;
    int32_t *order = v[SORT_ORDER].data, *position = v[SORT_POSITION].data, *ends = v[SORT_ENDS].data;
    int32_t next[BST_MOE_MOST_EXPERTS + 1] = {0}; /* where the next pair of an expert goes, one place further on */
    for (int64_t i = 0; i < v[SORT_INDICES].count; i++) next[indices[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) ends[e] = next[e + 1] += next[e];
    for (int32_t i = 0; i < (int32_t)v[SORT_INDICES].count; i++) {
        int32_t row = next[indices[i]]++;
        order[row] = i;
        position[i] = row;
    }
}

static bst_status run_sort(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *indices = &v[SORT_INDICES];
    if (!indices->count) return bst__zero(exec, op, &v[SORT_ENDS]);
    if (on_cuda(indices)) return bst__moe_sort_cuda(exec, op, v, attributes);
    BST_TRY(check_entries(op, "indices", indices, attributes[EXPERTS].i, "the experts"));
    sort_cpu(v, attributes[EXPERTS].i);
    return BST_OK;
}

static const bst_argument sort_arguments[] = {
    [SORT_INDICES] = IN("indices", I64, "*"),
    [SORT_ORDER] = OUT("order", I32, "#"),
    [SORT_POSITION] = {"position", BST_OUT, I32, NULL, BST_CONTIGUOUS, BST_LIKE(SORT_INDICES)},
    [SORT_ENDS] = OUT("ends", I32, "e"),
    {NULL},
};

static const bst_function sort = {
    .name = "moe_sort",
    .arguments = sort_arguments,
    .attributes = (const bst_attribute_rule[]){[EXPERTS] = {"experts", 'i'}, {NULL}},
    .check = check_sort,
    .run = run_sort,
    BST_TORCH("moe_sort: indices experts -> order position ends"),
};

bst_status bst_moe_sort(const bst_exec *exec, const DLTensor *indices, DLTensor *order, DLTensor *position,
                        DLTensor *ends) {
    const DLTensor *tensors[] = {
        [SORT_INDICES] = indices, [SORT_ORDER] = order, [SORT_POSITION] = position, [SORT_ENDS] = ends};
    bool counted = ends && ends->ndim == 1 && ends->shape; /* if not, the check of ends says so */
    return bst__run(&sort, exec, tensors, (bst_attribute[]){[EXPERTS].i = counted ? ends->shape[0] : 1});
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

static bst_status check_gather(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    return need_pairs_of(op, "position", &v[GATHER_POSITION], "x", &v[GATHER_X]);
}

static bst_status run_gather(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *x = &v[GATHER_X], *position = &v[GATHER_POSITION], *rows = &v[GATHER_ROWS];
    if (!rows->count) return BST_OK;
    BST_TRY(check_entries(op, "position", position, position->count, "the rows"));
    if (on_cuda(x)) return bst__moe_gather_cuda(exec, op, v, attributes);
    return BST_CPU_RUN(exec, x->size[0], rows->count / x->size[0], bst__moe_gather_cpu, &(moe_cpu){.v = v});
}

static const bst_argument gather_arguments[] = {
    [GATHER_X] = {"x", BST_IN, BST_FLOATS, "TH", BST_ROWS},
    [GATHER_POSITION] = IN("position", I32, "N"),
    [GATHER_ROWS] = {"rows", BST_OUT, BST_FLOATS, "NH", BST_CONTIGUOUS, BST_TYPE_OF(GATHER_X, "the type of x")},
    {NULL},
};

static const bst_function gather = {
    .name = "moe_gather",
    .arguments = gather_arguments,
    .check = check_gather,
    .run = run_gather,
    BST_TORCH("moe_gather: x position -> rows"),
};

bst_status bst_moe_gather(const bst_exec *exec, const DLTensor *x, const DLTensor *position, DLTensor *rows) {
    const DLTensor *tensors[] = {[GATHER_X] = x, [GATHER_POSITION] = position, [GATHER_ROWS] = rows};
    return bst__run(&gather, exec, tensors, NULL);
}

/* ---- transposed matrices ----------------------------------------------------------------------------------------- */

static bst_dtype type_of_y(const bst_view *views, const bst_attribute *attributes) {
    (void)views;
    return (bst_dtype)attributes[TYPE_OF_Y].i;
}

static bst_status run_transpose(const bst_exec *exec, const char *op, const bst_view *v,
                                const bst_attribute *attributes) {
    const bst_view *x = &v[TURN_X];
    if (!x->count) return BST_OK;
    if (on_cuda(x)) return bst__moe_transpose_cuda(exec, op, v, attributes);
    return BST_CPU_RUN(exec, x->size[2], x->count / x->size[2], bst__moe_transpose_cpu, &(moe_cpu){.v = v});
}

static const bst_argument transpose_arguments[] = {
    [TURN_X] = {"x", BST_IN, BST_FLOATS, "ABC", BST_ROWS},
    [TURN_Y] = {"y", BST_OUT, BST_FLOATS, "CAB", BST_CONTIGUOUS, BST_TYPE_RULE(type_of_y, "the type asked for")},
    {NULL},
};

static const bst_attribute_rule transpose_rules[] = {
    [TYPE_OF_Y] = {"type", 'i', BST_F32, BST_F16, "0 (float32), 1 (bfloat16) or 2 (float16)"}, {NULL}};

static const bst_function transpose = {
    .name = "moe_transpose",
    .arguments = transpose_arguments,
    .attributes = transpose_rules,
    .run = run_transpose,
    BST_TORCH("moe_transpose: x type -> y"),
};

bst_status bst_moe_transpose(const bst_exec *exec, const DLTensor *x, DLTensor *y) {
    const DLTensor *tensors[] = {[TURN_X] = x, [TURN_Y] = y};
    bst_view read; /* what is wrong with it, the check says in its turn */
    bool has_type = y && bst__view("moe_transpose", "y", BST_FLOATS, y, &read) == BST_OK;
    return bst__run(&transpose, exec, tensors, (bst_attribute[]){[TYPE_OF_Y].i = has_type ? read.dtype : BST_F32});
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

/* Runs a backward pass on CPU, chunk by chunk, and sums the chunks' parts of dbias. */
static bst_status chunks_cpu(const bst_exec *exec, const char *op, moe_cpu *call, bst_body body) {
    void *partial;
    BST_TRY(bst__moe_partial_sums(exec, op, call->dbias, call->rows, MOE_CHUNK, &partial));
    call->partial = partial;
    bst__parallel_for(exec, (call->rows + MOE_CHUNK - 1) / MOE_CHUNK, bst__grain(MOE_CHUNK * call->columns), body,
                      call);
    if (partial) bst__parallel_for(exec, call->ends->count, 1, BST_CPU_SELECT(bst__moe_bias_sum_cpu), call);
    bst__release(exec, call->ends->device, partial);
    return BST_OK;
}

/* ---- the gated unit ---------------------------------------------------------------------------------------------- */

#define GLU_INPUTS                                                                                   \
    [GLU_H] = IN("h", BST_FLOATS, "NC", BST_AT(h)), [GLU_ENDS] = IN("ends", I32, "E", BST_AT(ends)), \
    [GLU_BIAS] = OPTIONAL("bias", BST_FLOATS, "EC", BST_TYPE_OF(GLU_H, "the type of h"), BST_AT(bias))
/* A matrix of half h's columns. */
#define GLU_HALF(name, flags, ...) \
    {name, flags, BST_FLOATS, "N-C", BST_CONTIGUOUS, BST_TYPE_OF(GLU_H, "the type of h"), __VA_ARGS__}

static bst_status check_glu(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(bst__glu_need_numbers(op, attributes));
    BST_TRY(bst__moe_need_countable(op, "h", "rows", v[GLU_H].size[0]));
    BST_TRY(bst__glu_need_pairs(op, &v[GLU_H]));
    return bst__moe_need_experts(op, v[GLU_ENDS].count);
}

static bst_status check_glu_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(check_glu(op, v, attributes));
    return need_pairs(op, "weights", &v[GLU_WEIGHTS], v[GLU_H].size[0]);
}

static bst_status run_glu_forward(const bst_exec *exec, const char *op, const bst_view *v,
                                  const bst_attribute *attributes) {
    if (!v[GLU_Y].count) return BST_OK;
    BST_TRY(bst__moe_check_ends(op, &v[GLU_ENDS], v[GLU_H].size[0]));
    if (on_cuda(&v[GLU_H])) return bst__moe_glu_forward_cuda(exec, op, v, attributes);
    moe_cpu call = {.v = v, .ends = &v[GLU_ENDS], .unit = bst__glu_unit(attributes)};
    return BST_CPU_RUN(exec, v[GLU_H].size[0], v[GLU_H].size[1], bst__moe_glu_forward_cpu, &call);
}

static const bst_argument glu_forward_arguments[] = {
    GLU_INPUTS,
    [GLU_Y] = GLU_HALF("y", BST_OUT),
    {NULL},
};

static const bst_function glu_forward = {
    .name = "moe_glu_forward",
    .meanings = meanings,
    .arguments = glu_forward_arguments,
    .attributes = bst__glu_rules,
    .check = check_glu,
    .run = run_glu_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("moe_glu_forward: h bias ends activation interleaved alpha limit open_limit -> y"),
};

bst_status bst_moe_glu_forward(const bst_exec *exec, const DLTensor *h, const DLTensor *bias, const DLTensor *ends,
                               const bst_glu_options *options, DLTensor *y) {
    const DLTensor *tensors[] = {[GLU_H] = h, [GLU_ENDS] = ends, [GLU_BIAS] = bias, [GLU_Y] = y};
    return bst__call(&glu_forward, exec, tensors, options, NULL);
}

static bst_status run_glu_backward(const bst_exec *exec, const char *op, const bst_view *v,
                                   const bst_attribute *attributes) {
    if (!v[GLU_H].count) { /* sums of nothing */
        BST_TRY(bst__zero(exec, op, &v[GLU_DWEIGHTS]));
        return bst__zero(exec, op, &v[GLU_DBIAS]);
    }
    BST_TRY(check_entries(op, "order", &v[GLU_ORDER], v[GLU_H].size[0], "the pairs"));
    BST_TRY(bst__moe_check_ends(op, &v[GLU_ENDS], v[GLU_H].size[0]));
    if (on_cuda(&v[GLU_H])) return bst__moe_glu_backward_cuda(exec, op, v, attributes);
    moe_cpu call = {.v = v, .ends = &v[GLU_ENDS], .dbias = &v[GLU_DBIAS], .unit = bst__glu_unit(attributes)};
    call.rows = v[GLU_H].size[0], call.columns = v[GLU_H].size[1];
    return chunks_cpu(exec, op, &call, BST_CPU_SELECT(bst__moe_glu_backward_cpu));
}

/* A gradient, which has its input's shape and type. */
#define GRADIENT(name, of, ...) \
    {#name, BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(of), __VA_ARGS__, BST_AT(name)}

static const bst_argument glu_backward_arguments[] = {
    GLU_INPUTS,
    [GLU_DY] = GLU_HALF("dy", BST_IN, BST_AT(dy)),
    [GLU_ORDER] = IN("order", I32, "N", BST_AT(order)),
    [GLU_WEIGHTS] = IN("weights", BST_FLOATS, "TK", BST_AT(weights)),
    [GLU_DOTS] = OPTIONAL("dots", F32, "N", BST_AT(dots)),
    [GLU_WY] = GLU_HALF("wy", BST_OUT | BST_OPTIONAL, BST_MAY_BE(1u << GLU_DY), BST_AT(wy)),
    [GLU_DH] = GRADIENT(dh, GLU_H, BST_TYPE_OF(GLU_H, "the type of h"), BST_MAY_BE(1u << GLU_H)),
    [GLU_DWEIGHTS] = GRADIENT(dweights, GLU_WEIGHTS, BST_TYPE_OF(GLU_WEIGHTS, "the type of weights")),
    [GLU_DBIAS] = GRADIENT(dbias, GLU_BIAS, BST_TYPE_OF(GLU_BIAS, "the type of bias")),
    {NULL},
};

#define GLU_BACKWARD "dy h bias ends order weights dots activation interleaved alpha limit open_limit -> "
static const bst_function glu_backward = {
    .name = "moe_glu_backward",
    .meanings = meanings,
    .arguments = glu_backward_arguments,
    .attributes = bst__glu_rules,
    .check = check_glu_backward,
    .run = run_glu_backward,
    BST_GIVEN,
    BST_TORCH("moe_glu_backward: " GLU_BACKWARD "dh? wy? dweights? dbias?",
              "moe_glu_backward_inplace: " GLU_BACKWARD "dh?=h wy?=dy dweights? dbias?"),
};

bst_status bst_moe_glu_backward(const bst_exec *exec, const bst_moe_glu_backward_tensors *tensors,
                                const bst_glu_options *options) {
    return bst__call_struct(&glu_backward, exec, tensors, options, NULL);
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

static bst_status check_combine_forward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    int64_t rows = v[SUM_Y].size[0];
    BST_TRY(need_pairs(op, "position", &v[SUM_POSITION], rows));
    if (bst__given(&v[SUM_WEIGHTS])) {
        BST_TRY(need_pairs(op, "weights", &v[SUM_WEIGHTS], rows));
        BST_TRY(bst__need_same_shape(op, "weights", &v[SUM_WEIGHTS], "position", &v[SUM_POSITION]));
    }
    if (!bst__given(&v[SUM_BIAS]) || bst__given(&v[SUM_INDICES])) return BST_OK;
    return bst__error(BST_INVALID, "%s: indices is NULL; a tensor is needed with bias", op);
}

static bst_status run_combine_forward(const bst_exec *exec, const char *op, const bst_view *v,
                                      const bst_attribute *attributes) {
    const bst_view *y = &v[SUM_Y], *position = &v[SUM_POSITION], *bias = &v[SUM_BIAS];
    if (!v[SUM_OUT].count) return BST_OK;
    if (!y->count) return bst__zero(exec, op, &v[SUM_OUT]);
    BST_TRY(check_entries(op, "position", position, y->size[0], "the rows of y"));
    if (bst__given(bias)) BST_TRY(check_entries(op, "indices", &v[SUM_INDICES], bias->size[0], "the experts"));
    if (on_cuda(y)) return bst__moe_combine_forward_cuda(exec, op, v, attributes);
    return BST_CPU_RUN(exec, position->size[0], position->size[1] * y->size[1], bst__moe_combine_forward_cpu,
                       &(moe_cpu){.v = v});
}

/* The weights' shape, P and Q, is that of position, but they are first counted against the rows. */
static const bst_argument combine_forward_arguments[] = {
    [SUM_Y] = IN("y", BST_FLOATS, "NH"),
    [SUM_POSITION] = IN("position", I32, "TK"),
    [SUM_WEIGHTS] = OPTIONAL("weights", BST_FLOATS, "PQ"),
    [SUM_BIAS] = OPTIONAL("bias", BST_FLOATS, "EH", BST_TYPE_OF(SUM_Y, "the type of y")),
    [SUM_INDICES] = OPTIONAL("indices", I64, "TK"),
    [SUM_OUT] = {"out", BST_OUT, BST_FLOATS, "TH", BST_CONTIGUOUS, BST_TYPE_OF(SUM_Y, "the type of y")},
    {NULL},
};

static const bst_function combine_forward = {
    .name = "moe_combine_forward",
    .arguments = combine_forward_arguments,
    .check = check_combine_forward,
    .run = run_combine_forward,
    BST_TORCH("moe_combine_forward: y position weights bias indices -> out"),
};

bst_status bst_moe_combine_forward(const bst_exec *exec, const DLTensor *y, const DLTensor *position,
                                   const DLTensor *weights, const DLTensor *bias, const DLTensor *indices,
                                   DLTensor *out) {
    const DLTensor *tensors[] = {[SUM_Y] = y,
                                 [SUM_POSITION] = position,
                                 [SUM_WEIGHTS] = weights,
                                 [SUM_BIAS] = bias,
                                 [SUM_INDICES] = bias ? indices : NULL,
                                 [SUM_OUT] = out};
    return bst__run(&combine_forward, exec, tensors, NULL);
}

static bst_status check_combine_backward(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    BST_TRY(need_pairs_of(op, "order", &v[BACK_ORDER], "dout", &v[BACK_DOUT]));
    BST_TRY(bst__moe_need_experts(op, v[BACK_ENDS].count));
    return need_pairs(op, "weights", &v[BACK_WEIGHTS], v[BACK_ORDER].count);
}

static bst_status run_combine_backward(const bst_exec *exec, const char *op, const bst_view *v,
                                       const bst_attribute *attributes) {
    const bst_view *dout = &v[BACK_DOUT], *order = &v[BACK_ORDER], *ends = &v[BACK_ENDS], *bias = &v[BACK_BIAS],
                   *dots = &v[BACK_DOTS], *dbias = &v[BACK_DBIAS];
    if (!bst__given(bias) && (bst__given(dots) || bst__given(dbias)))
        return bst__error(BST_INVALID, "%s: dots or dbias is wanted, but bias is NULL", op);
    if (!v[BACK_ROWS].count) {
        BST_TRY(bst__zero(exec, op, dots));
        return bst__zero(exec, op, dbias);
    }
    BST_TRY(check_entries(op, "order", order, order->count, "the pairs"));
    BST_TRY(bst__moe_check_ends(op, ends, order->count));
    if (on_cuda(dout)) return bst__moe_combine_backward_cuda(exec, op, v, attributes);
    moe_cpu call = {.v = v, .ends = ends, .dbias = dbias, .rows = order->count, .columns = dout->size[1]};
    return chunks_cpu(exec, op, &call, BST_CPU_SELECT(bst__moe_combine_backward_cpu));
}

#define OF_DOUT(name, flags, shape) \
    {name, flags, BST_FLOATS, shape, BST_CONTIGUOUS, BST_TYPE_OF(BACK_DOUT, "the type of dout")}

static const bst_argument combine_backward_arguments[] = {
    [BACK_DOUT] = {"dout", BST_IN, BST_FLOATS, "TH", BST_ROWS},
    [BACK_ORDER] = IN("order", I32, "N"),
    [BACK_ENDS] = IN("ends", I32, "E"),
    [BACK_WEIGHTS] = IN("weights", BST_FLOATS, "TK"),
    [BACK_BIAS] = OF_DOUT("bias", BST_IN | BST_OPTIONAL, "EH"),
    [BACK_ROWS] = OF_DOUT("rows", BST_OUT, "NH"),
    [BACK_DOTS] = {"dots", BST_OUT | BST_OPTIONAL, F32, "N", BST_CONTIGUOUS},
    [BACK_DBIAS] = OF_DOUT("dbias", BST_OUT | BST_OPTIONAL, "EH"),
    {NULL},
};

static const bst_function combine_backward = {
    .name = "moe_combine_backward",
    .meanings = meanings,
    .arguments = combine_backward_arguments,
    .check = check_combine_backward,
    .run = run_combine_backward,
    BST_TORCH("moe_combine_backward: dout order ends weights bias -> rows dots? dbias?"),
};

bst_status bst_moe_combine_backward(const bst_exec *exec, const DLTensor *dout, const DLTensor *order,
                                    const DLTensor *ends, const DLTensor *weights, const DLTensor *bias, DLTensor *rows,
                                    DLTensor *dots, DLTensor *dbias) {
    const DLTensor *tensors[] = {[BACK_DOUT] = dout, [BACK_ORDER] = order, [BACK_ENDS] = ends, [BACK_WEIGHTS] = weights,
                                 [BACK_BIAS] = bias, [BACK_ROWS] = rows,   [BACK_DOTS] = dots, [BACK_DBIAS] = dbias};
    return bst__run(&combine_backward, exec, tensors, NULL);
}

const bst_function *const bst__moe[] = {
    &sort,      &gather, &glu_forward, &glu_backward, &combine_forward, &combine_backward, &bst__moe_linear,
    &transpose, NULL};
