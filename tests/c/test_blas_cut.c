/* test_blas_cut.c - products in parts: that they are the whole, in an order that is right, and which are left whole. */
#include <math.h>

#include "core/core.h"
#include "core/cpu_kernel.h"
#include "cuda/blas_cut.h"
#include "tensors.h"

enum { ROWS = 4096, WIDTH = 4096, ODD = 49159, PADDED = 49160, MOST = 32 * 32 /* elements of a small matrix */ };

/* ---- small products, multiplied ---------------------------------------------------------------------------------- */

/* Aligned, with gaps between their rows. Numbers are -1, 0 and 1, so that each sum is exact in bfloat16 too. */
static _Alignas(16) uint16_t a[MOST], b[MOST];
static _Alignas(16) unsigned char whole[4 * MOST], in_parts[4 * MOST];
static const float minus_one = -1;

static void fill(uint16_t *out, unsigned seed) {
    float numbers[MOST];
    bst_fill(numbers, MOST, seed, 1.5f);
    for (int i = 0; i < MOST; i++) out[i] = bst_to_bf16(rintf(numbers[i]));
}

/* What is added to: ones; else NaN, which stays in whatever is added to before it is written. Gaps: NaN. */
static void prepare(unsigned char *out, const bst_gemm *g) {
    memset(out, 0xff, 4 * MOST);
    const float one = 1;
    for (int64_t row = 0; row < g->m && g->beta != 0; row++)
        for (int64_t column = 0; column < g->n; column++) {
            bst_dtype type = g->output_type.bits == 32 ? BST_F32 : BST_BF16;
            bst_store(bst_at(out, row * g->ldo + column, type), &one, type, 1);
        }
}

static bst_gemm small(int64_t m, int64_t n, int64_t k, int a_transposed, int b_transposed, bool wide, float beta) {
    return (bst_gemm){.device = {kDLCPU, 0},
                      .m = m,
                      .n = n,
                      .k = k,
                      .a = a,
                      .b = b,
                      .lda = 32,
                      .ldb = 32,
                      .ldo = 32,
                      .a_transposed = a_transposed,
                      .b_transposed = b_transposed,
                      .input_type = bst_test_types[1],
                      .output_type = bst_test_types[wide ? 0 : 1],
                      .alpha = 3,
                      .beta = beta,
                      .device_alpha = &minus_one};
}

static bool is_fast(const bst_gemm *g) {
    int64_t row_of_a = g->a_transposed ? g->m : g->k, row_of_b = g->b_transposed ? g->k : g->n;
    return row_of_a % 8 == 0 && row_of_b % 8 == 0 && g->n % 8 == 0 && (uintptr_t)g->a % 16 == 0 &&
           (uintptr_t)g->b % 16 == 0 && (uintptr_t)g->out % 16 == 0;
}

static void check_parts(const bst_gemm *g, int expected) {
    bst_gemm parts[BST_MOST_PARTS];
    int count = bst__cut_product(g, parts), before = bst_test_failures;
    CHECK_EQ_I(count, expected);
    CHECK(count == 1 || is_fast(&parts[count - 1]));
    int64_t multiplications = 0;
    prepare(whole, g), prepare(in_parts, g);
    CHECK_OK(bst__cpu_gemm(NULL, "whole", g));
    for (int i = 0; i < count; i++) {
        bst_gemm *p = &parts[i];
        CHECK(p->m > 0 && p->n > 0 && p->k > 0);
        multiplications += p->m * p->n * p->k;
        p->out = in_parts + ((unsigned char *)p->out - whole);
        CHECK_OK(bst__cpu_gemm(NULL, "part", p));
    }
    CHECK_EQ_I(multiplications, g->m * g->n * g->k);
    CHECK(memcmp(whole, in_parts, sizeof whole) == 0);
    if (bst_test_failures > before)
        printf("     m=%d n=%d k=%d, transposed %d %d, %d bits, beta %g\n", (int)g->m, (int)g->n, (int)g->k,
               g->a_transposed, g->b_transposed, g->output_type.bits, (double)g->beta);
}

/* Sizes below, at and between multiples of 8. */
TEST(the_parts_are_the_whole) {
    static const int64_t sizes[] = {1, 7, 8, 9, 15, 16, 23, 24, 29};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    fill(a, 1), fill(b, 2);
    for (int i = 0; i < SIZES * SIZES * SIZES * 16; i++) {
        int64_t m = sizes[i / 16 % SIZES], n = sizes[i / 16 / SIZES % SIZES], k = sizes[i / 16 / SIZES / SIZES];
        int at = i & 1, bt = i >> 1 & 1;
        bool wide = i & 4;
        bst_gemm g = small(m, n, k, at, bt, wide, i & 8 ? 1.0f : 0.0f);
        g.out = whole;
        bool rows = at && m % 8, columns = n % 8, terms = (!at || bt) && k % 8;
        bool whole_alone = (rows && m < 8) || (columns && n < 8) || (terms && (k < 8 || (g.beta != 0 && !wide)));
        check_parts(&g, whole_alone ? 1 : 1 + rows + columns + terms);
    }
}

/* ---- which are cut ----------------------------------------------------------------------------------------------- */

/* The products of an output head, as bst__cuda_gemm has them; addresses are only looked at. */
static bst_gemm product(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldo) {
    bst_gemm g = {.device = {kDLCUDA, 0}, .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldo = ldo, .alpha = 1};
    g.a = (void *)0x10000, g.b = (void *)0x20000, g.out = (void *)0x30000;
    g.input_type = g.output_type = bst_test_types[1];
    return g;
}

static bst_gemm logits(int64_t rows, int64_t v) {
    bst_gemm g = product(rows, v, WIDTH, WIDTH, WIDTH, PADDED);
    g.b_transposed = 1;
    return g;
}

