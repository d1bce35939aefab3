/* test_linear_cross_entropy.c - the fused head and loss through the C API: values by the products of our own, the three
 * ways to the gradients, errors, and its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

enum { T = 150, V = 53, H = 21 };

static float losses[T], hidden[T][H], weight[V][H], bias[V], dhidden[T][H], dweight[V][H], dbias[V], lse[T][2], loss;
static int64_t target[T];
static int64_t hidden_shape[] = {T, H}, weight_shape[] = {V, H}, bias_shape[] = {V}, rows_shape[] = {T},
               pairs_shape[] = {T, 2};
static const bst_cross_entropy_options mean = {.size = sizeof mean};

static void inputs(void) {
    bst_fill(&hidden[0][0], T * H, 1, 1);
    bst_fill(&weight[0][0], V * H, 2, 1);
    bst_fill(bias, V, 3, 1);
    for (int i = 0; i < T; i++) target[i] = i % 5 ? i * 7 % V : -100;
}

static double exact_loss, exact_dhidden[T][H], exact_dweight[V][H], exact_dbias[V];

static void exact(void) {
    int valid = 0;
    memset(exact_dhidden, 0, sizeof exact_dhidden);
    memset(exact_dweight, 0, sizeof exact_dweight);
    memset(exact_dbias, 0, sizeof exact_dbias);
    exact_loss = 0;
    for (int i = 0; i < T; i++) valid += target[i] >= 0;
    for (int i = 0; i < T; i++) {
        if (target[i] < 0) continue;
        double z[V], sum = 0;
        for (int v = 0; v < V; v++) {
            z[v] = bias[v];
            for (int h = 0; h < H; h++) z[v] += (double)hidden[i][h] * weight[v][h];
            sum += exp(z[v]);
        }
        exact_loss += (log(sum) - z[target[i]]) / valid;
        for (int v = 0; v < V; v++) {
            double dz = (exp(z[v]) / sum - (v == target[i])) / valid;
            exact_dbias[v] += dz;
            for (int h = 0; h < H; h++) {
                exact_dhidden[i][h] += dz * weight[v][h];
                exact_dweight[v][h] += dz * hidden[i][h];
            }
        }
    }
}

static void check_gradients(double factor) {
    for (int i = 0; i < T * H; i++) CHECK_CLOSE((&dhidden[0][0])[i], factor * (&exact_dhidden[0][0])[i], 2e-7 * factor);
    for (int i = 0; i < V * H; i++) CHECK_CLOSE((&dweight[0][0])[i], factor * (&exact_dweight[0][0])[i], 2e-6 * factor);
    for (int i = 0; i < V; i++) CHECK_CLOSE(dbias[i], factor * exact_dbias[i], 2e-6 * factor);
}

TEST(gradients_made_at_once_or_later) {
    inputs();
    exact();
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape),
             tb = bst_f32(bias, 1, bias_shape);
    DLTensor tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64), tl = bst_f32(&loss, 0, NULL),
             tlse = bst_f32(lse, 2, pairs_shape);
    DLTensor tdh = bst_f32(dhidden, 2, hidden_shape), tdw = bst_f32(dweight, 2, weight_shape),
             tdb = bst_f32(dbias, 1, bias_shape);
    /* Chunks of 64 rows (the least), and all at once. */
    for (int64_t bytes = 1; bytes < 1 << 30; bytes <<= 29) {
        CHECK_OK(bst_linear_cross_entropy_forward(
            NULL,
            LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .loss = &tl, .lse = &tlse,
                    .dhidden = &tdh, .dweight = &tdw, .dbias = &tdb),
            &mean, bytes));
        CHECK_CLOSE(loss, exact_loss, 2e-6);
        check_gradients(1);
    }
    memset(dhidden, 0xff, sizeof dhidden);
    float upstream = 3;
    DLTensor tg = bst_f32(&upstream, 0, NULL);
    CHECK_OK(bst_linear_cross_entropy_backward(
        NULL,
        LOSS_OF(.grad_loss = &tg, .hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .lse = &tlse,
                .dhidden = &tdh, .dweight = &tdw, .dbias = &tdb),
        &mean, 1));
    check_gradients(3);
    static float dlogits[T][V + 3];
    int64_t kept_shape[] = {T, V}, kept_strides[] = {V + 3, 1};
    DLTensor tk = bst_f32(dlogits, 2, kept_shape);
    tk.strides = kept_strides;
    CHECK_OK(bst_linear_cross_entropy_forward(
        NULL,
        LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .loss = &tl, .lse = &tlse, .dlogits = &tk),
        &mean, 0));
    CHECK_OK(bst_linear_cross_entropy_backward(
        NULL,
        LOSS_OF(.grad_loss = &tg, .hidden = &th, .weight = &tw, .target = &tt, .bias = &tb, .lse = &tlse,
                .dlogits = &tk, .dhidden = &tdh, .dweight = &tdw, .dbias = &tdb),
        &mean, 0));
    check_gradients(3);
}

