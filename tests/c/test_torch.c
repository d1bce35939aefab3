/* test_torch.c - the PyTorch operators on a PyTorch that is none: tensors of malloc, and functions of which any call
 * can be made to fail. */
#include "tensors.h"
#include "torch/bind.h"
#include "torch/call.h"

/* ---- the PyTorch ------------------------------------------------------------------------------------------------- */

enum { MOST_DIMS = 70 };

struct bst_torch_tensor_opaque {
    int64_t dims, sizes[MOST_DIMS], strides[MOST_DIMS];
    int32_t dtype;
    char *memory, *data;
};

static int live;                 /* tensors */
static int calls, first_to_fail; /* of the functions that may fail; the first is 1, none 0 */
static bool others_too;          /* all calls from the first failure on fail */
static char thrown[2048];        /* what the operator threw, or "" */
static char reason[64];

static bool fails(void) {
    calls++;
    if (!first_to_fail || (others_too ? calls < first_to_fail : calls != first_to_fail)) return false;
    snprintf(reason, sizeof reason, "failure of call %d.", calls);
    return true;
}

static const char *what(void) { return reason; }

#define TYPE(name, code, bits) \
    static int32_t dtype_##name(void) { return (code) * 256 + (bits); }
BST_TORCH_TYPES(TYPE)
#undef TYPE

static int64_t bytes_of(int32_t dtype) { return dtype % 256 / 8; }

/* Contiguous, or with these strides. `offset`: bytes that its data lies off any alignment. */
static bst_torch_tensor new_tensor(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                   int offset) {
    bst_torch_tensor t = calloc(1, sizeof *t);
    int64_t reach = 1, step = 1;
    t->dims = dims;
    t->dtype = dtype;
    for (int64_t i = dims - 1; i >= 0; i--) {
        t->sizes[i] = sizes[i];
        t->strides[i] = strides ? strides[i] : step;
        step *= sizes[i];
        reach += sizes[i] > 1 ? (sizes[i] - 1) * t->strides[i] : 0;
    }
    t->memory = calloc((size_t)reach + 2, (size_t)bytes_of(dtype));
    t->data = t->memory + offset;
    live++;
    return t;
}

static int32_t delete_tensor(bst_torch_tensor t) {
    free(t->memory);
    free(t);
    live--;
    return 0;
}

static int32_t empty_strided(int64_t dims, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device,
                             int32_t index, bst_torch_tensor *out) {
    (void)device, (void)index;
    if (fails()) return 1;
    *out = new_tensor(dims, sizes, strides, dtype, 0);
    return 0;
}

/* Widens what is narrower: little-endian, and unsigned. */
static int32_t copy(bst_torch_tensor to, bst_torch_tensor from, int32_t later) {
    (void)later;
    if (fails()) return 1;
    int64_t at[MOST_DIMS] = {0}, bytes = bytes_of(from->dtype), step = bytes_of(to->dtype), count = 1;
    for (int64_t i = 0; i < from->dims; i++) count *= from->sizes[i];
    for (int64_t n = 0; n < count; n++) {
        int64_t source = 0, target = 0;
        for (int64_t i = 0; i < from->dims; i++) source += at[i] * from->strides[i], target += at[i] * to->strides[i];
        memcpy(to->data + target * step, from->data + source * bytes, (size_t)bytes);
        for (int64_t i = from->dims - 1; i >= 0 && ++at[i] == from->sizes[i]; i--) at[i] = 0;
    }
    return 0;
}

static int32_t from_blob(void *data, int64_t dims, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         int32_t dtype, int32_t device, int32_t index, bst_torch_tensor *out) {
    (void)data, (void)offset, (void)device, (void)index;
    if (fails()) return 1;
    *out = new_tensor(dims, sizes, strides, dtype, 0);
    return 0;
}

static int32_t addmm(bst_torch_tensor out, bst_torch_tensor self, bst_torch_tensor a, bst_torch_tensor b, double beta,
                     double alpha) {
    (void)out, (void)self, (void)a, (void)b, (void)beta, (void)alpha;
    return fails();
}

static int32_t parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *),
                            void *context) {
    (void)grain;
    body(begin, end, context);
    return 0;
}

