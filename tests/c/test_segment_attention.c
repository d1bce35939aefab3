/* test_segment_attention.c - attention within segments through the C API: values and gradients against plain loops in
 * double, in each type, with gaps, groups, segments without queries or without keys; errors; its kernels on every chip.
 *
 * CUDA serves heads of multiples of 8 up to 256 in 16 bits. */
#include <math.h>

#include "chips.h"
#include "core/cpu_kernel.h"

enum { MOST = 1 << 18, MOST_CUTS = 16, MOST_QUERIES = 512, MOST_HEADS = 8, MOST_DIM = 256 };

static const DLDataType i32 = {kDLInt, 32, 1};
#ifdef BST_EMULATE
static const bool on_gpu = true;
#else
static const bool on_gpu = false;
#endif

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* [tokens, heads, dim] of any type, a gap behind each head and each token. */
typedef struct cube {
    float *data;
    int64_t shape[3], strides[3];
    int type;
} cube;

static int64_t place(const cube *x, int64_t token, int64_t head, int64_t i) {
    return token * x->strides[0] + head * x->strides[1] + i;
}

static double number(const cube *x, int64_t token, int64_t head, int64_t i) {
    const int64_t at = place(x, token, head, i);
    if (!x->type) return (double)x->data[at];
    const uint16_t half = ((const uint16_t *)x->data)[at];
    return (double)(x->type == 1 ? bst_from_bf16(half) : bst_from_f16(half));
}

/* Numbers up to `most`, and NaN in the gaps; of seed 0 all bits are ones, which is NaN. */
static cube filled(float *data, int64_t tokens, int64_t heads, int64_t dim, int64_t gap, int type, unsigned seed,
                   float most) {
    cube x = {data, {tokens, heads, dim}, {heads * (dim + gap) + gap, dim + gap, 1}, type};
    memset(data, 0xff, MOST * sizeof *data);
    if (tokens * x.strides[0] > MOST) FAILED("the test's arrays are too small");
    for (int64_t t = 0; seed && t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float row[MOST_DIM];
            bst_fill(row, dim, seed + (unsigned)(t * heads + h) * 977u, most);
            bst_store((char *)data + place(&x, t, h, 0) * (type ? 2 : 4), row, (bst_dtype)type, dim);
        }
    return x;
}

static DLTensor tensor_of(cube *x) { return bst_tensor(x->data, 3, x->shape, x->strides, bst_test_types[x->type]); }

/* What lies behind an output is as it was. */
static void check_end(const cube *x) {
    const unsigned char *end = (unsigned char *)x->data + x->shape[0] * x->strides[0] * (x->type ? 2 : 4);
    CHECK(end[0] == 0xff && end[1] == 0xff);
}

/* ---- what must be ------------------------------------------------------------------------------------------------ */

typedef struct problem {
    const char *name;
    int32_t queries[MOST_CUTS], keys[MOST_CUTS]; /* where segments begin, and the last one ends */
    int64_t segments, heads, groups, dim;
    bool causal;
    double scale; /* 0: the usual */
    int type;
    int64_t gap;
    float most; /* of q, k, v and dy */
    int window; /* 0: none */
    bool even;  /* segments are all as long, and no cuts say so */
} problem;

static float qs[MOST], ks[MOST], vs[MOST], ys[MOST], dys[MOST], dqs[MOST], dks[MOST], dvs[MOST],
    lses[MOST_HEADS * MOST_QUERIES + 1];

static double unit_of(int type) { return type == 0 ? 0x1p-24 : type == 1 ? 0x1p-8 : 0x1p-11; }

/* A number beside the terms that it is the sum of, which bound its error. */
typedef struct sum {
    double value, size;
} sum;

static sum dot(const cube *a, int64_t at, int64_t head, const cube *b, int64_t bt, int64_t other) {
    sum s = {0, 0};
    for (int64_t i = 0; i < a->shape[2]; i++) {
        const double product = number(a, at, head, i) * number(b, bt, other, i);
        s.value += product, s.size += fabs(product);
    }
    return s;
}

