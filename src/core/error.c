/* error.c - status texts, and what a thread keeps: its last message above all. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/core.h"

const char *bst_version(void) { return BST_VERSION; }
int bst_version_number(void) { return BST_VERSION_NUMBER; }

const char *bst_status_name(bst_status status) {
    switch (status) {
#define NAME(name, value, text) \
    case name:                  \
        return #name;
        BST_STATUS_MAP(NAME)
#undef NAME
    }
    return "an unknown status";
}

const char *bst_status_text(bst_status status) {
    switch (status) {
#define TEXT(name, value, text) \
    case name:                  \
        return text;
        BST_STATUS_MAP(TEXT)
#undef TEXT
    }
    return "an unknown status";
}

/* ---- what a thread keeps ----------------------------------------------------------------------------------------- */

static pthread_key_t key;
static bool have_key;
/* Stands for what could not be allocated. */
static bst_thread lost = {.message = {"the call failed, and there was no memory to keep the reason"}};

static void end_thread(void *kept) {
    if (kept != &lost) free(kept);
}

static void make_key(void) { have_key = pthread_key_create(&key, end_thread) == 0; }

/* The library may be unloaded before its threads end. */
static void __attribute__((destructor)) unload(void) {
    if (!have_key) return;
    end_thread(pthread_getspecific(key));
    pthread_key_delete(key);
    have_key = false;
}

/* NULL where nothing was kept. */
static bst_thread *kept(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    return have_key ? pthread_getspecific(key) : &lost;
}

bst_thread *bst__thread(void) {
    bst_thread *thread = kept();
    if (thread && thread != &lost) return thread;
    if (!have_key) return NULL;
    thread = calloc(1, sizeof *thread);
    if (thread && pthread_setspecific(key, thread) == 0) return thread;
    free(thread);
    pthread_setspecific(key, &lost);
    return NULL;
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

const char *bst_last_error(void) {
    const bst_thread *thread = kept();
    return thread ? thread->message.text : "";
}

bst_message bst__message(void) {
    const bst_thread *thread = kept();
    return thread ? thread->message : (bst_message){0};
}

void bst__put_back(const bst_message *message) {
    bst_thread *thread = kept();
    if (thread && thread != &lost) thread->message = *message;
}

bst_status bst__error(bst_status status, const char *format, ...) {
    bst_thread *thread = bst__thread();
    if (!thread) return status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(thread->message.text, sizeof thread->message.text, format, arguments);
    va_end(arguments);
    thread->errors++;
    return status;
}

bst_status bst__name_item(bst_status status, int64_t i) {
    bst_message was = bst__message();
    char text[2 * sizeof was.text] = "";
    size_t at = 0;
    const char *rest = was.text;
    for (const char *hit; (hit = strstr(rest, "[i]")) && at + sizeof was.text < sizeof text; rest = hit + 3)
        at += (size_t)sprintf(text + at, "%.*s[%lld]", (int)(hit - rest), rest, (long long)i);
    return bst__error(status, "%s%s", text, rest);
}
