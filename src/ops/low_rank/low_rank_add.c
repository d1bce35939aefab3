/* low_rank_add.c - what adapters add to the results of layers of one input: checks, then x a^T of all layers, and then
 * what of it each layer's columns get, on CPU and by two kernels on CUDA. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_add_tensors given_tensors;
/* The scales lie in the same struct. */
typedef bst_low_rank_add_tensors given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Of each layer y, a, b, one layer behind another; then what becomes of each y. */
enum { X, Y_0, A_0, B_0, OUT_0 = Y_0 + 3 * LOW_RANK_LAYERS };
#define Y(i) (Y_0 + 3 * (i))
#define A(i) (A_0 + 3 * (i))
#define B(i) (B_0 + 3 * (i))

static const char *const meanings[] = {"Tthe rows of x",      "Kthe columns of x",   "Nthe columns of y_0",
                                       "Mthe columns of y_1", "Pthe columns of y_2", "Rthe rows of a_0",
                                       "Qthe rows of a_1",    "Sthe rows of a_2",    NULL};

static bst_status check_a(const char *op, const bst_view *v) {
    if (v[A_0].dtype == BST_F32) return BST_OK;
    return bst__need_dtype(op, "a_0", &v[A_0], v[X].dtype, "the type of x, or float32");
}

#define LIKE_X   BST_TYPE_OF(X, "the type of x")
#define LIKE_A   BST_TYPE_OF(A_0, "the type of a_0")
#define OPTIONAL BST_OPTIONAL
/* a_0's type is asked for by a function; what comes last is said of the other layers' a alone. */
#define LAYER(i, flags, columns, ranks, of_a, ...)                                                                  \
    [Y(i)] = {"y_" #i, BST_IN | (flags), BST_FLOATS, "T" columns, BST_ROWS, LIKE_X, BST_AT(y[i])},                  \
    [A(i)] = {"a_" #i, BST_IN | (flags), BST_FLOATS, ranks "K", BST_CONTIGUOUS, of_a, BST_AT(a[i]), ##__VA_ARGS__}, \
    [B(i)] = {"b_" #i,        BST_IN | (flags), BST_FLOATS,   columns ranks,                                        \
              BST_CONTIGUOUS, LIKE_A,           BST_AT(b[i]), BST_WITH(Y(i))}
#define RESULT(i, flags, columns)                                                                 \
    [OUT_0 + (i)] = {"y_" #i, BST_OUT | (flags), BST_FLOATS,     "T" columns,           BST_ROWS, \
                     LIKE_X,  BST_AT(y[i]),      BST_WITH(Y(i)), BST_MAY_BE(1u << Y(i))}

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, BST_FLOATS, "TK", BST_ROWS, BST_AT(x)},
    LAYER(0, 0, "N", "R", .check = check_a),
    LAYER(1, OPTIONAL, "M", "Q", LIKE_A, BST_WITH(Y(1))),
    LAYER(2, OPTIONAL, "P", "S", LIKE_A, BST_WITH(Y(2))),
    RESULT(0, 0, "N"),
    RESULT(1, OPTIONAL, "M"),
    RESULT(2, OPTIONAL, "P"),
    {NULL},
};

#define SCALE(i) {"scale_" #i, 'd', .at = offsetof(given_options, scale[i]), .bytes = sizeof(double)}

static const bst_attribute_rule rules[] = {SCALE(0), SCALE(1), SCALE(2), {NULL}};

low_rank_layer bst__low_rank_adapter(const bst_view *a, const bst_view *b, const bst_view *y, const bst_view *out,
                                     float scale, int64_t first) {
    return (low_rank_layer){.a = a->data,
                            .b = b->data,
                            .y = y->data,
                            .out = out->data,
                            .y_stride = low_rank_stride(y),
                            .out_stride = low_rank_stride(out),
                            .columns = y->size[1],
                            .rank = a->size[0],
                            .first = first,
                            .scale = scale};
}

