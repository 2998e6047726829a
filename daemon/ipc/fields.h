/* fields.h: checks of message fields. Each names the field and the value in its error. */
#ifndef BACKCAST_IPC_FIELDS_H
#define BACKCAST_IPC_FIELDS_H
#include <protobuf-c/protobuf-c.h>
#include "base.h"

/* lo <= v <= hi */
int field_range(const char *field, uint64_t v, uint64_t lo, uint64_t hi, struct err *e);
/* Finite and lo <= v <= hi. */
int field_real(const char *field, double v, double lo, double hi, struct err *e);
/* Copies to ret[size] with a NUL: no NUL inside, printable or UTF-8 bytes only, shorter than size.
 * */
int field_text(const char *field, const ProtobufCBinaryData *b, char *ret, size_t size,
               struct err *e);
/* The same for names that become part of listings: 1..max bytes of [A-Za-z0-9._-]. */
int field_name(const char *field, const ProtobufCBinaryData *b, char *ret, size_t size,
               struct err *e);
#endif