#define GETTER(name, type, value)                              \
    static int32_t get_##name(bst_torch_tensor t, type *out) { \
        (void)t;                                               \
        if (fails()) return 1;                                 \
        *out = value;                                          \
        return 0;                                              \
    }
GETTER(dim, int64_t, t->dims)
GETTER(sizes, int64_t *, t->sizes)
GETTER(strides, int64_t *, t->strides)
GETTER(data_ptr, void *, t->data)
GETTER(dtype, int32_t, t->dtype)
GETTER(device_type, int32_t, 0)
GETTER(device_index, int32_t, -1)
#undef GETTER

static int32_t cpu(void) { return 0; }
static int32_t cuda(void) { return 1; }

/* PyTorch's leaves by an exception; but this is the last that an operator does. */
static void check(bool fine, const char *function, const char *file, uint32_t line, const char *message) {
    (void)function, (void)file, (void)line;
    if (!fine) snprintf(thrown, sizeof thrown, "%s", message);
}

enum { MOST_SCHEMAS = 96, MOST_VALUES = 32 };
static char schemas[MOST_SCHEMAS][1024];
static int schema_count;

static int32_t define(bst_torch_library library, const char *schema) {
    (void)library;
    if (schema_count < MOST_SCHEMAS) snprintf(schemas[schema_count++], sizeof *schemas, "%s", schema);
    return 0;
}

static int32_t implement(bst_torch_library library, const char *name, bst_torch_kernel kernel) {
    (void)library, (void)name, (void)kernel;
    return 0;
}

