/* test_cross_entropy.c - cross-entropy through the C API: loss and gradient under every option, in place and later,
 * rows that count for nothing, bst_scale, errors, its kernels on every chip. */
#include <float.h>
#include <math.h>

#include "chips.h"

/* Rows of logits lie in groups of INNER, with columns between them and a gap between the groups that nothing may touch.
 * 2051 columns are more than a tile of the CPU kernel, and odd. */
enum { GROUPS = 2, INNER = 3, T = GROUPS * INNER, MOST_V = 2051, PITCH = MOST_V + 5, GAP = 7 };
enum { BUFFER = GROUPS * (INNER * PITCH + GAP) };

static float buffer[BUFFER], copy[BUFFER], class_weight[MOST_V], dlogits[T * MOST_V], other[T * MOST_V];
static float loss[T], lse[T], kept[T][2], upstream[T];
static int64_t target[T], rows_shape[] = {T}, kept_shape[] = {T, 2};
static const int64_t ignored = 3; /* a class, as some tokenizers' padding is */

/* What differs from case to case. */
typedef struct setting {
    bst_cross_entropy_options options;
    bool weighted;
    float num_items; /* 0: not given */
} setting;

#define OPTIONS(...) {sizeof(bst_cross_entropy_options), &ignored, __VA_ARGS__}
static const setting settings[] = {
    {OPTIONS(BST_REDUCTION_MEAN, 0, 0, 1, 0), false, 0},
    {OPTIONS(BST_REDUCTION_SUM, 0, 0, 1, 0), false, 0},
    {OPTIONS(BST_REDUCTION_NONE, 0, 0, 1, 0), false, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0, 0, 1, 0), true, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0.1, 0, 1, 0), false, 0},
    {OPTIONS(BST_REDUCTION_NONE, 0.1, 0, 1, 0), true, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0, 2.5, 1, 0), false, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0, 0, -0.7, 0), false, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0, 0, 1, 0.01), true, 0},
    {OPTIONS(BST_REDUCTION_MEAN, 0, 0, 1, 0.01), true, 11},
    {OPTIONS(BST_REDUCTION_SUM, 0, 0, 1, 0), false, 11},
    {OPTIONS(BST_REDUCTION_SUM, 0.2, 1.5, 1.3, 0.02), true, 11},
    {OPTIONS(BST_REDUCTION_NONE, 1, 1.5, 1.3, 0.02), true, 0},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

static float *row_of(float *memory, int row) {
    return memory + row / INNER * (INNER * PITCH + GAP) + row % INNER * PITCH;
}

static void inputs(int vocabulary) {
    bst_fill(buffer, BUFFER, 1, 4);
    bst_fill(class_weight, vocabulary, 2, 0.5f);
    bst_fill(upstream, T, 3, 2);
    for (int i = 0; i < vocabulary; i++) class_weight[i] += 0.75f;
    for (int i = 0; i < T; i++) target[i] = i == 1 ? ignored : (int64_t)(i * 1009 % vocabulary);
    row_of(buffer, 2)[vocabulary - 1] = 6;                            /* the largest logit comes last */
    for (int v = 0; v < vocabulary; v++) row_of(buffer, 4)[v] -= 100; /* exp of these is no normal float32 */
}

/* ---- the same in double ------------------------------------------------------------------------------------------ */

static double exact_loss[T], exact_lse[T], exact_gradient[T][MOST_V], exact_total;

