/* view.c - reading tensors and saying what is wrong with them. One sentence per fault, made in one place. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/core.h"

int bst__dtype_size(bst_dtype dtype) {
    static const int size[] = {[BST_F32] = 4, [BST_BF16] = 2, [BST_F16] = 2,
                               [BST_I64] = 8, [BST_I32] = 4,  [BST_U8] = 1};
    return size[dtype];
}

const char *bst__dtype_name(bst_dtype dtype) {
    static const char *const name[] = {[BST_F32] = "float32", [BST_BF16] = "bfloat16", [BST_F16] = "float16",
                                       [BST_I64] = "int64",   [BST_I32] = "int32",     [BST_U8] = "uint8"};
    return name[dtype];
}

const char *bst__write_shape(const bst_view *v, char text[BST_SHAPE_TEXT]) {
    size_t at = (size_t)snprintf(text, BST_SHAPE_TEXT, "[");
    for (int i = 0; i < v->dims && at < BST_SHAPE_TEXT; i++)
        at += (size_t)snprintf(text + at, BST_SHAPE_TEXT - at, "%s%" PRId64, i ? ", " : "", v->size[i]);
    if (at < BST_SHAPE_TEXT) snprintf(text + at, BST_SHAPE_TEXT - at, "]");
    return text;
}

/* "float32, bfloat16 or float16". */
static const char *set_text(unsigned dtypes, char text[96]) {
    for (int d = BST_F32; d < BST_DTYPES; d++) {
        if (!(dtypes & 1u << d)) continue;
        unsigned left = dtypes >> (d + 1);
        if (text[0]) strcat(text, left ? ", " : " or ");
        strcat(text, bst__dtype_name((bst_dtype)d));
    }
    return text;
}

/* "int16", "complex64", as PyTorch and NumPy call them. */
static const char *type_text(DLDataType type, char text[96]) {
    static const char *const kind[] = {[kDLInt] = "int",       [kDLUInt] = "uint",       [kDLFloat] = "float",
                                       [kDLBfloat] = "bfloat", [kDLComplex] = "complex", [kDLBool] = "bool"};
    const char *name = type.code < sizeof kind / sizeof *kind ? kind[type.code] : NULL;
    int used = !name                  ? snprintf(text, 96, "no. %d in DLPack", type.code)
               : type.code == kDLBool ? snprintf(text, 96, "%s", name)
                                      : snprintf(text, 96, "%s%d", name, type.bits);
    if (type.lanes != 1) snprintf(text + used, 96 - (size_t)used, " in vectors of %d", type.lanes);
    return text;
}

static bool read_dtype(DLDataType type, bst_dtype *out) {
    if (type.lanes != 1) return false;
    if (type.code == kDLFloat && type.bits == 32) return *out = BST_F32, true;
    if (type.code == kDLFloat && type.bits == 16) return *out = BST_F16, true;
    if (type.code == kDLBfloat && type.bits == 16) return *out = BST_BF16, true;
    if (type.code == kDLInt && type.bits == 64) return *out = BST_I64, true;
    if (type.code == kDLInt && type.bits == 32) return *out = BST_I32, true;
    if (type.code == kDLUInt && type.bits == 8) return *out = BST_U8, true;
    return false;
}

DLDataType bst__dl_type(bst_dtype dtype) {
    static const DLDataType type[] = {[BST_F32] = {kDLFloat, 32, 1}, [BST_BF16] = {kDLBfloat, 16, 1},
                                      [BST_F16] = {kDLFloat, 16, 1}, [BST_I64] = {kDLInt, 64, 1},
                                      [BST_I32] = {kDLInt, 32, 1},   [BST_U8] = {kDLUInt, 8, 1}};
    return type[dtype];
}

