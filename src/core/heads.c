/* heads.c - see heads.h. */
#include "core/heads.h"

#include <inttypes.h>

const char *const bst__head_symbols[] = {"Bthe batch of q", "Sthe positions of q", "Dthe size of a head",
                                         "Rthat of cos", NULL};

bst_status bst__need_heads(const char *op, const bst_view *views) {
    if (views[0].size[3] <= BST_MOST_HEAD_DIM) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: q has heads of %" PRId64 " elements; at most %d are supported", op,
                      views[0].size[3], BST_MOST_HEAD_DIM);
}

bst_status bst__need_rotary(const char *op, const bst_view *heads, const bst_view *table) {
    int64_t dim = heads->size[3], rotary = table->size[2];
    if (rotary >= 2 && rotary % 2 == 0 && rotary <= dim) return BST_OK;
    return bst__error(BST_INVALID,
                      "%s: cos has shape %s; dimension 2 must be even, at least 2 and at most %" PRId64
                      ", the size of a head",
                      op, bst__shape_text(table), dim);
}

int64_t bst__aligned(const bst_view *v, int64_t most) {
    int64_t size = bst__dtype_size(v->dtype);
    uint64_t bits = (uint64_t)(uintptr_t)v->data;
    for (int i = 0; i < v->dims - 1; i++)
        if (v->size[i] > 1) bits |= (uint64_t)(v->stride[i] * size);
    while (most > 1 && bits % (uint64_t)(most * size)) most /= 2;
    return most;
}

int64_t bst__rotary_vector(int64_t dim, int64_t rotary, int64_t most) {
    while (rotary / 2 % most || (dim > rotary && dim % most)) most /= 2;
    return most;
}

int64_t bst__rotary_pieces(int64_t dim, int64_t rotary, int64_t vec, bool interleaved) {
    int64_t lanes = dim / vec;
    bool in_a_warp = lanes <= 32 && !(lanes & (lanes - 1));
    return in_a_warp && rotary == dim && !interleaved ? 1 : 2;
}

int64_t bst__rotary_lanes(int64_t dim, int64_t rotary, int64_t vec, int64_t pieces) {
    return rotary / pieces / vec + (dim - rotary + 2 * vec - 1) / (2 * vec);
}
