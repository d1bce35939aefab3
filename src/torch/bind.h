/* bind.h - PyTorch operators out of descriptions (core/describe.h). A function's `torch` lists them as
 *
 *     "rms_norm_backward: dy x weight rstd casting -> dx? dweight?"
 *
 * the name, the arguments and attributes in the order of the schema, the results. `x!`: an optional argument that this
 * operator always has. `dx?`: made if a bool at the end of the schema, want_dx, says so, else a tensor of no elements.
 * `dx?=x`, `dx=x`: no result; it takes the place of the argument x. What is not named is not given. */
#ifndef BST_TORCH_BIND_H
#define BST_TORCH_BIND_H

#include "core/describe.h"
#include "torch/torch_api.h"

/* Gives the operators of all rooms of ops.def to PyTorch: schema, kernels for CPU and CUDA. */
bst_status bst__torch_bind_all(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda);
/* Those that take lists of tensors, of which no description speaks (lists.c). */
bst_status bst__torch_bind_lists(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda);
/* The kernel of an operator that has been bound; NULL: there is none of this name. */
bst_torch_kernel bst__torch_kernel(const char *name);

#endif
