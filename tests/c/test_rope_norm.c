/* test_rope_norm.c - QK-norm and rotary embedding through the C API: values and gradients on slices of a fused
 * projection, errors, its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "rope_calls.h"

/* A projection [B, S, Q + K + V heads, D]. R < D: a part of each head does not turn. Q and K: a slot of four heads,
 * one that is not full, and one of k. */
enum { B = 2, S = 3, Q = 5, K = 2, V = 1, D = 12, R = 8, HEADS = Q + K, ALL = (Q + K + V) * D };
static const double eps = 1e-3; /* so large that leaving it out would show */

static float projection[B][S][ALL], upstream[B][S][HEADS * D], cosines[B][S][R], sines[B][S][R], weights[2][D];
static float out[B][S][HEADS * D], dx[B][S][ALL], dweights[2][D];
static int64_t q_shape[] = {B, Q, S, D}, k_shape[] = {B, K, S, D}, table_shape[] = {B, S, R}, dim[] = {D};
static int64_t fused[] = {S * ALL, D, ALL, 1}, packed[] = {S * HEADS * D, D, HEADS * D, 1};

static DLTensor heads(void *data, int64_t *shape, int64_t *strides) {
    return bst_tensor(data, 4, shape, strides, bst_test_types[0]);
}

static void inputs(void) {
    bst_fill(&projection[0][0][0], B * S * ALL, 1, 2);
    bst_fill(&upstream[0][0][0], B * S * HEADS * D, 2, 1);
    bst_fill(&weights[0][0], 2 * D, 3, 1);
    for (int i = 0; i < B * S * R; i++) { /* no two angles are alike, those of a pair neither */
        (&cosines[0][0][0])[i] = cosf(0.37f * (float)i);
        (&sines[0][0][0])[i] = sinf(0.37f * (float)i);
    }
    memset(out, 0xff, sizeof out);
    memset(dx, 0xff, sizeof dx);
    memset(dweights, 0xff, sizeof dweights);
}

/* One head in double: the result, and the gradients for `dy`. */
static void exact_head(const float *x, const float *w, const float *c, const float *s, const float *dy, int gemma,
                       int layout, double *y, double *dx_out, double *dw) {
    double squares = 0, mean = 0, r, z[D], dz[D];
    for (int i = 0; i < D; i++) squares += (double)x[i] * x[i];
    r = 1 / sqrt(squares / D + eps);
    for (int i = 0; i < D; i++) z[i] = x[i] * r * (gemma + (double)w[i]);
    for (int i = R; i < D; i++) y[i] = z[i], dz[i] = dy[i];
    for (int i = 0; i < R / 2; i++) {
        rope_pair p = rope_pair_at(i, R / 2, layout);
        double z1 = z[p.x[0]], z2 = z[p.x[1]], dy1 = dy[p.y[0]], dy2 = dy[p.y[1]];
        double c1 = c[p.table[0]], c2 = c[p.table[1]], s1 = s[p.table[0]], s2 = s[p.table[1]];
        y[p.y[0]] = z1 * c1 - z2 * s1;
        y[p.y[1]] = z2 * c2 + z1 * s2;
        dz[p.x[0]] = dy1 * c1 + dy2 * s2;
        dz[p.x[1]] = dy2 * c2 - dy1 * s1;
    }
    for (int i = 0; i < D; i++) {
        dw[i] = dz[i] * x[i] * r;
        mean += dz[i] * (gemma + (double)w[i]) * x[i] * r / D;
    }
    for (int i = 0; i < D; i++) dx_out[i] = r * (dz[i] * (gemma + (double)w[i]) - x[i] * r * mean);
}

