/* tile_product.h - the tiles of tile_product.cuh, as host and kernels see them. */
#ifndef BST_TILE_PRODUCT_H
#define BST_TILE_PRODUCT_H

#include "tensor_map.h"

#define BST_TILE_ROWS    BST_BOX_ROWS
#define BST_TILE_COLUMNS (2 * BST_BOX_ROWS)
#define BST_TILE_THREADS 384
#define BST_TILE_STAGES  4  /* pieces of the products' terms in shared memory */
#define BST_TILE_DEPTH   16 /* of a piece's columns, what one product takes */

#define BST_TILE_X_BYTES (BST_TILE_ROWS * BST_BOX_COLUMNS * 2)
#define BST_TILE_W_BYTES (BST_TILE_COLUMNS * BST_BOX_COLUMNS * 2)
/* Of a block: the stages begin at a multiple of 1024. */
#define BST_TILE_SHARED (BST_TILE_STAGES * (BST_TILE_X_BYTES + BST_TILE_W_BYTES) + 1024)

/* Pairs of tiles of rows (without clusters: tiles), tiles of columns, and how many of the first stay in the L2 while
 * all columns pass. */
typedef struct bst_tiles {
    int32_t pairs, columns, group;
} bst_tiles;

#endif
