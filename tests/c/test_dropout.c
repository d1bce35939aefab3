/* test_dropout.c - dropout through the C API: to the bit what random bits of Philox written out once more say, in each
 * type, layout and place; statistics; errors; its kernel on every chip. */
#include <math.h>

#include "chips.h"
#include "core/cpu_kernel.h"

enum { MOST = 1 << 16 };
static float from[MOST + 8], onto[MOST + 8], made[MOST + 8];
static int64_t seed[2] = {INT64_C(0x123456789abcdef), -INT64_C(0x7654321fedcba98)};
static int64_t two[] = {2};

static uint32_t word_of(int64_t e) {
    uint32_t x[4] = {(uint32_t)(e / 4), (uint32_t)(e / 4 >> 32), (uint32_t)seed[1],
                     (uint32_t)((uint64_t)seed[1] >> 32)};
    uint32_t key[2] = {(uint32_t)seed[0], (uint32_t)((uint64_t)seed[0] >> 32)};
    for (uint32_t round = 0; round < 7; round++) {
        uint64_t a = UINT64_C(0xd2511f53) * x[0], b = UINT64_C(0xcd9e8d57) * x[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ x[1] ^ (key[0] + round * 0x9e3779b9u), (uint32_t)b,
                            (uint32_t)(a >> 32) ^ x[3] ^ (key[1] + round * 0xbb67ae85u), (uint32_t)a};
        memcpy(x, next, sizeof x);
    }
    return x[e % 4];
}

static float number(const void *base, int64_t at, int type) {
    if (type == 0) return ((const float *)base)[at];
    uint16_t half = ((const uint16_t *)base)[at];
    return type == 1 ? bst_from_bf16(half) : bst_from_f16(half);
}

static float rounded(float value, int type) {
    if (type == 0) return value;
    return type == 1 ? bst_from_bf16(bst_to_bf16(value)) : bst_from_f16(bst_to_f16(value));
}

/* A matrix whose rows are `pitch` elements apart and begin `at` elements into the memory. */
static void check(int64_t rows, int64_t columns, int64_t pitch, int64_t at, int type, bool add, double p) {
    int64_t shape[] = {rows, columns}, strides[] = {pitch, 1};
    int size = type ? 2 : 4;
    bst_fill(from, MOST, 3, 4);
    bst_fill(onto, MOST, 4, 4);
    if (type) { /* in place, from the front on */
        for (int64_t i = 0; i < MOST; i++) {
            float x = from[i], y = onto[i];
            bst_store((uint16_t *)from + i, &x, (bst_dtype)type, 1);
            bst_store((uint16_t *)onto + i, &y, (bst_dtype)type, 1);
        }
    }
    DLTensor x = bst_tensor((char *)from + at * size, 2, shape, strides, bst_test_types[type]);
    DLTensor addend = bst_tensor((char *)onto + at * size, 2, shape, strides, bst_test_types[type]);
    DLTensor y = bst_tensor((char *)made + at * size, 2, shape, strides, bst_test_types[type]);
    DLTensor s = bst_tensor(seed, 1, two, NULL, bst_test_i64);
    memset(made, 0xff, sizeof made);
    CHECK_OK(bst_dropout(NULL, &x, &s, add ? &addend : NULL, p, &y));
    int64_t wrong = 0, beside = 0;
    for (int64_t i = 0; i < rows * pitch + 8; i++) {
        int64_t row = (i - at) / pitch, column = (i - at) % pitch;
        if (i < at || row >= rows || column >= columns) {
            beside += memcmp((char *)made + i * size, "\xff\xff\xff\xff", (size_t)size) != 0;
            continue;
        }
        double bits = word_of(row * columns + column);
        float factor = bits < floor(p * 0x1p32 + 0.5) ? 0.0f : p < 1 ? (float)(1 / (1 - p)) : 0.0f;
        volatile float product = number(from, i, type) * factor;
        float want = add ? product + number(onto, i, type) : product;
        wrong += number(made, i, type) != rounded(want, type);
    }
    if (wrong || beside)
        FAILED("%d x %d, type %d, p %g: %d wrong, %d written beside", (int)rows, (int)columns, type, p, (int)wrong,
               (int)beside);
    if (!rows) return;
    /* In the place of x, or of what it is added to. */
    CHECK_OK(bst_dropout(NULL, &x, &s, add ? &addend : NULL, p, add ? &addend : &x));
    CHECK(memcmp((char *)(add ? onto : from) + at * size, (char *)made + at * size, (size_t)(columns * size)) == 0);
}

