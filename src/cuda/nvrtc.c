/* nvrtc.c - compiling a kernel for one chip by NVRTC.
 *
 * Kernels see only the headers that are embedded in this library; NVRTC takes those from memory. */
#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/fork.h"
#include "cuda/library.h"
#include "cuda/nvrtc_api.h"

static const bst_library_name nvrtc = {
    "NVRTC", "BASTILE_NVRTC", "nvidia-cuda-nvrtc", {"libnvrtc.so.13", "libnvrtc.so.12"}};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool opened;
static bst_nvrtc_api api;
static int version_major, version_minor; /* where it is opened */

static void in_child(void) { bst__free_lock(&lock); }
BST_IN_CHILD(in_child)

/* NVRTC opens its built-in functions by name alone, and does not find them beside itself unless they are loaded. Called
 * for every compilation: it costs nothing once they are, and the first time may have lacked descriptors. */
static void open_builtins(void) {
    void *address;
    memcpy(&address, &api.nvrtcVersion, sizeof address);
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname) return;
    const char *slash = strrchr(info.dli_fname, '/');
    char path[4096];
    int length = snprintf(path, sizeof path, "%.*slibnvrtc-builtins.so.%d.%d",
                          slash ? (int)(slash - info.dli_fname) + 1 : 0, info.dli_fname, version_major, version_minor);
    if (length > 0 && (size_t)length < sizeof path) dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static bst_status open_locked(const char *op) {
    void *handle;
    BST_TRY(bst__library_open(op, &nvrtc, &handle));
    const bst_symbol symbols[] = {
#define SYMBOL(name, result, arguments) {#name, &api.name},
        BST_NVRTC_FUNCTIONS(SYMBOL)
#undef SYMBOL
    };
    const char *missing = bst__library_symbols(handle, symbols, sizeof symbols / sizeof *symbols);
    int major = 0, minor = 0;
    if (!missing && api.nvrtcVersion(&major, &minor) == NVRTC_SUCCESS && major >= 12) {
        version_major = major;
        version_minor = minor;
        atomic_store_explicit(&opened, true, memory_order_release);
        return BST_OK;
    }
    dlclose(handle);
    if (missing) return bst__error(BST_NO_CUDA, "%s: NVRTC lacks %s; 12.0 or later is needed", op, missing);
    return bst__error(BST_NO_CUDA, "%s: NVRTC is of version %d.%d; 12.0 or later is needed", op, major, minor);
}

