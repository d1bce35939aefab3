/* test_rms_norm.c - RMSNorm through the C API: values, errors, and its kernels on every chip. */
#include <math.h>

#include "chips.h"

enum { ROWS = 5, HIDDEN = 37 };

TEST(values_and_gradients) {
    static float x[ROWS][HIDDEN], w[HIDDEN], y[ROWS][HIDDEN], rstd[ROWS], dy[ROWS][HIDDEN], dx[ROWS][HIDDEN],
        dw[HIDDEN];
    int64_t shape[] = {ROWS, HIDDEN}, columns[] = {HIDDEN}, rows[] = {ROWS};
    bst_fill(&x[0][0], ROWS * HIDDEN, 1, 1);
    bst_fill(w, HIDDEN, 2, 1);
    bst_fill(&dy[0][0], ROWS * HIDDEN, 3, 1);
    DLTensor tx = bst_f32(x, 2, shape), tw = bst_f32(w, 1, columns), ty = bst_f32(y, 2, shape);
    DLTensor tr = bst_f32(rstd, 1, rows), tdy = bst_f32(dy, 2, shape), tdx = bst_f32(dx, 2, shape);
    DLTensor tdw = bst_f32(dw, 1, columns);
    CHECK_OK(bst_rms_norm_forward(NULL, &tx, &tw, 1e-6, BST_CASTING_LLAMA, &ty, &tr));
    CHECK_OK(bst_rms_norm_backward(NULL, &tdy, &tx, &tw, &tr, BST_CASTING_LLAMA, &tdx, &tdw));
    double dw_exact[HIDDEN] = {0};
    for (int r = 0; r < ROWS; r++) {
        double squares = 0, projection = 0;
        for (int c = 0; c < HIDDEN; c++) squares += (double)x[r][c] * x[r][c];
        double s = 1 / sqrt(squares / HIDDEN + 1e-6);
        for (int c = 0; c < HIDDEN; c++) projection += (double)dy[r][c] * w[c] * x[r][c] * s / HIDDEN;
        for (int c = 0; c < HIDDEN; c++) {
            CHECK_CLOSE(y[r][c], x[r][c] * s * w[c], 1e-6);
            CHECK_CLOSE(dx[r][c], s * ((double)dy[r][c] * w[c] - x[r][c] * s * projection), 1e-5);
            dw_exact[c] += (double)dy[r][c] * x[r][c] * s;
        }
        CHECK_CLOSE(rstd[r], s, 1e-6);
    }
    for (int c = 0; c < HIDDEN; c++) CHECK_CLOSE(dw[c], dw_exact[c], 1e-5);
}

TEST(errors_name_the_argument_and_write_nothing) {
    float x[8] = {1}, w[8] = {1}, y[8] = {42};
    int64_t shape[] = {2, 4}, wrong[] = {3};
    DLTensor tx = bst_f32(x, 2, shape), tw = bst_f32(w, 1, wrong), ty = bst_f32(y, 2, shape);
    CHECK_EQ_I(bst_rms_norm_forward(NULL, &tx, &tw, 1e-6, BST_CASTING_LLAMA, &ty, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "rms_norm_forward: weight has shape [3]; dimension 0 must be 4");
    CHECK_EQ_I(bst_rms_norm_forward(NULL, NULL, NULL, 1e-6, BST_CASTING_LLAMA, &ty, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "x is NULL");
    CHECK_EQ_I(bst_rms_norm_forward(NULL, &tx, NULL, 1e-6, (bst_casting)7, &ty, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "casting is 7");
    CHECK_EQ_I(bst_rms_norm_forward(NULL, &tx, NULL, 1e-6, BST_CASTING_LLAMA, &tx, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "y and x share memory");
    DLTensor there = ty;
    there.device = (DLDevice){kDLCUDA, 7};
    CHECK_EQ_I(bst_rms_norm_forward(NULL, &tx, NULL, 1e-6, BST_CASTING_LLAMA, &there, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "y is on cuda:7, but x is on ");
    DLTensor doubles = tx;
    doubles.dtype.bits = 64;
    CHECK_EQ_I(bst_rms_norm_forward(NULL, &doubles, NULL, 1e-6, BST_CASTING_LLAMA, &ty, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "float32, bfloat16 or float16 is needed");
    CHECK(y[0] == 42);
}

/* Head norms, a small model, Llama and Qwen sizes, a width that needs narrow accesses, one too wide for registers. */
static void compile_calls(void) {
    static const int64_t widths[] = {128, 1024, 4096, 8192, 4097, 65536};
    for (size_t t = 0; t < 3; t++) {
        /* float16 takes the kernels of bfloat16 but for the conversions: two widths show those. */
        size_t count = t == 2 ? 2 : sizeof widths / sizeof *widths;
        for (size_t w = 0; w < count; w++) {
            bst_shape x, weight, y, rstd, dy, dx, dweight;
            int64_t shape[] = {4096, widths[w]};
            DLDataType type = bst_test_types[t], f32 = bst_test_types[0];
            DLTensor *xt = bst_device_tensor(&x, type, 2, shape), *wt = bst_device_tensor(&weight, type, 1, shape + 1);
            DLTensor *rt = bst_device_tensor(&rstd, f32, 1, shape);
            CHECK_OK(bst_rms_norm_forward(&bst_fake_exec, xt, wt, 1e-6, BST_CASTING_LLAMA,
                                          bst_device_tensor(&y, type, 2, shape), rt));
            CHECK_OK(bst_rms_norm_backward(&bst_fake_exec, bst_device_tensor(&dy, type, 2, shape), xt, wt, rt,
                                           BST_CASTING_LLAMA, bst_device_tensor(&dx, type, 2, shape),
                                           bst_device_tensor(&dweight, type, 1, shape + 1)));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("rms_norm", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
