/* dequantize_4bit_args.h - the arguments of the kernel of dequantize_4bit, as host and device see them. */
#ifndef BST_DEQUANTIZE_4BIT_ARGS_H
#define BST_DEQUANTIZE_4BIT_ARGS_H

/* Weights of a launch: queries, keys and values are three. */
#define DEQUANTIZE_4BIT_TABLE 4

/* Without a nested code absmax is float32, and the three that are nested are NULL. */
typedef struct dequantize_4bit_item {
    const void *packed, *absmax, *code;
    const void *nested_code, *nested_absmax, *offset;
    void *weight;
    int64_t count; /* elements of weight */
    int64_t first; /* its first block of threads; where there is no weight, one that is not launched */
} dequantize_4bit_item;

/* As a kernel for `table` weights has them; the host fills an array of items. */
#define DEQUANTIZE_4BIT_ARGS(name, table) \
    typedef struct name {                 \
        dequantize_4bit_item item[table]; \
    } name

static_assert(sizeof(dequantize_4bit_item) == 72, "host and device must agree");

#endif
