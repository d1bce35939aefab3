/* register.c - the operators of ops.def as PyTorch operators in the namespace `bastile`, for CPU and CUDA tensors. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "bastile/torch.h"
#include "cuda/compile_only.h"
#include "torch/bind.h"
#include "torch/call.h"

static bst_status look_up(void *library, const char *path) {
#define LOOK_UP(type, name, arguments) *(void **)&bst__torch.name = dlsym(library, #name);
    BST_TORCH_FUNCTIONS(LOOK_UP)
    BST_TORCH_OPTIONAL_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    *(void **)&bst__torch.operator_delete = dlsym(RTLD_DEFAULT, "_ZdlPv");
    if (!bst__torch.operator_delete) *(void **)&bst__torch.operator_delete = dlsym(library, "_ZdlPv");
#define CHECK(type, name, arguments)                                                                              \
    if (!bst__torch.name)                                                                                         \
        return bst__error(BST_UNSUPPORTED, "torch: %s has no function %s; PyTorch 2.10 or newer is needed", path, \
                          #name);
    BST_TORCH_FUNCTIONS(CHECK)
#undef CHECK
    int32_t (*number)(void);
#define ASK(name, code, bits)                                                                                      \
    if (!(*(void **)&number = dlsym(library, "aoti_torch_dtype_" #name)))                                          \
        return bst__error(BST_UNSUPPORTED, "torch: %s does not know the type %s; PyTorch 2.10 or newer is needed", \
                          path, #name);                                                                            \
    bst__torch.number_of_##name = number();
    BST_TORCH_TYPES(ASK)
#undef ASK
    return BST_OK;
}

/* CUDA functions live in a library of their own, which a CPU build lacks. */
static void look_up_cuda(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/libtorch_cuda.so", folder);
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    if (library && !bst__torch.aoti_torch_get_current_cuda_stream)
        *(void **)&bst__torch.aoti_torch_get_current_cuda_stream = dlsym(library, "aoti_torch_get_current_cuda_stream");
}

static bst_status register_all(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/libtorch_cpu.so", folder);
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library) return bst__error(BST_HOST, "torch: %s", dlerror());
    BST_TRY(look_up(library, path));
    look_up_cuda(folder);
    bst_torch_library fragment, cpu, cuda;
    if (bst__torch.aoti_torch_library_init_fragment("bastile", __FILE__, __LINE__, &fragment) ||
        bst__torch.aoti_torch_library_init_impl("bastile", "CPU", __FILE__, __LINE__, &cpu) ||
        bst__torch.aoti_torch_library_init_impl("bastile", "CUDA", __FILE__, __LINE__, &cuda))
        return bst__error(BST_HOST, "torch: the operator namespace 'bastile' could not be opened");
    BST_TRY(bst__torch_bind_all(fragment, cpu, cuda));
    return bst__torch_bind_lists(fragment, cpu, cuda);
}

bst_status bst_torch_register(const char *folder) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool registered;
    if (!folder) return bst__error(BST_INVALID, "bst_torch_register: folder is NULL; PyTorch's lib folder is needed");
    pthread_mutex_lock(&lock);
    bst_status status = registered ? BST_OK : register_all(folder);
    registered = status == BST_OK;
    pthread_mutex_unlock(&lock);
    return status;
}

bst_status bst_torch_compile_ahead(int device, int arch) { return bst__compile_ahead(device, arch); }