/* Whole vectors; a part of one at the end; an odd number, at an address that allows single elements alone; rows with
 * gaps, of whole vectors, of four elements and of neither; one element; more than a block of threads. */
TEST(values_to_the_bit) {
    for (int type = 0; type < 3; type++) {
        for (int add = 0; add < 2; add++) {
            check(4, 64, 64, 0, type, add, 0.3);
            check(3, 37, 37, 0, type, add, 0.05);
            check(5, 43, 43, 1, type, add, 0.5);
            check(5, 64, 72, 0, type, add, 0.3);
            check(5, 12, 20, 0, type, add, 0.3);
            check(5, 33, 40, 1, type, add, 0.3);
            check(1, 1, 1, 0, type, add, 0.3);
            check(9, 1025, 1025, 0, type, add, 0.3);
            check(3, 2056, 2064, 0, type, add, 0.3);
        }
    }
}

TEST(the_ends_of_probabilities) {
    check(4, 64, 64, 0, 0, false, 0);
    check(4, 64, 64, 0, 1, false, 1);
    check(4, 64, 64, 0, 2, true, 1);
    check(4, 64, 64, 0, 0, false, 1 - 0x1p-53);
}

TEST(nothing_is_no_error) { check(0, 64, 64, 0, 1, false, 0.5); }

/* As torch has it: what is lost is multiplied with 0, which makes NaN of Inf and keeps NaN. */
TEST(infinities) {
    float x[64], y[64];
    int64_t shape[] = {64};
    for (int i = 0; i < 64; i++) x[i] = i % 2 ? INFINITY : NAN;
    DLTensor tx = bst_f32(x, 1, shape), ty = bst_f32(y, 1, shape), s = bst_tensor(seed, 1, two, NULL, bst_test_i64);
    CHECK_OK(bst_dropout(NULL, &tx, &s, NULL, 0.5, &ty));
    for (int i = 0; i < 64; i++) CHECK(i % 2 && word_of(i) >= 0x80000000u ? y[i] == INFINITY : isnan(y[i]));
}

/* The share of what is kept is binomial: within five standard deviations. So is that of neighbours that are both kept,
 * of all eight distances within two counters; and of the same element under two seeds that differ in one bit. */
TEST(independent_of_neighbours_and_seeds) {
    enum { N = 1 << 15 };
    static float other[N];
    int64_t shape[] = {N};
    for (int i = 0; i < N; i++) from[i] = 1;
    DLTensor x = bst_f32(from, 1, shape), y = bst_f32(made, 1, shape), s = bst_tensor(seed, 1, two, NULL, bst_test_i64);
    DLTensor z = bst_f32(other, 1, shape);
    const double p = 0.3, q = 1 - p;
    CHECK_OK(bst_dropout(NULL, &x, &s, NULL, p, &y));
    for (int distance = 0; distance < 9; distance++) {
        int64_t both = 0;
        for (int i = 0; i + distance < N; i++) both += made[i] != 0 && made[i + distance] != 0;
        double share = distance ? q * q : q, count = N - distance;
        CHECK_CLOSE((double)both / count, share, 5 * sqrt(share * (1 - share) / count) * (distance ? 1.4 : 1));
    }
    for (int word = 0; word < 2; word++) {
        for (int bit = 0; bit < 64; bit += 21) {
            seed[word] ^= (int64_t)(UINT64_C(1) << bit);
            CHECK_OK(bst_dropout(NULL, &x, &s, NULL, p, &z));
            seed[word] ^= (int64_t)(UINT64_C(1) << bit);
            int64_t both = 0;
            for (int i = 0; i < N; i++) both += made[i] != 0 && other[i] != 0;
            CHECK_CLOSE((double)both / N, q * q, 5 * sqrt(q * q * (1 - q * q) / N));
        }
    }
}