static void install(void) {
    bst__torch = (bst_torch_api){.aoti_torch_delete_tensor_object = delete_tensor,
                                 .aoti_torch_get_data_ptr = get_data_ptr,
                                 .aoti_torch_get_dim = get_dim,
                                 .aoti_torch_get_sizes = get_sizes,
                                 .aoti_torch_get_strides = get_strides,
                                 .aoti_torch_get_dtype = get_dtype,
                                 .aoti_torch_get_device_type = get_device_type,
                                 .aoti_torch_get_device_index = get_device_index,
                                 .aoti_torch_empty_strided = empty_strided,
                                 .aoti_torch_create_tensor_from_blob = from_blob,
                                 .aoti_torch_copy_ = copy,
                                 .aoti_torch_cpu_addmm_out = addmm,
                                 .torch_parallel_for = parallel_for,
                                 .aoti_torch_device_type_cpu = cpu,
                                 .aoti_torch_device_type_cuda = cuda,
                                 .aoti_torch_check = check,
                                 .aoti_torch_library_def = define,
                                 .aoti_torch_library_impl = implement,
                                 .torch_exception_get_what_without_backtrace = what,
                                 .operator_delete = free};
#define TYPE(name, code, bits) bst__torch.number_of_##name = dtype_##name();
    BST_TORCH_TYPES(TYPE)
#undef TYPE
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

typedef struct argument {
    enum { NOTHING, NUMBER, TENSOR, REAL } kind;
    bool optional, aligned; /* aligned: written to, so never copied */
    int32_t (*dtype)(void);
    int dims;
    int64_t sizes[4], number; /* the number of an integer, or of each element of an integer tensor */
    double real;
} argument;

#define SIZES(...)  .dims = sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), .sizes = {__VA_ARGS__}
#define F(...)      {.kind = TENSOR, .dtype = dtype_float32, SIZES(__VA_ARGS__)}
#define O(...)      {.kind = TENSOR, .dtype = dtype_float32, .optional = true, SIZES(__VA_ARGS__)}
#define W(...)      {.kind = TENSOR, .dtype = dtype_float32, .aligned = true, SIZES(__VA_ARGS__)}
#define OW(...)     {.kind = TENSOR, .dtype = dtype_float32, .optional = true, .aligned = true, SIZES(__VA_ARGS__)}
#define L(...)      {.kind = TENSOR, .dtype = dtype_int64, SIZES(__VA_ARGS__)}
#define OL(...)     {.kind = TENSOR, .dtype = dtype_int64, .optional = true, SIZES(__VA_ARGS__)}
#define I(all, ...) {.kind = TENSOR, .dtype = dtype_int32, .number = all, SIZES(__VA_ARGS__)}
#define N(value)    {.kind = NUMBER, .number = value}
#define R(value)    {.kind = REAL, .real = value}
#define NONE        {.kind = NUMBER} /* an optional tensor's */

typedef struct operator_call {
    const char *name;
    int results;
    argument arguments[MOST_VALUES];
} operator_call;

#define MEAN       N(-100), N(0), R(0.0), R(0.0), R(1.0), R(0.0)
#define HEADS      F(2, 2, 3, 4)
#define K_HEADS    F(2, 1, 3, 4)
#define TABLES     F(1, 3, 4), F(1, 3, 4)
#define PAIRS      N(0), N(0), N(0)
#define GLU        N(0), R(0.0), R(0.0), N(1)
#define DIVERGENCE R(1.0), R(1.0), R(0.0), R(1.0), R(0.0), N(0)
#define SOFTMAX    R(1.0), R(1.0), R(0.0), N(0)

/* T = 3, H = 4, V = 5, and two choices of one expert. All but what is written to lies off its alignment, so that each
 * argument is copied first. */
static const operator_call operators[] = {
    {"rms_norm_forward", 2, {F(3, 4), O(4), R(1e-6), N(0)}},
    {"rms_norm_forward", 2, {F(3, 4), NONE, R(1e-6), N(0)}},
    {"add_rms_norm_forward", 3, {F(3, 4), F(3, 4), O(4), R(1e-6), N(0)}},
    {"rms_norm_add_forward", 2, {F(3, 4), O(4), F(3, 4), R(1e-6), N(0)}},
    {"rms_norm_backward", 2, {F(3, 4), F(3, 4), O(4), F(3), N(0), N(1), N(1)}},
    {"add_rms_norm_backward", 2, {F(3, 4), F(3, 4), F(3, 4), O(4), F(3), N(0), N(1), N(0)}},
    {"norm_forward", 3, {F(3, 4), O(4), O(4), R(1e-6), N(1), N(0)}},
    {"add_norm_forward", 4, {F(3, 4), F(3, 4), O(4), O(4), R(1e-6), N(1), N(0)}},
    {"norm_backward", 3, {F(3, 4), F(3, 4), O(4), O(3), F(3), N(1), N(0), N(1), N(1), N(1)}},
    {"add_norm_backward", 3, {F(3, 4), F(3, 4), F(3, 4), O(4), O(3), F(3), N(1), N(0), N(1), N(1), N(0)}},
    {"swiglu_forward", 1, {F(3, 4), F(3, 4)}},
    {"swiglu_backward", 2, {F(3, 4), F(3, 4), F(3, 4), N(1), N(1)}},
    {"swiglu_backward_with_y", 3, {F(3, 4), F(3, 4), F(3, 4), N(0), N(1)}},
    {"swiglu_backward_inplace", 0, {W(3, 4), W(3, 4), W(3, 4), N(1), N(1), N(1)}},
    {"glu_forward", 1, {GLU, F(3, 4), F(3, 4)}},
    {"glu_backward", 2, {GLU, F(3, 4), F(3, 4), F(3, 4), N(1), N(1)}},
    {"glu_backward_with_y", 3, {GLU, F(3, 4), F(3, 4), F(3, 4), N(0), N(1)}},
    {"glu_backward_inplace", 0, {GLU, W(3, 4), W(3, 4), W(3, 4), N(1), N(1), N(1)}},
    {"glu_joined_forward", 1, {N(0), N(1), R(0.0), R(0.0), N(0), F(3, 8)}},
    {"glu_joined_backward", 1, {N(0), N(0), R(0.0), R(0.0), N(1), F(3, 4), F(3, 8)}},
    {"rope_forward", 2, {HEADS, K_HEADS, TABLES, PAIRS, N(1), N(0)}},
    {"rope_backward", 2, {HEADS, O(2, 1, 3, 4), TABLES, PAIRS, N(0), N(1), N(0)}},
    {"rope_backward", 2, {HEADS, NONE, TABLES, PAIRS, N(0), N(1), N(9)}},
    {"qk_norm_rope_forward", 2, {HEADS, K_HEADS, F(4), F(4), TABLES, R(1e-6), N(0), PAIRS, N(1), N(0)}},
    {"qk_norm_rope_backward",
     4,
     {O(2, 2, 3, 4), O(2, 1, 3, 4), HEADS, K_HEADS, F(4), F(4), TABLES, R(1e-6), N(0), PAIRS, N(0), N(0), N(1), N(1),
      N(1), N(1)}},
    {"cross_entropy_forward", 2, {F(3, 5), L(3), O(5), O(1), MEAN}},
    {"cross_entropy_forward_inplace", 1, {W(3, 5), L(3), O(5), O(1), MEAN}},
    {"cross_entropy_backward", 1, {F(1), F(3, 5), L(3), O(5), NONE, F(3, 2), MEAN}},
    {"cross_entropy_forward", 2, {F(3, 5), {.kind = TENSOR, .dtype = dtype_uint8, SIZES(3)}, NONE, NONE, MEAN}},
    {"scale_", 0, {W(3, 4), F(1)}},
    {"linear_cross_entropy_forward",
     6,
     {F(3, 4), F(5, 4), L(3), O(5), O(5), O(1), MEAN, N(0), N(1), N(0), N(1), N(1), N(1)}},
    {"linear_cross_entropy_forward", 6, {F(3, 4), F(5, 4), L(3), NONE, NONE, NONE, MEAN, N(0), N(0), N(1)}},
    {"linear_cross_entropy_backward",
     3,
     {F(1), F(3, 4), F(5, 4), L(3), O(5), O(5), NONE, F(3, 2), NONE, MEAN, N(0), N(1), N(1), N(1), N(1)}},
    {"linear_cross_entropy_backward",
     3,
     {F(1), F(3, 4), F(5, 4), L(3), NONE, NONE, NONE, F(3, 2), O(3, 5), MEAN, N(0), N(0), N(1), N(1), N(0)}},
    {"linear_logprobs_forward",
     9,
     {F(3, 4), F(5, 4), L(3), O(5), N(-100), SOFTMAX, N(2), N(1), N(1), N(1), N(1), N(1), N(1), N(1), N(0)}},
    {"linear_logprobs_backward",
     3,
     {O(3), O(3), O(3), F(3, 4), F(5, 4), L(3), O(5), F(3, 2), O(3), N(-100), SOFTMAX, N(0), N(0), N(1), N(1), N(1)}},
    {"linear_logprobs_backward_kept",
     3,
     {O(3), NONE, NONE, F(3, 4), F(5, 4), L(3), NONE, F(3, 2), NONE, W(2, 5), N(-100), SOFTMAX, N(2), N(1), N(1), N(1),
      N(1)}},
    {"linear_divergence_forward",
     7,
     {F(3, 4), F(5, 4), O(5), O(3, 2), O(5, 2), O(5), NONE, NONE, NONE, N(2), R(0.5), DIVERGENCE, N(0), N(1), N(1),
      N(0), N(1), N(1), N(1)}},
    {"linear_divergence_backward",
     3,
     {F(3, 4), F(5, 4), NONE, NONE, NONE, NONE, O(3, 2), OL(3, 2), NONE, O(3, 5), O(3), N(0), R(0.5), DIVERGENCE, N(1),
      N(1), N(1), N(0)}},
    {"linear_divergence_backward_kept",
     3,
     {F(3, 4), F(5, 4), O(5), F(1), F(3, 5), N(0), R(0.5), DIVERGENCE, N(0), N(1), N(1), N(1)}},
    {"dequantize_4bit",
     1,
     {{.kind = TENSOR, .dtype = dtype_uint8, SIZES(8)}, F(2), F(16), NONE, NONE, NONE, N(4), N(4), N(8), N(256), N(0)}},
    {"dropout", 1, {F(3, 4), L(2), R(0.5)}},
    {"dropout_add", 1, {F(3, 4), L(2), F(3, 4), R(0.5)}},
    {"dropout_inplace", 0, {W(3, 4), L(2), R(0.5)}},
    {"dropout_add_inplace", 0, {F(3, 4), L(2), W(3, 4), R(0.5)}},
    {"low_rank_add",
     0,
     {F(3, 4), W(3, 5), F(2, 4), F(5, 2), OW(3, 6), O(1, 4), O(6, 1), NONE, NONE, NONE, R(0.5), R(2), R(0)}},
    {"low_rank_backward", 2, {F(3, 4), F(3, 2), F(4, 2), R(0.5)}},
    {"low_rank_backward_into", 1, {F(3, 4), F(3, 2), F(4, 2), W(3, 2), R(0.5)}},
    {"low_rank_dx", 0, {F(3, 4), F(4, 5), O(3, 6), O(6, 5), NONE, NONE, NONE, NONE, O(3, 2), O(2, 5), W(3, 5)}},
    {"low_rank_linear", 0, {F(3, 4), F(5, 4), F(3, 2), F(5, 2), O(5), W(3, 5), R(0.5)}},
    {"low_rank_layers",
     0,
     {F(3, 4), F(5, 4), O(5), W(3, 5), O(2, 4), O(5, 2), O(6, 4), NONE, OW(3, 6), NONE, NONE, NONE, NONE, NONE, NONE,
      NONE, R(0.5), R(2), R(0)}},
    {"low_rank_split", 0, {F(3, 1, 3, 4), OW(3, 1, 4), NONE, NONE, R(0.5)}},
    {"low_rank_glu_backward",
     4,
     {N(0), R(0), R(0), N(0), R(0.5), R(2), W(3, 4), W(3, 4), W(3, 4), F(3, 2), F(4, 1), F(4, 1), O(3, 1), O(1, 4),
      W(3, 2), N(1), N(1), N(1)}},
    {"token_attention", 1, {F(3, 4, 5), F(3, 2, 6, 5), F(3, 2, 6, 5), O(3, 6), R(0.5)}},
    {"moe_sort", 3, {L(3, 2), N(1)}},
    {"moe_gather", 1, {F(3, 4), I(0, 6)}},
    {"moe_glu_forward", 1, {F(6, 8), O(1, 8), I(6, 1), N(5), N(1), R(1.7), R(7), N(1)}},
    {"moe_glu_backward",
     4,
     {W(6, 4), W(6, 8), O(1, 8), I(6, 1), I(0, 6), F(3, 2), O(6), N(5), N(1), R(1.7), R(7), N(1), N(1), N(1), N(1),
      N(1)}},
    {"moe_glu_backward_inplace",
     2,
     {W(6, 4), W(6, 8), O(1, 8), I(6, 1), I(0, 6), F(3, 2), O(6), N(0), N(0), R(1.7), R(7), N(0), N(1), N(1), N(1),
      N(0)}},
    {"moe_combine_forward", 1, {F(6, 4), I(0, 3, 2), O(3, 2), O(1, 4), OL(3, 2)}},
    {"moe_combine_backward", 3, {F(3, 4), I(0, 6), I(6, 1), F(3, 2), O(1, 4), N(1), N(1)}},
};

static bst_torch_value boxed(bst_torch_value value, bool optional) {
    if (!optional) return value;
    bst_torch_value *box = malloc(sizeof *box);
    *box = value;
    return (bst_torch_value)(uintptr_t)box;
}

static bst_torch_value value_of(const argument *a) {
    bst_torch_value value = (bst_torch_value)a->number;
    if (a->kind == REAL) memcpy(&value, &a->real, sizeof value);
    if (a->kind != TENSOR) return value;
    bst_torch_tensor t = new_tensor(a->dims, a->sizes, NULL, a->dtype(), a->aligned ? 0 : 1);
    int32_t number = (int32_t)a->number;
    for (int64_t i = 0, count = a->sizes[0]; number && i < count; i++) memcpy(t->data + 4 * i, &number, sizeof number);
    return boxed((bst_torch_value)(uintptr_t)t, a->optional);
}

/* Whether the call's arguments are of the kinds and as many as the operator's schema names. */
static bool fits_schema(const operator_call *c) {
    const char *at = NULL;
    size_t length = strlen(c->name);
    for (int i = 0; i < schema_count; i++)
        if (!strncmp(schemas[i], c->name, length) && schemas[i][length] == '(') at = schemas[i] + length;
    for (int i = 0; at && *at++ != ')'; i++) {
        const argument *a = &c->arguments[i];
        at += strspn(at, " ");
        bool is_tensor = !strncmp(at, "Tensor", 6), may_be_none = is_tensor && at[strcspn(at, " ") - 1] == '?';
        bool is_none = a->kind <= NUMBER && !a->number; /* what is left out at the end is no, too */
        if (is_tensor ? a->kind == TENSOR ? a->optional != may_be_none : !(may_be_none && is_none)
                      : a->kind != (strncmp(at, "float", 5) ? NUMBER : REAL) && a->kind != NOTHING)
            return false;
        at += strcspn(at, " "); /* the name */
        at += strcspn(at, ",)");
        if (*at == ')' && c->arguments[i + 1].kind != NOTHING) return false;
    }
    return at;
}

/* Calls it; whether it succeeded. Its results are deleted. */
static bool run(const operator_call *c) {
    bst_torch_value stack[MOST_VALUES] = {0};
    for (int i = 0; i < MOST_VALUES; i++) stack[i] = value_of(&c->arguments[i]);
    thrown[0] = 0;
    calls = 0;
    bst__torch_kernel(c->name)(stack, 0, 0);
    for (int i = 0; i < c->results && !thrown[0]; i++) delete_tensor((bst_torch_tensor)(uintptr_t)stack[i]);
    return !thrown[0];
}

/* Each call of PyTorch's functions fails in turn, alone and with all that follow: nothing crashes, nothing is left
 * over, and the failure that came first is told, by PyTorch's own words or as memory that an operator lacks. */
static void fail_each(const operator_call *c) {
    first_to_fail = 0;
    if (!fits_schema(c)) {
        FAILED("%s: the test's arguments are not its schema's", c->name);
        return;
    }
    bool refused = !run(c); /* the call itself: what it throws without a failure is for it to say */
    if (refused) CHECK_STR(thrown, "rope_backward: dtype is 9");
    int most = calls;
    CHECK(most > 7);
    for (others_too = false;; others_too = true) {
        for (first_to_fail = 1; first_to_fail <= most; first_to_fail++) {
            char expected[64];
            snprintf(expected, sizeof expected, "failure of call %d.", first_to_fail);
            CHECK(!run(c));
            bool told = strstr(thrown, expected) || strstr(thrown, "bytes of workspace could not be allocated");
            if (!told) FAILED("%s, call %d of %d: \"%s\"", c->name, first_to_fail, most, thrown);
            CHECK_EQ_I(live, 0);
        }
        if (others_too) break;
    }
    first_to_fail = 0;
}

TEST(failures_of_pytorch) {
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) fail_each(&operators[i]);
}

