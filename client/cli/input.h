/* input.h: text from the arguments, from a file, or from standard input. */
#ifndef BACKCAST_INPUT_H
#define BACKCAST_INPUT_H
#include "cli.h"

#define INPUT_BYTES_MAX (64u << 20) /* the tokeniser's limit */

/* The whole of a file ("-": standard input), malloced and NUL-terminated behind its len bytes. Says
 * what is wrong; returns a cli_exit. */
int input_read(const char *path, char **ret, size_t *ret_len);
/* The text of a command: FILE's (-f), an empty line, the arguments joined by spaces; where neither
 * is given, standard input (which must then be no terminal). */
bool input_is_piped(void); /* standard input is a pipe or a file that text may come from */
int input_text(const struct args *a, char **ret, size_t *ret_len);
#endif