static void compare(const char *what, const problem *p, const cube *got, const double *want, const double *error) {
    const int64_t count = got->shape[0] * got->shape[1] * got->shape[2];
    int64_t wrong = 0, first = -1;
    for (int64_t e = 0; e < count; e++) {
        const int64_t i = e % got->shape[2], h = e / got->shape[2] % got->shape[1],
                      t = e / got->shape[2] / got->shape[1];
        const double most = error[e] + (error[e] > 0 ? unit_of(p->type) * fabs(want[e]) + 0x1p-25 : 0);
        if (fabs(number(got, t, h, i) - want[e]) <= most) continue;
        if (!wrong++) first = e;
    }
    if (wrong)
        FAILED("%s: %s of type %d%s, heads of %d: %d of %d wrong, the first is %d", p->name, what, p->type,
               p->causal ? ", causal" : "", (int)p->dim, (int)wrong, (int)count, (int)first);
    check_end(got);
}

/* Both passes of a problem. Scores in float32 are off by a rounding a term at most, which is what their exponentials
 * are off by, relatively; tensor cores multiply weights that are rounded to 16 bits. Gradients are those of the y and
 * lse that forward wrote. */
static void check(const problem *p) {
    const int64_t queries = p->queries[p->segments], keys = p->keys[p->segments], heads = p->heads, dim = p->dim;
    const int64_t each = heads / p->groups, query_count = queries * heads * dim, key_count = keys * p->groups * dim;
    const double scale = p->scale != 0 ? p->scale : 1 / sqrt((double)dim), step = 0x1p-23;
    const double rounded = on_gpu ? unit_of(p->type) : 0;
    const double least = on_gpu && p->type == 2 ? 0x1p-25 : 0; /* what float16's small numbers are off by */
    cube q = filled(qs, queries, heads, dim, p->gap, p->type, 1, p->most);
    cube k = filled(ks, keys, p->groups, dim, p->gap, p->type, 2, p->most);
    cube v = filled(vs, keys, p->groups, dim, p->gap, p->type, 3, p->most);
    cube dy = filled(dys, queries, heads, dim, p->gap, p->type, 4, p->most);
    cube y = filled(ys, queries, heads, dim, 0, p->type, 0, 0), dq = filled(dqs, queries, heads, dim, 0, p->type, 0, 0);
    cube dk = filled(dks, keys, p->groups, dim, 0, p->type, 0, 0);
    cube dv = filled(dvs, keys, p->groups, dim, 0, p->type, 0, 0);
    int32_t both[2 * MOST_CUTS];
    memcpy(both, p->queries, (size_t)(p->segments + 1) * sizeof *both);
    memcpy(both + p->segments + 1, p->keys, (size_t)(p->segments + 1) * sizeof *both);
    int64_t of_cuts[] = {2, p->segments + 1}, of_lse[] = {heads, queries};
    DLTensor t[] = {tensor_of(&q),           tensor_of(&k),  tensor_of(&v),
                    tensor_of(&y),           tensor_of(&dy), tensor_of(&dq),
                    tensor_of(&dk),          tensor_of(&dv), bst_tensor(both, 2, of_cuts, NULL, i32),
                    bst_f32(lses, 2, of_lse)};
    memset(lses, 0xff, sizeof lses);
    bst_segment_attention_tensors given = {sizeof given,  .q = &t[0], .k = &t[1],  .v = &t[2],
                                           .cuts = &t[8], .y = &t[3], .lse = &t[9]};
    bst_segment_attention_options options = {sizeof options, p->scale, p->causal, .window = p->window};
    if (p->even) given.cuts = NULL, options.rows = p->segments > 1 ? (int)p->segments : 0;
    CHECK_OK(bst_segment_attention_forward(NULL, &given, &options));
    given.dy = &t[4], given.dq = &t[5], given.dk = &t[6], given.dv = &t[7];
    CHECK_OK(bst_segment_attention_backward(NULL, &given, &options));

    double *room = calloc((size_t)(4 * query_count + 4 * key_count + 2 * (keys + 1)), sizeof *room);
    double *want_y = room, *off_y = want_y + query_count, *want_dq = off_y + query_count,
           *off_dq = want_dq + query_count;
    double *want_dk = off_dq + query_count, *off_dk = want_dk + key_count, *want_dv = off_dk + key_count,
           *off_dv = want_dv + key_count, *scores = off_dv + key_count, *sizes = scores + keys + 1;
    int64_t wrong = 0;
    for (int64_t n = 0; n < p->segments; n++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = p->queries[n]; i < p->queries[n + 1]; i++) {
                const int64_t g = h / each, end = p->keys[n + 1], at = end - (p->queries[n + 1] - i);
                const int64_t window = p->window ? p->window : INT32_MAX, to = (i * heads + h) * dim;
                const int64_t begin = at - window + 1 > p->keys[n] ? at - window + 1 : p->keys[n];
                const int64_t last = p->causal ? at + 1 : at + window, seen = last < end ? last : end;
                double top = -INFINITY, total = 0, off = 0;
                for (int64_t j = begin; j < seen; j++) {
                    sum s = dot(&q, i, h, &k, j, g);
                    scores[j] = scale * s.value;
                    sizes[j] = (double)(dim + 4) * step * fabs(scale) * s.size;
                    top = fmax(top, scores[j]), off = fmax(off, sizes[j]);
                }
                for (int64_t j = begin; j < seen; j++) total += exp(scores[j] - top);
                const double lse = seen > begin ? top + log(total) : INFINITY;
                const double wrote = (double)lses[h * queries + i], near = off + 4 * step * (fabs(top) + fabs(lse) + 1);
                wrong += !(seen > begin ? fabs(wrote - lse) <= near : wrote == lse);
                const sum delta = dot(&dy, i, h, &y, i, h);
                for (int64_t j = begin; j < seen; j++) {
                    const int64_t from = (j * p->groups + g) * dim;
                    const double weight = exp(scores[j] - lse), again = exp(scores[j] - wrote);
                    const double of_weight = expm1(sizes[j] + 2 * near + (double)(seen - begin + 8) * step) + rounded;
                    const sum dp = dot(&dy, i, h, &v, j, g);
                    const double ds = again * (dp.value - delta.value);
                    const double of_ds =
                        fabs(ds) * (of_weight + rounded) + again * (double)(dim + 8) * step * (dp.size + delta.size);
                    const double long_sums = (double)(queries * each + 8) * step; /* dk's and dv's */
                    for (int64_t e = 0; e < dim; e++) {
                        const double of_v = number(&v, j, g, e), of_k = number(&k, j, g, e) * scale;
                        const double of_q = number(&q, i, h, e) * scale, of_dy = number(&dy, i, h, e);
                        want_y[to + e] += weight * of_v, off_y[to + e] += fabs(of_v) * (weight * of_weight + least);
                        want_dq[to + e] += ds * of_k;
                        off_dq[to + e] += fabs(of_k) * (of_ds + least + fabs(ds) * (double)(seen - begin + 8) * step);
                        want_dk[from + e] += ds * of_q,
                            off_dk[from + e] += fabs(of_q) * (of_ds + least + fabs(ds) * long_sums);
                        want_dv[from + e] += again * of_dy;
                        off_dv[from + e] += fabs(of_dy) * (again * (of_weight + long_sums) + least);
                    }
                }
            }
    if (wrong) FAILED("%s: lse of type %d: %d wrong", p->name, p->type, (int)wrong);
    CHECK(isnan(lses[heads * queries]));
    compare("y", p, &y, want_y, off_y);
    compare("dq", p, &dq, want_dq, off_dq);
    compare("dk", p, &dk, want_dk, off_dk);
    compare("dv", p, &dv, want_dv, off_dv);
    free(room);
}

