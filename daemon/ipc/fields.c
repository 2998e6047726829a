/* fields.c: see fields.h. */
#include "fields.h"
#include <math.h>
#include <string.h>

int field_range(const char *field, uint64_t v, uint64_t lo, uint64_t hi, struct err *e)
{
    if (v >= lo && v <= hi)
        return BC_OK;
    return err_set(e, BC_EINVALID, field, "%s %llu is not in %llu..%llu", field,
                   (unsigned long long)v, (unsigned long long)lo, (unsigned long long)hi);
}

int field_real(const char *field, double v, double lo, double hi, struct err *e)
{
    if (isfinite(v) && v >= lo && v <= hi)
        return BC_OK;
    return err_set(e, BC_EINVALID, field, "%s %g is not in %g..%g", field, v, lo, hi);
}

int field_text(const char *field, const ProtobufCBinaryData *b, char *ret, size_t size,
               struct err *e)
{
    if (b->len >= size)
        return err_set(e, BC_EINVALID, field, "%s has %zu bytes: at most %zu", field, b->len,
                       size - 1);
    for (size_t i = 0; i < b->len; i++)
        if (b->data[i] < 0x20 || b->data[i] == 0x7f)
            return err_set(e, BC_EINVALID, field, "%s has a control character (byte %zu is 0x%02x)",
                           field, i, b->data[i]);
    if (b->len > 0)
        memcpy(ret, b->data, b->len);
    ret[b->len] = '\0';
    return BC_OK;
}

int field_name(const char *field, const ProtobufCBinaryData *b, char *ret, size_t size,
               struct err *e)
{
    if (b->len == 0)
        return err_set(e, BC_EINVALID, field, "%s is empty: 1 to %zu bytes", field, size - 1);
    int rc = field_text(field, b, ret, size, e);
    if (rc < 0)
        return rc;
    size_t ok = strspn(ret, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-");
    if (ret[ok] != '\0')
        return err_set(e, BC_EINVALID, field, "%s \"%s\": only A-Z a-z 0-9 . _ - may be used",
                       field, ret);
    return BC_OK;
}
