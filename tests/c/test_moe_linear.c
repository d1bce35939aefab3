/* test_moe_linear.c - the experts' linear layers through the C API: against float64 in each type, rows or columns of
 * the matrices contiguous, with gaps, with adapters and without; errors; the kernel of Hopper. And transposed adapters.
 */
#include "chips.h"
#include "matrices.h"

enum { MOST_EXPERTS = 5 };

static const DLDataType i32 = {kDLInt, 32, 1};

static float xs[MOST], weights[MOST], thins[MOST], bs[MOST], ys[MOST];

/* All experts' matrices as one, an expert's rows below those of the one before; turned: given by their columns. */
typedef struct stack {
    matrix all;
    int64_t shape[3], strides[3];
} stack;

static stack stacked(float *data, int64_t experts, int64_t rows, int64_t columns, bool turned, int64_t gap, int type,
                     unsigned seed) {
    const int64_t outer = turned ? columns : rows, inner = turned ? rows : columns;
    stack s = {filled(data, experts * outer, inner, gap, 0, type, seed), {experts, rows, columns}};
    const int64_t step = inner + gap;
    s.strides[0] = outer * step, s.strides[1] = turned ? 1 : step, s.strides[2] = turned ? step : 1;
    return s;
}

static DLTensor stack_of(stack *s) {
    return bst_tensor(s->all.data, 3, s->shape, s->strides, bst_test_types[s->all.type]);
}

static double of_stack(const stack *s, int64_t expert, int64_t row, int64_t column) {
    const matrix one = {s->all.data, {0}, {s->strides[1], s->strides[2]}, expert * s->strides[0], s->all.type};
    return number(&one, row, column);
}

/* rank 0: without adapters. */
static void check(const int32_t *ends, int64_t experts, int64_t width, int64_t columns, int64_t rank, bool turned,
                  bool b_turned, int type, int64_t gap) {
    const int64_t rows = ends[experts - 1];
    const double scale = -0.75;
    matrix x = filled(xs, rows, width, gap, 0, type, 3), thin = filled(thins, rows, rank, gap, 0, type, 5);
    stack weight = stacked(weights, experts, width, columns, turned, gap, type, 4);
    stack b = stacked(bs, experts, rank, columns, b_turned, gap, type, 6);
    matrix y = filled(ys, rows, columns, 0, 0, type, 0);
    DLTensor of_ends = bst_tensor((void *)ends, 1, &experts, NULL, i32);
    DLTensor t[] = {tensor_of(&x), stack_of(&weight), tensor_of(&thin), stack_of(&b), tensor_of(&y)};
    CHECK_OK(bst_moe_linear(NULL, &t[0], &t[1], &of_ends, rank ? &t[2] : NULL, rank ? &t[3] : NULL, scale, &t[4]));
    /* Two products: the first one's result is rounded, and so may the sum be. */
    const double unit = type == 0 ? 0x1p-24 : type == 1 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0, begin = 0;
    for (int64_t e = 0; e < experts; begin = ends[e++])
        for (int64_t r = begin; r < ends[e]; r++)
            for (int64_t c = 0; c < columns; c++) {
                double first = 0, sum = 0, size = 0;
                for (int64_t i = 0; i < rank; i++) {
                    double product = scale * number(&thin, r, i) * of_stack(&b, e, i, c);
                    first += product, size += fabs(product);
                }
                for (int64_t i = 0; i < width; i++) {
                    double product = number(&x, r, i) * of_stack(&weight, e, i, c);
                    sum += product, size += fabs(product);
                }
                double most =
                    (double)(rank + width + 4) * 0x1p-23 * size + unit * (fabs(first) + fabs(first + sum)) + 0x1p-25;
                wrong += !(fabs(number(&y, r, c) - first - sum) <= most);
            }
    if (wrong) FAILED("[%d, %d] of type %d: %d wrong", (int)rows, (int)columns, type, (int)wrong);
    int64_t written = rows * columns * (type ? 2 : 4);
    CHECK(((unsigned char *)ys)[written] == 0xff && ((unsigned char *)ys)[written + 1] == 0xff);
}

/* Experts of no rows at the beginning, in between and at the end; of one row; of many. */
TEST(rows_times_the_matrix_of_their_expert) {
    const int32_t uneven[MOST_EXPERTS] = {0, 37, 37, 38, 100}, first[MOST_EXPERTS] = {70, 70, 70, 70, 70}, one = 9;
    for (int type = 0; type < 3; type++)
        for (int turned = 0; turned < 4; turned++) {
            const bool of_weight = turned & 1, of_b = turned >> 1;
            check(uneven, MOST_EXPERTS, 40, 24, 16, of_weight, of_b, type, 0);
            check(uneven, MOST_EXPERTS, 33, 17, 5, of_weight, of_b, type, 3);
            check(first, MOST_EXPERTS, 16, 8, 0, of_weight, of_b, type, 8);
            check(&one, 1, 8, 8, 8, of_weight, of_b, type, 0);
            check(&one, 1, 1, 1, 1, of_weight, of_b, type, 2);
        }
}

