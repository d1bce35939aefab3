/* folder.h - the folder of the cache on disk. */
#ifndef BST_FOLDER_H
#define BST_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

/* Opens the folder, which is made where it is not there. -1 and a reason where there is none that is ours alone. */
int bst__folder_open(char *reason, size_t bytes);
/* Whether a file or folder belongs to this process's user, and nobody else may write to it. */
bool bst__is_ours(const struct stat *s);

#endif