bst_status bst__view(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor, bst_view *out) {
    if (!tensor) return bst__error(BST_INVALID, "%s: %s is NULL; a tensor is needed", op, name);
    if (tensor->ndim < 0 || tensor->ndim > BST_MAX_DIMS)
        return bst__error(tensor->ndim < 0 ? BST_INVALID : BST_UNSUPPORTED,
                          "%s: %s has %d dimensions; 0 to %d are supported", op, name, tensor->ndim, BST_MAX_DIMS);
    if (tensor->device.device_type != kDLCPU && tensor->device.device_type != kDLCUDA)
        return bst__error(BST_UNSUPPORTED, "%s: %s is on a device of DLPack type %d; CPU (1) or CUDA (2) is needed", op,
                          name, (int)tensor->device.device_type);
    if (tensor->ndim && !tensor->shape)
        return bst__error(BST_INVALID, "%s: %s has %d dimensions, but its shape is NULL", op, name, tensor->ndim);
    if (tensor->device.device_type == kDLCPU) BST_TRY(bst__need_cpu_level(op));
    bst_dtype dtype;
    if (!read_dtype(tensor->dtype, &dtype) || !(dtypes & 1u << dtype))
        return bst__error(BST_UNSUPPORTED, "%s: %s has elements of type %s; %s is needed", op, name,
                          type_text(tensor->dtype, (char[96]){0}), set_text(dtypes, (char[96]){0}));
    *out = (bst_view){.device = tensor->device, .dtype = dtype, .dims = tensor->ndim};
    /* Dimensions without elements do not count here: however the others are multiplied, 63 bits suffice. */
    int64_t packed = 1, reach = 0, span;
    bool empty = false, overflow = false;
    for (int i = out->dims - 1; i >= 0; i--) {
        int64_t size = tensor->shape[i];
        /* The stride of a dimension of one element says nothing, and may be any number. */
        int64_t stride = tensor->strides && size > 1 ? tensor->strides[i] : packed;
        out->size[i] = size;
        out->stride[i] = stride;
        if (size < 0) return bst__error(BST_INVALID, "%s: %s has a negative size in dimension %d", op, name, i);
        empty |= !size;
        if (size < 2) continue;
        bool wide = __builtin_mul_overflow(packed, size, &packed);
        bool far = __builtin_mul_overflow(size, stride, &span);
        overflow = overflow || wide || far;
        if (__builtin_add_overflow(reach, span < 0 ? ~span : span, &reach)) overflow = true;
    }
    out->count = empty ? 0 : packed;
    int bytes = bst__dtype_size(dtype);
    if (overflow || packed > INT64_MAX / bytes || reach > INT64_MAX / bytes)
        return bst__error(BST_INVALID, "%s: %s has a shape or strides that 63 bits cannot address", op, name);
    if (!tensor->data && out->count)
        return bst__error(BST_INVALID, "%s: %s has shape %s but no memory", op, name, bst__shape_text(out));
    out->data = tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL;
    if (!out->count || (uintptr_t)out->data % (unsigned)bytes == 0) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: %s does not begin at a multiple of its elements' %d bytes; copy it", op,
                      name, bytes);
}

bst_status bst__need_dims(const char *op, const char *name, const bst_view *v, int dims) {
    if (v->dims == dims) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; %d dimensions are needed", op, name, bst__shape_text(v), dims);
}

bst_status bst__need_size(const char *op, const char *name, const bst_view *v, int dim, int64_t size, const char *why) {
    if (dim < v->dims && v->size[dim] == size) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; dimension %d must be %" PRId64 ", %s", op, name,
                      bst__shape_text(v), dim, size, why);
}

bst_status bst__need_same_shape(const char *op, const char *name, const bst_view *v, const char *other_name,
                                const bst_view *other) {
    bool same = v->dims == other->dims;
    for (int i = 0; same && i < v->dims; i++) same = v->size[i] == other->size[i];
    if (same) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; it must have that of %s, %s", op, name, bst__shape_text(v),
                      other_name, bst__shape_text(other));
}

bst_status bst__need_dtype(const char *op, const char *name, const bst_view *v, bst_dtype dtype, const char *why) {
    if (v->dtype == dtype) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is %s; %s is needed, %s", op, name, bst__dtype_name(v->dtype),
                      bst__dtype_name(dtype), why);
}

