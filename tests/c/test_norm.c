/* test_norm.c - norms through the C API: values, errors, and its kernels on every chip. */
#include <math.h>

#include "chips.h"

enum { ROWS = 5, HIDDEN = 37 };

/* add: x + residual is normalised, and dsum reaches the sum from elsewhere; with a bias, and so is LAYER. */
static void compare_with_double(bool add, bst_norm_kind kind) {
    const bst_norm_options options = {sizeof options, .kind = kind};
    const bool centre = kind == BST_NORM_LAYER, biased = add || centre;
    static float x[ROWS][HIDDEN], residual[ROWS][HIDDEN], sum[ROWS][HIDDEN], w[HIDDEN], y[ROWS][HIDDEN], rstd[ROWS];
    static float dy[ROWS][HIDDEN], dsum[ROWS][HIDDEN], dx[ROWS][HIDDEN], dw[HIDDEN];
    static float bias[HIDDEN], db[HIDDEN], mean[ROWS];
    int64_t shape[] = {ROWS, HIDDEN}, columns[] = {HIDDEN}, rows[] = {ROWS};
    bst_fill(&x[0][0], ROWS * HIDDEN, 1, 1);
    bst_fill(w, HIDDEN, 2, 1);
    bst_fill(&dy[0][0], ROWS * HIDDEN, 3, 1);
    bst_fill(&residual[0][0], ROWS * HIDDEN, 4, 1);
    bst_fill(&dsum[0][0], ROWS * HIDDEN, 5, 1);
    memset(bias, 0, sizeof bias);
    if (biased) bst_fill(bias, HIDDEN, 6, 1);
    DLTensor tx = bst_f32(x, 2, shape), tw = bst_f32(w, 1, columns), ty = bst_f32(y, 2, shape);
    DLTensor tr = bst_f32(rstd, 1, rows), tdy = bst_f32(dy, 2, shape), tdx = bst_f32(dx, 2, shape);
    DLTensor tdw = bst_f32(dw, 1, columns), tresidual = bst_f32(residual, 2, shape), tsum = bst_f32(sum, 2, shape);
    DLTensor tdsum = bst_f32(dsum, 2, shape), tb = bst_f32(bias, 1, columns), tdb = bst_f32(db, 1, columns);
    DLTensor tm = bst_f32(mean, 1, rows), *kept = centre ? &tm : NULL;
    CHECK_OK(bst_norm_forward(NULL, &tx, add ? &tresidual : NULL, &tw, biased ? &tb : NULL, 1e-6, &options, &ty,
                              add ? &tsum : NULL, kept, &tr));
    CHECK_OK(bst_norm_backward(
        NULL,
        BST_NORM_TENSORS(.dy = &tdy, .x = add ? &tsum : &tx, .dsum = add ? &tdsum : NULL, .weight = &tw, .mean = kept,
                         .rstd = &tr, .dx = &tdx, .dweight = &tdw, .dbias = biased ? &tdb : NULL),
        &options));
    double dw_exact[HIDDEN] = {0}, db_exact[HIDDEN] = {0};
    for (int r = 0; r < ROWS; r++) {
        double squares = 0, projection = 0, in[HIDDEN], m = 0, shift = 0;
        for (int c = 0; c < HIDDEN; c++) {
            in[c] = x[r][c];
            if (add) {
                in[c] = (double)(x[r][c] + residual[r][c]);
                CHECK_CLOSE(sum[r][c], in[c], 0);
            }
            m += centre ? in[c] / HIDDEN : 0;
        }
        for (int c = 0; c < HIDDEN; c++) in[c] -= m, squares += in[c] * in[c];
        if (centre) CHECK_CLOSE(mean[r], m, 1e-6);
        double s = 1 / sqrt(squares / HIDDEN + 1e-6);
        for (int c = 0; c < HIDDEN; c++) projection += (double)dy[r][c] * w[c] * in[c] * s / HIDDEN;
        for (int c = 0; c < HIDDEN && centre; c++) shift += (double)dy[r][c] * w[c] / HIDDEN;
        for (int c = 0; c < HIDDEN; c++) {
            double straight = add ? (double)dsum[r][c] : 0;
            CHECK_CLOSE(y[r][c], in[c] * s * w[c] + (double)bias[c], 1e-6);
            CHECK_CLOSE(dx[r][c], s * ((double)dy[r][c] * w[c] - shift - in[c] * s * projection) + straight, 1e-5);
            dw_exact[c] += (double)dy[r][c] * in[c] * s;
            db_exact[c] += (double)dy[r][c];
        }
        CHECK_CLOSE(rstd[r], s, 1e-6);
    }
    for (int c = 0; c < HIDDEN; c++) CHECK_CLOSE(dw[c], dw_exact[c], 1e-5);
    for (int c = 0; c < HIDDEN && biased; c++) CHECK_CLOSE(db[c], db_exact[c], 1e-5);
}