TEST(errors_name_the_argument_and_write_nothing) {
    int64_t shape[] = {4, 32}, narrow[] = {4, 31};
    DLTensor x = bst_f32(from, 2, shape), y = bst_f32(made, 2, shape), other = bst_f32(onto, 2, narrow);
    DLTensor s = bst_tensor(seed, 1, two, NULL, bst_test_i64), three = bst_tensor(seed, 1, narrow, NULL, bst_test_i64);
    memset(made, 0, sizeof made);
#define REFUSED(call, text)                        \
    CHECK_EQ_I(call, BST_INVALID);                 \
    CHECK_STR(bst_last_error(), "dropout: " text); \
    for (int i = 0; i < 128; i++) CHECK(made[i] == 0)
    REFUSED(bst_dropout(NULL, &x, &s, NULL, 1.5, &y), "p is 1.5; a probability, 0 to 1, is needed");
    REFUSED(bst_dropout(NULL, &x, &s, NULL, NAN, &y), "p is nan");
    REFUSED(bst_dropout(NULL, NULL, &s, NULL, 0.5, &y), "x is NULL");
    REFUSED(bst_dropout(NULL, &x, NULL, NULL, 0.5, &y), "seed is NULL");
    CHECK_EQ_I(bst_dropout(NULL, &x, &x, NULL, 0.5, &y), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "dropout: seed has elements of type float32; int64 is needed");
    REFUSED(bst_dropout(NULL, &x, &three, NULL, 0.5, &y), "seed has shape [4]");
    REFUSED(bst_dropout(NULL, &x, &s, &other, 0.5, &y), "addend has shape [4, 31]");
    CHECK_EQ_I(bst_dropout(NULL, &x, &s, NULL, 0.5, &other), BST_INVALID);
    CHECK_STR(bst_last_error(), "dropout: y has shape [4, 31]");
}

/* What models have: rows without gaps; slices, of either width; an address of single elements; an odd number. */
static void compile_calls(void) {
    for (int t = 0; t < 3; t++) {
        for (int add = 0; add < 2; add++) {
            bst_shape s[3], of_seed;
            DLTensor *seeds = bst_device_tensor(&of_seed, bst_test_i64, 1, two), *t3[3];
            for (int way = 0; way < 4; way++) {
                for (int i = 0; i < 3; i++) {
                    t3[i] = bst_device_tensor(&s[i], bst_test_types[t], 2, (int64_t[]){8192, 3072});
                    s[i].size[1] = way == 3 ? 1001 : 1024;
                    if (way != 1) s[i].stride[0] = s[i].size[1];
                }
                if (way == 2) t3[0]->byte_offset = t ? 2 : 4;
                CHECK_OK(bst_dropout(&bst_fake_exec, t3[0], seeds, add ? t3[1] : NULL, 0.05, t3[2]));
                if (way == 1) s[0].size[1] = s[1].size[1] = s[2].size[1] = 1001;
                if (way == 1) CHECK_OK(bst_dropout(&bst_fake_exec, t3[0], seeds, add ? t3[1] : NULL, 0.05, t3[2]));
            }
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("dropout", compile_calls); }

int main(void) {
    RUN(values_to_the_bit);
    RUN(the_ends_of_probabilities);
    RUN(nothing_is_no_error);
    RUN(infinities);
    RUN(independent_of_neighbours_and_seeds);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