bst_status bst__need_device(const char *op, const char *name, const bst_view *v, const bst_view *other,
                            const char *other_name) {
    if (v->device.device_type == other->device.device_type && v->device.device_id == other->device.device_id)
        return BST_OK;
    static const char *const type[] = {[kDLCPU] = "cpu", [kDLCUDA] = "cuda"};
    return bst__error(BST_INVALID, "%s: %s is on %s:%d, but %s is on %s:%d; they must be on one device", op, name,
                      type[v->device.device_type], v->device.device_id, other_name, type[other->device.device_type],
                      other->device.device_id);
}

bool bst__is_contiguous(const bst_view *v) {
    int64_t packed = 1;
    for (int i = v->dims - 1; i >= 0; i--) {
        if (v->size[i] != 1 && v->stride[i] != packed) return v->count == 0;
        packed *= v->size[i];
    }
    return true;
}

bst_status bst__need_contiguous(const char *op, const char *name, const bst_view *v) {
    if (bst__is_contiguous(v)) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s, of shape %s, is not contiguous; it must be", op, name, bst__shape_text(v));
}

bst_status bst__need_rows_apart(const char *op, const char *name, const bst_view *matrix) {
    if (matrix->rows.inner_stride >= matrix->size[1]) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: the rows of %s overlap; make it contiguous", op, name);
}

bst_status bst__need_boundaries(const char *op, const char *name, const int32_t *at, int64_t count, int64_t end) {
    if (at[0] != 0) return bst__error(BST_INVALID, "%s: %s begins with %d; 0 is needed", op, name, (int)at[0]);
    for (int64_t i = 1; i <= count; i++)
        if (at[i] < at[i - 1])
            return bst__error(BST_INVALID, "%s: %s has %d behind %d; numbers that do not fall are needed", op, name,
                              (int)at[i], (int)at[i - 1]);
    if (at[count] == end) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s ends with %d; %lld is needed", op, name, (int)at[count], (long long)end);
}

bst_status bst__need_one(const char *op, const char *name, const bst_view *v) {
    if (v->count == 1) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; one element is needed", op, name, bst__shape_text(v));
}

/* The bytes a view may touch: [begin, end). */
static void extent(const bst_view *v, uintptr_t *begin, uintptr_t *end) {
    int64_t low = 0, high = 0;
    for (int i = 0; i < v->dims; i++) {
        int64_t span = (v->size[i] - 1) * v->stride[i];
        if (span < 0)
            low += span;
        else
            high += span;
    }
    int64_t bytes = bst__dtype_size(v->dtype);
    *begin = (uintptr_t)v->data + (uintptr_t)(low * bytes);
    *end = (uintptr_t)v->data + (uintptr_t)((high + 1) * bytes);
}

/* Whether every element of a view lies within `width` bytes behind a multiple of `pitch`, counted from its first. */
static bool within_pitch(const bst_view *v, int64_t pitch, int64_t *width) {
    int64_t bytes = bst__dtype_size(v->dtype);
    *width = bytes;
    for (int i = 0; i < v->dims; i++) {
        int64_t step = v->stride[i] * bytes;
        if (v->size[i] == 1 || step % pitch == 0) continue;
        if (step < 0) return false;
        *width += (v->size[i] - 1) * step;
    }
    return true;
}

/* Whether the views lie side by side in rows that are `pitch` bytes apart. */
static bool side_by_side(const bst_view *a, const bst_view *b, int64_t pitch) {
    int64_t a_width, b_width;
    if (pitch <= 0 || !within_pitch(a, pitch, &a_width) || !within_pitch(b, pitch, &b_width)) return false;
    int64_t distance = (int64_t)((uintptr_t)b->data - (uintptr_t)a->data) % pitch;
    if (distance < 0) distance += pitch;
    return distance >= a_width && distance + b_width <= pitch;
}

bool bst__overlap(const bst_view *a, const bst_view *b) {
    if (!a->count || !b->count) return false;
    uintptr_t a_begin, a_end, b_begin, b_end;
    extent(a, &a_begin, &a_end);
    extent(b, &b_begin, &b_end);
    if (a_begin >= b_end || b_begin >= a_end) return false;
    for (int i = 0; i < a->dims; i++)
        if (a->size[i] > 1 && side_by_side(a, b, a->stride[i] * bst__dtype_size(a->dtype))) return false;
    return true;
}

