/* linear_divergence.cu - the divergence of two rows of logits, and its gradient.
 *
 * Macros: SPREAD, with T_TYPE, chooses `spread`. Else: VOCAB; T_TYPE, of the teacher's logits (codes of dtype.h), the
 * student's being float32; PARTLY: these are of some classes; D_TYPE, of the gradient; VEC elements of an access;
 * S_SOFTCAP, T_SOFTCAP: in use; KIND (linear_divergence_math.h); ENTROPY: wanted; SAVED: the sums are read and not
 * made; LOSS; GRADIENT; IN_PLACE: the gradient, of 16 bits, takes the upper half of its row's place.
 *
 * linear_divergence  One block a row. Bytes: both rows once for their sums; once more for the loss or the gradient, or
 *                    for both at once; of jsd, whose gradient needs the loss's sums, once for each. The gradient is
 *                    written once. From the second time on rows are read from their end, which the cache still has.
 * spread             A row of classes left out with `count` numbers in their places. Bytes: 4 VOCAB written.
 * Rows that the mask leaves out are not read. No atomics; all sums have a fixed order. */
#include "pack.cuh"
#include "reduce.cuh"

#include "linear_divergence_args.h"
#include "linear_divergence_math.h"

#define THREADS LINEAR_DIVERGENCE_THREADS
#define BATCH   LINEAR_DIVERGENCE_BATCH

#ifdef SPREAD
BST_KERNEL(linear_divergence_spread, linear_divergence_spread_args, THREADS, 2) {
    bst_wait_for_previous();
    int64_t row = bst_block();
    float *out = a.out + row * a.out_stride;
    for (int64_t i = bst_thread(); i < a.columns; i += THREADS) out[i] = DIVERGENCE_LEFT_OUT;
    bst_sync();
    for (int64_t i = bst_thread(); i < a.count; i += THREADS) {
        int64_t column = a.indices[row * a.count + i];
        float value;
        bst_load(&value, a.values, row * a.values_stride + i, T_TYPE, 1);
        if (column >= 0 && column < a.columns)
            out[column] = value;
        else
            out[0] = BST_NAN;
    }
}
#else

#define VECTORS (VOCAB / VEC)
#define ROUNDS  ((VECTORS + BATCH * THREADS - 1) / (BATCH * THREADS))

/* What a pass over the rows is for. */
#define SUM     1
#define LOSE    2
#define DIFF    4

typedef struct sums {
    float top_p, sum_p, products,
        gap; /* relative to top_p: of e, of e times what z lies above it, and of e (zp - zq) */
    float top_q, sum_q;
    float loss, to_mean;
} sums;

typedef struct rows {
    const float *student;
    const void *teacher;
    void *dlogits;
    float first;  /* zp - zq of the first class, from which gaps are measured */
    float factor; /* of the gradient */
} rows;

/* u of a logit: see divergence_map. */
BST_DEVICE float shaped(const divergence_map *m, float x, bool capped) { return capped ? bst_tanh(x * m->inner) : x; }

/* -inf is a number then, so that the difference of two such is 0. */
BST_DEVICE float z_of(const divergence_map *m, float u) { return bst_max(bst_product(u, m->scale), DIVERGENCE_NEVER); }

BST_DEVICE bool is_left_out(float y) { return PARTLY && y == DIVERGENCE_LEFT_OUT; }

BST_DEVICE void move_p(sums *s, float top) {
    float step = s->top_p - top, factor = divergence_power(step);
    if (ENTROPY) s->products = factor * bst_fma(step, s->sum_p, s->products);
    if (KIND == DIVERGENCE_REVERSE) s->gap *= factor;
    s->sum_p *= factor;
    s->top_p = top;
}

BST_DEVICE void move_q(sums *s, float top) {
    s->sum_q *= divergence_power(s->top_q - top);
    s->top_q = top;
}

/* n logits of each, for the sums. */
BST_DEVICE void sum_up(const linear_divergence_args *a, const rows *r, sums *s, const float *x, const float *y, int n) {
    float u[VEC], v[VEC], top_p = s->top_p, top_q = s->top_q;
    BST_EACH(j, n) {
        u[j] = shaped(&a->of_student, x[j], S_SOFTCAP);
        v[j] = shaped(&a->of_teacher, y[j], T_SOFTCAP);
        top_p = bst_max(top_p, u[j] * a->of_student.power);
        if (!is_left_out(y[j])) top_q = bst_max(top_q, v[j] * a->of_teacher.power);
    }
    if (top_p > s->top_p) move_p(s, top_p);
    if (top_q > s->top_q) move_q(s, top_q);
    BST_EACH(j, n) {
        float above = bst_fma(u[j], a->of_student.power, -s->top_p), e = divergence_power(above);
        float other = divergence_power(bst_fma(v[j], a->of_teacher.power, -s->top_q));
        s->sum_p += e;
        s->sum_q += is_left_out(y[j]) ? 0.0f : other;
        if (ENTROPY) s->products = bst_fma(e, bst_max(above, DIVERGENCE_NEVER), s->products);
        if (KIND != DIVERGENCE_REVERSE) continue;
        float zq = is_left_out(y[j]) ? DIVERGENCE_NEVER : z_of(&a->of_teacher, v[j]);
        s->gap = bst_fma(e, (z_of(&a->of_student, u[j]) - zq) - r->first, s->gap);
    }
}