static low_rank_sums read_call(const bst_view *v, const bst_attribute *attributes) {
    low_rank_sums s = {.dtype = v[X].dtype,
                       .factor_type = v[A_0].dtype,
                       .x = v[X].data,
                       .x_stride = low_rank_stride(&v[X]),
                       .rows = v[X].size[0],
                       .width = v[X].size[1]};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        low_rank_layer *layer = &s.layer[i];
        layer->first = s.ranks;
        if (!bst__given(&v[Y(i)])) continue;
        *layer = bst__low_rank_adapter(&v[A(i)], &v[B(i)], &v[Y(i)], &v[OUT_0 + i], (float)attributes[i].d, s.ranks);
        s.ranks += layer->rank;
    }
    return s;
}

/* ---- on CPU ------------------------------------------------------------------------------------------------------ */

static bst_status run_cpu(const bst_exec *exec, low_rank_sums *s) {
    int64_t row_tiles = bst__divided_up(s->rows, LOW_RANK_CPU_ROWS), column_tiles = 0;
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        column_tiles += bst__divided_up(s->layer[i].columns, LOW_RANK_CPU_COLUMNS);
    int64_t most = bst__lesser(s->rows, LOW_RANK_CPU_ROWS);
    BST_TRY(BST_CPU_RUN(exec, row_tiles * s->ranks, most * s->width, bst__low_rank_thin_cpu, s));
    int64_t work = s->rows * (1 + s->ranks / LOW_RANK_LAYERS) * LOW_RANK_CPU_COLUMNS;
    return BST_CPU_RUN(exec, column_tiles, work, bst__low_rank_expand_cpu, s);
}

/* ---- on CUDA ----------------------------------------------------------------------------------------------------- */

static const bst_kernel thin_kernel = {"low_rank_add.cu", "low_rank_add_thin", {"TYPE", "FACTOR", "ROWS", "VEC", NULL}};
static const bst_kernel expand_kernel = {
    "low_rank_add.cu", "low_rank_add_expand", {"TYPE", "FACTOR", "ROWS", "VEC", "LANES", "PIECES", NULL}};

/* Threads that share a column, and vectors that each of them has in flight: 16 to 64 bytes of it. */
enum { MOST_LANES = 8, MOST_PIECES = 4 };

/* The least power of two that is no less, or the most. */
static int64_t power_from(int64_t least, int64_t most) {
    int64_t power = 1;
    while (power < least && power < most) power *= 2;
    return power;
}

static bool is_vector(const void *data, int64_t bytes) { return (uintptr_t)data % 16 == 0 && bytes % 16 == 0; }

/* What every row of x, and of each a, can be read by: 16 bytes of x, or its elements one by one. */
static int64_t thin_vector(const low_rank_sums *s) {
    const int64_t size = bst__dtype_size(s->dtype), of_a = bst__dtype_size(s->factor_type);
    bool aligned = is_vector(s->x, s->width * size) && (s->rows < 2 || s->x_stride * size % 16 == 0);
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (s->layer[i].rank) aligned = aligned && is_vector(s->layer[i].a, s->width * of_a);
    return aligned ? 16 / size : 1;
}

/* The same of each b. */
static int64_t expand_vector(const low_rank_sums *s) {
    const int64_t size = bst__dtype_size(s->factor_type);
    bool aligned = true;
    for (int i = 0; i < LOW_RANK_LAYERS; i++)
        if (s->layer[i].rank) aligned = aligned && is_vector(s->layer[i].b, s->layer[i].rank * size);
    return aligned ? 16 / size : 1;
}

int64_t bst__low_rank_thin_rows(int64_t rows) { return power_from(rows, LOW_RANK_ADD_ROWS); }

low_rank_thin_args bst__low_rank_thin_args(const low_rank_sums *s, int64_t *blocks) {
    low_rank_thin_args a = {.x = s->x,
                            .thin = s->thin,
                            .x_stride = s->x_stride,
                            .rows = s->rows,
                            .width = s->width,
                            .ranks = (int32_t)s->ranks};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) a.a[i] = s->layer[i].a, a.first[i] = (int32_t)s->layer[i].first;
    *blocks = bst__divided_up(s->rows, bst__low_rank_thin_rows(s->rows)) * s->ranks;
    return a;
}

static bst_status launch_thin(const bst_exec *exec, const char *op, int device, const low_rank_sums *s) {
    int64_t blocks = 0;
    const low_rank_thin_args a = bst__low_rank_thin_args(s, &blocks);
    bst_launch l = {.kernel = &thin_kernel,
                    .values = {s->dtype, s->factor_type, bst__low_rank_thin_rows(s->rows), thin_vector(s)},
                    .grid_x = (unsigned)blocks,
                    .block = LOW_RANK_THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op, device, &l, &a, sizeof a);
}

