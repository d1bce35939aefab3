/* test_low_rank.c - the backward pass of an adapter's second product through the C API: against float64 in each type,
 * for what the kernel serves and what two products do, in rows with gaps; errors; its kernels on every chip. */
#include "chips.h"
#include "matrices.h"

static float dys[MOST], thins[MOST], bs[MOST], gs[MOST], dbs[MOST], again[MOST];

static void check(int64_t rows, int64_t columns, int64_t rank, int type, int64_t gap, int64_t at) {
    matrix dy = filled(dys, rows, columns, gap, at, type, 3), thin = filled(thins, rows, rank, gap, at, type, 4);
    matrix b = filled(bs, columns, rank, 0, at, type, 5), g = filled(gs, rows, rank, gap, at, type, 0);
    matrix db = filled(dbs, columns, rank, 0, at, 0, 0);
    DLTensor t[] = {tensor_of(&dy), tensor_of(&thin), tensor_of(&b), tensor_of(&g), tensor_of(&db)};
    CHECK_OK(bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 0.75, &t[3], &t[4]));
    matrix across = transposed(&dy);
    compare("g", &g, &dy, &b, 0.75);
    compare("db", &db, &across, &thin, 0.75);
    int64_t beside = 0, size = type ? 2 : 4;
    for (int64_t i = 0; i < at + rows * g.strides[0]; i++)
        if (i < at || (i - at) % g.strides[0] >= rank)
            beside += memcmp((char *)gs + i * size, "\xff\xff\xff\xff", 2) != 0;
    CHECK_EQ_I(beside, 0);
    memcpy(again, gs, sizeof gs);
    CHECK_OK(bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 0.75, &t[3], &t[4]));
    CHECK(!memcmp(again, gs, sizeof gs));
}

/* Less than a tile and more than one of rows and columns; all ranks that the kernel has; more columns than a block has
 * at rank 32; parts of rows. */
TEST(what_the_kernel_serves) {
    for (int type = 1; type < 3; type++) {
        check(37, 40, 16, type, 0, 0);
        check(130, 136, 8, type, 0, 0);
        check(150, 264, 24, type, 8, 8);
        check(300, 528, 32, type, 16, 0);
        check(1, 8, 16, type, 0, 0);
    }
}

/* float32; ranks and columns that are no multiple of eight; rows and addresses that are not aligned; many ranks. */
TEST(what_two_products_do) {
    for (int type = 0; type < 3; type++) {
        check(37, 40, 5, type, 0, 0);
        check(37, 39, 16, type, 0, 0);
        check(20, 40, 16, type, 3, 0);
        check(20, 40, 16, type, 0, 1);
        check(70, 72, 40, type, 8, 0);
        check(1, 1, 1, type, 0, 0);
    }
    check(130, 136, 16, 0, 8, 0);
}

/* No rows: db is zero; no columns: g is. */
TEST(nothing_sums_up_to_zero) {
    for (int type = 0; type < 3; type++) {
        check(0, 40, 16, type, 0, 0);
        check(37, 0, 16, type, 8, 0);
        check(37, 40, 0, type, 0, 0);
    }
}

TEST(infinities) {
    matrix dy = filled(dys, 16, 16, 0, 0, 1, 3), thin = filled(thins, 16, 16, 0, 0, 1, 4);
    matrix b = filled(bs, 16, 16, 0, 0, 1, 5), g = filled(gs, 16, 16, 0, 0, 1, 0), db = filled(dbs, 16, 16, 0, 0, 0, 0);
    DLTensor t[] = {tensor_of(&dy), tensor_of(&thin), tensor_of(&b), tensor_of(&g), tensor_of(&db)};
    float x = INFINITY;
    bst_store((uint16_t *)dys + 3 * 16 + 5, &x, BST_BF16, 1);
    CHECK_OK(bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &t[3], &t[4]));
    for (int64_t r = 0; r < 16; r++)
        for (int64_t c = 0; c < 16; c++) {
            CHECK(isfinite(number(&g, r, c)) == (r != 3));
            CHECK(isfinite(number(&db, r, c)) == (r != 5));
        }
}

