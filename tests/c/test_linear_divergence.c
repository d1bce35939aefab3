/* test_linear_divergence.c - a student's divergence from a teacher through the C API: values and gradients by plain
 * loops, gradients kept and made again, the teacher's head, logits and largest logits, errors, and its kernels on every
 * chip. */
#include <math.h>

#include "chips.h"

enum { T = 150, V = 53, H = 21, G = 13, K = 7 };

#define TENSORS_OF(...) (&(bst_linear_divergence_tensors){.size = sizeof(bst_linear_divergence_tensors), __VA_ARGS__})

static float hidden[T][H], weight[V][H], bias[V], t_hidden[T][G], t_weight[V][G], t_bias[V];
static float t_logits[T][V], largest[T][K], kept[T][V + 3], scale = 1.5f;
static float divergence[T], entropy[T], sums[T][5], grad[T], dhidden[T][H], dweight[V][H], dbias[V];
static int64_t indices[T][K];
static uint8_t mask[T];
static double teacher[T][V]; /* its logits, whatever they are from */
static int64_t hidden_shape[] = {T, H}, weight_shape[] = {V, H}, classes_shape[] = {V}, rows_shape[] = {T},
               t_hidden_shape[] = {T, G}, t_weight_shape[] = {V, G}, logits_shape[] = {T, V}, sums_shape[] = {T, 5},
               largest_shape[] = {T, K}, one_shape[] = {1}, kept_strides[] = {V + 3, 1};
static const bst_linear_divergence_options options = {
    .size = sizeof options, .beta = 0.3, .temperature = 0.7, .logit_scale = 1.3, .softcap = 4, .teacher_softcap = 6};

/* What the teacher gives. */
typedef enum given { HEAD, LOGITS, LARGEST } given;

static void inputs(given what) {
    bst_fill(&hidden[0][0], T * H, 1, 1);
    bst_fill(&weight[0][0], V * H, 2, 1);
    bst_fill(bias, V, 3, 1);
    bst_fill(&t_hidden[0][0], T * G, 4, 1);
    bst_fill(&t_weight[0][0], V * G, 5, 1);
    bst_fill(t_bias, V, 6, 1);
    bst_fill(&t_logits[0][0], T * V, 7, 3);
    bst_fill(&largest[0][0], T * K, 8, 3);
    bst_fill(grad, T, 9, 1);
    for (int i = 0; i < T; i++) {
        mask[i] = i % 5 != 2;
        for (int k = 0; k < K; k++) indices[i][k] = (i + k * 11) % V;
        for (int v = 0; v < V; v++) {
            double x = t_bias[v];
            for (int g = 0; g < G; g++) x += (double)t_hidden[i][g] * t_weight[v][g];
            teacher[i][v] = what == HEAD ? x : what == LOGITS ? t_logits[i][v] : -INFINITY;
        }
        for (int k = 0; what == LARGEST && k < K; k++) teacher[i][indices[i][k]] = largest[i][k];
    }
}

static double exact[T], exact_entropy[T], exact_dhidden[T][H], exact_dweight[V][H], exact_dbias[V];

/* z to log-probabilities, in place. */
static void normalise(double *z) {
    double sum = 0;
    for (int v = 0; v < V; v++) sum += exp(z[v]);
    for (int v = 0; v < V; v++) z[v] -= log(sum);
}

static double times(double p, double log_ratio) { return p > 0 ? p * log_ratio : 0; }

