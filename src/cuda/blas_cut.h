/* blas_cut.h - products of 16-bit numbers that cuBLASLt makes faster in parts. Pure functions: nothing is queued. */
#ifndef BST_BLAS_CUT_H
#define BST_BLAS_CUT_H

#include <stdbool.h>

#include "bastile.h"

enum { BST_MOST_PARTS = 4 };

/* Whether a product is large enough for what cutting costs. */
bool bst__cutting_pays(const bst_gemm *whole);

/* The parts of a product in the order in which they must run, and their number: 1, the product as it is, where nothing
 * keeps it from the fast kernels or no cut would bring it there. Of several parts the last is the main one. */
int bst__cut_product(const bst_gemm *whole, bst_gemm parts[BST_MOST_PARTS]);

#endif
