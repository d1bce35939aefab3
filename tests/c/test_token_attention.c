/* test_token_attention.c - attention of one query a row through the C API: values against plain loops in double, in
 * each type, with gaps, shared keys, keys that are not seen, in parts; errors; its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "core/cpu_kernel.h"

enum { MOST = 1 << 19, MOST_DIM = 256, MOST_KEYS = 2048 };

#ifdef BST_EMULATE
static const bool on_gpu = true;
#else
static const bool on_gpu = false;
#endif

static float qs[MOST], ks[MOST], vs[MOST], ys[MOST], biases[MOST];
static int64_t shapes[5][4], strides[5][4];
enum { Q, K, V, BIAS, Y };

typedef struct problem {
    const char *name;
    int64_t rows, heads, groups, keys, dim, gap;
    double scale; /* 0: the usual */
    int unseen;   /* of the first so many keys, and each seventh behind them; all of the last row's where negative */
} problem;

static double unit_of(int type) { return type == 0 ? 0x1p-24 : type == 1 ? 0x1p-8 : 0x1p-11; }

static float number(const float *data, int64_t at, int type) {
    float v;
    bst_load(&v, (const char *)data + at * (type ? 2 : 4), (bst_dtype)type, 1);
    return v;
}

/* Numbers up to 2, NaN in the gap that is behind each row of the last dimension; of seed 0 all is NaN. */
static DLTensor filled(int place, float *data, int dims, const int64_t *shape, int64_t gap, int type, unsigned seed) {
    int64_t apart = shape[dims - 1] + gap, count = 1;
    memcpy(shapes[place], shape, (size_t)dims * sizeof *shape);
    strides[place][dims - 1] = 1;
    for (int i = dims - 2; i >= 0; i--) strides[place][i] = apart, apart *= shape[i], count *= shape[i];
    if (count * (shape[dims - 1] + gap) > MOST) FAILED("the test's arrays are too small");
    memset(data, 0xff, MOST * sizeof *data);
    for (int64_t r = 0; seed && r < count; r++) {
        float row[MOST_KEYS];
        bst_fill(row, shape[dims - 1], seed + (unsigned)r * 977u, 2);
        bst_store((char *)data + r * (shape[dims - 1] + gap) * (type ? 2 : 4), row, (bst_dtype)type, shape[dims - 1]);
    }
    return bst_tensor(data, dims, shapes[place], strides[place], bst_test_types[type]);
}

static bool is_unseen(const problem *p, int64_t row, int64_t key) {
    return (p->unseen < 0 && row + 1 == p->rows) || key < p->unseen || (p->unseen > 0 && key % 7 == 6);
}

/* Scores are off by a rounding a term at most, which is what weights are off by, relatively; tensor cores multiply
 * weights that are rounded to 16 bits. */