static void refer(bst_divergence kind, const float *upstream, double constant) {
    memset(exact_dhidden, 0, sizeof exact_dhidden);
    memset(exact_dweight, 0, sizeof exact_dweight);
    memset(exact_dbias, 0, sizeof exact_dbias);
    for (int i = 0; i < T; i++) {
        exact[i] = exact_entropy[i] = 0;
        if (!mask[i]) continue;
        double log_p[V], log_q[V], slope[V], beta = 0.3, mean = 0;
        for (int v = 0; v < V; v++) {
            double x = bias[v];
            for (int h = 0; h < H; h++) x += (double)hidden[i][h] * weight[v][h];
            double u = tanh(1.3 * x / 4);
            log_p[v] = 4 * u / 0.7;
            slope[v] = 1.3 * (1 - u * u) / 0.7;
            log_q[v] = teacher[i][v] == -INFINITY ? -INFINITY : 6 * tanh(teacher[i][v] / 6) / 0.7;
        }
        normalise(log_p);
        normalise(log_q);
        for (int v = 0; v < V; v++) {
            double p = exp(log_p[v]), q = exp(log_q[v]), log_m = log(beta * q + (1 - beta) * p);
            exact_entropy[i] -= p * log_p[v];
            if (kind == BST_DIVERGENCE_FORWARD) exact[i] += times(q, log_q[v] - log_p[v]);
            if (kind == BST_DIVERGENCE_REVERSE) exact[i] += times(p, log_p[v] - log_q[v]);
            if (kind != BST_DIVERGENCE_JSD) continue;
            mean += times(p, log_p[v] - log_m);
            exact[i] += beta * times(q, log_q[v] - log_m) + (1 - beta) * times(p, log_p[v] - log_m);
        }
        for (int v = 0; v < V; v++) {
            double p = exp(log_p[v]), q = exp(log_q[v]), log_m = log(beta * q + (1 - beta) * p);
            double dz = kind == BST_DIVERGENCE_FORWARD   ? p - q
                        : kind == BST_DIVERGENCE_REVERSE ? p * (log_p[v] - log_q[v] - exact[i])
                                                         : (1 - beta) * p * (log_p[v] - log_m - mean);
            dz *= slope[v] * (upstream ? (double)upstream[i] : constant);
            exact_dbias[v] += dz;
            for (int h = 0; h < H; h++) {
                exact_dhidden[i][h] += dz * weight[v][h];
                exact_dweight[v][h] += dz * hidden[i][h];
            }
        }
    }
}

static void check_gradients(void) {
    for (int i = 0; i < T * H; i++) CHECK_CLOSE((&dhidden[0][0])[i], (&exact_dhidden[0][0])[i], 2e-5);
    for (int i = 0; i < V * H; i++) CHECK_CLOSE((&dweight[0][0])[i], (&exact_dweight[0][0])[i], 1e-4);
    for (int i = 0; i < V; i++) CHECK_CLOSE(dbias[i], exact_dbias[i], 1e-4);
    memset(dhidden, 0xff, sizeof dhidden);
    memset(dweight, 0xff, sizeof dweight);
    memset(dbias, 0xff, sizeof dbias);
}

static void check_all(bst_divergence kind, given what) {
    inputs(what);
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             tb = bst_f32(bias, 1, classes_shape), sh = bst_f32(t_hidden, 2, t_hidden_shape),
             sw = bst_f32(t_weight, 2, t_weight_shape), sb = bst_f32(t_bias, 1, classes_shape),
             sl = bst_f32(t_logits, 2, logits_shape), sk = bst_f32(largest, 2, largest_shape),
             si = bst_tensor(indices, 2, largest_shape, NULL, bst_test_i64),
             tm = bst_tensor(mask, 1, rows_shape, NULL, (DLDataType){kDLUInt, 8, 1});
    DLTensor td = bst_f32(divergence, 1, rows_shape), te = bst_f32(entropy, 1, rows_shape),
             ts = bst_f32(sums, 2, sums_shape), tg = bst_f32(grad, 1, rows_shape), t1 = bst_f32(&scale, 1, one_shape),
             tk = bst_tensor(kept, 2, logits_shape, kept_strides, bst_test_types[0]);
    DLTensor tdh = bst_f32(dhidden, 2, hidden_shape), tdw = bst_f32(dweight, 2, weight_shape),
             tdb = bst_f32(dbias, 1, classes_shape);
    bst_linear_divergence_tensors all = {.size = sizeof all, .hidden = &th, .weight = &tw, .bias = &tb, .mask = &tm};
    if (what == HEAD) all.teacher_hidden = &sh, all.teacher_weight = &sw, all.teacher_bias = &sb;
    if (what != HEAD) all.teacher_logits = what == LOGITS ? &sl : &sk;
    if (what == LARGEST) all.teacher_indices = &si;
    all.divergence = &td, all.entropy = &te, all.sums = &ts, all.grad = &tg, all.scale = &t1;
    /* Chunks of 64 rows (the least); all at once; all at once and kept; in chunks, and in the forward pass. */
    for (int way = 0; way < 4; way++) {
        bool ahead = way == 3;
        bst_linear_divergence_options o = options;
        o.kind = kind;
        o.chunk_bytes = way == 0 || ahead;
        o.float32_dweight = way == 0;
        all.dlogits = way == 2 ? &tk : NULL;
        refer(kind, way >= 2 ? NULL : grad, ahead ? 1 : 1.5);
        all.dhidden = ahead ? &tdh : NULL, all.dweight = ahead ? &tdw : NULL, all.dbias = ahead ? &tdb : NULL;
        CHECK_OK(bst_linear_divergence_forward(NULL, &all, &o));
        for (int i = 0; i < T; i++) CHECK_CLOSE(divergence[i], exact[i], 4e-6);
        for (int i = 0; i < T; i++) CHECK_CLOSE(entropy[i], exact_entropy[i], 4e-6);
        all.dhidden = &tdh, all.dweight = &tdw, all.dbias = &tdb;
        if (!ahead) CHECK_OK(bst_linear_divergence_backward(NULL, &all, &o));
        check_gradients();
    }
}

