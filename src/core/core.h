/* core.h - what every operator stands on: errors, tensor views and their checks, workspace, threads.
 *
 * Internal names begin with bst__ and are hidden from the library's users. */
#ifndef BST_CORE_H
#define BST_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bastile.h"
#include "core/dtype.h"

#define BST_MAX_DIMS 8

/* ---- errors ------------------------------------------------------------------------------------------------------ */

/* Sets this thread's message and returns `status`. */
bst_status bst__error(bst_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Makes each "[i]" in this thread's message, which tells of a list's member, that number; returns `status`. */
bst_status bst__name_item(bst_status status, int64_t i);

/* This thread's message, put aside for an attempt that may fail without the call's failing. */
typedef struct bst_message {
    char text[1024];
} bst_message;

/* What a thread keeps from call to call, allocated when it first has something to keep; NULL where memory is short. No
 * thread-local storage: every thread of the process would pay for it, from the first of small stacks on, and glibc ends
 * the process where it cannot be had. */
typedef struct bst_thread {
    bst_message message;
    unsigned errors; /* so far */
    bst_message cache_reason;
    struct {
        bool on;
        int device, arch;
    } ahead; /* of cuda/compile_only.h */
} bst_thread;
bst_thread *bst__thread(void);

bst_message bst__message(void);
void bst__put_back(const bst_message *message);

/* Returns from the calling function unless `expression` is BST_OK. */
#define BST_TRY(expression)                  \
    do {                                     \
        bst_status bst__s = (expression);    \
        if (bst__s != BST_OK) return bst__s; \
    } while (0)

/* ---- tensor views ------------------------------------------------------------------------------------------------ */

/* A tensor [..., columns] as rows: row r begins at element (r / inner) * outer_stride + (r % inner) * inner_stride. */
typedef struct bst_rows {
    int64_t rows, columns;
    int64_t inner, inner_stride, outer_stride;
} bst_rows;

/* A DLTensor after its checks: what operators work with. */
typedef struct bst_view {
    void *data; /* byte offset applied */
    DLDevice device;
    bst_dtype dtype;
    int dims;
    int64_t size[BST_MAX_DIMS];
    int64_t stride[BST_MAX_DIMS]; /* in elements */
    int64_t count;                /* product of the sizes */
    bst_rows rows;                /* where the operator's description asks for rows */
} bst_view;

/* Whether there is a tensor at all: an optional one that is not given has a view without dimensions and elements. */
static inline bool bst__given(const bst_view *v) { return v->dims || v->count; }

/* Sets of types: 1u << bst_dtype. */
#define BST_FLOATS (1u << BST_F32 | 1u << BST_BF16 | 1u << BST_F16)

/* DLPack's name of a type. */
DLDataType bst__dl_type(bst_dtype dtype);

/* Reads a tensor. BST_INVALID where it is NULL, has no shape, a negative size, sizes or strides whose products pass 63
 * bits, or no memory though it has elements; BST_UNSUPPORTED where its type or device is none of ours, where it has
 * more than BST_MAX_DIMS dimensions, or its elements are not aligned. What works with a view need not look out for
 * overflow, strides of dimensions of one element included. */
bst_status bst__view(const char *op, const char *name, unsigned dtypes, const DLTensor *tensor, bst_view *out);
/* The following name the argument and what was given. */
bst_status bst__need_dims(const char *op, const char *name, const bst_view *v, int dims);
bst_status bst__need_size(const char *op, const char *name, const bst_view *v, int dim, int64_t size, const char *why);
bst_status bst__need_same_shape(const char *op, const char *name, const bst_view *v, const char *other_name,
                                const bst_view *other);
bst_status bst__need_dtype(const char *op, const char *name, const bst_view *v, bst_dtype dtype, const char *why);
bst_status bst__need_device(const char *op, const char *name, const bst_view *v, const bst_view *other,
                            const char *other_name);
bst_status bst__need_contiguous(const char *op, const char *name, const bst_view *v);
/* Of a matrix whose rows have been read: none overlaps the next, as products of a framework or of a library need it. */
bst_status bst__need_rows_apart(const char *op, const char *name, const bst_view *matrix);
/* Where `count` sequences begin, and the last one ends: 0, numbers that do not fall, and `end`. The host reads them. */
bst_status bst__need_boundaries(const char *op, const char *name, const int32_t *at, int64_t count, int64_t end);
/* One element: a scalar or any tensor of one. */
bst_status bst__need_one(const char *op, const char *name, const bst_view *v);
bool bst__is_contiguous(const bst_view *v);
/* "[2, 3]", on the stack of the calling block. */
enum { BST_SHAPE_TEXT = 160 };
const char *bst__write_shape(const bst_view *v, char text[BST_SHAPE_TEXT]);
#define bst__shape_text(v) bst__write_shape(v, (char[BST_SHAPE_TEXT]){0})
/* Whether the memory of two views may share a byte. Slices of one buffer that lie side by side in its rows do not. */
bool bst__overlap(const bst_view *a, const bst_view *b);
/* Whether two views of one shape have each element at the same address. */
bool bst__same_memory(const bst_view *a, const bst_view *b);
bst_status bst__need_apart(const char *op, const char *name, const bst_view *v, const char *other_name,
                           const bst_view *other);
/* BST_INVALID where two elements of an output of any strides share memory. */
bst_status bst__need_distinct(const char *op, const char *name, const bst_view *v);

/* Folds the leading dimensions. BST_UNSUPPORTED where they do not fold into two, or the last one is not contiguous. */
bst_status bst__rows(const char *op, const char *name, const bst_view *v, bst_rows *out);
static inline int64_t bst__row_start(const bst_rows *r, int64_t row) {
    return row / r->inner * r->outer_stride + row % r->inner * r->inner_stride;
}
/* Whether these rows are one block of memory. */
static inline bool bst__rows_packed(const bst_rows *r) { return r->inner == r->rows && r->inner_stride == r->columns; }
/* The widest access in elements (a power of two, at most 16 bytes) that every row of this view allows. */
int bst__row_vector(const bst_view *v, const bst_rows *r);
/* The largest power of two, at most `most` elements, that divides the address and every stride in use but the last,
 * which is 1; `most` where there is no memory. For views of any strides, whose rows do not fold. */
int64_t bst__alignment(const bst_view *v, int64_t most);

static inline int64_t bst__lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t bst__divided_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* ---- workspace and threads --------------------------------------------------------------------------------------- */

/* Workspace on a device by the caller's allocator or the default one. bytes = 0 gives NULL. */
bst_status bst__allocate(const bst_exec *exec, const char *op, DLDevice device, size_t bytes, void **out);
/* Fills a contiguous tensor with zeros. */
bst_status bst__zero(const bst_exec *exec, const char *op, const bst_view *v);
void bst__release(const bst_exec *exec, DLDevice device, void *memory);

typedef void (*bst_body)(void *context, int64_t begin, int64_t end);
/* Runs body over [0, count) on the caller's threads or the default ones. BST_OK, as what a function ends with. */
bst_status bst__parallel_for(const bst_exec *exec, int64_t count, int64_t grain, bst_body body, void *context);
/* How many rows of `work` elements one thread should take at least, so that a thread's start is worth it. */
int64_t bst__grain(int64_t work);
/* How many ranges run at a time at most, by default. */
int64_t bst__processors(void);
/* A matrix product on CPU by the caller's function or the default one. */
bst_status bst__cpu_gemm(const bst_exec *exec, const char *op, const bst_gemm *problem);

/* ---- vector units ------------------------------------------------------------------------------------------------ */

/* CPU kernels are compiled once per level; bst__cpu_level() says which one this machine runs (BASTILE_CPU=baseline
 * or v3 lowers it; anything else is an error of each call that reads a CPU tensor). */
typedef enum bst_cpu_level { BST_CPU_BASELINE, BST_CPU_V3, BST_CPU_V4, BST_CPU_LEVELS } bst_cpu_level;
bst_cpu_level bst__cpu_level(void);
bst_status bst__need_cpu_level(const char *op);

#endif
