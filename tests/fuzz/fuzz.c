/* fuzz.c - random calls of every operator function, legal and illegal, drawn from the descriptions.
 *
 *     fuzz [--seed N] [--calls N] [--seconds N] [--first N] [--only FUNCTION]
 *
 * A legal call is accepted, unless a function beside the table says otherwise, writes its outputs and nothing beside
 * them, the same bits when it is repeated amid other garbage and with the work cut otherwise, and what the reference
 * says. An illegal one is refused by a sentence that names the argument, and writes nothing; so is every call that is
 * refused. A failure names seed and call; --seed S --first C --calls 1 repeats it alone. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fuzz.h"

static struct options {
    uint64_t seed, first, calls;
    double seconds; /* 0: as many calls as are asked for */
    const char *only;
} options = {.seed = 1, .calls = 2000};

enum { MOST_FAILURES = 50 };
static uint64_t at; /* the call that is under way */
static int failures;

/* ---- failures ---------------------------------------------------------------------------------------------------- */

static void show(const fuzz_call *c, const fuzz_raw *raw) {
    for (int i = 0; c->function->attributes && c->function->attributes[i].name; i++) {
        const bst_attribute_rule *r = &c->function->attributes[i];
        double value = r->type == 'd' ? raw->attributes[i].d : (double)raw->attributes[i].i;
        printf("    %s = %g\n", r->name, value);
    }
    for (int i = 0; i < c->count; i++) {
        if (!c->of[i].given) continue;
        const DLTensor *t = &raw->tensor[i];
        printf("    %s%s: type %d.%d at %% 64 = %d [", c->function->arguments[i].name, raw->given[i] ? "" : " (NULL)",
               t->dtype.code, t->dtype.bits, (int)(((uintptr_t)t->data + t->byte_offset) % 64));
        for (int d = 0; d < c->of[i].dims; d++) printf("%s%lld", d ? ", " : "", (long long)raw->shape[i][d]);
        printf("] strides [");
        for (int d = 0; d < c->of[i].dims; d++) printf("%s%lld", d ? ", " : "", (long long)raw->stride[i][d]);
        printf("]%s%s\n", c->of[i].over >= 0 ? " in the place of " : "",
               c->of[i].over >= 0 ? c->function->arguments[c->of[i].over].name : "");
    }
}

static void tell_how_to_repeat(void) {
    printf("    again: --seed %llu --first %llu --calls 1%s%s\n", (unsigned long long)options.seed,
           (unsigned long long)at, options.only ? " --only " : "", options.only ? options.only : "");
}

static void __attribute__((format(printf, 3, 4))) fail(const fuzz_call *c, const fuzz_raw *raw, const char *format,
                                                       ...) {
    va_list arguments;
    printf("fuzz: %s: ", c->function->name);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
    tell_how_to_repeat();
    show(c, raw);
    if (++failures == MOST_FAILURES) exit(EXIT_FAILURE);
}

/* ---- what a call may use ----------------------------------------------------------------------------------------- */

enum { PIECES = 16, WORKSPACE_GUARD = 256 };

static struct workspace {
    unsigned char *block;
    size_t bytes;
} workspaces[PIECES];
static bool short_of_memory, overran;

static void *allocate(void *user, DLDevice device, size_t bytes) {
    (void)user, (void)device;
    if (short_of_memory) return NULL;
    for (int i = 0; i < PIECES; i++) {
        if (workspaces[i].block) continue;
        size_t all = (bytes + 2 * WORKSPACE_GUARD + 255) / 256 * 256;
        workspaces[i] = (struct workspace){aligned_alloc(256, all), bytes};
        if (!workspaces[i].block) return NULL;
        memset(workspaces[i].block, 0xff, all);
        return workspaces[i].block + WORKSPACE_GUARD;
    }
    return NULL;
}

static void release(void *user, DLDevice device, void *memory) {
    (void)user, (void)device;
    for (int i = 0; memory && i < PIECES; i++) {
        unsigned char *block = workspaces[i].block;
        if (!block || block + WORKSPACE_GUARD != memory) continue;
        for (size_t b = 0; b < WORKSPACE_GUARD; b++)
            overran |= block[b] != 0xff || block[WORKSPACE_GUARD + workspaces[i].bytes + b] != 0xff;
        free(block);
        workspaces[i].block = NULL;
    }
}

