/* norm_cpu.c - norms on CPU.
 *
 * Each row is read twice (forward: sum of squares, then the output; backward: the projection, then dx and dweight); the
 * second read finds it in the cache. A residual is added at the first read, and the second finds the sum. Arithmetic is
 * float32 on tiles of BST_TILE elements, but for what all of a row, or all chunks of rows, have in common: float64. */
#include "ops/norm/norm.h"

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

static void *row_at(const bst_view *v, int64_t row) { return bst_at(v->data, bst__row_start(&v->rows, row), v->dtype); }

/* tile += n elements. */
static void add_tile(float *restrict tile, const void *in, bst_dtype dtype, int64_t n) {
    float other[BST_TILE];
    bst_load(other, in, dtype, n);
    for (int64_t i = 0; i < n; i++) tile[i] += other[i];
}

/* A tile of x less its row's mean; `load`: x is not there yet. */
static void load_x(float *restrict x, const void *in, int64_t column, bst_dtype dtype, int64_t n, bool load,
                   float mean) {
    if (load) bst_load(x, bst_at(in, column, dtype), dtype, n);
    for (int64_t i = 0; mean != 0 && i < n; i++) x[i] -= mean;
}

void BST_CPU(bst__norm_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const norm_cpu *a = context;
    const bst_view *v = a->v;
    const bst_casting casting = (bst_casting)a->attributes[CASTING].i;
    const float eps = (float)a->attributes[EPS].d;
    int64_t columns = v[X].rows.columns;
    bst_dtype dtype = v[X].dtype;
    const bool centre = a->attributes[KIND].i == BST_NORM_LAYER;
    float x[BST_TILE], w[BST_TILE], ones[BST_TILE], *rstds = v[NEW_RSTD].data, *means = v[NEW_MEAN].data;
    for (int i = 0; centre && i < BST_TILE; i++) ones[i] = 1.0f;
    for (int64_t row = begin; row < end; row++) {
        const void *in = row_at(&v[X], row), *residual = v[RESIDUAL].data ? row_at(&v[RESIDUAL], row) : NULL;
        const void *after = v[AFTER].data ? row_at(&v[AFTER], row) : NULL;
        void *sum_out = residual ? row_at(&v[SUM], row) : NULL, *out = row_at(&v[Y], row);
        double squares = 0, total = 0;
        BST_TILES(c, n, 0, columns, BST_TILE) {
            bst_load(x, bst_at(in, c, dtype), dtype, n);
            if (residual) {
                add_tile(x, bst_at(residual, c, v[RESIDUAL].dtype), v[RESIDUAL].dtype, n);
                bst_round_tile(x, dtype, n);
                bst_store(bst_at(sum_out, c, dtype), x, dtype, n);
            }
            if (centre)
                total += bst_sum_of_products(x, ones, n);
            else
                squares += bst_sum_of_products(x, x, n);
        }
        if (residual) in = sum_out;
        float mean = (float)(total / (double)columns);
        for (int64_t c = 0; centre && c < columns; c += BST_TILE) {
            int64_t n = columns - c < BST_TILE ? columns - c : BST_TILE;
            load_x(x, in, c, dtype, n, columns > BST_TILE, mean);
            squares += bst_sum_of_products(x, x, n);
        }
        if (means) means[row] = mean;
        float rstd = (float)(1 / sqrt(squares / (double)columns + (double)eps));
        if (rstds) rstds[row] = rstd;
        BST_TILES(c, n, 0, columns, BST_TILE) {
            if (columns > BST_TILE) load_x(x, in, c, dtype, n, true, mean);
            if (columns > BST_TILE || row == begin) load_weight(&v[WEIGHT], casting, w, c, n);
            for (int64_t i = 0; i < n; i++) x[i] *= rstd;
            if (casting == BST_CASTING_LLAMA && !centre) bst_round_tile(x, dtype, n);
            for (int64_t i = 0; i < n; i++) x[i] *= w[i];
            if (v[BIAS].data) add_tile(x, bst_at(v[BIAS].data, c, v[BIAS].dtype), v[BIAS].dtype, n);
            if (after) add_tile(x, bst_at(after, c, v[AFTER].dtype), v[AFTER].dtype, n);
            bst_store(bst_at(out, c, v[Y].dtype), x, v[Y].dtype, n);
        }
    }
}

