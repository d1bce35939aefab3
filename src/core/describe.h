/* describe.h - an operator function as a table: its tensors with their direction, types, shape, layout and what they
 * may overlap, its attributes, and what runs. From the table follow the checks of the C API, the outputs and schema of
 * the PyTorch operator and the fake for torch.compile: what can be said in a table is said there and nowhere else, what
 * cannot is a function beside it.
 *
 * Shapes are strings, a character a dimension: a capital letter is a size, bound where it first appears in the order of
 * the table and needed wherever it appears again; `*`, first, stands for any leading dimensions, the same in all
 * arguments that have it; `~` before a letter: that size, or 1 for a tensor that is the same all along (its stride is
 * then 0); `-` before a letter: half that size, rounded down; a small letter is the integer attribute whose name begins
 * with it; a digit is itself. "#" alone: any shape with one element for each row of the argument that bound `*`, "#2"
 * with two; ".": any with one element. */
#ifndef BST_DESCRIBE_H
#define BST_DESCRIBE_H

#include <float.h>

#include "core/core.h"

/* The last: bytes of a struct that callers fill. */
enum { BST_MOST_ARGUMENTS = 20, BST_MOST_ATTRIBUTES = 16, BST_MOST_GIVEN = 192 };

/* The value of an attribute: double, or integer, bool and enum. */
typedef union bst_attribute {
    int64_t i;
    double d;
} bst_attribute;

enum {
    BST_IN = 0,
    BST_OUT = 1,
    BST_OPTIONAL = 2, /* may be NULL */
};

typedef enum bst_layout {
    BST_ROWS,       /* the last dimension contiguous, the leading ones fold into two: the view's rows are filled in */
    BST_CONTIGUOUS, /* without gaps; rows likewise, but of a scalar */
    BST_LAST,       /* the last dimension contiguous, any strides else */
    BST_STRIDED,    /* any strides; what more is needed, the function's check says */
} bst_layout;

typedef struct bst_argument {
    const char *name;
    unsigned flags, types; /* of the enum above; a set of 1u << bst_dtype */
    const char *shape;     /* NULL: that of `like` */
    bst_layout layout;
    /* Arguments are named by their place plus one, so that zero is none: see the macros below. */
    uint8_t like, with, type_of;
    bst_dtype (*type_rule)(const bst_view *views, const bst_attribute *attributes);
    const char *why; /* of the type */
    uint8_t at;      /* its offset in the struct of tensors that callers fill, see BST_AT; 0: it is in none */
    uint32_t may_be; /* OUT: a bit for each argument whose place it may take, element for element */
    /* OUT: a new one has dimensions 1 and 2 exchanged in memory where this bool among the attributes says so. */
    uint8_t exchanged;
    /* OUT: rows of a new matrix are so many elements apart, a multiple of this, that accesses may be wide; 0: no
     * gaps. */
    uint8_t padded;
    /* One element in place of its shape unless this attribute is BST_REDUCTION_NONE: a loss that is reduced. */
    uint8_t reduced;
    /* What the table cannot say of it, asked right after the table's checks of it: of what comes later nothing is
     * known. */
    bst_status (*check)(const char *op, const bst_view *views);
} bst_argument;

#define BST_LIKE(place)             .like = (place) + 1 /* has its shape, and is not given without it */
#define BST_WITH(place)             .with = (place) + 1 /* is given exactly where that one is */
#define BST_TYPE_OF(place, reason)  .type_of = (place) + 1, .why = (reason)
#define BST_TYPE_RULE(rule, reason) .type_rule = (rule), .why = (reason)
#define BST_MAY_BE(places)          .may_be = (places)
#define BST_EXCHANGED(attribute)    .exchanged = (attribute) + 1
#define BST_REDUCED(attribute)      .reduced = (attribute) + 1
#define BST_PADDED(elements)        .padded = (elements)
/* Of the struct that callers fill, whose type a room's file calls given_tensors. */
#define BST_AT(member) .at = offsetof(given_tensors, member)

typedef struct bst_attribute_rule {
    const char *name;
    char type; /* 'd' double, 'i' integer, 'b' bool */
    /* Bounds, where low < high, and the sentence for what is outside: "0 (llama), 1 (gemma) or 2 (none)". */
    double low, high;
    const char *needed;
    uint8_t at, bytes; /* its place in the struct of options that callers fill, see BST_OPTION; 0: it is in none */
    bool pointed;      /* what is there is a pointer to an int64_t */
    double usual;      /* what a double of zero, or no pointer, stands for there */
} bst_attribute_rule;

