/* dequantize_4bit_args.h - the arguments of the kernel of dequantize_4bit, as host and device see them. */
#ifndef BST_DEQUANTIZE_4BIT_ARGS_H
#define BST_DEQUANTIZE_4BIT_ARGS_H

/* Without a nested code absmax is float32, and the three that are nested are NULL. */
typedef struct dequantize_4bit_args {
    const void *packed, *absmax, *code;
    const void *nested_code, *nested_absmax, *offset;
    void *weight;
    int64_t count; /* elements of weight */
} dequantize_4bit_args;

static_assert(sizeof(dequantize_4bit_args) == 64, "host and device must agree");

#endif
