/* test.h - the little that the C tests share: checks that print both values and go on, and a report at the end. */
#ifndef BST_TEST_H
#define BST_TEST_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int bst_test_failures, bst_test_checks, bst_test_skipped;

/* Whether the environment leaves this test in: BASTILE_TEST_ONLY names the one to run, BASTILE_TEST_WITHOUT one to
 * leave out. */
static inline bool bst_test_wanted(const char *name) {
    const char *only = getenv("BASTILE_TEST_ONLY"), *without = getenv("BASTILE_TEST_WITHOUT");
    return (!only || !strcmp(only, name)) && (!without || strcmp(without, name));
}

#define TEST(name) static void name(void)
#define RUN(name)                                                                                                     \
    do {                                                                                                              \
        if (!bst_test_wanted(#name)) break;                                                                           \
        int before = bst_test_failures, skipped = bst_test_skipped;                                                   \
        name();                                                                                                       \
        printf("%s %s\n", bst_test_failures > before ? "FAIL" : bst_test_skipped > skipped ? "skip" : "ok  ", #name); \
        fflush(stdout);                                                                                               \
    } while (0)

/* The first failures say it all; a thousand more would bury them. */
enum { BST_TEST_PRINTED = 20 };

#define FAILED(...)                                         \
    do {                                                    \
        if (bst_test_failures++ >= BST_TEST_PRINTED) break; \
        printf("%s:%d: ", __FILE__, __LINE__);              \
        printf(__VA_ARGS__);                                \
        printf("\n");                                       \
    } while (0)

/* Some checks are left out, and why. */
#define SKIPPED(...)               \
    do {                           \
        bst_test_skipped++;        \
        printf("     left out: "); \
        printf(__VA_ARGS__);       \
        printf("\n");              \
    } while (0)

#define CHECK(condition)                                    \
    do {                                                    \
        bst_test_checks++;                                  \
        if (!(condition)) FAILED("not so: %s", #condition); \
    } while (0)

#define CHECK_EQ_I(a, b)                                                                               \
    do {                                                                                               \
        bst_test_checks++;                                                                             \
        int64_t value_a = (int64_t)(a), value_b = (int64_t)(b);                                        \
        if (value_a != value_b) FAILED("%s is %" PRId64 ", %s is %" PRId64, #a, value_a, #b, value_b); \
    } while (0)

/* Within `tolerance` of each other; NaN is never close. */
#define CHECK_CLOSE(a, b, tolerance)                                                                            \
    do {                                                                                                        \
        bst_test_checks++;                                                                                      \
        double value_a = (a), value_b = (b), apart = value_a > value_b ? value_a - value_b : value_b - value_a; \
        if (!(apart <= (tolerance))) FAILED("%s is %.9g, %s is %.9g", #a, value_a, #b, value_b);                \
    } while (0)

#define CHECK_STR(text, needle)                                                               \
    do {                                                                                      \
        bst_test_checks++;                                                                    \
        const char *value = (text);                                                           \
        if (!strstr(value, needle)) FAILED("%s, \"%s\", lacks \"%s\"", #text, value, needle); \
    } while (0)

enum { BST_TEST_SKIP = 77 /* to Meson: nothing failed, and something was left out */ };

static inline int bst_test_report(void) {
    printf("%d checks, %d failed\n", bst_test_checks, bst_test_failures);
    return bst_test_failures ? EXIT_FAILURE : bst_test_skipped ? BST_TEST_SKIP : EXIT_SUCCESS;
}

#endif
