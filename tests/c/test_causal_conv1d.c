/* test_causal_conv1d.c - causal convolutions through the C API: values and gradients against plain loops, of rows that
 * are one sequence and of packed ones; each part alone, errors, the kernels on every chip. */
#include <math.h>

#include "chips.h"

/* Sequences longer than a thread's run on a GPU, of a length that no group of tokens divides; channels that end in
 * single elements, and rows with a gap. */
enum { BATCH = 2, TOKENS = 150, CHANNELS = 21, PITCH = 24, TAPS = 8 };

static float x[BATCH][TOKENS][PITCH], dy[BATCH][TOKENS][PITCH], weight[CHANNELS * TAPS], bias[CHANNELS];
static float y[BATCH][TOKENS][CHANNELS], dx[BATCH][TOKENS][CHANNELS], dweight[CHANNELS * TAPS], dbias[CHANNELS];

/* Sequences of one token and more, up to more than a window, and a long one; backwards in the second row, so that the
 * last of a row and the first of the next, which are two, have the same number. */
static int32_t seq_idx[BATCH][TOKENS];
static bool packed;

static int64_t shape[] = {BATCH, TOKENS, CHANNELS}, pitched[] = {TOKENS * PITCH, PITCH, 1}, channels[] = {CHANNELS};

static DLTensor rows_of(void *data, int64_t *strides) { return bst_tensor(data, 3, shape, strides, bst_test_types[0]); }

static void fill(void) {
    bst_fill(&x[0][0][0], BATCH * TOKENS * PITCH, 1, 2);
    bst_fill(&dy[0][0][0], BATCH * TOKENS * PITCH, 2, 2);
    bst_fill(weight, CHANNELS * TAPS, 3, 1);
    bst_fill(bias, CHANNELS, 4, 1);
    for (int t = 0, length = 1, left = 1; t < TOKENS; t++, left--) {
        if (!left) left = length = length < 10 ? length + 1 : TOKENS;
        seq_idx[0][t] = seq_idx[1][TOKENS - 1 - t] = 5 - length;
    }
}

/* Whether the token `from` is of the sequence of a token, if it is there at all. */
static bool counts(int b, int from, int t) {
    if (from < 0 || t >= TOKENS) return false;
    for (int i = from + 1; packed && i <= t; i++)
        if (seq_idx[b][i] != seq_idx[b][i - 1]) return false;
    return true;
}

static DLTensor sequences(void) { return bst_tensor(seq_idx, 2, shape, NULL, (DLDataType){kDLInt, 32, 1}); }

static double z_of(int b, int t, int c, int taps, bool has_bias) {
    double z = has_bias ? bias[c] : 0;
    for (int k = 0; k < taps; k++)
        if (counts(b, t - (taps - 1) + k, t)) z += (double)weight[c * taps + k] * x[b][t - (taps - 1) + k][c];
    return z;
}

/* dy, times SiLU's slope. */
static double g_of(int b, int t, int c, int taps, bool has_bias, bool silu) {
    double z = z_of(b, t, c, taps, has_bias), s = 1 / (1 + exp(-z));
    return dy[b][t][c] * (silu ? s * (1 + z * (1 - s)) : 1);
}

static void check_gradients(int taps, bool has_bias, bool silu) {
    for (int c = 0; c < CHANNELS; c++) {
        double to_weight[TAPS] = {0}, to_bias = 0;
        for (int b = 0; b < BATCH; b++)
            for (int t = 0; t < TOKENS; t++) {
                double g = g_of(b, t, c, taps, has_bias, silu), to_x = 0;
                to_bias += g;
                for (int k = 0; k < taps; k++) {
                    int from = t - (taps - 1) + k, to = t + (taps - 1) - k;
                    if (counts(b, from, t)) to_weight[k] += g * x[b][from][c];
                    if (counts(b, t, to)) to_x += (double)weight[c * taps + k] * g_of(b, to, c, taps, has_bias, silu);
                }
                CHECK_CLOSE(dx[b][t][c], to_x, 2e-5);
            }
        for (int k = 0; k < taps; k++) CHECK_CLOSE(dweight[c * taps + k], to_weight[k], 2e-4);
        if (has_bias) CHECK_CLOSE(dbias[c], to_bias, 2e-4);
    }
}

