/* nvrtc_api.h - the part of NVRTC's interface that we use, as in NVIDIA's NVRTC documentation (12.0 and later). */
#ifndef BST_NVRTC_API_H
#define BST_NVRTC_API_H

#include <stddef.h>

typedef int nvrtcResult;
typedef struct nvrtcProgram_st *nvrtcProgram;

enum {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_OUT_OF_MEMORY = 1,
    NVRTC_ERROR_INVALID_OPTION = 5,
    NVRTC_ERROR_COMPILATION = 6,
};

/* X(name, result, arguments) */
#define BST_NVRTC_FUNCTIONS(X)                                                                                     \
    X(nvrtcGetErrorString, const char *, (nvrtcResult result))                                                     \
    X(nvrtcVersion, nvrtcResult, (int *major, int *minor))                                                         \
    X(nvrtcGetNumSupportedArchs, nvrtcResult, (int *count))                                                        \
    X(nvrtcGetSupportedArchs, nvrtcResult, (int *archs))                                                           \
    X(nvrtcCreateProgram, nvrtcResult,                                                                             \
      (nvrtcProgram * program, const char *source, const char *name, int header_count, const char *const *headers, \
       const char *const *header_names))                                                                           \
    X(nvrtcDestroyProgram, nvrtcResult, (nvrtcProgram * program))                                                  \
    X(nvrtcCompileProgram, nvrtcResult, (nvrtcProgram program, int option_count, const char *const *options))      \
    X(nvrtcGetCUBINSize, nvrtcResult, (nvrtcProgram program, size_t *bytes))                                       \
    X(nvrtcGetCUBIN, nvrtcResult, (nvrtcProgram program, char *cubin))                                             \
    X(nvrtcGetProgramLogSize, nvrtcResult, (nvrtcProgram program, size_t *bytes))                                  \
    X(nvrtcGetProgramLog, nvrtcResult, (nvrtcProgram program, char *log))

typedef struct bst_nvrtc_api {
#define BST_DECLARE(name, result, arguments) result(*name) arguments;
    BST_NVRTC_FUNCTIONS(BST_DECLARE)
#undef BST_DECLARE
} bst_nvrtc_api;

#endif
