/* test_glu.c - gated units through the C API: values, results in the place of inputs, errors, its kernels on every
 * chip. */
#include <math.h>

#include "chips.h"

enum { ROWS = 5, COLUMNS = 37, PITCH = 80 };

static int64_t shape[] = {ROWS, COLUMNS}, pitched[] = {PITCH, 1};

static DLTensor matrix(void *data, int64_t *strides) { return bst_tensor(data, 2, shape, strides, bst_test_types[0]); }

/* a and b as slices of one buffer, with columns between and behind them that nothing may touch. */
static float buffer[ROWS][PITCH], dy[ROWS][COLUMNS], y[ROWS][COLUMNS], da[ROWS][COLUMNS], db[ROWS][COLUMNS],
    again[ROWS][COLUMNS];
enum { B_AT = 40 };

TEST(values_and_gradients) {
    bst_fill(&buffer[0][0], ROWS * PITCH, 1, 4);
    bst_fill(&dy[0][0], ROWS * COLUMNS, 2, 4);
    DLTensor ta = matrix(buffer, pitched), tb = matrix(&buffer[0][B_AT], pitched), ty = matrix(y, NULL);
    DLTensor tdy = matrix(dy, NULL), tda = matrix(da, NULL), tdb = matrix(db, NULL);
    CHECK_OK(bst_glu_forward(NULL, &ta, &tb, NULL, &ty));
    CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, &tb, NULL, &tda, &tdb, NULL));
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            double a = buffer[r][c], b = buffer[r][B_AT + c], s = 1 / (1 + exp(-a));
            CHECK_CLOSE(y[r][c], a * s * b, 2e-6);
            CHECK_CLOSE(db[r][c], dy[r][c] * a * s, 2e-6);
            CHECK_CLOSE(da[r][c], dy[r][c] * b * s * (1 + a * (1 - s)), 4e-6);
        }
    }
}

static double silu(double g) { return g / (1 + exp(-g)); }
static double gelu_tanh(double g) { return g / 2 * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))); }
static double gelu(double g) { return g / 2 * erfc(-g / sqrt(2)); }
static double relu(double g) { return g > 0 ? g : 0; }
static double relu2(double g) { return relu(g) * g; }
static double oai(double g) { return g / (1 + exp(-1.702 * g)); }

static const struct {
    bst_activation activation;
    double (*value)(double g);
} activations[] = {{BST_SILU, silu}, {BST_GELU_TANH, gelu_tanh}, {BST_GELU, gelu},
                   {BST_RELU, relu}, {BST_RELU2, relu2},         {BST_SWIGLU_OAI, oai}};
enum { ACTIVATIONS = sizeof activations / sizeof *activations };

/* Against central differences in double, for the derivatives. */
TEST(each_activation) {
    const double h = 1e-4;
    DLTensor ta = matrix(buffer, pitched), tb = matrix(&buffer[0][B_AT], pitched), ty = matrix(y, NULL);
    DLTensor tdy = matrix(dy, NULL), tda = matrix(da, NULL), tdb = matrix(db, NULL);
    for (int i = 0; i < ACTIVATIONS; i++) {
        bst_glu_options options = {sizeof options, activations[i].activation};
        CHECK_OK(bst_glu_forward(NULL, &ta, &tb, &options, &ty));
        CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, &tb, &options, &tda, &tdb, NULL));
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < COLUMNS; c++) {
                double a = buffer[r][c], b = buffer[r][B_AT + c], value = activations[i].value(a);
                if (activations[i].activation == BST_SWIGLU_OAI) b++;
                double slope = (activations[i].value(a + h) - activations[i].value(a - h)) / (2 * h);
                CHECK_CLOSE(y[r][c], value * b, 4e-6);
                CHECK_CLOSE(db[r][c], dy[r][c] * value, 4e-6);
                CHECK_CLOSE(da[r][c], dy[r][c] * b * slope, 1e-5);
            }
        }
    }
}

