/* test_cache_folder.c - the cache's folder: which one it is and whose it may be, what is removed from it, and when. */
#include <errno.h>
#include <time.h>
#include <utime.h>

#include "cache_entries.h"

const bst_source bst__sources[] = {{NULL, NULL}};

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

/* ---- whose folders ----------------------------------------------------------------------------------------------- */

static const char *below(const char *name) {
    static char paths[4][256];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

static bool exists(const char *name) {
    struct stat s;
    return lstat(below(name), &s) == 0;
}

/* It could be aimed at any folder of ours. */
TEST(the_folder_itself_is_no_symbolic_link) {
    begin();
    CHECK(mkdir(below("real"), 0700) == 0 && symlink("real", folder) == 0);
    check_unused("is a symbolic link");
    CHECK(rmdir(below("real")) == 0); /* and so empty */
    end();
}

/* Homes and scratch disks are often behind links: relative, absolute, through "..", a link to a link. */
TEST(links_of_our_own_on_the_way_are_followed) {
    static const char *const links[] = {"real", "/", "x/../real", "./again"};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        begin();
        CHECK(mkdir(below("real"), 0700) == 0 && mkdir(below("x"), 0700) == 0 && symlink("real", below("again")) == 0);
        CHECK(symlink(links[i][0] == '/' ? below("real") : links[i], below("link")) == 0);
        setenv("BASTILE_CACHE", below("link//./new/cache"), 1);
        CHECK(get(1, 100));
        CHECK(get(1, 100));
        CHECK_EQ_I(made(), 1);
        snprintf(folder, sizeof folder, "%s/real/new/cache", root);
        CHECK_EQ_I(count_files(".cubin"), 1);
        end();
    }
    begin();
    CHECK(symlink("link", below("link")) == 0);
    setenv("BASTILE_CACHE", below("link/cache"), 1);
    check_unused(strerror(ELOOP));
    end();
}

TEST(a_relative_folder_is_below_the_working_directory) {
    begin();
    char *before = getcwd(NULL, 0);
    CHECK(before && chdir(root) == 0);
    setenv("BASTILE_CACHE", "one/cache", 1);
    CHECK(get(1, 100));
    snprintf(folder, sizeof folder, "%s/one/cache", root);
    CHECK_EQ_I(count_files(".cubin"), 1);
    CHECK(chdir(before) == 0);
    free(before);
    end();
}

/* Whoever may write to a folder on the way can put a link there. Only root can make what is another's. */
TEST(links_of_others_on_the_way_are_not_followed) {
    if (geteuid() != 0) return;
    begin();
    CHECK(mkdir(below("real"), 0700) == 0 && symlink("real", below("link")) == 0);
    CHECK(lchown(below("link"), NOBODY, NOBODY) == 0);
    setenv("BASTILE_CACHE", below("link/cache"), 1);
    check_unused("a symbolic link of another user");
    CHECK(rmdir(below("real")) == 0);
    end();
}

/* As root with a user's HOME, the user would be left with folders that are root's. */
TEST(nothing_is_made_in_folders_of_others) {
    if (geteuid() != 0) return;
    begin();
    unsetenv("BASTILE_CACHE");
    unsetenv("XDG_CACHE_HOME");
    CHECK(mkdir(below("home"), 0700) == 0 && chown(below("home"), NOBODY, NOBODY) == 0);
    setenv("HOME", below("home"), 1);
    check_unused("another user's folder");
    CHECK(!exists("home/.cache"));
    CHECK(mkdir(below("home/.cache"), 0700) == 0 && chown(below("home/.cache"), NOBODY, NOBODY) == 0);
    CHECK(get(1, 100));
    CHECK(!exists("home/.cache/bastile"));
    end();
}

/* Nobody, in a folder for all: one of root's will do, one of a third user's will not. */
TEST(a_folder_for_all_must_be_the_systems) {
    if (geteuid() != 0) return;
    begin();
    CHECK(mkdir(below("scratch"), 0700) == 0 && chmod(below("scratch"), 01777) == 0);
    CHECK(mkdir(below("shared"), 0700) == 0 && chmod(below("shared"), 01777) == 0);
    CHECK(chown(below("shared"), NOBODY - 1, NOBODY - 1) == 0);
    pid_t child = fork();
    if (!child) {
        if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0) _exit(9);
        setenv("BASTILE_CACHE", below("shared/one"), 1);
        if (!get(1, 100) || !strstr(bst__cache_reason(), "another user's folder")) _exit(1);
        setenv("BASTILE_CACHE", below("scratch/one/cache"), 1);
        if (!get(1, 100) || bst__cache_reason()[0]) _exit(2);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ_I(WEXITSTATUS(status), 0);
    CHECK(!exists("shared/one") && exists("scratch/one/cache"));
    end();
}

/* ---- what is removed --------------------------------------------------------------------------------------------- */

