/* tensor_map.h - how a copy of a box finds its matrix: CUtensorMap, which only the driver writes. Host and kernels. */
#ifndef BST_TENSOR_MAP_H
#define BST_TENSOR_MAP_H

typedef struct bst_tensor_map {
    uint64_t words[16];
} __attribute__((aligned(64))) bst_tensor_map;

#define BST_BOX_ROWS    128 /* of a box, which is a tile of a product's operand */
#define BST_BOX_ACROSS  64  /* its rows, where they are what the product sums over */
#define BST_BOX_COLUMNS 64  /* 16-bit numbers: the 128 bytes that are swizzled together */

static_assert(sizeof(bst_tensor_map) == 128, "host and device must agree");

#endif
