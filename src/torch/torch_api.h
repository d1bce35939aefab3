/* torch_api.h - the few of PyTorch's stable C functions that we call (torch/csrc/inductor/aoti_torch/c/shim.h and
 * torch/csrc/stable/c/shim.h, whose own headers are C++). They are looked up when the operators are registered: this
 * library loads without PyTorch, and one file serves every release from 2.10 on.
 *
 * All but those noted return 0 for success; torch_exception_get_what says what failed. */
#ifndef BST_TORCH_API_H
#define BST_TORCH_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bst_torch_tensor_opaque *bst_torch_tensor;
typedef struct bst_torch_library_opaque *bst_torch_library;
typedef struct bst_torch_list_opaque *bst_torch_list;
/* An operator's argument or result in 64 bits: a tensor's handle (owned by whoever receives it), a list's handle (owned
 * likewise, and so are the values in it), an integer, the bits of a double, a bool, or for `T?` a pointer to such a
 * value (NULL: None; owned by the receiver too). */
typedef uint64_t bst_torch_value;
typedef void (*bst_torch_kernel)(bst_torch_value *stack, uint64_t inputs, uint64_t outputs);

/* X(return type, name, arguments): must exist. */
#define BST_TORCH_FUNCTIONS(X)                                                                                     \
    X(int32_t, aoti_torch_library_init_fragment, (const char *, const char *, uint32_t, bst_torch_library *))      \
    X(int32_t, aoti_torch_library_init_impl,                                                                       \
      (const char *, const char *, const char *, uint32_t, bst_torch_library *))                                   \
    X(int32_t, aoti_torch_library_def, (bst_torch_library, const char *))                                          \
    X(int32_t, aoti_torch_library_impl, (bst_torch_library, const char *, bst_torch_kernel))                       \
    X(int32_t, aoti_torch_delete_tensor_object, (bst_torch_tensor))                                                \
    X(int32_t, aoti_torch_get_data_ptr, (bst_torch_tensor, void **))                                               \
    X(int32_t, aoti_torch_get_dim, (bst_torch_tensor, int64_t *))                                                  \
    X(int32_t, aoti_torch_get_sizes, (bst_torch_tensor, int64_t **))                                               \
    X(int32_t, aoti_torch_get_strides, (bst_torch_tensor, int64_t **))                                             \
    X(int32_t, aoti_torch_get_dtype, (bst_torch_tensor, int32_t *))                                                \
    X(int32_t, aoti_torch_get_device_type, (bst_torch_tensor, int32_t *))                                          \
    X(int32_t, aoti_torch_get_device_index, (bst_torch_tensor, int32_t *))                                         \
    X(int32_t, aoti_torch_empty_strided,                                                                           \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, bst_torch_tensor *))                  \
    X(int32_t, aoti_torch_create_tensor_from_blob,                                                                 \
      (void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, bst_torch_tensor *)) \
    X(int32_t, aoti_torch_copy_, (bst_torch_tensor, bst_torch_tensor, int32_t))                                    \
    X(int32_t, aoti_torch_cpu_addmm_out,                                                                           \
      (bst_torch_tensor, bst_torch_tensor, bst_torch_tensor, bst_torch_tensor, double, double))                    \
    X(int32_t, torch_list_size, (bst_torch_list, size_t *))                                                        \
    X(int32_t, torch_list_get_item, (bst_torch_list, size_t, bst_torch_value *))                                   \
    X(int32_t, torch_delete_list, (bst_torch_list)) /* not what is in it */                                        \
    X(int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *))        \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                                                 \
    X(int32_t, aoti_torch_device_type_cuda, (void))                                                                \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *)) /* throws where false */

/* X(name, DLPack's code, bits): types that a tensor may come in, those that operators serve first. */
#define BST_TORCH_TYPES(X)       \
    X(float32, kDLFloat, 32)     \
    X(bfloat16, kDLBfloat, 16)   \
    X(float16, kDLFloat, 16)     \
    X(int64, kDLInt, 64)         \
    X(int32, kDLInt, 32)         \
    X(uint8, kDLUInt, 8)         \
    X(uint16, kDLUInt, 16)       \
    X(uint32, kDLUInt, 32)       \
    X(uint64, kDLUInt, 64)       \
    X(int16, kDLInt, 16)         \
    X(int8, kDLInt, 8)           \
    X(bool, kDLBool, 8)          \
    X(float64, kDLFloat, 64)     \
    X(complex32, kDLComplex, 32) \
    X(complex64, kDLComplex, 64) \
    X(complex128, kDLComplex, 128)

/* May be absent: from a CPU build, or from an older release. */
#define BST_TORCH_OPTIONAL_FUNCTIONS(X)                                \
    X(int32_t, aoti_torch_get_current_cuda_stream, (int32_t, void **)) \
    X(int32_t, torch_delete_stable_ivalue, (bst_torch_value *))        \
    X(const char *, torch_exception_get_what_without_backtrace, (void))

typedef struct bst_torch_api {
#define BST_TORCH_MEMBER(type, name, arguments) type(*name) arguments;
    BST_TORCH_FUNCTIONS(BST_TORCH_MEMBER)
    BST_TORCH_OPTIONAL_FUNCTIONS(BST_TORCH_MEMBER)
#undef BST_TORCH_MEMBER
#define BST_TORCH_TYPE_MEMBER(name, code, bits) int32_t number_of_##name; /* asked for once: each call reads them */
    BST_TORCH_TYPES(BST_TORCH_TYPE_MEMBER)
#undef BST_TORCH_TYPE_MEMBER
    void (*operator_delete)(void *); /* frees a `T?` where torch_delete_stable_ivalue does not exist yet */
} bst_torch_api;

extern bst_torch_api bst__torch;

#endif
