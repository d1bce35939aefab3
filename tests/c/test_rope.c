/* test_rope.c - rotary embedding through the C API: values and gradients, a fused projection turned in place and back,
 * errors, its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "rope_calls.h"

/* A projection [B, S, Q + K + V heads, D], of which q and k turn. R < D: a part of each head does not. */
enum { B = 2, S = 3, Q = 3, K = 2, V = 1, D = 12, R = 8, ALL = (Q + K + V) * D };

static float projection[B][S][ALL], cosines[B][S][R], sines[B][S][R];
static float q_out[B][Q][S][D], k_out[B][K][S][D];
static int64_t q_shape[] = {B, Q, S, D}, k_shape[] = {B, K, S, D}, table_shape[] = {B, S, R};
static int64_t fused[] = {S * ALL, D, ALL, 1};

static DLTensor heads(void *data, int64_t *shape, int64_t *strides) {
    return bst_tensor(data, 4, shape, strides, bst_test_types[0]);
}

static void inputs(void) {
    bst_fill(&projection[0][0][0], B * S * ALL, 1, 1);
    for (int i = 0; i < B * S * R; i++) { /* no two angles are alike, those of a pair neither */
        (&cosines[0][0][0])[i] = cosf(0.37f * (float)i);
        (&sines[0][0][0])[i] = sinf(0.37f * (float)i);
    }
}

/* A head, turned forwards or, by the transposed rotation, backwards. */
static void turn(const float *x, const float *c, const float *s, int layout, int backward, double *y) {
    for (int i = R; i < D; i++) y[i] = x[i];
    for (int i = 0; i < R / 2; i++) {
        rope_pair p = rope_pair_at(i, R / 2, layout);
        const int *in = backward ? p.y : p.x, *out = backward ? p.x : p.y, *t = p.table;
        double x1 = x[in[0]], x2 = x[in[1]], c1 = c[t[0]], c2 = c[t[1]], s1 = s[t[0]], s2 = s[t[1]];
        y[out[0]] = backward ? x1 * c1 + x2 * s2 : x1 * c1 - x2 * s1;
        y[out[1]] = backward ? x2 * c2 - x1 * s1 : x2 * c2 + x1 * s2;
    }
}

static void check_turned(int kv_heads, int table_batches, int layout, int backward) {
    int width = layout & HALF_TABLES ? R / 2 : R;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < S; t++) {
            int row = ((table_batches == 1 ? 0 : b) * S + t) * width;
            for (int head = 0; head < Q + kv_heads; head++) {
                double want[D];
                turn(&projection[b][t][head * D], &cosines[0][0][0] + row, &sines[0][0][0] + row, layout, backward,
                     want);
                for (int i = 0; i < D; i++) {
                    /* k_out holds [B, kv_heads, S, D]. */
                    float got = head < Q ? q_out[b][head][t][i]
                                         : (&k_out[0][0][0][0])[((b * kv_heads + head - Q) * S + t) * D + i];
                    CHECK_CLOSE(got, want[i], 3e-7);
                }
            }
        }
    }
}

/* All layouts of pairs, tables of both widths; several kv heads, one and none; tables for each row and for all. */
TEST(values_and_gradients) {
    inputs();
    for (int which = 0; which < 72; which++) {
        int layout = which % 3 + (which / 36 ? HALF_TABLES : 0), backward = which / 3 & 1,
            batches = which / 6 & 1 ? B : 1;
        int kv_heads = which / 12 % 3;
        int64_t k_sizes[] = {B, kv_heads, S, D}, table_sizes[] = {batches, S, layout & HALF_TABLES ? R / 2 : R};
        DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_sizes, fused);
        DLTensor c = bst_f32(cosines, 3, table_sizes), s = bst_f32(sines, 3, table_sizes);
        DLTensor qo = heads(q_out, q_shape, NULL), ko = heads(k_out, k_sizes, NULL);
        memset(q_out, 0xff, sizeof q_out);
        memset(k_out, 0xff, sizeof k_out);
        if (backward)
            CHECK_OK(rope_backward(NULL, &q, kv_heads ? &k : NULL, &c, &s, layout, &qo, kv_heads ? &ko : NULL));
        else
            CHECK_OK(rope_forward(NULL, &q, kv_heads ? &k : NULL, &c, &s, layout, &qo, kv_heads ? &ko : NULL));
        check_turned(kv_heads, batches, layout, backward);
        for (int i = kv_heads * B * S * D; i < B * K * S * D; i++) CHECK(isnan((&k_out[0][0][0][0])[i]));
    }
}

