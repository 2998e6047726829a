/* map.h: a conversation as it stands in the cache: what was dropped struck out, what was kept shaded
 * by how much of a surprise it is.
 *
 *   rows      stream 0     1       2        4       5        (3: dropped so long ago that its id is gone)
 *   bytes     "The"  " mi"  "ll"   ...  "\xe2\x82"  "\xac"   a character may lie in two tokens:
 *   pieces    [The][ mi][ll] [gap] [    "€"       ]          it belongs to the one it begins in
 *
 * Text comes from a model and is not trusted: no byte of it reaches a terminal or a page that could be
 * anything but text. */
#ifndef BACKCAST_MAP_H
#define BACKCAST_MAP_H
#include <stdbool.h>
#include <stdio.h>
#include "backcast.h"

struct tok;

#define MAP_LEVELS 5 /* of shades; 0: none */

struct map {
    const struct backcast_score *rows; /* in the order of the stream */
    size_t n;
    struct tok *tok;
    const char *name, *policy;
    char *text; /* of all tokens, one after the other; malloced */
    size_t *ends;
    unsigned char *level; /* [n] 0..MAP_LEVELS: the strongest is the greatest surprise */
    size_t n_dropped;
};
/* rows and strings must live as long as the map. -1: no memory. */
int map_open(struct map *ret, const struct backcast_score *rows, size_t n, struct tok *tok,
             const char *name, const char *policy);
void map_close(struct map *m);
/* For a terminal; color false: dropped text in [- -]. */
void map_print(FILE *f, const struct map *m, bool color);
void map_html(FILE *f, const struct map *m);
#endif
