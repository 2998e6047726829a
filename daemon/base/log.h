/* log.h: log lines with a topic and a level, to stderr (systemd's journal reads the <N> prefix).
 *
 * A level may be set per topic by glob: "info", "evict.*:trace,ipc:debug,info". Thread-safe: a line
 * is one write(2). The level table is one of the two globals of the daemon. */
#ifndef BACKCAST_LOG_H
#define BACKCAST_LOG_H
#include <stdbool.h>
struct err;
enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG, LOG_TRACE };

/* Parses and installs a specification, at any time, from one thread. BC_EINVALID names the bad part;
 * then nothing has changed. */
int log_setup(const char *spec, struct err *e);
/* Whether log_setup would take it; changes nothing. */
int log_check(const char *spec, struct err *e);
bool log_on(const char *topic, enum log_level level);
void log_line(const char *topic, enum log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
#define log_error(topic, ...) log_line(topic, LOG_ERROR, __VA_ARGS__)
#define log_warn(topic, ...) log_line(topic, LOG_WARN, __VA_ARGS__)
#define log_info(topic, ...) log_line(topic, LOG_INFO, __VA_ARGS__)
#define log_debug(topic, ...)                                                                      \
    (log_on(topic, LOG_DEBUG) ? log_line(topic, LOG_DEBUG, __VA_ARGS__) : (void)0)
#define log_trace(topic, ...)                                                                      \
    (log_on(topic, LOG_TRACE) ? log_line(topic, LOG_TRACE, __VA_ARGS__) : (void)0)
#endif
