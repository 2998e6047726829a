/* json.h: writes JSON to a FILE, an object a line; commas and escapes are its business.
 *
 *     struct json j = json_start(stdout);
 *     json_open(&j, NULL, '{');
 *     json_text(&j, "name", s);
 *     json_open(&j, "ids", '[');
 *     json_int(&j, NULL, 7);
 *     json_shut(&j, ']');
 *     json_shut(&j, '}');          at depth 0: a newline, and a flush
 *
 * Keys are NULL inside arrays. Strings may hold any bytes: what is no UTF-8 becomes U+FFFD, for JSON
 * knows no other bytes. NaN and infinities become null. */
#ifndef BACKCAST_JSON_H
#define BACKCAST_JSON_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct json {
    FILE *f;
    int depth;
    bool comma; /* a value stands before on this level */
};

struct json json_start(FILE *f);
void json_open(struct json *j, const char *key, char bracket);  /* '{' or '[' */
void json_shut(struct json *j, char bracket);                   /* '}' or ']' */
void json_text(struct json *j, const char *key, const char *s); /* s NULL: null */
void json_bytes(struct json *j, const char *key, const char *s, size_t len);
void json_uint(struct json *j, const char *key, uint64_t v);
void json_int(struct json *j, const char *key, int64_t v);
void json_num(struct json *j, const char *key, double v);
void json_bool(struct json *j, const char *key, bool v);

/* Length of the UTF-8 character at s (1..4), 0 if there is none: also for overlong forms, surrogates
 * and values over U+10FFFF. */
size_t utf8_length(const char *s, size_t len);
#endif
