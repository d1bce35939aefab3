/* fork.h - locks in a forked child. A lock that another thread held at the fork has no owner in the child, and would
 * make whoever asks for it there wait for ever; so each file with locks says what its child does about them.
 *
 * The parent does not take them before a fork (pthread_atfork's first handler): a search or a compilation would hold
 * every fork up, and the driver itself forks while it starts (it runs nvidia-modprobe), under a lock of ours. */
#ifndef BST_FORK_H
#define BST_FORK_H

#include <pthread.h>
#include <stdbool.h>

/* Registers a function that runs in every child, when the library is loaded: before there can be a lock to hold. */
#define BST_IN_CHILD(function) \
    static void __attribute__((constructor)) bst__at_fork(void) { pthread_atfork(NULL, NULL, function); }

/* In the child: makes a lock free. True where somebody held it, so that what it guards may be half changed. */
static inline bool bst__free_lock(pthread_mutex_t *lock) {
    if (pthread_mutex_trylock(lock) == 0) {
        pthread_mutex_unlock(lock);
        return false;
    }
    *lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    return true;
}

#endif