/* n logits of each, for the loss or the gradient, which x becomes. */
BST_DEVICE void compare(const linear_divergence_args *a, int what, const rows *r, const divergence_row *t, sums *s,
                        float *x, const float *y, int n) {
    BST_EACH(j, n) {
        float u = shaped(&a->of_student, x[j], S_SOFTCAP), v = shaped(&a->of_teacher, y[j], T_SOFTCAP);
        divergence_pair z;
        z.above_p = bst_fma(u, a->of_student.power, -t->top_p);
        z.above_q = bst_fma(v, a->of_teacher.power, -t->top_q);
        z.zp = z_of(&a->of_student, u);
        z.zq = z_of(&a->of_teacher, v);
        if (is_left_out(y[j])) z.above_q = -BST_INFINITY, z.zq = DIVERGENCE_NEVER;
        divergence_class c = divergence_of(KIND, t, &z);
        if (what & LOSE) {
            s->loss += c.term;
            if (KIND == DIVERGENCE_JSD) s->to_mean += c.to_mean;
        }
        if (what & DIFF) x[j] = r->factor * c.slope * (S_SOFTCAP ? (1.0f - u) * (1.0f + u) : 1.0f);
    }
}

BST_DEVICE void take(const linear_divergence_args *a, int what, const rows *r, const divergence_row *t, sums *s,
                     float *x, const float *y, int n) {
    if (what & SUM)
        sum_up(a, r, s, x, y, n);
    else
        compare(a, what, r, t, s, x, y, n);
}

/* The single element of this thread behind the last whole vector. What is written lies behind what is read from then
 * on: of the row in place, the gradient of column c begins at float32 column (stride + c) / 2, which is no less. */
BST_DEVICE void take_behind(const linear_divergence_args *a, int what, const rows *r, const divergence_row *t,
                            sums *s) {
    int column = VECTORS * VEC + (int)bst_thread();
    float x = 0, y;
    if (column < VOCAB) {
        x = r->student[column];
        bst_load(&y, r->teacher, column, T_TYPE, 1);
        take(a, what, r, t, s, &x, &y, 1);
    }
    if (!(what & DIFF)) return;
    if (IN_PLACE) bst_sync();
    if (column < VOCAB) bst_store(r->dlogits, column, &x, D_TYPE, 1);
}

BST_DEVICE void walk(const linear_divergence_args *a, int what, const rows *r, const divergence_row *t, sums *s) {
    if (VOCAB % VEC) take_behind(a, what, r, t, s);
    BST_ROLLED
    for (int round = 0; round < ROUNDS; round++) {
        int first = (what & SUM ? round : ROUNDS - 1 - round) * BATCH * THREADS + (int)bst_thread();
        bst_raw of_student[BATCH], of_teacher[BATCH];
        BST_EACH(i, BATCH) {
            int column = (first + i * THREADS) * VEC;
            if (first + i * THREADS >= VECTORS) continue;
            of_student[i] = bst_raw_at(r->student, column, BST_F32_CODE, VEC);
            of_teacher[i] = bst_raw_once(r->teacher, column, T_TYPE, VEC);
        }
        BST_EACH(i, BATCH) {
            if (first + i * THREADS >= VECTORS) continue;
            float x[VEC], y[VEC];
            bst_unpack(x, of_student[i], BST_F32_CODE, VEC);
            bst_unpack(y, of_teacher[i], T_TYPE, VEC);
            take(a, what, r, t, s, x, y, VEC);
            if (what & DIFF) of_student[i] = bst_pack(x, D_TYPE, VEC);
        }
        if (!(what & DIFF)) continue;
        if (IN_PLACE) bst_sync(); /* all have read what is written over now */
        BST_EACH(i, BATCH) {
            int vector = first + i * THREADS;
            if (vector < VECTORS)
                bst_write_once(bst_at_out(r->dlogits, (int64_t)vector * VEC, D_TYPE), of_student[i],
                               VEC * bst_type_size(D_TYPE));
        }
    }
}

BST_DEVICE sums warp_sums(sums s) {
    move_p(&s, bst_warp_reduce(s.top_p, 32, true));
    move_q(&s, bst_warp_reduce(s.top_q, 32, true));
    s.sum_p = bst_warp_reduce(s.sum_p, 32, false);
    s.sum_q = bst_warp_reduce(s.sum_q, 32, false);
    if (ENTROPY) s.products = bst_warp_reduce(s.products, 32, false);
    if (KIND == DIVERGENCE_REVERSE) s.gap = bst_warp_reduce(s.gap, 32, false);
    return s;
}