/* A member of the struct that callers fill, whose type a room's file calls given_options; then bounds, or none. */
#define BST_OPTION(type, name, ...) \
    {#name, type, ##__VA_ARGS__, .at = offsetof(given_options, name), .bytes = sizeof(((given_options *)0)->name)}
#define BST_USUAL(value) .usual = (value)

/* What a norm adds to the mean of squares. */
#define BST_EPS_BOUNDS 0, FLT_MAX, "a finite number, 0 or above,"

/* What runs. Everything is checked; views that are not given have no data, no dimensions and no elements. `op`: the
 * function's name. */
typedef bst_status bst_run(const bst_exec *exec, const char *op, const bst_view *views,
                           const bst_attribute *attributes);

typedef struct bst_function {
    const char *name;                     /* what errors begin with */
    const char *const *meanings;          /* of symbols, for errors: "Sthe positions of q"; ends with NULL, or NULL */
    const bst_argument *arguments;        /* in the order of views; ends with a NULL name */
    const bst_attribute_rule *attributes; /* the same, or NULL */
    /* What no table can say of the inputs, asked after the table's checks of them; or NULL. */
    bst_status (*check)(const char *op, const bst_view *views, const bst_attribute *attributes);
    bst_run *run;
    size_t tensors, options; /* bytes of the structs that callers of the C API fill, see BST_GIVEN; 0: there is none */
    /* The PyTorch operators that call it, as torch/bind.h reads them; ends with NULL. */
    const char *const *torch;
} bst_function;

/* A size that is too large is no size of an array. */
#define BST_FITS(type)    (sizeof(type) + 0 * sizeof(char[sizeof(type) <= BST_MOST_GIVEN ? 1 : -1]))
#define BST_GIVEN_OPTIONS .options = BST_FITS(given_options)
#define BST_GIVEN         BST_GIVEN_OPTIONS, .tensors = BST_FITS(given_tensors)
#define BST_TORCH(...) \
    .torch = (const char *const[]) { __VA_ARGS__, NULL }

/* What the shapes have bound so far. */
typedef struct bst_symbols {
    uint32_t bound; /* a bit a letter */
    uint8_t owner[26], dimension[26];
    int64_t size[26];
    int leading_of; /* the place that bound `*`, plus one */
    int leading;    /* its dimensions */
    int64_t rows;   /* their product */
} bst_symbols;

/* Checks tensors[place], NULL or not, for each place of the table, inputs and then outputs, and calls the function.
 * Nothing is written unless all of it holds. */
bst_status bst__run(const bst_function *function, const bst_exec *exec, const DLTensor *const *tensors,
                    const bst_attribute *attributes);

/* For the functions of the C API: reads the structs that their caller has filled, and calls it; tensors are in their
 * places, or such a struct. attributes: those that no option tells, in their places; NULL: zeros. */
bst_status bst__call(const bst_function *function, const bst_exec *exec, const DLTensor *const *places,
                     const void *options, bst_attribute *attributes);
bst_status bst__call_struct(const bst_function *function, const bst_exec *exec, const void *tensors,
                            const void *options, bst_attribute *attributes);

/* Its two halves, for whoever makes the outputs himself: the inputs and attributes, then one output. `fresh`: it is
 * new, and shares memory with nothing. */
bst_status bst__check_inputs(const bst_function *function, const DLTensor *const *tensors,
                             const bst_attribute *attributes, bst_view *views, bst_symbols *symbols);
bst_status bst__check_output(const bst_function *function, int place, const DLTensor *tensor, bool fresh,
                             const bst_attribute *attributes, bst_view *views, bst_symbols *symbols);

/* The shape that an output must have, once the inputs are checked; its number of dimensions. */
int bst__output_shape(const bst_function *function, int place, const bst_view *views, const bst_attribute *attributes,
                      const bst_symbols *symbols, int64_t size[BST_MAX_DIMS]);
/* Its type: of the views of inputs only the types are read. */
bst_dtype bst__output_type(const bst_function *function, int place, const bst_view *views,
                           const bst_attribute *attributes);

#endif
