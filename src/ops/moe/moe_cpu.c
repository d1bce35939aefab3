/* moe_cpu.c - a mixture of experts around its grouped products, on CPU: in float32, on tiles of BST_TILE elements. */
#include "ops/moe/moe_cpu.h"

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
    for (int64_t row = begin; row < end; row++)
        memcpy(bst_at(a->out, row * a->columns, a->dtype),
               bst_at(a->x, a->order[row] / a->choices * a->x_stride, a->dtype), bytes);
}

/* ---- the clamped gate -------------------------------------------------------------------------------------------- */

/* h plus its expert's bias, n elements from `column` on. */
static void load_h(const moe_cpu *a, float *h, int64_t row, int64_t column, int64_t n) {
    bst_load(h, bst_at(a->h, row * a->columns + column, a->dtype), a->dtype, n);
    if (!a->bias) return;
    float b[BST_TILE];
    bst_load(b, bst_at(a->bias, expert_of(a, row) * a->columns + column, a->dtype), a->dtype, n);
    for (int64_t i = 0; i < n; i++) h[i] += b[i];
}

/* As torch.clamp: NaN stays NaN. */
static inline float clamp(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

void BST_CPU(bst__moe_glu_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    float h[BST_TILE], y[BST_TILE / 2], limit = a->limit, alpha = a->alpha;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE);
            load_h(a, h, row, c, n);
            for (int64_t i = 0; i < n / 2; i++) {
                float gate = clamp(h[2 * i], -INFINITY, limit), up = clamp(h[2 * i + 1], -limit, limit);
                y[i] = (up + 1.0f) * (gate / (1.0f + bst_exp(-alpha * gate)));
            }
            bst_store(bst_at(a->out, (row * a->columns + c) / 2, a->dtype), y, a->dtype, n / 2);
        }
    }
}

/* One tile of a row: h becomes its gradient, y the gate's output times the row's weight. Returns the sum of dy y. With
 * u = up + 1, s = sigmoid(alpha gate): dgate = w dy u s (1 + alpha gate (1 - s)), dup = w dy gate s. */
static float backward_tile(const moe_cpu *a, float *restrict h, const float *restrict dy, float *restrict y,
                           float weight, int64_t n) {
    float dot = 0, limit = a->limit, alpha = a->alpha;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n / 2; i++) {
        float given_gate = h[2 * i], given_up = h[2 * i + 1], wdy = weight * dy[i];
        float gate = clamp(given_gate, -INFINITY, limit), up = clamp(given_up, -limit, limit) + 1.0f;
        float s = 1.0f / (1.0f + bst_exp(-alpha * gate)), slope = s * (1.0f + alpha * gate * (1.0f - s));
        float dgate = wdy * up * slope, dup = wdy * (gate * s), out = up * (gate * s);
        dot += dy[i] * out;
        y[i] = weight * out;
        h[2 * i] = given_gate <= limit ? dgate : 0.0f;
        h[2 * i + 1] = given_up >= -limit && given_up <= limit ? dup : 0.0f;
    }
    return dot;
}

/* The row of partial sums of this chunk and expert, and whether this is the first row that adds to it. */
static float *partial_of(const moe_cpu *a, int64_t row, bool *first) {
    int64_t expert = expert_of(a, row), begin = expert ? a->ends[expert - 1] : 0;
    *first = row % MOE_CHUNK == 0 || row == begin;
    return a->partial + (row / MOE_CHUNK + expert) * a->columns;
}

static void add_partial(float *restrict partial, const float *restrict values, float weight, int64_t n, bool first) {
    for (int64_t i = 0; i < n; i++) partial[i] = (first ? 0.0f : partial[i]) + weight * values[i];
}

/* dh may be h, and wy dy: a tile is read before its place is written. */
void BST_CPU(bst__moe_glu_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const moe_cpu *a = context;
    float h[BST_TILE], dy[BST_TILE / 2], y[BST_TILE / 2];
    for (int64_t row = begin * MOE_CHUNK; row < earlier(end * MOE_CHUNK, a->rows); row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(a, a->order[row]), dot = a->dots_in ? a->dots_in[row] : 0.0f;
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE), at = row * a->columns + c;
            load_h(a, h, row, c, n);
            bst_load(dy, bst_at(a->dy, at / 2, a->dtype), a->dtype, n / 2);
            dot += backward_tile(a, h, dy, y, weight, n);
            if (partial) add_partial(partial + c, h, 1.0f, n, first);
            if (a->dh) bst_store(bst_at(a->dh, at, a->dtype), h, a->dtype, n);
            if (a->wy) bst_store(bst_at(a->wy, at / 2, a->dtype), y, a->dtype, n / 2);
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
    float x[BST_TILE], b[BST_TILE];
    BST_CPU(bst__moe_gather_cpu)(context, begin * MOE_CHUNK, last);
    if (!a->dots && !a->partial) return;
    for (int64_t row = begin * MOE_CHUNK; row < last; row++) {
        bool first = false;
        float *partial = a->partial ? partial_of(a, row, &first) : NULL;
        float weight = weight_of(a, a->order[row]), dot = 0;
        for (int64_t c = 0; c < a->columns; c += BST_TILE) {
            int64_t n = earlier(a->columns - c, BST_TILE);
            bst_load(x, bst_at(a->out, row * a->columns + c, a->dtype), a->dtype, n);
            if (partial) add_partial(partial + c, x, weight, n, first);
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
