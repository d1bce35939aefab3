/* bind.c - see bind.h. */
#include "torch/bind.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "bastile/torch.h"
#include "torch/call.h"

enum { MOST_STEPS = 24, MOST_BINDINGS = 70, NAME = 64 };

/* How one value of PyTorch's stack becomes a tensor or an attribute of the function. */
typedef struct step {
    enum { TENSOR, OPTIONAL_TENSOR, DOUBLE, INTEGER, BOOL, WANT } kind;
    int place; /* of the argument or attribute; WANT: of the output */
} step;

/* An output: its place, the input whose place it takes (-1: a new tensor), and whether it is made always. */
typedef struct output {
    int place, over;
    bool always;
} output;

typedef struct binding {
    const bst_function *function;
    char text[384], schema[1024]; /* the words of the description, cut apart; the name is the first */
    int steps, outputs, results;
    step step[MOST_STEPS];
    output output[BST_MOST_ARGUMENTS];
    uint32_t written, fresh; /* a bit for each input that an output takes the place of; for each new output */
} binding;

static binding bindings[MOST_BINDINGS];
static int binding_count;

/* ---- a call ------------------------------------------------------------------------------------------------------ */

static DLTensor *take(bst_call *call, const binding *b, int place, bst_torch_value value, bool optional) {
    if (b->written & 1u << place)
        return optional ? bst__call_optional_in_place(call, value) : bst__call_in_place(call, value);
    bst_layout layout = b->function->arguments[place].layout;
    if (!optional && b->function->arguments[place].types == 1u << BST_I64) return bst__call_labels(call, value);
    DLTensor *tensor = optional ? bst__call_optional(call, value) : bst__call_tensor(call, value);
    if (layout == BST_ROWS) return bst__call_rows(call, tensor);
    return layout == BST_CONTIGUOUS ? bst__call_contiguous(call, tensor) : tensor;
}

/* A tensor that PyTorch could not read, such as None in the place of one, gets its name. */
static void name_failure(bst_call *call, const bst_function *f, int place) {
    bst_message reason = bst__message();
    call->status = bst__error(call->status, "%s: %s: %s", f->name, f->arguments[place].name, reason.text);
}

/* A new output. NULL after a failure, and where there is nothing that it could be like: the check then says so. */
static DLTensor *make(bst_call *call, const bst_function *f, int place, DLTensor *const *tensors, const bst_view *views,
                      const bst_attribute *attributes, const bst_symbols *symbols) {
    int64_t size[BST_MAX_DIMS];
    int like = f->arguments[place].like;
    if (call->status != BST_OK || (like && !tensors[like - 1])) return NULL;
    int dims = bst__output_shape(f, place, views, attributes, symbols, size), exchanged = f->arguments[place].exchanged;
    DLDataType type = bst__dl_type(bst__output_type(f, place, views, attributes));
    int64_t padded = f->arguments[place].padded;
    if (padded && dims == 2) {
        int64_t strides[] = {(size[1] + padded - 1) / padded * padded, 1};
        return bst__call_empty(call, dims, size, strides, type);
    }
    if (!exchanged || !attributes[exchanged - 1].i) return bst__call_empty(call, dims, size, NULL, type);
    return bst__call_heads(call, tensors[like - 1], true, type);
}