static const char *in_folder(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* A file in the folder that was last touched so many hours ago. */
static void leave(const char *name, long bytes, int hours) {
    int file = open(in_folder(name), O_WRONLY | O_CREAT, 0600);
    CHECK(file >= 0 && ftruncate(file, bytes) == 0 && close(file) == 0);
    struct utimbuf times = {time(NULL) - 3600 * hours, time(NULL) - 3600 * hours};
    CHECK(utime(in_folder(name), &times) == 0);
}

#define KEY    "0123456789abcdef0123456789abcdef"
#define RANDOM "0123456789abcdef"

TEST(what_dead_writers_left_is_swept) {
    static const char old[] = KEY "." RANDOM ".tmp", fresh[] = KEY ".fedcba9876543210.tmp";
    begin();
    CHECK(get(1, 100));
    leave(old, 0, 2);
    leave(fresh, 0, 0);
    leave(KEY ".lock", 0, 2);
    CHECK(get(2, 100));
    CHECK(access(in_folder(old), F_OK) != 0 && errno == ENOENT);
    CHECK(access(in_folder(KEY ".lock"), F_OK) != 0 && errno == ENOENT);
    CHECK(access(in_folder(fresh), F_OK) == 0);
    end();
}

/* A folder that the user has for other things too: BASTILE_CACHE=$HOME. */
TEST(what_is_not_its_own_is_left_alone) {
    static const char *const names[] = {
        "notes.tmp",
        "my.choice",
        ".choice",
        ".tmp",
        KEY,
        KEY ".tmp",
        KEY "0.choice",
        "A" KEY ".choice",
        KEY "." RANDOM,
        KEY "." RANDOM ".tmp2",
        KEY ".0" RANDOM ".tmp",
        KEY ".choice.tmp",
        KEY "." RANDOM ".choice",
        KEY ".cubin~",
        "0123456789ABCDEF0123456789abcdef.choice",
    };
    begin();
    setenv("BASTILE_CACHE_MIB", "1", 1);
    CHECK(get(1, 100));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) leave(names[i], 1 << 20, 48);
    CHECK(mkdir(in_folder(KEY ".cubin"), 0700) == 0); /* ours by its name alone */
    CHECK(symlink("notes.tmp", in_folder(KEY "." RANDOM ".tmp")) == 0);
    leave(KEY ".choice", 100, 0);
    CHECK(get(2, 100));
    CHECK_EQ_I(bst__cache_clear(BST_CACHE_CHOICE), 1);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) CHECK(access(in_folder(names[i]), F_OK) == 0);
    CHECK_EQ_I(count_files(""), (int64_t)(sizeof names / sizeof *names) + 2 + 2);
    unsetenv("BASTILE_CACHE_MIB");
    end();
}

enum { THIRD = 300000 /* bytes: three fit into a MiB, with what is kept free; four do not */ };

static bool has(int n) {
    bst_digest key = key_of(n);
    return access(entry_path(&key), F_OK) == 0;
}

static void was_used(int n, int hours_ago) {
    bst_digest key = key_of(n);
    leave(strrchr(entry_path(&key), '/') + 1, THIRD + 48, hours_ago);
}

/* Reading an entry counts as use. Small ones count as the block of the disk that they take. */
TEST(what_was_not_used_for_longest_leaves) {
    begin();
    setenv("BASTILE_CACHE_MIB", "1", 1);
    for (int n = 1; n <= 3; n++) {
        CHECK(get(n, THIRD));
        was_used(n, 10 - n);
    }
    leave(KEY ".choice", 1, 100);
    CHECK(get(1, THIRD));
    CHECK_EQ_I(made(), 3);
    CHECK(get(4, THIRD));
    CHECK(has(1) && !has(2) && has(3) && has(4));
    CHECK_EQ_I(count_files(".choice"), 0);
    CHECK(get(5, THIRD));
    CHECK(has(1) && !has(3) && has(4) && has(5));
    CHECK(get(6, 2 << 20)); /* larger than all of it: alone */
    CHECK(has(6));
    CHECK_EQ_I(count_files(""), 1);
    unsetenv("BASTILE_CACHE_MIB");
    end();
}

/* 0: no limit; no number, or one that is out of range: the default. */
TEST(the_limit_is_a_number_of_mib) {
    static const char *const settings[] = {"0", "", "1x", "-1", "99999999999999999999"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        begin();
        setenv("BASTILE_CACHE_MIB", settings[i], 1);
        for (int n = 1; n <= 4; n++) CHECK(get(n, THIRD));
        CHECK_EQ_I(count_files(".cubin"), 4);
        end();
    }
    unsetenv("BASTILE_CACHE_MIB");
}

int main(void) {
    RUN(folders_that_others_could_write_to_are_not_used);
    RUN(a_read_only_folder_serves_and_is_not_needed);
    RUN(where_no_folder_can_be_it_works_without);
    RUN(the_folder_is_found_by_its_three_variables);
    RUN(the_folder_itself_is_no_symbolic_link);
    RUN(links_of_our_own_on_the_way_are_followed);
    RUN(a_relative_folder_is_below_the_working_directory);
    RUN(links_of_others_on_the_way_are_not_followed);
    RUN(nothing_is_made_in_folders_of_others);
    RUN(a_folder_for_all_must_be_the_systems);
    RUN(what_dead_writers_left_is_swept);
    RUN(what_is_not_its_own_is_left_alone);
    RUN(what_was_not_used_for_longest_leaves);
    RUN(the_limit_is_a_number_of_mib);
    return bst_test_report();
}