TEST(errors_name_the_argument_and_write_nothing) {
    matrix dy = filled(dys, 6, 8, 0, 0, 1, 3), thin = filled(thins, 6, 4, 0, 0, 1, 4), b = filled(bs, 8, 4, 0, 0, 1, 5);
    matrix g = filled(gs, 6, 4, 0, 0, 1, 0), db = filled(dbs, 8, 4, 0, 0, 0, 0),
           narrow = filled(again, 6, 3, 0, 0, 1, 0);
    DLTensor t[] = {tensor_of(&dy), tensor_of(&thin), tensor_of(&b), tensor_of(&g), tensor_of(&db)};
    DLTensor n = tensor_of(&narrow);
#define REFUSED(status, call, text)                          \
    CHECK_EQ_I(call, status);                                \
    CHECK_STR(bst_last_error(), "low_rank_backward: " text); \
    for (int i = 0; i < 64; i++) CHECK(((uint16_t *)gs)[i] == 0xffff && ((uint16_t *)dbs)[i] == 0xffff)
    REFUSED(BST_INVALID, bst_low_rank_backward(NULL, NULL, &t[1], &t[2], 1, &t[3], &t[4]), "dy is NULL");
    REFUSED(BST_INVALID, bst_low_rank_backward(NULL, &t[0], &n, &t[2], 1, &t[3], &t[4]), "b has shape [8, 4]");
    REFUSED(BST_INVALID, bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &n, &t[4]), "g has shape [6, 3]");
    REFUSED(BST_UNSUPPORTED, bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &t[3], &t[2]), "db has elements");
    REFUSED(BST_INVALID, bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &t[1], &t[4]), "g and thin share memory");
}

/* A product refuses them, and the first one must not have been made by then. */
TEST(rows_that_overlap) {
    matrix dy = filled(dys, 6, 8, 0, 0, 0, 3), thin = filled(thins, 6, 4, 0, 0, 0, 4), b = filled(bs, 8, 4, 0, 0, 0, 5);
    matrix g = filled(gs, 6, 4, 0, 0, 0, 0), db = filled(dbs, 8, 4, 0, 0, 0, 0);
    DLTensor t[] = {tensor_of(&dy), tensor_of(&thin), tensor_of(&b), tensor_of(&g), tensor_of(&db)};
    thin.strides[0] = 0;
    REFUSED(BST_UNSUPPORTED, bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &t[3], &t[4]),
            "the rows of thin overlap");
    thin.strides[0] = 4, dy.strides[0] = 0;
    REFUSED(BST_UNSUPPORTED, bst_low_rank_backward(NULL, &t[0], &t[1], &t[2], 1, &t[3], &t[4]),
            "the rows of dy overlap");
}

static float xs[MOST], weights[MOST];

static float biases[MOST];

static void check_linear_with(bool bias, int64_t rows, int64_t width, int64_t columns, int64_t rank, int type,
                              int64_t gap, double scale) {
    matrix x = filled(xs, rows, width, gap, 0, type, 3), weight = filled(weights, columns, width, gap, 0, type, 4);
    matrix thin = filled(thins, rows, rank, gap, 0, type, 5), b = filled(bs, columns, rank, 0, 0, type, 6);
    matrix y = filled(gs, rows, columns, gap, 0, type, 0);
    DLTensor t[] = {tensor_of(&x), tensor_of(&weight), tensor_of(&thin), tensor_of(&b), tensor_of(&y)};
    matrix added = filled(biases, 1, columns, 0, 0, type, 7);
    DLTensor of_bias = bst_tensor(biases, 1, &columns, NULL, bst_test_types[type]);
    CHECK_OK(bst_low_rank_linear(NULL, &t[0], &t[1], &t[2], &t[3], bias ? &of_bias : NULL, scale, &t[4]));
    /* Two products: the first one's result is rounded, and so may each sum be. */
    const double unit = type == 0 ? 0x1p-24 : type == 1 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double first = 0, sum = 0, size = 0;
            for (int64_t i = 0; i < rank; i++) first += scale * number(&thin, r, i) * number(&b, c, i);
            for (int64_t i = 0; i < rank; i++) size += fabs(scale * number(&thin, r, i) * number(&b, c, i));
            if (bias) first += number(&added, 0, c), size += fabs(number(&added, 0, c));
            for (int64_t i = 0; i < width; i++) {
                double product = number(&x, r, i) * number(&weight, c, i);
                sum += product, size += fabs(product);
            }
            double most =
                (double)(rank + width + 4) * 0x1p-23 * size + unit * (fabs(first) + fabs(first + sum)) + 0x1p-25;
            wrong += !(fabs(number(&y, r, c) - first - sum) <= most);
        }
    if (wrong) FAILED("linear [%d, %d] of type %d: %d wrong", (int)rows, (int)columns, type, (int)wrong);
    int64_t beside = 0, size = type ? 2 : 4;
    for (int64_t i = 0; i < rows * y.strides[0]; i++)
        if (i % y.strides[0] >= columns) beside += memcmp((char *)gs + i * size, "\xff\xff\xff\xff", 2) != 0;
    CHECK_EQ_I(beside, 0);
}

