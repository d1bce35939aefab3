/* test_optim.c - the optimiser through the C API: values against plain loops in double, lists, errors that name the
 * tensor and write nothing, its kernels on every chip. */
#include <math.h>

#include "chips.h"

/* A tensor that fills no vector, one that ends in a block of 256, one of several units of work, and none. */
enum { TENSORS = 4, MOST = 20000 };
static const int64_t sizes[TENSORS] = {5, 700, MOST, 0};

static float p[TENSORS][MOST], g[TENSORS][MOST], m[TENSORS][MOST], v[TENSORS][MOST], steps[TENSORS];
static double want[3][TENSORS][MOST];

/* Tensors of float32 over those arrays, and lists of them. */
typedef struct lists {
    int64_t size[TENSORS];
    DLTensor tensor[5][TENSORS], *pointer[5][TENSORS];
} lists;

static bst_adamw_tensors lists_of(lists *l) {
    static int64_t none;
    float *arrays[5][TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        arrays[0][i] = p[i], arrays[1][i] = g[i], arrays[2][i] = m[i], arrays[3][i] = v[i], arrays[4][i] = &steps[i];
        l->size[i] = sizes[i];
        for (int k = 0; k < 5; k++) {
            l->tensor[k][i] = bst_f32(arrays[k][i], k < 4, k < 4 ? &l->size[i] : &none);
            l->pointer[k][i] = &l->tensor[k][i];
        }
    }
    return (bst_adamw_tensors){.size = sizeof(bst_adamw_tensors),
                               .count = TENSORS,
                               .parameter = l->pointer[0],
                               .gradient = l->pointer[1],
                               .exp_avg = l->pointer[2],
                               .exp_avg_sq = l->pointer[3],
                               .step = l->pointer[4]};
}

static const double lr = 0.01, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;

static void fill(void) {
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    memset(steps, 0, sizeof steps);
    for (unsigned i = 0; i < TENSORS; i++) bst_fill(p[i], sizes[i], 1 + i, 1), bst_fill(g[i], sizes[i], 9 + i, 2);
    for (int i = 0; i < TENSORS; i++)
        for (int j = 0; j < sizes[i]; j++) want[0][i][j] = p[i][j], want[1][i][j] = want[2][i][j] = 0;
}

/* The definition: g times `factor`. */
static void define(int t, double factor) {
    for (int i = 0; i < TENSORS; i++) {
        for (int j = 0; j < sizes[i]; j++) {
            double gradient = g[i][j] * factor, *w = &want[0][i][j], *wm = &want[1][i][j], *wv = &want[2][i][j];
            *wm = beta1 * *wm + (1 - beta1) * gradient;
            *wv = beta2 * *wv + (1 - beta2) * gradient * gradient;
            double root = sqrt(*wv / (1 - pow(beta2, t))) + eps;
            *w -= lr * decay * *w + lr / (1 - pow(beta1, t)) * *wm / root;
        }
    }
}

static void compare(double within) {
    for (int i = 0; i < TENSORS; i++) {
        for (int j = 0; j < sizes[i]; j++) {
            CHECK_CLOSE(p[i][j], want[0][i][j], within);
            CHECK_CLOSE(m[i][j], want[1][i][j], within);
            CHECK_CLOSE(v[i][j], want[2][i][j], within);
        }
    }
}

TEST(three_steps) {
    lists l;
    bst_adamw_tensors t = lists_of(&l);
    fill();
    for (int step = 1; step <= 3; step++) {
        for (unsigned i = 0; i < TENSORS; i++) bst_fill(g[i], sizes[i], 30 * (unsigned)step + i, 2);
        CHECK_OK(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL));
        define(step, 1);
        for (int i = 0; i < TENSORS; i++) CHECK(steps[i] == (float)step);
    }
    compare(1e-6);
}

/* All that a step may be given on the device: the learning rate, a scale that gradients are freed of, in place, a
 * clip's coefficient, and word of a gradient that is not finite. */
TEST(numbers_on_the_device) {
    lists l;
    bst_adamw_tensors t = lists_of(&l);
    float rate = (float)lr, scale = 4, clip = 0.5f, found = 1;
    DLTensor rate_tensor = bst_f32(&rate, 0, NULL), scale_tensor = bst_f32(&scale, 0, NULL);
    DLTensor clip_tensor = bst_f32(&clip, 0, NULL), found_tensor = bst_f32(&found, 0, NULL);
    t.lr = &rate_tensor, t.grad_scale = &scale_tensor, t.clip = &clip_tensor, t.found_inf = &found_tensor;
    fill();
    bst_adamw_options options = {.size = sizeof options, .maximize = 1};
    CHECK_OK(bst_optim_adamw(NULL, &t, 77, beta1, beta2, eps, decay, &options));
    compare(0);
    CHECK(steps[0] == 0 && m[2][7] == 0);
    found = 0;
    float before = g[2][7];
    define(1, -0.125);
    CHECK_OK(bst_optim_adamw(NULL, &t, 77, beta1, beta2, eps, decay, &options));
    compare(1e-6);
    CHECK(steps[0] == 1 && g[2][7] == before / 8);
}