static void check(const problem *p, int type) {
    const int64_t dim = p->dim, keys = p->keys, each = p->heads / p->groups;
    const double scale = p->scale != 0 ? p->scale : 1 / sqrt((double)dim), step = 0x1p-23;
    const double rounded = on_gpu ? unit_of(type) : 0, least = on_gpu && type == 2 ? 0x1p-25 : 0;
    DLTensor t[] = {
        filled(Q, qs, 3, (const int64_t[]){p->rows, p->heads, dim}, p->gap, type, 1),
        filled(K, ks, 4, (const int64_t[]){p->rows, p->groups, keys, dim}, p->gap, type, 2),
        filled(V, vs, 4, (const int64_t[]){p->rows, p->groups, keys, dim}, p->gap, type, 3),
        filled(BIAS, biases, 2, (const int64_t[]){p->rows, keys}, p->gap, type, 4),
        filled(Y, ys, 3, (const int64_t[]){p->rows, p->heads, dim}, 0, type, 0),
    };
    const float nothing = -INFINITY, nan = NAN;
    for (int64_t r = 0; p->unseen && r < p->rows; r++)
        for (int64_t j = 0; j < keys; j++) {
            if (!is_unseen(p, r, j)) continue;
            bst_store((char *)biases + (r * strides[BIAS][0] + j) * (type ? 2 : 4), &nothing, (bst_dtype)type, 1);
            for (int64_t g = 0; g < p->groups; g++) { /* what is there may be anything */
                int64_t at = r * strides[K][0] + g * strides[K][1] + j * strides[K][2];
                bst_store((char *)ks + at * (type ? 2 : 4), &nan, (bst_dtype)type, 1);
                bst_store((char *)vs + at * (type ? 2 : 4), &nan, (bst_dtype)type, 1);
            }
        }
    bst_token_attention_tensors given = {sizeof given, &t[Q], &t[K], &t[V], p->unseen ? &t[BIAS] : NULL, &t[Y]};
    bst_token_attention_options options = {sizeof options, p->scale};
    CHECK_OK(bst_token_attention(NULL, &given, &options));
    double *scores = calloc((size_t)(2 * keys + 2), sizeof *scores), *off = scores + keys + 1;
    if (!scores) abort();
    int64_t wrong = 0;
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t h = 0; h < p->heads; h++) {
            const int64_t g = h / each;
            double top = -INFINITY, total = 0, worst = 0;
            for (int64_t j = 0; j < keys; j++) {
                double sum = 0, size = 0, bias = p->unseen ? (double)number(biases, r * strides[BIAS][0] + j, type) : 0;
                for (int64_t e = 0; e < dim && !is_unseen(p, r, j); e++) {
                    double product =
                        (double)number(qs, r * strides[Q][0] + h * strides[Q][1] + e, type) *
                        (double)number(ks, r * strides[K][0] + g * strides[K][1] + j * strides[K][2] + e, type);
                    sum += product, size += fabs(product);
                }
                scores[j] = scale * sum + bias;
                off[j] = (double)(dim + 4) * step * (scale * size + (bias > -INFINITY ? fabs(bias) : 0));
                top = fmax(top, scores[j]), worst = fmax(worst, off[j]);
            }
            for (int64_t j = 0; j < keys; j++)
                if (scores[j] > -INFINITY) total += exp(scores[j] - top);
            for (int64_t e = 0; e < dim; e++) {
                double want = 0, error = 0;
                for (int64_t j = 0; j < keys; j++) {
                    if (scores[j] == -INFINITY) continue;
                    const double weight = exp(scores[j] - top) / total;
                    const double v =
                        (double)number(vs, r * strides[V][0] + g * strides[V][1] + j * strides[V][2] + e, type);
                    want += weight * v;
                    error += fabs(v) * (least + weight * (expm1(2 * worst + (double)(keys + 16) * step +
                                                                4 * step * (top - scores[j])) +
                                                          rounded));
                }
                const double got = (double)number(ys, (r * p->heads + h) * dim + e, type);
                wrong += !(fabs(got - want) <= error + unit_of(type) * fabs(want) + 0x1p-25);
            }
        }
    free(scores);
    if (wrong) FAILED("%s of type %d: %d wrong", p->name, type, (int)wrong);
    const unsigned char *end = (unsigned char *)ys + p->rows * p->heads * dim * (type ? 2 : 4);
    CHECK(end[0] == 0xff && end[1] == 0xff);
}

static const problem problems[] = {
    {"a head each", 3, 4, 4, 37, 64, 0, 0, 0},
    {"shared keys", 2, 8, 2, 70, 128, 8, 0, 3},
    {"seven heads share", 2, 14, 2, 33, 64, 0, 0.25, 2},
    {"more heads than a block has", 1, 22, 2, 40, 64, 0, 0, 1},
    {"wide heads", 2, 6, 1, 50, 256, 8, 0, 5},
    {"heads of 96", 1, 4, 2, 21, 96, 0, 0, 0},
    {"heads of 40", 2, 4, 2, 90, 40, 8, 0, 2},
    {"one key", 3, 2, 2, 1, 64, 0, 0, 0},
    {"in parts", 1, 2, 1, 1100, 64, 0, 0, 600}, /* the first parts see nothing */
    {"a row that sees nothing", 2, 4, 2, 40, 64, 0, 0, -1},
};

/* Which CUDA leaves to others. */
static const problem odd[] = {
    {"odd heads, not aligned", 2, 3, 1, 19, 37, 1, 0, 2},
    {"heads of one", 1, 2, 1, 9, 1, 0, 0, 0},
};

TEST(values) {
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++)
        for (int type = on_gpu ? 1 : 0; type < 3; type++) check(&problems[i], type);
}

TEST(heads_of_any_size) {
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int type = 0; type < 3 && !on_gpu; type++) check(&odd[i], type);
}

