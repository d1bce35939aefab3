/* fuzz.h - a call of an operator function that is drawn from its description (src/core/describe.h), and what is asked
 * of it. Nothing here knows an operator by its C function: a new one is drawn as soon as its room's list names it. */
#ifndef BST_FUZZ_H
#define BST_FUZZ_H

#include "core/describe.h"

/* ---- random numbers: the same from the same seed, on every machine ----------------------------------------------- */

void fuzz_seed(uint64_t seed, uint64_t call);
uint64_t fuzz_bits(void);
int64_t fuzz_below(int64_t count); /* 0 to count - 1 */
bool fuzz_chance(int64_t in);      /* once in so many times */

/* ---- a call ------------------------------------------------------------------------------------------------------ */

enum { FUZZ_MOST_DIMS = BST_MAX_DIMS + 1, FUZZ_GUARD = 64 };

typedef struct fuzz_tensor {
    bool given;
    bst_dtype type;
    int dims;
    int64_t shape[FUZZ_MOST_DIMS], stride[FUZZ_MOST_DIMS], count; /* strides in elements */
    int over;                                                     /* the input in whose place this output lies, or -1 */
    /* The memory with all that lies around the elements, and its bytes before the call; NULL where `over` is not -1. */
    unsigned char *block, *before;
    size_t bytes;
    char *data;      /* the first element */
    double *numbers; /* of an input; what an output should be, where a reference says so: row-major, without gaps */
    double *size;    /* what the error of each may be relative to: the terms that it is the sum of */
    double *results; /* of an output */
} fuzz_tensor;

typedef struct fuzz_call {
    const bst_function *function;
    int count; /* of arguments */
    fuzz_tensor of[BST_MOST_ARGUMENTS];
    bst_attribute attributes[BST_MOST_ATTRIBUTES];
    bool extreme;    /* infinities, NaN, denormals and the largest numbers are among the elements */
    int64_t experts; /* that indices are drawn from */
} fuzz_call;

/* draw.c: functions, attributes, what is given, shapes, types. */
extern const bst_function *const *const fuzz_rooms[]; /* ends with NULL, as each room does */
void fuzz_draw(fuzz_call *call, const bst_function *function);
int fuzz_place(const bst_function *function, const char *name, unsigned direction); /* -1: none */
int fuzz_attribute(const bst_function *function, const char *name);                 /* -1: none */
/* Places in the order in which they are checked: inputs, then outputs. */
int fuzz_checked(const bst_function *function, int order[BST_MOST_ARGUMENTS]);

/* memory.c: layouts, and what lies around the elements. */
void fuzz_place_in_memory(fuzz_call *call);
void fuzz_free(fuzz_call *call);
int64_t fuzz_offset(const fuzz_tensor *t, int64_t element); /* of an element in row-major order, in elements */
/* All memory as it was before, but for the elements of outputs, which get `garbage`. */
void fuzz_restore(fuzz_call *call, unsigned char garbage);
/* The argument in whose memory a byte changed, but for the elements of outputs where `ran`; NULL: none did. */
const char *fuzz_changed(const fuzz_call *call, bool ran);

/* values.c: numbers, and what no table says of them. */
double fuzz_roundoff(bst_dtype type);
double fuzz_load(const char *data, bst_dtype type);
void fuzz_store(char *data, bst_dtype type, double value);
void fuzz_fill(fuzz_call *call);
void fuzz_read(fuzz_call *call); /* the results */

/* lists.c: a call of one of the functions that take lists of tensors, drawn and judged; how many failures it printed.
 * `cut` begins another way to cut work into pieces. */
typedef enum fuzz_list { FUZZ_ADAMW, FUZZ_NORM, FUZZ_SCALE, FUZZ_GROUP, FUZZ_LISTS } fuzz_list;
extern const char *const fuzz_list_names[FUZZ_LISTS];
int fuzz_lists(fuzz_list function, const bst_exec *exec, void (*cut)(uint64_t cuts));
/* groups.c: the same of those whose members a description draws. */
int fuzz_groups(const bst_exec *exec, void (*cut)(uint64_t cuts));

/* spoil.c: a call, as DLPack has it, with one rule broken. */
typedef struct fuzz_raw {
    DLTensor tensor[BST_MOST_ARGUMENTS];
    const DLTensor *given[BST_MOST_ARGUMENTS];
    int64_t shape[BST_MOST_ARGUMENTS][FUZZ_MOST_DIMS], stride[BST_MOST_ARGUMENTS][FUZZ_MOST_DIMS];
    bst_attribute attributes[BST_MOST_ATTRIBUTES];
} fuzz_raw;
extern const DLDevice fuzz_device; /* where tensors are */
DLDataType fuzz_dl_type(bst_dtype type);
void fuzz_write_raw(const fuzz_call *call, fuzz_raw *raw);
/* Breaks a rule and says which, and the name that the error must have; false where it found none to break. */
bool fuzz_spoil(const fuzz_call *call, fuzz_raw *raw, char what[128], const char **name);

/* reference.c: a function's outputs in float64, by plain loops. */
typedef struct fuzz_reference {
    const char *name; /* of the description */
    void (*compute)(fuzz_call *call);
} fuzz_reference;
extern const fuzz_reference fuzz_references[];
extern const char *const fuzz_without_reference[];
void fuzz_refer(fuzz_call *call);

#endif
