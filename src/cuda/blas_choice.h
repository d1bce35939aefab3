/* blas_choice.h - which of cuBLASLt's candidates a product takes. A pure function: no timing, no state. */
#ifndef BST_BLAS_CHOICE_H
#define BST_BLAS_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

/* A product as bst_gemm has it: row-major, out[m, n], k terms each. */
typedef struct bst_product {
    int arch, processors;
    int64_t m, n, k;
    bool a_transposed, b_transposed, halves; /* halves: bfloat16 or float16 inputs */
} bst_product;

/* The place, among `count` candidates in the heuristic's order, given by their cublasLtMatmulTile_t, of the one to
 * take: 0, the heuristic's own choice, unless measurements say otherwise. */
int bst__preferred_candidate(const bst_product *product, const uint32_t *tiles, int count);

#endif
