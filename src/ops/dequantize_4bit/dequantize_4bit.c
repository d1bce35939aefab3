/* dequantize_4bit.c - weights out of codes of 4 bits, one or several: checks, configuration, then the kernel of their
 * device. */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/describe.h"
#include "core/options.h"
#include "cuda/cuda.h"
#include "ops/dequantize_4bit/dequantize_4bit_args.h"
#include "ops/dequantize_4bit/dequantize_4bit_cpu.h"

/* ---- description ------------------------------------------------------------------------------------------------- */

/* The three that are nested come before absmax, whose type follows from them. */
enum { PACKED, NESTED_CODE, NESTED_ABSMAX, OFFSET, ABSMAX, CODE, WEIGHT };
enum { ROWS, COLUMNS, BLOCKSIZE, NESTED_BLOCKSIZE, TYPE };

#define F32 (1u << BST_F32)
#define U8  (1u << BST_U8)

enum { CODES = 16, NESTED_CODES = 256, MOST_BLOCK = 1 << 16 };

static bst_dtype absmax_type(const bst_view *views, const bst_attribute *attributes) {
    (void)attributes;
    return bst__given(&views[NESTED_CODE]) ? BST_U8 : BST_F32;
}

static bst_dtype weight_type(const bst_view *views, const bst_attribute *attributes) {
    (void)views;
    return (bst_dtype)attributes[TYPE].i;
}

static const bst_argument arguments[] = {
    [PACKED] = {"packed", BST_IN, U8, "*", BST_CONTIGUOUS},
    [NESTED_CODE] = {"nested_code", BST_IN | BST_OPTIONAL, F32, "D", BST_CONTIGUOUS},
    [NESTED_ABSMAX] = {"nested_absmax", BST_IN | BST_OPTIONAL, F32, "S", BST_CONTIGUOUS, BST_WITH(NESTED_CODE)},
    [OFFSET] = {"offset", BST_IN | BST_OPTIONAL, F32, ".", BST_CONTIGUOUS, BST_WITH(NESTED_CODE)},
    [ABSMAX] = {"absmax", BST_IN, F32 | U8, "A", BST_CONTIGUOUS,
                BST_TYPE_RULE(absmax_type, "uint8 where nested_code is given, else float32")},
    [CODE] = {"code", BST_IN, F32, "C", BST_CONTIGUOUS},
    [WEIGHT] = {"weight", BST_OUT, BST_FLOATS, "rc", BST_CONTIGUOUS, BST_TYPE_RULE(weight_type, "the type asked for")},
    {NULL},
};

static const char op_name[] = "dequantize_4bit";

#define SIZE 0, 0x1p40, "a number from 0 to 2^40"
static const bst_attribute_rule rules[] = {
    [ROWS] = {"rows", 'i', SIZE},
    [COLUMNS] = {"columns", 'i', SIZE},
    [BLOCKSIZE] = {"blocksize", 'i', 8, MOST_BLOCK, "a power of two from 8 to 65536"},
    [NESTED_BLOCKSIZE] = {"nested_blocksize", 'i', 1, MOST_BLOCK, "a power of two from 1 to 65536"},
    [TYPE] = {"type", 'i', BST_F32, BST_F16, "0 (float32), 1 (bfloat16) or 2 (float16)"},
    {NULL},
};

static bst_status need_power(const char *op, const bst_attribute *attributes, int place) {
    int64_t given = attributes[place].i;
    if (!(given & (given - 1))) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is %" PRId64 "; %s is needed", op, rules[place].name, given,
                      rules[place].needed);
}

static bst_status need_count(const char *op, const char *name, const bst_view *v, int64_t count, const char *what) {
    if (v->count == count) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, %s, are needed", op, name,
                      bst__shape_text(v), count, what);
}

static int64_t parts(int64_t count, int64_t each) { return count / each + (count % each != 0); }