static void check_linear(int64_t rows, int64_t width, int64_t columns, int64_t rank, int type, int64_t gap,
                         double scale) {
    check_linear_with(false, rows, width, columns, rank, type, gap, scale);
    check_linear_with(true, rows, width, columns, rank, type, gap, scale);
}

TEST(a_linear_layer_with_its_adapter) {
    for (int type = 0; type < 3; type++) {
        check_linear(37, 40, 24, 16, type, 0, 1);
        check_linear(30, 33, 17, 5, type, 3, -0.75);
        check_linear(130, 64, 136, 8, type, 8, 2);
        check_linear(9, 0, 8, 8, type, 0, 2);
        if (type) check_linear(150, 328, 264, 16, type, 0, type); /* tiles enough for the emulator's chip, long sums */
        check_linear(9, 16, 8, 0, type, 0, 2);
        check_linear(0, 16, 8, 8, type, 0, 2);
        check_linear(9, 16, 0, 8, type, 0, 2);
    }
    matrix x = filled(xs, 6, 8, 0, 0, 1, 3), weight = filled(weights, 4, 8, 0, 0, 1, 4),
           y = filled(gs, 6, 4, 0, 0, 1, 0);
    matrix thin = filled(thins, 6, 2, 0, 0, 1, 5), b = filled(bs, 4, 3, 0, 0, 1, 6);
    DLTensor t[] = {tensor_of(&x), tensor_of(&weight), tensor_of(&thin), tensor_of(&b), tensor_of(&y)};
    CHECK_EQ_I(bst_low_rank_linear(NULL, &t[0], &t[1], &t[2], &t[3], NULL, 1, &t[4]), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_linear: b has shape [4, 3]");
    CHECK_EQ_I(bst_low_rank_linear(NULL, &t[0], &t[0], &t[2], &t[2], NULL, 1, &t[4]), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_linear: y has shape [6, 4]");
    matrix fits = filled(bs, 4, 2, 0, 0, 1, 6);
    t[3] = tensor_of(&fits);
    CHECK_EQ_I(bst_low_rank_linear(NULL, &t[0], &t[1], &t[2], &t[3], &t[3], 1, &t[4]), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_linear: bias has");
    for (int i = 0; i < 24; i++) CHECK(((uint16_t *)gs)[i] == 0xffff);
}

/* dx of so many layers, each 8 columns wider than the last, with gaps; rank 0: without adapters. */
static void check_dx(int64_t rows, int64_t width, int64_t columns, int layers, int64_t rank, int type, int64_t gap) {
    static float memory[8][MOST];
    matrix dy[4], weight[4], g = filled(thins, rows, rank, gap, 0, type, 5),
                             a = filled(bs, rank, width, gap, 0, type, 6);
    matrix dx = filled(gs, rows, width, gap, 0, type, 0);
    DLTensor t[8], of_g = tensor_of(&g), of_a = tensor_of(&a), of_dx = tensor_of(&dx);
    bst_low_rank_dx_tensors tensors = {sizeof tensors, .dx = &of_dx};
    if (rank) tensors.g = &of_g, tensors.a = &of_a;
    for (int i = 0; i < layers; i++) {
        dy[i] = filled(memory[2 * i], rows, columns + 8 * i, gap, 0, type, 7 + i);
        weight[i] = filled(memory[2 * i + 1], columns + 8 * i, width, gap, 0, type, 17 + i);
        t[2 * i] = tensor_of(&dy[i]), t[2 * i + 1] = tensor_of(&weight[i]);
        tensors.dy[i] = &t[2 * i], tensors.weight[i] = &t[2 * i + 1];
    }
    CHECK_OK(bst_low_rank_dx(NULL, &tensors));
    /* A product at a time: each of their sums may be rounded. */
    const double unit = type == 0 ? 0x1p-24 : type == 1 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c++) {
            double sum = 0, size = 0, rounded = 0;
            for (int i = rank ? -1 : 0; i < layers; i++) {
                const matrix *left = i < 0 ? &g : &dy[i], *right = i < 0 ? &a : &weight[i];
                for (int64_t k = 0; k < (i < 0 ? rank : columns + 8 * i); k++) {
                    double product = number(left, r, k) * number(right, k, c);
                    sum += product, size += fabs(product);
                }
                rounded += fabs(sum);
            }
            double most = (double)(rank + 4 * columns + 60) * 0x1p-23 * size + unit * rounded + 0x1p-25;
            wrong += !(fabs(number(&dx, r, c) - sum) <= most);
        }
    if (wrong) FAILED("dx [%d, %d] of type %d: %d wrong", (int)rows, (int)width, type, (int)wrong);
    int64_t beside = 0, size = type ? 2 : 4;
    for (int64_t i = 0; i < rows * dx.strides[0]; i++)
        if (i % dx.strides[0] >= width) beside += memcmp((char *)gs + i * size, "\xff\xff\xff\xff", 2) != 0;
    CHECK_EQ_I(beside, 0);
}

TEST(the_gradient_of_their_input) {
    for (int type = 0; type < 3; type++) {
        check_dx(37, 40, 24, 1, 16, type, 0);
        check_dx(30, 33, 17, 2, 5, type, 3);
        check_dx(130, 64, 40, 3, 80, type, 8);
        check_dx(20, 24, 16, 4, 0, type, 0);
        if (type) check_dx(150, 264, 328, 2, 80, type, 8); /* likewise */
        check_dx(9, 16, 0, 1, 8, type, 0);
        check_dx(9, 16, 0, 1, 0, type, 0);
        check_dx(0, 16, 8, 2, 8, type, 0);
        check_dx(9, 0, 8, 2, 8, type, 0);
    }
    matrix dy = filled(xs, 6, 8, 0, 0, 1, 3), weight = filled(weights, 8, 4, 0, 0, 1, 4);
    matrix other = filled(thins, 4, 8, 0, 0, 1, 5), dx = filled(gs, 6, 4, 0, 0, 1, 0);
    DLTensor t[] = {tensor_of(&dy), tensor_of(&weight), tensor_of(&other), tensor_of(&dx)};
    bst_low_rank_dx_tensors tensors = {sizeof tensors, {&t[0]}, {&t[2]}, .dx = &t[3]};
    CHECK_EQ_I(bst_low_rank_dx(NULL, &tensors), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_dx: weight_0 has shape [4, 8]");
    tensors.weight[0] = &t[1], tensors.dy[2] = &t[0];
    CHECK_EQ_I(bst_low_rank_dx(NULL, &tensors), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_dx: ");
    tensors.dy[2] = NULL, tensors.g = &t[2], tensors.a = &t[1];
    CHECK_EQ_I(bst_low_rank_dx(NULL, &tensors), BST_INVALID);
    CHECK_STR(bst_last_error(), "low_rank_dx: g has shape [4, 8]");
    tensors.g = tensors.a = NULL, weight.strides[0] = 0, t[1] = tensor_of(&weight);
    CHECK_EQ_I(bst_low_rank_dx(NULL, &tensors), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "low_rank_dx: the rows of weight_0 overlap; make it contiguous");
    for (int i = 0; i < 24; i++) CHECK(((uint16_t *)gs)[i] == 0xffff);
}

/* What models have: each rank, wide and narrow layers, many rows and few; and what two products do. float16 takes the
 * kernels of bfloat16 but for the conversions: one width shows those. */
static void compile_calls(void) {
    const int64_t widths[] = {1024, 4096, 12288, 40, 152064}, ranks[] = {8, 16, 24, 32, 64};
    for (int type = 1; type < 3; type++)
        for (int w = 0; w < (type == 1 ? 5 : 1); w++)
            for (int r = 0; r < 5; r++)
                for (int64_t rows = 100; rows <= 10000; rows *= 100) {
                    bst_shape s[5];
                    DLTensor *t[5];
                    const int64_t sizes[5][2] = {{rows, widths[w]},
                                                 {rows, ranks[r]},
                                                 {widths[w], ranks[r]},
                                                 {rows, ranks[r]},
                                                 {widths[w], ranks[r]}};
                    for (int i = 0; i < 5; i++)
                        t[i] = bst_device_tensor(&s[i], bst_test_types[i < 4 ? type : 0], 2, sizes[i]);
                    CHECK_OK(bst_low_rank_backward(&bst_fake_exec, t[0], t[1], t[2], 2, t[3], t[4]));
                }
}

#ifndef BST_EMULATE
/* Layers that fill the chip, of each number of sixteens of ranks; with scale and without. */
static void compile_linear(void) {
    for (int type = 1; type < 3; type++)
        for (int64_t rank = 8; rank <= 64; rank += 24)
            for (int scale = 1; scale < 3; scale++) {
                bst_shape s[5];
                DLTensor *t[5];
                const int64_t shapes[5][2] = {{8192, 4096}, {12288, 4096}, {8192, rank}, {12288, rank}, {8192, 12288}};
                for (int i = 0; i < 5; i++) t[i] = bst_device_tensor(&s[i], bst_test_types[type], 2, shapes[i]);
                bst_shape of_bias;
                DLTensor *bias = bst_device_tensor(&of_bias, bst_test_types[type], 1, (const int64_t[]){12288});
                CHECK_OK(bst_low_rank_linear(&bst_fake_exec, t[0], t[1], t[2], t[3], NULL, scale, t[4]));
                CHECK_OK(bst_low_rank_linear(&bst_fake_exec, t[0], t[1], t[2], t[3], bias, scale, t[4]));
                s[0].size[0] = s[2].size[0] = s[4].size[0] = 100; /* too few rows for one product */
                CHECK_OK(bst_low_rank_linear(&bst_fake_exec, t[0], t[1], t[2], t[3], bias, scale, t[4]));
            }
    for (int type = 1; type < 3; type++)
        for (int64_t rank = 0; rank <= 96; rank += 16) {
            bst_shape s[7];
            DLTensor *t[7];
            const int64_t shapes[7][2] = {{8192, 4096}, {4096, 4096}, {8192, 1024}, {1024, 4096},
                                          {8192, rank}, {rank, 4096}, {8192, 4096}};
            for (int i = 0; i < 7; i++) t[i] = bst_device_tensor(&s[i], bst_test_types[type], 2, shapes[i]);
            bst_low_rank_dx_tensors tensors = {sizeof tensors, {t[0], t[2]}, {t[1], t[3]}, .dx = t[6]};
            if (rank) tensors.g = t[4], tensors.a = t[5];
            CHECK_OK(bst_low_rank_dx(&bst_fake_exec, &tensors));
        }
}
#endif

TEST(kernels_compile_for_every_chip) {
    bst_for_every_chip("low_rank", compile_calls);
#ifndef BST_EMULATE
    if (!bst_nvrtc_is_there()) return;
    bst_compiled hopper = {.arch = 90};
    bst_compile_only collector = {90, bst_report_kernel, &hopper, NULL};
    bst__cuda_compile_only(&collector);
    compile_linear();
    bst__cuda_compile_only(NULL);
    CHECK(hopper.kernels > 0);
    printf("     low_rank_tiles: sm_90, %d kernels, at most %d registers, %d spilled\n", hopper.kernels,
           hopper.most_registers, hopper.spilled);
#endif
}

int main(void) {
    RUN(what_the_kernel_serves);
    RUN(what_two_products_do);
    RUN(nothing_sums_up_to_zero);
    RUN(infinities);
    RUN(a_linear_layer_with_its_adapter);
    RUN(the_gradient_of_their_input);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(rows_that_overlap);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