TEST(values_and_gradients) {
    fill();
    for (int taps = 1; taps <= TAPS; taps++) {
        for (int kind = 0; kind < 8; kind++) {
            bool has_bias = kind & 1, silu = kind & 2;
            int64_t windows[] = {CHANNELS, taps};
            bst_causal_conv1d_options options = {sizeof options, silu};
            DLTensor tx = rows_of(x, pitched), tdy = rows_of(dy, pitched), ty = rows_of(y, NULL),
                     tdx = rows_of(dx, NULL);
            DLTensor tw = bst_f32(weight, 2, windows), tdw = bst_f32(dweight, 2, windows);
            DLTensor tb = bst_f32(bias, 1, channels), tdb = bst_f32(dbias, 1, channels), *given = has_bias ? &tb : NULL;
            DLTensor ids = sequences(), *of = kind & 4 ? &ids : NULL;
            packed = of;
            CHECK_OK(bst_causal_conv1d_forward(NULL, &tx, &tw, given, of, silu ? &options : NULL, &ty));
            for (int b = 0; b < BATCH; b++)
                for (int t = 0; t < TOKENS; t++)
                    for (int c = 0; c < CHANNELS; c++) {
                        double z = z_of(b, t, c, taps, has_bias);
                        CHECK_CLOSE(y[b][t][c], silu ? z / (1 + exp(-z)) : z, 4e-6);
                    }
            CHECK_OK(bst_causal_conv1d_backward(NULL, &tdy, &tx, &tw, given, of, &options, &tdx, &tdw,
                                                has_bias ? &tdb : NULL));
            check_gradients(taps, has_bias, silu);
        }
    }
}

/* Each gradient alone has the bits that it has among all; nothing else is written. */
TEST(each_gradient_alone) {
    static float others[BATCH * TOKENS * CHANNELS], other_weights[CHANNELS * TAPS], other_biases[CHANNELS];
    int64_t windows[] = {CHANNELS, 4};
    bst_causal_conv1d_options options = {sizeof options, 1};
    DLTensor tx = rows_of(x, pitched), tdy = rows_of(dy, pitched), tw = bst_f32(weight, 2, windows);
    DLTensor tb = bst_f32(bias, 1, channels);
    DLTensor tdx = rows_of(dx, NULL), tdw = bst_f32(dweight, 2, windows), tdb = bst_f32(dbias, 1, channels);
    DLTensor ids = sequences();
    fill();
    for (int kind = 0; kind < 4; kind++) {
        DLTensor *of = kind & 2 ? &ids : NULL;
        options.silu = kind & 1;
        CHECK_OK(bst_causal_conv1d_backward(NULL, &tdy, &tx, &tw, &tb, of, &options, &tdx, &tdw, &tdb));
        for (int wanted = 0; wanted < 8; wanted++) {
            DLTensor to_x = rows_of(others, NULL), to_w = bst_f32(other_weights, 2, windows);
            DLTensor to_b = bst_f32(other_biases, 1, channels);
            memset(others, 0xff, sizeof others);
            memset(other_weights, 0xff, sizeof other_weights);
            memset(other_biases, 0xff, sizeof other_biases);
            CHECK_OK(bst_causal_conv1d_backward(NULL, &tdy, &tx, &tw, &tb, of, &options, wanted & 1 ? &to_x : NULL,
                                                wanted & 2 ? &to_w : NULL, wanted & 4 ? &to_b : NULL));
            CHECK(wanted & 1 ? !memcmp(others, dx, sizeof dx) : isnan(others[0]));
            CHECK(wanted & 2 ? !memcmp(other_weights, dweight, CHANNELS * 4 * sizeof(float)) : isnan(other_weights[0]));
            CHECK(wanted & 4 ? !memcmp(other_biases, dbias, sizeof dbias) : isnan(other_biases[0]));
        }
    }
}

/* No token, or no sequence: the sums are of nothing. */
TEST(nothing_to_convolve) {
    for (int empty = 0; empty < 2; empty++) {
        int64_t none[] = {empty ? 0 : 3, empty ? 5 : 0, 2}, windows[] = {2, 3}, two[] = {2};
        float sums[6], more[2], w[6] = {0};
        DLTensor tx = bst_tensor(NULL, 3, none, NULL, bst_test_types[0]), tw = bst_f32(w, 2, windows);
        DLTensor tb = bst_f32(w, 1, two), tdw = bst_f32(sums, 2, windows), tdb = bst_f32(more, 1, two), tdx = tx;
        DLTensor ids = bst_tensor(NULL, 2, none, NULL, (DLDataType){kDLInt, 32, 1});
        memset(sums, 0xff, sizeof sums);
        memset(more, 0xff, sizeof more);
        CHECK_OK(bst_causal_conv1d_forward(NULL, &tx, &tw, &tb, empty ? &ids : NULL, NULL, &tdx));
        CHECK_OK(bst_causal_conv1d_backward(NULL, &tx, &tx, &tw, &tb, empty ? &ids : NULL, NULL, &tdx, &tdw, &tdb));
        for (int i = 0; i < 6; i++) CHECK(sums[i] == 0);
        for (int i = 0; i < 2; i++) CHECK(more[i] == 0);
    }
}

