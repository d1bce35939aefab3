/* activation.h - the activations of gated units, as the public header and kernels number them. Kernels include it after
 * ptx.cuh: no other header here. A further one is a row here, a value of bst_activation in bastile.h, and its arithmetic
 * in bst_activate of core/gated_unit.h (CPU) and of cuda/device/gated_unit.cuh (CUDA). */
#ifndef BST_ACTIVATION_H
#define BST_ACTIVATION_H

/* X(name, code), and the rule that a number of one fulfils. */
#define BST_ACTIVATIONS(X)  X(SILU, 0) X(GELU_TANH, 1)
#define BST_ACTIVATION_RULE {"activation", 'i', 0, 1, "0 (silu) or 1 (gelu_tanh)"}

/* GELU's approximation as g sigmoid(v): v = 2 sqrt(2 / pi) (g + 0.044715 g^3) = g (FIRST + THIRD g^2). The sigmoid is 0 or 1
 * to the last bit from |g| = END on, where v may as well stay: so that no power of a large gate overflows. */
#define BST_GELU_TANH_FIRST 1.59576912f
#define BST_GELU_TANH_THIRD 0.0713548163f
#define BST_GELU_TANH_END   16.0f

enum {
#define BST_ACTIVATION_CODE(name, code) BST_##name##_CODE = code,
    BST_ACTIVATIONS(BST_ACTIVATION_CODE)
#undef BST_ACTIVATION_CODE
};

#ifndef BST_DEVICE
#include <assert.h>

#include "bastile.h"

#define BST_ACTIVATION_CHECK(name, code) static_assert((int)BST_##name == (code), "bastile.h and kernels must agree");
BST_ACTIVATIONS(BST_ACTIVATION_CHECK)
#undef BST_ACTIVATION_CHECK
#endif

#endif
