/* test_low_rank_layers.c - linear layers of one input, through the C API: against float64 in each type, for one to
 * three layers, with biases and without, rows that are aligned and that are not; errors; its kernels on every chip. */
#include "chips.h"
#include "matrices.h"

enum { LAYERS = 3 };
static float xs[MOST], ys[LAYERS][MOST], firsts[LAYERS][MOST], weights[LAYERS][MOST], biases[LAYERS][MOST];
static float as[LAYERS][MOST], bs[LAYERS][MOST];

typedef struct shape {
    int64_t rows, width, columns[LAYERS];
    int64_t gap, at; /* behind each row, and before the first of each tensor */
    unsigned biases; /* a bit a layer */
    int64_t ranks[LAYERS];
    bool wide; /* adapters are of float32 */
} shape;

typedef struct adapter {
    matrix a, b;
    double scale;
} adapter;

/* A sum of n terms in float32 is off by n roundings of their sizes at most; y is rounded once, and where it is a
 * product of its own the bias before that, and y before what an adapter adds. */
static void compare_layer(const matrix *y, const matrix *x, const matrix *weight, const matrix *bias,
                          const adapter *of) {
    const double unit = y->type == 0 ? 0x1p-24 : y->type == 1 ? 0x1p-8 : 0x1p-11;
    int64_t wrong = 0;
    for (int64_t row = 0; row < y->shape[0]; row++)
        for (int64_t c = 0; c < y->shape[1]; c++) {
            double sum = bias ? number(bias, 0, c) : 0, size = fabs(sum);
            for (int64_t k = 0; k < x->shape[1]; k++) {
                double product = number(x, row, k) * number(weight, c, k);
                sum += product, size += fabs(product);
            }
            const double before = fabs(sum);
            const int64_t rank = of ? of->a.shape[0] : 0;
            for (int64_t r = 0; r < rank; r++) {
                double thin = 0, thin_size = 0, factor = of->scale * number(&of->b, c, r);
                for (int64_t k = 0; k < x->shape[1]; k++) {
                    double product = number(x, row, k) * number(&of->a, r, k);
                    thin += product, thin_size += fabs(product);
                }
                sum += factor * thin, size += fabs(factor) * thin_size;
            }
            double most = (rank ? unit * before : 0) + (double)(x->shape[1] + rank + 2) * 0x1p-23 * size +
                          1.01 * unit * fabs(sum) + 0x1p-25;
            wrong += !(fabs(number(y, row, c) - sum) <= most);
        }
    if (wrong)
        FAILED("[%d, %d] of type %d, over %d: %d wrong", (int)y->shape[0], (int)y->shape[1], y->type, (int)x->shape[1],
               (int)wrong);
}

