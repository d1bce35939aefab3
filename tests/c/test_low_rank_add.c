/* test_low_rank_add.c - what adapters add to results, through the C API: against float64 in each pair of types, for one
 * to three layers, rows that are aligned and that are not; errors; its kernels on every chip. */
#include "chips.h"
#include "matrices.h"

enum { LAYERS = 3 };
static float xs[MOST], ys[LAYERS][MOST], befores[LAYERS][MOST], as[LAYERS][MOST], bs[LAYERS][MOST];
static float firsts[LAYERS][MOST];

typedef struct shape {
    int64_t rows, width, columns[LAYERS], rank[LAYERS];
    int layers, skipped; /* skipped: a layer that is not given, or 0 */
    int64_t gap, at;     /* between rows of x and of y, and before the first of each tensor */
} shape;

/* Sums of n terms in float32 are off by n roundings of their sizes at most; y is rounded once. */
static void compare_layer(const shape *s, int i, const matrix *x, const matrix *y, const matrix *before,
                          const matrix *a, const matrix *b, double scale) {
    const double unit = y->type == 0 ? 0x1p-24 : y->type == 1 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0;
    for (int64_t row = 0; row < s->rows; row++) {
        static double thins[256], sizes[256];
        for (int64_t r = 0; r < s->rank[i]; r++) {
            thins[r] = sizes[r] = 0;
            for (int64_t k = 0; k < s->width; k++) {
                double product = number(x, row, k) * number(a, r, k);
                thins[r] += product, sizes[r] += fabs(product);
            }
        }
        for (int64_t c = 0; c < s->columns[i]; c++) {
            double sum = 0, size = 0, was = number(before, row, c);
            for (int64_t r = 0; r < s->rank[i]; r++) {
                sum += scale * thins[r] * number(b, c, r);
                size += fabs(scale * number(b, c, r)) * sizes[r];
            }
            double most = (double)(s->width + s->rank[i] + 3) * 0x1p-24 * (size + fabs(was));
            most += 1.01 * unit * fabs(was + sum) + 0x1p-25;
            wrong += !(fabs(number(y, row, c) - was - sum) <= most);
        }
    }
    if (wrong)
        FAILED("layer %d, [%d, %d] over %d and %d, of types %d and %d: %d wrong", i, (int)s->rows, (int)s->columns[i],
               (int)s->width, (int)s->rank[i], y->type, a->type, (int)wrong);
}

static void check_types(const shape *s, int type, int factor) {
    static const double scales[] = {0.75, -1.5, 2};
    matrix x = filled(xs, s->rows, s->width, s->gap, s->at, type, 3), y[LAYERS], before[LAYERS], a[LAYERS], b[LAYERS];
    DLTensor of_x = tensor_of(&x), t[LAYERS][3];
    bst_low_rank_add_tensors tensors = {sizeof tensors, &of_x};
    for (int again = 0; again < 2; again++) {
        for (int i = 0; i < s->layers; i++) {
            unsigned seed = 5 + 3 * (unsigned)i;
            y[i] = filled(ys[i], s->rows, s->columns[i], s->gap, s->at, type, seed);
            before[i] = filled(befores[i], s->rows, s->columns[i], s->gap, s->at, type, seed);
            a[i] = filled(as[i], s->rank[i], s->width, 0, s->at, factor, seed + 1);
            b[i] = filled(bs[i], s->columns[i], s->rank[i], 0, s->at, factor, seed + 2);
            if (i && i == s->skipped) continue;
            t[i][0] = tensor_of(&y[i]), t[i][1] = tensor_of(&a[i]), t[i][2] = tensor_of(&b[i]);
            tensors.y[i] = &t[i][0], tensors.a[i] = &t[i][1], tensors.b[i] = &t[i][2];
            tensors.scale[i] = scales[i];
        }
        CHECK_OK(bst_low_rank_add(NULL, &tensors));
        for (int i = 0; i < s->layers; i++) {
            if (again) CHECK(!memcmp(firsts[i], ys[i], sizeof firsts[i]));
            memcpy(firsts[i], ys[i], sizeof firsts[i]);
        }
    }
    for (int i = 0; i < s->layers; i++) {
        if (!i || i != s->skipped) compare_layer(s, i, &x, &y[i], &before[i], &a[i], &b[i], scales[i]);
        /* All around a result's rows is as it was. */
        const size_t size = type ? 2 : 4;
        const bool untouched = i && i == s->skipped;
        int64_t beside = 0;
        for (int64_t e = 0; e < MOST; e++) {
            const int64_t stride = y[i].strides[0] ? y[i].strides[0] : 1, at = e - s->at, row = at / stride;
            bool inside = at >= 0 && row < s->rows && at % stride < s->columns[i] && !untouched;
            beside +=
                !inside && memcmp((char *)ys[i] + e * (int64_t)size, (char *)befores[i] + e * (int64_t)size, size);
        }
        CHECK_EQ_I(beside, 0);
    }
}