/* Several tiles a block, of more pieces than there are stages, some of them without a lower half. */
TEST(more_than_a_tile) {
    const int32_t ends[] = {20, 150};
    for (int turned = 0; turned < 4; turned++) check(ends, 2, 264, 264, 16, turned & 1, turned >> 1, 1, 0);
}

TEST(nothing_sums_up_to_zero) {
    const int32_t ends[] = {3, 9}, none[] = {0, 0};
    for (int type = 0; type < 3; type++) {
        check(ends, 2, 0, 8, 0, false, false, type, 0);
        check(ends, 2, 0, 8, 8, false, true, type, 0);
        check(ends, 2, 16, 0, 8, true, false, type, 0);
        check(none, 2, 16, 8, 8, true, false, type, 0);
    }
}

/* A matrix that all experts share: no distance between them. */
TEST(one_matrix_for_all) {
    const int32_t ends[] = {3, 9};
    int64_t two = 2;
    matrix x = filled(xs, 9, 8, 0, 0, 1, 3), y = filled(ys, 9, 8, 0, 0, 1, 0);
    stack weight = stacked(weights, 2, 8, 8, true, 0, 1, 4);
    weight.strides[0] = 0;
    DLTensor of_ends = bst_tensor((void *)ends, 1, &two, NULL, i32);
    DLTensor t[] = {tensor_of(&x), stack_of(&weight), tensor_of(&y)};
    CHECK_OK(bst_moe_linear(NULL, &t[0], &t[1], &of_ends, NULL, NULL, 0, &t[2]));
    matrix shared = {weights, {8, 8}, {1, 8}, 0, 1};
    compare("shared", &y, &x, &shared, 1);
}

TEST(errors_name_the_argument_and_write_nothing) {
    const int32_t ends[] = {3, 9}, falling[] = {9, 3}, less[] = {3, 8};
    int64_t two = 2, three = 3;
    matrix x = filled(xs, 9, 8, 0, 0, 1, 3), thin = filled(thins, 9, 4, 0, 0, 1, 5), y = filled(ys, 9, 8, 0, 0, 1, 0);
    stack weight = stacked(weights, 2, 8, 8, false, 0, 1, 4), b = stacked(bs, 2, 4, 8, false, 0, 1, 6);
    stack gapped = stacked(weights, 2, 8, 8, false, 0, 1, 4);
    gapped.strides[2] = 2, gapped.strides[1] = 16;
    DLTensor e = bst_tensor((void *)ends, 1, &two, NULL, i32);
    DLTensor more = bst_tensor((void *)ends, 1, &three, NULL, i32);
    DLTensor t[] = {tensor_of(&x), stack_of(&weight), tensor_of(&thin), stack_of(&b), tensor_of(&y), stack_of(&gapped)};
#define REFUSED(status, text, ...)                         \
    CHECK_EQ_I(bst_moe_linear(NULL, __VA_ARGS__), status); \
    CHECK_STR(bst_last_error(), "moe_linear: " text);      \
    for (int i = 0; i < 72; i++) CHECK(((uint16_t *)ys)[i] == 0xffff)
    REFUSED(BST_INVALID, "x is NULL", NULL, &t[1], &e, NULL, NULL, 1, &t[4]);
    REFUSED(BST_INVALID, "matrices has shape [2, 4, 8]", &t[0], &t[3], &e, NULL, NULL, 1, &t[4]);
    REFUSED(BST_INVALID, "ends has shape [3]", &t[0], &t[1], &more, NULL, NULL, 1, &t[4]);
    REFUSED(BST_INVALID, "b is NULL", &t[0], &t[1], &e, &t[2], NULL, 1, &t[4]);
    REFUSED(BST_INVALID, "b has shape [2, 8, 8]", &t[0], &t[1], &e, &t[2], &t[1], 1, &t[4]);
    REFUSED(BST_INVALID, "y and x share memory", &t[0], &t[1], &e, NULL, NULL, 1, &t[0]);
    REFUSED(BST_UNSUPPORTED, "neither the rows nor the columns of matrices", &t[0], &t[5], &e, NULL, NULL, 1, &t[4]);
    gapped.strides[1] = 4, gapped.strides[2] = 1, t[5] = stack_of(&gapped);
    REFUSED(BST_UNSUPPORTED, "neither the rows nor the columns of matrices", &t[0], &t[5], &e, NULL, NULL, 1, &t[4]);
    x.strides[0] = 4, t[0] = tensor_of(&x);
    REFUSED(BST_UNSUPPORTED, "the rows of x overlap", &t[0], &t[1], &e, NULL, NULL, 1, &t[4]);
    x.strides[0] = 8, t[0] = tensor_of(&x);
#ifndef BST_EMULATE /* on CUDA only the device knows */
    DLTensor down = bst_tensor((void *)falling, 1, &two, NULL, i32);
    DLTensor short_of = bst_tensor((void *)less, 1, &two, NULL, i32);
    REFUSED(BST_INVALID, "ends, of shape [2], has", &t[0], &t[1], &down, NULL, NULL, 1, &t[4]);
    REFUSED(BST_INVALID, "ends, of shape [2], has 8 at 1", &t[0], &t[1], &short_of, NULL, NULL, 1, &t[4]);
#else
    (void)falling, (void)less;
#endif
}