static void check_type(const shape *s, int type) {
    matrix x = filled(xs, s->rows, s->width, s->gap, s->at, type, 3), y[LAYERS], weight[LAYERS], bias[LAYERS];
    adapter of[LAYERS];
    DLTensor of_x = tensor_of(&x), t[LAYERS][5];
    bst_low_rank_layers_tensors tensors = {sizeof tensors, &of_x};
    int64_t size[LAYERS];
    for (int again = 0; again < 2; again++) {
        for (int i = 0; i < LAYERS; i++) {
            if (i && !s->columns[i]) continue;
            y[i] = filled(ys[i], s->rows, s->columns[i], s->gap, s->at, type, 0);
            weight[i] = filled(weights[i], s->columns[i], s->width, s->gap, s->at, type, 5 + (unsigned)i);
            bias[i] = filled(biases[i], 1, s->columns[i], 0, s->at, type, 9 + (unsigned)i);
            t[i][0] = tensor_of(&y[i]), t[i][1] = tensor_of(&weight[i]), t[i][2] = tensor_of(&bias[i]);
            t[i][2].ndim = 1, size[i] = s->columns[i], t[i][2].shape = &size[i], t[i][2].strides = NULL;
            tensors.y[i] = &t[i][0], tensors.weight[i] = &t[i][1];
            tensors.bias[i] = s->biases >> i & 1 ? &t[i][2] : NULL;
            if (!s->ranks[i]) continue;
            const int factor = s->wide ? 0 : type;
            of[i].a = filled(as[i], s->ranks[i], s->width, 0, s->at, factor, 13 + (unsigned)i);
            of[i].b = filled(bs[i], s->columns[i], s->ranks[i], 0, s->at, factor, 17 + (unsigned)i);
            of[i].scale = 0.5 + i, t[i][3] = tensor_of(&of[i].a), t[i][4] = tensor_of(&of[i].b);
            tensors.a[i] = &t[i][3], tensors.b[i] = &t[i][4], tensors.scale[i] = of[i].scale;
        }
        CHECK_OK(bst_low_rank_layers(NULL, &tensors));
        for (int i = 0; i < LAYERS; i++) {
            if (again && tensors.y[i]) CHECK(!memcmp(firsts[i], ys[i], sizeof firsts[i]));
            memcpy(firsts[i], ys[i], sizeof firsts[i]);
        }
    }
    for (int i = 0; i < LAYERS; i++) {
        if (!tensors.y[i]) continue;
        compare_layer(&y[i], &x, &weight[i], tensors.bias[i] ? &bias[i] : NULL, s->ranks[i] ? &of[i] : NULL);
        /* All around a result's rows is as it was. */
        const size_t each = type ? 2 : 4;
        int64_t beside = 0;
        for (int64_t e = 0; e < MOST; e++) {
            const int64_t stride = y[i].strides[0] ? y[i].strides[0] : 1, at = e - s->at, row = at / stride;
            bool inside = at >= 0 && row < s->rows && at % stride < s->columns[i];
            for (size_t b = 0; b < each && !inside; b++)
                beside += ((const unsigned char *)ys[i])[(size_t)e * each + b] != 0xff;
        }
        CHECK_EQ_I(beside, 0);
    }
}

static void check(shape s) {
    for (int type = 0; type < 3; type++) check_type(&s, type);
}

/* Each number of tiles of rows; columns that fill blocks and that do not; widths of less than a step of one warp, and
 * of more than all have in flight. */
TEST(what_is_aligned) {
    check((shape){1, 64, {48}, .gap = 0});
    check((shape){8, 1032, {64, 24, 8}, .gap = 8, .at = 8, .biases = 5});
    check((shape){11, 2048, {40, 16}, .gap = 0, .biases = 3});
    check((shape){16, 8, {17, 5, 33}, .gap = 0});
    check((shape){20, 264, {130, 16, 16}, .gap = 16, .biases = 2});
    check((shape){32, 520, {64}, .gap = 0, .biases = 1});
}

/* Adapters that are added within the launch: shares of the width of which a cluster's last blocks have nothing, a
 * layer without one beside others, each number of tiles, ranks from a vector to all there is room for. */
TEST(adapters) {
    check((shape){8, 1032, {64, 24, 8}, .gap = 8, .at = 8, .biases = 5, .ranks = {16, 8, 24}, .wide = true});
    check((shape){3, 264, {130, 40}, .ranks = {0, 16}});
    check((shape){1, 24, {17, 5, 33}, .biases = 2, .ranks = {4, 0, 12}, .wide = true});
    check((shape){8, 520, {24}, .ranks = {64}});
    check((shape){11, 2056, {40, 16}, .ranks = {32, 8}, .wide = true});
    check((shape){32, 256, {144}, .gap = 8, .ranks = {16}, .wide = true});
}

/* Those that low_rank_add adds: of ranks that do not fill vectors or are too large, unaligned, of more rows. */
TEST(adapters_that_are_added_behind) {
    check((shape){8, 64, {48, 16}, .ranks = {3, 16}, .wide = true});
    check((shape){8, 64, {16}, .ranks = {72}});
    check((shape){32, 64, {16}, .ranks = {32}, .wide = true});
    check((shape){33, 64, {48, 8}, .biases = 1, .ranks = {8, 8}, .wide = true});
    check((shape){4, 37, {19, 5, 3}, .biases = 7, .ranks = {2, 0, 4}});
    check((shape){4, 64, {16}, .at = 1, .ranks = {8}, .wide = true});
    check((shape){4, 0, {16}, .ranks = {8}});
    check((shape){0, 40, {16, 8}, .ranks = {8, 4}});
}