static void check(shape s) {
    for (int type = 0; type < 3; type++) {
        check_types(&s, type, 0);
        if (type) check_types(&s, type, type);
    }
}

/* One layer, two and three, of their own widths and ranks; each number of rows that a kernel is made for, and those
 * between and beyond; widths of less than a block's step and more than all that it has in flight. */
TEST(what_is_aligned) {
    check((shape){1, 64, {40}, {16}, .layers = 1});
    check((shape){2, 4104, {72, 24}, {8, 16}, .layers = 2});
    check((shape){3, 136, {264, 8, 16}, {16, 16, 16}, .layers = 3});
    check((shape){8, 2056, {40, 80, 8}, {32, 8, 64}, .layers = 3, .gap = 8, .at = 8});
    check((shape){13, 72, {88, 16}, {64, 24}, .layers = 2, .gap = 16});
    check((shape){20, 40, {300, 0, 16}, {8, 8, 8}, .layers = 3, .skipped = 1});
}

/* Sizes that are odd, addresses and rows that begin anywhere; more ranks than are read at a time. */
TEST(what_is_read_one_by_one) {
    check((shape){1, 33, {17}, {5}, .layers = 1});
    check((shape){5, 515, {39, 7}, {3, 16}, .layers = 2, .gap = 3});
    check((shape){4, 64, {40, 8, 24}, {16, 8, 8}, .layers = 3, .at = 1});
    check((shape){9, 40, {65, 130, 1}, {1, 7, 2}, .layers = 3, .gap = 1, .at = 3});
    check((shape){2, 24, {70}, {133}, .layers = 1});
    check((shape){11, 16, {70, 9}, {136, 200}, .layers = 2});
    check((shape){1, 1, {1}, {1}, .layers = 1});
}

TEST(nothing_adds_nothing) {
    check((shape){0, 40, {16}, {8}, .layers = 1});
    check((shape){3, 0, {16, 8}, {8, 8}, .layers = 2});
    check((shape){3, 40, {0}, {8}, .layers = 1});
    check((shape){3, 40, {0, 16, 0}, {8, 8, 8}, .layers = 3});
    check((shape){3, 40, {16, 8, 9}, {0, 8, 0}, .layers = 3});
    check((shape){3, 40, {16}, {0}, .layers = 1});
    check((shape){2, 40, {16, 8, 24}, {8, 0, 8}, .layers = 3, .skipped = 2});
}

/* What is not a number stays in its row of x, and in its column of y. Of ranks and rows there are fewer than a block
 * has: behind them nothing is read, neither the next row of b nor beyond a tensor's end, where a sanitizer looks. */
