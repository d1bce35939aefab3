/* glu.h - what the gated unit's operators have in common with the experts' unit (ops/moe): its options as attributes.
 */
#ifndef BST_GLU_H
#define BST_GLU_H

#include "core/activation.h"
#include "core/describe.h"

/* The attributes, in the order of bst__glu_rules. */
enum { ACTIVATION, INTERLEAVED, ALPHA, LIMIT, OPEN_LIMIT, GLU_ATTRIBUTES };
extern const bst_attribute_rule bst__glu_rules[];
/* The same for a function that has more; given_options is bst_glu_options there. */
#define BST_GLU_RULES                                                                                                 \
    [ACTIVATION] = BST_OPTION('i', activation, BST_SILU, BST_SWIGLU_OAI, BST_ACTIVATION_NAMES),                       \
    [INTERLEAVED] = BST_OPTION('b', interleaved), [ALPHA] = BST_OPTION('d', alpha), [LIMIT] = BST_OPTION('d', limit), \
    [OPEN_LIMIT] = BST_OPTION('b', open_limit)

/* What no rule says of them; that gate and up are two tensors; and that h, of gates and ups, has columns in pairs. */
bst_status bst__glu_need_numbers(const char *op, const bst_attribute *attributes);
bst_status bst__glu_need_apart(const char *op, const bst_attribute *attributes);
bst_status bst__glu_need_pairs(const char *op, const bst_view *h);
/* The unit that checked attributes stand for: zero is the usual. */
bst_unit bst__glu_unit(const bst_attribute *attributes);

#endif
