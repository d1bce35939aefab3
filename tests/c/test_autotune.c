/* test_autotune.c - searches with a clock that the test sets, and the choices that they leave on disk. */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bastile.h"
#include "cache_folder.h"
#include "cuda/autotune.h"
#include "cuda/cache.h"
#include "test.h"

/* A new empty place for a test. */
static void begin(void) {
    snprintf(root, sizeof root, "/tmp/bastile-tune-XXXXXX");
    if (!mkdtemp(root)) abort();
    snprintf(folder, sizeof folder, "%s/cache", root);
    setenv("BASTILE_CACHE", folder, 1);
    bst__set_search_time(60);
}

static void end(void) {
    char command[160];
    snprintf(command, sizeof command, "rm -r %s", root);
    if (system(command) != 0) abort();
}

/* ---- the clock --------------------------------------------------------------------------------------------------- */

/* What each candidate takes, in ms; negative: it fails. `drift` makes everything slower by that part a round; `hiccup`
 * makes that candidate, if it is not 0, take ten times as long in one round in three. */
typedef struct track {
    float ms[BST_MOST_CANDIDATES], drift;
    int hiccup, fails_from_round; /* fails_from_round: candidate 1 fails from then on */
    bool broken;                  /* no measuring at all */
    int rounds, runs[BST_MOST_CANDIDATES], firsts[BST_MOST_CANDIDATES];
} track;

static bool run(void *context, const bool *running, int first, float *ms) {
    track *t = context;
    if (t->broken) return false;
    for (int i = 0; i < BST_MOST_CANDIDATES && (i < 2 || t->ms[i] != 0.0f); i++) {
        ms[i] = t->ms[i];
        if (!running[i]) continue;
        t->runs[i]++;
        if (ms[i] < 0) continue;
        ms[i] *= 1.0f + t->drift * (float)t->rounds;
        if (i == t->hiccup && i && t->rounds % 3 == 2) ms[i] *= 10;
        if (i == 1 && t->fails_from_round && t->rounds >= t->fails_from_round) ms[i] = -1;
    }
    t->firsts[first]++;
    t->rounds++;
    return true;
}

static bst_race race_of(track *t) {
    int count = 1;
    while (count < BST_MOST_CANDIDATES && t->ms[count] != 0.0f) count++;
    return (bst_race){count, "a test", run, t};
}

static int search(track *t) {
    bst_race race = race_of(t);
    bst_times times = {0};
    return bst__search(&race, &times);
}

/* ---- the verdict ------------------------------------------------------------------------------------------------- */

enum { ROUNDS = 8 };

/* Two candidates, and the verdict on their eight rounds. */
static int verdict(const float *first, const float *second) {
    bst_times t = {.running = {true, true}, .rounds = ROUNDS};
    memcpy(t.ms[0], first, ROUNDS * sizeof *first);
    memcpy(t.ms[1], second, ROUNDS * sizeof *second);
    return bst__verdict(&t, 2);
}

TEST(the_verdict_is_for_what_is_faster_beyond_the_noise) {
    static const float steady[ROUNDS] = {100, 100, 100, 100, 100, 100, 100, 100};
    static const float faster[ROUNDS] = {97, 97, 97, 97, 97, 97, 97, 97};
    static const float within_margin[ROUNDS] = {98.5, 98.5, 98.5, 98.5, 98.5, 98.5, 98.5, 98.5};
    static const float noisy[ROUNDS] = {90, 110, 92, 108, 94, 106, 96, 104};
    static const float one_hiccup[ROUNDS] = {97, 97, 97, 500, 97, 97, 97, 97};
    static const float lucky_once[ROUNDS] = {100, 100, 20, 100, 100, 100, 100, 100};
    CHECK_EQ_I(verdict(steady, faster), 1);
    CHECK_EQ_I(verdict(faster, steady), 0);
    CHECK_EQ_I(verdict(steady, steady), 0);
    CHECK_EQ_I(verdict(steady, within_margin), 0);
    /* Where either of them is noisy, a median of 97 is not enough. */
    CHECK_EQ_I(verdict(noisy, faster), 0);
    CHECK_EQ_I(verdict(steady, noisy), 0);
    /* One round that went wrong decides nothing. */
    CHECK_EQ_I(verdict(steady, one_hiccup), 1);
    CHECK_EQ_I(verdict(one_hiccup, steady), 0);
    CHECK_EQ_I(verdict(steady, lucky_once), 0);
    CHECK_EQ_I(verdict(lucky_once, faster), 1);
}

