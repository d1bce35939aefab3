/* test_cache.c - the folder of compiled kernels: several processes at once, writers killed, damaged files, and files
 * that somebody else may have written. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <utime.h>

#include "cache_folder.h"
#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "test.h"

const bst_source bst__sources[] = {{NULL, NULL}};

enum { HEADER = 80, NOBODY = 65534 };

/* ---- helpers ----------------------------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *ftw) {
    (void)s, (void)type, (void)ftw;
    return remove(path);
}

static void remove_folder(const char *path) {
    if (access(path, F_OK) == 0) nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* A new empty place for a test; the cache's folder does not exist yet. */
static void begin(void) {
    snprintf(root, sizeof root, "/tmp/bastile-cache-XXXXXX");
    if (!mkdtemp(root) || chmod(root, 0711) != 0) abort();
    snprintf(folder, sizeof folder, "%s/cache", root);
    setenv("BASTILE_CACHE", folder, 1);
}

static void end(void) { remove_folder(root); }

static bst_digest key_of(int n) {
    bst_digest key = {{0}};
    for (int i = 0; i < 32; i++) key.bytes[i] = (uint8_t)(n * 7 + i);
    return key;
}

/* Where an entry lies: part of the format. */
static const char *entry_path(const bst_digest *key) {
    static char path[512];
    int at = snprintf(path, sizeof path, "%s/", folder);
    for (int i = 0; i < 32; i++) at += snprintf(path + at, sizeof path - (size_t)at, "%02x", key->bytes[i]);
    snprintf(path + at, sizeof path - (size_t)at, ".cubin");
    return path;
}

/* What make gives, and how: it adds a byte to <root>/count, so that processes can be counted together. */
typedef struct source {
    size_t bytes;
    unsigned pause_us;
    bst_status status;
} source;

static bst_status make(void *context, bst_blob *out) {
    const source *s = context;
    char path[160];
    snprintf(path, sizeof path, "%s/count", root);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (file >= 0 && write(file, "x", 1) != 1) abort();
    if (file >= 0) close(file);
    if (s->pause_us) usleep(s->pause_us);
    if (s->status != BST_OK) return bst__error(s->status, "made to fail");
    uint8_t *data = malloc(s->bytes);
    if (!data) abort();
    for (size_t i = 0; i < s->bytes; i++) data[i] = (uint8_t)(i * 31 + i / 256);
    *out = (bst_blob){data, s->bytes};
    return BST_OK;
}

static bool is_right(const bst_blob *blob, size_t bytes) {
    if (blob->bytes != bytes) return false;
    const uint8_t *data = blob->data;
    for (size_t i = 0; i < bytes; i++)
        if (data[i] != (uint8_t)(i * 31 + i / 256)) return false;
    return true;
}

static int made(void) {
    char path[160];
    struct stat s;
    snprintf(path, sizeof path, "%s/count", root);
    return stat(path, &s) == 0 ? (int)s.st_size : 0;
}

/* Gets a key whose bytes `make` gives in this length, after a pause, and says whether they are right. */
static bool get_slowly(int n, size_t bytes, unsigned pause_us) {
    source s = {bytes, pause_us, BST_OK};
    bst_digest key = key_of(n);
    bst_blob blob = {0};
    bool right = bst__cache_get(&key, BST_CACHE_CODE, make, &s, &blob) == BST_OK && is_right(&blob, bytes);
    free(blob.data);
    return right;
}

static bool get(int n, size_t bytes) { return get_slowly(n, bytes, 0); }

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