TEST(values_and_gradients) { compare_with_double(false, BST_NORM_RMS); }
TEST(values_and_gradients_with_a_residual) { compare_with_double(true, BST_NORM_RMS); }
TEST(layer_norm) { compare_with_double(false, BST_NORM_LAYER); }
TEST(layer_norm_with_a_residual) { compare_with_double(true, BST_NORM_LAYER); }

/* Numbers that bfloat16 holds, in both types. */
static void fill_both(float *wide, uint16_t *narrow, int64_t count, unsigned seed) {
    bst_fill(wide, count, seed, 1);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, wide + i, sizeof bits);
        bits &= 0xffff0000u;
        memcpy(wide + i, &bits, sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
}

/* As under autocast: what runs from layer to layer in float32, what a product adds to it in bfloat16. */
TEST(a_residual_of_a_narrower_type) {
    static float x[ROWS][HIDDEN], y[ROWS][HIDDEN], sum[ROWS][HIDDEN], wide_y[ROWS][HIDDEN], wide_sum[ROWS][HIDDEN];
    static float wide[ROWS][HIDDEN];
    static uint16_t narrow[ROWS][HIDDEN];
    int64_t shape[] = {ROWS, HIDDEN};
    bst_fill(&x[0][0], ROWS * HIDDEN, 1, 1);
    fill_both(&wide[0][0], &narrow[0][0], ROWS * HIDDEN, 4);
    DLTensor tx = bst_f32(x, 2, shape), ty = bst_f32(y, 2, shape), tsum = bst_f32(sum, 2, shape);
    DLTensor twide = bst_f32(wide, 2, shape), twide_y = bst_f32(wide_y, 2, shape), tnarrow = twide;
    DLTensor twide_sum = bst_f32(wide_sum, 2, shape);
    tnarrow.data = narrow;
    tnarrow.dtype = bst_test_types[1];
    CHECK_OK(bst_norm_forward(NULL, &tx, &tnarrow, NULL, NULL, 1e-6, NULL, &ty, &tsum, NULL, NULL));
    CHECK_OK(bst_norm_forward(NULL, &tx, &twide, NULL, NULL, 1e-6, NULL, &twide_y, &twide_sum, NULL, NULL));
    CHECK(!memcmp(y, wide_y, sizeof y) && !memcmp(sum, wide_sum, sizeof sum));
}