TEST(of_several_winners_the_fastest_is_taken) {
    bst_times t = {.running = {true, true, true, true}, .rounds = 5};
    static const float medians[] = {100, 80, 70, 75};
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < 5; r++) t.ms[i][r] = medians[i] + (float)((r * 3 + i) % 5) / 10;
    CHECK_EQ_I(bst__verdict(&t, 4), 2);
    CHECK_CLOSE(bst__median(&t, 2), 70.2, 1e-4);
    t.running[2] = false;
    CHECK_EQ_I(bst__verdict(&t, 4), 3);
    CHECK_EQ_I(bst__verdict(&t, 2), 1);
    CHECK_EQ_I(bst__verdict(&t, 1), 0);
}

/* ---- the search -------------------------------------------------------------------------------------------------- */

TEST(the_faster_one_is_found) {
    track t = {.ms = {1.0f, 1.1f, 0.9f, 0.95f}};
    CHECK_EQ_I(search(&t), 2);
    /* A round to warm up and nine that count, each beginning with another candidate. */
    CHECK_EQ_I(t.rounds, 10);
    for (int i = 0; i < 4; i++) CHECK_EQ_I(t.runs[i], 10);
    for (int i = 0; i < 4; i++) CHECK(t.firsts[i] >= 2);
}

TEST(the_default_stays_where_nothing_stands_out) {
    track alike = {.ms = {1.0f, 0.99f, 1.0f}}, alone = {.ms = {1.0f}};
    CHECK_EQ_I(search(&alike), 0);
    CHECK_EQ_I(search(&alone), 0);
    CHECK_EQ_I(alone.rounds, 1);
    /* A device that slows down under the measurements is slow for all. */
    track hot = {.ms = {1.0f, 0.995f, 1.01f}, .drift = 0.1f};
    CHECK_EQ_I(search(&hot), 0);
    track interrupted = {.ms = {1.0f, 0.9f}, .hiccup = 1};
    CHECK_EQ_I(search(&interrupted), 0); /* slow in three rounds of nine: it may be its own fault */
}

TEST(who_fails_drops_out) {
    track t = {.ms = {1.0f, -1.0f, 0.9f, -1.0f}};
    CHECK_EQ_I(search(&t), 2);
    CHECK_EQ_I(t.runs[1], 1);
    CHECK_EQ_I(t.runs[3], 1);
    track later = {.ms = {1.0f, 0.5f, 0.9f}, .fails_from_round = 6};
    CHECK_EQ_I(search(&later), 2);
    track all = {.ms = {1.0f, -1.0f, -1.0f}};
    CHECK_EQ_I(search(&all), 0);
    CHECK_EQ_I(all.rounds, 1);
    track no_default = {.ms = {-1.0f, 1.0f}};
    CHECK_EQ_I(search(&no_default), -1);
    track broken = {.ms = {1.0f, 0.5f}, .broken = true};
    CHECK_EQ_I(search(&broken), -1);
}

TEST(a_search_is_short) {
    track hopeless = {.ms = {1.0f, 1.5f, 0.9f}};
    CHECK_EQ_I(search(&hopeless), 2);
    CHECK_EQ_I(hopeless.runs[1], 2); /* to warm up, and once more */
    track slow = {.ms = {400.0f, 300.0f}};
    CHECK_EQ_I(search(&slow), 1);
    CHECK_EQ_I(slow.rounds, 6);
    track too_slow = {.ms = {1000.0f, 900.0f}};
    CHECK_EQ_I(search(&too_slow), 0);
    CHECK_EQ_I(too_slow.rounds, 2);
}

/* ---- the mode ---------------------------------------------------------------------------------------------------- */

TEST(the_mode_is_the_calls_or_the_environments) {
    unsetenv("BASTILE_AUTOTUNE");
    CHECK_EQ_I(bst_set_autotune(-1), BST_OK);
    CHECK_EQ_I(bst__tuning(), 0);
    CHECK_EQ_I(bst_set_autotune(1), BST_OK);
    CHECK_EQ_I(bst__tuning(), 1);
    CHECK_EQ_I(bst_set_autotune(2), BST_INVALID);
    CHECK_STR(bst_last_error(), "bst_set_autotune: on is 2; 1, 0, or -1 for BASTILE_AUTOTUNE is needed");
    CHECK_EQ_I(bst__tuning(), 1);
    setenv("BASTILE_AUTOTUNE", "1", 1);
    CHECK_EQ_I(bst_set_autotune(0), BST_OK);
    CHECK_EQ_I(bst__tuning(), 0);
    CHECK_EQ_I(bst_set_autotune(-1), BST_OK);
    CHECK_EQ_I(bst__tuning(), 1);
    setenv("BASTILE_AUTOTUNE", "0", 1);
    CHECK_EQ_I(bst__tuning(), 1); /* read once */
    CHECK_EQ_I(bst_set_autotune(-1), BST_OK);
    CHECK_EQ_I(bst__tuning(), 0);
    unsetenv("BASTILE_AUTOTUNE");
}

