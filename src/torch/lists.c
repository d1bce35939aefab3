/* lists.c - PyTorch operators of lists of tensors, the optimiser's and the weights of a group: each takes its arguments
 * from PyTorch's stack in the order of its schema, calls its function of the C API, and ends the call. */
#include <stdlib.h>

#include "torch/bind.h"
#include "torch/call.h"

/* ---- the optimiser ----------------------------------------------------------------------------------------------- */

static void adamw(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_torch_value *results = stack;
    bst_call call;
    bst_adamw_tensors tensors = {.size = sizeof tensors};
    bst_adamw_options options = {.size = sizeof options};
    /* The last three may be empty in place of being absent. */
    DLTensor *const **const lists[] = {
        &tensors.parameter, &tensors.gradient, &tensors.exp_avg,       &tensors.exp_avg_sq,
        &tensors.step,      &tensors.master,   &tensors.exp_avg_scale, &tensors.exp_avg_sq_scale};
    const DLTensor **const scalars[] = {&tensors.lr, &tensors.grad_scale, &tensors.found_inf, &tensors.clip};
    int64_t counts[8];
    bst__call_begin(&call);
    for (int i = 0; i < 8; i++) *lists[i] = bst__call_list(&call, *stack++, &counts[i]);
    tensors.count = counts[0];
    for (int i = 0; i < 4; i++) *scalars[i] = bst__call_optional(&call, *stack++);
    double lr = bst__call_double(*stack++), beta1 = bst__call_double(*stack++), beta2 = bst__call_double(*stack++);
    double eps = bst__call_double(*stack++), weight_decay = bst__call_double(*stack++);
    options.maximize = *stack++ & 1;
    options.stochastic = *stack++ & 1;
    options.seed = *stack++;
    options.first_number = (int64_t)*stack++;
    for (int i = 1; i < 8 && call.status == BST_OK; i++)
        if (counts[i] != tensors.count && (i < 5 || counts[i]))
            call.status = bst__error(BST_INVALID,
                                     "optim_adamw: lists of %lld and of %lld tensors are given; all must "
                                     "be as long",
                                     (long long)tensors.count, (long long)counts[i]);
    if (call.status == BST_OK)
        call.status = bst_optim_adamw(&call.exec, &tensors, lr, beta1, beta2, eps, weight_decay, &options);
    bst__call_end(&call, results, 0, NULL);
}

static void norm(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    int64_t count;
    DLTensor *results[2] = {NULL};
    bst__call_begin(&call);
    DLTensor *const *gradients = bst__call_list(&call, stack[0], &count);
    const DLTensor *grad_scale = bst__call_optional(&call, stack[1]);
    if (!count && call.status == BST_OK) call.status = bst__error(BST_INVALID, "optim_norm: there is no gradient");
    for (int i = 0; i < 2; i++) results[i] = bst__call_empty(&call, 0, NULL, NULL, bst__dl_type(BST_F32));
    if (call.status == BST_OK)
        call.status = bst_optim_norm(&call.exec, count, (const DLTensor *const *)gradients, grad_scale,
                                     bst__call_double(stack[2]), results[0], results[1]);
    bst__call_end(&call, stack, 2, results);
}

static void scale(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    int64_t count;
    bst__call_begin(&call);
    DLTensor *const *gradients = bst__call_list(&call, stack[0], &count);
    const DLTensor *coefficient = bst__call_tensor(&call, stack[1]);
    if (call.status == BST_OK) call.status = bst_optim_scale(&call.exec, count, gradients, coefficient);
    bst__call_end(&call, stack, 0, NULL);
}

/* ---- weights of 4 bits ------------------------------------------------------------------------------------------- */

static const char group_op[] = "dequantize_4bit_group";

/* One of a group, as the C API takes it. */
typedef struct quantised {
    bst_4bit_weight parts;
    DLTensor weight;
    int64_t shape[2];
} quantised;

/* Of each weight packed, absmax and code, then, where `each` is 6, nested_code, nested_absmax and offset; the weights
 * one below the other in `all`. */