bst_status bst__nvrtc_version(const char *op, int *major, int *minor) {
    bst_status status = BST_OK;
    if (!atomic_load_explicit(&opened, memory_order_acquire)) {
        pthread_mutex_lock(&lock);
        if (!opened) status = open_locked(op);
        pthread_mutex_unlock(&lock);
    }
    if (status != BST_OK) return status; /* another thread may be opening it */
    *major = version_major;
    *minor = version_minor;
    return BST_OK;
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

/* "sm_90a": the instructions of wgmma and the like exist only in the variant that is bound to one chip. */
static void target_name(int arch, char name[16]) {
    snprintf(name, 16, "sm_%d%s", arch, arch == 90 || arch == 100 ? "a" : "");
}

bst_status bst__nvrtc_options(const char *op, const bst_kernel *kernel, int arch, const int64_t *values, bool report,
                              bst_options *out) {
    size_t used = 0;
    char target[16];
    target_name(arch, target);
    out->count = 0;
    int macros = 0;
    while (kernel->macros[macros]) macros++;
    for (int i = 0; i < macros + 2 + report; i++) {
        char *at = out->storage + used;
        size_t room = sizeof out->storage - used;
        int length;
        if (i == 0)
            length = snprintf(at, room, "--gpu-architecture=%s", target);
        else if (i == 1)
            length = snprintf(at, room, "--std=c++17");
        else if (i < macros + 2)
            length = snprintf(at, room, "-D%s=%lld", kernel->macros[i - 2], (long long)values[i - 2]);
        else
            length = snprintf(at, room, "--ptxas-options=-v");
        if (length < 0 || (size_t)length >= room)
            return bst__error(BST_COMPILE, "%s: kernel %s has more macros than fit", op, kernel->entry);
        out->list[out->count++] = at;
        memcpy(out->joined + used, at, (size_t)length);
        out->joined[used + (size_t)length] = ' ';
        used += (size_t)length + 1;
    }
    out->joined[used - 1] = '\0';
    return BST_OK;
}

/* ---- compiling --------------------------------------------------------------------------------------------------- */

static bool knows(int arch) {
    int count = 0, archs[256];
    if (api.nvrtcGetNumSupportedArchs(&count) != NVRTC_SUCCESS || count > (int)(sizeof archs / sizeof *archs) ||
        api.nvrtcGetSupportedArchs(archs) != NVRTC_SUCCESS)
        return true; /* it will say so itself */
    for (int i = 0; i < count; i++)
        if (archs[i] == arch) return true;
    return false;
}

/* The program's log; NULL where there is none. */
static char *read_log(nvrtcProgram program) {
    size_t bytes = 0;
    if (api.nvrtcGetProgramLogSize(program, &bytes) != NVRTC_SUCCESS || !bytes) return NULL;
    char *log = calloc(bytes + 1, 1);
    if (log && api.nvrtcGetProgramLog(program, log) == NVRTC_SUCCESS) return log;
    free(log);
    return NULL;
}

/* Where a log begins to speak of errors: warnings that stand before them would fill the message. */
static const char *first_error(const char *log) {
    const char *error = strstr(log, "error");
    if (!error) return log;
    while (error > log && error[-1] != '\n') error--;
    return error;
}

/* What a compilation that failed is to be called. NVRTC 13 says "compilation failed" when it is out of memory too: its
 * front end, its optimiser and ptxas each have words for that, or there is no room for any. */
static bst_status status_of(nvrtcResult result, const char *log) {
    static const char *const no_memory[] = {"out of memory", "Memory allocation failure"};
    if (result == NVRTC_ERROR_OUT_OF_MEMORY) return BST_NO_MEMORY;
    if (result == NVRTC_ERROR_INVALID_OPTION) return BST_NO_CUDA;
    if (result != NVRTC_ERROR_COMPILATION || !log) return BST_CUDA;
    for (size_t i = 0; i < sizeof no_memory / sizeof *no_memory; i++)
        if (strstr(log, no_memory[i])) return BST_NO_MEMORY;
    return strstr(log, "error") ? BST_COMPILE : BST_CUDA;
}

static bst_status no_code(const char *op, const bst_kernel *kernel, nvrtcResult result) {
    return bst__error(status_of(result, NULL), "%s: NVRTC gave no code for kernel %s (%s)", op, kernel->entry,
                      api.nvrtcGetErrorString(result));
}

static bst_status take_cubin(const char *op, const bst_kernel *kernel, nvrtcProgram program, bst_blob *cubin) {
    size_t bytes = 0;
    nvrtcResult result = api.nvrtcGetCUBINSize(program, &bytes);
    if (result != NVRTC_SUCCESS || !bytes) return no_code(op, kernel, result);
    void *data = malloc(bytes);
    if (!data) return bst__error(BST_NO_MEMORY, "%s: %zu bytes could not be allocated", op, bytes);
    result = api.nvrtcGetCUBIN(program, data);
    if (result == NVRTC_SUCCESS) {
        *cubin = (bst_blob){data, bytes};
        return BST_OK;
    }
    free(data);
    return no_code(op, kernel, result);
}

bst_status bst__nvrtc_compile(const char *op, const bst_kernel *kernel, int arch, const bst_options *options,
                              const bst_texts *texts, bst_blob *cubin, char **log) {
    int major, minor;
    char target[16];
    target_name(arch, target);
    if (log) *log = NULL;
    BST_TRY(bst__nvrtc_version(op, &major, &minor));
    if (!knows(arch))
        return bst__error(BST_NO_CUDA, "%s: NVRTC %d.%d cannot compile for this GPU (%s); another version is needed",
                          op, major, minor, target);
    open_builtins();
    nvrtcProgram program = NULL;
    nvrtcResult result = api.nvrtcCreateProgram(&program, texts->texts[0], texts->names[0], texts->count - 1,
                                                texts->texts + 1, texts->names + 1);
    if (result != NVRTC_SUCCESS)
        return bst__error(status_of(result, NULL), "%s: NVRTC cannot take in %s (%s)", op, kernel->file,
                          api.nvrtcGetErrorString(result));
    /* The status of the compilation comes first: after a failure NVRTC gives 0 bytes of code and calls it success. */
    result = api.nvrtcCompileProgram(program, options->count, options->list);
    char *text = read_log(program);
    bst_status status;
    if (result == NVRTC_SUCCESS)
        status = take_cubin(op, kernel, program, cubin);
    else
        status = bst__error(status_of(result, text),
                            "%s: kernel %s of %s does not compile for %s by NVRTC %d.%d (%s): %.480s [options: %.300s]",
                            op, kernel->entry, kernel->file, target, major, minor, api.nvrtcGetErrorString(result),
                            text ? first_error(text) : "no log", options->joined);
    api.nvrtcDestroyProgram(&program);
    if (log && status == BST_OK)
        *log = text;
    else
        free(text);
    return status;
}
