/* row_map.h - where the rows of a tensor begin. Shared by host and kernels. */
#ifndef BST_ROW_MAP_H
#define BST_ROW_MAP_H

/* Row r begins at (r / inner) * outer_stride + (r % inner) * inner_stride, in elements. */
typedef struct bst_row_map {
    int64_t inner, inner_stride, outer_stride;
} bst_row_map;

static_assert(sizeof(bst_row_map) == 24, "host and device must agree");

#ifdef BST_DEVICE
/* `folded` (a constant) says that one stride describes all rows, which saves the division. */
BST_DEVICE int64_t bst_row_start(const bst_row_map *map, int64_t row, bool folded) {
    if (folded) return row * map->inner_stride;
    return row / map->inner * map->outer_stride + row % map->inner * map->inner_stride;
}
#else
#include "core/core.h"

static inline bst_row_map bst__row_map(const bst_rows *r) {
    return (bst_row_map){r->inner, r->inner_stride, r->outer_stride};
}
/* Whether one stride describes all rows. */
static inline bool bst__rows_folded(const bst_rows *r) { return r->inner == r->rows; }
#endif

#endif