static void *ask_for_the_mode(void *done) {
    while (!atomic_load((atomic_bool *)done)) bst__tuning();
    return NULL;
}

/* A thread that is reading the environment must not write its answer over what another has set meanwhile. */
TEST(a_set_mode_stays_while_others_ask) {
    atomic_bool done = false;
    pthread_t thread;
    if (pthread_create(&thread, NULL, ask_for_the_mode, &done) != 0) abort();
    int lost = 0;
    for (int i = 0; i < 200000; i++) {
        CHECK_EQ_I(bst_set_autotune(-1), BST_OK);
        CHECK_EQ_I(bst_set_autotune(1), BST_OK);
        lost += bst__tuning() != 1;
    }
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    CHECK_EQ_I(lost, 0);
    CHECK_EQ_I(bst_set_autotune(-1), BST_OK);
}

/* ---- choices ----------------------------------------------------------------------------------------------------- */

static const bst_machine machine = {"NVIDIA H200", 90, 132, 13000, 13000};

static bst_digest key_of(const bst_machine *m, int problem) {
    bst_hash h;
    bst__choice_key(&h, m);
    bst__hash_add(&h, &problem, sizeof problem);
    return bst__hash_end(h);
}

static int choose_on(const bst_machine *m, int problem, track *t) {
    bst_digest key = key_of(m, problem);
    bst_race race = race_of(t);
    return bst__choice(&key, &race);
}

static int choose(int problem, track *t) { return choose_on(&machine, problem, t); }

static const char *path_of(int problem) {
    static char path[512];
    bst_digest key = key_of(&machine, problem);
    int at = snprintf(path, sizeof path, "%s/", folder);
    for (int i = 0; i < 16; i++) at += snprintf(path + at, sizeof path - (size_t)at, "%02x", key.bytes[i]);
    snprintf(path + at, sizeof path - (size_t)at, ".choice");
    return path;
}

TEST(a_choice_is_measured_once) {
    begin();
    track t = {.ms = {1.0f, 1.1f, 0.9f}}, other = {.ms = {1.0f, 0.8f, 0.9f}};
    CHECK_EQ_I(choose(1, &t), 2);
    CHECK_EQ_I(t.rounds, 10);
    CHECK_EQ_I(choose(1, &other), 2);
    CHECK_EQ_I(other.rounds, 0);
    CHECK_EQ_I(choose(2, &other), 1);
    CHECK_EQ_I(count_files(".choice"), 2);
    /* People can read it. */
    char text[256] = {0};
    FILE *f = fopen(path_of(1), "rb");
    CHECK(f && fseek(f, 48, SEEK_SET) == 0 && fread(text, 1, sizeof text - 1, f) > 0);
    if (f) fclose(f);
    CHECK_STR(text, "2 of 3: a test, 0.9000 ms; the default 1.0000 ms\n");
    /* That the default is the best is a choice too. */
    track alike = {.ms = {1.0f, 1.0f}};
    CHECK_EQ_I(choose(3, &alike), 0);
    CHECK_EQ_I(choose(3, &alike), 0);
    CHECK_EQ_I(alike.rounds, 10);
    end();
}

TEST(where_it_may_not_search_nothing_is_kept) {
    begin();
    track t = {.ms = {1.0f, 0.9f}};
    bst__set_search_time(0);
    CHECK_EQ_I(choose(1, &t), -1);
    CHECK_EQ_I(t.rounds, 0);
    bst__set_search_time(60);
    t.broken = true;
    CHECK_EQ_I(choose(1, &t), -1);
    CHECK_EQ_I(count_files(""), 0);
    t.broken = false;
    CHECK_EQ_I(choose(1, &t), 1);
    bst__set_search_time(0);
    CHECK_EQ_I(choose(1, &t), 1); /* what is stored serves nevertheless */
    end();
}

static bool slow_round(void *context, const bool *running, int first, float *ms) {
    usleep(20000);
    return run(context, running, first, ms);
}

TEST(searches_use_up_their_time) {
    begin();
    track t = {.ms = {1.0f, 0.9f}};
    bst_race race = race_of(&t);
    race.round = slow_round;
    bst_digest key = key_of(&machine, 1);
    bst__set_search_time(0.15);
    CHECK_EQ_I(bst__choice(&key, &race), 1); /* what has begun is finished */
    CHECK_EQ_I(choose(2, &t), -1);
    end();
}