/* The gradient of k without that of q, and nothing of an incoming gradient that is not wanted. */
TEST(one_gradient_alone) {
    inputs();
    DLTensor k = heads(&projection[0][0][Q * D], k_shape, fused), ko = heads(k_out, k_shape, NULL);
    DLTensor q = heads(projection, q_shape, fused), qo = heads(q_out, q_shape, NULL);
    DLTensor c = bst_f32(cosines, 3, table_shape), s = bst_f32(sines, 3, table_shape);
    memset(q_out, 0xff, sizeof q_out);
    memset(k_out, 0xff, sizeof k_out);
    CHECK_OK(rope_backward(NULL, NULL, &k, &c, &s, 0, NULL, &ko));
    CHECK(isnan(q_out[0][0][0][0]));
    CHECK_OK(rope_backward(NULL, &q, &ko, &c, &s, 0, &qo, NULL));
    check_turned(K, B, 0, 1);
}

TEST(a_fused_projection_turns_in_place_and_back) {
    static float copy[B][S][ALL];
    inputs();
    memcpy(copy, projection, sizeof copy);
    DLTensor q = heads(copy, q_shape, fused), k = heads(&copy[0][0][Q * D], k_shape, fused);
    DLTensor c = bst_f32(cosines, 3, table_shape), s = bst_f32(sines, 3, table_shape);
    DLTensor qo = heads(q_out, q_shape, NULL), ko = heads(k_out, k_shape, NULL);
    /* With one angle a pair, the transpose is the inverse. */
    for (int i = 0; i < B * S * R; i++) {
        if (i % R < R / 2) continue;
        (&cosines[0][0][0])[i] = (&cosines[0][0][0])[i - R / 2];
        (&sines[0][0][0])[i] = (&sines[0][0][0])[i - R / 2];
    }
    CHECK_OK(rope_forward(NULL, &q, &k, &c, &s, 0, &qo, &ko));
    CHECK_OK(rope_forward(NULL, &q, &k, &c, &s, 0, &q, &k));
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < S; t++) {
            for (int i = 0; i < ALL; i++) {
                int head = i / D;
                float want = head < Q       ? q_out[b][head][t][i % D]
                             : head < Q + K ? k_out[b][head - Q][t][i % D]
                                            : projection[b][t][i];
                CHECK(copy[b][t][i] == want);
            }
        }
    }
    CHECK_OK(rope_backward(NULL, &q, NULL, &c, &s, 0, &q, NULL));
    CHECK_OK(rope_backward(NULL, &k, NULL, &c, &s, 0, &k, NULL));
    for (int i = 0; i < B * S * ALL; i++) CHECK_CLOSE((&copy[0][0][0])[i], (&projection[0][0][0])[i], 5e-7);
}

/* Heads that turn whole are shared out in another way, and few tokens leave threads of a block with nothing to do. */
TEST(whole_heads_turn_in_place_as_elsewhere) {
    enum { T = 5, N = 4, W = 16 };
    static float x[T][N][W], y[T][N][W], c[T][W], s[T][W];
    bst_fill(&x[0][0][0], T * N * W, 1, 1);
    bst_fill(&c[0][0], T * W, 2, 1);
    bst_fill(&s[0][0], T * W, 3, 1);
    int64_t q_sizes[] = {1, N - 1, T, W}, k_sizes[] = {1, 1, T, W}, sizes[] = {1, T, W}, strides[] = {0, W, N * W, 1};
    DLTensor q = heads(x, q_sizes, strides), k = heads(x[0][N - 1], k_sizes, strides);
    DLTensor qo = heads(y, q_sizes, strides), ko = heads(y[0][N - 1], k_sizes, strides);
    DLTensor ct = bst_f32(&c[0][0], 3, sizes), st = bst_f32(&s[0][0], 3, sizes);
    CHECK_OK(rope_forward(NULL, &q, &k, &ct, &st, 0, &qo, &ko));
    CHECK_OK(rope_forward(NULL, &q, &k, &ct, &st, 0, &q, &k));
    CHECK(memcmp(x, y, sizeof x) == 0);
}