#ifndef BST_EMULATE /* a GPU's products do not go through the caller */
static int products;
static int64_t most_logits;

static bst_status count_product(void *user, const bst_gemm *g) {
    (void)user;
    products++;
    for (int64_t row = 0; row < g->m; row++) memset((float *)g->out + row * g->ldo, 0, (size_t)g->n * sizeof(float));
    if (g->b_transposed && g->m * g->n > most_logits) most_logits = g->m * g->n;
    return BST_OK;
}

/* As few chunks as the budget allows, whether the vocabulary is larger than the width or not. */
TEST(chunks_follow_the_budget_and_nothing_else) {
    enum { ROWS = 1024, MOST = 256 };
    static float h[ROWS * MOST], w[MOST * MOST], dh[ROWS * MOST], dw[MOST * MOST];
    static int64_t classes[ROWS];
    bst_exec exec = {.size = sizeof exec, .gemm = count_product};
    for (int64_t vocabulary = 16; vocabulary <= MOST; vocabulary *= 16) {
        for (int64_t width = 16; width <= MOST; width *= 16) {
            int64_t hs[] = {ROWS, width}, ws[] = {vocabulary, width};
            DLTensor th = bst_f32(h, 2, hs), tw = bst_f32(w, 2, ws), tl = bst_f32(&loss, 0, NULL);
            DLTensor tdh = bst_f32(dh, 2, hs), tdw = bst_f32(dw, 2, ws);
            DLTensor tt = bst_tensor(classes, 1, hs, NULL, bst_test_i64);
            for (int64_t chunks = 1; chunks <= 8; chunks *= 2) {
                int64_t logits = ROWS / chunks * vocabulary;
                products = 0, most_logits = 0;
                CHECK_OK(bst_linear_cross_entropy_forward(
                    &exec,
                    LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &tl, .dhidden = &tdh, .dweight = &tdw),
                    &mean, logits * (int64_t)sizeof(float)));
                CHECK_EQ_I(products, 3 * chunks); /* logits, dhidden, dweight */
                CHECK_EQ_I(most_logits, logits);
            }
        }
    }
}

static bst_status failing_product(void *user, const bst_gemm *problem) {
    (void)problem;
    if (user) /* something of ours, which leaves its message */
        CHECK_EQ_I(bst_glu_forward(NULL, NULL, NULL, NULL, NULL), BST_INVALID);
    return BST_HOST;
}

/* A product of the caller's that fails is told, even where the caller cannot say why; what was told before is not. */
TEST(products_that_fail) {
    inputs();
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape), tl = bst_f32(&loss, 0, NULL);
    DLTensor tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64);
    for (int told = 0; told < 2; told++) {
        bst_exec exec = {.size = sizeof exec, .user = told ? &exec : NULL, .gemm = failing_product};
        CHECK_EQ_I(bst_scale(NULL, NULL, NULL), BST_INVALID);
        CHECK_EQ_I(bst_linear_cross_entropy_forward(
                       &exec, LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &tl), &mean, 0),
                   BST_HOST);
        CHECK_STR(bst_last_error(), told ? "linear_cross_entropy_forward: glu_forward: a is NULL"
                                         : "linear_cross_entropy_forward: bst_exec.gemm returned 7 (a call into the "
                                           "host framework failed) for a product of [");
    }
}

