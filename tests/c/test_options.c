/* test_options.c - structs that callers fill: older ones, newer ones, and those whose size was not set. */
#include "core/options.h"

#include "tensors.h"

typedef struct known {
    size_t size;
    int64_t number;
    double factor;
} known;

/* What an older library had, and what a newer one has. */
typedef struct older {
    size_t size;
    int64_t number;
} older;

typedef struct newer {
    known known;
    double more;
    int64_t still_more;
} newer;

static bst_status take(const void *given, known *own) {
    memset(own, 255, sizeof *own);
    return bst__options("op", "options", given, own, sizeof *own);
}

TEST(none_given_means_the_usual) {
    known own;
    CHECK_OK(take(NULL, &own));
    CHECK_EQ_I(own.size, sizeof own);
    CHECK_EQ_I(own.number, 0);
    CHECK(own.factor == 0);
}

TEST(a_struct_of_our_size) {
    known own;
    CHECK_OK(take(&(known){sizeof(known), 7, 0.5}, &own));
    CHECK_EQ_I(own.size, sizeof own);
    CHECK_EQ_I(own.number, 7);
    CHECK(own.factor == 0.5);
}

TEST(an_older_struct_reads_as_if_the_rest_were_zero) {
    known own;
    struct {
        older given;
        double behind; /* it must not be read */
    } memory = {{sizeof(older), 7}, 0.5};
    CHECK_OK(take(&memory, &own));
    CHECK_EQ_I(own.size, sizeof own);
    CHECK_EQ_I(own.number, 7);
    CHECK(own.factor == 0);
    CHECK_OK(take(&(size_t){sizeof(size_t)}, &own));
    CHECK_EQ_I(own.number, 0);
}

TEST(a_newer_struct_is_accepted_where_what_is_new_is_zero) {
    known own;
    newer given = {{sizeof given, 7, 0.5}, 0, 0};
    CHECK_OK(take(&given, &own));
    CHECK_EQ_I(own.size, sizeof own);
    CHECK_EQ_I(own.number, 7);
    CHECK(own.factor == 0.5);
    for (size_t i = sizeof(known); i < sizeof given; i++) { /* each byte counts */
        ((unsigned char *)&given)[i] = 1;
        CHECK_EQ_I(take(&given, &own), BST_UNSUPPORTED);
        CHECK_STR(bst_last_error(), "op: options has 40 bytes, of which bastile ");
        CHECK_STR(bst_last_error(), " knows 24, and byte ");
        ((unsigned char *)&given)[i] = 0;
    }
}

TEST(a_size_that_was_not_set) {
    known own;
    const size_t sizes[] = {0, 1, sizeof(size_t) - 1, 5000, (size_t)-100};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_EQ_I(take(&(known){.size = sizes[i], .number = 7}, &own), BST_INVALID);
        CHECK_STR(bst_last_error(), "it must be set to sizeof *options, here 24");
    }
    CHECK_EQ_I(take(&(known){.number = 7}, &own), BST_INVALID);
    CHECK_STR(bst_last_error(), "op: options->size is 0; it must be set to sizeof *options, here 24");
}

TEST(what_a_call_may_use_of_its_caller) {
    CHECK_EQ_I(bst_scale(&(bst_exec){.stream = NULL}, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "scale: exec->size is 0; it must be set to sizeof *exec, here ");
    CHECK_EQ_I(bst_scale(&(bst_exec){.size = sizeof(bst_exec)}, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "scale: tensor is NULL");
}

int main(void) {
    RUN(none_given_means_the_usual);
    RUN(a_struct_of_our_size);
    RUN(an_older_struct_reads_as_if_the_rest_were_zero);
    RUN(a_newer_struct_is_accepted_where_what_is_new_is_zero);
    RUN(a_size_that_was_not_set);
    RUN(what_a_call_may_use_of_its_caller);
    return bst_test_report();
}