static void check_all(int table_batches, int gemma, int layout, int kv_heads) {
    int width = layout & HALF_TABLES ? R / 2 : R;
    double dw_exact[2][D] = {{0}};
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < S; t++) {
            for (int head = 0; head < Q + kv_heads; head++) {
                double y[D], d[D], dw[D];
                int which = head >= Q, at = head * D, row = ((table_batches == 1 ? 0 : b) * S + t) * width;
                exact_head(&projection[b][t][at], weights[which], &cosines[0][0][0] + row, &sines[0][0][0] + row,
                           &upstream[b][t][at], gemma, layout, y, d, dw);
                for (int i = 0; i < D; i++) {
                    CHECK_CLOSE(out[b][t][at + i], y[i], 2e-6);
                    CHECK_CLOSE(dx[b][t][at + i], d[i], 5e-6);
                    dw_exact[which][i] += dw[i];
                }
            }
            /* What lies between the tokens' heads was left alone. */
            for (int i = (Q + kv_heads) * D; i < ALL; i++) CHECK(isnan(dx[b][t][i]));
        }
    }
    for (int which = 0; which < (kv_heads ? 2 : 1); which++)
        for (int i = 0; i < D; i++) CHECK_CLOSE(dweights[which][i], dw_exact[which][i], 1e-5);
}

/* All layouts of pairs, tables of both widths, both factors, tables for each batch row and for all, with k and
 * without. */
TEST(values_and_gradients) {
    for (int which = 0; which < 48; which++) {
        int layout = which / 8 % 3 + (which / 24 ? HALF_TABLES : 0), gemma = which & 1, batches = which & 2 ? B : 1;
        int kv_heads = which & 4 ? K : 0;
        bst_casting casting = gemma ? BST_CASTING_GEMMA : BST_CASTING_LLAMA;
        int64_t table_sizes[] = {batches, S, layout & HALF_TABLES ? R / 2 : R};
        inputs();
        DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_shape, fused);
        DLTensor qo = heads(out, q_shape, packed), ko = heads(&out[0][0][Q * D], k_shape, packed);
        DLTensor dqo = heads(upstream, q_shape, packed), dko = heads(&upstream[0][0][Q * D], k_shape, packed);
        DLTensor dq = heads(dx, q_shape, fused), dk = heads(&dx[0][0][Q * D], k_shape, fused);
        DLTensor qw = bst_f32(weights[0], 1, dim), kw = bst_f32(weights[1], 1, dim);
        DLTensor dqw = bst_f32(dweights[0], 1, dim), dkw = bst_f32(dweights[1], 1, dim);
        DLTensor c = bst_f32(cosines, 3, table_sizes), s = bst_f32(sines, 3, table_sizes);
        DLTensor *pk = kv_heads ? &k : NULL, *pkw = kv_heads ? &kw : NULL, *pko = kv_heads ? &ko : NULL;
        CHECK_OK(normed_forward(NULL, &q, pk, &qw, pkw, &c, &s, eps, casting, layout, &qo, pko));
        CHECK_OK(normed_backward(NULL, &dqo, kv_heads ? &dko : NULL, &q, pk, &qw, pkw, &c, &s, eps, casting, layout,
                                 &dq, kv_heads ? &dk : NULL, &dqw, kv_heads ? &dkw : NULL));
        check_all(batches, gemma, layout, kv_heads);
    }
}

