/* The bounded string functions that torchair formats its messages with. Same contract as their callers use: a
   destination and its size, the longest text to write, a negative number (strcpy_s: nonzero) when it doesn't fit. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int vsnprintf_s(char *out, size_t size, size_t most, const char *format, va_list arguments) {
    size_t room = most < size ? most + 1 : size;
    int written = vsnprintf(out, room, format, arguments);
    return written >= 0 && (size_t)written < room ? written : -1;
}

int snprintf_s(char *out, size_t size, size_t most, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf_s(out, size, most, format, arguments);
    va_end(arguments);
    return written;
}

int strcpy_s(char *out, size_t size, const char *text) {
    if (strlen(text) >= size) return 1;
    strcpy(out, text);
    return 0;
}