/* FLOAT32: what bfloat16 gives is, to the bit, what its numbers give in float32; dx is that, rounded. */
static void compare_with_float32(bst_norm_kind kind) {
    static float wide_x[ROWS][HIDDEN], w[HIDDEN], b[HIDDEN], dy[ROWS][HIDDEN], wide_dx[ROWS][HIDDEN];
    static float y[2][ROWS][HIDDEN], dw[2][HIDDEN], mean[2][ROWS], rstd[2][ROWS];
    static uint16_t x[ROWS][HIDDEN], dx[ROWS][HIDDEN];
    const bool centre = kind == BST_NORM_LAYER;
    int64_t shape[] = {ROWS, HIDDEN}, columns[] = {HIDDEN}, rows[] = {ROWS};
    fill_both(&wide_x[0][0], &x[0][0], ROWS * HIDDEN, 1);
    bst_fill(w, HIDDEN, 2, 1);
    bst_fill(&dy[0][0], ROWS * HIDDEN, 3, 1);
    bst_fill(b, HIDDEN, 4, 1);
    DLTensor tw = bst_f32(w, 1, columns), tb = bst_f32(b, 1, columns), tdy = bst_f32(dy, 2, shape);
    for (int narrow = 0; narrow < 2; narrow++) {
        const bst_norm_options options = {sizeof options, narrow ? BST_CASTING_FLOAT32 : BST_CASTING_NONE, kind, NULL};
        DLTensor tx = bst_f32(wide_x, 2, shape), tdx = bst_f32(wide_dx, 2, shape), ty = bst_f32(y[narrow], 2, shape);
        DLTensor tm = bst_f32(mean[narrow], 1, rows), tr = bst_f32(rstd[narrow], 1, rows);
        DLTensor tdw = bst_f32(dw[narrow], 1, columns), *kept = centre ? &tm : NULL, rounded = tx;
        rounded.dtype = bst_test_types[1];
        if (narrow) tx.data = x, tdx.data = dx, tx.dtype = tdx.dtype = bst_test_types[1];
        CHECK_OK(bst_norm_forward(NULL, &tx, NULL, &tw, &tb, 1e-6, &options, &ty, NULL, kept, &tr));
        CHECK_OK(bst_norm_backward(NULL,
                                   BST_NORM_TENSORS(.dy = &tdy, .x = &tx, .weight = &tw, .mean = kept, .rstd = &tr,
                                                    .dx = &tdx, .dweight = &tdw),
                                   &options));
        if (!narrow) continue;
        CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, &tw, &tb, 1e-6, &options, &rounded, NULL, kept, &tr), BST_INVALID);
        CHECK_STR(bst_last_error(), "norm_forward: y is bfloat16; float32 is needed");
        CHECK_EQ_I(
            bst_norm_backward(NULL, BST_NORM_TENSORS(.dy = &rounded, .x = &tx, .mean = kept, .rstd = &tr, .dx = &tdx),
                              &options),
            BST_INVALID);
        CHECK_STR(bst_last_error(), "norm_backward: dy is bfloat16; float32 is needed");
    }
    CHECK(!memcmp(y[0], y[1], sizeof *y) && !memcmp(dw[0], dw[1], sizeof *dw));
    CHECK(!memcmp(rstd[0], rstd[1], sizeof *rstd) && !memcmp(mean[0], mean[1], sizeof *mean));
    for (int i = 0; i < ROWS * HIDDEN; i++) {
        uint32_t bits = (uint32_t)(&dx[0][0])[i] << 16;
        float got, exact = (&wide_dx[0][0])[i];
        memcpy(&got, &bits, sizeof got);
        CHECK_CLOSE(got, exact, 0x1p-8 * fabs((double)exact));
    }
}

TEST(a_float32_result_of_bfloat16) { compare_with_float32(BST_NORM_RMS); }
TEST(a_float32_layer_norm_of_bfloat16) { compare_with_float32(BST_NORM_LAYER); }

/* after: added to y before it is rounded. */
TEST(a_residual_behind_the_norm) {
    static float x[ROWS][HIDDEN], after[ROWS][HIDDEN], y[ROWS][HIDDEN], sum[ROWS][HIDDEN];
    int64_t shape[] = {ROWS, HIDDEN}, wrong[] = {ROWS, HIDDEN - 1};
    bst_fill(&x[0][0], ROWS * HIDDEN, 1, 1);
    bst_fill(&after[0][0], ROWS * HIDDEN, 2, 1);
    DLTensor tx = bst_f32(x, 2, shape), ta = bst_f32(after, 2, shape), ty = bst_f32(y, 2, shape);
    DLTensor tsum = bst_f32(sum, 2, shape), narrow = bst_f32(after, 2, wrong);
    bst_norm_options options = {sizeof options, .after = &ta};
    CHECK_OK(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6, NULL, &ty, NULL, NULL, NULL));
    CHECK_OK(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6, &options, &tsum, NULL, NULL, NULL));
    for (int i = 0; i < ROWS * HIDDEN; i++) CHECK_CLOSE((&sum[0][0])[i], (&y[0][0])[i] + (&after[0][0])[i], 0);
    options.after = &narrow;
    CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6, &options, &ty, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "norm_forward: after has shape");
}

