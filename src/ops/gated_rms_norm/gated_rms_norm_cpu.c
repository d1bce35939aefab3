/* gated_rms_norm_cpu.c - the RMS norm with a gate on CPU.
 *
 * Each group of a row is read twice (forward: sum of squares, then the output; backward: sum of squares and projection,
 * then the gradients); where it fits a tile, the second time out of that. Arithmetic is float32 on tiles, but for what
 * all of a group, or all chunks of rows, have in common: float64. */
#include "ops/gated_rms_norm/gated_rms_norm.h"

#include "core/gated_unit.h"
#include "ops/gated_rms_norm/gated_rms_norm_args.h"
#include "ops/gated_rms_norm/gated_rms_norm_math.h"

/* Elements of a tile, of which a call has six: they share the first-level cache. */
enum { TILE = BST_TILE / 2 };

/* A part of a group: u is what is normed, x or x act(gate); m the gradient of what the norm returns. */
typedef struct tiles {
    float x[TILE], value[TILE], slope[TILE], u[TILE], m[TILE], w[TILE];
} tiles;

static void *row_at(const bst_view *v, int64_t row) { return bst_at(v->data, bst__row_start(&v->rows, row), v->dtype); }

static void load(const bst_view *v, int64_t row, int64_t column, float *out, int64_t n) {
    bst_load(out, bst_at(row_at(v, row), column, v->dtype), v->dtype, n);
}

/* Gates become what they are worth: act(gate) in t->value, act' in t->slope. A loop for each activation and exactness,
 * which are constants there. */
#define GATES(activation, type)                                       \
    for (int64_t i = 0; i < n; i++) {                                 \
        norm_gate gate = norm_gate_of(t->value[i], activation, type); \
        t->value[i] = gate.value;                                     \
        t->slope[i] = gate.slope;                                     \
    }
static void activate(tiles *t, int activation, bool exact, int64_t n) {
    if (activation == GATE_SIGMOID && exact)
        GATES(GATE_SIGMOID, BST_F32)
    else if (activation == GATE_SIGMOID)
        GATES(GATE_SIGMOID, BST_BF16)
    else if (exact)
        GATES(GATE_SILU, BST_F32)
    else
        GATES(GATE_SILU, BST_BF16)
}

/* What both passes need of n columns of a row; `weight`: that too. */
static void load_tiles(const gated_rms_norm_cpu *a, int64_t row, int64_t column, bool exact, bool weight, tiles *t,
                       int64_t n) {
    const bst_view *v = a->v;
    load(&v[X], row, column, t->x, n);
    load(&v[GATE], row, column, t->value, n);
    activate(t, (int)a->attributes[ACTIVATION].i, exact, n);
    if (weight) bst_load(t->w, bst_at(v[WEIGHT].data, column, v[WEIGHT].dtype), v[WEIGHT].dtype, n);
    if (a->attributes[GATE_FIRST].i)
        for (int64_t i = 0; i < n; i++) t->u[i] = t->x[i] * t->value[i];
    else
        memcpy(t->u, t->x, (size_t)n * sizeof *t->u);
}

static float rstd_of(const gated_rms_norm_cpu *a, double squares, int64_t group) {
    return (float)(1 / sqrt(squares / (double)group + (double)(float)a->attributes[EPS].d));
}

