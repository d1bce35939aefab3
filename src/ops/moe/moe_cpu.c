/* moe_cpu.c - a mixture of experts around its grouped products, on CPU: in float32, on tiles of BST_TILE elements. */
#include "ops/moe/moe_cpu.h"

#include "core/gated_unit.h"

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* The expert of a row: the first whose rows end behind it. */
static int64_t expert_of(const moe_cpu *a, int64_t row) {
    int64_t low = 0, high = a->experts;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (a->ends[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static float weight_of(const moe_cpu *a, int64_t pair) {
    float weight;
    bst_load(&weight, bst_at(a->weights, pair, a->w_dtype), a->w_dtype, 1);
    return weight;
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

void BST_CPU(bst__moe_gather_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    size_t bytes = (size_t)(a->columns * bst__dtype_size(a->dtype));
    for (int64_t pair = begin * a->choices; pair < end * a->choices; pair++)
        memcpy(bst_at(a->out, a->position[pair] * a->columns, a->dtype),
               bst_at(a->x, pair / a->choices * a->x_stride, a->dtype), bytes);
}

/* ---- the gated unit ---------------------------------------------------------------------------------------------- */

/* Where pair `first` of a row of h or of biases has its gate, and its up where these are halves. */
static void *pair_at(const moe_cpu *a, const void *from, int64_t row, int64_t first) {
    return bst_at(from, row * a->columns + (a->unit.interleaved ? 2 * first : first), a->dtype);
}
static void *up_at(const moe_cpu *a, const void *pair) { return bst_at(pair, a->columns / 2, a->dtype); }

static void load_pairs(const moe_cpu *a, float pairs[2][BST_PAIRS], const void *from, int64_t row, int64_t first,
                       int64_t n) {
    const void *at = pair_at(a, from, row, first);
    bst_load_pairs(pairs, at, up_at(a, at), a->unit.interleaved, a->dtype, n);
}

/* h plus its expert's bias. */
static void load_h(const moe_cpu *a, float h[2][BST_PAIRS], int64_t row, int64_t first, int64_t n) {
    load_pairs(a, h, a->h, row, first, n);
    if (!a->bias) return;
    float b[2][BST_PAIRS];
    load_pairs(a, b, a->bias, expert_of(a, row), first, n);
    for (int64_t i = 0; i < n; i++) h[0][i] += b[0][i], h[1][i] += b[1][i];
}

void BST_CPU(bst__moe_glu_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    const int64_t width = a->columns / 2;
    float h[2][BST_PAIRS], y[BST_PAIRS];
    for (int64_t row = begin; row < end; row++) {
        for (int64_t c = 0; c < width; c += BST_PAIRS) {
            int64_t n = earlier(width - c, BST_PAIRS);
            load_h(a, h, row, c, n);
            bst_unit_tile(&a->unit, h, y, n);
            bst_store(bst_at(a->out, row * width + c, a->dtype), y, a->dtype, n);
        }
    }
}

/* The row of partial sums of this chunk and expert, and whether this is the first row that adds to it. */
static float *partial_of(const moe_cpu *a, int64_t row, bool *first) {
    int64_t expert = expert_of(a, row), begin = expert ? a->ends[expert - 1] : 0;
    *first = row % MOE_CHUNK == 0 || row == begin;
    return a->partial + (row / MOE_CHUNK + expert) * a->columns;
}

static void add_partial(float *restrict partial, int64_t step, const float *restrict values, float weight, int64_t n,
                        bool first) {
    for (int64_t i = 0; i < n; i++) partial[i * step] = (first ? 0.0f : partial[i * step]) + weight * values[i];
}

/* dh may be h, and wy dy: a tile is read before its place is written. */
void BST_CPU(bst__moe_glu_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    const int64_t width = a->columns / 2, step = a->unit.interleaved ? 2 : 1, up = a->unit.interleaved ? 1 : width;
    float h[2][BST_PAIRS], dy[BST_PAIRS], y[BST_PAIRS];
    for (int64_t row = begin * MOE_CHUNK; row < earlier(end * MOE_CHUNK, a->rows); row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(a, a->order[row]), dot = a->dots_in ? a->dots_in[row] : 0.0f;
        for (int64_t c = 0; c < width; c += BST_PAIRS) {
            int64_t n = earlier(width - c, BST_PAIRS);
            load_h(a, h, row, c, n);
            bst_load(dy, bst_at(a->dy, row * width + c, a->dtype), a->dtype, n);
            dot += bst_unit_backward_tile(&a->unit, h, dy, y, weight, n);
            if (partial) {
                add_partial(partial + c * step, step, h[0], 1.0f, n, first);
                add_partial(partial + c * step + up, step, h[1], 1.0f, n, first);
            }
            void *dh = a->dh ? pair_at(a, a->dh, row, c) : NULL;
            if (dh) bst_store_pairs(h, dh, up_at(a, dh), a->unit.interleaved, a->dtype, n);
            if (a->wy) bst_store(bst_at(a->wy, row * width + c, a->dtype), y, a->dtype, n);
        }
        if (a->dweights) bst_store(bst_at(a->dweights, a->order[row], a->w_dtype), &dot, a->w_dtype, 1);
    }
}

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

void BST_CPU(bst__moe_combine_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    float sum[BST_TILE], y[BST_TILE], b[BST_TILE];
    for (int64_t token = begin; token < end; token++) {
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE);
            memset(sum, 0, (size_t)n * sizeof *sum);
            for (int64_t pair = token * a->choices; pair < (token + 1) * a->choices; pair++) {
                float weight = a->weights ? weight_of(a, pair) : 1.0f;
                bst_load(y, bst_at(a->y, a->position[pair] * a->columns + c, a->dtype), a->dtype, n);
                if (a->bias) {
                    bst_load(b, bst_at(a->bias, a->indices[pair] * a->columns + c, a->dtype), a->dtype, n);
                    for (int64_t i = 0; i < n; i++) y[i] += b[i];
                }
                for (int64_t i = 0; i < n; i++) sum[i] += weight * y[i];
            }
            bst_store(bst_at(a->out, token * a->columns + c, a->dtype), sum, a->dtype, n);
        }
    }
}

void BST_CPU(bst__moe_combine_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    int64_t last = earlier(end * MOE_CHUNK, a->rows);
    size_t bytes = (size_t)(a->columns * bst__dtype_size(a->dtype));
    float x[BST_TILE], b[BST_TILE];
    for (int64_t row = begin * MOE_CHUNK; row < last; row++)
        memcpy(bst_at(a->out, row * a->columns, a->dtype),
               bst_at(a->x, a->order[row] / a->choices * a->x_stride, a->dtype), bytes);
    if (!a->dots && !a->partial) return;
    for (int64_t row = begin * MOE_CHUNK; row < last; row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(a, a->order[row]), dot = 0;
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE);
            bst_load(x, bst_at(a->out, row * a->columns + c, a->dtype), a->dtype, n);
            if (partial) add_partial(partial + c, 1, x, weight, n, first);
            if (!a->dots) continue;
            bst_load(b, bst_at(a->bias, expert_of(a, row) * a->columns + c, a->dtype), a->dtype, n);
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < n; i++) dot += x[i] * b[i];
        }
        if (a->dots) a->dots[row] = dot;
    }
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

void BST_CPU(bst__moe_bias_sum_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    float sum[BST_TILE];
    for (int64_t expert = begin; expert < end; expert++) {
        int64_t first = expert ? a->ends[expert - 1] : 0, last = a->ends[expert];
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE);
            memset(sum, 0, (size_t)n * sizeof *sum);
            for (int64_t row = first; row < last; row = (row / MOE_CHUNK + 1) * MOE_CHUNK) {
                const float *partial = a->partial + (row / MOE_CHUNK + expert) * a->columns + c;
                for (int64_t i = 0; i < n; i++) sum[i] += partial[i];
            }
            bst_store(bst_at(a->dbias, expert * a->columns + c, a->dtype), sum, a->dtype, n);
        }
    }
}
