/* env.h: the places that the environment names: the only getenv of the daemon beside systemd's. */
#ifndef BACKCAST_ENV_H
#define BACKCAST_ENV_H
#include "base.h"

enum env_dir { ENV_RUNTIME, ENV_CONFIG, ENV_DATA, ENV_STATE, ENV_SERVICE_STATE };

/* $XDG_RUNTIME_DIR, $XDG_CONFIG_HOME or ~/.config, $XDG_DATA_HOME or ~/.local/share, $XDG_STATE_HOME
 * or ~/.local/state, $STATE_DIRECTORY (the service manager's); absolute paths only, as the
 * specification asks. False: there is none. */
bool env_dir(enum env_dir which, char *ret, size_t size);
/* Bytes of memory that can be had without swapping: of the machine, and of the control group. */
uint64_t env_memory(void);
#endif
