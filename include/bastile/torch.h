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

/* ---- changes of Python's dictionaries ---------------------------------------------------------------------------- */

/* Whoever keeps what was found in many dictionaries, such as the modules of a model, needs not look into them again as
 * long as none has changed. CPython, from 3.12 on, calls a function for each change of a dictionary that it was told to
 * watch (PyDict_AddWatcher, PyDict_Watch): these are three, whose arguments are its PyDict_WatchCallback's. They return
 * 0 and call nothing of Python's. The first two count every change, each by itself. The third, of modules' own
 * dictionaries, counts by the key, where that has been named, and else as BST_PYTHON_ATTRIBUTES; in each way where a
 * dictionary is emptied, filled at once, or freed. */
enum bst_python_count {
    BST_PYTHON_NONE = -1, /* of a named key: does not count */
    BST_PYTHON_TABLES,    /* bst_python_table_event */
    BST_PYTHON_HOOKS,     /* bst_python_hook_event */
    BST_PYTHON_MODES,     /* named keys alone */
    BST_PYTHON_ATTRIBUTES,
    BST_PYTHON_COUNTS
};
BST_EXPORT int bst_python_table_event(int event, void *table, void *key, void *value);
BST_EXPORT int bst_python_hook_event(int event, void *hooks, void *key, void *value);
BST_EXPORT int bst_python_scope_event(int event, void *scope, void *key, void *value);

/* `name`: an interned str, which stays. Before any scope is watched; BST_INVALID behind the eighth, and of a count that
 * is not there. */
BST_API bst_status bst_python_count_name(const void *name, int count);

/* How many changes there have been, by enum bst_python_count. */
BST_EXPORT extern uint64_t bst_python_changes[BST_PYTHON_COUNTS];

/* While it is not 0, nothing counts: for changes of the caller's own, who knows of them. */
BST_EXPORT extern int bst_python_unseen;

#ifdef __cplusplus
}
#endif
#endif