/* How a block of the second kernel shares its threads out. */
typedef struct plan {
    int64_t vector, lanes, pieces, blocks; /* blocks: of a tile of rows */
} plan;

static int64_t blocks_of(const low_rank_layer *layer, const plan *p) {
    return bst__divided_up(layer->columns, LOW_RANK_THREADS / p->lanes);
}

static plan plan_expand(const low_rank_sums *s) {
    plan p = {.vector = expand_vector(s)};
    int64_t most = 0;
    for (int i = 0; i < LOW_RANK_LAYERS; i++) most = s->layer[i].rank > most ? s->layer[i].rank : most;
    int64_t vectors = bst__divided_up(most, p.vector);
    p.lanes = power_from(vectors, MOST_LANES);
    p.pieces = power_from(bst__divided_up(vectors, p.lanes), MOST_PIECES);
    for (int i = 0; i < LOW_RANK_LAYERS; i++) p.blocks += blocks_of(&s->layer[i], &p);
    return p;
}

static bst_status launch_expand(const bst_exec *exec, const char *op, int device, const low_rank_sums *s, const plan *p,
                                int64_t tile) {
    low_rank_expand_args a = {.thin = s->thin, .rows = s->rows, .ranks = (int32_t)s->ranks};
    for (int i = 0; i < LOW_RANK_LAYERS; i++) {
        const low_rank_layer *layer = &s->layer[i];
        a.b[i] = layer->b, a.y[i] = layer->y, a.out[i] = layer->out;
        a.y_stride[i] = layer->y_stride, a.out_stride[i] = layer->out_stride;
        a.columns[i] = layer->columns;
        a.first[i] = (int32_t)layer->first, a.rank[i] = (int32_t)layer->rank;
        a.scale[i] = layer->scale;
        a.first_block[i] = a.blocks;
        a.blocks += (int32_t)blocks_of(layer, p);
    }
    bst_launch l = {.kernel = &expand_kernel,
                    .values = {s->dtype, s->factor_type, tile, p->vector, p->lanes, p->pieces},
                    .grid_x = (unsigned)(bst__divided_up(s->rows, tile) * p->blocks),
                    .block = LOW_RANK_THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op, device, &l, &a, sizeof a);
}

bst_status bst__low_rank_add_sums(const bst_exec *exec, const char *op, int device, const low_rank_sums *s,
                                  bool has_thin) {
    const plan p = plan_expand(s);
    const int64_t tile = bst__low_rank_thin_rows(s->rows), most = s->ranks > p.blocks ? s->ranks : p.blocks;
    if (!p.blocks) return BST_OK;
    BST_TRY(bst__cuda_need_rows(op, bst__divided_up(s->rows, tile), most));
    if (s->ranks && !has_thin) BST_TRY(launch_thin(exec, op, device, s));
    return launch_expand(exec, op, device, s, &p, tile);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

bst_status bst__low_rank_add_all(const bst_exec *exec, const char *op, DLDevice device, low_rank_sums *s) {
    void *thin = NULL;
    if (!s->rows) return BST_OK;
    BST_TRY(bst__allocate(exec, op, device, (size_t)(s->rows * s->ranks) * sizeof(float), &thin));
    s->thin = thin;
    bool on_cuda = device.device_type == kDLCUDA;
    bst_status status = on_cuda ? bst__low_rank_add_sums(exec, op, device.device_id, s, false) : run_cpu(exec, s);
    bst__release(exec, device, thin);
    return status;
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    low_rank_sums s = read_call(v, attributes);
    return bst__low_rank_add_all(exec, op, v[X].device, &s);
}

const bst_function bst__low_rank_add = {
    .name = "low_rank_add",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_GIVEN,
    BST_TORCH("low_rank_add: x y_0 a_0 b_0 y_1 a_1 b_1 y_2 a_2 b_2 scale_0 scale_1 scale_2 -> y_0=y_0 y_1=y_1 "
              "y_2=y_2"),
};

bst_status bst_low_rank_add(const bst_exec *exec, const bst_low_rank_add_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_add, exec, tensors, tensors, NULL);
}
