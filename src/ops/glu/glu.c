/* glu.c - gated units and activations alone: checks, the configuration, and the kernels of the tensors' device. */
#include "ops/glu/glu.h"

#include <math.h>

#include "cuda/cuda.h"
#include "ops/glu/glu_args.h"
#include "ops/glu/glu_cpu.h"

/* ---- options ----------------------------------------------------------------------------------------------------- */

typedef bst_glu_options given_options;

const bst_attribute_rule bst__glu_rules[] = {BST_GLU_RULES, {NULL}};

bst_status bst__glu_need_numbers(const char *op, const bst_attribute *attributes) {
    double alpha = attributes[ALPHA].d, limit = attributes[LIMIT].d;
    if (limit >= 0 && alpha == alpha) return BST_OK;
    return bst__error(BST_INVALID, "%s: alpha is %g and limit %g; numbers, and a limit above 0, are needed", op, alpha,
                      limit);
}

bst_status bst__glu_need_apart(const char *op, const bst_attribute *attributes) {
    BST_TRY(bst__glu_need_numbers(op, attributes));
    if (!attributes[INTERLEAVED].i) return BST_OK;
    return bst__error(BST_INVALID, "%s: interleaved is 1; 0 is needed for two tensors", op);
}

bst_status bst__glu_need_pairs(const char *op, const bst_view *h) {
    if (h->size[h->dims - 1] % 2 == 0) return BST_OK;
    return bst__error(BST_INVALID, "%s: h has shape %s; columns in pairs, gate and up, are needed", op,
                      bst__shape_text(h));
}

bst_unit bst__glu_unit(const bst_attribute *attributes) {
    double alpha = attributes[ALPHA].d, limit = attributes[LIMIT].d;
    bst_unit unit = {.activation = (int)attributes[ACTIVATION].i, .interleaved = attributes[INTERLEAVED].i != 0};
    unit.alpha = alpha != 0 ? (float)alpha : 1.702f;
    unit.limit = limit != 0 ? (float)limit : INFINITY;
    unit.limited = unit.limit == INFINITY ? BST_NO_LIMIT : attributes[OPEN_LIMIT].i ? BST_OPEN_LIMIT : BST_CLOSED_LIMIT;
    return unit;
}

/* ---- description ------------------------------------------------------------------------------------------------- */

/* Gate and up are two tensors, a and b, or joined in one, h. */
enum { A, B, Y, DY, DA, DB };
enum { H, H_Y, H_DY, DH };

#define INPUT(name, flags) {name, flags, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(A), BST_TYPE_OF(A, "the type of a")}
/* A result of the backward pass may take the place of an input, element for element, but not lie across one. */
#define RESULT(name, of)              \
    {name,                            \
     BST_OUT | BST_OPTIONAL,          \
     BST_FLOATS,                      \
     NULL,                            \
     BST_ROWS,                        \
     BST_LIKE(of),                    \
     BST_TYPE_OF(A, "the type of a"), \
     BST_MAY_BE(1u << A | 1u << B | 1u << DY)}
#define OF_H(name, flags, layout, ...) \
    {name, flags, BST_FLOATS, "*-C", layout, BST_TYPE_OF(H, "the type of h"), __VA_ARGS__}

static const bst_argument forward_arguments[] = {
    [A] = {"a", BST_IN, BST_FLOATS, "*I", BST_ROWS},
    [B] = INPUT("b", BST_IN | BST_OPTIONAL),
    [Y] = {"y", BST_OUT, BST_FLOATS, NULL, BST_CONTIGUOUS, BST_LIKE(A), BST_TYPE_OF(A, "the type of a")},
    {NULL},
};

static const bst_argument backward_arguments[] = {
    [A] = {"a", BST_IN, BST_FLOATS, "*I", BST_ROWS},
    [B] = INPUT("b", BST_IN | BST_OPTIONAL),
    [Y] = RESULT("y", A),
    [DY] = INPUT("dy", BST_IN),
    [DA] = RESULT("da", A),
    [DB] = RESULT("db", B),
    {NULL},
};

static const bst_argument joined_forward_arguments[] = {
    [H] = {"h", BST_IN, BST_FLOATS, "*C", BST_ROWS},
    [H_Y] = OF_H("y", BST_OUT, BST_CONTIGUOUS),
    {NULL},
};