/* ---- problems ---------------------------------------------------------------------------------------------------- */

static const problem problems[] = {
    /* More than a tile of each, not whole ones. */
    {"one segment", {0, 133}, {0, 133}, 1, 2, 2, 64, .most = 2},
    /* Of no tokens, of one, shorter and longer than a tile; fewer and more keys than queries, so that with causal some
     * queries see nothing and some keys are seen by all; no keys, no queries. */
    {"many segments",
     {0, 0, 1, 30, 94, 94, 100, 170, 190, 190},
     {0, 0, 1, 30, 40, 47, 47, 130, 197, 197},
     9,
     4,
     2,
     64,
     .most = 2,
     .gap = 8},
    /* Heads that share keys, on wide heads; a scale of one's own. */
    {"groups", {0, 17, 70}, {0, 65, 118}, 2, 6, 1, 128, .most = 1, .scale = 0.25},
    /* Wide heads, whose tiles of keys are smaller. */
    {"wide heads", {0, 70, 150}, {0, 100, 190}, 2, 2, 1, 256, .most = 1},
    /* A query beside all keys, as in generation. */
    {"a query each", {0, 1, 2, 3}, {0, 40, 41, 170}, 3, 2, 1, 128, .most = 2, .gap = 8},
    /* Scores whose exponentials float32 does not hold: the largest is subtracted. */
    {"large scores", {0, 66}, {0, 130}, 1, 1, 1, 64, .most = 8, .scale = 1},
    /* More tiles than there are stages, and with causal a diagonal that cuts through several. */
    {"tiles", {0, 5, 290}, {0, 5, 300}, 2, 1, 1, 64, .most = 2},
    /* Heads that are no whole boxes: what is behind their columns is not there. */
    {"heads of 40", {0, 9, 80}, {0, 40, 120}, 2, 4, 2, 40, .most = 2, .gap = 8},
    {"heads of 96", {0, 70, 140}, {0, 66, 180}, 2, 2, 1, 96, .most = 1},
    {"heads of 200", {0, 30, 110}, {0, 30, 150}, 2, 2, 1, 200, .most = 1, .gap = 8},
    /* All as long, without cuts; fewer keys, so that with causal some queries see none. */
    {"rows", {0, 70, 140, 210}, {0, 70, 140, 210}, 3, 2, 1, 64, .most = 2, .even = true},
    {"one row", {0, 90}, {0, 90}, 1, 2, 1, 64, .most = 2, .even = true},
    {"rows of fewer keys", {0, 50, 100}, {0, 40, 80}, 2, 2, 2, 64, .most = 2, .even = true},
    /* Windows: of one key, within a tile, of whole tiles and beyond, as long as a segment; with more keys than queries,
     * and fewer, of which the first see none. */
    {"a window of one", {0, 3, 150}, {0, 3, 150}, 2, 2, 1, 64, .most = 2, .window = 1},
    {"a window", {0, 280}, {0, 280}, 1, 1, 1, 64, .most = 2, .window = 37},
    {"a window and tiles", {0, 400}, {0, 400}, 1, 2, 1, 64, .most = 2, .window = 130, .even = true},
    {"a window of wide heads", {0, 150, 210}, {0, 150, 280}, 2, 2, 1, 256, .most = 1, .window = 66},
    {"a window of all", {0, 100, 190}, {0, 100, 190}, 2, 2, 1, 64, .most = 2, .window = 100},
    {"a window, more keys", {0, 60, 70}, {0, 200, 340}, 2, 2, 1, 128, .most = 1, .window = 70},
    {"a window, fewer keys", {0, 200, 260}, {0, 20, 22}, 2, 2, 1, 64, .most = 2, .window = 30},
    /* No keys at all. */
    {"no keys", {0, 20, 30}, {0, 0, 0}, 2, 2, 1, 64, .most = 2},
};

