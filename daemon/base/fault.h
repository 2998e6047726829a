/* fault.h: mapped files that shrink while they are read.
 *
 * Reading a mapping beyond the end of its file raises SIGBUS, and somebody else may truncate a model file at any moment. A watched
 * mapping survives it: the handler puts zero pages over the rest of the range and marks it, the reader goes on with zeros, and whoever
 * read it asks fault_seen at the end and refuses the file. Any other SIGBUS ends the process as usual.
 *
 * The table of ranges is one of the few globals of the daemon: a signal handler has nothing else. Any thread may watch and unwatch.
 */
#ifndef BACKCAST_FAULT_H
#define BACKCAST_FAULT_H
#include <stdbool.h>
#include <stddef.h>

#define FAULT_RANGES_MAX 64

/* Watches [base, base + len), base page-aligned. Returns a number for the other calls, or -1 when FAULT_RANGES_MAX ranges are watched
 * already (the mapping is then simply not protected). */
int fault_watch(void *base, size_t len);
bool fault_seen(int range);    /* whether the range was damaged; false for -1 */
void fault_unwatch(int range); /* before munmap; -1 is fine */
#endif