/* Without up, in each type: y and da, over new memory and over a and dy, which then has the bits of forward. */
TEST(each_activation_alone) {
    enum { MOST = 3 * 301 };
    static float a[MOST], of_y[MOST], upstream[MOST], of_a[MOST];
    const double h = 1e-4;
    int64_t sizes[] = {3, MOST / 3};
    for (int t = 0; t < 3; t++) {
        size_t bytes = (size_t)(t ? 2 : 4) * MOST;
        for (int i = 0; i < ACTIVATIONS; i++) {
            bst_fill(a, MOST, 5, 4);
            bst_fill(upstream, MOST, 6, 4);
            for (int j = 0; j < MOST && t; j++) { /* some number of 16 bits */
                memcpy((char *)a + 2 * j, (char *)&a[j] + 2, sizeof(uint16_t));
                memcpy((char *)upstream + 2 * j, (char *)&upstream[j] + 2, sizeof(uint16_t));
            }
            DLTensor ta = bst_tensor(a, 2, sizes, NULL, bst_test_types[t]), ty = ta, tdy = ta, tda = ta;
            ty.data = of_y, tdy.data = upstream, tda.data = of_a;
            bst_glu_options options = {sizeof options, activations[i].activation};
            CHECK_OK(bst_glu_forward(NULL, &ta, NULL, &options, &ty));
            CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, NULL, &options, &tda, NULL, NULL));
            for (int j = 0; j < MOST && !t; j++) {
                double g = a[j], slope = (activations[i].value(g + h) - activations[i].value(g - h)) / (2 * h);
                CHECK_CLOSE(of_y[j], activations[i].value(g), 4e-6);
                CHECK_CLOSE(of_a[j], upstream[j] * slope, 1e-5);
            }
            CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, NULL, &options, &ta, NULL, &tdy));
            CHECK(!memcmp(a, of_a, bytes));
            CHECK(!memcmp(upstream, of_y, bytes));
        }
    }
}

/* Gate and up joined, as halves and interleaved, with a limit that some reach; over new memory, and h and dy. */
TEST(joined_with_limits) {
    static float h[ROWS][2 * COLUMNS + 1], dh[ROWS][2 * COLUMNS + 1], over[ROWS][COLUMNS];
    int64_t wide[] = {ROWS, 2 * COLUMNS}, strides[] = {2 * COLUMNS + 1, 1};
    const double limit = 1.5, step = 1e-4;
    DLTensor th = bst_tensor(h, 2, wide, strides, bst_test_types[0]), tdh = th, ty = matrix(y, NULL);
    DLTensor tdy = matrix(dy, NULL), tover = matrix(over, NULL);
    tdh.data = dh;
    for (int i = 0; i < 2 * ACTIVATIONS; i++) {
        bool pairs = i % 2;
        bst_glu_options options = {sizeof options, activations[i / 2].activation, .interleaved = pairs, .limit = limit};
        bst_fill(&h[0][0], sizeof h / sizeof(float), 7, 4);
        memcpy(dh, h, sizeof h);
        memcpy(over, dy, sizeof over);
        CHECK_OK(bst_glu_joined_forward(NULL, &th, &options, &ty));
        CHECK_OK(bst_glu_joined_backward(NULL, &tover, &tdh, &options, &tdh, &tover));
        CHECK(!memcmp(over, y, sizeof y));
        for (int r = 0; r < ROWS; r++) {
            for (int c = 0; c < COLUMNS; c++) {
                int gate = pairs ? 2 * c : c, up = pairs ? 2 * c + 1 : COLUMNS + c;
                double g = fmin(h[r][gate], limit), u = fmax(fmin(h[r][up], limit), -limit);
                double one = activations[i / 2].activation == BST_SWIGLU_OAI, value = activations[i / 2].value(g);
                double slope = (activations[i / 2].value(g + step) - activations[i / 2].value(g - step)) / (2 * step);
                CHECK_CLOSE(y[r][c], value * (u + one), 4e-6);
                CHECK_CLOSE(dh[r][up], u == h[r][up] ? dy[r][c] * value : 0, 4e-6);
                CHECK_CLOSE(dh[r][gate], g == h[r][gate] ? dy[r][c] * (u + one) * slope : 0, 1e-5);
            }
            CHECK(dh[r][2 * COLUMNS] == h[r][2 * COLUMNS]); /* between the rows */
        }
        memset(dh, 0, sizeof dh);
        CHECK_OK(bst_glu_joined_backward(NULL, &tdy, &th, &options, NULL, &ty));
        CHECK(!memcmp(over, y, sizeof y));
    }
}

