/* compile.c - a kernel's text becomes a shared object of the host: $BASTILE_EMU_CXX (g++) with the launch's macros,
 * against the emulator's ptx.cuh in place of the real one, under ASan and UBSan where the emulator is.
 *
 * Objects are kept in $BASTILE_EMU_CACHE under a hash of every text and option; without it, in a temporary folder that
 * goes with the process. The chip is no option: what it lacks is noticed when a kernel runs, and one object serves all.
 * Any number of processes may share a cache: each file appears whole or not at all. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "emu.h"
#include "sanitize.h"

extern char **environ;

static const char *const device_files[] = {"ptx.cuh", "warpgroup.cuh", "emu_device.h", "emu_types.h"};

/* No system headers, as under NVRTC; no fused multiply-add that the text does not ask for. */
static const char *const flags[] = {
    "-x",
    "c++",
    "-std=c++17",
    "-shared",
    "-nostdlib", /* linking with what a kernel has no use for takes a quarter of the time */
    "-fPIC",
    "-fvisibility=hidden",
    "-Og", /* most of these run for less time than they compile, and -O1 takes twice as long to compile */
    "-g1",
    "-w",
    "-nostdinc",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-omit-frame-pointer",
#ifdef EMU_ASAN
    /* Checks by calls, and without those that AddressSanitizer makes as well: two thirds of the time. */
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=undefined",
    "--param=asan-instrumentation-with-call-threshold=0",
#endif
};
enum { FLAG_COUNT = sizeof flags / sizeof *flags };

/* With $BASTILE_EMU_QUICK set: a third less time, for a kernel's own arrays have no red zones. UBSan still looks at an
 * index of an array, but not behind a pointer to one. */
static const char *quick_flag(void) {
    const char *quick = getenv("BASTILE_EMU_QUICK");
    return quick != NULL && *quick != 0 ? "--param=asan-stack=0" : "--param=asan-stack=1";
}

/* Clang has its sanitizers in the program. */
static const char *const libraries[] = {
#if defined(EMU_ASAN) && !defined(__clang__)
    "-lasan",
    "-lubsan",
#endif
    "-lm",
};
enum { LIBRARY_COUNT = sizeof libraries / sizeof *libraries };

typedef struct hash {
    uint64_t a, b;
} hash;

typedef struct library {
    hash key;
    void *handle;
    struct library *next;
} library;

static library *loaded;
static char cache[PATH_MAX - 256]; /* the folder */
static char sources[PATH_MAX];     /* in it, of these texts */
static hash sources_key;
static pid_t owner; /* whose temporary folder it is; 0: not temporary */
static _Atomic(int64_t) compiled_count, cached_count;

static const char *compiler(void) {
    const char *name = getenv("BASTILE_EMU_CXX");
    return name != NULL && *name != 0 ? name : "g++";
}

/* FNV-1a twice, from two starts; the length keeps neighbours apart. */
static void add_text(hash *h, const char *text) {
    const size_t length = strlen(text) + 1;
    for (size_t i = 0; i < length; ++i) {
        h->a = (h->a ^ (unsigned char)text[i]) * 0x100000001b3ull;
        h->b = (h->b ^ (unsigned char)text[i]) * 0x10000000233ull;
    }
}

static const hash empty_hash = {0xcbf29ce484222325ull, 0x9ae16a3b2f90404full};

/* ---- files ------------------------------------------------------------------------------------------------------- */

static char *read_text(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return NULL;
    char *text = NULL;
    size_t size = 0;
    if (fseek(file, 0, SEEK_END) == 0 && ftell(file) >= 0) {
        size = (size_t)ftell(file);
        rewind(file);
        text = malloc(size + 1);
    }
    if (text != NULL) text[fread(text, 1, size, file)] = 0;
    fclose(file);
    return text;
}

static bst_status write_text(const char *op, const char *path, const char *text) {
    if (access(path, R_OK) == 0) return BST_OK;
    char draft[PATH_MAX + 512];
    snprintf(draft, sizeof draft, "%s.%ld", path, (long)getpid());
    FILE *file = fopen(draft, "wb");
    bool written = file != NULL && fputs(text, file) >= 0;
    if (file != NULL) written = fclose(file) == 0 && written;
    if (written && rename(draft, path) == 0) return BST_OK;
    return bst__error(BST_COMPILE, "%s: the emulator cannot write %s: %s", op, path, strerror(errno));
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *walk) {
    (void)info, (void)type, (void)walk;
    return remove(path);
}