/* A budget for fewer than 64 rows counts as one for 64; the chunks are then evened out. */
TEST(chunks_of_few_rows) {
    enum { ROWS = 120, WIDTH = 16 };
    static float h[ROWS * WIDTH], w[WIDTH * WIDTH];
    static int64_t classes[ROWS];
    int64_t hs[] = {ROWS, WIDTH}, ws[] = {WIDTH, WIDTH};
    DLTensor th = bst_f32(h, 2, hs), tw = bst_f32(w, 2, ws), tl = bst_f32(&loss, 0, NULL);
    DLTensor tt = bst_tensor(classes, 1, hs, NULL, bst_test_i64);
    bst_exec exec = {.size = sizeof exec, .gemm = count_product};
    products = 0, most_logits = 0;
    CHECK_OK(bst_linear_cross_entropy_forward(&exec, LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &tl),
                                              &mean, 1));
    CHECK_EQ_I(products, 2);
    CHECK_EQ_I(most_logits, 60 * WIDTH);
}
#endif

/* Of Qwen3's head, 151936 classes in bfloat16, on GPUs of so many GiB. */
TEST(chunks_by_default_are_of_the_gpu_s_memory) {
    static const struct {
        int64_t gib, rows, chunk;
        bool rounded, alone, none;
    } cases[] = {
        {0, 5741, 5741, true},    /* not known, or large: all that fits 1664 MiB, */
        {0, 8192, 4096, true},    /* and else chunks of 4096 rows, */
        {0, 65536, 5632, true},   /* or an eighth of them, but for what does not fit */
        {141, 8192, 4096, true},  /* H200 */
        {80, 8192, 4096, true},   /* 1280 MiB: 4417 rows */
        {24, 1325, 1325, true},   /* 384 MiB: 1325 rows */
        {24, 4096, 1024, true},   /* evened out, in whole tiles */
        {24, 16384, 2048, true},  /* an eighth, for dweight is rounded */
        {24, 16384, 1280, false}, /* and not where there is none */
        {24, 65536, 1311, true},  /* an eighth would be more than 1664 MiB; 1408 rows, whole tiles, than 384 */
        {8, 8192, 1024, true},    /* no less than 256 MiB: 883 rows, but an eighth */
        {8, 4096, 820, false},
        {80, 4096, 2048, false, true}, /* hidden alone has a gradient: as few as cost little, */
        {80, 2048, 2048, false, true},
        {80, 8192, 1024, false, true}, /* and fewer where logits are many */
        {8, 4096, 820, false, true},
        {0, 8192, 1024, false, false, true}, /* none is wanted */
        {0, 1500, 768, false, false, true},
        {0, 1024, 1024, false, false, true},
        {8, 8192, 820, false, false, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t rows = bst__linear_cross_entropy_chunk_rows(&(linear_cross_entropy_chunks){
            .rows = cases[i].rows,
            .width = 4096,
            .row_bytes = 151936 * 2,
            .rounded = cases[i].rounded,
            .hidden_alone = cases[i].alone,
            .forward_alone = cases[i].none,
            .processors = 132,
            .memory = cases[i].gib << 30,
        });
        if (rows != cases[i].chunk) FAILED("case %zu: %lld rows", i, (long long)rows);
    }
}

TEST(memory_of_a_chunk_is_of_few_sizes) {
    const struct {
        int64_t rows, memory_rows, budget, gib;
        int processors;
    } cases[] = {
        {2048, 2048, 0, 80, 132},
        {1664, 2048, 0, 80, 132},
        {513, 1024, 0, 80, 132},
        {511, 511, 0, 80, 132},                  /* small as it is */
        {4400, 4400, 0, 80, 132},                /* 4608 would be more than a 64th of the GPU's memory */
        {1664, 1664, INT64_C(1) << 30, 80, 132}, /* as large as was asked for */
        {1664, 1664, 0, 0, 0},                   /* on CPU nobody keeps what is freed */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        linear_cross_entropy_chunks c = {.rows = 8192,
                                         .width = 4096,
                                         .row_bytes = 151936 * 2,
                                         .budget = cases[i].budget,
                                         .processors = cases[i].processors,
                                         .memory = cases[i].gib << 30};
        int64_t rows = bst__linear_cross_entropy_memory_rows(&c, cases[i].rows);
        if (rows != cases[i].memory_rows) FAILED("case %zu: %lld rows", i, (long long)rows);
    }
}

TEST(errors_name_the_argument) {
    inputs();
    DLTensor th = bst_f32(hidden, 2, hidden_shape), tw = bst_f32(weight, 2, weight_shape), tl = bst_f32(&loss, 0, NULL);
    DLTensor tt = bst_tensor(target, 1, rows_shape, NULL, bst_test_i64), tdb = bst_f32(dbias, 1, bias_shape);
    DLTensor tdw = bst_f32(dweight, 2, weight_shape);
    loss = 42;
#ifndef BST_EMULATE /* on CUDA targets are not checked, for that would wait for the device */
    target[7] = V;
    CHECK_EQ_I(bst_linear_cross_entropy_forward(NULL, LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &tl),
                                                &mean, 0),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "target");
    CHECK_STR(bst_last_error(), "53");
    target[7] = 0;
#endif
    CHECK_EQ_I(bst_linear_cross_entropy_forward(
                   NULL, LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &tl, .dbias = &tdb), &mean, 0),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "dbias is wanted, but bias is NULL");
    bst_cross_entropy_options none = mean;
    none.reduction = BST_REDUCTION_NONE;
    DLTensor rows = bst_f32(losses, 1, rows_shape);
    CHECK_EQ_I(
        bst_linear_cross_entropy_forward(
            NULL, LOSS_OF(.hidden = &th, .weight = &tw, .target = &tt, .loss = &rows, .dweight = &tdw), &none, 0),
        BST_INVALID);
    CHECK_STR(bst_last_error(), "reduction none");
    CHECK_EQ_I(bst_linear_cross_entropy_forward(NULL, LOSS_OF(.hidden = &tw, .weight = &th, .target = &tt, .loss = &tl),
                                                &mean, 0),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "target has shape [150]; dimension 0 must be 53");
    CHECK(loss == 42);
}