/* What is not wanted is neither computed nor read: the gradient that comes in for it may be missing. */
TEST(each_gradient_alone) {
    static float all[B][S][ALL], all_weights[2][D];
    for (int wants = 15; wants >= 0; wants--) {
        inputs();
        DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_shape, fused);
        DLTensor qo = heads(out, q_shape, packed), ko = heads(&out[0][0][Q * D], k_shape, packed);
        DLTensor dqo = heads(upstream, q_shape, packed), dko = heads(&upstream[0][0][Q * D], k_shape, packed);
        DLTensor dq = heads(dx, q_shape, fused), dk = heads(&dx[0][0][Q * D], k_shape, fused);
        DLTensor qw = bst_f32(weights[0], 1, dim), kw = bst_f32(weights[1], 1, dim);
        DLTensor dqw = bst_f32(dweights[0], 1, dim), dkw = bst_f32(dweights[1], 1, dim);
        DLTensor c = bst_f32(cosines, 3, table_shape), s = bst_f32(sines, 3, table_shape);
        CHECK_OK(normed_forward(NULL, &q, &k, &qw, &kw, &c, &s, eps, BST_CASTING_NONE, 0, &qo, &ko));
        CHECK_OK(normed_backward(NULL, wants & 5 ? &dqo : NULL, wants & 10 ? &dko : NULL, &q, &k, &qw, &kw, &c, &s, eps,
                                 BST_CASTING_NONE, 0, wants & 1 ? &dq : NULL, wants & 2 ? &dk : NULL,
                                 wants & 4 ? &dqw : NULL, wants & 8 ? &dkw : NULL));
        if (wants == 15) {
            memcpy(all, dx, sizeof all);
            memcpy(all_weights, dweights, sizeof all_weights);
        }
        for (int i = 0; i < B * S * ALL; i++) {
            int head = i % ALL / D, wanted = head < Q ? wants & 1 : head < HEADS ? wants & 2 : 0;
            float got = (&dx[0][0][0])[i];
            CHECK(wanted ? got == (&all[0][0][0])[i] : isnan(got));
        }
        for (int i = 0; i < 2 * D; i++) {
            float got = (&dweights[0][0])[i];
            CHECK(wants & (i < D ? 4 : 8) ? got == (&all_weights[0][0])[i] : isnan(got));
        }
    }
}

TEST(no_tokens_give_zero_weight_gradients) {
    int64_t none[] = {B, Q, 0, D}, k_none[] = {B, K, 0, D}, no_table[] = {1, 0, R};
    inputs();
    DLTensor q = heads(NULL, none, NULL), k = heads(NULL, k_none, NULL), c = bst_f32(NULL, 3, no_table);
    DLTensor qw = bst_f32(weights[0], 1, dim), dqw = bst_f32(dweights[0], 1, dim), dkw = bst_f32(dweights[1], 1, dim);
    CHECK_OK(normed_forward(NULL, &q, &k, &qw, &qw, &c, &c, eps, BST_CASTING_LLAMA, 0, &q, &k));
    CHECK_OK(normed_backward(NULL, &q, &k, &q, &k, &qw, &qw, &c, &c, eps, BST_CASTING_LLAMA, 0, &q, &k, &dqw, &dkw));
    for (int i = 0; i < 2 * D; i++) CHECK((&dweights[0][0])[i] == 0);
}

TEST(errors_name_the_argument_and_write_nothing) {
    inputs();
    memset(out, 0, sizeof out);
    memset(dx, 0, sizeof dx);
    int64_t narrow[] = {D - 1};
    DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_shape, fused);
    DLTensor qo = heads(out, q_shape, packed), ko = heads(&out[0][0][Q * D], k_shape, packed);
    DLTensor dqo = heads(upstream, q_shape, packed), dq = heads(dx, q_shape, fused), dk = heads(dx, k_shape, fused);
    DLTensor w = bst_f32(weights[0], 1, dim), short_w = bst_f32(weights[0], 1, narrow), half_w = w;
    DLTensor c = bst_f32(cosines, 3, table_shape), s = bst_f32(sines, 3, table_shape);
    half_w.dtype.bits = 16;
