/* blas_cut.c - where products of 16-bit numbers are cut.
 *
 * cuBLASLt's fast kernels want more than leading dimensions and addresses at multiples of 16 bytes: what lies in each
 * row of a matrix must be such a multiple itself ("Tensor Core Usage" in cuBLAS's documentation). Else it falls back to
 * old kernels that load number by number. So the last columns, rows or terms are made a product of their own: at most 7
 * of them, those of a vocabulary that is no multiple of 8 (Granite has 49155, GPT-2 50257).
 *
 * Measured on 2026-11-25 on an H100 (bf16, medians, ms, 4096 tokens, rows of logits padded to multiples of 8) on the
 * three products of an output head, as in blas_choice.c:
 *                                  logits          dhidden         dweight
 *   H = 4096, V = 49152            2.21            2.13            2.21
 *             V = 49160            2.24            2.16            2.27
 *             V = 49155            16.2            12.2            3.31
 *             V = 49159, cut       16.5, 2.48      12.1, 2.36      3.58, 2.5     the rests alone 0.03 to 0.055
 *   H = 768,  V = 50257, cut       3.83, 0.45      2.52, 0.41      0.64, 0.41
 *
 * A cut of columns (logits) or terms (dhidden) thus gains 12 to 21 ms for 10^12 multiplications, one of rows (dweight)
 * 1.0 to 1.5 ms. It costs one more launch and reading the other operand, or what is added to, once more: 0.03 to 0.055
 * ms. From the bounds below on it gains 0.07 ms and more. And what is cut must be long: reading the other operand again
 * takes as long as a cut of columns or terms gains on 50 to 200 of these, or one of rows on 600. Other chips and
 * float16 were not measured; the documentation asks the same of them. */
#include "cuda/blas_cut.h"

#include <stdint.h>

enum {
    EIGHT = 8,   /* 16-bit numbers in 16 bytes */
    LONG = 1024, /* columns, rows or terms of which few are cut off */
};
static const double many = 0x1p33, many_for_rows = 0x1p36; /* multiplications */

/* Which sizes must be cut: those along which the rows of a matrix run, in memory. The terms of a^T b are not among
 * them, nor are the rows of an a that is not transposed. Of a float32 output 4 columns are 16 bytes: not measured. */
typedef struct cuts {
    bool rows, columns, terms;
} cuts;

static cuts cuts_of(const bst_gemm *g) {
    return (cuts){.rows = g->a_transposed && g->m % EIGHT,
                  .columns = g->n % EIGHT,
                  .terms = (!g->a_transposed || g->b_transposed) && g->k % EIGHT};
}

bool bst__cutting_pays(const bst_gemm *g) {
    cuts c = cuts_of(g);
    if ((c.rows && g->m < LONG) || (c.columns && g->n < LONG) || (c.terms && g->k < LONG)) return false;
    return (double)g->m * (double)g->n * (double)g->k >= (c.columns || c.terms ? many : many_for_rows);
}

static bool is_aligned(const void *matrix, int64_t leading, DLDataType type) {
    return (uintptr_t)matrix % 16 == 0 && leading * (type.bits / 8) % 16 == 0;
}

/* Whether the main part is fast: aligned as the whole is, and not empty. Terms are not cut where 16-bit numbers are
 * added to: these would be rounded twice. */
static bool is_possible(const bst_gemm *g, cuts c) {
    if (g->input_type.bits != 16) return false;
    if (!is_aligned(g->a, g->lda, g->input_type) || !is_aligned(g->b, g->ldb, g->input_type) ||
        !is_aligned(g->out, g->ldo, g->output_type))
        return false;
    if ((c.rows && g->m < EIGHT) || (c.columns && g->n < EIGHT) || (c.terms && g->k < EIGHT)) return false;
    return !c.terms || g->beta == 0.0f || g->output_type.bits == 32;
}

/* What lies from a row of op(a), a column of op(b) and a term of both on. */
static bst_gemm from(const bst_gemm *g, int64_t row, int64_t column, int64_t term) {
    bst_gemm part = *g;
    int64_t in = g->input_type.bits / 8, out = g->output_type.bits / 8;
    part.a = (const char *)g->a + in * (g->a_transposed ? term * g->lda + row : row * g->lda + term);
    part.b = (const char *)g->b + in * (g->b_transposed ? column * g->ldb + term : term * g->ldb + column);
    part.out = (char *)g->out + out * (row * g->ldo + column);
    part.m -= row, part.n -= column, part.k -= term;
    return part;
}

int bst__cut_product(const bst_gemm *whole, bst_gemm parts[BST_MOST_PARTS]) {
    bst_gemm left = *whole; /* what the cuts leave of it */
    int count = 0;
    cuts c = cuts_of(whole);
    if (!is_possible(whole, c)) c = (cuts){0};
    if (c.columns) {
        parts[count++] = from(&left, 0, left.n / EIGHT * EIGHT, 0);
        left.n -= left.n % EIGHT;
    }
    if (c.rows) {
        parts[count++] = from(&left, left.m / EIGHT * EIGHT, 0, 0);
        left.m -= left.m % EIGHT;
    }
    /* The few terms first and the main part added to them: what is rounded to 16 bits in between is a small number, but
     * for outputs that these terms make up, and the large sum is rounded once. */
    if (c.terms) {
        parts[count++] = from(&left, 0, 0, left.k / EIGHT * EIGHT);
        left.k -= left.k % EIGHT;
        left.beta = 1;
    }
    parts[count++] = left;
    return count;
}