static void run(const binding *b, bst_torch_value *stack) {
    const bst_function *f = b->function;
    DLTensor *tensors[BST_MOST_ARGUMENTS] = {NULL}, *results[BST_MOST_ARGUMENTS];
    bst_attribute attributes[BST_MOST_ATTRIBUTES] = {{0}}; /* zero: what this operator has no word for */
    bst_view views[BST_MOST_ARGUMENTS];
    bst_symbols symbols;
    bst_call call;
    uint32_t wanted = 0;
    bool failed;
    bst__call_begin(&call);
    for (int i = 0; i < b->steps; i++) {
        int place = b->step[i].place;
        switch (b->step[i].kind) {
            case TENSOR:
            case OPTIONAL_TENSOR:
                failed = call.status != BST_OK;
                tensors[place] = take(&call, b, place, stack[i], b->step[i].kind == OPTIONAL_TENSOR);
                if (!failed && call.status != BST_OK) name_failure(&call, f, place);
                break;
            case DOUBLE:
                attributes[place].d = bst__call_double(stack[i]);
                break;
            case INTEGER:
                attributes[place].i = (int64_t)stack[i];
                break;
            case BOOL:
                attributes[place].i = stack[i] & 1;
                break;
            case WANT:
                wanted |= (uint32_t)(stack[i] & 1) << place;
                break;
        }
    }
    if (call.status == BST_OK)
        call.status = bst__check_inputs(f, (const DLTensor *const *)tensors, attributes, views, &symbols);
    int count = 0;
    for (int i = 0; i < b->outputs; i++) {
        const output *o = &b->output[i];
        if (o->always || wanted & 1u << o->place)
            tensors[o->place] =
                o->over < 0 ? make(&call, f, o->place, tensors, views, attributes, &symbols) : tensors[o->over];
        if (o->over < 0) results[count++] = tensors[o->place];
    }
    for (int i = 0; f->arguments[i].name && call.status == BST_OK; i++)
        if (f->arguments[i].flags & BST_OUT)
            call.status = bst__check_output(f, i, tensors[i], b->fresh & 1u << i, attributes, views, &symbols);
    if (call.status == BST_OK) call.status = f->run(&call.exec, f->name, views, attributes);
    bst__call_end(&call, stack, b->results, results);
}

/* PyTorch calls a kernel without saying which operator it is: each binding has a function of its own. */
/* clang-format off */
#define TEN(X, d) X(d##0) X(d##1) X(d##2) X(d##3) X(d##4) X(d##5) X(d##6) X(d##7) X(d##8) X(d##9)
#define KERNELS(X) TEN(X, ) TEN(X, 1) TEN(X, 2) TEN(X, 3) TEN(X, 4) TEN(X, 5) TEN(X, 6)
/* clang-format on */
#define KERNEL(n)                                                                       \
    static void kernel_##n(bst_torch_value *stack, uint64_t inputs, uint64_t outputs) { \
        (void)inputs, (void)outputs;                                                    \
        run(&bindings[n], stack);                                                       \
    }
KERNELS(KERNEL)
#undef KERNEL
#define KERNEL(n) kernel_##n,
static const bst_torch_kernel kernels[MOST_BINDINGS] = {KERNELS(KERNEL)};
#undef KERNEL

/* ---- from the text to a binding ---------------------------------------------------------------------------------- */

/* `direction`: BST_IN or BST_OUT. */
static int place_of(const bst_function *f, const char *name, unsigned direction) {
    for (int i = 0; f->arguments[i].name; i++)
        if ((f->arguments[i].flags & BST_OUT) == direction && strcmp(f->arguments[i].name, name) == 0) return i;
    return -1;
}

