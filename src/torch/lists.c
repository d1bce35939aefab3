/* lists.c - see lists.h. The optimiser's operators: each takes its arguments from PyTorch's stack in the order of its
 * schema, calls its function of the C API, and ends the call. */
#include "torch/lists.h"

#include "torch/call.h"

/* A list that may be empty in place of being absent. */
#define LIST(member) tensors.member = bst__call_list(&call, *stack++, &count)

static void adamw(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) {
    (void)inputs, (void)outputs;
    bst_torch_value *results = stack;
    bst_call call;
    bst_adamw_tensors tensors = {.size = sizeof tensors};
    bst_adamw_options options = {.size = sizeof options};
    int64_t count, others[7], number = 0;
    bst__call_begin(&call);
    LIST(parameter);
    tensors.count = count;
    LIST(gradient), others[number++] = count;
    LIST(exp_avg), others[number++] = count;
    LIST(exp_avg_sq), others[number++] = count;
    LIST(step), others[number++] = count;
    LIST(master), others[number++] = count;
    LIST(exp_avg_scale), others[number++] = count;
    LIST(exp_avg_sq_scale), others[number++] = count;
    tensors.lr = bst__call_optional(&call, *stack++);
    tensors.grad_scale = bst__call_optional(&call, *stack++);
    tensors.found_inf = bst__call_optional(&call, *stack++);
    tensors.clip = bst__call_optional(&call, *stack++);
    double lr = bst__call_double(*stack++), beta1 = bst__call_double(*stack++), beta2 = bst__call_double(*stack++);
    double eps = bst__call_double(*stack++), weight_decay = bst__call_double(*stack++);
    options.maximize = *stack++ & 1;
    options.stochastic = *stack++ & 1;
    options.seed = *stack++;
    options.first_number = (int64_t)*stack++;
    for (int64_t i = 0; i < number && call.status == BST_OK; i++)
        if (others[i] != tensors.count && (i < 4 || others[i]))
            call.status = bst__error(BST_INVALID,
                                     "optim_adamw: lists of %lld and of %lld tensors are given; all must "
                                     "be as long",
                                     (long long)tensors.count, (long long)others[i]);
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
};

bst_status bst__torch_bind_lists(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda) {
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (bst__torch.aoti_torch_library_def(fragment, operators[i].schema) ||
            bst__torch.aoti_torch_library_impl(cpu, operators[i].name, operators[i].kernel) ||
            bst__torch.aoti_torch_library_impl(cuda, operators[i].name, operators[i].kernel))
            return bst__error(BST_HOST, "torch: the operator bastile::%s could not be registered", operators[i].name);
    return BST_OK;
}
