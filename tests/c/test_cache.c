/* test_cache.c - entries of the cache: several processes at once, writers killed, damaged files, and files that
 * somebody else may have written. */
#include <signal.h>
#include <sys/resource.h>
#include <time.h>

#include "cache_entries.h"

const bst_source bst__sources[] = {{NULL, NULL}};

enum { HEADER = 48 };

/* ---- helpers ----------------------------------------------------------------------------------------------------- */

static void edit(const char *path, long at, int flip) {
    FILE *f = fopen(path, "r+b");
    if (!f) abort();
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ flip, f);
    fclose(f);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* The published vectors of 128 bits: of nothing, of one byte, of several, in one piece and in two. */
TEST(the_hash_is_fnv_1a) {
    static const struct {
        const char *text, *digest;
    } cases[] = {
        {"", "6c62272e07bb014262b821756295c58d"},
        {"a", "d228cb696f1a8caf78912b704e4a8964"},
        {"foobar", "343e1662793c64bf6f0d3597ba446f18"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t bytes = strlen(cases[i].text);
        bst_hash h = BST_HASH_BEGIN;
        bst__hash_add(&h, cases[i].text, bytes / 2);
        bst__hash_add(&h, cases[i].text + bytes / 2, bytes - bytes / 2);
        bst_digest digest = bst__hash_end(h);
        char text[33];
        for (int b = 0; b < 16; b++) snprintf(text + 2 * b, 3, "%02x", digest.bytes[b]);
        CHECK_STR(text, cases[i].digest);
    }
}

TEST(an_entry_is_made_once) {
    begin();
    CHECK(get(1, 1000));
    CHECK(get(1, 1000));
    CHECK_EQ_I(made(), 1);
    CHECK(get(2, 1));
    CHECK_EQ_I(made(), 2);
    CHECK_EQ_I(strlen(bst__cache_reason()), 0);
    struct stat s;
    CHECK(stat(folder, &s) == 0 && (s.st_mode & 0777) == 0700);
    bst_digest key = key_of(1);
    CHECK(stat(entry_path(&key), &s) == 0 && (s.st_mode & 0777) == 0600);
    CHECK_EQ_I(count_files(".cubin"), 2);
    CHECK_EQ_I(count_files(".tmp"), 0);
    CHECK_EQ_I(count_files(".lock"), 0);
    bst__cache_drop(&key, BST_CACHE_CODE);
    CHECK(get(1, 1000));
    CHECK_EQ_I(made(), 3);
    end();
}

TEST(a_failure_is_passed_on_and_not_kept) {
    begin();
    source s = {10, 0, BST_COMPILE};
    bst_digest key = key_of(1);
    bst_blob blob = {0};
    CHECK_EQ_I(bst__cache_get(&key, BST_CACHE_CODE, make, &s, &blob), BST_COMPILE);
    CHECK_EQ_I(count_files(""), 0);
    CHECK(get(1, 10));
    CHECK_EQ_I(made(), 2);
    end();
}

static int get_together(int process, int round) {
    (void)process;
    return get_slowly(round, 5000, 20000) ? 0 : 1;
}

/* Several rounds: the window between one process's store and another's look is narrow. */
TEST(eight_processes_make_it_once) {
    begin();
    for (int round = 0; round < 10; round++) {
        int failed[8];
        in_eight_processes(get_together, round, failed);
        for (int c = 0; c < 8; c++) CHECK_EQ_I(failed[c], 0);
        CHECK_EQ_I(made(), round + 1);
    }
    CHECK_EQ_I(count_files(".cubin"), 10);
    CHECK_EQ_I(count_files(".lock"), 0);
    end();
}

/* The writer is killed once its temporary file has begun to grow, long before 64 MiB are written and flushed. */
TEST(a_killed_writer_leaves_no_bad_entry) {
    const size_t bytes = 64 << 20;
    begin();
    pid_t child = fork();
    if (!child) _exit(get(1, bytes) ? 0 : 1);
    char command[256];
    snprintf(command, sizeof command, "find %s -name '*.tmp' -size +0 2>/dev/null | grep -q .", folder);
    while (system(command) != 0 && waitpid(child, NULL, WNOHANG) == 0) usleep(500);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status)); /* else it was too fast, and this test shows nothing */
    CHECK_EQ_I(count_files(".cubin"), 0);
    CHECK_EQ_I(count_files(".tmp"), 1);
    /* Its lock has gone with it: nobody waits. */
    time_t before = time(NULL);
    CHECK(get(1, 1000));
    CHECK(time(NULL) - before < 5);
    CHECK_EQ_I(made(), 2);
    CHECK(get(1, 1000));
    CHECK_EQ_I(made(), 2);
    end();
}