static const problem odd_sizes[] = {
    {"heads of one", {0, 70}, {0, 70}, 1, 1, 1, 1, .most = 2},
    {"narrow", {0, 3, 80}, {0, 66, 70}, 2, 3, 3, 19, .most = 2, .gap = 3},
    {"wide", {0, 9, 12}, {0, 9, 20}, 2, 2, 1, 200, .most = 1, .gap = 1},
};

TEST(values_and_gradients) {
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (int type = on_gpu ? 1 : 0; type < 3; type++)
            for (int causal = 0; causal < 2; causal++) {
                problem p = problems[i];
                p.type = type, p.causal = causal;
                check(&p);
            }
}

TEST(heads_of_any_size) {
    if (on_gpu) return;
    for (size_t i = 0; i < sizeof odd_sizes / sizeof *odd_sizes; i++)
        for (int type = 0; type < 3; type++)
            for (int causal = 0; causal < 2; causal++) {
                problem p = odd_sizes[i];
                p.type = type, p.causal = causal;
                check(&p);
            }
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* A small call that is in order, of `tokens` queries and keys, and what it writes. */
typedef struct small {
    cube x[8];
    DLTensor t[10];
    int32_t both[10];
    int64_t of_cuts[2], of_lse[2];
    bst_segment_attention_tensors given;
} small;

enum { Q, K, V, Y, DY, DQ, DK, DV, CUTS, LSE };

static void make_small(small *s, int64_t tokens, int64_t heads) {
    static float *const data[] = {qs, ks, vs, ys, dys, dqs, dks, dvs};
    for (int i = 0; i < 8; i++) {
        bool is_output = i == Y || i >= DQ;
        s->x[i] = filled(data[i], tokens, heads, 64, 0, 1, is_output ? 0 : (unsigned)i + 1, 2);
        s->t[i] = tensor_of(&s->x[i]);
    }
    const int32_t end = (int32_t)tokens, at[] = {0, end / 3, end / 2, end / 2, end};
    memcpy(s->both, at, sizeof at), memcpy(s->both + 5, at, sizeof at);
    s->of_cuts[0] = 2, s->of_cuts[1] = 5, s->of_lse[0] = heads, s->of_lse[1] = tokens;
    s->t[CUTS] = bst_tensor(s->both, 2, s->of_cuts, NULL, i32);
    s->t[LSE] = bst_f32(lses, 2, s->of_lse);
    memset(lses, 0xff, sizeof lses);
    s->given = (bst_segment_attention_tensors){sizeof s->given, &s->t[Q],  &s->t[K],  &s->t[V],  &s->t[CUTS], &s->t[Y],
                                               &s->t[LSE],      &s->t[DY], &s->t[DQ], &s->t[DK], &s->t[DV]};
}

static bst_status forward(const small *s) { return bst_segment_attention_forward(NULL, &s->given, NULL); }
static bst_status backward(const small *s) { return bst_segment_attention_backward(NULL, &s->given, NULL); }

static bool all_ones(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)data)[i] != 0xff) return false;
    return true;
}