/* Qwen3's and Llama's vocabularies and GPT-2's, which is odd; with a bias, and with a budget so small that sums are
 * float32. */
static void compile_calls(void) {
    static const int64_t vocabularies[] = {151936, 128256, 50257};
    for (size_t t = 0; t < 3; t++) {
        for (size_t v = 0; v < 3; v++) {
            bst_shape h, w, b, tt, l, lse_, dh, dw, db;
            int64_t tokens = 1024, width = 1024, hs[] = {tokens, width}, ws[] = {vocabularies[v], width},
                    ps[] = {tokens, 2};
            DLDataType type = bst_test_types[t], f = bst_test_types[0];
            CHECK_OK(bst_linear_cross_entropy_forward(
                &bst_fake_exec,
                LOSS_OF(.hidden = bst_device_tensor(&h, type, 2, hs), .weight = bst_device_tensor(&w, type, 2, ws),
                        .target = bst_device_tensor(&tt, bst_test_i64, 1, hs),
                        .bias = bst_device_tensor(&b, type, 1, ws), .loss = bst_device_tensor(&l, f, 0, NULL),
                        .lse = bst_device_tensor(&lse_, f, 2, ps), .dhidden = bst_device_tensor(&dh, type, 2, hs),
                        .dweight = bst_device_tensor(&dw, type, 2, ws), .dbias = bst_device_tensor(&db, type, 1, ws)),
                &mean, v ? 0 : 1));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("linear_cross_entropy", compile_calls); }

int main(void) {
    RUN(gradients_made_at_once_or_later);
#ifndef BST_EMULATE
    RUN(chunks_follow_the_budget_and_nothing_else);
    RUN(products_that_fail);
    RUN(chunks_of_few_rows);
#endif
    RUN(chunks_by_default_are_of_the_gpu_s_memory);
    RUN(memory_of_a_chunk_is_of_few_sizes);
    RUN(errors_name_the_argument);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
