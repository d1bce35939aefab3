/* heads.c - see heads.h. */
#include "core/heads.h"

#include <inttypes.h>

static bst_status need_unit_stride(const char *op, const char *name, const bst_view *v) {
    int last = v->dims - 1;
    if (v->size[last] < 2 || v->stride[last] == 1) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: the last dimension of %s is not contiguous; make it so", op, name);
}

bst_status bst__heads(const char *op, const char *name, const DLTensor *tensor, bst_view *out) {
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, out));
    BST_TRY(bst__need_dims(op, name, out, 4));
    if (out->size[3] > BST_MOST_HEAD_DIM)
        return bst__error(BST_UNSUPPORTED, "%s: %s has heads of %" PRId64 " elements; at most %d are supported", op,
                          name, out->size[3], BST_MOST_HEAD_DIM);
    return need_unit_stride(op, name, out);
}

bst_status bst__heads_like(const char *op, const char *name, const DLTensor *tensor, const bst_view *in,
                           const char *in_name, bst_view *out) {
    BST_TRY(bst__heads(op, name, tensor, out));
    BST_TRY(bst__need_same_shape(op, name, out, in_name, in));
    return bst__need_device(op, name, out, in, in_name);
}

bst_status bst__heads_beside(const char *op, const char *name, const DLTensor *tensor, const bst_view *q,
                             const char *q_name, bst_view *out) {
    if (!tensor) return BST_OK;
    BST_TRY(bst__heads(op, name, tensor, out));
    BST_TRY(bst__need_device(op, name, out, q, q_name));
    BST_TRY(bst__need_size(op, name, out, 0, q->size[0], "the batch of q"));
    BST_TRY(bst__need_size(op, name, out, 2, q->size[2], "the positions of q"));
    return bst__need_size(op, name, out, 3, q->size[3], "the size of q's heads");
}

bst_status bst__rotary_table(const char *op, const char *name, const DLTensor *tensor, const bst_view *q,
                             const char *q_name, bst_view *out) {
    BST_TRY(bst__view(op, name, BST_FLOATS, tensor, out));
    BST_TRY(bst__need_dims(op, name, out, 3));
    if (out->size[0] != q->size[0] && out->size[0] != 1)
        return bst__error(BST_INVALID, "%s: %s has shape %s; dimension 0 must be 1 or %" PRId64 ", that of %s", op,
                          name, bst__shape_text(out), q->size[0], q_name);
    BST_TRY(bst__need_size(op, name, out, 1, q->size[2], "the positions of q"));
    if (out->size[2] < 2 || out->size[2] % 2 || out->size[2] > q->size[3])
        return bst__error(BST_INVALID,
                          "%s: %s has shape %s; dimension 2 must be even, at least 2 and at most %" PRId64
                          ", the size of a head",
                          op, name, bst__shape_text(out), q->size[3]);
    BST_TRY(need_unit_stride(op, name, out));
    BST_TRY(bst__need_device(op, name, out, q, q_name));
    if (out->size[0] == 1) out->stride[0] = 0;
    return BST_OK;
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