TEST(errors_name_the_argument_and_write_nothing) {
    float x[8] = {1}, w[8] = {1}, y[8] = {42};
    int64_t shape[] = {2, 4}, wrong[] = {3};
    DLTensor tx = bst_f32(x, 2, shape), tw = bst_f32(w, 1, wrong), ty = bst_f32(y, 2, shape);
    CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, &tw, NULL, 1e-6, NULL, &ty, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "norm_forward: weight has shape [3]; dimension 0 must be 4");
    CHECK_EQ_I(bst_norm_forward(NULL, NULL, NULL, NULL, NULL, 1e-6, NULL, &ty, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "x is NULL");
    CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6,
                                &(bst_norm_options){sizeof(bst_norm_options), .casting = (bst_casting)7}, &ty, NULL,
                                NULL, NULL),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "casting is 7");
    CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6, NULL, &tx, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "y and x share memory");
    DLTensor there = ty;
    there.device = (DLDevice){kDLCUDA, 7};
    CHECK_EQ_I(bst_norm_forward(NULL, &tx, NULL, NULL, NULL, 1e-6, NULL, &there, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "y is on cuda:7, but x is on ");
    DLTensor doubles = tx;
    doubles.dtype.bits = 64;
    CHECK_EQ_I(bst_norm_forward(NULL, &doubles, NULL, NULL, NULL, 1e-6, NULL, &ty, NULL, NULL, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "float32, bfloat16 or float16 is needed");
    CHECK(y[0] == 42);
}

TEST(errors_of_residual_and_sum) {
    float x[8] = {1}, residual[8] = {2}, y[8] = {42}, sum[8] = {42}, rstd[2] = {1, 1}, dx[8] = {42};
    int64_t shape[] = {2, 4}, wrong[] = {2, 3}, rows[] = {2};
    DLTensor tx = bst_f32(x, 2, shape), tr = bst_f32(residual, 2, shape), ty = bst_f32(y, 2, shape);
    DLTensor tsum = bst_f32(sum, 2, shape), trstd = bst_f32(rstd, 1, rows), tdx = bst_f32(dx, 2, shape);
#define FORWARD(residual, y, sum) bst_norm_forward(NULL, &tx, residual, NULL, NULL, 1e-6, NULL, y, sum, NULL, NULL)
#define BACKWARD(straight, to) \
    bst_norm_backward(NULL, BST_NORM_TENSORS(.dy = &ty, .x = &tx, .dsum = straight, .rstd = &trstd, .dx = to), NULL)
    CHECK_EQ_I(FORWARD(&tr, &ty, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "norm_forward: sum is NULL; a tensor is needed");
    CHECK_EQ_I(FORWARD(NULL, &ty, &tsum), BST_INVALID);
    CHECK_STR(bst_last_error(), "sum is given, but residual is NULL");
    CHECK_EQ_I(FORWARD(&tr, &tr, &tsum), BST_INVALID);
    CHECK_STR(bst_last_error(), "y and residual share memory");
    CHECK_EQ_I(FORWARD(&tr, &ty, &tx), BST_INVALID);
    CHECK_STR(bst_last_error(), "sum and x share memory");
    CHECK_EQ_I(FORWARD(&tr, &ty, &tr), BST_INVALID);
    CHECK_STR(bst_last_error(), "sum and residual share memory");
    CHECK_EQ_I(FORWARD(&tr, &ty, &ty), BST_INVALID);
    CHECK_STR(bst_last_error(), "sum and y share memory");
    DLTensor narrow = bst_f32(residual, 2, wrong), half = tr;
    half.dtype.bits = 16;
    CHECK_EQ_I(FORWARD(&narrow, &ty, &tsum), BST_INVALID);
    CHECK_STR(bst_last_error(), "residual has shape [2, 3]; it must have that of x, [2, 4]");
    DLTensor half_x = tx;
    half_x.dtype.bits = 16;
    CHECK_EQ_I(bst_norm_forward(NULL, &half_x, &tr, NULL, NULL, 1e-6, NULL, &half, &tsum, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "residual is float32; float16 is needed, as x has it");
    CHECK_EQ_I(BACKWARD(&narrow, &tdx), BST_INVALID);
    CHECK_STR(bst_last_error(), "norm_backward: dsum has shape [2, 3]");
    CHECK_EQ_I(BACKWARD(&half, &tdx), BST_INVALID);
    CHECK_STR(bst_last_error(), "dsum is float16; float32 is needed, as x has it");
    CHECK_EQ_I(BACKWARD(&tr, &tr), BST_INVALID);
    CHECK_STR(bst_last_error(), "dx and dsum share memory");
    CHECK(y[0] == 42 && sum[0] == 42 && dx[0] == 42 && residual[0] == 2);
}

static void compile_call(DLDataType type, DLDataType weight_type, int64_t width, bool add) {
    bst_shape x, residual, weight, y, sum, rstd, dy, dsum, dx, dweight;
    int64_t shape[] = {4096, width};
    DLDataType f32 = bst_test_types[0], y_type = weight_type.bits == 32 ? f32 : type;
    DLTensor *xt = bst_device_tensor(&x, type, 2, shape), *wt = bst_device_tensor(&weight, weight_type, 1, shape + 1);
    DLTensor *rt = bst_device_tensor(&rstd, f32, 1, shape);
    CHECK_OK(bst_norm_forward(&bst_fake_exec, xt, add ? bst_device_tensor(&residual, type, 2, shape) : NULL, wt, NULL,
                              1e-6, NULL, bst_device_tensor(&y, y_type, 2, shape),
                              add ? bst_device_tensor(&sum, type, 2, shape) : NULL, NULL, rt));
    CHECK_OK(bst_norm_backward(&bst_fake_exec,
                               BST_NORM_TENSORS(.dy = bst_device_tensor(&dy, y_type, 2, shape), .x = xt,
                                                .dsum = add ? bst_device_tensor(&dsum, type, 2, shape) : NULL,
                                                .weight = wt, .rstd = rt, .dx = bst_device_tensor(&dx, type, 2, shape),
                                                .dweight = bst_device_tensor(&dweight, weight_type, 1, shape + 1)),
                               NULL));
}

/* float32: y is, whatever x has. */
static void compile_layer_norm(DLDataType type, int64_t width, bool float32) {
    bst_shape s[12];
    int64_t shape[] = {4096, width};
    const bst_norm_options layer = {sizeof layer, float32 ? BST_CASTING_FLOAT32 : BST_CASTING_NONE, BST_NORM_LAYER,
                                    NULL};
    DLTensor *rows[5], *columns[4], *mean = bst_device_tensor(&s[9], bst_test_types[0], 1, shape);
    for (int i = 0; i < 5; i++) rows[i] = bst_device_tensor(&s[i], type, 2, shape);
    for (int i = 0; i < 4; i++) columns[i] = bst_device_tensor(&s[5 + i], type, 1, shape + 1);
    DLTensor *rstd = bst_device_tensor(&s[10], bst_test_types[0], 1, shape);
    DLTensor *y = bst_device_tensor(&s[11], float32 ? bst_test_types[0] : type, 2, shape);
    CHECK_OK(bst_norm_forward(&bst_fake_exec, rows[0], rows[1], columns[0], columns[1], 1e-5, &layer, y, rows[3], mean,
                              rstd));
    CHECK_OK(
        bst_norm_backward(&bst_fake_exec,
                          BST_NORM_TENSORS(.dy = y, .x = rows[1], .dsum = rows[2], .weight = columns[0], .mean = mean,
                                           .rstd = rstd, .dx = rows[3], .dweight = columns[2], .dbias = columns[3]),
                          &layer));
}

/* As under autocast, with float32 weights. */
static void compile_narrow_residual(int64_t width, bst_norm_kind kind) {
    const bst_norm_options options = {sizeof options, .kind = kind};
    bst_shape x, residual, y, sum;
    int64_t shape[] = {4096, width};
    CHECK_OK(bst_norm_forward(&bst_fake_exec, bst_device_tensor(&x, bst_test_types[0], 2, shape),
                              bst_device_tensor(&residual, bst_test_types[1], 2, shape), NULL, NULL, 1e-6, &options,
                              bst_device_tensor(&y, bst_test_types[0], 2, shape),
                              bst_device_tensor(&sum, bst_test_types[0], 2, shape), NULL, NULL));
}

static void compile_after(DLDataType type, int64_t width) {
    bst_shape x, after, weight, y;
    int64_t shape[] = {4096, width};
    const bst_norm_options options = {sizeof options, .after = bst_device_tensor(&after, type, 2, shape)};
    CHECK_OK(bst_norm_forward(&bst_fake_exec, bst_device_tensor(&x, type, 2, shape), NULL,
                              bst_device_tensor(&weight, type, 1, shape + 1), NULL, 1e-6, &options,
                              bst_device_tensor(&y, type, 2, shape), NULL, NULL, NULL));
}

/* Head norms, a small model, Llama and Qwen sizes, the widest whose rows stay on the chip in the backward pass, a width
 * that needs narrow accesses, one too wide for registers. */
static void compile_calls(void) {
    static const int64_t widths[] = {128, 1024, 4096, 8192, 16384, 4097, 65536};
    for (size_t t = 0; t < 3; t++) {
        /* float16 takes the kernels of bfloat16 but for the conversions: two widths show those. */
        size_t count = t == 2 ? 2 : sizeof widths / sizeof *widths;
        for (size_t w = 0; w < count; w++)
            for (int add = 0; add < 2; add++) compile_call(bst_test_types[t], bst_test_types[t], widths[w], add);
    }
    /* Under autocast norm weights stay in float32: rows of two types come without the ring. 32768: the widest whose sum
     * stays in the forward kernel's registers. */
    for (int add = 0; add < 2; add++) compile_call(bst_test_types[1], bst_test_types[0], 4096, add);
    compile_call(bst_test_types[1], bst_test_types[1], 32768, true);
    for (int kind = BST_NORM_RMS; kind <= BST_NORM_LAYER; kind++) compile_narrow_residual(4096, (bst_norm_kind)kind);
    /* Widths of models with norms behind their blocks, the widest that registers hold, and one too wide for them. */
    static const int64_t behind[] = {2304, 4096, 32768, 65536};
    for (int w = 0; w < 4; w++) compile_after(bst_test_types[1], behind[w]);
    /* Each way of loading: rings of a thread and of bulk copies, the widest held, one too wide for registers. */
    static const int64_t layer_widths[] = {768, 4096, 4097, 8192, 20000};
    for (size_t w = 0; w < 5; w++) {
        compile_layer_norm(bst_test_types[w == 3 ? 0 : 1], layer_widths[w], false);
        compile_layer_norm(bst_test_types[1], layer_widths[w], true);
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("norm", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(values_and_gradients_with_a_residual);
    RUN(layer_norm);
    RUN(layer_norm_with_a_residual);
    RUN(a_residual_of_a_narrower_type);
    RUN(a_float32_result_of_bfloat16);
    RUN(a_float32_layer_norm_of_bfloat16);
    RUN(a_residual_behind_the_norm);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(errors_of_residual_and_sum);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