TEST(infinities) {
    matrix x = filled(xs, 5, 16, 0, 0, 1, 3), y = filled(ys[0], 5, 24, 0, 0, 1, 4);
    matrix a = filled(as[0], 12, 16, 0, 0, 0, 5), b = filled(bs[0], 24, 12, 0, 0, 0, 6);
    matrix *all[] = {&x, &y, &a, &b};
    float infinite = INFINITY;
    bst_store((uint16_t *)xs + 3 * 16 + 5, &infinite, BST_BF16, 1);
    bs[0][7 * 12 + 2] = INFINITY;
    DLTensor t[4];
    for (int i = 0; i < 4; i++) {
        size_t bytes = (size_t)(all[i]->shape[0] * all[i]->shape[1]) * (all[i]->type ? 2 : 4);
        float *copy = malloc(bytes);
        CHECK(copy != NULL);
        if (!copy) return;
        all[i]->data = memcpy(copy, all[i]->data, bytes);
        t[i] = tensor_of(all[i]);
    }
    bst_low_rank_add_tensors tensors = {sizeof tensors, &t[0], {&t[1]}, {&t[2]}, {&t[3]}, {1}};
    CHECK_OK(bst_low_rank_add(NULL, &tensors));
    for (int64_t r = 0; r < 5; r++)
        for (int64_t c = 0; c < 24; c++) CHECK(isfinite(number(&y, r, c)) == (r != 3 && c != 7));
    for (int i = 0; i < 4; i++) free(all[i]->data);
}

/* A row of x that all rows are. */
TEST(one_row_for_all) {
    matrix x = filled(xs, 6, 40, 0, 0, 1, 3), y = filled(ys[0], 6, 24, 0, 0, 1, 4),
           before = filled(befores[0], 6, 24, 0, 0, 1, 4);
    matrix a = filled(as[0], 8, 40, 0, 0, 0, 5), b = filled(bs[0], 24, 8, 0, 0, 0, 6);
    x.strides[0] = 0;
    DLTensor t[] = {tensor_of(&x), tensor_of(&y), tensor_of(&a), tensor_of(&b)};
    bst_low_rank_add_tensors tensors = {sizeof tensors, &t[0], {&t[1]}, {&t[2]}, {&t[3]}, {0.75}};
    CHECK_OK(bst_low_rank_add(NULL, &tensors));
    shape s = {6, 40, {24}, {8}, .layers = 1};
    compare_layer(&s, 0, &x, &y, &before, &a, &b, 0.75);
    tensors.scale[0] = 0; /* is no other number */
    memcpy(befores[0], ys[0], sizeof ys[0]);
    CHECK_OK(bst_low_rank_add(NULL, &tensors));
    CHECK(!memcmp(befores[0], ys[0], sizeof ys[0]));
}

TEST(errors_name_the_argument_and_write_nothing) {
    matrix x = filled(xs, 6, 8, 0, 0, 1, 3), y = filled(ys[0], 6, 16, 0, 0, 1, 0), narrow = part_of(&y, 0, 15);
    matrix other = filled(ys[1], 6, 8, 0, 0, 1, 0), over = part_of(&y, 8, 8);
    matrix a = filled(as[0], 4, 8, 0, 0, 0, 4), b = filled(bs[0], 16, 4, 0, 0, 0, 5),
           half = filled(as[1], 4, 8, 0, 0, 1, 6);
    matrix of_f16 = filled(as[2], 4, 8, 0, 0, 2, 7), b_1 = filled(bs[1], 8, 4, 0, 0, 0, 8);
    matrix spread = {as[0], {4, 8}, {16, 1}, 0, 0}, across = transposed(&y);
    DLTensor of_x = tensor_of(&x), of_y = tensor_of(&y), of_narrow = tensor_of(&narrow), of_other = tensor_of(&other);
    DLTensor of_a = tensor_of(&a), of_b = tensor_of(&b), of_half = tensor_of(&half), of_wrong = tensor_of(&of_f16);
    DLTensor of_b_1 = tensor_of(&b_1), of_spread = tensor_of(&spread), of_over = tensor_of(&over);
    DLTensor of_across = tensor_of(&across);
    const bst_low_rank_add_tensors good = {sizeof good, &of_x, {&of_y}, {&of_a}, {&of_b}, {1}};
    bst_low_rank_add_tensors t;
#define REFUSED(status, change, text)                   \
    t = good;                                           \
    change;                                             \
    CHECK_EQ_I(bst_low_rank_add(NULL, &t), status);     \
    CHECK_STR(bst_last_error(), "low_rank_add: " text); \
    for (int i = 0; i < 96; i++) CHECK(((uint16_t *)ys[0])[i] == 0xffff && ((uint16_t *)ys[1])[i] == 0xffff)
    REFUSED(BST_INVALID, t.size = 0, "tensors");
    REFUSED(BST_INVALID, t.x = NULL, "x is NULL");
    REFUSED(BST_INVALID, t.y[0] = NULL, "y_0 is NULL");
    REFUSED(BST_INVALID, t.b[0] = NULL, "b_0 is NULL");
    REFUSED(BST_INVALID, t.y[0] = &of_narrow, "b_0 has shape [16, 4]");
    REFUSED(BST_INVALID, t.a[0] = &of_y, "a_0 has shape [6, 16]");
    REFUSED(BST_INVALID, t.a[0] = &of_half, "b_0 is float32; bfloat16 is needed, the type of a_0");
    REFUSED(BST_INVALID, t.a[0] = &of_wrong, "a_0 is float16; bfloat16 is needed, the type of x, or float32");
    REFUSED(BST_INVALID, t.a[0] = &of_spread, "a_0, of shape [4, 8], is not contiguous");
    REFUSED(BST_INVALID, t.y[1] = &of_other, "a_1 is NULL; a tensor is needed with y_1");
    REFUSED(BST_INVALID, t.a[1] = &of_a, "a_1 is given, but y_1 is NULL");
    REFUSED(BST_INVALID, (t.y[1] = &of_other, t.a[1] = &of_half, t.b[1] = &of_b_1),
            "a_1 is bfloat16; float32 is needed");
    REFUSED(BST_INVALID, (t.y[2] = &of_over, t.a[2] = &of_a, t.b[2] = &of_b_1), "y_0 and y_2 share memory");
    REFUSED(BST_INVALID, (t.y[2] = &of_x, t.a[2] = &of_a, t.b[2] = &of_b_1), "y_2 and x share memory");
    REFUSED(BST_INVALID, t.y[0] = &of_across, "y_0 has shape");
    of_y.strides[0] = 0; /* all rows in one place */
    REFUSED(BST_INVALID, (void)0, "rows of y_0 lie over each other");
}

