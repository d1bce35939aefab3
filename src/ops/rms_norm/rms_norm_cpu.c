/* rms_norm_cpu.c - RMSNorm on CPU.
 *
 * Each row is read twice (forward: sum of squares, then the output; backward: the projection, then dx and dweight); the
 * second read finds it in the cache. A residual is added at the first read, and the second finds the sum. Arithmetic is
 * float32 on tiles of BST_TILE elements, but for what all of a row, or all chunks of rows, have in common: float64. */
#include "ops/rms_norm/rms_norm_cpu.h"

/* The factor of each column: weight, 1 + weight, or ones. */
static void load_weight(const bst_view *weight, bst_casting casting, float *out, int64_t column, int64_t n) {
    if (!weight->data) {
        for (int64_t i = 0; i < n; i++) out[i] = 1.0f;
        return;
    }
    bst_load(out, bst_at(weight->data, column, weight->dtype), weight->dtype, n);
    if (casting == BST_CASTING_GEMMA)
        for (int64_t i = 0; i < n; i++) out[i] += 1.0f;
}

/* tile += n elements. */
static void add_tile(float *restrict tile, const void *in, bst_dtype dtype, int64_t n) {
    float other[BST_TILE];
    bst_load(other, in, dtype, n);
    for (int64_t i = 0; i < n; i++) tile[i] += other[i];
}

void BST_CPU(bst__rms_norm_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const rms_norm_forward_call *a = context;
    int64_t columns = a->x.rows.columns;
    bst_dtype dtype = a->x.dtype;
    float x[BST_TILE], w[BST_TILE];
    for (int64_t row = begin; row < end; row++) {
        const void *in = bst_at(a->x.data, bst__row_start(&a->x.rows, row), dtype), *residual = NULL;
        void *sum_out = NULL;
        if (a->residual.data) {
            residual = bst_at(a->residual.data, bst__row_start(&a->residual.rows, row), a->residual.dtype);
            sum_out = bst_at(a->sum.data, row * columns, dtype);
        }
        double squares = 0;
        for (int64_t c = 0; c < columns; c += BST_TILE) {
            int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
            bst_load(x, bst_at(in, c, dtype), dtype, n);
            if (residual) {
                add_tile(x, bst_at(residual, c, a->residual.dtype), a->residual.dtype, n);
                bst_round_tile(x, dtype, n);
                bst_store(bst_at(sum_out, c, dtype), x, dtype, n);
            }
            squares += bst_sum_of_products(x, x, n);
        }
        float rstd = (float)(1 / sqrt(squares / (double)columns + (double)a->eps));
        if (a->rstd) a->rstd[row] = rstd;
        if (residual) in = sum_out;
        for (int64_t c = 0; c < columns; c += BST_TILE) {
            int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
            if (columns > BST_TILE) bst_load(x, bst_at(in, c, dtype), dtype, n);
            if (columns > BST_TILE || row == begin) load_weight(&a->weight, a->casting, w, c, n);
            for (int64_t i = 0; i < n; i++) x[i] *= rstd;
            if (a->casting == BST_CASTING_LLAMA) bst_round_tile(x, dtype, n);
            for (int64_t i = 0; i < n; i++) x[i] *= w[i];
            bst_store(bst_at(a->y.data, row * columns + c, a->y.dtype), x, a->y.dtype, n);
        }
    }
}

/* With n = x rstd and m = dy w: dx = rstd (m - n mean(m n)) + dsum, dweight = sum over rows of dy round(n). */
static void backward_row(const rms_norm_backward_call *a, int64_t row, bool load, float *w, float *dweight) {
    int64_t columns = a->x.rows.columns;
    const void *x_in = bst_at(a->x.data, bst__row_start(&a->x.rows, row), a->x.dtype);
    const void *dy_in = bst_at(a->dy.data, bst__row_start(&a->dy.rows, row), a->dy.dtype), *dsum_in = NULL;
    if (a->dsum.data) dsum_in = bst_at(a->dsum.data, bst__row_start(&a->dsum.rows, row), a->dsum.dtype);
    float x[BST_TILE], dy[BST_TILE], rstd = a->rstd[row], projection = 0;
    for (int64_t c = 0; c < columns; c += BST_TILE) {
        int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
        float sum = 0;
        bst_load(x, bst_at(x_in, c, a->x.dtype), a->x.dtype, n);
        bst_load(dy, bst_at(dy_in, c, a->dy.dtype), a->dy.dtype, n);
        if (load) load_weight(&a->weight, a->casting, w, c, n);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += dy[i] * w[i] * x[i];
        projection += sum;
    }
    float slope = projection * rstd * rstd / (float)columns;
    for (int64_t c = 0; c < columns; c += BST_TILE) {
        int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
        if (columns > BST_TILE) {
            bst_load(x, bst_at(x_in, c, a->x.dtype), a->x.dtype, n);
            bst_load(dy, bst_at(dy_in, c, a->dy.dtype), a->dy.dtype, n);
            load_weight(&a->weight, a->casting, w, c, n);
        }
        if (a->dx.data) {
            float dx[BST_TILE];
            for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] * w[i] - x[i] * slope);
            if (dsum_in) add_tile(dx, bst_at(dsum_in, c, a->dsum.dtype), a->dsum.dtype, n);
            bst_store(bst_at(a->dx.data, row * columns + c, a->dx.dtype), dx, a->dx.dtype, n);
        }
        if (dweight) {
            for (int64_t i = 0; i < n; i++) x[i] *= rstd;
            if (a->casting == BST_CASTING_LLAMA) bst_round_tile(x, a->x.dtype, n);
            float *sum = dweight + c;
            for (int64_t i = 0; i < n; i++) sum[i] += dy[i] * x[i];
        }
    }
}

void BST_CPU(bst__rms_norm_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const rms_norm_backward_cpu *a = context;
    int64_t rows = a->call->x.rows.rows, columns = a->call->x.rows.columns;
    float w[BST_TILE];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *dweight = a->partial ? a->partial + chunk * columns : NULL;
        if (dweight) memset(dweight, 0, (size_t)columns * sizeof *dweight);
        int64_t first = rows * chunk / a->chunks, last = rows * (chunk + 1) / a->chunks;
        for (int64_t row = first; row < last; row++)
            backward_row(a->call, row, columns > BST_TILE || row == first, w, dweight);
    }
}

void BST_CPU(bst__rms_norm_dweight_cpu)(void *context, int64_t begin, int64_t end) {
    const rms_norm_backward_cpu *a = context;
    const bst_view *out = &a->call->dweight;
    double sum[BST_TILE];
    float rounded[BST_TILE];
    for (int64_t c = begin; c < end; c += BST_TILE) {
        int64_t n = end - c < BST_TILE ? end - c : BST_TILE;
        memset(sum, 0, sizeof sum);
        for (int64_t chunk = 0; chunk < a->chunks; chunk++) {
            const float *part = a->partial + chunk * a->call->x.rows.columns + c;
            for (int64_t i = 0; i < n; i++) sum[i] += (double)part[i];
        }
        for (int64_t i = 0; i < n; i++) rounded[i] = (float)sum[i];
        bst_store(bst_at(out->data, c, out->dtype), rounded, out->dtype, n);
    }
}
