/* nvrtc_there.h - whether what needs NVRTC can be tested. */
#ifndef BST_TEST_NVRTC_THERE_H
#define BST_TEST_NVRTC_THERE_H

#include "cuda/nvrtc.h"
#include "test.h"

/* NVRTC is looked for in BASTILE_NVRTC_FOLDER and in the usual places. False, and the checks are left out, where there
 * is none; but never where BASTILE_NVRTC_FOLDER or BASTILE_NVRTC is set: where it is expected, its absence is a
 * failure. */
static inline bool bst_nvrtc_is_there(void) {
    const char *folder = getenv("BASTILE_NVRTC_FOLDER");
    int major, minor;
    if (folder && *folder) CHECK_EQ_I(bst_add_library_path(folder), BST_OK);
    if (folder || getenv("BASTILE_NVRTC") || bst__nvrtc_version("test", &major, &minor) == BST_OK) return true;
    SKIPPED("%s", bst_last_error());
    return false;
}

#endif