/* ---- what arguments may be --------------------------------------------------------------------------------------- */

static void refused(const operator_call *c, const char *message) {
    CHECK(!run(c));
    CHECK_STR(thrown, message);
    CHECK_EQ_I(live, 0);
}

TEST(types_by_the_names_that_users_know) {
    operator_call c = {"cross_entropy_forward", 2, {F(3, 5), L(3), NONE, NONE, MEAN}};
    c.arguments[1].dtype = dtype_int16;
    refused(&c, "cross_entropy_forward: target has elements of type int16; int64 is needed");
    c.arguments[1].dtype = dtype_bool;
    refused(&c, "target has elements of type bool; int64 is needed");
    c.arguments[0].dtype = dtype_float64;
    refused(&c, "logits has elements of type float64; float32, bfloat16 or float16 is needed");
    c.arguments[0].dtype = dtype_complex64;
    refused(&c, "logits has elements of type complex64;");
}

TEST(more_dimensions_than_anything_has) {
    enum { DIMS = 65 };
    int64_t sizes[DIMS];
    for (int i = 0; i < DIMS; i++) sizes[i] = 1;
    bst_torch_value stack[8] = {(bst_torch_value)(uintptr_t)new_tensor(DIMS, sizes, NULL, dtype_float32(), 1)};
    thrown[0] = 0;
    bst__torch_kernel("rms_norm_forward")(stack, 0, 0);
    CHECK_STR(thrown, "a tensor has 65 dimensions; 0 to 8 are supported");
    CHECK_EQ_I(live, 0);
    refused(&(operator_call){"rms_norm_forward", 2, {{.kind = TENSOR, .dtype = dtype_float32}}},
            "norm_forward: x is a scalar");
}

int main(void) {
    install();
    CHECK_OK(bst__torch_bind_all(NULL, NULL, NULL));
    RUN(failures_of_pytorch);
    RUN(types_by_the_names_that_users_know);
    RUN(more_dimensions_than_anything_has);
    return bst_test_report();
}