/* Of gates and ups at a limit itself, above, below, and no number at all. */
TEST(gradients_at_a_limit) {
    float gate[] = {1, 1, -1, NAN, 0.5f, 2}, up[] = {-1, 1, 2, 1, NAN, -2}, to_gate[6], to_up[6], upstream[6];
    const bool gate_passes[] = {true, true, true, false, true, false},
               up_passes[] = {true, true, false, true, false, false};
    int64_t six[] = {6};
    DLTensor tg = bst_tensor(gate, 1, six, NULL, bst_test_types[0]), tu = tg, tda = tg, tdb = tg, td = tg;
    tu.data = up, tda.data = to_gate, tdb.data = to_up, td.data = upstream;
    for (int i = 0; i < 6; i++) upstream[i] = 1;
    for (int i = 0; i < 2 * ACTIVATIONS; i++) {
        bool open = i % 2;
        bst_glu_options options = {sizeof options, activations[i / 2].activation, .limit = 1, .open_limit = open};
        CHECK_OK(bst_glu_backward(NULL, &td, &tg, &tu, &options, &tda, &tdb, NULL));
        for (int e = 0; e < 6; e++) {
            bool at_gate = gate[e] == 1, at_up = fabsf(up[e]) == 1;
            if (!gate_passes[e] || (open && at_gate)) CHECK(to_gate[e] == 0);
            if (!up_passes[e] || (open && at_up)) CHECK(to_up[e] == 0);
            if (at_gate && !open)
                CHECK(to_gate[e] != 0 || up[e] + (activations[i / 2].activation == BST_SWIGLU_OAI) == 0);
            if (at_up && !open && gate[e] > 0) CHECK(to_up[e] != 0);
        }
    }
}

