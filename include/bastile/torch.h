/* torch.h - the library's side of PyTorch: what its Python package calls. A C program needs none of it. */
#ifndef BASTILE_TORCH_H
#define BASTILE_TORCH_H

#include "bastile.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Registers every operator with PyTorch as torch.ops.bastile.<name>, for CPU and CUDA tensors. `folder` holds
 * libtorch_cpu.so. Once a process. */
BST_API bst_status bst_torch_register(const char *folder);

/* Writes what a fake of operator `number` needs, from 0 on, in one line of at most `size` bytes (2048 suffice).
 * BST_INVALID behind the last.
 *
 *     swiglu_backward dy:=a a:*I b:=a want_da want_db -> da?:=a db?:=a
 *
 * its name; its arguments in the order of the schema, tensors with their shapes (`=a`: that of a; else as
 * src/core/describe.h has them); its results with theirs, `?` for one that its want_ asks for, `^b` for one whose
 * dimensions 1 and 2 are exchanged in memory where the argument b is true, `/b` for one element unless b is 2,
 * BST_REDUCTION_NONE, `+8`
 * for a matrix whose rows begin at multiples of 8 elements. */
BST_API bst_status bst_torch_describe(int number, char *text, size_t size);

/* The element types of its results, as numbered in src/core/dtype.h: types[r] for result r. `stack` has a number for
 * each argument: a tensor's type (-1: None), or the value of an integer or bool. */
BST_API bst_status bst_torch_result_types(int number, const int64_t *stack, int64_t *types);

/* From now on the operators that this thread calls compile what they would launch and compute nothing: of CPU tensors,
 * whose memory is not touched and which stand for those of the CUDA device with this index. arch 0: for the chip of
 * that device, so that the kernels are ready; 80, 86, 89, 90, 100 or 120: for that chip, which need not be there, into
 * the cache on disk. device -1: no longer. */
BST_API bst_status bst_torch_compile_ahead(int device, int arch);

/* Whether operators on PyTorch's CPU tensors run the GPU's kernels: 1 in a build with the emulated GPU, else 0. */
BST_API int bst_torch_emulates(void);

#ifdef __cplusplus
}
#endif
#endif