static void check_unwritten(void) {
    CHECK(all_ones(dqs, sizeof dqs) && all_ones(dks, sizeof dks) && all_ones(dvs, sizeof dvs));
    CHECK(all_ones(ys, sizeof ys) && all_ones(lses, sizeof lses));
}

static void refused(const small *s, bool both, bst_status status, const char *said) {
    CHECK_EQ_I(backward(s), status);
    CHECK_STR(bst_last_error(), "segment_attention_backward: ");
    CHECK_STR(bst_last_error(), said);
    if (both) {
        CHECK_EQ_I(forward(s), status);
        CHECK_STR(bst_last_error(), "segment_attention_forward: ");
        CHECK_STR(bst_last_error(), said);
    }
    check_unwritten();
}

TEST(errors_name_the_argument_and_write_nothing) {
    small s;
    cube other;
    DLTensor wrong;
#define WRONG(member, what)                         \
    make_small(&s, 12, 4), wrong = *s.given.member; \
    what;                                           \
    s.given.member = &wrong
    make_small(&s, 12, 4);
    s.given.k = NULL;
    refused(&s, true, BST_INVALID, "k is NULL");
    make_small(&s, 12, 4);
    s.given.dy = NULL;
    refused(&s, false, BST_INVALID, "dy is NULL");
    make_small(&s, 12, 4);
    s.given.lse = NULL;
    refused(&s, true, BST_INVALID, "lse is NULL");
    WRONG(k, wrong.dtype = bst_test_types[2]);
    refused(&s, true, BST_INVALID, "k is float16; bfloat16 is needed, the type of q");
    WRONG(lse, wrong.dtype = i32);
    refused(&s, true, BST_UNSUPPORTED, "lse has elements of type int32");
    WRONG(cuts, wrong.dtype = bst_test_types[0]);
    refused(&s, true, BST_UNSUPPORTED, "cuts has elements of type float32");
    int64_t shape[] = {12, 4, 32}, single[] = {2, 1}, three[] = {3, 3}, five[] = {12, 5, 64}, none[] = {12, 4, 0};
    WRONG(v, wrong.shape = shape);
    refused(&s, true, BST_INVALID, "v has shape [12, 4, 32]");
    WRONG(dy, wrong.shape = shape);
    refused(&s, false, BST_INVALID, "dy has shape [12, 4, 32]");
    WRONG(cuts, wrong.shape = single);
    refused(&s, true, BST_INVALID, "cuts has rows of 1 elements; two or more, 0 first, are needed");
    WRONG(cuts, wrong.shape = three);
    refused(&s, true, BST_INVALID, "cuts has shape [3, 3]");
    make_small(&s, 12, 4);
    other = filled(ks, 12, 5, 64, 0, 1, 2, 2), wrong = tensor_of(&other), wrong.shape = five;
    s.given.k = s.given.v = &wrong;
    refused(&s, true, BST_INVALID, "q has 4 heads and k 5; a multiple is needed");
    make_small(&s, 12, 4);
    wrong = s.t[Q], wrong.shape = none;
    s.given.q = s.given.k = s.given.v = &wrong;
    refused(&s, true, BST_INVALID, "q has heads of 0 elements; 1 or more are needed");
    int64_t strides[] = {4 * 64 * 2, 64 * 2, 2};
    WRONG(q, wrong.strides = strides);
    refused(&s, true, BST_UNSUPPORTED, "q");
    make_small(&s, 12, 4);
    s.t[DV].data = s.t[DK].data;
    refused(&s, false, BST_INVALID, "dk and dv share memory");
    make_small(&s, 12, 4);
    s.given.size = 3;
    refused(&s, true, BST_INVALID, "size is 3");
}

