/* folders.h: the state folder: what lies where.
 *
 *   STATE_DIR/lock                      held for life: one daemon a folder
 *   STATE_DIR/saved/UID/NAME.bcs        `backcast save`
 *   STATE_DIR/durable/KEY/journal       a durable session (snapshot beside it)
 *   STATE_DIR/quarantine/KEY-N/         what could not be read, with its reason
 */
#ifndef BACKCAST_ENGINE_FOLDERS_H
#define BACKCAST_ENGINE_FOLDERS_H
#include "base.h"

/* Makes every missing folder above path, with mode 0700, each synced into its own. */
int folders_make(const char *path, struct err *e);
/* The folder itself, and its lock: *ret_fd stays open for the daemon's life. BC_EBUSY: another
 * daemon has it. */
int folders_lock(const char *state_dir, int *ret_fd, struct err *e);
bool folders_name_ok(const char *name); /* of a save: 1 to 64 of A-Z a-z 0-9 . _ - */
#endif