/* A process that waits for one that is killed takes over. */
TEST(a_killed_maker_is_succeeded) {
    begin();
    pid_t child = fork();
    if (!child) {
        source s = {100, 20000000, BST_OK};
        bst_digest key = key_of(1);
        bst_blob blob;
        bst__cache_get(&key, BST_CACHE_CODE, make, &s, &blob);
        _exit(0);
    }
    while (made() == 0) usleep(1000);
    pid_t killer = fork();
    if (!killer) {
        usleep(200000);
        kill(child, SIGKILL);
        _exit(0);
    }
    CHECK(get(1, 100));
    CHECK_EQ_I(made(), 2);
    CHECK(kill(child, 0) == 0); /* not yet waited for: so the lock was released by its death, not by its end */
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    waitpid(killer, NULL, 0);
    end();
}

static bst_status fork_and_die(void *context, bst_blob *out) {
    (void)out;
    pid_t worker = fork();
    if (!worker) {
        alarm(300); /* longer than anybody would wait for a lock */
        for (;;) pause();
    }
    if (write(*(int *)context, &worker, sizeof worker) != sizeof worker) abort();
    raise(SIGKILL);
    return BST_INVALID;
}

/* A maker that has forked meanwhile, as a data loader does, and is killed: the worker lives on, with every descriptor
 * of its parent's, and yet holds nobody up. Who takes over, and does not only give up waiting, leaves no lock
 * behind. */
TEST(a_worker_of_a_killed_maker_holds_no_lock) {
    begin();
    int gate[2];
    pid_t worker = -1;
    if (pipe(gate) != 0) abort();
    pid_t child = fork();
    if (!child) {
        bst_digest key = key_of(1);
        bst_blob blob;
        bst__cache_get(&key, BST_CACHE_CODE, fork_and_die, &gate[1], &blob);
        _exit(0);
    }
    CHECK(read(gate[0], &worker, sizeof worker) == sizeof worker);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    CHECK_EQ_I(count_files(".lock"), 1);
    CHECK(get(1, 100));
    CHECK_EQ_I(count_files(".lock"), 0);
    if (worker > 0) CHECK(kill(worker, SIGKILL) == 0);
    close(gate[0]);
    close(gate[1]);
    end();
}

/* One flipped bit in each part: magic, key, length, checksum, first and last byte of the code. */
TEST(a_corrupt_entry_is_made_anew) {
    static const long places[] = {0, 9, 24, 32, 47, HEADER, HEADER + 500, HEADER + 999};
    begin();
    bst_digest key = key_of(1);
    CHECK(get(1, 1000));
    for (int i = 0; i < (int)(sizeof places / sizeof *places); i++) {
        edit(entry_path(&key), places[i], 1);
        CHECK(get(1, 1000));
        CHECK_EQ_I(made(), i + 2);
        CHECK(get(1, 1000)); /* and is good again */
        CHECK_EQ_I(made(), i + 2);
    }
    end();
}

TEST(an_entry_of_another_length_is_made_anew) {
    static const long sizes[] = {0, 1, HEADER - 1, HEADER, HEADER + 1, HEADER + 999, HEADER + 1001};
    begin();
    bst_digest key = key_of(1);
    CHECK(get(1, 1000));
    for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i++) {
        CHECK(truncate(entry_path(&key), sizes[i]) == 0);
        CHECK(get(1, 1000));
        CHECK_EQ_I(made(), i + 2);
        CHECK(get(1, 1000));
        CHECK_EQ_I(made(), i + 2);
    }
    end();
}

/* Also where nothing good takes its place. */
TEST(a_corrupt_entry_is_deleted) {
    begin();
    bst_digest key = key_of(1);
    CHECK(get(1, 1000));
    edit(entry_path(&key), HEADER, 1);
    source s = {10, 0, BST_COMPILE};
    bst_blob blob = {0};
    CHECK_EQ_I(bst__cache_get(&key, BST_CACHE_CODE, make, &s, &blob), BST_COMPILE);
    CHECK_EQ_I(count_files(""), 0);
    end();
}

/* A whole entry under another key's name. */
TEST(an_entry_of_another_key_is_made_anew) {
    begin();
    bst_digest one = key_of(1), two = key_of(2);
    CHECK(get(1, 1000));
    char from[512];
    snprintf(from, sizeof from, "%s", entry_path(&one));
    CHECK(rename(from, entry_path(&two)) == 0);
    CHECK(get(2, 1000));
    CHECK_EQ_I(made(), 2);
    end();
}

/* Puts a good entry under the key and lets `spoil` change what it is; it must not be loaded. */
static void check_distrusted(void (*spoil)(const char *path)) {
    begin();
    bst_digest key = key_of(1);
    CHECK(get(1, 1000));
    spoil(entry_path(&key));
    CHECK(get(1, 1000));
    CHECK_EQ_I(made(), 2);
    struct stat s;
    CHECK(lstat(entry_path(&key), &s) == 0 && S_ISREG(s.st_mode) && s.st_uid == geteuid() &&
          (s.st_mode & 0777) == 0600);
    CHECK(get(1, 1000));
    CHECK_EQ_I(made(), 2);
    end();
}