/* Without cuts there is one segment, or so many rows as divide both. */
TEST(rows_that_are_wrong) {
    small s;
    bst_segment_attention_options options = {sizeof options, .rows = 5};
    const struct {
        int rows, window;
        bool cuts;
        const char *said;
    } wrong[] = {{5, 0, false, "q has 12 tokens and k 12, and rows is 5; multiples of it are needed"},
                 {4, 0, true, "cuts is given, and rows; one of both is needed"},
                 {-1, 0, false, "rows is -1"},
                 {0, -1, true, "window is -1"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        make_small(&s, 12, 4);
        if (!wrong[i].cuts) s.given.cuts = NULL;
        options.rows = wrong[i].rows, options.window = wrong[i].window;
        CHECK_EQ_I(bst_segment_attention_forward(NULL, &s.given, &options), BST_INVALID);
        CHECK_STR(bst_last_error(), wrong[i].said);
        CHECK_EQ_I(bst_segment_attention_backward(NULL, &s.given, &options), BST_INVALID);
        CHECK_STR(bst_last_error(), wrong[i].said);
        check_unwritten();
    }
}

/* Cuts that are none. On a GPU nobody looks at them before they are used: the call ends, and no access is out of
 * bounds. On CPU they are refused. */
TEST(cuts_that_are_wrong) {
    enum { END = 70 };
    const struct {
        int32_t at[5];
        const char *said;
    } wrong[] = {{{1, 5, 6, 65, END}, "] begins with 1; 0 is needed"},
                 {{0, 66, 6, 66, END}, "] has 6 behind 66; numbers that do not fall are needed"},
                 {{0, 5, 6, 66, END - 1}, "] ends with 69; 70 is needed"},
                 {{-1, 5, 6, 65, END}, "] begins with -1; 0 is needed"},
                 {{0, 5, END + 1, END + 65, END + 65}, "] ends with 135; 70 is needed"},
                 {{INT32_MAX, INT32_MIN, INT32_MAX, -64, INT32_MAX}, "] begins with 2147483647; 0 is needed"},
                 {{0, 0, 60, 0, END}, "] has 0 behind 60; numbers that do not fall are needed"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (int row = 0; row < 2; row++) {
            small s;
            make_small(&s, END, 2);
            memcpy(s.both + 5 * row, wrong[i].at, sizeof wrong[i].at);
            if (!on_gpu) {
                refused(&s, true, BST_INVALID, wrong[i].said);
                CHECK_STR(bst_last_error(), row ? "cuts[1]" : "cuts[0]");
                continue;
            }
            CHECK_OK(forward(&s));
            CHECK_OK(backward(&s));
            check_end(&s.x[Y]), check_end(&s.x[DQ]), check_end(&s.x[DK]), check_end(&s.x[DV]);
        }
}

/* The fewest of each: calls without queries, without heads, of empty segments alone. Keys that nobody sees have
 * gradients of 0. */
TEST(nothing_to_do) {
    small s;
    for (int i = 0; i < 3; i++) {
        make_small(&s, 12, i == 1 ? 0 : 4);
        memset(s.both, 0, sizeof s.both);
        if (i == 0) s.x[Q].shape[0] = s.x[Y].shape[0] = s.x[DY].shape[0] = s.x[DQ].shape[0] = s.of_lse[1] = 0;
        if (i == 1) { /* no query has heads, and keys have */
            s.x[K] = filled(ks, 12, 3, 64, 0, 1, 2, 2), s.x[V] = filled(vs, 12, 3, 64, 0, 1, 3, 2);
            s.x[DK] = filled(dks, 12, 3, 64, 0, 1, 0, 2), s.x[DV] = filled(dvs, 12, 3, 64, 0, 1, 0, 2);
            s.t[K] = tensor_of(&s.x[K]), s.t[V] = tensor_of(&s.x[V]);
            s.t[DK] = tensor_of(&s.x[DK]), s.t[DV] = tensor_of(&s.x[DV]);
        }
        if (i == 2)
            for (int n = 0; n < 8; n++) s.x[n].shape[0] = s.of_lse[1] = 0;
        s.both[4] = (int32_t)s.x[Q].shape[0], s.both[9] = (int32_t)s.x[K].shape[0];
        CHECK_OK(forward(&s));
        CHECK_OK(backward(&s));
        CHECK(all_ones(ys, sizeof ys) && all_ones(dqs, sizeof dqs) && all_ones(lses, sizeof lses));
        for (int64_t e = 0; i < 2 && e < 12 * s.x[K].shape[1] * 64; e++)
            CHECK(((uint16_t *)dks)[e] == 0 && ((uint16_t *)dvs)[e] == 0);
        check_end(&s.x[DK]), check_end(&s.x[DV]);
    }
}

/* What is not finite stays within its segment: the others have the bits that they have without it. Not so on CUDA,
 * whose tiles multiply the next segment's rows by 0. */
TEST(segments_keep_to_themselves) {
    enum { BEGIN = 40, END = 100, TOKENS = 150, ROW = 2 * 64 };
    static float before[5][MOST];
    float *const written[] = {ys, dqs, dks, dvs};
    const int32_t at[] = {0, 33, BEGIN, END, TOKENS};
    if (on_gpu) return;
    for (int nan = 0; nan < 2; nan++) {
        small s;
        make_small(&s, TOKENS, 2);
        memcpy(s.both, at, sizeof at), memcpy(s.both + 5, at, sizeof at);
        for (int64_t e = BEGIN * ROW; nan && e < END * ROW; e++)
            ((uint16_t *)qs)[e] = ((uint16_t *)ks)[e] = ((uint16_t *)vs)[e] = ((uint16_t *)dys)[e] = 0x7fc0;
        CHECK_OK(forward(&s));
        CHECK_OK(backward(&s));
        for (int i = 0; i < 4; i++) {
            const uint16_t *now = (uint16_t *)written[i], *then = (uint16_t *)before[i];
            if (!nan) {
                memcpy(before[i], now, TOKENS * ROW * sizeof *now);
                continue;
            }
            CHECK(!memcmp(now, then, BEGIN * ROW * sizeof *now));
            CHECK(!memcmp(now + END * ROW, then + END * ROW, (TOKENS - END) * ROW * sizeof *now));
            CHECK(isnan(bst_from_bf16(now[BEGIN * ROW])) && isnan(bst_from_bf16(now[END * ROW - 1])));
        }
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < TOKENS; i++) {
                if (nan && (i < BEGIN || i >= END)) CHECK(lses[h * TOKENS + i] == before[4][h * TOKENS + i]);
                before[4][h * TOKENS + i] = lses[h * TOKENS + i];
            }
    }
}

/* options NULL are the usual ones, and zero in them is. */
TEST(usual_options) {
    small s;
    static float first[MOST];
    make_small(&s, 20, 2);
    CHECK_OK(forward(&s));
    memcpy(first, ys, sizeof first);
    bst_segment_attention_options options = {sizeof options, 0.125, 0}; /* 1 / sqrt(64) */
    for (int i = 0; i < 2; i++, options.scale = 0) {
        memset(ys, 0xff, sizeof ys);
        CHECK_OK(bst_segment_attention_forward(NULL, &s.given, &options));
        CHECK(!memcmp(first, ys, sizeof first));
    }
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* What a call is given, of tensors without memory; a type's number, T tokens. */
static bst_segment_attention_tensors fake_tensors(bst_shape s[10], int type, int64_t tokens, int64_t heads,
                                                  int64_t groups, int64_t dim) {
    const int64_t of_q[] = {tokens, heads, dim}, of_k[] = {tokens, groups, dim}, of_cuts[] = {2, 9},
                  of_lse[] = {heads, tokens};
    const DLDataType of = bst_test_types[type];
    return (bst_segment_attention_tensors){sizeof(bst_segment_attention_tensors),
                                           .q = bst_device_tensor(&s[0], of, 3, of_q),
                                           .k = bst_device_tensor(&s[1], of, 3, of_k),
                                           .v = bst_device_tensor(&s[2], of, 3, of_k),
                                           .cuts = bst_device_tensor(&s[3], i32, 2, of_cuts),
                                           .y = bst_device_tensor(&s[4], of, 3, of_q),
                                           .lse = bst_device_tensor(&s[5], bst_test_types[0], 2, of_lse),
                                           .dy = bst_device_tensor(&s[6], of, 3, of_q),
                                           .dq = bst_device_tensor(&s[7], of, 3, of_q),
                                           .dk = bst_device_tensor(&s[8], of, 3, of_k),
                                           .dv = bst_device_tensor(&s[9], of, 3, of_k)};
}

/* Each width that CUDA computes, and one that it fills up; both types; the two passes, causal and not, with a window
 * and without. */
static void compile_calls(void) {
    static const int64_t dims[] = {64, 128, 256, 96};
    for (int i = 0; i < 4; i++)
        for (int type = 1; type < 3; type++)
            for (int way = 0; way < 4; way++) {
                if ((way > 1 || i == 3) && type == 2) continue; /* which differs by an instruction's name */
                bst_shape s[10];
                const bst_segment_attention_tensors given = fake_tensors(s, type, 4096, 32, 8, dims[i]);
                bst_segment_attention_options options = {sizeof options, .causal = way % 2, .window = way / 2 * 512};
                CHECK_OK(bst_segment_attention_forward(&bst_fake_exec, &given, &options));
                CHECK_OK(bst_segment_attention_backward(&bst_fake_exec, &given, &options));
            }
}

#ifndef BST_EMULATE
/* Chips without the words of warpgroup.cuh, and what has no kernels where they are. */
static void refused_call(int type, int64_t dim, const char *why) {
    bst_shape s[10];
    const bst_segment_attention_tensors given = fake_tensors(s, type, 64, 2, 2, dim);
    CHECK_EQ_I(bst_segment_attention_forward(&bst_fake_exec, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), why);
    CHECK_EQ_I(bst_segment_attention_backward(&bst_fake_exec, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), why);
}
#endif

TEST(kernels_compile_for_every_chip) {
    bst_for_chips("segment_attention", compile_calls, 90, 90);
#ifndef BST_EMULATE
    static const int chips[] = {80, 89, 100, 120, 90};
    for (int i = 0; i < 5; i++) {
        const bst_compile_only collector = {.arch = chips[i]};
        bst__cuda_compile_only(&collector);
        if (chips[i] != 90) {
            refused_call(1, 64, "compute capability 9.0");
        } else {
            refused_call(0, 64, "heads have 64 elements of float32");
            refused_call(2, 84, "heads have 84 elements of float16");
            refused_call(1, 264, "heads have 264 elements of bfloat16");
            bst_shape s[10];
            const bst_segment_attention_tensors given = fake_tensors(s, 1, 64, 2, 2, 64);
            s[8].tensor.data = (char *)s[8].tensor.data + 2;
            CHECK_EQ_I(bst_segment_attention_backward(&bst_fake_exec, &given, NULL), BST_UNSUPPORTED);
            CHECK_STR(bst_last_error(), "dk does not begin at a multiple of 16 bytes");
        }
        bst__cuda_compile_only(NULL);
    }
#endif
}

int main(void) {
    RUN(values_and_gradients);
    RUN(heads_of_any_size);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(rows_that_are_wrong);
    RUN(cuts_that_are_wrong);
    RUN(nothing_to_do);
    RUN(segments_keep_to_themselves);
    RUN(usual_options);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
