/* call.c - see call.h. */
#include "torch/call.h"

#include <stdlib.h>
#include <string.h>

#include "bastile/torch.h"
#include "cuda/compile_only.h"

bst_torch_api bst__torch;

/* ---- types and devices ------------------------------------------------------------------------------------------- */

static int32_t torch_dtype(DLDataType type) {
#define NUMBER(name, of_code, of_bits) \
    if (type.code == of_code && type.bits == of_bits) return bst__torch.number_of_##name;
    BST_TORCH_TYPES(NUMBER)
#undef NUMBER
    return -1; /* none of PyTorch's: it refuses it */
}

static DLDataType dl_type(int32_t dtype) {
#define TYPE(name, code, bits) \
    if (dtype == bst__torch.number_of_##name) return (DLDataType){code, bits, 1};
    BST_TORCH_TYPES(TYPE)
#undef TYPE
    return (DLDataType){kDLOpaqueHandle, 0, 1}; /* any other: the operator's check refuses it */
}

int bst_torch_emulates(void) {
#ifdef BST_EMULATE
    return 1;
#else
    return 0;
#endif
}

static DLDevice dl_device(int32_t type, int32_t index) {
    int ahead;
    if (bst__compiling_ahead(&ahead)) return (DLDevice){kDLCUDA, ahead};
    /* The emulated GPU works on host memory: PyTorch's CPU tensors are its device tensors. */
    bool cuda = bst_torch_emulates() || type == bst__torch.aoti_torch_device_type_cuda();
    return cuda ? (DLDevice){kDLCUDA, index < 0 ? 0 : index} : (DLDevice){kDLCPU, 0};
}

/* ---- what the library may use of PyTorch ------------------------------------------------------------------------- */

static bst_status torch_error(const char *doing) {
    const char *what = bst__torch.torch_exception_get_what_without_backtrace
                           ? bst__torch.torch_exception_get_what_without_backtrace()
                           : NULL;
    return bst__error(BST_HOST, "PyTorch failed while %s: %s", doing, what ? what : "(no message)");
}

static void *allocate(void *user, DLDevice device, size_t bytes) {
    (void)device;
    bst_call *call = user;
    int64_t size = (int64_t)bytes, stride = 1;
    if (call->workspaces == BST_CALL_WORKSPACES) return NULL;
    bst_torch_tensor handle;
    void *memory = NULL;
    if (bst__torch.aoti_torch_empty_strided(1, &size, &stride, bst__torch.number_of_uint8, call->device_type,
                                            call->device_index, &handle))
        return NULL;
    if (bst__torch.aoti_torch_get_data_ptr(handle, &memory)) {
        bst__torch.aoti_torch_delete_tensor_object(handle);
        return NULL;
    }
    call->workspace[call->workspaces].memory = memory;
    call->workspace[call->workspaces++].handle = handle;
    return memory;
}

static void release(void *user, DLDevice device, void *memory) {
    (void)device;
    bst_call *call = user;
    for (int i = 0; i < call->workspaces; i++) {
        if (call->workspace[i].memory != memory) continue;
        bst__torch.aoti_torch_delete_tensor_object(call->workspace[i].handle);
        call->workspace[i] = call->workspace[--call->workspaces];
        return;
    }
}

typedef struct range_body {
    bst_body body;
    void *context;
} range_body;

static void run_range(int64_t begin, int64_t end, void *context) {
    const range_body *r = context;
    r->body(r->context, begin, end);
}

static void parallel_for(void *user, int64_t count, int64_t grain, bst_body body, void *context) {
    (void)user;
    range_body r = {body, context};
    bst__torch.torch_parallel_for(0, count, grain, run_range, &r);
}

/* A matrix of `rows` x `columns` in the caller's memory; transposed: stored the other way round. */
static bool wrap(const void *data, int64_t rows, int64_t columns, int64_t leading, bool transposed, DLDataType type,
                 bst_torch_tensor *out) {
    int64_t size[] = {rows, columns}, stride[] = {transposed ? 1 : leading, transposed ? leading : 1};
    return !bst__torch.aoti_torch_create_tensor_from_blob((void *)(uintptr_t)data, 2, size, stride, 0,
                                                          torch_dtype(type), bst__torch.aoti_torch_device_type_cpu(),
                                                          -1, out);
}

static bst_status gemm(void *user, const bst_gemm *g) {
    (void)user;
    if (g->input_type.code != g->output_type.code || g->input_type.bits != g->output_type.bits)
        return bst__error(BST_UNSUPPORTED, "gemm: PyTorch's CPU product writes the type it reads");
    bst_torch_tensor a = NULL, b = NULL, out = NULL;
    bst_status status = BST_OK;
    float alpha = g->device_alpha ? *g->device_alpha : g->alpha;
    if (!wrap(g->a, g->m, g->k, g->lda, g->a_transposed, g->input_type, &a) ||
        !wrap(g->b, g->k, g->n, g->ldb, g->b_transposed, g->input_type, &b) ||
        !wrap(g->out, g->m, g->n, g->ldo, false, g->output_type, &out))
        status = torch_error("wrapping a matrix");
    else if (bst__torch.aoti_torch_cpu_addmm_out(out, out, a, b, g->beta, alpha))
        status = torch_error("multiplying matrices");
    bst_torch_tensor wrapped[] = {a, b, out};
    for (int i = 0; i < 3; i++)
        if (wrapped[i]) bst__torch.aoti_torch_delete_tensor_object(wrapped[i]);
    return status;
}

/* ---- the call ---------------------------------------------------------------------------------------------------- */

void bst__call_begin(bst_call *call) {
    call->exec = (bst_exec){.size = sizeof(bst_exec),
                            .user = call,
                            .allocate = allocate,
                            .release = release,
                            .parallel_for = parallel_for,
                            .gemm = gemm};
    call->status = BST_OK;
    call->tensors = call->workspaces = call->lists = 0;
    call->device_type = -1;
}

/* The first failure is the one that is told. */
static void fail(bst_call *call, const char *doing) {
    if (call->status == BST_OK) call->status = torch_error(doing);
}

/* Where the first tensor lies, the call runs. */
static void describe(bst_call *call, bst_torch_tensor handle, DLTensor *t) {
    *t = (DLTensor){0};
    int64_t dims = 0;
    int32_t dtype = -1, type = -1, index = 0;
    if (bst__torch.aoti_torch_get_dim(handle, &dims) || bst__torch.aoti_torch_get_sizes(handle, &t->shape) ||
        bst__torch.aoti_torch_get_strides(handle, &t->strides) || bst__torch.aoti_torch_get_dtype(handle, &dtype) ||
        bst__torch.aoti_torch_get_device_type(handle, &type) ||
        bst__torch.aoti_torch_get_device_index(handle, &index) || bst__torch.aoti_torch_get_data_ptr(handle, &t->data))
        fail(call, "reading a tensor");
    t->ndim = t->shape ? (int32_t)dims : 0;
    t->dtype = dl_type(dtype);
    t->device = dl_device(type, index);
    if (call->device_type >= 0) return;
    call->device_type = type;
    call->device_index = index;
    if (index >= 0 && t->device.device_type == kDLCUDA && bst__torch.aoti_torch_get_current_cuda_stream)
        bst__torch.aoti_torch_get_current_cuda_stream(index, &call->exec.stream);
}

/* Takes a handle over, and describes it. */
static DLTensor *adopt(bst_call *call, bst_torch_tensor handle) {
    int slot = call->tensors++;
    call->handle[slot] = handle;
    describe(call, handle, &call->tensor[slot]);
    return &call->tensor[slot];
}

static void no_list(bst_call *call, size_t length) {
    if (call->status == BST_OK)
        call->status = bst__error(BST_NO_MEMORY, "a list of length %zu could not be allocated", length);
}

DLTensor *const *bst__call_list(bst_call *call, bst_torch_value value, int64_t *count) {
    bst_torch_list handle = (bst_torch_list)(uintptr_t)value;
    bst_call_list *list = &call->list[call->lists++];
    size_t length = 0;
    if (bst__torch.torch_list_size(handle, &length)) fail(call, "reading a list");
    /* One more of each, so that none is of no bytes. */
    *list = (bst_call_list){.tensor = calloc(length + 1, sizeof *list->tensor),
                            .pointer = calloc(length + 1, sizeof *list->pointer),
                            .handle = calloc(length + 1, sizeof *list->handle)};
    bool memory = list->tensor && list->pointer && list->handle;
    if (!memory) no_list(call, length);
    for (size_t i = 0; i < length; i++) {
        bst_torch_value item;
        if (bst__torch.torch_list_get_item(handle, i, &item)) {
            fail(call, "reading a list");
            break;
        }
        bst_torch_tensor tensor = (bst_torch_tensor)(uintptr_t)item;
        if (!memory) {
            bst__torch.aoti_torch_delete_tensor_object(tensor);
            continue;
        }
        list->handle[i] = tensor;
        list->pointer[i] = &list->tensor[i];
        describe(call, tensor, &list->tensor[i]);
        list->count++;
    }
    bst__torch.torch_delete_list(handle);
    *count = list->count;
    return list->count ? list->pointer : NULL;
}

const int64_t *bst__call_integers(bst_call *call, bst_torch_value value, int64_t *count) {
    bst_torch_list handle = (bst_torch_list)(uintptr_t)value;
    bst_call_list *list = &call->list[call->lists++];
    size_t length = 0;
    if (bst__torch.torch_list_size(handle, &length)) fail(call, "reading a list");
    *list = (bst_call_list){.integer = calloc(length + 1, sizeof *list->integer)};
    if (!list->integer) no_list(call, length);
    *count = 0;
    for (size_t i = 0; list->integer && i < length; i++) {
        bst_torch_value item;
        if (bst__torch.torch_list_get_item(handle, i, &item)) {
            fail(call, "reading a list");
            break;
        }
        list->integer[(*count)++] = (int64_t)item;
    }
    bst__torch.torch_delete_list(handle);
    return list->integer;
}

static void free_lists(bst_call *call) {
    for (int i = 0; i < call->lists; i++) {
        const bst_call_list *list = &call->list[i];
        for (int64_t k = 0; k < list->count; k++) bst__torch.aoti_torch_delete_tensor_object(list->handle[k]);
        free(list->tensor);
        free(list->pointer);
        free(list->handle);
        free(list->integer);
    }
}

DLTensor *bst__call_in_place(bst_call *call, bst_torch_value value) {
    return adopt(call, (bst_torch_tensor)(uintptr_t)value);
}

/* The tensor itself after a failure: what describes it may be read on, and no operator will run. */
static DLTensor *contiguous_copy(bst_call *call, DLTensor *tensor, DLDataType dtype) {
    bst_torch_tensor source = call->handle[tensor - call->tensor];
    DLTensor *copy = bst__call_empty(call, tensor->ndim, tensor->shape, NULL, dtype);
    int ahead;
    if (!copy) return tensor;
    if (bst__compiling_ahead(&ahead)) return copy;
    if (bst__torch.aoti_torch_copy_(call->handle[copy - call->tensor], source, 0)) fail(call, "copying a tensor");
    return copy;
}

DLTensor *bst__call_tensor(bst_call *call, bst_torch_value value) {
    DLTensor *tensor = bst__call_in_place(call, value);
    unsigned bytes = tensor->dtype.bits / 8;
    return bytes && (uintptr_t)tensor->data % bytes ? contiguous_copy(call, tensor, tensor->dtype) : tensor;
}

DLTensor *bst__call_labels(bst_call *call, bst_torch_value value) {
    const DLDataType i64 = {kDLInt, 64, 1};
    DLTensor *tensor = bst__call_tensor(call, value);
    if (tensor->dtype.code == kDLUInt && tensor->dtype.bits == 8) return contiguous_copy(call, tensor, i64);
    return bst__call_contiguous(call, tensor);
}

/* What is in a box, which it deletes. */
static bst_torch_value unboxed(bst_torch_value *boxed) {
    bst_torch_value inner = *boxed;
    if (bst__torch.torch_delete_stable_ivalue)
        bst__torch.torch_delete_stable_ivalue(boxed);
    else
        bst__torch.operator_delete(boxed);
    return inner;
}

DLTensor *bst__call_optional(bst_call *call, bst_torch_value value) {
    return value ? bst__call_tensor(call, unboxed((bst_torch_value *)(uintptr_t)value)) : NULL;
}

DLTensor *bst__call_optional_in_place(bst_call *call, bst_torch_value value) {
    return value ? bst__call_in_place(call, unboxed((bst_torch_value *)(uintptr_t)value)) : NULL;
}

/* Whether there is nothing to lay out: without looking any further, as is mostly so. */
static bool is_packed(const DLTensor *t) {
    int64_t packed = 1;
    for (int i = t->ndim - 1; i >= 0; packed *= t->shape[i--])
        if (t->shape[i] != 1 && t->strides[i] != packed) return false;
    return true;
}

DLTensor *bst__call_rows(bst_call *call, DLTensor *tensor) {
    bst_view view;
    bst_rows rows;
    if (call->status != BST_OK || !tensor || is_packed(tensor) || bst__view("", "", ~0u, tensor, &view) != BST_OK)
        return tensor;
    if (view.dims == 0 || bst__rows("", "", &view, &rows) == BST_OK) return tensor;
    return contiguous_copy(call, tensor, tensor->dtype);
}

DLTensor *bst__call_contiguous(bst_call *call, DLTensor *tensor) {
    bst_view view;
    if (call->status != BST_OK || !tensor || is_packed(tensor) || bst__view("", "", ~0u, tensor, &view) != BST_OK)
        return tensor;
    return bst__is_contiguous(&view) ? tensor : contiguous_copy(call, tensor, tensor->dtype);
}

double bst__call_double(bst_torch_value value) {
    double result;
    memcpy(&result, &value, sizeof result);
    return result;
}

DLTensor *bst__call_empty(bst_call *call, int dims, const int64_t *sizes, const int64_t *strides, DLDataType dtype) {
    enum { MOST_DIMS = 64 }; /* more than any operator takes: with fewer, its own check names the argument */
    if (call->status != BST_OK) return NULL;
    if (call->tensors == BST_CALL_TENSORS) {
        call->status = bst__error(BST_HOST, "an operator has more than %d tensors", BST_CALL_TENSORS);
        return NULL;
    }
    if (dims > MOST_DIMS) {
        call->status =
            bst__error(BST_UNSUPPORTED, "a tensor has %d dimensions; 0 to %d are supported", dims, BST_MAX_DIMS);
        return NULL;
    }
    int64_t packed[MOST_DIMS], step = 1;
    for (int i = dims - 1; i >= 0; i--) {
        packed[i] = step;
        step *= sizes[i] > 1 ? sizes[i] : 1;
    }
    bst_torch_tensor handle;
    if (bst__torch.aoti_torch_empty_strided(dims, sizes, strides ? strides : packed, torch_dtype(dtype),
                                            call->device_type, call->device_index, &handle)) {
        fail(call, "allocating a tensor");
        return NULL;
    }
    return adopt(call, handle);
}

DLTensor *bst__call_heads(bst_call *call, const DLTensor *model, bool tokens_first, DLDataType dtype) {
    if (!model) return NULL;
    if (!tokens_first || model->ndim != 4) return bst__call_empty(call, model->ndim, model->shape, NULL, dtype);
    int64_t size[4];
    for (int i = 0; i < 4; i++) size[i] = model->shape[i] > 1 ? model->shape[i] : 1;
    int64_t strides[] = {size[2] * size[1] * size[3], size[3], size[1] * size[3], 1};
    return bst__call_empty(call, 4, model->shape, strides, dtype);
}

void bst__call_end(bst_call *call, bst_torch_value *stack, int results, DLTensor *const *result) {
    static const int64_t none = 0;
    DLTensor *made[BST_CALL_TENSORS];
    for (int r = 0; r < results; r++)
        made[r] = result[r] ? result[r] : bst__call_empty(call, 1, &none, NULL, bst__dl_type(BST_F32));
    /* All or nothing: what is on the stack belongs to PyTorch, which looks at it after a success only. */
    for (int r = 0; r < results && call->status == BST_OK; r++) {
        bst_torch_tensor *slot = &call->handle[made[r] - call->tensor];
        stack[r] = (bst_torch_value)(uintptr_t)*slot;
        *slot = NULL;
    }
    for (int i = 0; i < call->workspaces; i++) bst__torch.aoti_torch_delete_tensor_object(call->workspace[i].handle);
    for (int i = 0; i < call->tensors; i++)
        if (call->handle[i]) bst__torch.aoti_torch_delete_tensor_object(call->handle[i]);
    free_lists(call);
    if (call->status == BST_OK) return;
    char message[1100];
    message[0] = 0;
    strncat(message, "bastile: ", sizeof message - 1);
    strncat(message, bst_last_error(), sizeof message - strlen(message) - 1);
    bst__torch.aoti_torch_check(false, __func__, __FILE__, __LINE__, message);
}
