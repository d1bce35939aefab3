/* test_segment_attention.c - attention within segments through the C API. */
#include "chips.h"

TEST(kernels_compile_for_every_chip) {}

int main(void) {
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
