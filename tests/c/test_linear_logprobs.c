/* test_linear_logprobs.c - log-probabilities of targets from hidden states through the C API: values and gradients by
 * plain loops, logits kept and made again, errors, and its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "core/cpu_kernel.h"

enum { T = 150, V = 53, H = 21 };

#define LOGPROBS_OF(...) (&(bst_linear_logprobs_tensors){.size = sizeof(bst_linear_logprobs_tensors), __VA_ARGS__})

static float hidden[T][H], weight[V][H], bias[V], dhidden[T][H], dweight[V][H], dbias[V];
static float log_probs[T], pairs[T][2], entropy[T], lse[T], squares[T], mean[T], upstream[3][T], logits[T][V + 3];
static int32_t top1[T];
static int64_t target[T];
static int64_t hidden_shape[] = {T, H}, weight_shape[] = {V, H}, bias_shape[] = {V}, rows_shape[] = {T},
               pairs_shape[] = {T, 2}, logits_shape[] = {T, V}, logits_strides[] = {V + 3, 1};
static const bst_linear_logprobs_options options = {
    .size = sizeof options, .temperature = 0.7, .logit_scale = 1.3, .softcap = 4};

static void inputs(void) {
    bst_fill(&hidden[0][0], T * H, 1, 1);
    bst_fill(&weight[0][0], V * H, 2, 1);
    bst_fill(bias, V, 3, 1);
    bst_fill(&upstream[0][0], 3 * T, 4, 1);
    for (int i = 0; i < T; i++) target[i] = i % 5 ? i * 7 % V : -100;
}

static double exact_rows[5][T], exact_dhidden[T][H], exact_dweight[V][H], exact_dbias[V];

static void exact(void) {
    memset(exact_rows, 0, sizeof exact_rows);
    memset(exact_dhidden, 0, sizeof exact_dhidden);
    memset(exact_dweight, 0, sizeof exact_dweight);
    memset(exact_dbias, 0, sizeof exact_dbias);
    for (int i = 0; i < T; i++) {
        if (target[i] < 0) continue;
        double z[V], slope[V], sum = 0, products = 0, both = 0, all = 0;
        for (int v = 0; v < V; v++) {
            double x = bias[v];
            for (int h = 0; h < H; h++) x += (double)hidden[i][h] * weight[v][h];
            double u = tanh(1.3 * x / 4);
            z[v] = 4 * u / 0.7;
            slope[v] = 1.3 * (1 - u * u) / 0.7;
            sum += exp(z[v]);
            all += z[v];
        }
        for (int v = 0; v < V; v++) {
            double p = exp(z[v]) / sum;
            products += p * log(p);
            both += p * p;
        }
        double of[] = {z[target[i]] - log(sum), -products, log(sum), log(both), all / V};
        for (int k = 0; k < 5; k++) exact_rows[k][i] = of[k];
        for (int v = 0; v < V; v++) {
            double p = exp(z[v]) / sum;
            double dz = upstream[0][i] * ((v == target[i]) - p) - upstream[1][i] * p * (log(p) - products);
            dz = (dz + upstream[2][i] * p) * slope[v];
            exact_dbias[v] += dz;
            for (int h = 0; h < H; h++) {
                exact_dhidden[i][h] += dz * weight[v][h];
                exact_dweight[v][h] += dz * hidden[i][h];
            }
        }
    }
}

static void check_gradients(void) {
    for (int i = 0; i < T * H; i++) CHECK_CLOSE((&dhidden[0][0])[i], (&exact_dhidden[0][0])[i], 1e-5);
    for (int i = 0; i < V * H; i++) CHECK_CLOSE((&dweight[0][0])[i], (&exact_dweight[0][0])[i], 4e-5);
    for (int i = 0; i < V; i++) CHECK_CLOSE(dbias[i], exact_dbias[i], 4e-5);
    memset(dhidden, 0xff, sizeof dhidden);
    memset(dweight, 0xff, sizeof dweight);
    memset(dbias, 0xff, sizeof dbias);
}

TEST(values_and_gradients) {
    inputs();
    exact();
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             tb = bst_f32(bias, 1, bias_shape), tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor tp = bst_f32(log_probs, 1, rows_shape), tpairs = bst_f32(pairs, 2, pairs_shape),
             te = bst_f32(entropy, 1, rows_shape), tl = bst_f32(lse, 1, rows_shape),
             ts = bst_f32(squares, 1, rows_shape), tm = bst_f32(mean, 1, rows_shape),
             t1 = bst_tensor(top1, 1, rows_shape, NULL, (DLDataType){kDLInt, 32, 1}),
             tk = bst_tensor(logits, 2, logits_shape, logits_strides, bst_test_types[0]);
    DLTensor tdh = bst_f32(dhidden, 2, hidden_shape), tdw = bst_f32(dweight, 2, weight_shape),
             tdb = bst_f32(dbias, 1, bias_shape);
    DLTensor tg[] = {bst_f32(upstream[0], 1, rows_shape), bst_f32(upstream[1], 1, rows_shape),
                     bst_f32(upstream[2], 1, rows_shape)};
    /* Chunks of 64 rows (the least); all at once; all at once and kept; chunks of 40, of which the last is kept. */
    for (int way = 0; way < 4; way++) {
        bst_linear_logprobs_options o = options;
        o.chunk_bytes = way == 0;
        o.float32_dweight = way == 0;
        int64_t kept_shape[] = {way == 3 ? 40 : T, V};
        tk.shape = kept_shape;
        CHECK_OK(bst_linear_logprobs_forward(
            NULL,
            LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .log_probs = &tp, .pairs = &tpairs,
                        .entropy = &te, .lse = &tl, .log_sum_sq_probs = &ts, .mean_logits = &tm, .is_top1 = &t1,
                        .logits = way >= 2 ? &tk : NULL),
            &o));
        const float *made[] = {log_probs, entropy, lse, squares, mean};
        for (int k = 0; k < 5; k++)
            for (int i = 0; i < T; i++) CHECK_CLOSE(made[k][i], exact_rows[k][i], 4e-6);
        for (int i = 0; i < T; i++) CHECK(top1[i] == 0 || (target[i] >= 0 && exact_rows[0][i] > -4));
        CHECK_OK(bst_linear_logprobs_backward(
            NULL,
            LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .pairs = &tpairs, .entropy = &te,
                        .grad_log_probs = &tg[0], .grad_entropy = &tg[1], .grad_lse = &tg[2],
                        .logits = way >= 2 ? &tk : NULL, .dhidden = &tdh, .dweight = &tdw, .dbias = &tdb),
            &o));
        check_gradients();
    }
}