TEST(what_is_a_product_of_its_own) {
    check((shape){33, 64, {48, 8}, .gap = 0, .biases = 1});
    check((shape){4, 37, {19, 5, 3}, .gap = 0, .biases = 7});
    check((shape){4, 64, {16, 8}, .gap = 3});
    check((shape){4, 64, {16}, .gap = 0, .at = 1, .biases = 1});
}

TEST(nothing) {
    check((shape){0, 40, {16, 8}, .gap = 0});
    check((shape){3, 0, {16, 8}, .gap = 0, .biases = 2});
    check((shape){3, 40, {0, 8}, .gap = 0});
    check((shape){3, 40, {8, 0, 16}, .gap = 0});
}

/* What is infinite stays in its row and its column, and rows behind the last one are not read. */
TEST(infinities) {
    matrix x = filled(xs, 5, 48, 0, 0, 1, 3), y = filled(ys[0], 5, 24, 0, 0, 1, 0);
    matrix weight = filled(weights[0], 24, 48, 0, 0, 1, 5);
    matrix *all[] = {&x, &y, &weight};
    const float infinite = INFINITY;
    bst_store((uint16_t *)xs + 3 * 48 + 5, &infinite, BST_BF16, 1);
    bst_store((uint16_t *)weights[0] + 7 * 48 + 2, &infinite, BST_BF16, 1);
    DLTensor t[3];
    for (int i = 0; i < 3; i++) { /* in memory of their own, where a sanitizer looks */
        size_t bytes = (size_t)(all[i]->shape[0] * all[i]->shape[1]) * 2;
        float *copy = malloc(bytes);
        CHECK(copy != NULL);
        if (!copy) return;
        all[i]->data = memcpy(copy, all[i]->data, bytes);
        t[i] = tensor_of(all[i]);
    }
    bst_low_rank_layers_tensors tensors = {sizeof tensors, &t[0], {&t[2]}, {NULL}, {&t[1]}};
    CHECK_OK(bst_low_rank_layers(NULL, &tensors));
    for (int64_t r = 0; r < 5; r++)
        for (int64_t c = 0; c < 24; c++) CHECK(isfinite(number(&y, r, c)) == (r != 3 && c != 7));
    for (int i = 0; i < 3; i++) free(all[i]->data);
}