/* Whether the weight stays in its tile from row to row, and its group from pass to pass. */
static bool stays(const gated_rms_norm_cpu *a, int64_t columns) {
    return a->v[X].rows.columns <= TILE && columns == a->v[X].rows.columns;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static void forward_group(const gated_rms_norm_cpu *a, int64_t row, int64_t begin, int64_t end, bool weight, tiles *t) {
    const bst_view *v = a->v, *y = &v[Y];
    const bool exact = is_exact(v, y->dtype, false), first = a->attributes[GATE_FIRST].i;
    double squares = 0;
    BST_TILES(c, n, begin, end, TILE) {
        load_tiles(a, row, c, exact, weight, t, n);
        squares += bst_sum_of_products(t->u, t->u, n);
    }
    float rstd = rstd_of(a, squares, end - begin);
    BST_TILES(c, n, begin, end, TILE) {
        if (end - begin > TILE) load_tiles(a, row, c, exact, weight, t, n);
        for (int64_t i = 0; i < n; i++) t->u[i] = t->u[i] * rstd * t->w[i];
        for (int64_t i = 0; !first && i < n; i++) t->u[i] *= t->value[i];
        bst_store(bst_at(row_at(y, row), c, y->dtype), t->u, y->dtype, n);
    }
}

void BST_CPU(bst__gated_rms_norm_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const gated_rms_norm_cpu *a = context;
    const int64_t columns = a->v[X].rows.columns, group = group_of(a->v, a->attributes);
    tiles t;
    for (int64_t row = begin; row < end; row++)
        for (int64_t c = 0; c < columns; c += group)
            forward_group(a, row, c, c + group, row == begin || !stays(a, group), &t);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* t->m: dy weight, and with the gate last act(gate) too. t->slope: with the gate last times dy weight. */
static void load_gradient(const gated_rms_norm_cpu *a, int64_t row, int64_t column, tiles *t, int64_t n) {
    load(&a->v[DY], row, column, t->m, n);
    for (int64_t i = 0; i < n; i++) t->m[i] *= t->w[i];
    if (a->attributes[GATE_FIRST].i) return;
    for (int64_t i = 0; i < n; i++) {
        t->slope[i] *= t->m[i];
        t->m[i] *= t->value[i];
    }
}

/* dweight += dy n, with the gate last times act(gate): of dy as it is in memory, for m has the weight in it. */
static void add_to_dweight(const gated_rms_norm_cpu *a, int64_t row, int64_t column, float rstd, const tiles *t,
                           float *sum, int64_t n) {
    float dy[TILE];
    load(&a->v[DY], row, column, dy, n);
    for (int64_t i = 0; i < n && !a->attributes[GATE_FIRST].i; i++) dy[i] *= t->value[i];
    for (int64_t i = 0; i < n; i++) sum[i] += dy[i] * (t->u[i] * rstd);
}

/* With n = u rstd and du = rstd (m - n mean(m n)): the gate last, dx = du, dgate = dy weight n act'(gate); first, dx =
 * du act(gate), dgate = du x act'(gate). */
static void backward_group(const gated_rms_norm_cpu *a, int64_t row, int64_t begin, int64_t end, bool weight,
                           float *dweight, tiles *t) {
    const bst_view *v = a->v, *dx = &v[DX], *dgate = &v[DGATE];
    const bool exact = is_exact(v, v[DY].dtype, true), first = a->attributes[GATE_FIRST].i;
    double squares = 0, projection = 0;
    BST_TILES(c, n, begin, end, TILE) {
        load_tiles(a, row, c, exact, weight, t, n);
        load_gradient(a, row, c, t, n);
        squares += bst_sum_of_products(t->u, t->u, n);
        projection += bst_sum_of_products(t->m, t->u, n);
    }
    float rstd = rstd_of(a, squares, end - begin);
    float slope = (float)(projection * (double)rstd * (double)rstd / (double)(end - begin));
    BST_TILES(c, n, begin, end, TILE) {
        if (end - begin > TILE) {
            load_tiles(a, row, c, exact, weight, t, n);
            load_gradient(a, row, c, t, n);
        }
        if (dweight) add_to_dweight(a, row, c, rstd, t, dweight + c, n);
        for (int64_t i = 0; i < n; i++) {
            float du = rstd * (t->m[i] - t->u[i] * slope);
            t->slope[i] *= first ? du * t->x[i] : t->u[i] * rstd;
            t->m[i] = first ? du * t->value[i] : du;
        }
        if (dx->data) bst_store(bst_at(row_at(dx, row), c, dx->dtype), t->m, dx->dtype, n);
        if (dgate->data) bst_store(bst_at(row_at(dgate, row), c, dgate->dtype), t->slope, dgate->dtype, n);
    }
}

void BST_CPU(bst__gated_rms_norm_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const gated_rms_norm_cpu *a = context;
    const int64_t rows = a->v[X].rows.rows, columns = a->v[X].rows.columns, group = group_of(a->v, a->attributes);
    tiles t;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        float *dweight = a->partial ? a->partial + chunk * columns : NULL;
        if (dweight) memset(dweight, 0, (size_t)columns * sizeof *dweight);
        int64_t first = rows * chunk / a->chunks, last = rows * (chunk + 1) / a->chunks;
        for (int64_t row = first; row < last; row++)
            for (int64_t c = 0; c < columns; c += group)
                backward_group(a, row, c, c + group, row == first || !stays(a, group), dweight, &t);
    }
}

void BST_CPU(bst__gated_rms_norm_sums_cpu)(void *context, int64_t begin, int64_t end) {
    const gated_rms_norm_cpu *a = context;
    const bst_view *out = &a->v[DWEIGHT];
    float sum[TILE];
    BST_TILES(c, n, begin, end, TILE) {
        bst_sum_rows(sum, a->partial + c, a->chunks, a->v[X].rows.columns, n);
        bst_store(bst_at(out->data, c, out->dtype), sum, out->dtype, n);
    }
}