/* Moments of 8 bits: near what they stand for, codes 0 behind the last element, the same when repeated and other ones
 * with another seed. */
TEST(moments_of_8_bits) {
    enum { BLOCKS = (MOST + 255) / 256 };
    static unsigned char codes[2][TENSORS][BLOCKS * 256] __attribute__((aligned(16))), kept[BLOCKS * 256];
    static float scales[2][TENSORS][BLOCKS];
    static DLTensor tensor[4][TENSORS], *pointer[4][TENSORS];
    static int64_t shape[TENSORS][2];
    lists l;
    for (int round = 0; round < 3; round++) {
        bst_adamw_tensors t = lists_of(&l);
        fill();
        memset(codes, 0, sizeof codes);
        memset(scales, 0, sizeof scales);
        for (int i = 0; i < TENSORS; i++) {
            shape[i][0] = (sizes[i] + 255) / 256, shape[i][1] = 256;
            for (int k = 0; k < 2; k++) {
                tensor[k][i] = bst_tensor(codes[k][i], 2, shape[i], NULL, (DLDataType){kDLUInt, 8, 1});
                tensor[2 + k][i] = bst_f32(scales[k][i], 1, shape[i]);
            }
            for (int k = 0; k < 4; k++) pointer[k][i] = &tensor[k][i];
        }
        t.exp_avg = pointer[0], t.exp_avg_sq = pointer[1], t.exp_avg_scale = pointer[2],
        t.exp_avg_sq_scale = pointer[3];
        bst_adamw_options options = {.size = sizeof options, .seed = round == 2 ? 8 : 7};
        for (int step = 1; step <= 2; step++)
            CHECK_OK(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, &options));
        define(1, 1);
        define(2, 1);
        for (int j = 0; j < MOST; j++) {
            int code = (signed char)codes[0][2][j];
            double largest = scales[0][2][j / 256], first = largest * code * abs(code) / (127.0 * 127);
            /* A step of the code at each of two writings, and at the largest a step is 1.6 %. */
            CHECK_CLOSE(first, want[1][2][j], 0.04 * largest);
            double second = scales[1][2][j / 256] * pow(codes[1][2][j] / 255.0, 4);
            CHECK_CLOSE(second, want[2][2][j], 0.04 * scales[1][2][j / 256]);
        }
        for (int j = MOST; j < BLOCKS * 256; j++) CHECK(!codes[0][2][j] && !codes[1][2][j]);
        if (round) CHECK(!memcmp(kept, codes[0][2], sizeof kept) == (round == 1));
        memcpy(kept, codes[0][2], sizeof kept);
    }
}

TEST(norm_and_scale) {
    lists l;
    bst_adamw_tensors t = lists_of(&l);
    fill();
    float norm = -1, coefficient = -1;
    double sum = 0;
    DLTensor norm_tensor = bst_f32(&norm, 0, NULL), coefficient_tensor = bst_f32(&coefficient, 0, NULL);
    for (int i = 0; i < TENSORS; i++)
        for (int j = 0; j < sizes[i]; j++) sum += (double)g[i][j] * g[i][j];
    const DLTensor *const *list = (const DLTensor *const *)t.gradient;
    CHECK_OK(bst_optim_norm(NULL, TENSORS, list, NULL, 3, &norm_tensor, &coefficient_tensor));
    CHECK_CLOSE(norm, sqrt(sum), 1e-6 * sqrt(sum));
    CHECK_CLOSE(coefficient, 3 / sqrt(sum), 1e-7);
    CHECK_OK(bst_optim_scale(NULL, TENSORS, t.gradient, &coefficient_tensor));
    CHECK_OK(bst_optim_norm(NULL, TENSORS, list, NULL, 3.1, &norm_tensor, &coefficient_tensor));
    CHECK_CLOSE(norm, 3, 1e-5);
    CHECK(coefficient == 1);
    CHECK_OK(bst_optim_norm(NULL, 0, NULL, NULL, 1, &norm_tensor, NULL));
    CHECK(norm == 0);
    g[1][3] = NAN;
    CHECK_OK(bst_optim_norm(NULL, TENSORS, list, NULL, 3, &norm_tensor, &coefficient_tensor));
    CHECK(isnan(norm) && isnan(coefficient));
}

