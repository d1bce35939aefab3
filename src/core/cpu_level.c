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

bst_cpu_level bst__cpu_level(void) {
    static _Atomic int known; /* level + 1; every thread computes the same value */
    int level = known;
    if (level) return (bst_cpu_level)(level - 1);
    bst_cpu_level found = detect();
    const char *wanted = getenv("BASTILE_CPU");
    if (wanted && !strcmp(wanted, "baseline")) found = BST_CPU_BASELINE;
    if (wanted && !strcmp(wanted, "v3") && found > BST_CPU_V3) found = BST_CPU_V3;
    known = (int)found + 1;
    return found;
}