static const bst_argument joined_backward_arguments[] = {
    [H] = {"h", BST_IN, BST_FLOATS, "*C", BST_ROWS},
    [H_Y] = OF_H("y", BST_OUT | BST_OPTIONAL, BST_ROWS, BST_MAY_BE(1u << H_DY)),
    [H_DY] = OF_H("dy", BST_IN, BST_ROWS),
    [DH] = {"dh", BST_OUT | BST_OPTIONAL, BST_FLOATS, NULL, BST_ROWS, BST_LIKE(H), BST_TYPE_OF(H, "the type of h"),
            BST_MAY_BE(1u << H)},
    {NULL},
};

/* Limits are the gate's and up's together. */
static bst_status check_apart(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(bst__glu_need_apart(op, attributes));
    if (bst__given(&v[B]) || bst__glu_unit(attributes).limited == BST_NO_LIMIT) return BST_OK;
    return bst__error(BST_INVALID, "%s: limit is %g; none, 0, is needed without b", op, attributes[LIMIT].d);
}

static bst_status check_joined(const char *op, const bst_view *v, const bst_attribute *attributes) {
    BST_TRY(bst__glu_need_numbers(op, attributes));
    return bst__glu_need_pairs(op, &v[H]);
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* clang-format off */
#define MACROS(X) \
    X(TYPE) X(UNIT) X(LIMITED) X(VEC) X(H_VEC) X(THREADS) X(FLAT) X(COLUMNS) X(CHUNKS) X(FOLDED) X(WITH_UP) X(DGATE) \
    X(DUP) X(WITH_Y)
/* clang-format on */
#define PLACE(name) M_##name,
#define NAME(name)  #name,
enum { MACROS(PLACE) };

static const bst_kernel forward_kernel = {"glu.cu", "glu_forward", {MACROS(NAME) "FORWARD"}};
static const bst_kernel backward_kernel = {"glu.cu", "glu_backward", {MACROS(NAME) "BACKWARD"}};

/* One access a thread to each of two or three tensors: 32 to 48 bytes in flight, which at 2048 threads is more than a
 * multiprocessor's share of the bandwidth needs, and short blocks, so that the last ones do not straggle. On an H200 at
 * 16384 x 12288 in bf16: 292 + 467 us; two accesses 294 + 469, four 309 + 479; 256 threads instead of 128: the same. */
enum { MOST_THREADS = 128 };

/* The tensors of a call, in the order of glu_args.h; NULL: not there. Interleaved, gate and up are one, in the gate's
 * place, and so are their gradients. */
typedef const bst_view *glu_views[GLU_TENSORS];

/* y's or dy's rows, which say how many there are. */
static const bst_view *model_of(const glu_views of) { return of[GLU_DY] ? of[GLU_DY] : of[GLU_Y]; }

static bool is_pairs(const bst_unit *unit, int place) {
    return unit->interleaved && (place == GLU_GATE || place == GLU_DGATE);
}

static bool all_packed(const glu_views of) {
    for (int i = 0; i < GLU_TENSORS; i++)
        if (of[i] && !bst__rows_packed(&of[i]->rows)) return false;
    return true;
}

static bst_status launch(const bst_exec *exec, const char *op, const bst_kernel *kernel, const glu_views of,
                         const bst_unit *unit) {
    const bst_view *model = model_of(of);
    bst_launch l = {.kernel = kernel};
    glu_args args = {.count = model->count, .alpha = unit->alpha, .limit = unit->limit};
    bool flat = all_packed(of), one_stride = true;
    int vec = 8, h_vec = 8, threads = MOST_THREADS;
    for (int i = 0; i < GLU_TENSORS; i++) {
        if (!of[i]) continue;
        int allowed = bst__row_vector(of[i], &of[i]->rows), *least = is_pairs(unit, i) ? &h_vec : &vec;
        if (allowed < *least) *least = allowed;
        one_stride = one_stride && bst__rows_folded(&of[i]->rows);
        args.at[i] = of[i]->data;
        args.map[i] = bst__row_map(&of[i]->rows);
    }
    /* Pairs in one access of 16 bytes at most; single elements where memory begins between two pairs. */
    if (unit->interleaved && 2 * vec > h_vec) vec = h_vec > 1 ? h_vec / 2 : 1;
    if (h_vec > 2 * vec) h_vec = 2 * vec;
    int64_t columns = flat ? model->count : model->rows.columns;
    while (!flat && threads > 32 && threads / 2 * vec >= columns) threads /= 2;
    int64_t chunks = (columns + threads * vec - 1) / (threads * vec);
    l.values[M_TYPE] = model->dtype;
    l.values[M_UNIT] = unit->activation;
    l.values[M_LIMITED] = unit->limited;
    l.values[M_VEC] = vec;
    l.values[M_H_VEC] = unit->interleaved ? h_vec : 0;
    l.values[M_THREADS] = threads;
    l.values[M_FLAT] = flat;
    l.values[M_COLUMNS] = flat ? 0 : columns;
    l.values[M_CHUNKS] = flat ? 1 : chunks;
    l.values[M_FOLDED] = one_stride;
    l.values[M_WITH_UP] = unit->interleaved || of[GLU_UP];
    l.values[M_DGATE] = of[GLU_DGATE] != NULL;
    l.values[M_DUP] = of[GLU_DUP] != NULL;
    l.values[M_WITH_Y] = of[GLU_Y] != NULL;
    l.grid_x = (unsigned)(flat ? chunks : chunks * model->rows.rows);
    l.block = (unsigned)threads;
    /* Without gaps there are elements in place of rows: memory ends before they fill a grid. */
    if (!flat) BST_TRY(bst__cuda_need_rows(op, model->rows.rows, chunks));
    return bst__cuda_launch(exec, op, model->device.device_id, &l, &args, sizeof args);
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static bst_status run_unit(const bst_exec *exec, const char *op, bool is_backward, const glu_views of,
                           const bst_unit *unit) {
    const bst_view *model = model_of(of);
    if (model->device.device_type == kDLCUDA)
        return launch(exec, op, is_backward ? &backward_kernel : &forward_kernel, of, unit);
    bool flat = all_packed(of); /* then all is one row */
    glu_cpu call = {.dtype = model->dtype, .unit = *unit, .columns = flat ? model->count : model->rows.columns};
    for (int i = 0; i < GLU_TENSORS; i++) {
        if (!of[i]) continue;
        int64_t n = of[i]->count;
        bst_rows one = {.rows = 1, .columns = n, .inner = 1, .inner_stride = n, .outer_stride = n};
        call.of[i] = (glu_matrix){of[i]->data, flat ? one : of[i]->rows};
    }
    return is_backward ? BST_CPU_RUN(exec, model->count, 1, bst__glu_backward_cpu, &call)
                       : BST_CPU_RUN(exec, model->count, 1, bst__glu_forward_cpu, &call);
}

static const bst_view *given(const bst_view *v) { return bst__given(v) ? v : NULL; }

static bst_status run_forward(const bst_exec *exec, const char *op, const bst_view *v,
                              const bst_attribute *attributes) {
    const glu_views of = {[GLU_GATE] = &v[A], [GLU_UP] = given(&v[B]), [GLU_Y] = &v[Y]};
    bst_unit unit = bst__glu_unit(attributes);
    return v[A].count ? run_unit(exec, op, false, of, &unit) : BST_OK;
}

static bst_status run_backward(const bst_exec *exec, const char *op, const bst_view *v,
                               const bst_attribute *attributes) {
    const glu_views of = {&v[A], given(&v[B]), given(&v[Y]), &v[DY], given(&v[DA]), given(&v[DB])};
    bst_unit unit = bst__glu_unit(attributes);
    if (!v[A].count || (!of[GLU_Y] && !of[GLU_DGATE] && !of[GLU_DUP])) return BST_OK;
    return run_unit(exec, op, true, of, &unit);
}

/* The halves of rows as views of their own; NULL where there are none. */
static void halve(const bst_view *h, bst_view halves[2], const bst_view **first, const bst_view **second) {
    if (!h) return;
    halves[0] = *h;
    halves[0].rows.columns /= 2;
    halves[0].count /= 2;
    halves[1] = halves[0];
    halves[1].data = (char *)h->data + halves[0].rows.columns * bst__dtype_size(h->dtype);
    *first = &halves[0];
    *second = &halves[1];
}

static bst_status run_joined(const bst_exec *exec, const char *op, const bst_view *h, const bst_view *y,
                             const bst_view *dy, const bst_view *dh, const bst_attribute *attributes) {
    glu_views of = {[GLU_GATE] = h, [GLU_Y] = y, [GLU_DY] = dy, [GLU_DGATE] = dh};
    bst_view halves[2][2];
    bst_unit unit = bst__glu_unit(attributes);
    if (!h->count || (!y && !dh)) return BST_OK;
    if (!unit.interleaved) {
        halve(h, halves[0], &of[GLU_GATE], &of[GLU_UP]);
        halve(dh, halves[1], &of[GLU_DGATE], &of[GLU_DUP]);
    }
    return run_unit(exec, op, dy != NULL, of, &unit);
}

static bst_status run_joined_forward(const bst_exec *exec, const char *op, const bst_view *v,
                                     const bst_attribute *attributes) {
    return run_joined(exec, op, &v[H], &v[H_Y], NULL, NULL, attributes);
}

static bst_status run_joined_backward(const bst_exec *exec, const char *op, const bst_view *v,
                                      const bst_attribute *attributes) {
    return run_joined(exec, op, &v[H], given(&v[H_Y]), &v[H_DY], given(&v[DH]), attributes);
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

/* swiglu_*: the usual unit, without arguments that say so; activation_*: without up. */
#define OPTIONS        "activation alpha limit open_limit "
#define JOINED_OPTIONS "activation interleaved alpha limit open_limit "

static const bst_function forward = {
    .name = "glu_forward",
    .arguments = forward_arguments,
    .attributes = bst__glu_rules,
    .check = check_apart,
    .run = run_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("swiglu_forward: a b! -> y", "glu_forward: " OPTIONS "a b! -> y",
              "activation_forward: activation alpha a -> y"),
};

static const bst_function backward = {
    .name = "glu_backward",
    .arguments = backward_arguments,
    .attributes = bst__glu_rules,
    .check = check_apart,
    .run = run_backward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("swiglu_backward: dy a b! -> da? db?", "swiglu_backward_with_y: dy a b! -> da? db? y",
              "swiglu_backward_inplace: dy a b! -> da?=a db?=b y?=dy", "glu_backward: " OPTIONS "dy a b! -> da? db?",
              "glu_backward_with_y: " OPTIONS "dy a b! -> da? db? y",
              "glu_backward_inplace: " OPTIONS "dy a b! -> da?=a db?=b y?=dy",
              "activation_backward: activation alpha dy a -> da?",
              "activation_backward_with_y: activation alpha dy a -> da? y",
              "activation_backward_inplace: activation alpha dy a -> da?=a y?=dy"),
};

static const bst_function joined_forward = {
    .name = "glu_joined_forward",
    .arguments = joined_forward_arguments,
    .attributes = bst__glu_rules,
    .check = check_joined,
    .run = run_joined_forward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("glu_joined_forward: " JOINED_OPTIONS "h -> y"),
};

static const bst_function joined_backward = {
    .name = "glu_joined_backward",
    .arguments = joined_backward_arguments,
    .attributes = bst__glu_rules,
    .check = check_joined,
    .run = run_joined_backward,
    BST_GIVEN_OPTIONS,
    BST_TORCH("glu_joined_backward: " JOINED_OPTIONS "dy h -> dh"),
};

bst_status bst_glu_forward(const bst_exec *exec, const DLTensor *a, const DLTensor *b, const bst_glu_options *options,
                           DLTensor *y) {
    return bst__call(&forward, exec, (const DLTensor *[]){[A] = a, [B] = b, [Y] = y}, options, NULL);
}

bst_status bst_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *a, const DLTensor *b,
                            const bst_glu_options *options, DLTensor *da, DLTensor *db, DLTensor *y) {
    const DLTensor *tensors[] = {[A] = a, [B] = b, [Y] = y, [DY] = dy, [DA] = da, [DB] = db};
    return bst__call(&backward, exec, tensors, options, NULL);
}

bst_status bst_glu_joined_forward(const bst_exec *exec, const DLTensor *h, const bst_glu_options *options,
                                  DLTensor *y) {
    return bst__call(&joined_forward, exec, (const DLTensor *[]){[H] = h, [H_Y] = y}, options, NULL);
}

bst_status bst_glu_joined_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *h,
                                   const bst_glu_options *options, DLTensor *dh, DLTensor *y) {
    const DLTensor *tensors[] = {[H] = h, [H_Y] = y, [H_DY] = dy, [DH] = dh};
    return bst__call(&joined_backward, exec, tensors, options, NULL);
}

const bst_function *const bst__glu[] = {&forward, &backward, &joined_forward, &joined_backward, NULL};
