/* call.h - one call of a PyTorch operator: its tensors as DLTensors, its outputs, its workspace, its end.
 *
 * A kernel begins a call, takes its arguments, allocates its outputs, runs the function and ends the call. Everything
 * taken is owned by the call; the end frees it, and either hands the outputs to PyTorch or throws the error. The first
 * failure is remembered, and what follows it does nothing, so that a kernel need not check each step: it asks for the
 * status before it looks at what it has taken, and before it runs the function. */
#ifndef BST_TORCH_CALL_H
#define BST_TORCH_CALL_H

#include "core/core.h"
#include "torch/torch_api.h"

enum { BST_CALL_TENSORS = 24, BST_CALL_WORKSPACES = 12, BST_CALL_LISTS = 8 };

/* A list of tensors or of integers, of any length. */
typedef struct bst_call_list {
    int64_t count;
    DLTensor *tensor, **pointer; /* pointer[i] = &tensor[i], as functions take lists */
    bst_torch_tensor *handle;
    int64_t *integer;
} bst_call_list;

typedef struct bst_call {
    bst_exec exec;
    bst_status status;
    int32_t device_type, device_index; /* PyTorch's numbers, of the first tensor */
    int tensors, workspaces, lists;
    bst_torch_tensor handle[BST_CALL_TENSORS];
    DLTensor tensor[BST_CALL_TENSORS];
    struct {
        void *memory;
        bst_torch_tensor handle;
    } workspace[BST_CALL_WORKSPACES];
    bst_call_list list[BST_CALL_LISTS];
} bst_call;

void bst__call_begin(bst_call *call);
/* An argument, never NULL; a copy where its data is not aligned to its elements. */
DLTensor *bst__call_tensor(bst_call *call, bst_torch_value value);
/* The same for labels, which are contiguous: int64, or uint8, which PyTorch's losses take too and which are
 * converted. */
DLTensor *bst__call_labels(bst_call *call, bst_torch_value value);
/* The same for one that is written to: never a copy. */
DLTensor *bst__call_in_place(bst_call *call, bst_torch_value value);
/* The same for one that may be None: NULL. */
DLTensor *bst__call_optional(bst_call *call, bst_torch_value value);
DLTensor *bst__call_optional_in_place(bst_call *call, bst_torch_value value);
/* One of the above or NULL, or a copy of it without gaps where it has any. */
DLTensor *bst__call_contiguous(bst_call *call, DLTensor *tensor);
/* The same where its strides do not fold into rows. */
DLTensor *bst__call_rows(bst_call *call, DLTensor *tensor);
/* A list of tensors, each as it is: pointers to them, NULL where there are none; its length in *count. */
DLTensor *const *bst__call_list(bst_call *call, bst_torch_value value, int64_t *count);
/* A list of integers, never NULL but where memory is short. */
const int64_t *bst__call_integers(bst_call *call, bst_torch_value value, int64_t *count);
double bst__call_double(bst_torch_value value);
/* A new tensor, contiguous or with the given strides, on the call's device. NULL after a failure. */
DLTensor *bst__call_empty(bst_call *call, int dims, const int64_t *sizes, const int64_t *strides, DLDataType dtype);
/* Shaped as a [B, heads, S, D] `model`, dense; tokens_first: in the memory order [B, S, heads, D]. NULL for NULL. */
DLTensor *bst__call_heads(bst_call *call, const DLTensor *model, bool tokens_first, DLDataType dtype);
/* Ends the call: results in order, each from the functions above (an input may be a result too); NULL: a tensor of no
 * elements, which stands for None. Returns only if the call succeeded. */
void bst__call_end(bst_call *call, bst_torch_value *stack, int results, DLTensor *const *result);

#endif