static bst_status check(const char *op, const bst_view *v, const bst_attribute *attributes) {
    int64_t count;
    BST_TRY(need_power(op, attributes, BLOCKSIZE));
    BST_TRY(need_power(op, attributes, NESTED_BLOCKSIZE));
    if (__builtin_mul_overflow(attributes[ROWS].i, attributes[COLUMNS].i, &count))
        return bst__error(BST_INVALID, "%s: rows times columns pass 63 bits", op);
    BST_TRY(need_count(op, "packed", &v[PACKED], parts(count, 2), "one for two of rows * columns"));
    BST_TRY(need_count(op, "absmax", &v[ABSMAX], parts(count, attributes[BLOCKSIZE].i), "one a block"));
    BST_TRY(need_count(op, "code", &v[CODE], CODES, "one for each number of 4 bits"));
    if (!bst__given(&v[NESTED_CODE])) return BST_OK;
    BST_TRY(need_count(op, "nested_code", &v[NESTED_CODE], NESTED_CODES, "one for each number of 8 bits"));
    return need_count(op, "nested_absmax", &v[NESTED_ABSMAX], parts(v[ABSMAX].count, attributes[NESTED_BLOCKSIZE].i),
                      "one for nested_blocksize of absmax");
}

/* ---- configuration ----------------------------------------------------------------------------------------------- */

enum { K_TABLE, K_TYPE, K_VEC, K_THREADS, K_EACH, K_SHIFT, K_NESTED, K_NESTED_SHIFT };
static const bst_kernel kernel = {"dequantize_4bit.cu",
                                  "dequantize_4bit",
                                  {"TABLE", "TYPE", "VEC", "THREADS", "EACH", "SHIFT", "NESTED", "NESTED_SHIFT", NULL}};

/* Writes are four fifths of the traffic and nothing waits for them; short blocks begin while others wait for absmax. On
 * an H200, nested, bf16, 12288 x 4096 and 4096 x 4096: 35.1 and 12.3 us; one access a thread 37.5 and 13.3, four 35.6
 * and 12.7; blocks of 256 threads with two 37.6 and 12.9, with four 38.6 and 14.1, with eight 44.8 and 15.7. */
enum { THREADS = 128, EACH = 2 };

static int shift_of(int64_t power) { return __builtin_ctzll((unsigned long long)power); }

/* Whether two weights take the same kernel, but for the width of its accesses. */
static bool alike(const dequantize_4bit_weight *a, const dequantize_4bit_weight *b) {
    return a->dtype == b->dtype && a->blocksize == b->blocksize && !a->nested_code == !b->nested_code &&
           (!a->nested_code || a->nested_blocksize == b->nested_blocksize);
}

/* The widest access in elements that a weight's memory allows. */
static int vector_of(const dequantize_4bit_weight *w) {
    int size = bst__dtype_size(w->dtype), vec = 16 / size;
    while (vec > 1 &&
           ((uintptr_t)w->weight % (unsigned)(vec * size) || (uintptr_t)w->packed % (unsigned)((vec + 1) / 2)))
        vec /= 2;
    return vec;
}

/* `count` weights that are alike, as many as a table holds at most, in one launch. */
static bst_status launch(const bst_exec *exec, int device, const dequantize_4bit_weight *w, int count) {
    dequantize_4bit_item item[DEQUANTIZE_4BIT_TABLE];
    int vec = 16, table = count == 1 ? 1 : DEQUANTIZE_4BIT_TABLE;
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) vec = vector_of(&w[i]) < vec ? vector_of(&w[i]) : vec;
    for (int i = 0; i < table; i++) {
        item[i] = (dequantize_4bit_item){.first = INT64_MAX};
        if (i >= count) continue;
        item[i] = (dequantize_4bit_item){w[i].packed,      w[i].absmax,        w[i].code,
                                         w[i].nested_code, w[i].nested_absmax, w[i].offset,
                                         w[i].weight,      w[i].count,         blocks};
        blocks += parts(w[i].count, (int64_t)THREADS * EACH * vec);
    }
    BST_TRY(bst__cuda_need_rows(op_name, blocks, 1));
    bst_launch l = {.kernel = &kernel,
                    .values = {[K_TABLE] = table,
                               [K_TYPE] = w->dtype,
                               [K_VEC] = vec,
                               [K_THREADS] = THREADS,
                               [K_EACH] = EACH,
                               [K_SHIFT] = shift_of(w->blocksize),
                               [K_NESTED] = w->nested_code != NULL,
                               [K_NESTED_SHIFT] = w->nested_code ? shift_of(w->nested_blocksize) : 0},
                    .grid_x = (unsigned)blocks,
                    .block = THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op_name, device, &l, item, (size_t)table * sizeof *item);
}