TEST(machines_do_not_share_choices) {
    begin();
    bst_machine others[] = {machine, machine, machine, machine, machine};
    snprintf(others[0].chip, sizeof others[0].chip, "NVIDIA H100");
    others[1].arch = 100;
    others[2].processors = 16; /* a part of a chip */
    others[3].driver = 12080;
    others[4].library = 13010;
    track t = {.ms = {1.0f, 0.9f}};
    CHECK_EQ_I(choose(1, &t), 1);
    for (int i = 0; i < 5; i++) {
        track own = {.ms = {1.0f, 1.0f}};
        CHECK_EQ_I(choose_on(&others[i], 1, &own), 0);
        CHECK_EQ_I(own.rounds, 10);
    }
    CHECK_EQ_I(choose(1, &t), 1);
    CHECK_EQ_I(t.rounds, 10);
    CHECK_EQ_I(count_files(".choice"), 6);
    end();
}

/* Where every rival fails in the first round, nothing is measured, and that is a choice too. */
TEST(a_default_without_rivals_is_a_choice) {
    begin();
    track t = {.ms = {1.0f, BST_FAILED}};
    CHECK_EQ_I(choose(1, &t), 0);
    CHECK_EQ_I(choose(1, &t), 0);
    CHECK_EQ_I(t.rounds, 1);
    CHECK_EQ_I(count_files(".choice"), 1);
    end();
}

/* What wins without it is taken, but the next process may have the memory: it is not kept. */
TEST(who_lacks_memory_is_not_judged_for_ever) {
    begin();
    track tight = {.ms = {1.0f, BST_NO_ROOM, 0.9f}}, roomy = {.ms = {1.0f, 0.8f, 0.9f}};
    CHECK_EQ_I(choose(1, &tight), 2);
    CHECK_EQ_I(tight.runs[1], 1);
    CHECK_EQ_I(count_files(".choice"), 0);
    CHECK_EQ_I(choose(1, &roomy), 1);
    CHECK_EQ_I(count_files(".choice"), 1);
    CHECK_EQ_I(bst_autotune_clear(), 2); /* one that was in no folder */
    end();
}

static void write_at(const char *path, long at, const char *bytes) {
    FILE *f = fopen(path, "r+b");
    if (!f) abort();
    fseek(f, at, SEEK_SET);
    fputs(bytes, f);
    fclose(f);
}

static bst_status make_text(void *context, bst_blob *out) {
    *out = (bst_blob){strdup(context), strlen(context)};
    return BST_OK;
}

/* Damaged, cut short, or whole and yet no choice of this race. */
TEST(what_cannot_be_read_is_measured_anew) {
    static const char *const texts[] = {"7 of 2: too many", "1 of 3: of another race", "-1 of 2: none", "1",
                                        "\xff\xff"};
    begin();
    track t = {.ms = {1.0f, 0.9f}};
    CHECK_EQ_I(choose(1, &t), 1);
    write_at(path_of(1), 48, "0");
    CHECK_EQ_I(choose(1, &t), 1);
    CHECK_EQ_I(t.rounds, 20);
    CHECK(truncate(path_of(1), 53) == 0);
    CHECK_EQ_I(choose(1, &t), 1);
    CHECK_EQ_I(t.rounds, 30);
    CHECK(truncate(path_of(1), 0) == 0);
    CHECK_EQ_I(choose(1, &t), 1);
    CHECK_EQ_I(t.rounds, 40);
    for (int i = 0; i < 5; i++) {
        bst_digest key = key_of(&machine, 10 + i);
        bst_blob entry;
        CHECK_EQ_I(bst__cache_get(&key, BST_CACHE_CHOICE, make_text, (void *)(uintptr_t)texts[i], &entry), BST_OK);
        free(entry.data);
        CHECK_EQ_I(choose(10 + i, &t), -1);
        CHECK_EQ_I(choose(10 + i, &t), 1);
        CHECK_EQ_I(t.rounds, 50 + 10 * i);
    }
    end();
}

