/* rms_norm_cpu.c - RMSNorm on CPU.
 *
 * Each row is read twice (forward: sum of squares, then the output; backward: the projection, then dx and dweight); the
 * second read finds it in the cache. All arithmetic is float32 on tiles of BST_TILE elements. */
#include "ops/rms_norm/rms_norm_cpu.h"

/* The factor of each column: weight, 1 + weight, or ones. */
static void load_weight(const rms_norm_cpu *a, float *out, int64_t column, int64_t n) {
    if (!a->weight.data) {
        for (int64_t i = 0; i < n; i++) out[i] = 1.0f;
        return;
    }
    bst_load(out, bst_at(a->weight.data, column, a->weight.dtype), a->weight.dtype, n);
    if (a->casting == BST_CASTING_GEMMA)
        for (int64_t i = 0; i < n; i++) out[i] += 1.0f;
}

void BST_CPU(bst__rms_norm_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const rms_norm_cpu *a = context;
    int64_t columns = a->x_rows.columns;
    float x[BST_TILE], w[BST_TILE];
    for (int64_t row = begin; row < end; row++) {
        const void *in = bst_at(a->x.data, bst__row_start(&a->x_rows, row), a->x.dtype);
        float squares = 0;
        for (int64_t c = 0; c < columns; c += BST_TILE) {
            int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
            float sum = 0;
            bst_load(x, bst_at(in, c, a->x.dtype), a->x.dtype, n);
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
            squares += sum;
        }
        float rstd = 1.0f / sqrtf(squares / (float)columns + a->eps);
        if (a->rstd) a->rstd[row] = rstd;
        for (int64_t c = 0; c < columns; c += BST_TILE) {
            int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
            if (columns > BST_TILE) bst_load(x, bst_at(in, c, a->x.dtype), a->x.dtype, n);
            if (columns > BST_TILE || row == begin) load_weight(a, w, c, n);
            for (int64_t i = 0; i < n; i++) x[i] *= rstd;
            if (a->casting == BST_CASTING_LLAMA) bst_round_tile(x, a->x.dtype, n);
            for (int64_t i = 0; i < n; i++) x[i] *= w[i];
            bst_store(bst_at(a->y.data, row * columns + c, a->y.dtype), x, a->y.dtype, n);
        }
    }
}

/* With n = x rstd and m = dy w: dx = rstd (m - n mean(m n)), dweight = sum over rows of dy round(n). */
static void backward_row(const rms_norm_cpu *a, int64_t row, bool load, float *w, float *dweight) {
    int64_t columns = a->x_rows.columns;
    const void *x_in = bst_at(a->x.data, bst__row_start(&a->x_rows, row), a->x.dtype);
    const void *dy_in = bst_at(a->dy.data, bst__row_start(&a->dy_rows, row), a->dy.dtype);
    float x[BST_TILE], dy[BST_TILE], rstd = a->rstd[row], projection = 0;
    for (int64_t c = 0; c < columns; c += BST_TILE) {
        int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
        float sum = 0;
        bst_load(x, bst_at(x_in, c, a->x.dtype), a->x.dtype, n);
        bst_load(dy, bst_at(dy_in, c, a->dy.dtype), a->dy.dtype, n);
        if (load) load_weight(a, w, c, n);
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
            load_weight(a, w, c, n);
        }
        if (a->dx.data) {
            float dx[BST_TILE];
            for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] * w[i] - x[i] * slope);
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
    const rms_norm_cpu *a = context;
    int64_t rows = a->x_rows.rows, columns = a->x_rows.columns;
    float w[BST_TILE];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *dweight = a->dweight ? a->dweight + chunk * columns : NULL;
        if (dweight) memset(dweight, 0, (size_t)columns * sizeof *dweight);
        int64_t first = rows * chunk / a->chunks, last = rows * (chunk + 1) / a->chunks;
        for (int64_t row = first; row < last; row++)
            backward_row(a, row, columns > BST_TILE || row == first, w, dweight);
    }
}

void BST_CPU(bst__rms_norm_dweight_cpu)(void *context, int64_t begin, int64_t end) {
    const rms_norm_cpu *a = context;
    float sum[BST_TILE];
    for (int64_t c = begin; c < end; c += BST_TILE) {
        int64_t n = end - c < BST_TILE ? end - c : BST_TILE;
        memset(sum, 0, sizeof sum);
        for (int64_t chunk = 0; chunk < a->chunks; chunk++) {
            const float *part = a->dweight + chunk * a->x_rows.columns + c;
            for (int64_t i = 0; i < n; i++) sum[i] += part[i];
        }
        bst_store(bst_at(a->dweight_out.data, c, a->dweight_out.dtype), sum, a->dweight_out.dtype, n);
    }
}