static void exact_row(const setting *s, int row, int vocabulary, double divide, double divide_square) {
    static double z[MOST_V], slope[MOST_V];
    const bst_cross_entropy_options *o = &s->options;
    double sum = 0, weights = 0, smooth = 0, top = -1e300;
    for (int v = 0; v < vocabulary; v++) {
        z[v] = o->logit_scale * row_of(buffer, row)[v];
        slope[v] = o->logit_scale;
        if (o->softcap > 0) {
            double u = tanh(z[v] / o->softcap);
            z[v] = o->softcap * u;
            slope[v] *= 1 - u * u;
        }
        if (z[v] > top) top = z[v];
    }
    for (int v = 0; v < vocabulary; v++) sum += exp(z[v] - top);
    double e = o->label_smoothing, log_sum = exact_lse[row] = top + log(sum);
    for (int v = 0; v < vocabulary; v++) {
        double w = s->weighted ? class_weight[v] : 1;
        weights += w;
        smooth += w * (log_sum - z[v]);
    }
    int64_t t = target[row];
    double hit = (1 - e) * (s->weighted ? class_weight[t] : 1);
    exact_loss[row] = (hit * (log_sum - z[t]) + e / vocabulary * smooth) / divide +
                      o->lse_square_scale * log_sum * log_sum / divide_square;
    for (int v = 0; v < vocabulary; v++) {
        double p = exp(z[v] - log_sum), w = s->weighted ? class_weight[v] : 1;
        double dz = (hit * (p - (v == t)) + e / vocabulary * (weights * p - w)) / divide +
                    2 * o->lse_square_scale * log_sum * p / divide_square;
        exact_gradient[row][v] = dz * slope[v];
    }
}

static void exact(const setting *s, int vocabulary) {
    double weights = 0, count = 0, divide = 1, divide_square = 1;
    for (int i = 0; i < T; i++) {
        if (target[i] == ignored) continue;
        weights += s->weighted ? class_weight[target[i]] : 1;
        count++;
    }
    if (s->options.reduction == BST_REDUCTION_MEAN) divide = weights, divide_square = count;
    if (s->num_items > 0) divide = divide_square = (double)s->num_items;
    exact_total = 0;
    for (int i = 0; i < T; i++) {
        exact_loss[i] = exact_lse[i] = 0;
        memset(exact_gradient[i], 0, sizeof exact_gradient[i]);
        if (target[i] != ignored) exact_row(s, i, vocabulary, divide, divide_square);
        exact_total += exact_loss[i];
    }
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

/* A few roundings of float32: of logits up to 6, their exponentials and sums. */
static const double close = 16 * (double)FLT_EPSILON;

static void check_loss(const setting *s) {
    bool none = s->options.reduction == BST_REDUCTION_NONE;
    for (int i = 0; none && i < T; i++) CHECK_CLOSE(loss[i], exact_loss[i], close * (1 + fabs(exact_loss[i])));
    if (!none) CHECK_CLOSE(loss[0], exact_total, close * (1 + fabs(exact_total)));
}

/* A gradient, contiguous or laid out as the logits, against the exact one times the upstream gradient. */
static void check_gradient(const setting *s, float *got, bool as_logits, int vocabulary, bool later) {
    bool none = s->options.reduction == BST_REDUCTION_NONE;
    for (int i = 0; i < T; i++) {
        const float *row = as_logits ? row_of(got, i) : got + i * vocabulary;
        double factor = !later ? 1 : (double)upstream[none ? i : 0];
        /* An exponential is as wrong, relatively, as its exponent is absolutely. */
        double relative = close + (double)FLT_EPSILON * fabs(exact_lse[i]);
        for (int v = 0; v < vocabulary; v++)
            CHECK_CLOSE(row[v], factor * exact_gradient[i][v], relative * (fabs(factor * exact_gradient[i][v]) + 0.01));
    }
}

static void check_gaps_untouched(int vocabulary) {
    for (int i = 0; i < BUFFER; i++) {
        int at = i % (INNER * PITCH + GAP);
        if (at >= INNER * PITCH || at % PITCH >= vocabulary) CHECK(copy[i] == buffer[i]);
    }
}

static void check_setting(const setting *s, int vocabulary) {
    bool none = s->options.reduction == BST_REDUCTION_NONE;
    int64_t shape[] = {GROUPS, INNER, vocabulary}, strides[] = {INNER * PITCH + GAP, PITCH, 1};
    int64_t weight_shape[] = {vocabulary};
    float number = s->num_items;
    DLTensor logits = bst_tensor(buffer, 3, shape, strides, bst_test_types[0]), in_place = logits;
    in_place.data = copy;
    DLTensor gradient = bst_f32(dlogits, 3, shape), losses = bst_f32(loss, none ? 1 : 0, rows_shape);
    DLTensor targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64),
             weights = bst_f32(class_weight, 1, weight_shape);
    DLTensor items = bst_f32(&number, 0, NULL), sums = bst_f32(lse, 1, rows_shape),
             pairs = bst_f32(kept, 2, kept_shape);
    DLTensor grad = bst_f32(upstream, none ? 1 : 0, rows_shape);
    const DLTensor *w = s->weighted ? &weights : NULL, *n = number > 0 ? &items : NULL;

    exact(s, vocabulary);
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, w, n, &s->options, &losses, &sums, NULL));
    check_loss(s);
    for (int i = 0; i < T; i++) CHECK_CLOSE(lse[i], exact_lse[i], close * (1 + fabs(exact_lse[i])));
    CHECK_OK(bst_cross_entropy_backward(NULL, &grad, &logits, &targets, w, n, &sums, &s->options, &gradient));
    check_gradient(s, dlogits, false, vocabulary, true);

    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, w, n, &s->options, &losses, &pairs, NULL));
    memcpy(copy, buffer, sizeof copy);
    CHECK_OK(bst_cross_entropy_backward(NULL, &grad, &in_place, &targets, w, n, &pairs, &s->options, &in_place));
    check_gradient(s, copy, true, vocabulary, true);
    check_gaps_untouched(vocabulary);
    if (none) return;

    memset(loss, 0xff, sizeof loss);
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, w, n, &s->options, &losses, NULL, &gradient));
    check_loss(s);
    check_gradient(s, dlogits, false, vocabulary, false);
    memcpy(copy, buffer, sizeof copy);
    CHECK_OK(bst_cross_entropy_forward(NULL, &in_place, &targets, w, n, &s->options, &losses, NULL, &in_place));
    check_loss(s);
    check_gradient(s, copy, true, vocabulary, false);
    check_gaps_untouched(vocabulary);
}

