/* cache_folder.h - a folder for the cache: what lies in it, and eight processes that use it at once. */
#ifndef BST_TEST_CACHE_FOLDER_H
#define BST_TEST_CACHE_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static char root[64], folder[128]; /* a test's own place, and the folder in it */

static inline int count_files(const char *suffix) {
    char command[256];
    snprintf(command, sizeof command, "ls -A %s 2>/dev/null | grep -c '%s$'", folder, suffix);
    FILE *pipe = popen(command, "r");
    int count = -1;
    if (!pipe || fscanf(pipe, "%d", &count) != 1) abort();
    pclose(pipe);
    return count;
}

/* What `work` returned in each of them, which began it together: 0 to 127, or -1 where a process ended before. */
static inline void in_eight_processes(int (*work)(int process, int round), int round, int results[8]) {
    int gate[2];
    pid_t children[8];
    if (pipe(gate) != 0) abort();
    for (int c = 0; c < 8; c++) {
        children[c] = fork();
        if (children[c]) continue;
        char byte;
        close(gate[1]);
        if (read(gate[0], &byte, 1) != 0) abort(); /* returns when the parent closes its end */
        _exit(work(c, round));
    }
    close(gate[0]);
    close(gate[1]);
    for (int c = 0; c < 8; c++) {
        int status = -1;
        waitpid(children[c], &status, 0);
        results[c] = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
}

#endif