TEST(errors_name_the_argument_and_write_nothing) {
    matrix x = filled(xs, 6, 8, 0, 0, 1, 3), y = filled(ys[0], 6, 16, 0, 0, 1, 0), narrow = part_of(&y, 0, 15);
    matrix weight = filled(weights[0], 16, 8, 0, 0, 1, 4), of_f16 = filled(weights[1], 16, 8, 0, 0, 2, 5);
    matrix other = filled(ys[1], 6, 16, 0, 0, 1, 0), bias = filled(biases[0], 1, 16, 0, 0, 1, 6);
    DLTensor of_x = tensor_of(&x), of_y = tensor_of(&y), of_narrow = tensor_of(&narrow), of_w = tensor_of(&weight);
    DLTensor wrong = tensor_of(&of_f16), of_other = tensor_of(&other), of_bias = tensor_of(&bias);
    matrix a = filled(as[0], 2, 8, 0, 0, 0, 6), b = filled(bs[0], 16, 2, 0, 0, 0, 7);
    matrix halves = filled(bs[1], 16, 16, 0, 0, 2, 7);
    DLTensor of_a = tensor_of(&a), of_b = tensor_of(&b), of_halves = tensor_of(&halves);
    const bst_low_rank_layers_tensors good = {sizeof good, &of_x, {&of_w}, {NULL}, {&of_y}};
    int64_t sixteen = 16;
    of_bias.ndim = 1, of_bias.shape = &sixteen, of_bias.strides = NULL;
    bst_low_rank_layers_tensors t;
#define REFUSED(change, text)                               \
    t = good;                                               \
    change;                                                 \
    CHECK_EQ_I(bst_low_rank_layers(NULL, &t), BST_INVALID); \
    CHECK_STR(bst_last_error(), "low_rank_layers: " text);  \
    for (int i = 0; i < 96; i++) CHECK(((uint16_t *)ys[0])[i] == 0xffff && ((uint16_t *)ys[1])[i] == 0xffff)
    REFUSED(t.size = 0, "tensors");
    REFUSED(t.x = NULL, "x is NULL");
    REFUSED(t.weight[0] = NULL, "weight_0 is NULL");
    REFUSED(t.y[0] = NULL, "y_0 is NULL");
    REFUSED(t.y[0] = &of_narrow, "y_0 has shape [6, 15]");
    REFUSED(t.weight[0] = &wrong, "weight_0 is float16; bfloat16 is needed, the type of x");
    REFUSED(t.weight[1] = &of_w, "y_1 is NULL; a tensor is needed with weight_1");
    REFUSED(t.y[1] = &of_other, "y_1 is given, but weight_1 is NULL");
    REFUSED(t.bias[1] = &of_bias, "bias_1 is given, but weight_1 is NULL");
    REFUSED((t.weight[1] = &of_w, t.y[1] = &of_y), "y_0 and y_1 share memory");
    REFUSED(t.a[0] = &of_a, "b_0 is NULL; a tensor is needed with a_0");
    REFUSED((t.a[0] = &of_a, t.b[0] = &of_x), "b_0 has shape [6, 8]");
    REFUSED((t.a[1] = &of_a, t.b[1] = &of_b), "a_1 is given, but weight_1 is NULL");
    REFUSED((t.a[0] = &wrong, t.b[0] = &of_halves), "a_0 is float16; bfloat16 is needed, the type of x, or float32");
    of_x.strides[0] = 0; /* all rows in one place */
    CHECK_EQ_I(bst_low_rank_layers(NULL, &good), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "low_rank_layers: the rows of x overlap");
}

/* What models have: attention's three, the MLP's two and one; each number of tiles of rows. rank: of adapters, 0 for
 * none. */
static void compile_layers(int64_t rank, int factor) {
    static const int64_t columns[][LAYERS] = {{4096, 1024, 1024}, {12288, 12288, 0}, {4096, 0, 0}};
    for (int type = 1; type < 3; type++)
        for (int64_t rows = 8; rows <= 32; rows *= 2)
            for (int layers = 0; layers < 3; layers++) {
                bst_shape s[1 + 4 * LAYERS];
                bst_low_rank_layers_tensors t = {sizeof t};
                t.x = bst_device_tensor(s, bst_test_types[type], 2, (const int64_t[]){rows, 4096});
                for (int i = 0; i < LAYERS && columns[layers][i]; i++) {
                    const int64_t n = columns[layers][i], sizes[][2] = {{n, 4096}, {rows, n}, {rank, 4096}, {n, rank}};
                    const DLDataType of = bst_test_types[type], of_factor = bst_test_types[factor ? type : 0];
                    t.weight[i] = bst_device_tensor(&s[1 + 4 * i], of, 2, sizes[0]);
                    t.y[i] = bst_device_tensor(&s[2 + 4 * i], of, 2, sizes[1]);
                    if (!rank) continue;
                    t.a[i] = bst_device_tensor(&s[3 + 4 * i], of_factor, 2, sizes[2]);
                    t.b[i] = bst_device_tensor(&s[4 + 4 * i], of_factor, 2, sizes[3]);
                }
                CHECK_OK(bst_low_rank_layers(&bst_fake_exec, &t));
            }
}

static void compile_calls(void) {
    compile_layers(0, 0);
    for (int64_t rank = 8; rank <= 64; rank *= 2)
        for (int factor = 0; factor < 2; factor++) compile_layers(rank, factor);
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("low_rank_layers", compile_calls); }

int main(void) {
    RUN(what_is_aligned);
    RUN(adapters);
    RUN(adapters_that_are_added_behind);
    RUN(what_is_a_product_of_its_own);
    RUN(nothing);
    RUN(infinities);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