TEST(losses_and_gradients) {
    static const int vocabularies[] = {37, MOST_V};
    for (size_t v = 0; v < 2; v++) {
        inputs(vocabularies[v]);
        for (int i = 0; i < SETTINGS; i++) {
            int before = bst_test_failures;
            check_setting(&settings[i], vocabularies[v]);
            if (bst_test_failures > before) printf("     (setting %d, %d columns)\n", i, vocabularies[v]);
        }
    }
}

/* ---- what the reduction leaves of rows that do not count --------------------------------------------------------- */

enum { V = 37 };
static int64_t plain_shape[] = {T, V};
static const bst_cross_entropy_options mean = OPTIONS(BST_REDUCTION_MEAN, 0, 0, 1, 0),
                                       sum = OPTIONS(BST_REDUCTION_SUM, 0, 0, 1, 0);

TEST(kept_sums_repeat_the_gradient_bit_by_bit) {
    inputs(V);
    float one = 1;
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), pairs = bst_f32(kept, 2, kept_shape), grad = bst_f32(&one, 0, NULL);
    DLTensor first = bst_f32(dlogits, 2, plain_shape), second = bst_f32(other, 2, plain_shape);
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &mean, &total, &pairs, &first));
    CHECK_OK(bst_cross_entropy_backward(NULL, &grad, &logits, &targets, NULL, NULL, &pairs, &mean, &second));
    CHECK(!memcmp(dlogits, other, T * V * sizeof *other));
}

