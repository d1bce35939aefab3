/* test_gated_rms_norm.c - the RMS norm with a gate through the C API: values, errors, and its kernels on every chip. */
#include <math.h>

#include "chips.h"

enum { ROWS = 5, COLUMNS = 36 };

#define TENSORS(...) (&(bst_gated_rms_norm_backward_tensors){sizeof(bst_gated_rms_norm_backward_tensors), __VA_ARGS__})

static void compare_with_double(bst_norm_gate activation, bool first, int group) {
    const bst_gated_rms_norm_options options = {sizeof options, activation, first, group, false};
    static float x[ROWS][COLUMNS], gate[ROWS][COLUMNS], w[COLUMNS], y[ROWS][COLUMNS], dy[ROWS][COLUMNS];
    static float dx[ROWS][COLUMNS], dgate[ROWS][COLUMNS], dw[COLUMNS];
    int64_t shape[] = {ROWS, COLUMNS}, columns[] = {COLUMNS};
    bst_fill(&x[0][0], ROWS * COLUMNS, 1, 2);
    bst_fill(&gate[0][0], ROWS * COLUMNS, 2, 3);
    bst_fill(w, COLUMNS, 3, 1);
    bst_fill(&dy[0][0], ROWS * COLUMNS, 4, 1);
    DLTensor tx = bst_f32(x, 2, shape), tg = bst_f32(gate, 2, shape), tw = bst_f32(w, 1, columns);
    DLTensor ty = bst_f32(y, 2, shape), tdy = bst_f32(dy, 2, shape), tdx = bst_f32(dx, 2, shape);
    DLTensor tdg = bst_f32(dgate, 2, shape), tdw = bst_f32(dw, 1, columns);
    CHECK_OK(bst_gated_rms_norm_forward(NULL, &tx, &tg, &tw, 1e-3, &options, &ty));
    CHECK_OK(bst_gated_rms_norm_backward(
        NULL, TENSORS(.dy = &tdy, .x = &tx, .gate = &tg, .weight = &tw, .dx = &tdx, .dgate = &tdg, .dweight = &tdw),
        1e-3, &options));
    double dw_exact[COLUMNS] = {0};
    int width = group ? group : COLUMNS;
    for (int i = 0; i < ROWS * COLUMNS; i += width) {
        int r = i / COLUMNS, begin = i % COLUMNS, end = begin + width;
        double act[COLUMNS], slope[COLUMNS], u[COLUMNS], m[COLUMNS], squares = 0, projection = 0;
        for (int c = begin; c < end; c++) {
            double g = gate[r][c], s = 1 / (1 + exp(-g));
            act[c] = activation == BST_NORM_GATE_SILU ? g * s : s;
            slope[c] = activation == BST_NORM_GATE_SILU ? s * (1 + g * (1 - s)) : s * (1 - s);
            u[c] = x[r][c] * (first ? act[c] : 1);
            m[c] = (double)dy[r][c] * w[c] * (first ? 1 : act[c]);
            squares += u[c] * u[c];
            projection += m[c] * u[c];
        }
        double s = 1 / sqrt(squares / width + 1e-3);
        for (int c = begin; c < end; c++) {
            double n = u[c] * s, du = s * (m[c] - n * s * projection / width), upstream = dy[r][c];
            CHECK_CLOSE(y[r][c], n * w[c] * (first ? 1 : act[c]), 2e-6);
            CHECK_CLOSE(dx[r][c], first ? du * act[c] : du, 1e-5);
            CHECK_CLOSE(dgate[r][c], (first ? du * x[r][c] : upstream * w[c] * n) * slope[c], 1e-5);
            dw_exact[c] += upstream * n * (first ? 1 : act[c]);
        }
    }
    for (int c = 0; c < COLUMNS; c++) CHECK_CLOSE(dw[c], dw_exact[c], 1e-5);
}

TEST(values_and_gradients) { compare_with_double(BST_NORM_GATE_SILU, false, 0); }
TEST(values_and_gradients_of_a_sigmoid) { compare_with_double(BST_NORM_GATE_SIGMOID, false, 0); }
TEST(the_gate_before_the_norm) { compare_with_double(BST_NORM_GATE_SILU, true, 0); }
TEST(groups) {
    static const int sizes[] = {1, 4, 9, 12, COLUMNS};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int first = 0; first < 2; first++) compare_with_double(BST_NORM_GATE_SILU, first, sizes[i]);
}

TEST(no_rows_give_a_gradient_of_zeros) {
    float dw[4] = {1, 2, 3, 4};
    int64_t shape[] = {0, 4}, columns[] = {4};
    DLTensor none = bst_f32(dw, 2, shape), tw = bst_f32((float[4]){1}, 1, columns), tdw = bst_f32(dw, 1, columns);
    CHECK_OK(bst_gated_rms_norm_backward(
        NULL, TENSORS(.dy = &none, .x = &none, .gate = &none, .weight = &tw, .dweight = &tdw), 0, NULL));
    for (int i = 0; i < 4; i++) CHECK(dw[i] == 0);
}