TEST(errors_name_the_argument_and_write_nothing) {
    static float out[BATCH * TOKENS * CHANNELS];
    int64_t windows[] = {CHANNELS, 4}, long_windows[] = {CHANNELS, 9}, no_windows[] = {CHANNELS, 0};
    int64_t fewer[] = {CHANNELS - 1, 4}, across[] = {1, BATCH, TOKENS * BATCH};
    int64_t transposed[] = {TOKENS, BATCH}, apart[] = {1, BATCH};
    static float longer[CHANNELS * 9];
    DLTensor tx = rows_of(x, pitched), ty = rows_of(out, NULL), tw = bst_f32(weight, 2, windows);
    DLTensor tb = bst_f32(bias, 1, channels), bad = bst_f32(longer, 2, long_windows);
    bst_causal_conv1d_options unsized = {0};
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &bad, NULL, NULL, NULL, &ty), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: weight has windows of 9 tokens; 1 to 8 are supported");
    bad = bst_f32(longer, 2, no_windows);
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &bad, NULL, NULL, NULL, &ty), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: weight has windows of 0 tokens; 1 to 8 are supported");
    bad = bst_f32(longer, 2, fewer);
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &bad, NULL, NULL, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: weight has shape [20, 4]");
    bad = tb;
    bad.dtype = bst_test_types[1];
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &tw, &bad, NULL, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: bias is bfloat16; float32 is needed, the type of weight");
    bad = sequences();
    bad.dtype = bst_test_i64;
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &tw, NULL, &bad, NULL, &ty), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: seq_idx has elements of type int64; int32 is needed");
    bad = sequences();
    bad.shape = transposed;
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &tw, NULL, &bad, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: seq_idx has shape [150, 2]");
    bad = sequences();
    bad.strides = apart;
    CHECK_EQ_I(bst_causal_conv1d_backward(NULL, &tx, &tx, &tw, NULL, &bad, NULL, &ty, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_backward: seq_idx, of shape [2, 150], is not contiguous; it must be");
    bad = sequences();
    bad.device.device_id = 1;
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &tw, NULL, &bad, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: seq_idx is on");
    bad = rows_of(x, across);
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &bad, &tw, NULL, NULL, NULL, &ty), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: the last dimension of x is not contiguous");
    CHECK_EQ_I(bst_causal_conv1d_forward(NULL, &tx, &tw, NULL, NULL, &unsized, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_forward: options->size is 0");
    CHECK_EQ_I(bst_causal_conv1d_backward(NULL, &tx, &tx, &tw, NULL, NULL, NULL, &ty, NULL, &tb), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_backward: dbias is wanted, but bias is NULL");
    /* The windows of neighbours are read after a token's dx is written. */
    DLTensor dense = rows_of(out, NULL);
    CHECK_EQ_I(bst_causal_conv1d_backward(NULL, &dense, &tx, &tw, NULL, NULL, NULL, &ty, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "causal_conv1d_backward: dx and dy share memory");
    for (int i = 0; i < BATCH * TOKENS * CHANNELS; i++) CHECK(out[i] == 0);
}

/* Windows of three and four taps as models have them, the longest, and one; widths of whole and of single accesses;
 * weights of x's type and of float32; rows of one sequence and packed ones. float16 takes the kernels of bfloat16 but
 * for the conversions: one window shows those. */
static void compile_calls(void) {
    static const int64_t taps_of[] = {4, 3, 8, 1};
    bst_causal_conv1d_options options = {sizeof options, 0};
    for (size_t t = 0; t < 3; t++) {
        for (int i = 0; i < (t == 2 ? 1 : 4); i++) {
            for (int64_t width = 8192; width >= (i || t == 2 ? 8192 : 8191); width--) {
                for (int wide = 0; wide < (t && !i ? 2 : 1); wide++) {
                    bst_shape s[9];
                    int64_t sizes[] = {2, 4096, width}, windows[] = {width, taps_of[i]};
                    DLDataType of_x = bst_test_types[t], of_weight = bst_test_types[wide ? 0 : t];
                    DLTensor *tensors[4], *weights[2], *biases[2];
                    for (int j = 0; j < 4; j++) tensors[j] = bst_device_tensor(&s[j], of_x, 3, sizes);
                    for (int j = 0; j < 2; j++) weights[j] = bst_device_tensor(&s[4 + j], of_weight, 2, windows);
                    for (int j = 0; j < 2; j++) biases[j] = bst_device_tensor(&s[6 + j], of_weight, 1, windows);
                    DLTensor *ids = bst_device_tensor(&s[8], (DLDataType){kDLInt, 32, 1}, 2, sizes);
                    options.silu = i != 1;
                    bool has_bias = i == 0;
                    for (int packs = 0; packs < 2; packs++) {
                        DLTensor *of = packs ? ids : NULL;
                        CHECK_OK(bst_causal_conv1d_forward(&bst_fake_exec, tensors[0], weights[0],
                                                           has_bias ? biases[0] : NULL, of, &options, tensors[1]));
                        CHECK_OK(bst_causal_conv1d_backward(&bst_fake_exec, tensors[2], tensors[0], weights[0],
                                                            has_bias ? biases[0] : NULL, of, &options, tensors[3],
                                                            weights[1], has_bias ? biases[1] : NULL));
                    }
                }
            }
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("causal_conv1d", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(each_gradient_alone);
    RUN(nothing_to_convolve);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