TEST(options_are_checked) {
    DLTensor ta = matrix(buffer, pitched), ty = matrix(again, NULL);
    bst_glu_options unsized = {0}, unknown = {sizeof unknown, (bst_activation)99};
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, &ta, &unsized, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: options->size is 0; it must be set to sizeof *options");
    CHECK_EQ_I(bst_glu_backward(NULL, &ta, &ta, &ta, &unknown, &ty, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: activation is 99; 0 (silu)");
    bst_glu_options pairs = {sizeof pairs, .interleaved = 1}, below = {sizeof below, .limit = -1};
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, &ta, &pairs, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: interleaved is 1; 0 is needed for two tensors");
    CHECK_EQ_I(bst_glu_joined_forward(NULL, &ta, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_joined_forward: h has shape [5, 37]; columns in pairs, gate and up, are needed");
    DLTensor narrow = bst_tensor(again, 2, (int64_t[]){ROWS, 2}, NULL, bst_test_types[0]);
    CHECK_EQ_I(bst_glu_joined_backward(NULL, &ty, &narrow, &below, &narrow, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_joined_backward: dy has shape");
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, &ta, &below, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: alpha is 0 and limit -1; numbers, and a limit above 0, are needed");
}

/* With each gradient or without: y is what forward wrote, and the gradients are what they are without it. */
TEST(backward_writes_y_once_more) {
    DLTensor ta = matrix(buffer, pitched), tb = matrix(&buffer[0][B_AT], pitched), tdy = matrix(dy, NULL);
    static float others[2][ROWS][COLUMNS];
    DLTensor ty = matrix(again, NULL), tda = matrix(others[0], NULL), tdb = matrix(others[1], NULL);
    for (int wanted = 0; wanted < 4; wanted++) {
        memset(again, 0xff, sizeof again);
        memset(others, 0xff, sizeof others);
        CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, &tb, NULL, wanted & 1 ? &tda : NULL, wanted & 2 ? &tdb : NULL, &ty));
        CHECK(!memcmp(again, y, sizeof y));
        if (wanted & 1) CHECK(!memcmp(others[0], da, sizeof da));
        if (wanted & 2) CHECK(!memcmp(others[1], db, sizeof db));
    }
}

/* In each type: whole vectors, and single elements with what is left over of a row. */
TEST(y_has_the_bits_that_forward_gave) {
    enum { MOST = 3 * 301 };
    static float numbers[4][MOST];
    for (int t = 0; t < 3; t++) {
        for (int64_t width = 296; width <= 301; width += 5) {
            int64_t sizes[] = {3, width};
            DLTensor tensors[4];
            for (unsigned i = 0; i < 4; i++) {
                bst_fill(numbers[i], MOST, i + 3, 8);
                /* The upper half of a float32 is a bfloat16, and some number of float16. */
                for (int j = 0; j < MOST && t; j++)
                    memcpy((char *)numbers[i] + 2 * j, (char *)&numbers[i][j] + 2, sizeof(uint16_t));
                tensors[i] = bst_tensor(numbers[i], 2, sizes, NULL, bst_test_types[t]);
            }
            DLTensor *ta = &tensors[0], *tb = &tensors[1], *ty = &tensors[2], *tdy = &tensors[3];
            CHECK_OK(bst_glu_forward(NULL, ta, tb, NULL, ty));
            CHECK_OK(bst_glu_backward(NULL, tdy, ta, tb, NULL, ta, tb, tdy));
            CHECK(!memcmp(numbers[2], numbers[3], (size_t)(3 * width * (t ? 2 : 4))));
        }
    }
}

TEST(results_take_the_place_of_inputs) {
    static float copy[ROWS][PITCH], dy_copy[ROWS][COLUMNS];
    memcpy(copy, buffer, sizeof copy);
    memcpy(dy_copy, dy, sizeof dy_copy);
    DLTensor ta = matrix(copy, pitched), tb = matrix(&copy[0][B_AT], pitched), tdy = matrix(dy_copy, NULL);
    CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, &tb, NULL, &ta, &tb, &tdy));
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < PITCH; c++) {
            float want = buffer[r][c];
            if (c < COLUMNS) want = da[r][c];
            if (c >= B_AT && c < B_AT + COLUMNS) want = db[r][c - B_AT];
            CHECK(copy[r][c] == want);
        }
    }
    CHECK(!memcmp(dy_copy, y, sizeof y));
    memcpy(copy, buffer, sizeof copy);
    memcpy(dy_copy, dy, sizeof dy_copy);
    CHECK_OK(bst_glu_backward(NULL, &tdy, &ta, &tb, NULL, NULL, &tdy, NULL));
    CHECK(!memcmp(dy_copy, db, sizeof db));
}

