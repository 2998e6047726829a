/* wire.h: result codes of the border's own functions, with the numbers of errors.tbl, so that both
 * sides pass them on unchanged (BC_E* in the daemon, BACKCAST_E* in the library). */
#ifndef BACKCAST_WIRE_H
#define BACKCAST_WIRE_H
enum wire_code {
    WIRE_OK = 0,
#define ERR(name, number, text) WIRE_E##name = -(number),
#include "errors.tbl"
#undef ERR
};
#endif