/* ---- one weight -------------------------------------------------------------------------------------------------- */

static dequantize_4bit_weight weight_of(const bst_view *v, const bst_attribute *attributes) {
    return (dequantize_4bit_weight){.packed = v[PACKED].data,
                                    .absmax = v[ABSMAX].data,
                                    .code = v[CODE].data,
                                    .nested_code = v[NESTED_CODE].data,
                                    .nested_absmax = v[NESTED_ABSMAX].data,
                                    .offset = v[OFFSET].data,
                                    .weight = v[WEIGHT].data,
                                    .dtype = v[WEIGHT].dtype,
                                    .count = v[WEIGHT].count,
                                    .blocksize = attributes[BLOCKSIZE].i,
                                    .nested_blocksize = attributes[NESTED_BLOCKSIZE].i};
}

/* Weights of elements, all on `device`. */
static bst_status make(const bst_exec *exec, DLDevice device, dequantize_4bit_weight *w, int64_t count) {
    for (int64_t i = 0, together; i < count; i += together) {
        together = 1;
        if (device.device_type == kDLCUDA) {
            while (together < DEQUANTIZE_4BIT_TABLE && i + together < count && alike(&w[i], &w[i + together]))
                together++;
            BST_TRY(launch(exec, device.device_id, &w[i], (int)together));
        } else {
            BST_CPU_RUN(exec, parts(w[i].count, w[i].blocksize), w[i].blocksize, bst__dequantize_4bit_cpu, &w[i]);
        }
    }
    return BST_OK;
}

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)op;
    dequantize_4bit_weight w = weight_of(v, attributes);
    return make(exec, v[WEIGHT].device, &w, w.count > 0);
}

static const bst_function dequantize = {
    .name = op_name,
    .arguments = arguments,
    .attributes = rules,
    .check = check,
    .run = run,
    BST_TORCH("dequantize_4bit: packed absmax code nested_code nested_absmax offset rows columns blocksize "
              "nested_blocksize type -> weight"),
};

const bst_function *const bst__dequantize_4bit[] = {&dequantize, NULL};

/* The tensors and attributes of a call as the description has them. `op`: what an error of the struct itself begins
 * with. */
static bst_status read(const char *op, const bst_4bit_weight *quantised, const DLTensor *weight,
                       const DLTensor *tensors[WEIGHT + 1], bst_attribute attributes[TYPE + 1]) {
    bst_4bit_weight given;
    bst_view view;
    BST_TRY(bst__options(op, "quantised", quantised, &given, sizeof given));
    BST_TRY(bst__view(op, "weight", BST_FLOATS, weight, &view));
    BST_TRY(bst__need_dims(op, "weight", &view, 2));
    attributes[ROWS].i = view.size[0];
    attributes[COLUMNS].i = view.size[1];
    attributes[BLOCKSIZE].i = given.blocksize ? given.blocksize : 64;
    attributes[NESTED_BLOCKSIZE].i = given.nested_blocksize ? given.nested_blocksize : 256;
    attributes[TYPE].i = view.dtype;
    tensors[PACKED] = given.packed;
    tensors[NESTED_CODE] = given.nested_code;
    tensors[NESTED_ABSMAX] = given.nested_absmax;
    tensors[OFFSET] = given.offset;
    tensors[ABSMAX] = given.absmax;
    tensors[CODE] = given.code;
    tensors[WEIGHT] = weight;
    return BST_OK;
}

bst_status bst_dequantize_4bit(const bst_exec *exec, const bst_4bit_weight *quantised, DLTensor *weight) {
    const DLTensor *tensors[WEIGHT + 1];
    bst_attribute attributes[TYPE + 1];
    BST_TRY(read(op_name, quantised, weight, tensors, attributes));
    return bst__run(&dequantize, exec, tensors, attributes);
}

