/* glu.h - what the gated unit's operators have in common with the experts' unit (ops/moe): its options as attributes.
 */
#ifndef BST_GLU_H
#define BST_GLU_H

#include "core/activation.h"
#include "core/describe.h"

/* The attributes, in the order of bst__glu_rules. */
enum { ACTIVATION, INTERLEAVED, ALPHA, LIMIT, OPEN_LIMIT };
extern const bst_attribute_rule bst__glu_rules[];

/* What no rule says of them; and that h, of gates and ups, has columns in pairs. */
bst_status bst__glu_need_numbers(const char *op, const bst_attribute *attributes);
bst_status bst__glu_need_pairs(const char *op, const bst_view *h);
/* The unit that checked attributes stand for: zero is the usual. */
bst_unit bst__glu_unit(const bst_attribute *attributes);

#endif