TEST(errors_name_the_argument_and_write_nothing) {
    float x[8] = {1}, gate[8] = {1}, w[4] = {1}, y[8] = {42};
    int64_t shape[] = {2, 4}, columns[] = {4}, wrong[] = {3};
    DLTensor tx = bst_f32(x, 2, shape), tg = bst_f32(gate, 2, shape), tw = bst_f32(w, 1, columns);
    DLTensor ty = bst_f32(y, 2, shape), narrow = bst_f32(w, 1, wrong), half = ty;
    bst_gated_rms_norm_options options = {sizeof options};
#define FORWARD(x, gate, weight, y) bst_gated_rms_norm_forward(NULL, x, gate, weight, 1e-6, &options, y)
    CHECK_EQ_I(FORWARD(&tx, &tg, &narrow, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "gated_rms_norm_forward: weight has shape [3]; dimension 0 must be 4");
    CHECK_EQ_I(FORWARD(&tx, NULL, &tw, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "gate is NULL");
    CHECK_EQ_I(FORWARD(&tx, &tg, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "weight is NULL");
    CHECK_EQ_I(FORWARD(&tx, &tg, &tw, &tg), BST_INVALID);
    CHECK_STR(bst_last_error(), "y and gate share memory");
    half.dtype = bst_test_types[2];
    CHECK_EQ_I(FORWARD(&tx, &tg, &tw, &half), BST_INVALID);
    CHECK_STR(bst_last_error(), "y is float16; float32 is needed, as the inputs have it");
    options.group = 3;
    CHECK_EQ_I(FORWARD(&tx, &tg, &tw, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "group is 3, and x has rows of 4; a divisor is needed");
    options.group = 8;
    CHECK_EQ_I(FORWARD(&tx, &tg, &tw, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "group is 8, and x has rows of 4; a divisor is needed");
    options.group = 0, options.activation = (bst_norm_gate)2;
    CHECK_EQ_I(FORWARD(&tx, &tg, &tw, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "activation is 2; 0 (silu) or 1 (sigmoid) is needed");
    CHECK_EQ_I(bst_gated_rms_norm_forward(NULL, &tx, &tg, &tw, -1, NULL, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "eps is -1");
    CHECK_EQ_I(bst_gated_rms_norm_backward(NULL, TENSORS(.dy = &ty, .x = &tx, .gate = &tg, .weight = &tw, .dx = &tx),
                                           1e-6, NULL),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "dx and x share memory");
    CHECK_EQ_I(bst_gated_rms_norm_backward(
                   NULL, TENSORS(.dy = &ty, .x = &tx, .gate = &tg, .weight = &tw, .dgate = &half), 1e-6, NULL),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "dgate is float16; float32 is needed, as gate has it");
    CHECK(y[0] == 42 && x[0] == 1 && gate[0] == 1);
}

typedef struct call_shape {
    DLDataType type, gate_type, weight_type; /* type: of x, dy, dx and y */
    int64_t columns, group;
    bool first, frozen; /* frozen: the weight has no gradient */
} call_shape;

static void compile_call(call_shape c) {
    const bst_gated_rms_norm_options options = {sizeof options, c.first ? BST_NORM_GATE_SILU : BST_NORM_GATE_SIGMOID,
                                                c.first, c.group, false};
    bst_shape s[8];
    int64_t shape[] = {4096, c.columns};
    DLTensor *x = bst_device_tensor(&s[0], c.type, 2, shape), *gate = bst_device_tensor(&s[1], c.gate_type, 2, shape);
    DLTensor *weight = bst_device_tensor(&s[2], c.weight_type, 1, shape + 1);
    DLTensor *y = bst_device_tensor(&s[3], c.type, 2, shape), *dy = bst_device_tensor(&s[4], c.type, 2, shape);
    DLTensor *dx = bst_device_tensor(&s[5], c.type, 2, shape), *dgate = bst_device_tensor(&s[6], c.gate_type, 2, shape);
    DLTensor *dweight = bst_device_tensor(&s[7], c.weight_type, 1, shape + 1);
    CHECK_OK(bst_gated_rms_norm_forward(&bst_fake_exec, x, gate, weight, 1e-6, &options, y));
    CHECK_OK(bst_gated_rms_norm_backward(&bst_fake_exec,
                                         TENSORS(.dy = dy, .x = x, .gate = gate, .weight = weight, .dx = dx,
                                                 .dgate = dgate, .dweight = c.frozen ? NULL : dweight),
                                         1e-6, &options));
}

/* Heads of linear attention, a small model, sizes of Mamba-2, the widest whose rows stay on the chip in each pass,
 * with narrow accesses too, one too wide for registers; groups of Nemotron-H; a frozen weight, as with adapters; types
 * as under autocast. */
static void compile_calls(void) {
    static const int64_t widths[] = {128, 1024, 4096, 8192, 12288, 16384, 4097, 6655, 11262, 12284, 65536};
    const DLDataType f32 = bst_test_types[0], bf16 = bst_test_types[1];
    for (int first = 0; first < 2; first++) {
        for (size_t t = 0; t < 3; t++) {
            /* float16 takes the kernels of bfloat16 but for the conversions: two widths show those. */
            size_t count = t == 2 ? 2 : sizeof widths / sizeof *widths;
            const DLDataType type = bst_test_types[t];
            for (size_t w = 0; w < count; w++) compile_call((call_shape){type, type, type, widths[w], 0, first, false});
        }
        for (size_t w = 0; w < 6; w++) compile_call((call_shape){bf16, bf16, bf16, widths[w], 0, first, true});
        for (size_t w = 0; w < 4; w++) compile_call((call_shape){bf16, bf16, f32, widths[w], 0, first, false});
        compile_call((call_shape){f32, bf16, f32, 4096, 0, first, false});
        compile_call((call_shape){f32, f32, f32, 8192, 0, first, true});
    }
    compile_call((call_shape){bf16, bf16, bf16, 8192, 1024, true, false});
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("gated_rms_norm", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(values_and_gradients_of_a_sigmoid);
    RUN(the_gate_before_the_norm);
    RUN(groups);
    RUN(no_rows_give_a_gradient_of_zeros);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
