/* test_changes.c - what CPython tells of its dictionaries, told by a test in its place. */
#include "bastile/torch.h"
#include "test.h"

enum { MODIFIED = 1 }; /* PyDict_EVENT_MODIFIED */

static void need_counts(uint64_t tables, uint64_t hooks, uint64_t modes, uint64_t attributes) {
    const uint64_t wanted[BST_PYTHON_COUNTS] = {tables, hooks, modes, attributes};
    for (int i = 0; i < BST_PYTHON_COUNTS; i++) CHECK(bst_python_changes[i] == wanted[i]);
}

TEST(each_change_is_counted_where_it_belongs) {
    char table[1], children[1], mode[1], passing[1], other[1]; /* as good as objects: only where they are counts */
    need_counts(0, 0, 0, 0);
    CHECK(bst_python_count_name(children, BST_PYTHON_TABLES) == BST_OK);
    CHECK(bst_python_count_name(mode, BST_PYTHON_MODES) == BST_OK);
    CHECK(bst_python_count_name(passing, BST_PYTHON_NONE) == BST_OK);
    CHECK(bst_python_table_event(MODIFIED, table, mode, NULL) == 0);
    need_counts(1, 0, 0, 0);
    CHECK(bst_python_hook_event(MODIFIED, table, mode, NULL) == 0);
    need_counts(1, 1, 0, 0);
    CHECK(bst_python_scope_event(MODIFIED, table, children, other) == 0);
    need_counts(2, 1, 0, 0);
    CHECK(bst_python_scope_event(MODIFIED, table, mode, other) == 0);
    need_counts(2, 1, 1, 0);
    CHECK(bst_python_scope_event(MODIFIED, table, other, NULL) == 0);
    need_counts(2, 1, 1, 1);
    CHECK(bst_python_scope_event(MODIFIED, table, passing, other) == 0);
    need_counts(2, 1, 1, 1);
    CHECK(bst_python_scope_event(MODIFIED, table, NULL, NULL) == 0); /* all of it at once */
    need_counts(3, 2, 2, 2);
    bst_python_unseen = 1;
    CHECK(bst_python_table_event(MODIFIED, table, mode, NULL) == 0);
    CHECK(bst_python_scope_event(MODIFIED, table, NULL, NULL) == 0);
    need_counts(3, 2, 2, 2);
    bst_python_unseen = 0;
    CHECK(bst_python_hook_event(MODIFIED, table, mode, NULL) == 0);
    need_counts(3, 3, 2, 2);
}

TEST(there_are_so_many_names) {
    static char names[8];
    CHECK(bst_python_count_name(names, BST_PYTHON_COUNTS) == BST_INVALID);
    CHECK(bst_python_count_name(names, -2) == BST_INVALID);
    for (int i = 3; i < 8; i++) CHECK(bst_python_count_name(&names[i], BST_PYTHON_MODES) == BST_OK);
    CHECK(bst_python_count_name(names, BST_PYTHON_MODES) == BST_INVALID);
    CHECK(strstr(bst_last_error(), "at most 8") != NULL);
}

int main(void) {
    RUN(each_change_is_counted_where_it_belongs);
    RUN(there_are_so_many_names);
    return bst_test_report();
}
