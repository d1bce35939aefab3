/* changes.c - counts changes of Python's dictionaries, which CPython tells of: see bastile/torch.h.
 *
 * Nothing of Python is called here. CPython calls in the middle of a change, of dictionaries that are being freed too,
 * and possibly with an exception set: code in Python has no place there. */
#include "bastile/torch.h"
#include "core/core.h"

enum { MOST_NAMES = 8 };

uint64_t bst_python_changes[BST_PYTHON_COUNTS];
int bst_python_unseen;
static struct {
    const void *name;
    int count;
} names[MOST_NAMES];
static int name_count;

/* Relaxed: what orders the change before whoever asks, CPython's lock, orders this too. */
static int counted(int count) {
    if (count >= 0 && !bst_python_unseen) __atomic_fetch_add(&bst_python_changes[count], 1, __ATOMIC_RELAXED);
    return 0;
}

bst_status bst_python_count_name(const void *name, int count) {
    if (name_count == MOST_NAMES || count < BST_PYTHON_NONE || count >= BST_PYTHON_COUNTS)
        return bst__error(BST_INVALID, "python_count_name: count %d of name %d; there are %d of at most %d", count,
                          name_count, BST_PYTHON_COUNTS, MOST_NAMES);
    names[name_count].name = name;
    names[name_count++].count = count;
    return BST_OK;
}

int bst_python_table_event(int event, void *table, void *key, void *value) {
    (void)event, (void)table, (void)key, (void)value;
    return counted(BST_PYTHON_TABLES);
}

int bst_python_hook_event(int event, void *hooks, void *key, void *value) {
    (void)event, (void)hooks, (void)key, (void)value;
    return counted(BST_PYTHON_HOOKS);
}

int bst_python_scope_event(int event, void *scope, void *key, void *value) {
    (void)event, (void)scope, (void)value;
    for (int i = 0; !key && i < BST_PYTHON_COUNTS; i++) counted(i);
    if (!key) return 0;
    for (int i = 0; i < name_count; i++)
        if (key == names[i].name) return counted(names[i].count);
    return counted(BST_PYTHON_ATTRIBUTES);
}
