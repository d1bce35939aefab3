/* cpu_level.c - which of the compiled vector levels this machine runs. */
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

static bst_cpu_level detect(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bst_cpu_level level = BST_CPU_BASELINE;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        level = BST_CPU_V3;
    if (level == BST_CPU_V3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        level = BST_CPU_V4;
    return level;
#else
    return BST_CPU_BASELINE; /* on Arm, NEON is the baseline */
#endif
}

/* What BASTILE_CPU asks for: at most this. */
static const struct {
    const char *name;
    bst_cpu_level most;
} settings[] = {{"", BST_CPU_V4}, {"baseline", BST_CPU_BASELINE}, {"v3", BST_CPU_V3}};

/* Level + 1, or WRONG; every thread computes the same value. */
enum { UNKNOWN, WRONG = -1 };
static _Atomic int known;

static int read_once(void) {
    int level = known;
    if (level != UNKNOWN) return level;
    const char *wanted = getenv("BASTILE_CPU");
    level = WRONG;
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (strcmp(wanted ? wanted : "", settings[i].name)) continue;
        bst_cpu_level found = detect();
        level = (int)(found < settings[i].most ? found : settings[i].most) + 1;
    }
    return known = level;
}

bst_status bst__need_cpu_level(const char *op) {
    if (read_once() != WRONG) return BST_OK;
    return bst__error(BST_INVALID, "%s: BASTILE_CPU is \"%s\"; baseline or v3, or no such variable, is needed", op,
                      getenv("BASTILE_CPU"));
}

bst_cpu_level bst__cpu_level(void) {
    int level = read_once();
    return level == WRONG ? BST_CPU_BASELINE : (bst_cpu_level)(level - 1);
}
