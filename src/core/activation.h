/* activation.h - the activations of gated units, as the public header and kernels number them. Kernels include it after
 * ptx.cuh: no other header here. A further one is a row here, a value of bst_activation in bastile.h, and its
 * arithmetic in bst_activate of core/gated_arithmetic.h. */
#ifndef BST_ACTIVATION_H
#define BST_ACTIVATION_H

/* X(name, code): those that are functions of the gate alone, then all; and the rule that the number of one fulfils. */
#define BST_GATE_ACTIVATIONS(X) X(SILU, 0) X(GELU_TANH, 1) X(GELU, 2) X(RELU, 3) X(RELU2, 4)
#define BST_ACTIVATIONS(X)      BST_GATE_ACTIVATIONS(X) X(SWIGLU_OAI, 5)
#define BST_ACTIVATION_NAMES    "0 (silu), 1 (gelu_tanh), 2 (gelu), 3 (relu), 4 (relu2) or 5 (swiglu_oai)"

/* GELU's approximation as g sigmoid(v): v = 2 sqrt(2 / pi) (g + 0.044715 g^3) = g (FIRST + THIRD g^2). The sigmoid is 0
 * or 1 to the last bit from |g| = END on, where v may as well stay: so that no power of a large gate overflows. */
#define BST_GELU_TANH_FIRST 1.59576912f
#define BST_GELU_TANH_THIRD 0.0713548163f
#define BST_GELU_TANH_END   16.0f

/* The normal distribution below -x, x >= 0, is exp(-x^2 / 2) t p(t), t = 1 / (1 + BST_NORMAL_SCALE x), p of these
 * coefficients, the highest power's first: fitted up to x = 13.2, where the exponential ends, relative error 2e-8. */
#define BST_NORMAL_SCALE 0.26f
#define BST_NORMAL_END   13.2f
#define BST_NORMAL_COEFFICIENTS(X) \
    X(0.0319519527f)               \
    X(-0.159760326f)               \
    X(0.265591472f) X(-0.166821182f) X(0.171736941f) X(0.046502199f) X(0.104172267f) X(0.102858387f) X(0.103768297f)
#define BST_NORMAL_DENSITY 0.398942280f /* 1 / sqrt(2 pi) */

/* Below x, |x| < BST_NORMAL_NEAR, it is 0.5 + x q(x^2), q of these coefficients, relative error 4e-8. */
#define BST_NORMAL_NEAR 1.0f
#define BST_NORMAL_NEAR_COEFFICIENTS(X) \
    X(-7.66260837e-06f) X(0.000113507478f) X(-0.0011863485f) X(0.00997333042f) X(-0.0664903596f) X(0.398942292f)

#define BST_LARGEST 3.40282347e38f /* of float32 */

/* Whether gate and up have limits; and whether gradients pass at a limit itself, as torch.clamp's do to PyTorch 2.13,
 * or only within, as from 2.14 on. */
enum { BST_NO_LIMIT, BST_CLOSED_LIMIT, BST_OPEN_LIMIT };

enum {
#define BST_ACTIVATION_CODE(name, code) BST_##name##_CODE = code,
    BST_ACTIVATIONS(BST_ACTIVATION_CODE)
#undef BST_ACTIVATION_CODE
};

#ifndef BST_DEVICE
#include <assert.h>
#include <stdbool.h>

#include "bastile.h"

/* A gated unit, zeros in its options being replaced by what they stand for. */
typedef struct bst_unit {
    int activation;
    bool interleaved; /* gate and up are the even and odd columns of one tensor */
    int limited;      /* of the enum above: the gate is at most `limit`, up between -limit and limit */
    float alpha, limit;
} bst_unit;

#define BST_ACTIVATION_CHECK(name, code) static_assert((int)BST_##name == (code), "bastile.h and kernels must agree");
BST_ACTIVATIONS(BST_ACTIVATION_CHECK)
#undef BST_ACTIVATION_CHECK
#endif

#endif