TEST(errors_name_the_argument_and_write_nothing) {
    static float copy[B][S][ALL];
    inputs();
    memcpy(copy, projection, sizeof copy);
    DLTensor q = heads(projection, q_shape, fused), k = heads(&projection[0][0][Q * D], k_shape, fused);
    DLTensor c = bst_f32(cosines, 3, table_shape), s = bst_f32(sines, 3, table_shape);
    DLTensor qo = heads(q_out, q_shape, NULL), ko = heads(k_out, k_shape, NULL),
             low = heads(projection, k_shape, fused);
    memset(q_out, 0, sizeof q_out);
    memset(k_out, 0, sizeof k_out);
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, 0, &qo, &low), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out and q share memory");
    DLTensor shifted = heads(&projection[0][0][D], q_shape, fused);
    CHECK_EQ_I(rope_backward(NULL, &q, NULL, &c, &s, 0, &shifted, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: dq and dq_out share memory");
    CHECK_EQ_I(rope_forward(NULL, &q, NULL, &c, &s, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out is given, but k is NULL");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, 0, &qo, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out is NULL");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, NULL, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: sin is NULL");
    DLTensor half = s;
    half.dtype.bits = 16;
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &half, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "sin is float16; float32 is needed, the type of cos");
    int64_t odd[] = {B, S, R - 1}, longer[] = {B, S + 1, R}, wide[] = {B, S, D + 2};
    DLTensor odd_table = bst_f32(cosines, 3, odd), odd_sines = bst_f32(sines, 3, odd),
             long_table = bst_f32(cosines, 3, longer), wide_table = bst_f32(cosines, 3, wide);
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &odd_table, &odd_sines, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "cos has shape [2, 3, 7]; dimension 2 must be even, at least 2 and at most 12");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &wide_table, &s, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "cos has shape [2, 3, 14]");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &long_table, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "sin has shape [2, 4, 8]; dimension 1 must be 3, the positions of q");
    DLTensor there = ko;
    there.device = (DLDevice){kDLCUDA, 7};
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, 0, &qo, &there), BST_INVALID);
    CHECK_STR(bst_last_error(), "k_out is on cuda:7, but k is on ");
    /* Threads write where others still read. */
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, 2, &q, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: q_out and q share memory");
    CHECK_EQ_I(rope_backward(NULL, &q, &k, &c, &s, 2, &qo, &k), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: dk and dk_out share memory");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, 3, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "layout is 3; 0 (halves), 1 (interleaved) or 2 (interleaved to halves) is needed");
    CHECK_EQ_I(rope_forward(NULL, &q, &k, &c, &s, HALF_TABLES, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(),
              "cos has shape [2, 3, 8]; with half_tables dimension 2 must be at least 1 and at most 6, half the size");
    bst_rope_options unset = {.layout = BST_ROPE_INTERLEAVED};
    CHECK_EQ_I(bst_rope_forward(NULL, &q, &k, &c, &s, NULL, NULL, &unset, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: options->size is 0");
    bst_rope_backward_tensors none = {.dq_out = &q, .dq = &qo};
    CHECK_EQ_I(bst_rope_backward(NULL, &none, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: tensors->size is 0");
    CHECK_EQ_I(rope_backward(NULL, &q, &k, &c, &s, 0, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: dq is NULL");
    int64_t apart[] = {S * ALL, 1, ALL, Q};
    DLTensor strided = heads(projection, q_shape, apart);
    CHECK_EQ_I(rope_forward(NULL, &strided, &k, &c, &s, 0, &qo, &ko), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "the last dimension of q is not contiguous");
    CHECK(!memcmp(copy, projection, sizeof copy));
    for (int i = 0; i < B * Q * S * D; i++) CHECK((&q_out[0][0][0][0])[i] == 0);
    for (int i = 0; i < B * K * S * D; i++) CHECK((&k_out[0][0][0][0])[i] == 0);
}

enum { F32, BF16, F16 }; /* of bst_test_types */

/* Whole and partial heads, of a shape where the rest of a head fills its pieces and one where it does not; an address
 * that allows single elements only; tables of float32. */
static void compile_calls(void) {
    static const struct {
        int64_t q_heads, kv_heads, dim, rotary;
        bool off;
        int type, table;
    } calls[] = {
        {32, 8, 128, 128, false, F32, F32},  {32, 8, 128, 128, false, BF16, BF16}, {32, 8, 128, 128, false, F16, F16},
        {32, 8, 128, 128, false, BF16, F32}, {32, 8, 128, 64, false, BF16, BF16},  {5, 1, 80, 24, false, BF16, BF16},
        {9, 1, 256, 256, true, BF16, BF16},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        DLDataType type = bst_test_types[calls[i].type], table = bst_test_types[calls[i].table];
        int64_t qs[] = {2, calls[i].q_heads, 16, calls[i].dim}, ks[] = {2, calls[i].kv_heads, 16, calls[i].dim};
        int64_t ts[] = {1, 16, calls[i].rotary};
        bst_shape q, k, c, s, qo, ko;
        DLTensor *tq = bst_device_tensor(&q, type, 4, qs), *tk = bst_device_tensor(&k, type, 4, ks);
        DLTensor *tc = bst_device_tensor(&c, table, 3, ts), *tn = bst_device_tensor(&s, table, 3, ts);
        DLTensor *tqo = bst_device_tensor(&qo, table, 4, qs), *tko = bst_device_tensor(&ko, table, 4, ks);
        tq->byte_offset = calls[i].off ? (uint64_t)(type.bits / 8) : 0;
        for (int layout = 0; layout < 3; layout++) {
            CHECK_OK(rope_forward(&bst_fake_exec, tq, tk, tc, tn, layout, tqo, tko));
            CHECK_OK(rope_backward(&bst_fake_exec, tqo, tko, tc, tn, layout, tq, tk));
        }
    }
}

#ifndef BST_EMULATE
/* As the measurements of rope_cuda.c say: small blocks, and few heads a group. */
TEST(threads_of_a_block) {
    static const struct {
        int64_t q, k, dim;
        unsigned block;
        int64_t each, group;
    } cases[] = {{32, 8, 128, 64, 2, 16}, {16, 8, 128, 64, 2, 16}, {64, 8, 64, 64, 2, 8},
                 {32, 32, 96, 64, 4, 8},  {5, 1, 96, 64, 2, 8},    {9, 3, 2048, 128, 2, 128}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DLDataType type = bst_test_types[BF16];
        rope_launches got = {0};
        bst_compile_only collector = {90, NULL, &got, rope_note_launch};
        int64_t qs[] = {1, cases[i].q, 4096, cases[i].dim}, ks[] = {1, cases[i].k, 4096, cases[i].dim};
        int64_t ts[] = {1, 4096, cases[i].dim};
        bst_shape q, k, c, s, qo, ko;
        bst__cuda_compile_only(&collector);
        CHECK_OK(rope_forward(&bst_fake_exec, bst_device_tensor(&q, type, 4, qs), bst_device_tensor(&k, type, 4, ks),
                              bst_device_tensor(&c, type, 3, ts), bst_device_tensor(&s, type, 3, ts), 0,
                              bst_device_tensor(&qo, type, 4, qs), bst_device_tensor(&ko, type, 4, ks)));
        bst__cuda_compile_only(NULL);
        CHECK_EQ_I(got.count, 1);
        CHECK_EQ_I(got.launch[0].block, cases[i].block);
        CHECK_EQ_I(rope_macro(&got.launch[0], "EACH"), cases[i].each);
        CHECK_EQ_I(rope_macro(&got.launch[0], "GROUP"), cases[i].group);
    }
}
#endif

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("rope", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(one_gradient_alone);
    RUN(a_fused_projection_turns_in_place_and_back);
    RUN(whole_heads_turn_in_place_as_elsewhere);
    RUN(errors_name_the_argument_and_write_nothing);
#ifndef BST_EMULATE
    RUN(threads_of_a_block);
#endif
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
