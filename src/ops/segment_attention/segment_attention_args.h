/* segment_attention_args.h - the arguments of the kernels of attention within segments, as host and device see them,
 * and the sizes that both depend on. */
#ifndef BST_SEGMENT_ATTENTION_ARGS_H
#define BST_SEGMENT_ATTENTION_ARGS_H

/* Queries and keys whose scores are a tile on CPU. */
#define SEGMENT_CPU_QUERIES 64
#define SEGMENT_CPU_KEYS    64

/* Where a tensor [tokens, heads, D] begins: strides in elements. */
typedef struct segment_attention_map {
    int64_t token, head;
} segment_attention_map;

static_assert(sizeof(segment_attention_map) == 16, "host and device must agree");

#endif