static bst_gemm dhidden(int64_t rows, int64_t v) { return product(rows, WIDTH, v, PADDED, WIDTH, WIDTH); }

static bst_gemm dweight(int64_t rows, int64_t v) {
    bst_gemm g = product(v, WIDTH, rows, PADDED, WIDTH, WIDTH);
    g.a_transposed = 1;
    return g;
}

static int parts_of(bst_gemm g) {
    bst_gemm parts[BST_MOST_PARTS];
    return bst__cutting_pays(&g) ? bst__cut_product(&g, parts) : 1;
}

TEST(heads_of_odd_vocabularies_are_cut) {
    bst_gemm parts[BST_MOST_PARTS], g = logits(ROWS, ODD);
    CHECK_EQ_I(parts_of(g), 2);
    bst__cut_product(&g, parts);
    CHECK_EQ_I(parts[0].n, 7);
    CHECK_EQ_I((uintptr_t)parts[0].out - (uintptr_t)g.out, 2 * 49152);
    CHECK_EQ_I((uintptr_t)parts[0].b - (uintptr_t)g.b, INT64_C(2) * 49152 * WIDTH);
    CHECK_EQ_I(parts[1].n, 49152);
    CHECK(parts[0].beta == 0.0f && parts[1].beta == 0.0f);

    g = dhidden(ROWS, ODD);
    CHECK_EQ_I(parts_of(g), 2);
    bst__cut_product(&g, parts);
    CHECK_EQ_I(parts[0].k, 7); /* the few terms first */
    CHECK_EQ_I(parts[1].k, 49152);
    CHECK(parts[0].beta == 0.0f && parts[1].beta == 1.0f);

    g = dweight(ROWS, ODD);
    g.beta = 1, g.output_type = bst_test_types[0];
    CHECK_EQ_I(parts_of(g), 2);
    bst__cut_product(&g, parts);
    CHECK_EQ_I(parts[0].m, 7);
    CHECK_EQ_I((uintptr_t)parts[0].out - (uintptr_t)g.out, INT64_C(4) * 49152 * WIDTH);
    CHECK_EQ_I(parts[1].m, 49152);
    CHECK(parts[0].beta == 1.0f && parts[1].beta == 1.0f);
}

TEST(what_a_cut_does_not_help_is_left_whole) {
    CHECK_EQ_I(parts_of(logits(ROWS, PADDED)), 1);
    CHECK_EQ_I(parts_of(dhidden(ROWS, PADDED)), 1);
    CHECK_EQ_I(parts_of(dweight(ROWS, PADDED)), 1);
    CHECK_EQ_I(parts_of(dweight(4095, PADDED)), 1); /* no row in memory runs along the tokens */
    CHECK_EQ_I(parts_of(logits(4095, PADDED)), 1);
    CHECK_EQ_I(parts_of(logits(16, ODD)), 1); /* small */
    CHECK_EQ_I(parts_of(logits(64, ODD)), 2);
    CHECK_EQ_I(parts_of(dweight(64, ODD)), 1); /* gains less */
    CHECK_EQ_I(parts_of(dweight(512, ODD)), 2);
    CHECK_EQ_I(parts_of(product(1 << 18, 12, 1 << 14, 1 << 14, 16, 16)), 1); /* few columns, terms, rows */
    CHECK_EQ_I(parts_of(product(1 << 15, 1 << 15, 12, 16, 1 << 15, 1 << 15)), 1);
    bst_gemm few_rows = product(12, 1 << 15, 1 << 18, 16, 1 << 15, 1 << 15);
    few_rows.a_transposed = 1;
    CHECK_EQ_I(parts_of(few_rows), 1);
    CHECK_EQ_I(parts_of(product(ROWS, ODD, 0, 8, PADDED, PADDED)), 1);
    CHECK_EQ_I(parts_of(product(0, ODD, WIDTH, WIDTH, PADDED, PADDED)), 1);
}

TEST(what_is_not_aligned_or_not_of_16_bits_is_left_whole) {
    bst_gemm g = logits(ROWS, ODD);
    g.ldo = ODD;
    CHECK_EQ_I(parts_of(g), 1);
    g.ldo = PADDED + 4; /* a multiple of 16 bytes in float32 alone */
    CHECK_EQ_I(parts_of(g), 1);
    g.output_type = bst_test_types[0];
    CHECK_EQ_I(parts_of(g), 2);
    g.input_type = bst_test_types[0];
    CHECK_EQ_I(parts_of(g), 1);
    g = logits(ROWS, ODD), g.lda = WIDTH + 4;
    CHECK_EQ_I(parts_of(g), 1);
    g = logits(ROWS, ODD), g.ldb = WIDTH + 1;
    CHECK_EQ_I(parts_of(g), 1);
    g = logits(ROWS, ODD), g.a = (void *)0x10008;
    CHECK_EQ_I(parts_of(g), 1);
    g = logits(ROWS, ODD), g.b = (void *)0x20002;
    CHECK_EQ_I(parts_of(g), 1);
    g = logits(ROWS, ODD), g.out = (void *)0x30004;
    CHECK_EQ_I(parts_of(g), 1);
    g = dhidden(ROWS, ODD), g.beta = 1; /* the sum in 16 bits would be rounded twice */
    CHECK_EQ_I(parts_of(g), 1);
    g.output_type = bst_test_types[0];
    CHECK_EQ_I(parts_of(g), 2);
}

int main(void) {
    RUN(the_parts_are_the_whole);
    RUN(heads_of_odd_vocabularies_are_cut);
    RUN(what_a_cut_does_not_help_is_left_whole);
    RUN(what_is_not_aligned_or_not_of_16_bits_is_left_whole);
    return bst_test_report();
}