TEST(forward) { check_all(BST_DIVERGENCE_FORWARD, HEAD); }
TEST(reverse) { check_all(BST_DIVERGENCE_REVERSE, HEAD); }
TEST(jsd) { check_all(BST_DIVERGENCE_JSD, HEAD); }
TEST(of_logits) { check_all(BST_DIVERGENCE_REVERSE, LOGITS); }
TEST(of_the_largest_logits) { check_all(BST_DIVERGENCE_JSD, LARGEST); }

/* Two distributions that are nearly the same: what differs has a relative error, not what is the same. */
TEST(small_divergences_keep_their_digits) {
    static float h[1][1] = {{1}}, w[V][1], logits[1][V];
    int64_t hs[] = {1, 1}, ws[] = {V, 1}, ls[] = {1, V};
    double log_p[V], log_q[V];
    bst_fill(&w[0][0], V, 1, 3);
    for (int v = 0; v < V; v++) {
        logits[0][v] = w[v][0] + (float)(v % 3 - 1) * 0x1p-12f + 5; /* an offset changes no softmax */
        log_p[v] = w[v][0], log_q[v] = logits[0][v];
    }
    normalise(log_p);
    normalise(log_q);
    DLTensor th = bst_f32(h, 2, hs), tw = bst_f32(w, 2, ws), tl = bst_f32(logits, 2, ls),
             td = bst_f32(divergence, 1, hs);
    for (int kind = 0; kind < 3; kind++) {
        bst_linear_divergence_options o = {.size = sizeof o, .kind = (bst_divergence)kind, .beta = 0.5};
        double sum = 0;
        for (int v = 0; v < V; v++) {
            double p = exp(log_p[v]), q = exp(log_q[v]), d = log_q[v] - log_p[v], m = (p + q) / 2;
            sum += kind == 0   ? q * d - q + p
                   : kind == 1 ? -p * d - p + q
                               : (q * (d + log(p / m)) - q + m + p * log(p / m) - p + m) / 2;
        }
        CHECK_OK(bst_linear_divergence_forward(
            NULL, TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_logits = &tl, .divergence = &td), &o));
        CHECK(sum > 1e-9 && sum < 1e-7);
        CHECK_CLOSE(divergence[0] / sum, 1, 2e-3); /* of logits near 8 that are rounded to 2^-21 */
    }
}