bool bst__same_memory(const bst_view *a, const bst_view *b) {
    bool same = a->data == b->data && a->dtype == b->dtype;
    for (int i = 0; i < a->dims && same; i++) same = a->size[i] == 1 || a->stride[i] == b->stride[i];
    return same;
}

bst_status bst__need_apart(const char *op, const char *name, const bst_view *v, const char *other_name,
                           const bst_view *other) {
    if (!bst__overlap(v, other)) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s and %s share memory; they must not", op, name, other_name);
}

static int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

bst_status bst__need_distinct(const char *op, const char *name, const bst_view *v) {
    for (int i = 0; v->count && i < v->dims; i++) {
        /* A dimension must step over all that those with smaller steps reach. */
        int64_t step = magnitude(v->stride[i]), reach = 0;
        if (v->size[i] == 1) continue;
        for (int j = 0; j < v->dims; j++) {
            int64_t other = v->size[j] > 1 ? magnitude(v->stride[j]) : 0;
            if (other < step || (other == step && j > i)) reach += (v->size[j] - 1) * other;
        }
        if (step <= reach)
            return bst__error(BST_INVALID, "%s: rows of %s lie over each other; each needs a place of its own", op,
                              name);
    }
    return BST_OK;
}

bst_status bst__rows(const char *op, const char *name, const bst_view *v, bst_rows *out) {
    if (v->dims < 1) return bst__error(BST_INVALID, "%s: %s is a scalar; at least one dimension is needed", op, name);
    int last = v->dims - 1;
    *out = (bst_rows){.rows = 1, .columns = v->size[last], .inner = 1};
    if (!v->count) { /* without elements strides say nothing */
        for (int i = 0; i < last; i++) out->rows *= v->size[i];
        out->inner = out->rows;
        out->inner_stride = out->columns;
        out->outer_stride = out->rows * out->columns;
        return BST_OK;
    }
    if (v->size[last] > 1 && v->stride[last] != 1)
        return bst__error(BST_UNSUPPORTED, "%s: the last dimension of %s is not contiguous; make it so", op, name);
    /* Fold from the innermost leading dimension outwards: first into `inner`, then into the outer one. */
    int64_t outer = 1;
    int level = 0; /* 0: nothing folded yet, 1: inner begun, 2: outer begun */
    for (int i = last - 1; i >= 0; i--) {
        if (v->size[i] == 1) continue;
        if (level == 0) {
            out->inner = v->size[i];
            out->inner_stride = v->stride[i];
            level = 1;
        } else if (level == 1 && v->stride[i] == out->inner * out->inner_stride) {
            out->inner *= v->size[i];
        } else if (level == 1) {
            outer = v->size[i];
            out->outer_stride = v->stride[i];
            level = 2;
        } else if (v->stride[i] == outer * out->outer_stride) {
            outer *= v->size[i];
        } else {
            return bst__error(BST_UNSUPPORTED,
                              "%s: the leading dimensions of %s do not fold into two; make it contiguous", op, name);
        }
    }
    if (level == 0) out->inner_stride = out->columns;
    if (level < 2) out->outer_stride = out->inner * out->inner_stride;
    out->rows = outer * out->inner;
    return BST_OK;
}

int bst__row_vector(const bst_view *v, const bst_rows *r) {
    int size = bst__dtype_size(v->dtype);
    uint64_t bits = (uint64_t)(uintptr_t)v->data | 16u;
    if (r->inner > 1) bits |= (uint64_t)(r->inner_stride * size);
    if (r->rows > r->inner) bits |= (uint64_t)(r->outer_stride * size);
    bits |= (uint64_t)(r->columns * size);
    int bytes = (int)(bits & -bits);
    return bytes < size ? 1 : bytes / size;
}

int64_t bst__alignment(const bst_view *v, int64_t most) {
    int64_t size = bst__dtype_size(v->dtype);
    uint64_t bits = (uint64_t)(uintptr_t)v->data;
    if (!v->data) return most;
    for (int i = 0; i < v->dims - 1; i++)
        if (v->size[i] > 1) bits |= (uint64_t)(v->stride[i] * size);
    while (most > 1 && bits % (uint64_t)(most * size)) most /= 2;
    return most;
}
