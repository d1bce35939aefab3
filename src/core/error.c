/* error.c - status texts and this thread's last message. */
#include <stdarg.h>
#include <stdio.h>

#include "core/core.h"

static _Thread_local bst_message message;

const char *bst_version(void) { return BST_VERSION; }

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

const char *bst_last_error(void) { return message.text; }

bst_message bst__message(void) { return message; }

void bst__put_back(const bst_message *kept) { message = *kept; }

bst_status bst__error(bst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message.text, sizeof message.text, format, arguments);
    va_end(arguments);
    return status;
}