TEST(errors_name_the_argument_and_write_nothing) {
    static float other[ROWS + 1][PITCH];
    DLTensor ta = matrix(buffer, pitched), tb = matrix(&buffer[0][B_AT], pitched), ty = matrix(other, NULL);
    DLTensor across = matrix(&buffer[0][1], pitched), shifted = matrix(&buffer[0][B_AT - 5], pitched);
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, &tb, NULL, &across), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: y, of shape [5, 37], is not contiguous");
    CHECK_EQ_I(bst_glu_backward(NULL, &ty, &ta, &tb, NULL, &across, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: da and a share memory");
    CHECK_EQ_I(bst_glu_backward(NULL, &ty, &ta, &tb, NULL, NULL, &shifted, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: db and a share memory");
    CHECK_EQ_I(bst_glu_backward(NULL, &ty, &ta, &tb, NULL, NULL, NULL, &across), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: y and a share memory");
    DLTensor one = matrix(other[1], pitched), two = matrix(&other[1][30], pitched);
    CHECK_EQ_I(bst_glu_backward(NULL, &ta, &ta, &tb, NULL, &one, &two, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: da and db share memory");
    CHECK_EQ_I(bst_glu_backward(NULL, &ta, &ta, &tb, NULL, &one, NULL, &two), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: y and da share memory");
    CHECK_EQ_I(bst_glu_backward(NULL, &ta, &ta, &tb, NULL, NULL, &one, &one), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: y and db share memory");
    DLTensor shorter = bst_tensor(other, 2, (int64_t[]){ROWS, COLUMNS - 1}, NULL, bst_test_types[0]);
    CHECK_EQ_I(bst_glu_backward(NULL, &ta, &ta, &tb, NULL, &one, NULL, &shorter), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: y has shape [5, 36]; it must have that of a, [5, 37]");
    bst_glu_options limited = {sizeof limited, .limit = 3};
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, NULL, &limited, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: limit is 3; none, 0, is needed without b");
    CHECK_EQ_I(bst_glu_backward(NULL, &tb, &ta, NULL, &limited, &ty, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: limit is 3; none, 0, is needed without b");
    CHECK_EQ_I(bst_glu_backward(NULL, &tb, &ta, NULL, NULL, NULL, &ty, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_backward: db is wanted, but b is NULL");
    DLTensor half = tb;
    half.dtype.bits = 16;
    CHECK_EQ_I(bst_glu_forward(NULL, &ta, &half, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "b is float16; float32 is needed, the type of a");
    for (int i = 0; i < (ROWS + 1) * PITCH; i++) CHECK((&other[0][0])[i] == 0);
}

/* Pairs, whose kernels are their own; halves have those of two tensors. */
static void compile_joined(DLDataType type, int64_t width) {
    bst_shape s[4];
    int64_t sizes[] = {64, width}, wide[] = {64, 2 * width};
    DLTensor *of_y[] = {bst_device_tensor(&s[0], type, 2, sizes), bst_device_tensor(&s[1], type, 2, sizes)};
    DLTensor *of_h[] = {bst_device_tensor(&s[2], type, 2, wide), bst_device_tensor(&s[3], type, 2, wide)};
    bst_glu_options options = {sizeof options, BST_SWIGLU_OAI, .interleaved = 1, .limit = 7};
    CHECK_OK(bst_glu_joined_forward(&bst_fake_exec, of_h[0], &options, of_y[0]));
    CHECK_OK(bst_glu_joined_backward(&bst_fake_exec, of_y[0], of_h[0], &options, of_h[1], of_y[1]));
}

/* Packed tensors (one kernel for all sizes; here each activation, with up and alone), the halves of one, and a width
 * that needs narrow accesses. float16 takes the kernels of bfloat16 but for the conversions, which the first width
 * shows. */
static void compile_calls(void) {
    for (size_t t = 0; t < 3; t++) {
        for (int64_t width = 12288; width >= (t == 2 ? 12288 : 12287); width--) {
            bst_shape s[6];
            int64_t sizes[] = {64, width};
            DLTensor *tensors[6];
            for (int i = 0; i < 6; i++) tensors[i] = bst_device_tensor(&s[i], bst_test_types[t], 2, sizes);
            for (int halves = 0; halves < 2; halves++) {
                if (halves) s[1].stride[0] = s[2].stride[0] = 2 * width;
                for (int i = 0; i < (halves || width != 12288 ? 1 : ACTIVATIONS); i++) {
                    bst_glu_options options = {sizeof options, activations[i].activation};
                    CHECK_OK(bst_glu_forward(&bst_fake_exec, tensors[1], tensors[2], &options, tensors[0]));
                    for (int with_y = 0; with_y < 2; with_y++)
                        CHECK_OK(bst_glu_backward(&bst_fake_exec, tensors[3], tensors[1], tensors[2], &options,
                                                  tensors[4], tensors[5], with_y ? tensors[0] : NULL));
                    if (halves) continue;
                    CHECK_OK(bst_glu_forward(&bst_fake_exec, tensors[1], NULL, &options, tensors[0]));
                    CHECK_OK(bst_glu_backward(&bst_fake_exec, tensors[3], tensors[1], NULL, &options, tensors[4], NULL,
                                              tensors[0]));
                }
            }
            compile_joined(bst_test_types[t], width);
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("glu", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(backward_writes_y_once_more);
    RUN(y_has_the_bits_that_forward_gave);
    RUN(results_take_the_place_of_inputs);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(options_are_checked);
    RUN(each_activation);
    RUN(each_activation_alone);
    RUN(joined_with_limits);
    RUN(gradients_at_a_limit);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