TEST(errors_name_the_argument) {
    inputs(HEAD);
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             sh = bst_f32(t_hidden, 2, t_hidden_shape), sw = bst_f32(t_weight, 2, t_weight_shape),
             sk = bst_f32(largest, 2, largest_shape), td = bst_f32(divergence, 1, rows_shape),
             tdh = bst_f32(dhidden, 2, hidden_shape);
    bst_linear_divergence_options o = {.size = sizeof o};
    divergence[0] = 42;
    CHECK_EQ_I(bst_linear_divergence_forward(NULL, TENSORS_OF(.hidden = &th, .weight = &tw, .divergence = &td), &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "teacher_hidden and teacher_logits are both NULL");
    CHECK_EQ_I(bst_linear_divergence_forward(
                   NULL, TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_logits = &sk, .divergence = &td), &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "teacher_logits has shape [150, 7]");
#ifndef BST_EMULATE /* on CUDA indices are not checked, for that would wait for the device */
    DLTensor si = bst_tensor(indices, 2, largest_shape, NULL, bst_test_i64);
    indices[3][2] = V;
    CHECK_EQ_I(bst_linear_divergence_forward(NULL,
                                             TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_logits = &sk,
                                                        .teacher_indices = &si, .divergence = &td),
                                             &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "teacher_indices[23] is 53; 0 to 52");
#endif
    o.kind = BST_DIVERGENCE_JSD, o.beta = 1;
    CHECK_EQ_I(bst_linear_divergence_forward(NULL,
                                             TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_hidden = &sh,
                                                        .teacher_weight = &sw, .divergence = &td),
                                             &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "beta is 1; for jsd a number between 0 and 1");
    o.kind = BST_DIVERGENCE_FORWARD;
    CHECK_EQ_I(bst_linear_divergence_backward(NULL,
                                              TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_hidden = &sh,
                                                         .teacher_weight = &sw, .dhidden = &tdh),
                                              &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "grad is NULL; it is needed where dlogits is not given");
    DLTensor tk = bst_tensor(kept, 2, logits_shape, kept_strides, bst_test_types[0]);
    CHECK_EQ_I(bst_linear_divergence_forward(
                   NULL,
                   TENSORS_OF(.hidden = &th, .weight = &tw, .teacher_hidden = &sh, .teacher_weight = &sw,
                              .divergence = &td, .dlogits = &tk, .dhidden = &tdh),
                   &o),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "dlogits and other gradients are both given");
    CHECK(divergence[0] == 42);
}

/* Qwen3's vocabulary and GPT-2's, which is odd: forward alone, with gradients made and with them kept, backward; the
 * teacher's largest logits. */
static void compile_calls(void) {
    static const int64_t vocabularies[] = {151936, 50257};
    for (size_t t = 0; t < 3; t++) {
        for (size_t v = 0; v < 4; v++) {
            bst_shape s[20];
            bst_linear_divergence_options o = {.size = sizeof o, .kind = (bst_divergence)(v % 3)};
            if (v == 3) o.softcap = o.teacher_softcap = 30;
            int64_t tokens = 256, width = 1024, few = 64, hs[] = {tokens, width}, ws[] = {vocabularies[v & 1], width},
                    ls[] = {tokens, vocabularies[v & 1]}, ks[] = {tokens, few}, fs[] = {tokens, 5};
            DLDataType type = bst_test_types[t], f = bst_test_types[0];
            bst_linear_divergence_tensors all = {.size = sizeof all};
            all.hidden = bst_device_tensor(&s[0], type, 2, hs), all.weight = bst_device_tensor(&s[1], type, 2, ws);
            if (v < 2) {
                all.teacher_hidden = bst_device_tensor(&s[2], type, 2, hs);
                all.teacher_weight = bst_device_tensor(&s[3], type, 2, ws);
            } else if (v == 2) {
                all.teacher_logits = bst_device_tensor(&s[2], type, 2, ls);
            } else {
                all.teacher_logits = bst_device_tensor(&s[2], type, 2, ks);
                all.teacher_indices = bst_device_tensor(&s[3], bst_test_i64, 2, ks);
            }
            all.divergence = bst_device_tensor(&s[4], f, 1, hs), all.entropy = bst_device_tensor(&s[5], f, 1, hs);
            all.sums = bst_device_tensor(&s[6], f, 2, fs), all.grad = bst_device_tensor(&s[7], f, 1, hs);
            all.dhidden = bst_device_tensor(&s[8], type, 2, hs), all.dweight = bst_device_tensor(&s[9], type, 2, ws);
            CHECK_OK(bst_linear_divergence_backward(&bst_fake_exec, &all, &o));
            all.dhidden = bst_device_tensor(&s[11], f, 2, hs), all.dweight = bst_device_tensor(&s[12], f, 2, ws);
            CHECK_OK(bst_linear_divergence_forward(&bst_fake_exec, &all, &o));
            all.dhidden = all.dweight = NULL;
            CHECK_OK(bst_linear_divergence_forward(&bst_fake_exec, &all, &o));
            all.dlogits = bst_device_tensor(&s[10], type, 2, ls);
            CHECK_OK(bst_linear_divergence_forward(&bst_fake_exec, &all, &o));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("linear_divergence", compile_calls); }

int main(void) {
    RUN(forward);
    RUN(reverse);
    RUN(jsd);
    RUN(of_logits);
    RUN(of_the_largest_logits);
    RUN(small_divergences_keep_their_digits);
    RUN(errors_name_the_argument);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