static void remove_cache(void) {
    if (owner == getpid()) nftw(cache, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

static bst_status open_cache(const char *op) {
    const char *given = getenv("BASTILE_EMU_CACHE");
    if (given != NULL && *given != 0) {
        snprintf(cache, sizeof cache, "%s", given);
        if (mkdir(cache, 0700) == 0 || errno == EEXIST) return BST_OK;
    } else {
        const char *folder = getenv("TMPDIR");
        snprintf(cache, sizeof cache, "%s/bastile-emu-XXXXXX", folder != NULL && *folder != 0 ? folder : "/tmp");
        if (mkdtemp(cache) != NULL) {
            owner = getpid();
            atexit(remove_cache);
            return BST_OK;
        }
    }
    return bst__error(BST_COMPILE, "%s: the emulator cannot make the folder %s: %s", op, cache, strerror(errno));
}

static bool is_replaced(const char *name) {
    for (size_t i = 0; i < sizeof device_files / sizeof *device_files; ++i) {
        if (strcmp(name, device_files[i]) == 0) return true;
    }
    return false;
}

/* Puts the embedded texts into a folder of their own, once; all but those which the emulator replaces. */
static bst_status write_sources(const char *op) {
    if (sources[0] != 0) return BST_OK;
    hash h = empty_hash;
    for (const bst_source *s = bst__sources; s->name != NULL; ++s) add_text(&h, s->name), add_text(&h, s->text);
    for (size_t i = 0; i < sizeof device_files / sizeof *device_files; ++i) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/device/%s", BST_EMU_DIR, device_files[i]);
        char *text = read_text(path);
        if (text == NULL) return bst__error(BST_COMPILE, "%s: the emulator cannot read %s", op, path);
        add_text(&h, text);
        free(text);
    }
    BST_TRY(open_cache(op));
    char folder[sizeof sources];
    snprintf(folder, sizeof folder, "%s/text-%016llx", cache, (unsigned long long)h.a);
    if (mkdir(folder, 0700) != 0 && errno != EEXIST) {
        return bst__error(BST_COMPILE, "%s: the emulator cannot make the folder %s: %s", op, folder, strerror(errno));
    }
    for (const bst_source *s = bst__sources; s->name != NULL; ++s) {
        char path[PATH_MAX + 256];
        snprintf(path, sizeof path, "%s/%s", folder, s->name);
        if (!is_replaced(s->name)) BST_TRY(write_text(op, path, s->text));
    }
    sources_key = h;
    memcpy(sources, folder, sizeof sources);
    return BST_OK;
}

/* ---- the compiler ------------------------------------------------------------------------------------------------ */

/* A sanitizer preloaded into this process is not for the compiler. */
static char **compiler_environment(void) {
    size_t count = 0, kept = 0;
    while (environ[count] != NULL) ++count;
    char **copy = calloc(count + 1, sizeof *copy);
    for (size_t i = 0; copy != NULL && i < count; ++i) {
        if (strncmp(environ[i], "LD_PRELOAD=", 11) != 0) copy[kept++] = environ[i];
    }
    return copy;
}

/* Runs it with both outputs in `log`; whether it succeeded. */
static bool run_compiler(const char *const *arguments, const char *log) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    char **environment = compiler_environment();
    pid_t child;
    const int error = posix_spawnp(&child, arguments[0], &actions, NULL, (char *const *)(uintptr_t)arguments,
                                   environment != NULL ? environment : environ);
    free(environment);
    posix_spawn_file_actions_destroy(&actions);
    int status = 0;
    if (error != 0) return false;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return false;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* The macros as options, "-DNAME=value"; their number. */
static int macro_options(const bst_launch *launch, char options[][96]) {
    int count = 0;
    for (int i = 0; i < BST_MAX_MACROS && launch->kernel->macros[i] != NULL; ++i) {
        snprintf(options[count++], 96, "-D%s=%lld", launch->kernel->macros[i], (long long)launch->values[i]);
    }
    return count;
}

static bst_status compile(const char *op, const char *file, char options[][96], int option_count, const char *object) {
    char include[sizeof sources + 2], device[PATH_MAX], input[PATH_MAX + 256], draft[PATH_MAX + 64], log[PATH_MAX + 64];
    snprintf(include, sizeof include, "-I%s", sources);
    snprintf(device, sizeof device, "-I%s/device", BST_EMU_DIR);
    snprintf(input, sizeof input, "%s/%s", sources, file);
    snprintf(draft, sizeof draft, "%s.%ld", object, (long)getpid());
    snprintf(log, sizeof log, "%s.%ld.log", object, (long)getpid());

    const char *arguments[FLAG_COUNT + BST_MAX_MACROS + LIBRARY_COUNT + 16];
    int n = 0;
    arguments[n++] = compiler();
    for (int i = 0; i < FLAG_COUNT; ++i) arguments[n++] = flags[i];
    for (int i = 0; i < option_count; ++i) arguments[n++] = options[i];
    const char *const rest[] = {quick_flag(), device, include, input, "-o", draft};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; ++i) arguments[n++] = rest[i];
    for (int i = 0; i < LIBRARY_COUNT; ++i) arguments[n++] = libraries[i];
    arguments[n] = NULL;

    const bool compiled = run_compiler(arguments, log) && rename(draft, object) == 0;
    char *text = compiled ? NULL : read_text(log);
    remove(log);
    if (compiled) return BST_OK;
    remove(draft);
    const char *first = text != NULL ? strstr(text, "error") : NULL;
    while (first != NULL && first > text && first[-1] != '\n') --first;
    bst__error(BST_COMPILE, "%s: %s did not compile on the emulator: %.800s", op, file,
               first != NULL  ? first
               : text != NULL ? text
                              : "its compiler did not run");
    free(text);
    return BST_COMPILE;
}