/* The jacobian, in chunks of 64 rows and all at once, is what backward's upstream gradient multiplies; rows that do not
 * count are zero. */
TEST(the_jacobian_is_backward_of_ones) {
    inputs();
    static float jacobian[T][H];
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             tb = bst_f32(bias, 1, bias_shape), tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor tp = bst_f32(log_probs, 1, rows_shape), tpairs = bst_f32(pairs, 2, pairs_shape),
             te = bst_f32(entropy, 1, rows_shape), tj = bst_f32(jacobian, 2, hidden_shape),
             tdh = bst_f32(dhidden, 2, hidden_shape), tg = bst_f32(upstream[0], 1, rows_shape),
             tk = bst_tensor(logits, 2, logits_shape, logits_strides, bst_test_types[0]);
    for (int way = 0; way < 2; way++) {
        bst_linear_logprobs_options o = options;
        o.chunk_bytes = way == 0;
        memset(jacobian, 0xff, sizeof jacobian);
        CHECK_OK(bst_linear_logprobs_forward(
            NULL,
            LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .log_probs = &tp, .pairs = &tpairs,
                        .entropy = &te, .jacobian = &tj),
            &o));
        CHECK_OK(bst_linear_logprobs_backward(NULL,
                                              LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb,
                                                          .pairs = &tpairs, .grad_log_probs = &tg, .dhidden = &tdh),
                                              &o));
        for (int i = 0; i < T; i++)
            for (int j = 0; j < H; j++) {
                CHECK_CLOSE(dhidden[i][j], upstream[0][i] * jacobian[i][j], 1e-5);
                CHECK(target[i] >= 0 || jacobian[i][j] == 0);
            }
    }
    CHECK_EQ_I(bst_linear_logprobs_forward(NULL,
                                           LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb,
                                                       .log_probs = &tp, .jacobian = &tj),
                                           &options),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "pairs is NULL; it is needed where jacobian is given");
    CHECK_EQ_I(
        bst_linear_logprobs_forward(NULL,
                                    LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb,
                                                .log_probs = &tp, .pairs = &tpairs, .logits = &tk, .jacobian = &tj),
                                    &options),
        BST_INVALID);
    CHECK_STR(bst_last_error(), "logits and jacobian are both given; keep the one or make the other");
}