/* With n = x rstd and m = dy w: dx = rstd (m - n mean(m n)) + dsum, dweight = sum over rows of dy round(n). LAYER: of x
 * less its mean, m less mean(m) in dx, and dbias = sum of dy. */
static void backward_row(const norm_cpu *a, int64_t row, bool load, float *w, float *dweight, float *dbias) {
    const bst_view *v = a->v;
    const bst_casting casting = (bst_casting)a->attributes[CASTING].i;
    const bst_dtype x_type = v[X].dtype, dy_type = v[DY].dtype;
    const void *x_in = row_at(&v[X], row), *dy_in = row_at(&v[DY], row);
    const void *dsum_in = v[DSUM].data ? row_at(&v[DSUM], row) : NULL;
    int64_t columns = v[X].rows.columns;
    float x[BST_TILE], dy[BST_TILE], rstd = ((const float *)v[RSTD].data)[row], projection = 0, shift = 0;
    const bool centre = a->attributes[KIND].i == BST_NORM_LAYER;
    const float mean = centre ? ((const float *)v[MEAN].data)[row] : 0.0f;
    BST_TILES(c, n, 0, columns, BST_TILE) {
        float sum = 0;
        load_x(x, x_in, c, x_type, n, true, mean);
        bst_load(dy, bst_at(dy_in, c, dy_type), dy_type, n);
        if (load) load_weight(&v[WEIGHT], casting, w, c, n);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; i++) sum += dy[i] * w[i] * x[i];
        projection += sum;
        if (centre) shift += (float)bst_sum_of_products(dy, w, n);
    }
    shift /= (float)columns;
    float slope = projection * rstd * rstd / (float)columns;
    BST_TILES(c, n, 0, columns, BST_TILE) {
        if (columns > BST_TILE) {
            load_x(x, x_in, c, x_type, n, true, mean);
            bst_load(dy, bst_at(dy_in, c, dy_type), dy_type, n);
            load_weight(&v[WEIGHT], casting, w, c, n);
        }
        if (v[DX].data) {
            float dx[BST_TILE];
            for (int64_t i = 0; i < n; i++) dx[i] = rstd * (dy[i] * w[i] - x[i] * slope);
            for (int64_t i = 0; centre && i < n; i++) dx[i] -= rstd * shift;
            if (dsum_in) add_tile(dx, bst_at(dsum_in, c, x_type), x_type, n);
            bst_store(bst_at(row_at(&v[DX], row), c, x_type), dx, x_type, n);
        }
        if (dweight) {
            for (int64_t i = 0; i < n; i++) x[i] *= rstd;
            if (casting == BST_CASTING_LLAMA && !centre) bst_round_tile(x, x_type, n);
            float *sum = dweight + c;
            for (int64_t i = 0; i < n; i++) sum[i] += dy[i] * x[i];
        }
        for (int64_t i = 0; dbias && i < n; i++) dbias[c + i] += dy[i];
    }
}

void BST_CPU(bst__norm_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const norm_cpu *a = context;
    int64_t rows = a->v[X].rows.rows, columns = a->v[X].rows.columns;
    float w[BST_TILE];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *dweight = a->dweight ? a->dweight + chunk * columns : NULL;
        float *dbias = a->dbias ? a->dbias + chunk * columns : NULL;
        if (dweight) memset(dweight, 0, (size_t)columns * sizeof *dweight);
        if (dbias) memset(dbias, 0, (size_t)columns * sizeof *dbias);
        int64_t first = rows * chunk / a->chunks, last = rows * (chunk + 1) / a->chunks;
        for (int64_t row = first; row < last; row++)
            backward_row(a, row, columns > BST_TILE || row == first, w, dweight, dbias);
    }
}

void BST_CPU(bst__norm_sums_cpu)(void *context, int64_t begin, int64_t end) {
    const norm_cpu *a = context;
    const bst_view *out = a->total;
    int64_t columns = a->v[X].rows.columns;
    float sum[BST_TILE];
    BST_TILES(c, n, begin, end, BST_TILE) {
        bst_sum_rows(sum, a->partial + c, a->chunks, columns, n);
        bst_store(bst_at(out->data, c, out->dtype), sum, out->dtype, n);
    }
}