TEST(forgetting_forgets_choices_alone) {
    begin();
    track t = {.ms = {1.0f, 0.9f}};
    bst_digest key = key_of(&machine, 1);
    bst_blob code;
    CHECK_EQ_I(bst_autotune_clear(), 0);
    CHECK_EQ_I(bst__cache_get(&key, BST_CACHE_CODE, make_text, "code", &code), BST_OK);
    free(code.data);
    for (int i = 1; i <= 3; i++) CHECK_EQ_I(choose(i, &t), 1);
    int generation = bst__tuning_generation();
    CHECK_EQ_I(bst_autotune_clear(), 3);
    CHECK(bst__tuning_generation() != generation);
    CHECK_EQ_I(count_files(".choice"), 0);
    CHECK_EQ_I(count_files(".cubin"), 1);
    CHECK_EQ_I(bst_autotune_clear(), 0);
    CHECK_EQ_I(choose(1, &t), 1);
    CHECK_EQ_I(t.rounds, 40);
    /* What no folder holds counts too. */
    setenv("BASTILE_CACHE", "off", 1);
    CHECK_EQ_I(choose(2, &t), 1);
    CHECK_EQ_I(bst_autotune_clear(), 1);
    CHECK_EQ_I(bst_autotune_clear(), 0);
    end();
}

/* Counts searches of all processes together: a byte each in <root>/count. */
static bool counted_round(void *context, const bool *running, int first, float *ms) {
    const track *t = context;
    if (t->rounds == 0) {
        char path[160];
        snprintf(path, sizeof path, "%s/count", root);
        int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file < 0 || write(file, "x", 1) != 1) abort();
        close(file);
    }
    usleep(2000);
    return run(context, running, first, ms);
}

/* Each would find another one the fastest. */
static int search_together(int process, int round) {
    track t = {.ms = {1, 1, 1, 1, 1, 1, 1, 1}};
    t.ms[process] = 0.5f;
    bst_race race = race_of(&t);
    race.round = counted_round;
    bst_digest key = key_of(&machine, round);
    return bst__choice(&key, &race);
}

TEST(eight_processes_search_once_and_agree) {
    begin();
    for (int round = 0; round < 5; round++) {
        int found[8];
        in_eight_processes(search_together, round, found);
        for (int c = 0; c < 8; c++) {
            CHECK(found[c] >= 0 && found[c] < 8);
            CHECK_EQ_I(found[c], found[0]);
        }
        char path[160];
        struct stat s;
        snprintf(path, sizeof path, "%s/count", root);
        CHECK(stat(path, &s) == 0);
        CHECK_EQ_I(s.st_size, round + 1);
    }
    end();
}

/* A round that another thread is in while this one forks. */
static int in_round[2], go_on[2];

static bool held_up(void *context, const bool *running, int first, float *ms) {
    track *t = context;
    char byte = 0;
    if (t->rounds == 0 && (write(in_round[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1)) abort();
    return run(context, running, first, ms);
}

static void *search_held_up(void *won) {
    track t = {.ms = {1.0f, 0.9f}};
    bst_race race = race_of(&t);
    race.round = held_up;
    bst_digest key = key_of(&machine, 1);
    *(int *)won = bst__choice(&key, &race);
    return NULL;
}

/* A process searches one thing at a time; a child is another process. */
TEST(a_fork_during_a_search_can_search) {
    begin();
    pthread_t thread;
    int won = -1, ended = -1;
    char byte = 0;
    if (pipe(in_round) != 0 || pipe(go_on) != 0) abort();
    if (pthread_create(&thread, NULL, search_held_up, &won) != 0 || read(in_round[0], &byte, 1) != 1) abort();
    pid_t child = fork();
    if (!child) {
        alarm(60); /* where it would hang */
        track t = {.ms = {1.0f, 0.9f}};
        _exit(choose(2, &t) == 1 ? 0 : 1);
    }
    waitpid(child, &ended, 0);
    CHECK_EQ_I(ended, 0);
    CHECK(write(go_on[1], &byte, 1) == 1);
    pthread_join(thread, NULL);
    CHECK_EQ_I(won, 1);
    end();
}

int main(void) {
    RUN(the_verdict_is_for_what_is_faster_beyond_the_noise);
    RUN(of_several_winners_the_fastest_is_taken);
    RUN(the_faster_one_is_found);
    RUN(the_default_stays_where_nothing_stands_out);
    RUN(who_fails_drops_out);
    RUN(a_search_is_short);
    RUN(the_mode_is_the_calls_or_the_environments);
    RUN(a_set_mode_stays_while_others_ask);
    RUN(a_choice_is_measured_once);
    RUN(where_it_may_not_search_nothing_is_kept);
    RUN(searches_use_up_their_time);
    RUN(machines_do_not_share_choices);
    RUN(a_default_without_rivals_is_a_choice);
    RUN(who_lacks_memory_is_not_judged_for_ever);
    RUN(what_cannot_be_read_is_measured_anew);
    RUN(forgetting_forgets_choices_alone);
    RUN(eight_processes_search_once_and_agree);
    RUN(a_fork_during_a_search_can_search);
    return bst_test_report();
}