/* What is sure has a log-probability still, and a gradient: 40 above all others. */
TEST(margins_keep_their_digits) {
    static float h[1][1] = {{40}}, w[V][1] = {{1}}, one = 1, dw[V][1];
    int64_t hs[] = {1, 1}, ws[] = {V, 1}, ps[] = {1, 2};
    static int64_t first[1];
    DLTensor th = bst_f32(h, 2, hs), tw = bst_f32(w, 2, ws), tt = bst_tensor(first, 1, hs, NULL, bst_test_i64);
    DLTensor tp = bst_f32(log_probs, 1, hs), tpairs = bst_f32(pairs, 2, ps), tg = bst_f32(&one, 1, hs);
    DLTensor tdw = bst_f32(dw, 2, ws);
    CHECK_OK(bst_linear_logprobs_forward(
        NULL, LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .log_probs = &tp, .pairs = &tpairs), NULL));
    double others = (V - 1) * exp(-40);
    CHECK_CLOSE(log_probs[0] / others, -1, 1e-6);
    CHECK_OK(bst_linear_logprobs_backward(NULL,
                                          LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .pairs = &tpairs,
                                                      .grad_log_probs = &tg, .dweight = &tdw),
                                          NULL));
    CHECK_CLOSE(dw[0][0] / (40 * others), 1, 1e-6);
    CHECK_CLOSE(dw[1][0] / (-40 * exp(-40)), 1, 1e-6);
}

/* Of so many rows Hopper has no logits. A product of them is rounded to the hidden states' type either way, now and
 * then to the other neighbour, for it is added up in another order: of a row's 300, of up to 4, by less than 2^-5. */
TEST(many_rows_are_what_a_part_of_them_is) {
    enum { ROWS = 1030, PART = 515, CLASSES = 300, WIDTH = 72, OF_ROW = 5 };
    static float of_hidden[ROWS][WIDTH], of_weight[CLASSES][WIDTH], at_once[OF_ROW][ROWS], in_parts[OF_ROW][ROWS];
    static int32_t first[ROWS], first_of_parts[ROWS];
    static int64_t targets[ROWS];
    for (int type = 1; type < 3; type++) {
        float *numbers[] = {&of_hidden[0][0], &of_weight[0][0]};
        const int64_t counts[] = {ROWS * WIDTH, CLASSES * WIDTH};
        for (int i = 0; i < 2; i++) {
            bst_fill(numbers[i], counts[i], 7 + i, 0.5);
            for (int64_t k = 0; k < counts[i]; k++) { /* in place, from the front on */
                float x = numbers[i][k];
                bst_store((uint16_t *)numbers[i] + k, &x, (bst_dtype)type, 1);
            }
        }
        for (int i = 0; i < ROWS; i++) targets[i] = i % 7 ? i * 11 % CLASSES : -100;
        for (int part = 0; part < 3; part++) {
            const bool whole = part == 0;
            const int64_t begin = part == 2 ? PART : 0, rows = whole ? ROWS : PART;
            float (*made)[ROWS] = whole ? at_once : in_parts;
            int64_t shape[] = {rows, WIDTH}, classes[] = {CLASSES, WIDTH}, row[] = {rows};
            DLTensor th =
                         bst_tensor((uint16_t *)&of_hidden[0][0] + begin * WIDTH, 2, shape, NULL, bst_test_types[type]),
                     tw = bst_tensor(of_weight, 2, classes, NULL, bst_test_types[type]),
                     tt = bst_tensor(targets + begin, 1, row, NULL, bst_test_i64),
                     t1 = bst_tensor((whole ? first : first_of_parts) + begin, 1, row, NULL,
                                     (DLDataType){kDLInt, 32, 1});
            DLTensor t[OF_ROW];
            for (int k = 0; k < OF_ROW; k++) t[k] = bst_f32(made[k] + begin, 1, row);
            CHECK_OK(bst_linear_logprobs_forward(
                NULL,
                LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .log_probs = &t[0], .entropy = &t[1],
                            .lse = &t[2], .log_sum_sq_probs = &t[3], .mean_logits = &t[4], .is_top1 = &t1),
                NULL));
        }
        int64_t far = 0, near = 0;
        for (int k = 0; k < OF_ROW; k++)
            for (int i = 0; i < ROWS; i++) {
                float off = fabsf(at_once[k][i] - in_parts[k][i]);
                far += !(off < 0x1p-5f), near += off > 1e-5f;
            }
        CHECK_EQ_I(far, 0);
        CHECK(near < OF_ROW * ROWS / 50);
        for (int i = 0; i < ROWS; i++) far += first[i] != first_of_parts[i];
        CHECK(far < ROWS / 100);
    }
}