/* Zeros mean the usual, and so does no struct at all; a class of 0 can still be ignored. */
TEST(options_that_are_not_given) {
    inputs(V);
    target[1] = -100, target[3] = 0;
    const int64_t usual_index = -100, zero = 0;
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), gradient = bst_f32(dlogits, 2, plain_shape);
    DLTensor again = bst_f32(other, 2, plain_shape);
    const bst_cross_entropy_options usual = {sizeof usual, &usual_index, BST_REDUCTION_MEAN, 0, 0, 1, 0};
    const bst_cross_entropy_options zeros = {.size = sizeof zeros}, *same[] = {NULL, &zeros};
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &usual, &total, NULL, &gradient));
    float expected = loss[0];
    CHECK(isfinite(expected));
    for (int i = 0; i < 2; i++) {
        loss[0] = 0;
        CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, same[i], &total, NULL, &again));
        CHECK(loss[0] == expected && !memcmp(dlogits, other, T * V * sizeof *other));
    }
    const bst_cross_entropy_options padding = {.size = sizeof padding, .ignore_index = &zero};
    target[1] = 0;
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &padding, &total, NULL, &gradient));
    for (int v = 0; v < V; v++) CHECK(dlogits[1 * V + v] == 0 && dlogits[3 * V + v] == 0 && dlogits[4 * V + v] != 0);
}

TEST(nothing_to_count) {
    inputs(V);
    for (int i = 0; i < T; i++) target[i] = ignored;
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), gradient = bst_f32(dlogits, 2, plain_shape);
    for (int empty = 0; empty < 2; empty++) {
        int64_t no_rows[] = {0}, no_logits[] = {0, V};
        if (empty) logits.shape = gradient.shape = no_logits, targets.shape = no_rows;
        memset(dlogits, 0xff, sizeof dlogits);
        CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &mean, &total, NULL, &gradient));
        CHECK(isnan(loss[0])); /* 0 / 0, as torch.nn.functional.cross_entropy has it */
        for (int i = 0; i < T * V; i++) CHECK(empty ? isnan(dlogits[i]) : dlogits[i] == 0);
        CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &sum, &total, NULL, &gradient));
        CHECK(loss[0] == 0);
    }
}

TEST(a_masked_class_has_no_share) {
    inputs(V);
    buffer[5] = -INFINITY;
    target[0] = 6;
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), gradient = bst_f32(dlogits, 2, plain_shape);
    CHECK_OK(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &sum, &total, NULL, &gradient));
    CHECK(isfinite(loss[0]));
    CHECK(dlogits[5] == 0);
    double share = 0;
    for (int v = 0; v < V; v++) share += dlogits[v];
    CHECK_CLOSE(share, 0, close);
}

TEST(a_target_out_of_range) {
    inputs(V);
    target[2] = V;
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), gradient = bst_f32(dlogits, 2, plain_shape);
    loss[0] = dlogits[2 * V] = 42;
    bst_status status = bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &sum, &total, NULL, &gradient);
#ifdef BST_EMULATE /* checking would wait for the device */
    CHECK_EQ_I(status, BST_OK);
    CHECK(isnan(loss[0]));
    for (int v = 0; v < V; v++) CHECK(dlogits[2 * V + v] == 0);
#else
    CHECK_EQ_I(status, BST_INVALID);
    CHECK_STR(bst_last_error(), "cross_entropy_forward: target[2] is 37; 0 to 36, or ignore_index (3), is needed");
    CHECK(loss[0] == 42 && dlogits[2 * V] == 42);
    target[2] = -1;
    CHECK_EQ_I(bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &sum, &total, NULL, &gradient),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "target[2] is -1");
#endif
}