/* FIPS 180-4's examples, and a length that needs a second block for its padding. */
TEST(sha256_is_sha256) {
    static const struct {
        const char *text;
        int times;
        const char *digest;
    } cases[] = {
        {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bst_sha256 h;
        bst__sha256_begin(&h);
        for (int t = 0; t < cases[i].times; t++) bst__sha256_add(&h, cases[i].text, strlen(cases[i].text));
        bst_digest digest = bst__sha256_end(&h);
        char text[65];
        for (int b = 0; b < 32; b++) snprintf(text + 2 * b, 3, "%02x", digest.bytes[b]);
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

/* One flipped bit in each part: magic, key, length, checksum, first and last byte of the code. */
TEST(a_corrupt_entry_is_made_anew) {
    static const long places[] = {0, 9, 40, 48, 79, HEADER, HEADER + 500, HEADER + 999};
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

/* The folder is left alone: works from memory, says why, writes nothing. */
static void check_unused(const char *why) {
    CHECK(get(1, 100));
    CHECK(get(1, 100));
    CHECK_EQ_I(made(), 2);
    CHECK_STR(bst__cache_reason(), why);
    CHECK(strlen(bst__cache_reason()) > 0);
}

TEST(folders_that_others_could_write_to_are_not_used) {
    static const mode_t modes[] = {0777, 0770, 0702, 01777};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        begin();
        CHECK(mkdir(folder, 0700) == 0 && chmod(folder, modes[i]) == 0);
        check_unused("may be written to by others");
        CHECK_EQ_I(count_files(""), 0);
        end();
    }
    if (geteuid() != 0) return;
    begin();
    CHECK(mkdir(folder, 0755) == 0 && chown(folder, NOBODY, NOBODY) == 0);
    check_unused("belongs to another user");
    CHECK_EQ_I(count_files(""), 0);
    end();
}

/* Permission bits do not stop root, so this runs as somebody else then. */
TEST(a_read_only_folder_serves_and_is_not_needed) {
    begin();
    CHECK(get(1, 100));
    bst_digest key = key_of(1);
    bool is_root = geteuid() == 0;
    char count[160];
    snprintf(count, sizeof count, "%s/count", root);
    CHECK(chmod(count, 0666) == 0);
    if (is_root) CHECK(chown(entry_path(&key), NOBODY, NOBODY) == 0 && chown(folder, NOBODY, NOBODY) == 0);
    CHECK(chmod(folder, 0500) == 0);
    pid_t child = fork();
    if (!child) {
        if (is_root && (setgid(NOBODY) != 0 || setuid(NOBODY) != 0)) _exit(9);
        if (!get(1, 100) || made() != 1) _exit(1); /* what is there is read */
        if (!get(2, 100) || made() != 2) _exit(2);
        if (!strstr(bst__cache_reason(), "cannot be written to")) _exit(3);
        if (!get(2, 100) || made() != 3) _exit(4);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ_I(WEXITSTATUS(status), 0);
    CHECK(chmod(folder, 0700) == 0);
    CHECK_EQ_I(count_files(""), 1);
    end();
}

TEST(where_no_folder_can_be_it_works_without) {
    begin();
    setenv("BASTILE_CACHE", "off", 1);
    check_unused("off");
    end();

    begin(); /* neither HOME nor anything else */
    unsetenv("BASTILE_CACHE");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    check_unused("HOME");
    end();

    begin(); /* a home that does not exist and cannot be made */
    unsetenv("BASTILE_CACHE");
    setenv("HOME", "/proc/no-home", 1);
    check_unused("cannot be opened");
    end();

    begin(); /* a file where the folder should be */
    int file = open(folder, O_WRONLY | O_CREAT, 0600);
    CHECK(file >= 0 && close(file) == 0);
    check_unused("cannot be opened");
    end();
}

TEST(the_folder_is_found_by_its_three_variables) {
    static const struct {
        const char *xdg, *home, *expected; /* below root; NULL: unset */
    } cases[] = {
        {"/xdg", "/home", "/xdg/bastile"},
        {NULL, "/home", "/home/.cache/bastile"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        char xdg[160], home[160];
        snprintf(xdg, sizeof xdg, "%s%s", root, cases[i].xdg ? cases[i].xdg : "");
        snprintf(home, sizeof home, "%s%s", root, cases[i].home);
        unsetenv("BASTILE_CACHE");
        setenv("HOME", home, 1);
        if (cases[i].xdg)
            setenv("XDG_CACHE_HOME", xdg, 1);
        else
            setenv("XDG_CACHE_HOME", "relative", 1); /* to be ignored */
        CHECK(get(1, 100));
        snprintf(folder, sizeof folder, "%s%s", root, cases[i].expected);
        CHECK_EQ_I(count_files(".cubin"), 1);
        unsetenv("XDG_CACHE_HOME");
        end();
    }
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

TEST(what_dead_writers_left_is_swept) {
    begin();
    CHECK(get(1, 100));
    char old[160], fresh[160];
    snprintf(old, sizeof old, "%s/old.tmp", folder);
    snprintf(fresh, sizeof fresh, "%s/fresh.tmp", folder);
    for (int i = 0; i < 2; i++) {
        int file = open(i ? fresh : old, O_WRONLY | O_CREAT, 0600);
        CHECK(file >= 0 && close(file) == 0);
    }
    struct utimbuf times = {time(NULL) - 7200, time(NULL) - 7200};
    CHECK(utime(old, &times) == 0);
    CHECK(get(2, 100));
    CHECK(access(old, F_OK) != 0 && errno == ENOENT);
    CHECK(access(fresh, F_OK) == 0);
    end();
}

int main(void) {
    RUN(sha256_is_sha256);
    RUN(an_entry_is_made_once);
    RUN(a_failure_is_passed_on_and_not_kept);
    RUN(eight_processes_make_it_once);
    RUN(a_killed_writer_leaves_no_bad_entry);
    RUN(a_killed_maker_is_succeeded);
    RUN(a_corrupt_entry_is_made_anew);
    RUN(a_corrupt_entry_is_deleted);
    RUN(an_entry_of_another_length_is_made_anew);
    RUN(an_entry_of_another_key_is_made_anew);
    RUN(entries_that_others_could_have_written_are_not_loaded);
    RUN(folders_that_others_could_write_to_are_not_used);
    RUN(a_read_only_folder_serves_and_is_not_needed);
    RUN(where_no_folder_can_be_it_works_without);
    RUN(the_folder_is_found_by_its_three_variables);
    RUN(an_entry_that_cannot_be_opened_stays);
    RUN(the_reason_is_that_of_the_last_get);
    RUN(what_dead_writers_left_is_swept);
    return bst_test_report();
}
