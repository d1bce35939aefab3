/* test_rope.c - rotary embedding through the C API: values, a fused projection turned in place and back, errors, its
 * kernels on every chip. */
#include <math.h>

#include "chips.h"

/* A projection [B, S, Q + K + V heads, D], of which q and k turn. */
enum { B = 2, S = 3, Q = 3, K = 2, V = 1, D = 12, R = 8, ALL = (Q + K + V) * D };

#ifdef BST_EMULATE
static const DLDevice device = {kDLCUDA, 0};
#else
static const DLDevice device = {kDLCPU, 0};
#endif

static float projection[B][S][ALL], cosines[B][S][R], sines[B][S][R];
static float q_out[B][Q][S][D], k_out[B][K][S][D];
static int64_t q_shape[] = {B, Q, S, D}, k_shape[] = {B, K, S, D}, table_shape[] = {B, S, R};
static int64_t fused[] = {S * ALL, D, ALL, 1};

static DLTensor tensor(void *data, int dims, int64_t *shape, int64_t *strides) {
    return (DLTensor){
        .data = data, .device = device, .ndim = dims, .dtype = {kDLFloat, 32, 1}, .shape = shape, .strides = strides};
}

static void fill(float *out, int count, unsigned seed) {
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        out[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

static void inputs(void) {
    fill(&projection[0][0][0], B * S * ALL, 1);
    for (int i = 0; i < B * S * R; i++) { /* no two angles are alike, those of a pair neither */
        (&cosines[0][0][0])[i] = cosf(0.37f * (float)i);
        (&sines[0][0][0])[i] = sinf(0.37f * (float)i);
    }
}

static double turned(const float *x, const float *c, const float *s, int i, int interleaved) {
    if (i >= R) return x[i];
    int partner = interleaved ? i ^ 1 : (i + R / 2) % R;
    int first = interleaved ? i % 2 == 0 : i < R / 2;
    return (double)x[i] * c[i] + (first ? -1 : 1) * (double)x[partner] * s[i];
}

TEST(values) {
    inputs();
    DLTensor q = tensor(projection, 4, q_shape, fused), k = tensor(&projection[0][0][Q * D], 4, k_shape, fused);
    DLTensor c = tensor(cosines, 3, table_shape, NULL), s = tensor(sines, 3, table_shape, NULL);
    DLTensor qo = tensor(q_out, 4, q_shape, NULL), ko = tensor(k_out, 4, k_shape, NULL);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        CHECK_OK(bst_rope_forward(NULL, &q, &k, &c, &s, interleaved, &qo, &ko));
        for (int b = 0; b < B; b++) {
            for (int t = 0; t < S; t++) {
                for (int i = 0; i < (Q + K) * D; i++) {
                    int head = i / D, at = i % D;
                    float got = head < Q ? q_out[b][head][t][at] : k_out[b][head - Q][t][at];
                    const float *x = &projection[b][t][head * D];
                    CHECK_CLOSE(got, turned(x, cosines[b][t], sines[b][t], at, interleaved), 3e-7);
                }
            }
        }
    }
}

TEST(a_fused_projection_turns_in_place_and_back) {
    static float copy[B][S][ALL];
    inputs();
    memcpy(copy, projection, sizeof copy);
    DLTensor q = tensor(copy, 4, q_shape, fused), k = tensor(&copy[0][0][Q * D], 4, k_shape, fused);
    DLTensor c = tensor(cosines, 3, table_shape, NULL), s = tensor(sines, 3, table_shape, NULL);
    DLTensor qo = tensor(q_out, 4, q_shape, NULL), ko = tensor(k_out, 4, k_shape, NULL);
    /* With one angle a pair, the transpose is the inverse. */
    for (int i = 0; i < B * S * R; i++) {
        if (i % R < R / 2) continue;
        (&cosines[0][0][0])[i] = (&cosines[0][0][0])[i - R / 2];
        (&sines[0][0][0])[i] = (&sines[0][0][0])[i - R / 2];
    }
    CHECK_OK(bst_rope_forward(NULL, &q, &k, &c, &s, 0, &qo, &ko));
    CHECK_OK(bst_rope_forward(NULL, &q, &k, &c, &s, 0, &q, &k));
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
    CHECK_OK(bst_rope_backward(NULL, &q, NULL, &c, &s, 0, &q, NULL));
    CHECK_OK(bst_rope_backward(NULL, &k, NULL, &c, &s, 0, &k, NULL));
    for (int i = 0; i < B * S * ALL; i++) CHECK_CLOSE((&copy[0][0][0])[i], (&projection[0][0][0])[i], 5e-7);
}

TEST(errors_name_the_argument_and_write_nothing) {
    static float copy[B][S][ALL];
    inputs();
    memcpy(copy, projection, sizeof copy);
    DLTensor q = tensor(projection, 4, q_shape, fused), k = tensor(&projection[0][0][Q * D], 4, k_shape, fused);
    DLTensor c = tensor(cosines, 3, table_shape, NULL), s = tensor(sines, 3, table_shape, NULL);
    DLTensor qo = tensor(q_out, 4, q_shape, NULL), ko = tensor(k_out, 4, k_shape, NULL),
             low = tensor(projection, 4, k_shape, fused);
    memset(q_out, 0, sizeof q_out);
    CHECK_EQ_I(bst_rope_forward(NULL, &q, &k, &c, &s, 0, &qo, &low), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out and q share memory");
    DLTensor shifted = tensor(&projection[0][0][D], 4, q_shape, fused);
    CHECK_EQ_I(bst_rope_backward(NULL, &q, NULL, &c, &s, 0, &shifted, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_backward: dq and dq_out share memory");
    CHECK_EQ_I(bst_rope_forward(NULL, &q, NULL, &c, &s, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out is given, but k is NULL");
    CHECK_EQ_I(bst_rope_forward(NULL, &q, &k, &c, &s, 0, &qo, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rope_forward: k_out is NULL");
    DLTensor half = s;
    half.dtype.bits = 16;
    CHECK_EQ_I(bst_rope_forward(NULL, &q, &k, &c, &half, 0, &qo, &ko), BST_INVALID);
    CHECK_STR(bst_last_error(), "sin is float16; float32 is needed, the type of cos");
    int64_t apart[] = {S * ALL, 1, ALL, Q};
    DLTensor strided = tensor(projection, 4, q_shape, apart);
    CHECK_EQ_I(bst_rope_forward(NULL, &strided, &k, &c, &s, 0, &qo, &ko), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "the last dimension of q is not contiguous");
    CHECK(!memcmp(copy, projection, sizeof copy));
    for (int i = 0; i < B * Q * S * D; i++) CHECK((&q_out[0][0][0][0])[i] == 0);
}

#ifndef BST_EMULATE /* the emulator compiles with the host's compiler: for no chip */
/* Whole and partial heads, of a shape where the rest of a head fills its pieces and one where it does not, an address
 * that allows single elements only, and tables of float32. */
static void compile_calls(void) {
    static const int64_t shapes[][5] = {
        {32, 8, 128, 128, 0}, {32, 8, 128, 64, 0}, {5, 1, 80, 24, 0}, {9, 1, 256, 256, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t *n = shapes[i];
        for (size_t t = 0; t < 6; t++) {
            DLDataType type = bst_test_types[t % 3], table = t < 3 ? type : bst_test_types[0];
            if (t == 3 || (i && t == 5)) continue; /* float32 again; float16 as bfloat16 */
            int64_t qs[] = {2, n[0], 16, n[2]}, ks[] = {2, n[1], 16, n[2]}, ts[] = {1, 16, n[3]};
            bst_shape q, k, c, s, qo, ko;
            DLTensor *tq = bst_device_tensor(&q, type, 4, qs), *tk = bst_device_tensor(&k, type, 4, ks);
            DLTensor *tc = bst_device_tensor(&c, table, 3, ts), *tn = bst_device_tensor(&s, table, 3, ts);
            DLTensor *tqo = bst_device_tensor(&qo, table, 4, qs), *tko = bst_device_tensor(&ko, table, 4, ks);
            tq->byte_offset = n[4] ? (uint64_t)(type.bits / 8) : 0;
            for (int interleaved = 0; interleaved < 2; interleaved++) {
                CHECK_OK(bst_rope_forward(&bst_fake_exec, tq, tk, tc, tn, interleaved, tqo, tko));
                CHECK_OK(bst_rope_backward(&bst_fake_exec, tqo, tko, tc, tn, interleaved, tq, tk));
            }
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("rope", compile_calls); }
#endif

int main(void) {
    RUN(values);
    RUN(a_fused_projection_turns_in_place_and_back);
    RUN(errors_name_the_argument_and_write_nothing);
#ifndef BST_EMULATE
    RUN(kernels_compile_for_every_chip);
#endif
    return bst_test_report();
}