TEST(errors_name_the_argument) {
    inputs();
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             tp = bst_f32(log_probs, 1, rows_shape), tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64),
             tpairs = bst_f32(pairs, 2, pairs_shape), tdh = bst_f32(dhidden, 2, hidden_shape);
    log_probs[0] = 42;
#ifndef BST_EMULATE /* on CUDA targets are not checked, for that would wait for the device */
    target[7] = V;
    CHECK_EQ_I(bst_linear_logprobs_forward(
                   NULL, LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .log_probs = &tp), &options),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "target[7] is 53");
    target[7] = 0;
#endif
    bst_linear_logprobs_options negative = options;
    negative.temperature = -1;
    CHECK_EQ_I(bst_linear_logprobs_forward(
                   NULL, LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .log_probs = &tp), &negative),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "temperature is -1; a number from 1e-6 to 1e6");
    CHECK_EQ_I(bst_linear_logprobs_backward(NULL,
                                            LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .pairs = &tpairs,
                                                        .grad_entropy = &tp, .dhidden = &tdh),
                                            &options),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "entropy is NULL; it is needed where grad_entropy is given");
    for (int64_t rows = 0; rows <= T + 1; rows += T + 1) {
        int64_t shape[] = {rows, V};
        DLTensor tk = bst_tensor(logits, 2, shape, logits_strides, bst_test_types[0]);
        CHECK_EQ_I(bst_linear_logprobs_forward(
                       NULL, LOGPROBS_OF(.hidden = &th, .weight = &tw, .target = &tt, .log_probs = &tp, .logits = &tk),
                       &options),
                   BST_INVALID);
        CHECK_STR(bst_last_error(), rows ? "logits has 151 rows; no more than the 150 of hidden are needed"
                                         : "logits has no rows; 1 to 150 are needed");
    }
    CHECK(log_probs[0] == 42);
}

/* Qwen3's vocabulary and GPT-2's, which is odd; with nothing more and with everything. */
static void compile_calls(void) {
    static const int64_t vocabularies[] = {151936, 50257};
    for (size_t t = 0; t < 3; t++) {
        for (size_t v = 0; v < 4; v++) {
            bst_shape s[20];
            bst_linear_logprobs_options o = {.size = sizeof o, .softcap = v == 3 ? 30 : 0};
            int64_t tokens = 1024, width = 1024, hs[] = {tokens, width}, ws[] = {vocabularies[v & 1], width},
                    ps[] = {tokens, 2};
            DLDataType type = bst_test_types[t], f = bst_test_types[0], i32 = {kDLInt, 32, 1};
            bst_linear_logprobs_tensors all = {.size = sizeof all};
            all.hidden = bst_device_tensor(&s[0], type, 2, hs), all.weight = bst_device_tensor(&s[1], type, 2, ws);
            all.target = bst_device_tensor(&s[2], bst_test_i64, 1, hs);
            all.log_probs = bst_device_tensor(&s[3], f, 1, hs), all.pairs = bst_device_tensor(&s[4], f, 2, ps);
            all.grad_log_probs = bst_device_tensor(&s[5], f, 1, hs);
            all.dhidden = bst_device_tensor(&s[6], type, 2, hs), all.dweight = bst_device_tensor(&s[7], type, 2, ws);
            if (v >= 2) {
                all.entropy = bst_device_tensor(&s[8], f, 1, hs), all.lse = bst_device_tensor(&s[9], f, 1, hs);
                all.log_sum_sq_probs = bst_device_tensor(&s[10], f, 1, hs);
                all.mean_logits = bst_device_tensor(&s[11], f, 1, hs);
                all.is_top1 = bst_device_tensor(&s[12], i32, 1, hs);
                all.grad_entropy = bst_device_tensor(&s[13], f, 1, hs);
            }
            CHECK_OK(bst_linear_logprobs_forward(&bst_fake_exec, &all, &o)); /* on Hopper without logits */
            hs[0] = ps[0] = 512;
            CHECK_OK(bst_linear_logprobs_forward(&bst_fake_exec, &all, &o));
            CHECK_OK(bst_linear_logprobs_backward(&bst_fake_exec, &all, &o));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("linear_logprobs", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(the_jacobian_is_backward_of_ones);
    RUN(margins_keep_their_digits);
    RUN(many_rows_are_what_a_part_of_them_is);
    RUN(errors_name_the_argument);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