static uint64_t cuts;

/* In pieces of any size that the grain allows, the last ones first. */
static void parallel_for(void *user, int64_t count, int64_t grain, void (*body)(void *, int64_t, int64_t),
                         void *context) {
    (void)user;
    if (grain < 1) grain = 1;
    while (count > 0) {
        cuts = cuts * UINT64_C(6364136223846793005) + 1442695040888963407u;
        int64_t pieces = count / grain, mine = pieces < 2 ? count : grain * (1 + (int64_t)(cuts >> 40) % (pieces - 1));
        if (cuts >> 62 == 0) mine = count;
        body(context, count - mine, count);
        count -= mine;
    }
}

static const bst_exec exec = {
    .size = sizeof exec, .allocate = allocate, .release = release, .parallel_for = parallel_for};

static void cut_by(uint64_t by) { cuts = by; }

static bst_status run(const fuzz_call *c, const fuzz_raw *raw, uint64_t cut) {
    cut_by(cut);
    return bst__run(c->function, &exec, raw->given, raw->attributes);
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

static void judge_refusal(const fuzz_call *c, const fuzz_raw *raw, const char *what, const char *name) {
    const char *text = bst_last_error(), *changed = fuzz_changed(c, false);
    size_t length = strlen(c->function->name);
    if (changed) fail(c, raw, "%s, was refused (%s), and memory at %s has changed", what, text, changed);
    if (strncmp(text, c->function->name, length) || strncmp(text + length, ": ", 2) || strlen(text) < length + 16)
        fail(c, raw, "%s, was refused without a sentence: '%s'", what, text);
    else if (name && !strstr(text + length, name))
        fail(c, raw, "%s, was refused, but not for %s: '%s'", what, name, text);
}

static void judge_illegal(fuzz_call *c) {
    fuzz_raw raw;
    char what[128];
    const char *name;
    fuzz_restore(c, 0xff);
    if (!fuzz_spoil(c, &raw, what, &name)) return;
    if (run(c, &raw, 1) == BST_OK)
        fail(c, &raw, "%s, and it was accepted", what);
    else
        judge_refusal(c, &raw, what, name);
}

/* What the table alone says, without the functions beside it: it must find nothing wrong. */
static bool judge_table(fuzz_call *c, const fuzz_raw *raw) {
    bst_argument arguments[BST_MOST_ARGUMENTS + 1] = {{0}};
    bst_function alone = *c->function;
    bst_view views[BST_MOST_ARGUMENTS];
    bst_symbols symbols;
    for (int i = 0; i < c->count; i++) {
        arguments[i] = c->function->arguments[i];
        arguments[i].check = NULL;
    }
    alone.arguments = arguments;
    alone.check = NULL;
    bst_status status = bst__check_inputs(&alone, raw->given, raw->attributes, views, &symbols);
    for (int i = 0; i < c->count && status == BST_OK; i++) {
        if (!(arguments[i].flags & BST_OUT)) continue;
        status = bst__check_output(&alone, i, raw->given[i], false, raw->attributes, views, &symbols);
        int64_t size[BST_MAX_DIMS], count = 1;
        if (status != BST_OK || !c->of[i].given) continue;
        int dims = bst__output_shape(&alone, i, views, raw->attributes, &symbols, size);
        for (int d = 0; d < dims; d++) count *= size[d];
        if (count != c->of[i].count)
            fail(c, raw, "the shape made for %s has %lld elements", arguments[i].name, (long long)count);
    }
    if (status != BST_OK) fail(c, raw, "a legal call was refused: %s", bst_last_error());
    return status == BST_OK;
}

/* Several roundings to the coarsest type at hand, and float32's along sums. What is nearly too large for a type, or was
 * on the way, is left out; so is what denormals lose. */
static void judge_numbers(const fuzz_call *c, const fuzz_raw *raw) {
    double coarsest = 0x1p-24;
    for (int i = 0; i < c->count; i++)
        if (c->of[i].given && c->of[i].type <= BST_F16) coarsest = fmax(coarsest, fuzz_roundoff(c->of[i].type));
    for (int i = 0; i < c->count; i++) {
        const fuzz_tensor *t = &c->of[i];
        if (!t->results || !t->size) continue;
        double most = t->type == BST_F16 ? 3e4 : 1e30, floor = t->type == BST_F16 ? 1e-6 : 1e-30;
        for (int64_t e = 0; e < t->count; e++) {
            double want = t->numbers[e], got = t->results[e];
            bool exact = t->type >= BST_I64 || t->size[e] == 0;
            if (!exact && (!(t->size[e] < most) || !(fabs(want) < most))) continue;
            double allowed = exact ? 0 : t->size[e] * (6 * coarsest + 2e-5) + floor;
            if (fabs(got - want) <= allowed || got == want || (exact && isnan(got) && isnan(want))) continue;
            fail(c, raw, "%s[%lld] is %.9g; %.9g, and at most %.3g away, is needed", c->function->arguments[i].name,
                 (long long)e, got, want, allowed);
            for (int j = 0; j < c->count; j++) /* where it comes from, if that has as many elements */
                if (c->of[j].given && !c->of[j].results && e < c->of[j].count)
                    printf("    %s: element %lld is %.9g\n", c->function->arguments[j].name, (long long)e,
                           c->of[j].numbers[e]);
            break;
        }
    }
}

static void judge_repetition(fuzz_call *c, const fuzz_raw *raw) {
    double *first[BST_MOST_ARGUMENTS];
    for (int i = 0; i < c->count; i++) {
        first[i] = c->of[i].results;
        if (first[i] && !(c->of[i].results = malloc((size_t)(c->of[i].count + 1) * sizeof(double)))) abort();
    }
    fuzz_restore(c, 0x00);
    bst_status status = run(c, raw, fuzz_bits());
    if (status != BST_OK) fail(c, raw, "refused when it was repeated: %s", bst_last_error());
    fuzz_read(c);
    for (int i = 0; i < c->count; i++) {
        for (int64_t e = 0; first[i] && e < c->of[i].count && status == BST_OK; e++) {
            double one = first[i][e], two = c->of[i].results[e];
            if ((one == two && signbit(one) == signbit(two)) || (isnan(one) && isnan(two))) continue;
            fail(c, raw, "%s[%lld] is %.9g, and %.9g when it is repeated", c->function->arguments[i].name, (long long)e,
                 one, two);
            break;
        }
        free(first[i]);
    }
}

/* Without workspace it fails for that, if it asks for any. */
static void judge_shortage(fuzz_call *c, const fuzz_raw *raw) {
    fuzz_restore(c, 0xff);
    short_of_memory = true;
    bst_status status = run(c, raw, 1);
    short_of_memory = false;
    if (status != BST_OK && status != BST_NO_MEMORY) fail(c, raw, "without workspace: %s", bst_last_error());
    if (fuzz_changed(c, true)) fail(c, raw, "without workspace %s was written beside", fuzz_changed(c, true));
}

/* Whether it was accepted. */
static bool judge(fuzz_call *c) {
    fuzz_raw raw;
    fuzz_write_raw(c, &raw);
    if (!judge_table(c, &raw)) return false;
    if (run(c, &raw, 1) != BST_OK) {
        judge_refusal(c, &raw, "a call that a function beside the table judged", NULL);
        return false;
    }
    const char *changed = fuzz_changed(c, true);
    if (changed) fail(c, &raw, "wrote beside an output, at %s", changed);
    fuzz_read(c);
    fuzz_refer(c);
    judge_numbers(c, &raw);
    judge_repetition(c, &raw);
    if (fuzz_chance(20)) judge_shortage(c, &raw);
    for (int i = 0; i < PIECES; i++)
        if (workspaces[i].block) fail(c, &raw, "workspace was not released");
    if (overran) fail(c, &raw, "wrote beside its workspace");
    overran = false;
    return true;
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

enum { MOST_FUNCTIONS = 100 };
static const bst_function *functions[MOST_FUNCTIONS];
static int function_count;
static int64_t tried[MOST_FUNCTIONS], accepted[MOST_FUNCTIONS];

/* The place of a function; those that take lists follow those that have a description. -1: there is none. */
static int function_called(const char *name) {
    for (int i = 0; i < function_count; i++)
        if (strcmp(functions[i]->name, name) == 0) return i;
    for (int i = 0; i < FUZZ_LISTS; i++)
        if (strcmp(fuzz_list_names[i], name) == 0) return function_count + i;
    return -1;
}

/* Every function has a reference or says that it has none, and the tables name nothing else. */
static void check_tables(void) {
    for (int i = 0; i < function_count; i++) {
        int found = 0;
        for (const fuzz_reference *r = fuzz_references; r->name; r++) found += !strcmp(r->name, functions[i]->name);
        for (const char *const *n = fuzz_without_reference; *n; n++) found += !strcmp(*n, functions[i]->name);
        if (found == 1) continue;
        printf("fuzz: %s stands %d times in the tables of tests/fuzz/reference.c; once is needed\n", functions[i]->name,
               found);
        failures++;
    }
    for (const fuzz_reference *r = fuzz_references; r->name; r++)
        if (function_called(r->name) < 0)
            failures++, printf("fuzz: there is no function %s, for which there is a reference\n", r->name);
    for (const char *const *n = fuzz_without_reference; *n; n++)
        if (function_called(*n) < 0)
            failures++, printf("fuzz: there is no function %s, which is to have no reference\n", *n);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void fuzz_one(void) {
    fuzz_call call;
    fuzz_seed(options.seed, at);
    int which = (int)fuzz_below(function_count + FUZZ_LISTS);
    if (options.only) which = function_called(options.only);
    tried[which]++;
    if (which >= function_count) {
        int failed = fuzz_lists((fuzz_list)(which - function_count), &exec, cut_by);
        accepted[which] += !failed;
        failures += failed;
        if (failed) tell_how_to_repeat();
        return;
    }
    fuzz_draw(&call, functions[which]);
    fuzz_place_in_memory(&call);
    fuzz_fill(&call);
    if (judge(&call)) {
        accepted[which]++;
        if (fuzz_chance(2)) judge_illegal(&call);
    }
    fuzz_free(&call);
}

/* Of a function that refuses nearly everything nothing is tested: bind_related (draw.c) is to know what it needs. */
static void check_acceptance(void) {
    enum { ENOUGH = 100 };
    for (int i = 0; i < function_count; i++) {
        if (tried[i] < ENOUGH || accepted[i] * 16 >= tried[i]) continue;
        failures++;
        printf("fuzz: %s accepted %lld of %lld legal calls; the last message: %s\n", functions[i]->name,
               (long long)accepted[i], (long long)tried[i], bst_last_error());
    }
}

static void read_options(int count, char **words) {
    for (int i = 1; i < count; i += 2) {
        const char *value = i + 1 < count ? words[i + 1] : NULL;
        if (value && !strcmp(words[i], "--seed"))
            options.seed = strtoull(value, NULL, 10);
        else if (value && !strcmp(words[i], "--first"))
            options.first = strtoull(value, NULL, 10);
        else if (value && !strcmp(words[i], "--calls"))
            options.calls = strtoull(value, NULL, 10);
        else if (value && !strcmp(words[i], "--seconds"))
            options.seconds = strtod(value, NULL), options.calls = UINT64_MAX / 2;
        else if (value && !strcmp(words[i], "--only") && function_called(value) >= 0)
            options.only = value;
        else {
            printf("fuzz [--seed N] [--calls N] [--seconds N] [--first N] [--only FUNCTION]\n");
            exit(2);
        }
    }
}

int main(int count, char **words) {
    for (int r = 0; fuzz_rooms[r]; r++)
        for (const bst_function *const *f = fuzz_rooms[r]; *f; f++) functions[function_count++] = *f;
    read_options(count, words);
    check_tables();
    double begin = now(), told = begin;
    uint64_t end = options.first + options.calls;
    for (at = options.first; at < end && (!options.seconds || now() - begin < options.seconds); at++) {
        fuzz_one();
        if (now() - told < 10) continue;
        told = now();
        printf("fuzz: %llu calls in %.0f s, %d failures\n", (unsigned long long)(at - options.first + 1), told - begin,
               failures);
        fflush(stdout);
    }
    if (!options.only) check_acceptance();
    int64_t all = 0;
    for (int i = 0; i < function_count + FUZZ_LISTS; i++) all += accepted[i];
    printf("fuzz: seed %llu, %llu calls of %d functions, %lld accepted, %d failures\n",
           (unsigned long long)options.seed, (unsigned long long)(at - options.first), function_count + FUZZ_LISTS,
           (long long)all, failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