TEST(scale_multiplies_in_place) {
    int64_t shape[] = {1000};
    float factor = 0.75f;
    bst_fill(buffer, 1000, 4, 1);
    memcpy(copy, buffer, sizeof copy);
    /* From an odd address too, and not past the end. */
    for (int offset = 0; offset < 2; offset++) {
        DLTensor tensor = bst_f32(copy + offset, 1, shape), scale = bst_f32(&factor, 0, NULL);
        shape[0] = 999 - 2 * offset;
        CHECK_OK(bst_scale(NULL, &tensor, &scale));
        for (int i = 0; i < 1000; i++)
            CHECK(copy[i] == (i >= offset && i < offset + shape[0] ? buffer[i] * 0.75f : buffer[i]));
        memcpy(copy, buffer, sizeof copy);
    }
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

TEST(errors_name_the_argument_and_write_nothing) {
    inputs(V);
    memcpy(copy, buffer, sizeof copy);
    memset(dlogits, 0, sizeof dlogits);
    loss[0] = 42;
    int64_t wrong_rows[] = {T - 1}, wrong_columns[] = {T, V - 1}, shifted_strides[] = {V, 1}, three[] = {3};
    DLTensor logits = bst_f32(buffer, 2, plain_shape), targets = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    DLTensor total = bst_f32(loss, 0, NULL), gradient = bst_f32(dlogits, 2, plain_shape),
             sums = bst_f32(lse, 1, rows_shape);
    DLTensor weights = bst_f32(class_weight, 1, three), few = bst_tensor(target, 1, wrong_rows, NULL, bst_test_i64);
    DLTensor narrow = bst_f32(dlogits, 2, wrong_columns);
    DLTensor shifted = bst_tensor(buffer + 1, 2, plain_shape, shifted_strides, bst_test_types[0]);
    bst_cross_entropy_options o;
#define FORWARD(logits, target, weight, options, dlogits) \
    bst_cross_entropy_forward(NULL, logits, target, weight, NULL, options, &total, NULL, dlogits)
#define REFUSED(status, call, text)        \
    do {                                   \
        CHECK_EQ_I(call, status);          \
        CHECK_STR(bst_last_error(), text); \
    } while (0)
    REFUSED(BST_INVALID, FORWARD(NULL, &targets, NULL, &mean, NULL), "cross_entropy_forward: logits is NULL");
    REFUSED(BST_INVALID, FORWARD(&logits, &few, NULL, &mean, NULL), "target has shape [5]; 6 elements, one a row");
    REFUSED(BST_UNSUPPORTED, FORWARD(&logits, &total, NULL, &mean, NULL), "target has elements of");
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, &weights, &mean, NULL), "class_weight has shape [3]; dimension 0");
    o = (bst_cross_entropy_options){.reduction = BST_REDUCTION_SUM};
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &o, NULL), "options->size is 0; it must be set to sizeof");
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &mean, &narrow), "dlogits has shape [6, 36]");
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &mean, &shifted), "dlogits and logits share memory");
    REFUSED(BST_INVALID, bst_cross_entropy_forward(NULL, &logits, &targets, NULL, &sums, &mean, &total, NULL, NULL),
            "num_items has shape [6]");
    REFUSED(BST_INVALID, bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &mean, &sums, NULL, NULL),
            "loss has shape [6]");
    o = mean, o.label_smoothing = 1.5;
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &o, NULL), "label_smoothing is 1.5");
    o = mean, o.softcap = -1;
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &o, NULL), "softcap is -1");
    o = mean, o.logit_scale = (double)NAN;
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &o, NULL), "logit_scale is");
    o = mean, o.reduction = (bst_reduction)9;
    REFUSED(BST_INVALID, FORWARD(&logits, &targets, NULL, &o, NULL), "reduction is 9");
    o = mean, o.reduction = BST_REDUCTION_NONE;
    REFUSED(BST_INVALID, bst_cross_entropy_forward(NULL, &logits, &targets, NULL, NULL, &o, &sums, NULL, &gradient),
            "dlogits is wanted with reduction none");
    REFUSED(BST_INVALID,
            bst_cross_entropy_backward(NULL, &total, &logits, &targets, NULL, NULL, NULL, &mean, &gradient),
            "cross_entropy_backward: lse is NULL");
    REFUSED(BST_UNSUPPORTED, bst_scale(NULL, &gradient, &targets), "scale: scale has elements of");
    CHECK(loss[0] == 42);
    CHECK(!memcmp(copy, buffer, sizeof copy));
    for (int i = 0; i < T * V; i++) CHECK(dlogits[i] == 0);
}