/* ---- loading ----------------------------------------------------------------------------------------------------- */

static bst_status load_library(const char *op, const bst_launch *launch, void **out) {
    char options[BST_MAX_MACROS][96];
    const int option_count = macro_options(launch, options);
    hash key = sources_key;
    add_text(&key, launch->kernel->file);
    add_text(&key, compiler());
    for (int i = 0; i < FLAG_COUNT; ++i) add_text(&key, flags[i]);
    add_text(&key, quick_flag());
    for (int i = 0; i < option_count; ++i) add_text(&key, options[i]);
    for (const library *l = loaded; l != NULL; l = l->next) {
        if (l->key.a == key.a && l->key.b == key.b) {
            *out = l->handle;
            return BST_OK;
        }
    }

    char object[PATH_MAX];
    snprintf(object, sizeof object, "%s/%016llx%016llx.so", cache, (unsigned long long)key.a,
             (unsigned long long)key.b);
    const bool cached = access(object, R_OK) == 0;
    if (!cached) BST_TRY(compile(op, launch->kernel->file, options, option_count, object));
    library *l = calloc(1, sizeof *l);
    if (l == NULL) return bst__error(BST_NO_MEMORY, "%s: no memory to load a kernel", op);
    l->key = key;
    l->handle = dlopen(object, RTLD_NOW | RTLD_LOCAL);
    if (l->handle == NULL) {
        free(l);
        return bst__error(BST_COMPILE, "%s: %s", op, dlerror());
    }
    const emu_runtime **current = dlsym(l->handle, "emu_current");
    if (current != NULL) *current = &emu_device;
    l->next = loaded;
    loaded = l;
    *out = l->handle;
    atomic_fetch_add(cached ? &cached_count : &compiled_count, 1);
    return BST_OK;
}

void bst_kernel_counts(int64_t *compiled, int64_t *cached) {
    if (compiled != NULL) *compiled = atomic_load(&compiled_count);
    if (cached != NULL) *cached = atomic_load(&cached_count);
}

bst_status emu_load(const char *op, const bst_launch *launch, const emu_kernel **out) {
    const bst_source *source = bst__sources;
    while (source->name != NULL && strcmp(source->name, launch->kernel->file) != 0) ++source;
    if (source->name == NULL) {
        return bst__error(BST_COMPILE, "%s: no embedded source is named %s", op, launch->kernel->file);
    }
    void *handle = NULL;
    BST_TRY(write_sources(op));
    BST_TRY(load_library(op, launch, &handle));
    char symbol[256];
    snprintf(symbol, sizeof symbol, "emu_kernel_%s", launch->kernel->entry);
    *out = dlsym(handle, symbol);
    if (*out != NULL) return BST_OK;
    return bst__error(BST_COMPILE, "%s: %s defines no BST_KERNEL named %s", op, launch->kernel->file,
                      launch->kernel->entry);
}