/* Less than a tile and more than one each way; rows that fold into two strides; each pair of types, rounded. */
TEST(transposed_and_rounded) {
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {2, 40, 130}, {1, 130, 64}, {70, 1, 3}, {2, 0, 3}, {2, 3, 0}};
    for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++)
        for (int types = 0; types < 9; types++) {
            int64_t first = sizes[at][0], second = sizes[at][1], columns = sizes[at][2], gap = 2;
            matrix x = filled(xs, second * first, columns, gap, 0, types % 3, 3);
            matrix y = filled(ys, columns, first * second, 0, 0, types / 3, 0);
            /* Row (a, b) is row b * first + a of the matrix. */
            int64_t of_x[] = {first, second, columns}, step = columns + gap, strides[] = {step, first * step, 1};
            int64_t of_y[] = {columns, first, second};
            DLTensor from = bst_tensor(xs, 3, of_x, strides, bst_test_types[x.type]);
            DLTensor to = bst_tensor(ys, 3, of_y, NULL, bst_test_types[y.type]);
            CHECK_OK(bst_moe_transpose(NULL, &from, &to));
            int64_t wrong = 0;
            for (int64_t a = 0; a < first; a++)
                for (int64_t b = 0; b < second; b++)
                    for (int64_t c = 0; c < columns; c++) {
                        float want = (float)number(&x, b * first + a, c), rounded[1];
                        bst_store(rounded, &want, (bst_dtype)y.type, 1);
                        wrong += memcmp((char *)ys + (c * first * second + a * second + b) * (y.type ? 2 : 4), rounded,
                                        y.type ? 2 : 4) != 0;
                    }
            CHECK_EQ_I(wrong, 0);
            CHECK(((unsigned char *)ys)[x.shape[0] * columns * (y.type ? 2 : 4)] == 0xff);
        }
    int64_t shape[] = {2, 3, 4}, other[] = {4, 3, 2};
    DLTensor from = bst_tensor(xs, 3, shape, NULL, bst_test_types[0]);
    DLTensor to = bst_tensor(ys, 3, other, NULL, bst_test_types[1]);
    CHECK_EQ_I(bst_moe_transpose(NULL, &from, &to), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_transpose: y has shape [4, 3, 2]");
    CHECK_EQ_I(bst_moe_transpose(NULL, &from, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_transpose: y is NULL");
}

#ifndef BST_EMULATE
/* Each way that matrices lie, with adapters of each number of sixteens, scaled and not, and without. */
static void compile_calls(void) {
    for (int type = 1; type < 3; type++)
        for (int turned = 0; turned < 4; turned++)
            for (int64_t rank = 0; rank <= 128; rank = rank ? 2 * rank : 16) {
                bst_shape s[6];
                DLTensor *t[6];
                const int64_t shapes[6][3] = {{4096, 2048}, {64, 2048, 1024}, {4096, rank}, {64, rank, 1024},
                                              {64},         {4096, 1024}};
                const int dims[] = {2, 3, 2, 3, 1, 2};
                for (int i = 0; i < 6; i++)
                    t[i] = bst_device_tensor(&s[i], i == 4 ? i32 : bst_test_types[type], dims[i], shapes[i]);
                if (turned & 1) s[1].stride[1] = 1, s[1].stride[2] = 2048;
                if (turned & 2) s[3].stride[1] = 1, s[3].stride[2] = rank;
                for (int scale = 1; scale < 3; scale++)
                    CHECK_OK(bst_moe_linear(&bst_fake_exec, t[0], t[1], t[4], rank ? t[2] : NULL, rank ? t[3] : NULL,
                                            scale, t[5]));
            }
}

TEST(kernels_compile_for_every_chip) { /* that has them */
    if (!bst_nvrtc_is_there()) return;
    bst_compiled hopper = {.arch = 90};
    bst_compile_only collector = {90, bst_report_kernel, &hopper, NULL};
    bst__cuda_compile_only(&collector);
    compile_calls();
    bst__cuda_compile_only(NULL);
    CHECK(hopper.kernels > 0);
    CHECK_EQ_I(hopper.spilled, 0);
    printf("moe_linear sm_90: %d kernels, %d registers\n", hopper.kernels, hopper.most_registers);
    bst_compiled ampere = {.arch = 80};
    collector = (bst_compile_only){80, bst_report_kernel, &ampere, NULL};
    bst__cuda_compile_only(&collector);
    compile_calls();
    bst__cuda_compile_only(NULL);
    CHECK_EQ_I(ampere.kernels, 0); /* products of a library */
}
#endif

int main(void) {
    RUN(rows_times_the_matrix_of_their_expert);
    RUN(more_than_a_tile);
    RUN(nothing_sums_up_to_zero);
    RUN(one_matrix_for_all);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(transposed_and_rounded);
#ifndef BST_EMULATE
    RUN(kernels_compile_for_every_chip);
#endif
    return bst_test_report();
}
