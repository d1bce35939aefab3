/* test_rope_norm.c - QK-norm and rotary embedding through the C API: values and gradients on slices of a fused
 * projection, errors, its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "rope_calls.h"

/* A projection [B, S, Q + K + V heads, D]. R < D: a part of each head does not turn. Q and K: a slot of four heads, one
 * that is not full, and one of k. */
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

static int partner_of(int i, int interleaved) { return interleaved ? i ^ 1 : (i + R / 2) % R; }
static int is_first(int i, int interleaved) { return interleaved ? i % 2 == 0 : i < R / 2; }

/* One head in double: the result, and the gradients for `dy`. */
static void exact_head(const float *x, const float *w, const float *c, const float *s, const float *dy, int gemma,
                       int interleaved, double *y, double *dx_out, double *dw) {
    double squares = 0, mean = 0, r, z[D], dz[D];
    for (int i = 0; i < D; i++) squares += (double)x[i] * x[i];
    r = 1 / sqrt(squares / D + eps);
    for (int i = 0; i < D; i++) z[i] = x[i] * r * (gemma + (double)w[i]);
    for (int i = 0; i < D; i++) {
        int p = i < R ? partner_of(i, interleaved) : i, first = is_first(i, interleaved);
        y[i] = i < R ? z[i] * c[i] + (first ? -1 : 1) * z[p] * s[i] : z[i];
        dz[i] = i < R ? (double)dy[i] * c[i] + (first ? 1 : -1) * (double)dy[p] * s[p] : dy[i];
        dw[i] = dz[i] * x[i] * r;
        mean += dz[i] * (gemma + (double)w[i]) * x[i] * r / D;
    }
    for (int i = 0; i < D; i++) dx_out[i] = r * (dz[i] * (gemma + (double)w[i]) - x[i] * r * mean);
}

static void check_all(int table_batches, int gemma, int interleaved, int kv_heads) {
    double dw_exact[2][D] = {{0}};
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < S; t++) {
            for (int head = 0; head < Q + kv_heads; head++) {
                double y[D], d[D], dw[D];
                int which = head >= Q, table = table_batches == 1 ? 0 : b, at = head * D;
                exact_head(&projection[b][t][at], weights[which], cosines[table][t], sines[table][t],
                           &upstream[b][t][at], gemma, interleaved, y, d, dw);
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

/* Both layouts of pairs, both factors, tables for each batch row and for all, with k and without. */
TEST(values_and_gradients) {
    for (int which = 0; which < 16; which++) {
        int interleaved = which & 1, gemma = which >> 1 & 1, batches = which & 4 ? B : 1, kv_heads = which & 8 ? K : 0;
        bst_casting casting = gemma ? BST_CASTING_GEMMA : BST_CASTING_LLAMA;
        int64_t table_sizes[] = {batches, S, R};
        inputs();
        DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_shape, fused);
        DLTensor qo = heads(out, q_shape, packed), ko = heads(&out[0][0][Q * D], k_shape, packed);
        DLTensor dqo = heads(upstream, q_shape, packed), dko = heads(&upstream[0][0][Q * D], k_shape, packed);
        DLTensor dq = heads(dx, q_shape, fused), dk = heads(&dx[0][0][Q * D], k_shape, fused);
        DLTensor qw = bst_f32(weights[0], 1, dim), kw = bst_f32(weights[1], 1, dim);
        DLTensor dqw = bst_f32(dweights[0], 1, dim), dkw = bst_f32(dweights[1], 1, dim);
        DLTensor c = bst_f32(cosines, 3, table_sizes), s = bst_f32(sines, 3, table_sizes);
        DLTensor *pk = kv_heads ? &k : NULL, *pkw = kv_heads ? &kw : NULL, *pko = kv_heads ? &ko : NULL;
        CHECK_OK(normed_forward(NULL, &q, pk, &qw, pkw, &c, &s, eps, casting, interleaved, &qo, pko));
        CHECK_OK(normed_backward(NULL, &dqo, kv_heads ? &dko : NULL, &q, pk, &qw, pkw, &c, &s, eps, casting,
                                 interleaved, &dq, kv_heads ? &dk : NULL, &dqw, kv_heads ? &dkw : NULL));
        check_all(batches, gemma, interleaved, kv_heads);
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
    for (int i = 0; i < B * S * HEADS * D; i++) CHECK((&out[0][0][0])[i] == 0);
    for (int i = 0; i < B * S * ALL; i++) CHECK((&dx[0][0][0])[i] == 0);
}

enum { F32, BF16, F16 }; /* of bst_test_types */

/* Qwen3's heads, heads that leave threads idle, partial heads, wide ones that take several warps, an address that allows
 * single elements only; weights or tables of float32. */
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
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            CHECK_OK(normed_forward(&bst_fake_exec, tq, tk, tqw, tkw, tc, tn, eps, BST_CASTING_LLAMA, interleaved, tqo,
                                    tko));
            CHECK_OK(normed_backward(&bst_fake_exec, tqo, tko, tq, tk, tqw, tkw, tc, tn, eps, BST_CASTING_LLAMA,
                                     interleaved, bst_device_tensor(&dq, type, 4, qs),
                                     bst_device_tensor(&dk, type, 4, ks), bst_device_tensor(&dqw, weight, 1, qs + 3),
                                     bst_device_tensor(&dkw, weight, 1, qs + 3)));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("rope_norm", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(each_gradient_alone);
    RUN(no_tokens_give_zero_weight_gradients);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