/* What models have: attention's three and the MLP's two and one, few rows; adapters of float32 and of x's type, wide
 * and narrow, and such as are read one by one. */
static void compile_calls(void) {
    static const int64_t columns[][LAYERS] = {{4096, 1024, 1024}, {12288, 12288, 0}, {4096, 0, 0}};
    for (int type = 0; type < 3; type++)
        for (int factor = 0; factor <= type; factor += type ? type : 1)
            for (int64_t rows = 1; rows <= 64; rows = rows < 8 ? 2 * rows : 8 * rows)
                for (int64_t rank = type == 2 ? 16 : 4; rank <= 64; rank *= 2)
                    for (int layers = 0; layers < 3; layers++) {
                        bst_shape s[1 + 3 * LAYERS];
                        const DLDataType types[] = {bst_test_types[type], bst_test_types[factor]};
                        bst_low_rank_add_tensors t = {sizeof t};
                        t.x = bst_device_tensor(s, types[0], 2, (const int64_t[]){rows, 4096});
                        for (int i = 0; i < LAYERS && columns[layers][i]; i++) {
                            int64_t n = columns[layers][i];
                            t.y[i] = bst_device_tensor(&s[1 + 3 * i], types[0], 2, (const int64_t[]){rows, n});
                            t.a[i] = bst_device_tensor(&s[2 + 3 * i], types[1], 2, (const int64_t[]){rank, 4096});
                            t.b[i] = bst_device_tensor(&s[3 + 3 * i], types[1], 2, (const int64_t[]){n, rank});
                            t.scale[i] = 2;
                        }
                        CHECK_OK(bst_low_rank_add(&bst_fake_exec, &t));
                        if (rank != 16 || layers) continue;
                        s[0].size[1] = 4095, s[2].size[1] = s[5].size[1] = s[8].size[1] = 4095;
                        for (int i = 0; i < 3; i++) s[2 + 3 * i].stride[0] = 4095;
                        CHECK_OK(bst_low_rank_add(&bst_fake_exec, &t));
                    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("low_rank_add", compile_calls); }

int main(void) {
    RUN(what_is_aligned);
    RUN(what_is_read_one_by_one);
    RUN(nothing_adds_nothing);
    RUN(infinities);
    RUN(one_row_for_all);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
