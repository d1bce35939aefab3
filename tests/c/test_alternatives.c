/* test_alternatives.c - every launch that autotuning may choose writes the bits that the default writes. On the emulated
 * GPU, which takes the alternative that BASTILE_ALTERNATIVE names. */
#include <math.h>

#include "tensors.h"

extern int bst__emu_alternatives_taken;

/* More tokens than a block takes in any alternative, of a number that fills none of them. */
enum { TOKENS = 67, MOST = 200000 };

static uint16_t bits[4][MOST], outputs[3][MOST], wanted[3][MOST];

/* Numbers between -2 and 2 in bfloat16. */
static void inputs(void) {
    static float numbers[MOST];
    for (unsigned i = 0; i < 4; i++) {
        bst_fill(numbers, MOST, i + 1, 2);
        for (int j = 0; j < MOST; j++) {
            uint32_t word;
            memcpy(&word, &numbers[j], sizeof word);
            bits[i][j] = (uint16_t)(word >> 16);
        }
    }
}

static DLTensor bf16(void *data, int dims, int64_t *shape, int64_t *strides) {
    return bst_tensor(data, dims, shape, strides, bst_test_types[1]);
}

static void take(int number) {
    char text[8];
    snprintf(text, sizeof text, "%d", number);
    setenv("BASTILE_ALTERNATIVE", text, 1);
    bst_set_autotune(-1);
}

/* Runs each of `calls` calls with the default and with each alternative; of every number, one call at least must have a
 * launch of its own. */
static void compare(const char *what, void (*call)(int which), int calls, int alternatives) {
    int taken[8] = {0};
    for (int which = 0; which < calls; which++) {
        for (int number = 0; number <= alternatives; number++) {
            take(number);
            memset(outputs, 0xff, sizeof outputs);
            bst__emu_alternatives_taken = 0;
            call(which);
            taken[number] += bst__emu_alternatives_taken;
            if (number == 0) memcpy(wanted, outputs, sizeof wanted);
            bst_test_checks++;
            if (memcmp(wanted, outputs, sizeof wanted) != 0)
                FAILED("%s, call %d: alternative %d writes other bits", what, which, number);
        }
    }
    for (int number = 1; number <= alternatives; number++) CHECK(taken[number] > 0);
    CHECK_EQ_I(taken[0], 0);
    take(0);
}

/* ---- rms_norm ---------------------------------------------------------------------------------------------------- */

/* Rows of 8, 32 and 256 threads. */
static void rms_norm(int i) {
    static const int64_t widths[] = {64, 512, 2560};
    int64_t shape[] = {TOKENS, widths[i]}, width[] = {widths[i]}, rows[] = {TOKENS};
    DLTensor x = bf16(bits[0], 2, shape, NULL), residual = bf16(bits[1], 2, shape, NULL);
    DLTensor weight = bf16(bits[2], 1, width, NULL), y = bf16(outputs[0], 2, shape, NULL);
    DLTensor sum = bf16(outputs[1], 2, shape, NULL), rstd = bst_f32(outputs[2], 1, rows);
    CHECK_OK(bst_rms_norm_forward(NULL, &x, i == 1 ? &residual : NULL, &weight, 1e-6, BST_CASTING_LLAMA, &y,
                                  i == 1 ? &sum : NULL, &rstd));
}

/* ---- rope and qk_norm_rope --------------------------------------------------------------------------------------- */

enum { Q = 11, K = 3, D = 64 };
static int64_t q_shape[] = {1, Q, TOKENS, D}, k_shape[] = {1, K, TOKENS, D};
static int64_t q_strides[] = {TOKENS * Q * D, D, Q * D, 1}, k_strides[] = {TOKENS * K * D, D, K * D, 1}, dim[] = {D};

/* Pairs of halves, and of neighbours; whole heads, and half of each. */
static void rope(int which) {
    DLTensor q = bf16(bits[0], 4, q_shape, q_strides), k = bf16(bits[1], 4, k_shape, k_strides);
    int64_t table_shape[] = {1, TOKENS, which & 2 ? D / 2 : D};
    DLTensor c = bf16(bits[2], 3, table_shape, NULL), s = bf16(bits[3], 3, table_shape, NULL);
    DLTensor q_out = bf16(outputs[0], 4, q_shape, NULL), k_out = bf16(outputs[1], 4, k_shape, NULL);
    DLTensor dq = bf16(&outputs[0][MOST / 2], 4, q_shape, NULL), dk = bf16(&outputs[1][MOST / 2], 4, k_shape, NULL);
    CHECK_OK(bst_rope_forward(NULL, &q, &k, &c, &s, which & 1, &q_out, &k_out));
    CHECK_OK(bst_rope_backward(NULL, &q, &k, &c, &s, which & 1, &dq, &dk));
}

static void qk_norm_rope(int which) {
    DLTensor q = bf16(bits[0], 4, q_shape, q_strides), k = bf16(bits[1], 4, k_shape, k_strides);
    int64_t table_shape[] = {1, TOKENS, which & 2 ? D / 2 : D};
    DLTensor c = bf16(bits[2], 3, table_shape, NULL), s = bf16(bits[3], 3, table_shape, NULL);
    DLTensor q_out = bf16(outputs[0], 4, q_shape, q_strides), k_out = bf16(outputs[1], 4, k_shape, k_strides);
    DLTensor q_weight = bf16(bits[2], 1, dim, NULL), k_weight = bf16(bits[3], 1, dim, NULL);
    CHECK_OK(bst_qk_norm_rope_forward(NULL, &q, &k, &q_weight, &k_weight, &c, &s, 1e-6, BST_CASTING_LLAMA, which & 1,
                                      &q_out, &k_out));
}

/* ---- the tests --------------------------------------------------------------------------------------------------- */

TEST(rms_norm_writes_the_same_bits) { compare("rms_norm", rms_norm, 3, 3); }
TEST(rope_writes_the_same_bits) { compare("rope", rope, 4, 3); }
TEST(qk_norm_rope_writes_the_same_bits) { compare("qk_norm_rope", qk_norm_rope, 4, 3); }

int main(void) {
    inputs();
    RUN(rms_norm_writes_the_same_bits);
    RUN(rope_writes_the_same_bits);
    RUN(qk_norm_rope_writes_the_same_bits);
    return bst_test_report();
}
