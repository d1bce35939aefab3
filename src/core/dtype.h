/* dtype.h - element types, as host and kernels number them. Kernels include it after ptx.cuh: no other header here. */
#ifndef BST_DTYPE_H
#define BST_DTYPE_H

#define BST_F32_CODE  0
#define BST_BF16_CODE 1
#define BST_F16_CODE  2
#define BST_I64_CODE  3
#define BST_I32_CODE  4
#define BST_U8_CODE   5

#ifndef BST_DEVICE
typedef enum bst_dtype {
    BST_F32 = BST_F32_CODE,
    BST_BF16 = BST_BF16_CODE,
    BST_F16 = BST_F16_CODE,
    BST_I64 = BST_I64_CODE,
    BST_I32 = BST_I32_CODE,
    BST_U8 = BST_U8_CODE
} bst_dtype;

enum { BST_DTYPES = BST_U8 + 1 };

/* Bytes of one element, and "float32". */
int bst__dtype_size(bst_dtype dtype);
const char *bst__dtype_name(bst_dtype dtype);
#endif

#endif