TEST(no_keys_and_nothing_at_all) {
    const problem none = {"no keys", 2, 4, 2, 0, 64, 0, 0, 0}, nobody = {"no rows", 0, 4, 2, 5, 64, 0, 0, 0};
    check(&none, 1);
    check(&nobody, 1);
}

TEST(errors_name_the_argument_and_write_nothing) {
    DLTensor q = filled(Q, qs, 3, (const int64_t[]){2, 4, 64}, 0, 1, 1);
    DLTensor k = filled(K, ks, 4, (const int64_t[]){2, 2, 10, 64}, 0, 1, 2);
    DLTensor v = filled(V, vs, 4, (const int64_t[]){2, 2, 10, 64}, 0, 1, 3);
    DLTensor bias = filled(BIAS, biases, 2, (const int64_t[]){2, 10}, 0, 1, 4);
    DLTensor y = filled(Y, ys, 3, (const int64_t[]){2, 4, 64}, 0, 1, 0);
    const bst_token_attention_tensors good = {sizeof good, &q, &k, &v, &bias, &y};
    bst_token_attention_tensors t;
    bst_token_attention_options options = {sizeof options, -1};
#define REFUSED(change, text)                                     \
    t = good;                                                     \
    change;                                                       \
    CHECK_EQ_I(bst_token_attention(NULL, &t, NULL), BST_INVALID); \
    CHECK_STR(bst_last_error(), "token_attention: " text);        \
    for (int i = 0; i < 512; i++) CHECK(((uint16_t *)ys)[i] == 0xffff)
    REFUSED(t.size = 0, "tensors");
    REFUSED(t.q = NULL, "q is NULL");
    REFUSED(t.v = NULL, "v is NULL");
    REFUSED(t.y = NULL, "y is NULL");
    REFUSED(t.k = &q, "k has shape [2, 4, 64]; 4 dimensions are needed");
    REFUSED(t.bias = &y, "bias has shape [2, 4, 64]; 2 dimensions are needed");
    REFUSED(t.y = &q, "y and q share memory");
    DLTensor of_f16 = v, narrow = bias, three = k, of_three = v;
    int64_t nine[] = {2, 9}, threes[] = {2, 3, 10, 64};
    of_f16.dtype = bst_test_types[2], narrow.shape = nine, three.shape = of_three.shape = threes;
    REFUSED(t.v = &of_f16, "v is float16; bfloat16 is needed, the type of q");
    REFUSED(t.bias = &narrow, "bias has shape [2, 9]");
    REFUSED((t.k = &three, t.v = &of_three), "q has 4 heads and k 3; a multiple is needed");
    t = good;
    CHECK_EQ_I(bst_token_attention(NULL, &t, &options), BST_INVALID);
    CHECK_STR(bst_last_error(), "token_attention: scale is -1");
}

/* What models have, in one part and in several. */
static void compile_calls(void) {
    static const int64_t heads[][3] = {{16, 8, 128}, {14, 2, 64}, {8, 4, 256}, {32, 32, 80}};
    for (int type = 1; type < 3; type++)
        for (int bias = 0; bias < 2; bias++)
            for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
                for (int64_t keys = 128; keys < 5000; keys += 4096) {
                    const int64_t h = heads[i][0], g = heads[i][1], dim = heads[i][2];
                    bst_shape s[5];
                    bst_token_attention_tensors t = {sizeof t};
                    const DLDataType of = bst_test_types[type];
                    t.q = bst_device_tensor(&s[Q], of, 3, (const int64_t[]){2, h, dim});
                    t.k = bst_device_tensor(&s[K], of, 4, (const int64_t[]){2, g, keys, dim});
                    t.v = bst_device_tensor(&s[V], of, 4, (const int64_t[]){2, g, keys, dim});
                    t.bias = bias ? bst_device_tensor(&s[BIAS], of, 2, (const int64_t[]){2, keys}) : NULL;
                    t.y = bst_device_tensor(&s[Y], of, 3, (const int64_t[]){2, h, dim});
                    CHECK_OK(bst_token_attention(&bst_fake_exec, &t, NULL));
                }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("token_attention", compile_calls); }

int main(void) {
    RUN(values);
    RUN(heads_of_any_size);
    RUN(no_keys_and_nothing_at_all);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