static void let_group_write(const char *path) { CHECK(chmod(path, 0660) == 0); }
static void let_others_write(const char *path) { CHECK(chmod(path, 0602) == 0); }
static void give_away(const char *path) { CHECK(chown(path, NOBODY, NOBODY) == 0); }
static void make_symlink(const char *path) {
    char target[160];
    snprintf(target, sizeof target, "%s/elsewhere", root);
    CHECK(rename(path, target) == 0 && symlink(target, path) == 0);
}
static void make_fifo(const char *path) { CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0); }

TEST(entries_that_others_could_have_written_are_not_loaded) {
    check_distrusted(let_group_write);
    check_distrusted(let_others_write);
    check_distrusted(make_symlink);
    check_distrusted(make_fifo);
    if (geteuid() == 0) check_distrusted(give_away); /* only root can make a file that is another's */
}

/* A process that may open no more files than its folder's: the entry is there, and cannot be looked at. */
TEST(an_entry_that_cannot_be_opened_stays) {
    begin();
    CHECK(get(1, 100));
    struct rlimit usual, tight;
    int next = dup(0);
    if (next < 0 || getrlimit(RLIMIT_NOFILE, &usual) != 0) abort();
    close(next);
    tight = usual;
    tight.rlim_cur = (rlim_t)next + 1;
    CHECK_EQ_I(setrlimit(RLIMIT_NOFILE, &tight), 0);
    CHECK(get(1, 100));
    CHECK_EQ_I(setrlimit(RLIMIT_NOFILE, &usual), 0);
    CHECK_EQ_I(count_files(".cubin"), 1);
    end();
}

static bst_status make_by_another(void *context, bst_blob *out) {
    const bst_digest *key = context;
    bst_blob inner = {0};
    source s = {100, 0, BST_OK};
    CHECK_EQ_I(bst__cache_get(key, BST_CACHE_CODE, make, &s, &inner), BST_OK);
    CHECK_STR(bst__cache_reason(), "could not be written");
    *out = inner;
    return BST_OK;
}

/* A search compiles kernels, which are entries too. */
/* Writing on would end the process, by SIGXFSZ. */
TEST(an_entry_beyond_the_file_size_limit_is_not_written) {
    begin();
    struct rlimit before, few;
    CHECK_EQ_I(getrlimit(RLIMIT_FSIZE, &before), 0);
    few = before, few.rlim_cur = 1000;
    CHECK(get(1, 1000 - HEADER)); /* fits to the byte */
    CHECK_EQ_I(setrlimit(RLIMIT_FSIZE, &few), 0);
    CHECK(get(2, 1000 - HEADER));
    CHECK_EQ_I(strlen(bst__cache_reason()), 0);
    CHECK(get(3, 1001 - HEADER));
    CHECK_STR(bst__cache_reason(), "an entry of 1001 bytes is larger than a file of this process may be");
    CHECK_EQ_I(setrlimit(RLIMIT_FSIZE, &before), 0);
    bst_digest kept = key_of(2), left = key_of(3);
    CHECK(access(entry_path(&kept), F_OK) == 0);
    CHECK(access(entry_path(&left), F_OK) != 0);
    end();
}

TEST(the_reason_is_that_of_the_last_get) {
    begin();
    CHECK(get(1, 100));
    bst_digest blocked = key_of(2), key = key_of(3);
    CHECK_EQ_I(mkdir(entry_path(&blocked), 0700), 0);
    bst_blob blob = {0};
    CHECK_EQ_I(bst__cache_get(&key, BST_CACHE_CHOICE, make_by_another, &blocked, &blob), BST_OK);
    free(blob.data);
    CHECK_EQ_I(count_files(".choice"), 1);
    CHECK(bst__cache_reason()[0] == 0);
    end();
}

int main(void) {
    RUN(the_hash_is_fnv_1a);
    RUN(an_entry_is_made_once);
    RUN(a_failure_is_passed_on_and_not_kept);
    RUN(eight_processes_make_it_once);
    RUN(a_killed_writer_leaves_no_bad_entry);
    RUN(a_killed_maker_is_succeeded);
    RUN(a_worker_of_a_killed_maker_holds_no_lock);
    RUN(a_corrupt_entry_is_made_anew);
    RUN(a_corrupt_entry_is_deleted);
    RUN(an_entry_of_another_length_is_made_anew);
    RUN(an_entry_of_another_key_is_made_anew);
    RUN(entries_that_others_could_have_written_are_not_loaded);
    RUN(an_entry_that_cannot_be_opened_stays);
    RUN(an_entry_beyond_the_file_size_limit_is_not_written);
    RUN(the_reason_is_that_of_the_last_get);
    return bst_test_report();
}
