/* dequantize_4bit.c - a weight out of codes of 4 bits: checks, then the configuration, then the kernel of the tensors'
 * device. */
#include <assert.h>
#include <inttypes.h>

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

enum { K_TYPE, K_VEC, K_THREADS, K_EACH, K_SHIFT, K_NESTED, K_NESTED_SHIFT };
static const bst_kernel kernel = {"dequantize_4bit.cu",
                                  "dequantize_4bit",
                                  {"TYPE", "VEC", "THREADS", "EACH", "SHIFT", "NESTED", "NESTED_SHIFT", NULL}};

/* Writes are four fifths of the traffic and nothing waits for them; short blocks begin while others wait for absmax. On
 * an H200, nested, bf16, 12288 x 4096 and 4096 x 4096: 35.1 and 12.3 us; one access a thread 37.5 and 13.3, four 35.6
 * and 12.7; blocks of 256 threads with two 37.6 and 12.9, with four 38.6 and 14.1, with eight 44.8 and 15.7. */
enum { THREADS = 128, EACH = 2 };

static int shift_of(int64_t power) { return __builtin_ctzll((unsigned long long)power); }

static bst_status run_cuda(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *weight = &v[WEIGHT];
    bool nested = bst__given(&v[NESTED_CODE]);
    uintptr_t address = (uintptr_t)weight->data;
    int size = bst__dtype_size(weight->dtype), vec = 16 / size;
    while (vec > 1 && (address % (unsigned)(vec * size) || (uintptr_t)v[PACKED].data % (unsigned)((vec + 1) / 2)))
        vec /= 2;
    bst_launch l = {.kernel = &kernel,
                    .values = {[K_TYPE] = weight->dtype,
                               [K_VEC] = vec,
                               [K_THREADS] = THREADS,
                               [K_EACH] = EACH,
                               [K_SHIFT] = shift_of(attributes[BLOCKSIZE].i),
                               [K_NESTED] = nested,
                               [K_NESTED_SHIFT] = nested ? shift_of(attributes[NESTED_BLOCKSIZE].i) : 0},
                    .block = THREADS,
                    .overlap = true};
    int64_t blocks = parts(weight->count, (int64_t)THREADS * EACH * vec);
    BST_TRY(bst__cuda_need_rows(op_name, blocks, 1));
    l.grid_x = (unsigned)blocks;
    dequantize_4bit_args args = {.packed = v[PACKED].data,
                                 .absmax = v[ABSMAX].data,
                                 .code = v[CODE].data,
                                 .nested_code = v[NESTED_CODE].data,
                                 .nested_absmax = v[NESTED_ABSMAX].data,
                                 .offset = v[OFFSET].data,
                                 .weight = weight->data,
                                 .count = weight->count};
    return bst__cuda_launch(exec, op_name, weight->device.device_id, &l, &args, sizeof args);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const bst_view *v, const bst_attribute *attributes) {
    if (!v[WEIGHT].count) return BST_OK;
    if (v[WEIGHT].device.device_type == kDLCUDA) return run_cuda(exec, v, attributes);
    dequantize_4bit_cpu call = {.packed = v[PACKED].data,
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
    bst__parallel_for(exec, v[ABSMAX].count, bst__grain(call.blocksize), BST_CPU_SELECT(bst__dequantize_4bit_cpu),
                      &call);
    return BST_OK;
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

bst_status bst_dequantize_4bit(const bst_exec *exec, const bst_4bit_weight *quantised, DLTensor *weight) {
    bst_4bit_weight given;
    bst_view view;
    BST_TRY(bst__options(op_name, "quantised", quantised, &given, sizeof given));
    BST_TRY(bst__view(op_name, "weight", BST_FLOATS, weight, &view));
    BST_TRY(bst__need_dims(op_name, "weight", &view, 2));
    bst_attribute attributes[] = {[ROWS] = {.i = view.size[0]},
                                  [COLUMNS] = {.i = view.size[1]},
                                  [BLOCKSIZE] = {.i = given.blocksize ? given.blocksize : 64},
                                  [NESTED_BLOCKSIZE] = {.i = given.nested_blocksize ? given.nested_blocksize : 256},
                                  [TYPE] = {.i = view.dtype}};
    const DLTensor *tensors[] = {
        [PACKED] = given.packed, [NESTED_CODE] = given.nested_code, [NESTED_ABSMAX] = given.nested_absmax,
        [OFFSET] = given.offset, [ABSMAX] = given.absmax,           [CODE] = given.code,
        [WEIGHT] = weight};
    return bst__run(&dequantize, exec, tensors, attributes);
}

const bst_function *const bst__dequantize_4bit[] = {&dequantize, NULL};