TEST(errors_name_the_tensor_and_write_nothing) {
    lists l;
    bst_adamw_tensors t = lists_of(&l);
    fill();
    int64_t shorter = sizes[2] - 1;
    l.tensor[1][2].shape = &shorter;
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(),
              "optim_adamw: gradient[2] has shape [19999]; it must have that of parameter[2], [20000]");
    l.tensor[1][2].shape = &l.size[2];
    l.tensor[2][1].dtype.bits = 16;
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "optim_adamw: exp_avg[1] has elements of type float16");
    l.tensor[2][1].dtype.bits = 32;
    l.tensor[3][1].data = p[1];
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "optim_adamw: exp_avg_sq[1] and parameter[1] share memory");
    l.tensor[3][1].data = v[1];
    l.pointer[4][3] = NULL;
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "optim_adamw: step[3] is NULL");
    l.pointer[4][3] = &l.tensor[4][3];
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, 1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "optim_adamw: beta1 is 1; a number from 0 to below 1 is needed");
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, NAN, beta1, beta2, eps, decay, NULL), BST_INVALID);
    t.gradient = NULL;
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "optim_adamw: gradient is NULL; a list of 4 tensors is needed");
    t.size = 0;
    CHECK_EQ_I(bst_optim_adamw(NULL, &t, lr, beta1, beta2, eps, decay, NULL), BST_INVALID);
    CHECK_EQ_I(bst_optim_scale(NULL, 1, l.pointer[1], NULL), BST_INVALID);
    CHECK_EQ_I(bst_optim_norm(NULL, 1, NULL, NULL, 1, &l.tensor[4][0], NULL), BST_INVALID);
    compare(0);
}

/* Each type of parameter with each of moments, master weights and rounding; few tensors and many, whose table is wider;
 * one that lies at no multiple of 16 bytes takes the same kernel. */
static void compile_calls(void) {
    enum { MANY = 60 };
    static bst_shape shapes[8][MANY];
    DLTensor *list[8][MANY];
    int64_t matrix[] = {4096, 4096}, codes[] = {65536, 256}, one[] = {1};
    DLTensor *scalar;
    bst_shape scalar_shape;
    scalar = bst_device_tensor(&scalar_shape, bst_test_types[0], 0, one);
    const DLDataType u8 = {kDLUInt, 8, 1};
    for (int type = 0; type < 3; type++) {
        for (int moments = 0; moments < 4; moments++) {
            if (moments < 3 && moments != 0 && moments != 1 && moments != type) continue;
            for (int master = 0; master < (type ? 2 : 1); master++) {
                for (int i = 0; i < MANY; i++) {
                    DLDataType kept = moments == 3 ? u8 : bst_test_types[moments];
                    for (int k = 0; k < 4; k++)
                        list[k][i] = bst_device_tensor(&shapes[k][i], k < 2 ? bst_test_types[type] : kept, 2,
                                                       k > 1 && moments == 3 ? codes : matrix);
                    list[4][i] = bst_device_tensor(&shapes[4][i], bst_test_types[0], 0, one);
                    list[5][i] = bst_device_tensor(&shapes[5][i], bst_test_types[0], 2, matrix);
                    for (int k = 6; k < 8; k++)
                        list[k][i] = bst_device_tensor(&shapes[k][i], bst_test_types[0], 1, codes);
                }
                bst_adamw_tensors t = {.size = sizeof t,
                                       .count = 2,
                                       .parameter = list[0],
                                       .gradient = list[1],
                                       .exp_avg = list[2],
                                       .exp_avg_sq = list[3],
                                       .step = list[4],
                                       .master = master ? list[5] : NULL,
                                       .exp_avg_scale = moments == 3 ? list[6] : NULL,
                                       .exp_avg_sq_scale = moments == 3 ? list[7] : NULL};
                bst_adamw_options options = {.size = sizeof options, .stochastic = type == 1 && !master};
                CHECK_OK(bst_optim_adamw(&bst_fake_exec, &t, lr, beta1, beta2, eps, decay, NULL));
                if (options.stochastic)
                    CHECK_OK(bst_optim_adamw(&bst_fake_exec, &t, lr, beta1, beta2, eps, decay, &options));
                if (type != moments || master) continue;
                t.count = MANY, t.grad_scale = scalar;
                CHECK_OK(bst_optim_adamw(&bst_fake_exec, &t, lr, beta1, beta2, eps, decay, NULL));
                CHECK_OK(bst_optim_norm(&bst_fake_exec, MANY, (const DLTensor *const *)list[1], NULL, 1, list[4][0],
                                        list[4][1]));
                CHECK_OK(bst_optim_scale(&bst_fake_exec, MANY, list[1], scalar));
            }
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("optim", compile_calls); }

int main(void) {
    RUN(three_steps);
    RUN(numbers_on_the_device);
    RUN(moments_of_8_bits);
    RUN(norm_and_scale);
    RUN(errors_name_the_tensor_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
