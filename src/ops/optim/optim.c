/* optim.c - the optimiser: AdamW over lists of tensors, the norm of a list of gradients and their scale. Checks, then
 * the kernels of the tensors' device.
 *
 * A description (core/describe.h) says what single tensors are; these functions take lists of them, whose length is the
 * caller's and whose members go together by their place. So their checks stand here, and their PyTorch operators in
 * torch/lists.c. */
#include "ops/optim/optim.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/describe.h"
#include "core/options.h"
#include "ops/optim/optim_cpu.h"

/* No function of this room has a description. */
const bst_function *const bst__optim[] = {NULL};

/* ---- one tensor of a list ---------------------------------------------------------------------------------------- */

/* Names are "exp_avg[i]", whatever i is: bst__name_item puts the number in where there is something to say. */

static bst_status need_list(const char *op, const char *name, const void *list, int64_t count) {
    if (list || !count) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is NULL; a list of %lld tensors is needed", op, name, (long long)count);
}

/* Whether the elements fill their memory: then their order in it is all the same. */
static bool is_dense(const bst_view *v) {
    int64_t reach = 1;
    for (int i = 0; i < v->dims; i++) {
        if (v->stride[i] < 0) return false;
        reach += (v->size[i] - 1) * v->stride[i];
    }
    return reach == v->count;
}

static bool same_strides(const bst_view *a, const bst_view *b) {
    for (int i = 0; i < a->dims; i++)
        if (a->size[i] > 1 && a->stride[i] != b->stride[i]) return false;
    return true;
}

static const char parameter_name[] = "parameter[i]";

/* A parameter or gradient by itself. */
static bst_status read_one(const char *op, const char *name, const DLTensor *tensor, const bst_view *device,
                           const char *device_name, bst_view *v) {
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, v));
    if (device) BST_TRY(bst__need_device(op, name, v, device, device_name));
    if (!v->count || bst__is_contiguous(v)) return BST_OK;
    if (!is_dense(v) || bst__need_distinct(op, name, v) != BST_OK)
        return bst__error(BST_UNSUPPORTED, "%s: %s, of shape %s, has gaps or elements that share memory; copy it", op,
                          name, bst__shape_text(v));
    return BST_OK;
}

/* One that goes with a parameter: of its shape, lying as it does, in memory of its own. */
static bst_status read_beside(const char *op, const char *name, const DLTensor *tensor, unsigned types,
                              const bst_view *parameter, bst_view *v) {
    BST_TRY(bst__view(op, name, types, tensor, v));
    BST_TRY(bst__need_same_shape(op, name, v, parameter_name, parameter));
    BST_TRY(bst__need_device(op, name, v, parameter, parameter_name));
    if (v->count && !same_strides(v, parameter))
        return bst__error(BST_UNSUPPORTED, "%s: %s has other strides than %s; copy it into the same", op, name,
                          parameter_name);
    return bst__need_apart(op, name, v, parameter_name, parameter);
}

/* Moments of 8 bits: [blocks, 256], without gaps, and a scale a block. */
static bst_status read_codes(const char *op, const char *name, const char *scale_name, const DLTensor *tensor,
                             const DLTensor *scales, const bst_view *parameter, void **codes, float **scale) {
    int64_t blocks = optim_blocks(parameter->count, OPTIM_BLOCK);
    bst_view v, s;
    BST_TRY(bst__view(op, name, 1u << BST_U8, tensor, &v));
    if (v.dims != 2 || v.size[0] != blocks || v.size[1] != OPTIM_BLOCK || !bst__is_contiguous(&v))
        return bst__error(BST_INVALID, "%s: %s is of uint8; it must be contiguous, of shape [%lld, %d]", op, name,
                          (long long)blocks, OPTIM_BLOCK);
    BST_TRY(bst__need_device(op, name, &v, parameter, parameter_name));
    BST_TRY(bst__need_apart(op, name, &v, parameter_name, parameter));
    if (v.count && (uintptr_t)v.data % 16)
        return bst__error(BST_UNSUPPORTED, "%s: %s does not begin at a multiple of 16 bytes; copy it", op, name);
    BST_TRY(bst__view(op, scale_name, 1u << BST_F32, scales, &s));
    BST_TRY(bst__need_device(op, scale_name, &s, parameter, parameter_name));
    BST_TRY(bst__need_dims(op, scale_name, &s, 1));
    BST_TRY(bst__need_size(op, scale_name, &s, 0, blocks, "one a block of 256 elements"));
    BST_TRY(bst__need_contiguous(op, scale_name, &s));
    *codes = v.data;
    *scale = s.data;
    return BST_OK;
}