/* Appends to a text of `size` bytes. */
static void __attribute__((format(printf, 3, 4))) append(char *text, size_t size, const char *format, ...) {
    va_list arguments;
    size_t length = strlen(text);
    va_start(arguments, format);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

static void say(binding *b, const char *text) { append(b->schema, sizeof b->schema, "%s", text); }

static void say_parameter(binding *b, const char *type, const char *name) {
    if (b->schema[strlen(b->schema) - 1] != '(') say(b, ", ");
    say(b, type);
    say(b, " ");
    say(b, name);
}

/* One word before the arrow: "x", "x!", "eps". */
static bool add_input(binding *b, char *word) {
    size_t length = strlen(word);
    bool always = word[length - 1] == '!';
    if (always) word[length - 1] = '\0';
    step *s = &b->step[b->steps++];
    int place = place_of(b->function, word, BST_IN);
    if (place >= 0) {
        bool optional = (b->function->arguments[place].flags & BST_OPTIONAL) && !always;
        char written[] = "Tensor(a!)?";
        written[7] = (char)('a' + place);
        if (!optional) written[sizeof written - 2] = '\0';
        *s = (step){optional ? OPTIONAL_TENSOR : TENSOR, place};
        say_parameter(b, b->written & 1u << place ? written : optional ? "Tensor?" : "Tensor", word);
        return true;
    }
    for (int i = 0; b->function->attributes && b->function->attributes[i].name; i++) {
        const bst_attribute_rule *r = &b->function->attributes[i];
        if (strcmp(r->name, word) != 0) continue;
        *s = (step){r->type == 'd' ? DOUBLE : r->type == 'b' ? BOOL : INTEGER, i};
        say_parameter(b, r->type == 'd' ? "float" : r->type == 'b' ? "bool" : "int", word);
        return true;
    }
    return false;
}

/* One word behind it: "y", "dx?", "dx?=x". */
static bool add_output(binding *b, char *word) {
    output *o = &b->output[b->outputs++];
    char *over = strchr(word, '=');
    o->over = over ? place_of(b->function, over + 1, BST_IN) : -1;
    if (over) *over = '\0';
    size_t length = strlen(word);
    o->always = word[length - 1] != '?';
    if (!o->always) word[length - 1] = '\0';
    o->place = place_of(b->function, word, BST_OUT);
    if (o->over >= 0) b->written |= 1u << o->over;
    if (!over) b->results++, b->fresh |= 1u << (o->place < 0 ? 0 : o->place);
    return o->place >= 0 && (!over || o->over >= 0);
}

static bst_status parse(const bst_function *f, const char *text, binding *b) {
    char *rest, *words[MOST_STEPS];
    *b = (binding){.function = f};
    bool fits = snprintf(b->text, sizeof b->text, "%s", text) < (int)sizeof b->text;
    char *colon = strchr(b->text, ':'), *arrow = strstr(b->text, "->");
    if (!fits || !colon || !arrow) return bst__error(BST_HOST, "torch: '%s' is no operator", text);
    *colon = *arrow = '\0';
    int inputs = 0;
    for (char *w = strtok_r(colon + 1, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) words[inputs++] = w;
    bool known = true;
    for (char *w = strtok_r(arrow + 2, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) known &= add_output(b, w);
    say(b, b->text);
    say(b, "(");
    for (int i = 0; i < inputs; i++) known &= add_input(b, words[i]);
    for (int i = 0; i < b->outputs; i++) {
        if (b->output[i].always) continue;
        char want[NAME];
        b->step[b->steps++] = (step){WANT, b->output[i].place};
        snprintf(want, sizeof want, "want_%s", f->arguments[b->output[i].place].name);
        say_parameter(b, "bool", want);
    }
    say(b, b->results == 1 ? ") -> Tensor" : ") -> (");
    for (int i = 0; i < b->results && b->results != 1; i++) say(b, i ? ", Tensor" : "Tensor");
    if (b->results != 1) say(b, ")");
    return known ? BST_OK : bst__error(BST_HOST, "torch: '%s' names what %s does not have", text, f->name);
}

static bst_status bind_room(const bst_function *const *functions, bst_torch_library fragment, bst_torch_library cpu,
                            bst_torch_library cuda) {
    for (; *functions; functions++) {
        for (const char *const *text = (*functions)->torch; *text; text++) {
            if (binding_count == MOST_BINDINGS) return bst__error(BST_HOST, "torch: more operators than kernels");
            binding *b = &bindings[binding_count];
            BST_TRY(parse(*functions, *text, b));
            if (bst__torch.aoti_torch_library_def(fragment, b->schema) ||
                bst__torch.aoti_torch_library_impl(cpu, b->text, kernels[binding_count]) ||
                bst__torch.aoti_torch_library_impl(cuda, b->text, kernels[binding_count]))
                return bst__error(BST_HOST, "torch: the operator bastile::%s could not be registered", b->text);
            binding_count++;
        }
    }
    return BST_OK;
}

#define BST_OP(name) extern const bst_function *const bst__##name[];
#include "ops.def"
#undef BST_OP

bst_status bst__torch_bind_all(bst_torch_library fragment, bst_torch_library cpu, bst_torch_library cuda) {
    static const bst_function *const *const rooms[] = {
#define BST_OP(name) bst__##name,
#include "ops.def"
#undef BST_OP
    };
    binding_count = 0; /* an earlier attempt may have failed halfway */
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) BST_TRY(bind_room(rooms[i], fragment, cpu, cuda));
    return BST_OK;
}

/* ---- for the fakes ----------------------------------------------------------------------------------------------- */

static const char *shape_text(const bst_function *f, int place, char *text, size_t size) {
    const bst_argument *a = &f->arguments[place];
    snprintf(text, size, "%s%s%s%s%s%s", a->like ? "=" : a->shape, a->like ? f->arguments[a->like - 1].name : "",
             a->exchanged ? "^" : "", a->exchanged ? f->attributes[a->exchanged - 1].name : "", a->reduced ? "/" : "",
             a->reduced ? f->attributes[a->reduced - 1].name : "");
    if (a->padded) append(text, size, "+%d", a->padded);
    return text;
}

bst_status bst_torch_describe(int number, char *text, size_t size) {
    char shape[NAME];
    if (number < 0 || number >= binding_count) return BST_INVALID;
    const binding *b = &bindings[number];
    const bst_function *f = b->function;
    snprintf(text, size, "%s", b->text);
    for (int i = 0; i < b->steps; i++) {
        const step *s = &b->step[i];
        if (s->kind == TENSOR || s->kind == OPTIONAL_TENSOR)
            append(text, size, " %s:%s", f->arguments[s->place].name, shape_text(f, s->place, shape, sizeof shape));
        else if (s->kind == WANT)
            append(text, size, " want_%s", f->arguments[s->place].name);
        else
            append(text, size, " %s", f->attributes[s->place].name);
    }
    append(text, size, " ->");
    for (int i = 0; i < b->outputs; i++) {
        const output *o = &b->output[i];
        if (o->over < 0)
            append(text, size, " %s%s:%s", f->arguments[o->place].name, o->always ? "" : "?",
                   shape_text(f, o->place, shape, sizeof shape));
    }
    return BST_OK;
}

bst_status bst_torch_result_types(int number, const int64_t *stack, int64_t *types) {
    if (number < 0 || number >= binding_count) return BST_INVALID;
    const binding *b = &bindings[number];
    bst_view views[BST_MOST_ARGUMENTS] = {0};
    bst_attribute attributes[BST_MOST_ATTRIBUTES] = {0};
    for (int i = 0; i < b->steps; i++) {
        const step *s = &b->step[i];
        if (s->kind == INTEGER || s->kind == BOOL) attributes[s->place].i = stack[i];
        if (s->kind != TENSOR && s->kind != OPTIONAL_TENSOR) continue;
        /* One that is not given is taken for one of the first's type, as in a call. */
        views[s->place].dtype = stack[i] < 0 ? views[0].dtype : (bst_dtype)stack[i];
        views[s->place].dims = stack[i] >= 0;
    }
    for (int i = 0, r = 0; i < b->outputs; i++)
        if (b->output[i].over < 0) types[r++] = bst__output_type(b->function, b->output[i].place, views, attributes);
    return BST_OK;
}

bst_torch_kernel bst__torch_kernel(const char *name) {
    for (int i = 0; i < binding_count; i++)
        if (strcmp(bindings[i].text, name) == 0) return kernels[i];
    return NULL;
}
