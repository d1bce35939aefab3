/* sanitize.h - AddressSanitizer's hooks, or nothing in a build without it. EMU_UNDER_ASAN: a file that is not checked
 * itself, in a build that is. */
#ifndef EMU_SANITIZE_H
#define EMU_SANITIZE_H

#if defined(__SANITIZE_ADDRESS__) || defined(EMU_UNDER_ASAN)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_NO_ASAN __attribute__((no_sanitize_address))
#else
#define EMU_NO_ASAN
#endif

#endif