/* ---- several weights --------------------------------------------------------------------------------------------- */

static const char group_op[] = "dequantize_4bit_group";

/* What one of them is made of, for it must not be written over by another. */
typedef struct member {
    bst_view views[WEIGHT + 1];
} member;

/* An error of the one weight's own checks, told as the group's. */
static bst_status name_member(bst_status status, int64_t i) {
    bst_message reason = bst__message();
    const char *text = strstr(reason.text, ": ");
    return bst__error(status, "%s: quantised[%lld]: %s", group_op, (long long)i, text ? text + 2 : reason.text);
}

static bst_status read_member(const bst_4bit_weight *quantised, const DLTensor *weight, int64_t i, member *m,
                              dequantize_4bit_weight *out) {
    const DLTensor *tensors[WEIGHT + 1];
    bst_attribute attributes[TYPE + 1];
    bst_symbols symbols;
    bst_status status = read(op_name, quantised, weight, tensors, attributes);
    if (status == BST_OK) status = bst__check_inputs(&dequantize, tensors, attributes, m->views, &symbols);
    if (status == BST_OK)
        status = bst__check_output(&dequantize, WEIGHT, tensors[WEIGHT], false, attributes, m->views, &symbols);
    if (status != BST_OK) return name_member(status, i);
    *out = weight_of(m->views, attributes);
    return BST_OK;
}

/* Device and memory of member i and all before it. */
static bst_status check_beside(const member *m, int64_t i) {
    char name[48], other[48];
    snprintf(name, sizeof name, "weights[%lld]", (long long)i);
    BST_TRY(bst__need_device(group_op, name, &m[i].views[WEIGHT], &m->views[WEIGHT], "weights[0]"));
    for (int64_t j = 0; j < i; j++) {
        snprintf(other, sizeof other, "weights[%lld]", (long long)j);
        for (int k = 0; k <= WEIGHT; k++) {
            if (m[j].views[k].count)
                BST_TRY(bst__need_apart(group_op, name, &m[i].views[WEIGHT], arguments[k].name, &m[j].views[k]));
            if (m[i].views[k].count)
                BST_TRY(bst__need_apart(group_op, other, &m[j].views[WEIGHT], arguments[k].name, &m[i].views[k]));
        }
    }
    return BST_OK;
}

static bst_status make_group(const bst_exec *exec, int64_t count, const bst_4bit_weight *const *quantised,
                             DLTensor *const *weights, member *m, dequantize_4bit_weight *w) {
    int64_t with_elements = 0;
    for (int64_t i = 0; i < count; i++) {
        BST_TRY(read_member(quantised[i], weights[i], i, &m[i], &w[with_elements]));
        BST_TRY(check_beside(m, i));
        with_elements += w[with_elements].count > 0;
    }
    return make(exec, m->views[WEIGHT].device, w, with_elements);
}

bst_status bst_dequantize_4bit_group(const bst_exec *exec, int64_t count, const bst_4bit_weight *const *quantised,
                                     DLTensor *const *weights) {
    bst_exec own;
    BST_TRY(bst__options(group_op, "exec", exec, &own, sizeof own));
    if (count < 0 || count > INT32_MAX)
        return bst__error(BST_INVALID, "%s: count is %lld; the number of weights, 0 to 2^31 - 1, is needed", group_op,
                          (long long)count);
    if (!count) return BST_OK;
    if (!quantised || !weights)
        return bst__error(BST_INVALID, "%s: %s is NULL; a list of %lld is needed", group_op,
                          quantised ? "weights" : "quantised", (long long)count);
    member *m = calloc((size_t)count, sizeof *m);
    dequantize_4bit_weight *w = calloc((size_t)count, sizeof *w);
    bst_status status = m && w ? make_group(&own, count, quantised, weights, m, w)
                               : bst__error(BST_NO_MEMORY, "%s: a table of %lld weights could not be allocated",
                                            group_op, (long long)count);
    free(m);
    free(w);
    return status;
}
