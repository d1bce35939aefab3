/* matrices.h - matrices of any type, with gaps between their rows, and what a product of two must be. */
#ifndef BST_TEST_MATRICES_H
#define BST_TEST_MATRICES_H

#include <math.h>

#include "core/cpu_kernel.h"
#include "tensors.h"

enum { MOST = 1 << 18 }; /* elements, gaps included */

typedef struct matrix {
    float *data;
    int64_t shape[2], strides[2], at;
    int type;
} matrix;

static inline DLTensor tensor_of(matrix *m) {
    return bst_tensor((char *)m->data + m->at * (m->type ? 2 : 4), 2, m->shape, m->strides, bst_test_types[m->type]);
}

static inline matrix transposed(const matrix *m) {
    return (matrix){m->data, {m->shape[1], m->shape[0]}, {m->strides[1], m->strides[0]}, m->at, m->type};
}

/* Columns from `first` on. */
static inline matrix part_of(const matrix *m, int64_t first, int64_t columns) {
    return (matrix){m->data, {m->shape[0], columns}, {m->strides[0], m->strides[1]}, m->at + first, m->type};
}

static inline double number(const matrix *m, int64_t row, int64_t column) {
    int64_t i = m->at + row * m->strides[0] + column * m->strides[1];
    if (!m->type) return (double)m->data[i];
    uint16_t half = ((const uint16_t *)m->data)[i];
    return (double)(m->type == 1 ? bst_from_bf16(half) : bst_from_f16(half));
}

/* Numbers up to 2 from a seed, and NaN in the gaps; of seed 0 all bits are ones, which is NaN. */
static inline matrix filled(float *data, int64_t rows, int64_t columns, int64_t gap, int64_t at, int type,
                            unsigned seed) {
    matrix m = {data, {rows, columns}, {columns + gap, 1}, at, type};
    if (!seed) {
        memset(data, 0xff, MOST * sizeof(float));
        return m;
    }
    bst_fill(data, MOST, seed, 2);
    if (type) /* in place, from the front on */
        for (int64_t i = 0; i < MOST; i++) {
            float x = data[i];
            bst_store((uint16_t *)data + i, &x, (bst_dtype)type, 1);
        }
    for (int64_t row = 0; row < rows; row++) /* what lies between rows is nobody's to read */
        memset((char *)data + (at + row * m.strides[0] + columns) * (type ? 2 : 4), 0xff, (size_t)gap * (type ? 2 : 4));
    return m;
}

/* That got is scale x y. A sum of n products in float32 is off by n roundings of their sizes at most, and what is
 * rounded once more by half a unit of it. */
static inline void compare(const char *what, const matrix *got, const matrix *x, const matrix *y, double scale) {
    const double unit = got->type == 0 ? 0x1p-24 : got->type == 1 ? 0x1p-8 : 0x1p-11;
    const int64_t n = y->shape[0];
    int64_t wrong = 0;
    CHECK_EQ_I(x->shape[1], n);
    for (int64_t r = 0; r < got->shape[0]; r++)
        for (int64_t c = 0; c < got->shape[1]; c++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < n; i++) {
                double product = number(x, r, i) * number(y, i, c) * scale;
                sum += product, size += fabs(product);
            }
            double most = (double)(n + 2) * 0x1p-23 * size + unit * fabs(sum) + 0x1p-25;
            wrong += !(fabs(number(got, r, c) - sum) <= most);
        }
    if (wrong)
        FAILED("%s [%d, %d] of type %d, over %d: %d wrong", what, (int)got->shape[0], (int)got->shape[1], got->type,
               (int)n, (int)wrong);
}

#endif