/* ---- chips ------------------------------------------------------------------------------------------------------- */

static void compile_call(DLDataType type, int64_t vocabulary, const bst_cross_entropy_options *o, bool weighted,
                         bool in_place) {
    int64_t logits_shape[] = {4096, vocabulary}, column_shape[] = {vocabulary}, pairs_shape[] = {4096, 2};
    DLDataType f32 = bst_test_types[0];
    bst_shape l, d, t, w, total, k, g;
    DLTensor *logits = bst_device_tensor(&l, type, 2, logits_shape),
             *targets = bst_device_tensor(&t, bst_test_i64, 1, logits_shape);
    DLTensor *weights = weighted ? bst_device_tensor(&w, f32, 1, column_shape) : NULL;
    DLTensor *loss_ = bst_device_tensor(&total, f32, 0, NULL), *pairs = bst_device_tensor(&k, f32, 2, pairs_shape);
    DLTensor *grad = bst_device_tensor(&g, f32, 0, NULL), *dlogits_ = bst_device_tensor(&d, type, 2, logits_shape);
    if (in_place) {
        CHECK_OK(bst_cross_entropy_forward(&bst_fake_exec, logits, targets, weights, NULL, o, loss_, NULL, logits));
        CHECK_OK(bst_scale(&bst_fake_exec, logits, grad));
    } else {
        CHECK_OK(bst_cross_entropy_forward(&bst_fake_exec, logits, targets, weights, NULL, o, loss_, pairs, NULL));
        CHECK_OK(bst_cross_entropy_backward(&bst_fake_exec, grad, logits, targets, weights, NULL, pairs, o, dlogits_));
    }
}

/* Vocabularies of Qwen, of Llama 3, of Llama 2 (a narrow cluster) and of GPT-2 (odd: rows begin between vectors). */
static void compile_calls(void) {
    static const int64_t vocabularies[] = {151936, 128256, 32000, 50257};
    static const bst_cross_entropy_options all = {sizeof all, NULL, BST_REDUCTION_MEAN, 0.1, 30, -1.5, 1e-4};
    for (size_t v = 0; v < 4; v++)
        for (int in_place = 0; in_place < 2; in_place++)
            compile_call(bst_test_types[1], vocabularies[v], &mean, false, in_place);
    /* The most registers: every option, and float32, whose exponentials take more steps. */
    for (int in_place = 0; in_place < 2; in_place++) {
        compile_call(bst_test_types[1], 151936, &all, true, in_place);
        compile_call(bst_test_types[0], 151936, &all, true, in_place);
        compile_call(bst_test_types[0], 32000, &mean, false, in_place);
    }
    compile_call(bst_test_types[2], 128256, &mean, false, true);
    /* The widest rows that clusters hold. */
    compile_call(bst_test_types[1], 262144, &mean, false, true);
    compile_call(bst_test_types[1], 262144, &all, true, true);
    compile_call(bst_test_types[0], 262144, &mean, false, true);
    compile_call(bst_test_types[1], 50264, &mean, false, true);
    compile_call(bst_test_types[1], 50264, &all, true, true);
    compile_call(bst_test_types[0], 128256, &mean, false, true);
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("cross_entropy", compile_calls); }

int main(void) {
    RUN(losses_and_gradients);
    RUN(kept_sums_repeat_the_gradient_bit_by_bit);
    RUN(options_that_are_not_given);
    RUN(nothing_to_count);
    RUN(a_masked_class_has_no_share);
    RUN(a_target_out_of_range);
    RUN(scale_multiplies_in_place);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
