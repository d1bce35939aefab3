/* moe_cpu.c - a mixture of experts around its grouped products, on CPU: in float32, on tiles of BST_TILE elements. */
#include "ops/moe/moe.h"

#include "core/gated_unit.h"

static int expert_at(const moe_cpu *a, int64_t row) { return expert_of(a->ends->data, (int)a->ends->count, row); }

static int64_t begin_of(const moe_cpu *a, int64_t expert) {
    return expert ? ((const int32_t *)a->ends->data)[expert - 1] : 0;
}

/* Element `at` of a tensor without gaps. */
static void *element(const bst_view *v, int64_t at) { return bst_at(v->data, at, v->dtype); }

static float weight_of(const bst_view *weights, int64_t pair) {
    float weight;
    bst_load(&weight, element(weights, pair), weights->dtype, 1);
    return weight;
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

/* A row of x or dout. */
static void copy_row(void *to, const bst_view *x, int64_t token) {
    memcpy(to, element(x, token * x->stride[0]), (size_t)(x->size[1] * bst__dtype_size(x->dtype)));
}

void BST_CPU(bst__moe_gather_cpu)(void *context, int64_t begin, int64_t end) {
    const bst_view *v = ((const moe_cpu *)context)->v, *x = &v[GATHER_X];
    const int32_t *position = v[GATHER_POSITION].data;
    int64_t choices = v[GATHER_POSITION].count / x->size[0];
    for (int64_t pair = begin * choices; pair < end * choices; pair++)
        copy_row(element(&v[GATHER_ROWS], position[pair] * x->size[1]), x, pair / choices);
}

/* ---- transposed matrices ----------------------------------------------------------------------------------------- */

void BST_CPU(bst__moe_transpose_cpu)(void *context, int64_t begin, int64_t end) {
    const bst_view *v = ((const moe_cpu *)context)->v, *x = &v[TURN_X], *y = &v[TURN_Y];
    const int64_t rows = x->rows.rows;
    for (int64_t column = begin; column < end; column++)
        BST_TILES(at, n, 0, rows, BST_TILE) {
            float tile[BST_TILE];
            for (int64_t i = 0; i < n; i++)
                bst_load(tile + i, element(x, bst__row_start(&x->rows, at + i) + column), x->dtype, 1);
            bst_store(element(y, column * rows + at), tile, y->dtype, n);
        }
}

/* ---- the gated unit ---------------------------------------------------------------------------------------------- */

/* Where pair `first` of a row of h or of biases has its gate, and its up where these are halves. */
static void *pair_at(const moe_cpu *a, const bst_view *from, int64_t row, int64_t first) {
    return element(from, row * from->size[1] + (a->unit.interleaved ? 2 * first : first));
}
static void *up_at(const bst_view *from, const void *pair) { return bst_at(pair, from->size[1] / 2, from->dtype); }

static void load_pairs(const moe_cpu *a, float pairs[2][BST_PAIRS], const bst_view *from, int64_t row, int64_t first,
                       int64_t n) {
    const void *at = pair_at(a, from, row, first);
    bst_load_pairs(pairs, at, up_at(from, at), a->unit.interleaved, from->dtype, n);
}

/* h plus its expert's bias. */
static void load_h(const moe_cpu *a, float h[2][BST_PAIRS], int64_t row, int64_t first, int64_t n) {
    load_pairs(a, h, &a->v[GLU_H], row, first, n);
    if (!a->v[GLU_BIAS].data) return;
    float b[2][BST_PAIRS];
    load_pairs(a, b, &a->v[GLU_BIAS], expert_at(a, row), first, n);
    for (int64_t i = 0; i < n; i++) h[0][i] += b[0][i], h[1][i] += b[1][i];
}

void BST_CPU(bst__moe_glu_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    const bst_view *out = &a->v[GLU_Y];
    const int64_t width = out->size[1];
    float h[2][BST_PAIRS], y[BST_PAIRS];
    for (int64_t row = begin; row < end; row++) {
        BST_TILES(c, n, 0, width, BST_PAIRS) {
            load_h(a, h, row, c, n);
            bst_unit_tile(&a->unit, h, y, n);
            bst_store(element(out, row * width + c), y, out->dtype, n);
        }
    }
}

/* The row of partial sums of this chunk and expert, and whether this is the first row that adds to it. */
static float *partial_of(const moe_cpu *a, int64_t row, bool *first) {
    int64_t expert = expert_at(a, row);
    *first = row % MOE_CHUNK == 0 || row == begin_of(a, expert);
    return a->partial + (row / MOE_CHUNK + expert) * a->columns;
}

static void add_partial(float *restrict partial, int64_t step, const float *restrict values, float weight, int64_t n,
                        bool first) {
    for (int64_t i = 0; i < n; i++) partial[i * step] = (first ? 0.0f : partial[i * step]) + weight * values[i];
}

/* dh may be h, and wy dy: a tile is read before its place is written. */
void BST_CPU(bst__moe_glu_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    const bst_view *v = a->v, *dy_in = &v[GLU_DY], *dh = &v[GLU_DH], *wy = &v[GLU_WY], *dweights = &v[GLU_DWEIGHTS];
    const int32_t *order = v[GLU_ORDER].data;
    const float *dots = v[GLU_DOTS].data;
    const bool interleaved = a->unit.interleaved;
    const int64_t width = dy_in->size[1], step = interleaved ? 2 : 1, up = interleaved ? 1 : width;
    float h[2][BST_PAIRS], dy[BST_PAIRS], y[BST_PAIRS];
    for (int64_t row = begin * MOE_CHUNK; row < bst__lesser(end * MOE_CHUNK, a->rows); row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(&v[GLU_WEIGHTS], order[row]);
        double dot = dots ? dots[row] : 0;
        BST_TILES(c, n, 0, width, BST_PAIRS) {
            load_h(a, h, row, c, n);
            bst_load(dy, element(dy_in, row * width + c), dy_in->dtype, n);
            dot += bst_unit_backward_tile(&a->unit, h, dy, y, weight, n);
            if (partial) {
                add_partial(partial + c * step, step, h[0], 1.0f, n, first);
                add_partial(partial + c * step + up, step, h[1], 1.0f, n, first);
            }
            void *to = dh->data ? pair_at(a, dh, row, c) : NULL;
            if (to) bst_store_pairs(h, to, up_at(dh, to), interleaved, dh->dtype, n);
            if (wy->data) bst_store(element(wy, row * width + c), y, wy->dtype, n);
        }
        float dweight = (float)dot;
        if (dweights->data) bst_store(element(dweights, order[row]), &dweight, dweights->dtype, 1);
    }
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

void BST_CPU(bst__moe_combine_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const bst_view *v = ((const moe_cpu *)context)->v, *y_in = &v[SUM_Y], *bias = &v[SUM_BIAS], *out = &v[SUM_OUT];
    const int32_t *position = v[SUM_POSITION].data;
    const int64_t *indices = v[SUM_INDICES].data, columns = y_in->size[1], choices = v[SUM_POSITION].size[1];
    float sum[BST_TILE], y[BST_TILE], b[BST_TILE];
    for (int64_t token = begin; token < end; token++) {
        BST_TILES(c, n, 0, columns, BST_TILE) {
            memset(sum, 0, (size_t)n * sizeof *sum);
            for (int64_t pair = token * choices; pair < (token + 1) * choices; pair++) {
                float weight = v[SUM_WEIGHTS].data ? weight_of(&v[SUM_WEIGHTS], pair) : 1.0f;
                bst_load(y, element(y_in, position[pair] * columns + c), y_in->dtype, n);
                if (bias->data) {
                    bst_load(b, element(bias, indices[pair] * columns + c), bias->dtype, n);
                    for (int64_t i = 0; i < n; i++) y[i] += b[i];
                }
                for (int64_t i = 0; i < n; i++) sum[i] += weight * y[i];
            }
            bst_store(element(out, token * columns + c), sum, out->dtype, n);
        }
    }
}

void BST_CPU(bst__moe_combine_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    const bst_view *v = a->v, *dout = &v[BACK_DOUT], *rows = &v[BACK_ROWS], *bias = &v[BACK_BIAS];
    const int32_t *order = v[BACK_ORDER].data;
    int64_t last = bst__lesser(end * MOE_CHUNK, a->rows), choices = a->rows / dout->size[0];
    float x[BST_TILE], b[BST_TILE], *dots = v[BACK_DOTS].data;
    for (int64_t row = begin * MOE_CHUNK; row < last; row++)
        copy_row(element(rows, row * a->columns), dout, order[row] / choices);
    if (!dots && !a->partial) return;
    for (int64_t row = begin * MOE_CHUNK; row < last; row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(&v[BACK_WEIGHTS], order[row]), dot = 0;
        BST_TILES(c, n, 0, a->columns, BST_TILE) {
            bst_load(x, element(rows, row * a->columns + c), rows->dtype, n);
            if (partial) add_partial(partial + c, 1, x, weight, n, first);
            if (!dots) continue;
            bst_load(b, element(bias, expert_at(a, row) * a->columns + c), bias->dtype, n);
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < n; i++) dot += x[i] * b[i];
        }
        if (dots) dots[row] = dot;
    }
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

void BST_CPU(bst__moe_bias_sum_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    float sum[BST_TILE];
    for (int64_t expert = begin; expert < end; expert++) {
        int64_t first = begin_of(a, expert), last = begin_of(a, expert + 1);
        BST_TILES(c, n, 0, a->columns, BST_TILE) {
            memset(sum, 0, (size_t)n * sizeof *sum);
            for (int64_t row = first; row < last; row = (row / MOE_CHUNK + 1) * MOE_CHUNK) {
                const float *partial = a->partial + (row / MOE_CHUNK + expert) * a->columns + c;
                for (int64_t i = 0; i < n; i++) sum[i] += partial[i];
            }
            bst_store(element(a->dbias, expert * a->columns + c), sum, a->dbias->dtype, n);
        }
    }
}