BST_DEVICE sums block_sums(sums s, const sums *none, sums *scratch) {
    int lane = (int)bst_lane();
    s = warp_sums(s);
    if (lane == 0) scratch[bst_thread() / 32] = s;
    bst_sync();
    return warp_sums(lane < THREADS / 32 ? scratch[lane] : *none);
}

BST_DEVICE void put(float *to, int64_t at, float value) {
    if (to && bst_thread() == 0) to[at] = value;
}

BST_DEVICE void save(const linear_divergence_args *a, int64_t row, const sums *s, float mean) {
    float *to = a->sums ? a->sums + row * LINEAR_DIVERGENCE_SUMS : (float *)0;
    put(to, 0, s->top_p);
    put(to, 1, s->sum_p);
    put(to, 2, s->top_q);
    put(to, 3, s->sum_q);
    put(to, 4, mean);
}

/* A row that the mask leaves out. */
BST_DEVICE void leave_out(const linear_divergence_args *a, int64_t row, const rows *r, const sums *none) {
    float zeros[VEC];
    BST_EACH(j, VEC) zeros[j] = 0.0f;
    put(a->divergence, row, 0.0f);
    put(a->entropy, row, 0.0f);
    if (!SAVED) save(a, row, none, 0.0f);
    if (!GRADIENT) return;
    for (int vector = (int)bst_thread(); vector < VECTORS; vector += THREADS)
        bst_store_once(r->dlogits, (int64_t)vector * VEC, zeros, D_TYPE, VEC);
    if (VECTORS * VEC + (int)bst_thread() < VOCAB)
        bst_store(r->dlogits, VECTORS * VEC + bst_thread(), zeros, D_TYPE, 1);
}

BST_KERNEL(linear_divergence, linear_divergence_args, THREADS, 2) {
    BST_SHARED(sums, scratch, THREADS / 32);
    BST_SHARED(float, losses, 32);
    BST_SHARED(float, means, 32);
    bst_wait_for_previous();
    int64_t row = bst_block();
    sums s = {2.0f * DIVERGENCE_NEVER, 0, 0, 0, 2.0f * DIVERGENCE_NEVER, 0, 0, 0}, none = s;
    rows r;
    r.student = a.student + row * a.student_stride;
    r.teacher = bst_at(a.teacher, row * a.teacher_stride, T_TYPE);
    r.dlogits = GRADIENT ? bst_at_out(a.dlogits, row * a.dlogits_stride, D_TYPE) : (void *)0;
    r.first = 0.0f;
    r.factor = GRADIENT ? a.slope * (a.grad ? a.grad[row] : 1.0f) : 0.0f;
    if (a.mask && !a.mask[row]) {
        none.sum_p = none.sum_q = 1.0f;
        leave_out(&a, row, &r, &none);
        return;
    }
    float mean = 0.0f;
    if (SAVED) {
        const float *from = a.sums + row * LINEAR_DIVERGENCE_SUMS;
        s.top_p = from[0], s.sum_p = from[1], s.top_q = from[2], s.sum_q = from[3], mean = from[4];
    } else {
        if (KIND == DIVERGENCE_REVERSE) {
            float y;
            bst_load(&y, r.teacher, 0, T_TYPE, 1);
            r.first = z_of(&a.of_student, shaped(&a.of_student, r.student[0], S_SOFTCAP)) -
                      z_of(&a.of_teacher, shaped(&a.of_teacher, y, T_SOFTCAP));
            if (!(bst_abs(r.first) < 1e4f)) r.first = 0.0f;
        }
        walk(&a, SUM, &r, 0, &s);
        s = block_sums(s, &none, scratch);
        if (KIND == DIVERGENCE_REVERSE) mean = r.first + bst_divide(s.gap, s.sum_p);
    }
    divergence_row t = divergence_row_of(s.top_p, s.sum_p, s.top_q, s.sum_q, mean, a.beta, a.rest);
    if (LOSS) {
        bool at_once = GRADIENT && KIND != DIVERGENCE_JSD;
        s.loss = s.to_mean = 0.0f;
        walk(&a, at_once ? LOSE | DIFF : LOSE, &r, &t, &s);
        s.loss = bst_group_sum(s.loss, THREADS, losses);
        if (KIND == DIVERGENCE_JSD) t.mean = bst_divide(bst_group_sum(s.to_mean, THREADS, means), s.sum_p);
        put(a.divergence, row, s.loss);
        if (ENTROPY) put(a.entropy, row, t.log_p - DIVERGENCE_UNIT * bst_divide(s.products, s.sum_p));
        if (!SAVED) save(&a, row, &s, t.mean);
    }
    if (GRADIENT && (!LOSS || KIND == DIVERGENCE_JSD)) walk(&a, DIFF, &r, &t, &s);
}
#endif
