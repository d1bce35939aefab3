/* lists.h - PyTorch operators that take lists of tensors, of which no description speaks. */
#ifndef BST_TORCH_LISTS_H
#define BST_TORCH_LISTS_H

#include "core/core.h"
#include "torch/torch_api.h"

/* Gives them to PyTorch: schema, kernels for CPU and CUDA. */
bst_status bst__torch_bind_lists(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda);

#endif