/* One float32 on the device, or NULL. */
static bst_status read_scalar(const char *op, const char *name, const DLTensor *tensor, const bst_view *device,
                              const char *device_name, float **out) {
    bst_view v;
    *out = NULL;
    if (!tensor) return BST_OK;
    BST_TRY(bst__view(op, name, 1u << BST_F32, tensor, &v));
    BST_TRY(bst__need_one(op, name, &v));
    if (device) BST_TRY(bst__need_device(op, name, &v, device, device_name));
    *out = v.data;
    return BST_OK;
}

static bst_status need_count(const char *op, int64_t count) {
    if (count >= 0 && count <= INT32_MAX) return BST_OK;
    return bst__error(BST_INVALID, "%s: count is %lld; the number of tensors, 0 to 2^31 - 1, is needed", op,
                      (long long)count);
}

static void *allocate_items(int64_t count, size_t each) { return calloc((size_t)(count ? count : 1), each); }

static bst_status no_items(const char *op, int64_t count) {
    return bst__error(BST_NO_MEMORY, "%s: a table of %lld tensors could not be allocated", op, (long long)count);
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

static const char adamw_op[] = "optim_adamw";

static bool is_u8(const DLTensor *t) {
    return t && t->dtype.code == kDLUInt && t->dtype.bits == 8 && t->dtype.lanes == 1;
}

static bst_status read_moments(const bst_adamw_tensors *t, int64_t i, const bst_view *parameter, optim_item *item,
                               bool *aligned) {
    const char *op = adamw_op;
    optim_tensor *out = &item->tensor;
    if (is_u8(t->exp_avg[i]) != is_u8(t->exp_avg_sq[i]))
        return bst__error(BST_INVALID, "%s: one of exp_avg[i] and exp_avg_sq[i] is uint8; both or none must be", op);
    if (is_u8(t->exp_avg[i])) {
        if (!t->exp_avg_scale || !t->exp_avg_sq_scale)
            return bst__error(BST_INVALID,
                              "%s: exp_avg[i] is uint8; exp_avg_scale and exp_avg_sq_scale are needed with it", op);
        item->moments = OPTIM_U8_CODE;
        BST_TRY(read_codes(op, "exp_avg[i]", "exp_avg_scale[i]", t->exp_avg[i], t->exp_avg_scale[i], parameter,
                           &out->exp_avg, &out->exp_avg_scale));
        return read_codes(op, "exp_avg_sq[i]", "exp_avg_sq_scale[i]", t->exp_avg_sq[i], t->exp_avg_sq_scale[i],
                          parameter, &out->exp_avg_sq, &out->exp_avg_sq_scale);
    }
    bst_view m, v;
    unsigned types = 1u << BST_F32 | 1u << BST_BF16 | 1u << parameter->dtype;
    BST_TRY(read_beside(op, "exp_avg[i]", t->exp_avg[i], types, parameter, &m));
    BST_TRY(read_beside(op, "exp_avg_sq[i]", t->exp_avg_sq[i], types, parameter, &v));
    BST_TRY(bst__need_dtype(op, "exp_avg_sq[i]", &v, m.dtype, "the type of exp_avg"));
    item->moments = (int)m.dtype;
    out->exp_avg = m.data;
    out->exp_avg_sq = v.data;
    *aligned = *aligned && ((uintptr_t)m.data | (uintptr_t)v.data) % 16 == 0;
    return BST_OK;
}

static bst_status read_item(const bst_adamw_tensors *t, int64_t i, bool stochastic, const bst_view *first,
                            bst_view *parameter, optim_item *item) {
    const char *op = adamw_op;
    bst_view g, master;
    BST_TRY(read_one(op, parameter_name, t->parameter[i], first, "parameter[0]", parameter));
    BST_TRY(read_beside(op, "gradient[i]", t->gradient[i], BST_FLOATS, parameter, &g));
    BST_TRY(bst__need_dtype(op, "gradient[i]", &g, parameter->dtype, "the type of the parameter"));
    bool aligned = ((uintptr_t)parameter->data | (uintptr_t)g.data) % 16 == 0;
    item->type = parameter->dtype;
    item->tensor.parameter = parameter->data;
    item->tensor.gradient = g.data;
    item->tensor.count = parameter->count;
    item->tensor.number = (uint32_t)i;
    BST_TRY(read_moments(t, i, parameter, item, &aligned));
    if (t->master && t->master[i]) {
        BST_TRY(read_beside(op, "master[i]", t->master[i], 1u << BST_F32, parameter, &master));
        if (parameter->dtype == BST_F32)
            return bst__error(BST_INVALID, "%s: master[i] is given, but parameter[i] is float32 itself", op);
        item->tensor.master = master.data;
        aligned = aligned && (uintptr_t)master.data % 16 == 0;
    } else if (stochastic && parameter->dtype == BST_F16) {
        return bst__error(BST_UNSUPPORTED, "%s: parameter[i] is float16; only bfloat16 is rounded stochastically", op);
    }
    item->tensor.aligned = aligned;
    if (!t->step[i]) return bst__error(BST_INVALID, "%s: step[i] is NULL; one float32 is needed", op);
    return read_scalar(op, "step[i]", t->step[i], parameter, "parameter[0]", &item->step);
}

static bst_status need_between(const char *op, const char *name, double value, double low, double high,
                               const char *needed) {
    if (value >= low && value <= high) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is %g; %s is needed", op, name, value, needed);
}

static bst_status read_numbers(double lr, double beta1, double beta2, double eps, double weight_decay) {
    static const char from_0[] = "a finite number, 0 or above,", below_1[] = "a number from 0 to below 1";
    const double most = nextafter(1.0, 0.0);
    BST_TRY(need_between(adamw_op, "lr", lr, 0, FLT_MAX, from_0));
    BST_TRY(need_between(adamw_op, "beta1", beta1, 0, most, below_1));
    BST_TRY(need_between(adamw_op, "beta2", beta2, 0, most, below_1));
    BST_TRY(need_between(adamw_op, "eps", eps, 0, FLT_MAX, from_0));
    return need_between(adamw_op, "weight_decay", weight_decay, 0, FLT_MAX, from_0);
}

/* The first unit of each tensor, and the number of all. */
static int64_t *count_units(int64_t count, const void *items, int64_t (*elements)(const void *, int64_t)) {
    int64_t *first = calloc((size_t)count + 1, sizeof *first);
    for (int64_t i = 0; first && i < count; i++) first[i + 1] = first[i] + optim_blocks(elements(items, i), OPTIM_UNIT);
    return first;
}

static int64_t elements_of_item(const void *items, int64_t i) { return ((const optim_item *)items)[i].tensor.count; }

static bst_status adamw_cpu(const bst_exec *exec, const optim_step *s) {
    int64_t *first = count_units(s->count, s->items, elements_of_item);
    optim_coefficients *c = calloc((size_t)s->count, sizeof *c);
    if (first && c) {
        for (int64_t i = 0; i < s->count; i++)
            c[i] = optim_begin_tensor(s->items[i].step, s->lr, s->beta1, s->beta2, s->eps, s->weight_decay,
                                      s->device_lr, s->grad_scale, s->found_inf, s->clip);
        optim_cpu call = {s, c, first};
        BST_CPU_RUN(exec, first[s->count], OPTIM_UNIT, bst__optim_adamw_cpu, &call);
    }
    bst_status status = first && c ? BST_OK : no_items(s->op, s->count);
    free(first);
    free(c);
    return status;
}

static bst_status read_lists(const bst_adamw_tensors *t, optim_item *items, optim_step *s) {
    bst_view first = {0}, view;
    const char *op = adamw_op, *name = "parameter[0]";
    for (int64_t i = 0; i < t->count; i++) {
        bst_status status = read_item(t, i, s->stochastic, i ? &first : NULL, i ? &view : &first, &items[i]);
        if (status != BST_OK) return bst__name_item(status, i);
    }
    BST_TRY(read_scalar(op, "lr", t->lr, &first, name, &s->device_lr));
    BST_TRY(read_scalar(op, "grad_scale", t->grad_scale, &first, name, &s->grad_scale));
    BST_TRY(read_scalar(op, "found_inf", t->found_inf, &first, name, &s->found_inf));
    BST_TRY(read_scalar(op, "clip", t->clip, &first, name, &s->clip));
    s->device = first.device;
    s->items = items;
    return BST_OK;
}

bst_status bst_optim_adamw(const bst_exec *exec, const bst_adamw_tensors *tensors, double lr, double beta1,
                           double beta2, double eps, double weight_decay, const bst_adamw_options *options) {
    const char *op = adamw_op;
    bst_exec own;
    bst_adamw_tensors t;
    bst_adamw_options o;
    BST_TRY(bst__options(op, "exec", exec, &own, sizeof own));
    BST_TRY(bst__options(op, "tensors", tensors, &t, sizeof t));
    BST_TRY(bst__options(op, "options", options, &o, sizeof o));
    BST_TRY(need_count(op, t.count));
    BST_TRY(need_between(op, "first_number", (double)o.first_number, 0, INT32_MAX, "a number from 0 to 2^31 - 1"));
    BST_TRY(read_numbers(lr, beta1, beta2, eps, weight_decay));
    BST_TRY(need_list(op, "parameter", t.parameter, t.count));
    BST_TRY(need_list(op, "gradient", t.gradient, t.count));
    BST_TRY(need_list(op, "exp_avg", t.exp_avg, t.count));
    BST_TRY(need_list(op, "exp_avg_sq", t.exp_avg_sq, t.count));
    BST_TRY(need_list(op, "step", t.step, t.count));
    if (!t.count) return BST_OK;
    optim_item *items = allocate_items(t.count, sizeof *items);
    if (!items) return no_items(op, t.count);
    optim_step s = {.op = op,
                    .count = t.count,
                    .lr = lr,
                    .beta1 = beta1,
                    .beta2 = beta2,
                    .eps = eps,
                    .weight_decay = weight_decay,
                    .seed = o.seed,
                    .first_number = (uint32_t)o.first_number,
                    .maximize = o.maximize != 0,
                    .stochastic = o.stochastic != 0};
    bst_status status = read_lists(&t, items, &s);
    if (status == BST_OK)
        status = s.device.device_type == kDLCUDA ? bst__optim_adamw_cuda(&own, &s) : adamw_cpu(&own, &s);
    free(items);
    return status;
}

/* ---- gradients --------------------------------------------------------------------------------------------------- */

static int64_t elements_of_gradient(const void *items, int64_t i) {
    return ((const optim_list_item *)items)[i].gradient.count;
}

/* Reads a list of gradients; `first` gets the view of its first one. */
static bst_status read_gradients(const char *op, int64_t count, const DLTensor *const *gradients,
                                 optim_list_item *items, bst_view *first) {
    bst_view view;
    for (int64_t i = 0; i < count; i++) {
        bst_view *v = i ? &view : first;
        bst_status status = read_one(op, "gradient[i]", gradients[i], i ? first : NULL, "gradient[0]", v);
        if (status != BST_OK) return bst__name_item(status, i);
        items[i] = (optim_list_item){{v->data, v->count}, v->dtype};
    }
    return BST_OK;
}

static bst_status norm_cpu(const bst_exec *exec, const optim_list *l, const float *grad_scale, double max_norm,
                           float *norm, float *coefficient) {
    int64_t *first = count_units(l->count, l->items, elements_of_gradient);
    double *partial = first ? calloc((size_t)first[l->count] + 1, sizeof *partial) : NULL, sum = 0;
    if (partial) {
        optim_list_cpu call = {l, first, partial, 0};
        BST_CPU_RUN(exec, first[l->count], OPTIM_UNIT, bst__optim_squares_cpu, &call);
        for (int64_t i = 0; i < first[l->count]; i++) sum += partial[i];
        double root = sqrt(sum) / (grad_scale ? (double)*grad_scale : 1.0), share = max_norm / (root + 1e-6);
        *norm = (float)root;
        if (coefficient) *coefficient = share > 1 ? 1.0f : (float)share;
    }
    bst_status status = partial ? BST_OK : no_items(l->op, l->count);
    free(first);
    free(partial);
    return status;
}

bst_status bst_optim_norm(const bst_exec *exec, int64_t count, const DLTensor *const *gradients,
                          const DLTensor *grad_scale, double max_norm, DLTensor *norm, DLTensor *coefficient) {
    static const char op[] = "optim_norm";
    bst_exec own;
    bst_view first = {0};
    float *scale, *to, *coefficient_to;
    BST_TRY(bst__options(op, "exec", exec, &own, sizeof own));
    BST_TRY(need_count(op, count));
    BST_TRY(need_between(op, "max_norm", max_norm, 0, INFINITY, "a number, 0 or above,"));
    BST_TRY(need_list(op, "gradient", gradients, count));
    if (!norm) return bst__error(BST_INVALID, "%s: norm is NULL; one float32 is needed", op);
    optim_list_item *items = allocate_items(count, sizeof *items);
    if (!items) return no_items(op, count);
    const bst_view *device = count ? &first : NULL;
    bst_status status = read_gradients(op, count, gradients, items, &first);
    if (status == BST_OK) status = read_scalar(op, "norm", norm, device, "gradient[0]", &to);
    if (status == BST_OK && !count) first.device = norm->device;
    if (status == BST_OK) status = read_scalar(op, "coefficient", coefficient, device, "gradient[0]", &coefficient_to);
    if (status == BST_OK) status = read_scalar(op, "grad_scale", grad_scale, device, "gradient[0]", &scale);
    if (status == BST_OK) {
        optim_list l = {op, first.device, items, count};
        status = l.device.device_type == kDLCUDA ? bst__optim_norm_cuda(&own, &l, scale, max_norm, to, coefficient_to)
                                                 : norm_cpu(&own, &l, scale, max_norm, to, coefficient_to);
    }
    free(items);
    return status;
}

static bst_status scale_cpu(const bst_exec *exec, const optim_list *l, float coefficient) {
    if (coefficient == 1) return BST_OK;
    int64_t *first = count_units(l->count, l->items, elements_of_gradient);
    if (!first) return no_items(l->op, l->count);
    optim_list_cpu call = {l, first, NULL, coefficient};
    BST_CPU_RUN(exec, first[l->count], OPTIM_UNIT, bst__optim_scale_cpu, &call);
    free(first);
    return BST_OK;
}

bst_status bst_optim_scale(const bst_exec *exec, int64_t count, DLTensor *const *gradients,
                           const DLTensor *coefficient) {
    static const char op[] = "optim_scale";
    bst_exec own;
    bst_view first = {0};
    float *from;
    BST_TRY(bst__options(op, "exec", exec, &own, sizeof own));
    BST_TRY(need_count(op, count));
    BST_TRY(need_list(op, "gradient", gradients, count));
    if (!coefficient) return bst__error(BST_INVALID, "%s: coefficient is NULL; one float32 is needed", op);
    if (!count) return BST_OK;
    optim_list_item *items = allocate_items(count, sizeof *items);
    if (!items) return no_items(op, count);
    bst_status status = read_gradients(op, count, (const DLTensor *const *)gradients, items, &first);
    if (status == BST_OK) status = read_scalar(op, "coefficient", coefficient, &first, "gradient[0]", &from);
    if (status == BST_OK) {
        optim_list l = {op, first.device, items, count};
        status = l.device.device_type == kDLCUDA ? bst__optim_scale_cuda(&own, &l, from) : scale_cpu(&own, &l, *from);
    }
    free(items);
    return status;
}