static bst_status run_group(bst_call *call, DLTensor *const *tensors, int64_t each, const int64_t *rows, int64_t count,
                            const bst_4bit_weight *sizes, const DLTensor *all) {
    quantised *q = calloc((size_t)count + 1, sizeof *q);
    const bst_4bit_weight **parts = calloc((size_t)count + 1, sizeof *parts);
    DLTensor **weights = calloc((size_t)count + 1, sizeof *weights);
    bst_status status = BST_OK;
    if (!q || !parts || !weights)
        status =
            bst__error(BST_NO_MEMORY, "%s: a table of %lld weights could not be allocated", group_op, (long long)count);
    char *data = all->data;
    for (int64_t i = 0; i < count && status == BST_OK; i++, tensors += each) {
        q[i].parts = *sizes;
        q[i].parts.packed = tensors[0], q[i].parts.absmax = tensors[1], q[i].parts.code = tensors[2];
        if (each > 3) q[i].parts.nested_code = tensors[3], q[i].parts.nested_absmax = tensors[4];
        if (each > 3) q[i].parts.offset = tensors[5];
        q[i].shape[0] = rows[i], q[i].shape[1] = all->shape[1];
        q[i].weight = *all;
        q[i].weight.shape = q[i].shape;
        q[i].weight.strides = NULL;
        q[i].weight.data = data;
        data += rows[i] * all->shape[1] * (all->dtype.bits / 8);
        parts[i] = &q[i].parts, weights[i] = &q[i].weight;
    }
    if (status == BST_OK) status = bst_dequantize_4bit_group(&call->exec, count, parts, weights);
    free(q);
    free(parts);
    free(weights);
    return status;
}

static void dequantize_4bit_group(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_call call;
    DLTensor *all = NULL;
    int64_t tensors, count, size[2] = {0, (int64_t)stack[2]}, type = (int64_t)stack[5];
    bst__call_begin(&call);
    DLTensor *const *parts = bst__call_list(&call, stack[0], &tensors);
    const int64_t *rows = bst__call_integers(&call, stack[1], &count);
    const bst_4bit_weight sizes = {
        .size = sizeof sizes, .blocksize = (int64_t)stack[3], .nested_blocksize = (int64_t)stack[4]};
    if (call.status == BST_OK && (!count || (tensors != 3 * count && tensors != 6 * count)))
        call.status =
            bst__error(BST_INVALID, "%s: %lld tensors are given for %lld weights; three or six of each are needed",
                       group_op, (long long)tensors, (long long)count);
    if (call.status == BST_OK && (type < BST_F32 || type > BST_F16))
        call.status = bst__error(BST_INVALID, "%s: type is %lld; 0 (float32), 1 (bfloat16) or 2 (float16) is needed",
                                 group_op, (long long)type);
    for (int64_t i = 0; i < count && call.status == BST_OK; i++)
        if (rows[i] < 0 || __builtin_add_overflow(size[0], rows[i], &size[0]))
            call.status = bst__error(BST_INVALID, "%s: rows[%lld] is %lld; a number from 0 is needed", group_op,
                                     (long long)i, (long long)rows[i]);
    if (call.status == BST_OK) all = bst__call_empty(&call, 2, size, NULL, bst__dl_type((bst_dtype)type));
    if (call.status == BST_OK) call.status = run_group(&call, parts, tensors / count, rows, count, &sizes, all);
    bst__call_end(&call, stack, 1, &all);
}

static const struct {
    const char *name, *schema;
    bst_torch_kernel kernel;
} operators[] = {
    {"optim_adamw",
     "optim_adamw(Tensor(a!)[] parameter, Tensor(b!)[] gradient, Tensor(c!)[] exp_avg, Tensor(d!)[] exp_avg_sq, "
     "Tensor(e!)[] step, Tensor(f!)[] master, Tensor(g!)[] exp_avg_scale, Tensor(h!)[] exp_avg_sq_scale, Tensor? lr, "
     "Tensor? grad_scale, Tensor? found_inf, Tensor? clip, float lr_number, float beta1, float beta2, float eps, "
     "float weight_decay, bool maximize, bool stochastic, int seed, int first_number) -> ()",
     adamw},
    {"optim_norm", "optim_norm(Tensor[] gradient, Tensor? grad_scale, float max_norm) -> (Tensor, Tensor)", norm},
    {"optim_scale", "optim_scale(Tensor(a!)[] gradient, Tensor coefficient) -> ()", scale},
    {"dequantize_4bit_group",
     "dequantize_4bit_group(Tensor[] parts, int[] rows, int columns, int blocksize, int nested_blocksize, int type) -> "
     "Tensor",
     dequantize_4bit_group},
};

bst_status bst__torch_bind_lists(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda) {
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (bst__torch.aoti_torch_library_def(fragment, operators[i].schema) ||
            bst__torch.aoti_torch_library_impl(cpu, operators[i].name, operators[i].kernel) ||
            bst__torch.aoti_torch_library_impl(cuda, operators[i].name, operators[i].kernel))
            return bst__error(BST_HOST, "torch: the operator bastile::%s could not be registered", operators[i].name);
    return BST_OK;
}