#define FORWARD(q, k, qw, kw, c, s, casting, qo, ko) normed_forward(NULL, q, k, qw, kw, c, s, eps, casting, 0, qo, ko)
    CHECK_EQ_I(FORWARD(&q, &k, &short_w, &w, &c, &s, BST_CASTING_LLAMA, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: q_weight has shape [11]; dimension 0 must be 12");
    CHECK_EQ_I(FORWARD(&q, &k, &w, &half_w, &c, &s, BST_CASTING_LLAMA, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "k_weight is float16; float32 is needed, as for q_weight");
    CHECK_EQ_I(FORWARD(&q, &k, &w, NULL, &c, &s, BST_CASTING_LLAMA, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "k_weight is NULL");
    CHECK_EQ_I(FORWARD(&q, &k, &w, &w, &c, &s, (bst_casting)3, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "casting is 3; 0 (llama), 1 (gemma) or 2 (none) is needed");
    CHECK_EQ_I(FORWARD(&q, NULL, &w, NULL, &c, &s, BST_CASTING_LLAMA, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "k_out is given, but k is NULL");
    CHECK_EQ_I(FORWARD(&q, &k, &w, &w, &c, &s, BST_CASTING_LLAMA, &q, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "q_out and q share memory");
    CHECK_EQ_I(FORWARD(&q, &k, &w, &w, &c, &s, BST_CASTING_LLAMA, &qo, &q), BST_INVALID);
    CHECK_STR(bst_last_error(), "k_out has shape [2, 5, 3, 12]; it must have that of k, [2, 2, 3, 12]");
    DLTensor half_out = qo;
    half_out.dtype.bits = 16;
    CHECK_EQ_I(FORWARD(&q, &k, &w, &w, &c, &s, BST_CASTING_LLAMA, &half_out, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "q_out is float16; float32 is needed, the promoted type of the inputs");
#undef FORWARD
#define BACKWARD(dqo, k, kw, dq, dk) \
    normed_backward(NULL, dqo, NULL, &q, k, &w, kw, &c, &s, eps, BST_CASTING_LLAMA, 0, dq, dk, NULL, NULL)
    CHECK_EQ_I(BACKWARD(NULL, &k, &w, &dq, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: dq_out is NULL");
    CHECK_EQ_I(BACKWARD(&dqo, &k, &w, &dqo, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "dq and dq_out share memory");
    CHECK_EQ_I(BACKWARD(&dqo, NULL, NULL, &dq, &dk), BST_INVALID);
    CHECK_STR(bst_last_error(), "a gradient of k is wanted, but k is NULL");
#undef BACKWARD
    bst_rope_options keep = rope_options(0);
    keep.keep_type = 1;
    DLTensor halves = q; /* of 16 bits: the result's type is then not the tables' */
    halves.dtype = bst_test_types[1];
    CHECK_EQ_I(bst_rope_forward(NULL, &halves, NULL, &c, &s, &w, NULL, &keep, &qo, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(),
              "q_out is float32; bfloat16 is needed, the promoted type of the inputs, or with keep_type");
    CHECK_EQ_I(bst_rope_forward(NULL, &q, NULL, &c, &s, &w, &w, NULL, &qo, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_weight is given; it goes with q_weight and k");
    bst_rope_backward_tensors normless = {sizeof normless, &dqo, .q = &q, .cos = &c, .sin = &s, .dq = &dq};
    CHECK_EQ_I(bst_rope_backward(NULL, &normless, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: q_weight is NULL; without a norm neither q nor k");
    for (int i = 0; i < B * S * HEADS * D; i++) CHECK((&out[0][0][0])[i] == 0);
    for (int i = 0; i < B * S * ALL; i++) CHECK((&dx[0][0][0])[i] == 0);
}

enum { F32, BF16, F16 }; /* of bst_test_types */

/* Qwen3's heads, heads that leave threads idle, partial heads, wide ones that take several warps, an address that
 * allows single elements only; weights or tables of float32. */
static void compile_calls(void) {
    static const struct {
        int64_t q_heads, kv_heads, dim, rotary;
        bool off;
        int type, weight, table, out;
    } calls[] = {
        {32, 8, 128, 128, false, BF16, BF16, BF16, BF16},  {32, 8, 128, 128, false, F32, F32, F32, F32},
        {32, 8, 128, 128, false, BF16, F32, F32, F32},     {16, 8, 128, 64, false, F16, F16, F16, F16},
        {5, 1, 80, 32, false, BF16, BF16, BF16, BF16},     {9, 1, 96, 96, true, BF16, BF16, BF16, BF16},
        {8, 4, 1024, 1024, false, BF16, BF16, BF16, BF16},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        DLDataType type = bst_test_types[calls[i].type], to = bst_test_types[calls[i].out];
        DLDataType weight = bst_test_types[calls[i].weight], table = bst_test_types[calls[i].table];
        int64_t qs[] = {2, calls[i].q_heads, 16, calls[i].dim}, ks[] = {2, calls[i].kv_heads, 16, calls[i].dim};
        int64_t ts[] = {1, 16, calls[i].rotary};
        bst_shape q, k, qw, kw, c, s, qo, ko, dq, dk, dqw, dkw;
        DLTensor *tq = bst_device_tensor(&q, type, 4, qs), *tk = bst_device_tensor(&k, type, 4, ks);
        DLTensor *tqw = bst_device_tensor(&qw, weight, 1, qs + 3), *tkw = bst_device_tensor(&kw, weight, 1, qs + 3);
        DLTensor *tc = bst_device_tensor(&c, table, 3, ts), *tn = bst_device_tensor(&s, table, 3, ts);
        DLTensor *tqo = bst_device_tensor(&qo, to, 4, qs), *tko = bst_device_tensor(&ko, to, 4, ks);
        tq->byte_offset = calls[i].off ? (uint64_t)(type.bits / 8) : 0;
        for (int layout = 0; layout < 3; layout++) {
            CHECK_OK(
                normed_forward(&bst_fake_exec, tq, tk, tqw, tkw, tc, tn, eps, BST_CASTING_LLAMA, layout, tqo, tko));
            CHECK_OK(normed_backward(&bst_fake_exec, tqo, tko, tq, tk, tqw, tkw, tc, tn, eps, BST_CASTING_LLAMA, layout,
                                     bst_device_tensor(&dq, type, 4, qs), bst_device_tensor(&dk, type, 4, ks),
                                     bst_device_tensor(&dqw, weight, 1, qs + 3),
                                     bst_device_tensor(&dkw, weight, 1, qs + 3)));
        }
    }
}

#ifndef BST_EMULATE
/* Four heads where eight leave a quarter of a token's places empty or more. */
TEST(heads_of_a_group) {
    static const int64_t cases[][4] = {{32, 8, 128, 8}, {16, 8, 128, 8}, {64, 8, 64, 8},
                                       {9, 3, 64, 4},   {8, 4, 256, 4},  {32, 4, 128, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DLDataType type = bst_test_types[BF16];
        rope_launches got = {0};
        bst_compile_only collector = {90, NULL, &got, rope_note_launch};
        int64_t dims = cases[i][2], qs[] = {1, cases[i][0], 4096, dims}, ks[] = {1, cases[i][1], 4096, dims};
        int64_t ts[] = {1, 4096, dims};
        bst_shape q, k, qw, kw, c, s, qo, ko;
        bst__cuda_compile_only(&collector);
        CHECK_OK(normed_forward(&bst_fake_exec, bst_device_tensor(&q, type, 4, qs), bst_device_tensor(&k, type, 4, ks),
                                bst_device_tensor(&qw, type, 1, &dims), bst_device_tensor(&kw, type, 1, &dims),
                                bst_device_tensor(&c, type, 3, ts), bst_device_tensor(&s, type, 3, ts), eps,
                                BST_CASTING_LLAMA, 0, bst_device_tensor(&qo, type, 4, qs),
                                bst_device_tensor(&ko, type, 4, ks)));
        bst__cuda_compile_only(NULL);
        CHECK_EQ_I(got.count, 1);
        CHECK_EQ_I(got.launch[0].block, 64);
        CHECK_EQ_I(rope_macro(&got.launch[0], "EACH"), cases[i][3]);
    }
}
#endif

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("rope_norm", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(each_gradient_alone);
    RUN(no_tokens_give_zero_weight_gradients);
    RUN(errors_name_the_argument_and_write_nothing);
#ifndef BST_EMULATE
    RUN(heads_of_a_group);
#endif
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
