/* test_blas_choice.c - which of cuBLASLt's candidates the products of an output head take. */
#include "cuda/blas_choice.h"
#include "test.h"

enum { V = 151936, H = 4096, FIRST = 0 };

/* Candidates as cuBLASLt offers them for such products, by their tiles. */
static const uint32_t tiles[] = {209, 248, 24, 23, 31, 201, 197, 29, 20};
enum { COUNT = sizeof tiles / sizeof *tiles };

static uint32_t taken(int arch, int processors, int64_t m, int64_t n, int64_t k, bool at, bool bt, bool halves) {
    bst_product p = {arch, processors, m, n, k, at, bt, halves};
    return tiles[bst__preferred_candidate(&p, tiles, COUNT)];
}

static uint32_t logits(int64_t tokens) { return taken(90, 132, tokens, V, H, false, true, true); }
static uint32_t dhidden(int64_t tokens) { return taken(90, 132, tokens, H, V, false, false, true); }
static uint32_t dweight(int64_t tokens) { return taken(90, 132, V, H, tokens, true, false, true); }

TEST(heads_take_what_measured_best) {
    CHECK_EQ_I(logits(4096), 197);
    CHECK_EQ_I(logits(5504), 201);
    CHECK_EQ_I(dweight(4096), 29);
    CHECK_EQ_I(dweight(16384), 24);
    CHECK_EQ_I(dhidden(4096), 24);
    CHECK_EQ_I(dhidden(5120), 24);
    CHECK_EQ_I(dhidden(5504), 20); /* 5.2 rounds of 256 x 128 on 132 multiprocessors */
    CHECK_EQ_I(dhidden(2752), 20); /* 2.7 */
    CHECK_EQ_I(dhidden(16384), 24);
    CHECK_EQ_I(taken(90, 132, 5504, 1024, V, false, false, true), 20); /* 1.3 */
    CHECK_EQ_I(taken(90, 132, 3584, 3584, V, false, false, true), 24); /* 2.97 */
    /* On a part with fewer multiprocessors other sizes fill the rounds. */
    CHECK_EQ_I(taken(90, 114, 4096, H, V, false, false, true), 20);
}

TEST(everything_else_keeps_the_first_answer) {
    CHECK_EQ_I(logits(512), 209);
    CHECK_EQ_I(dhidden(512), 209);
    CHECK_EQ_I(taken(90, 132, 4096, 3584, 152064, false, false, true), 209); /* 3.4 rounds, a width between */
    CHECK_EQ_I(taken(90, 132, 4096, 32000, H, false, true, true), 209);      /* a small vocabulary */
    CHECK_EQ_I(taken(90, 132, 4096, V, H, false, true, false), 209);         /* float32 */
    CHECK_EQ_I(taken(100, 148, 4096, V, H, false, true, true), 209);         /* another chip */
    static const uint32_t others[] = {209, 248};
    bst_product p = {90, 132, 5504, H, V, false, false, true};
    CHECK_EQ_I(bst__preferred_candidate(&p, others, 2), FIRST); /* what is wanted is not among them */
    CHECK_EQ_I(bst__preferred_candidate(&p, tiles, 1), FIRST);
}

int main(void) {
    RUN(heads_take_what_measured_best);
    RUN(everything_else_keeps_the_first_answer);
    return bst_test_report();
}
