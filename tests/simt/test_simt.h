/* test_simt.h: for the shim's own tests: device memory in one line, schedules, and bugs that must be reported.
 *
 * A bug is seeded in a child process, because a report ends the process; the parent reads what it said. */
#pragma once
#include "port.cuh"
#include "rt.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
extern "C" {
#include <cmocka.h>
}
#include <functional>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED true /* the compiler's checks are the real sanitizers' */
#else
#define SANITIZED false
#endif

#define CUDA(call) assert_int_equal(call, cudaSuccess)

struct child_end {
    int status; /* of waitpid */
    std::string said;
    bool aborted() const { return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT; }
    bool fine() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
};

static inline child_end child_run(const std::function<void()> &body)
{
    int pipe_fds[2];
    assert_int_equal(pipe(pipe_fds), 0);
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(pipe_fds[1], 2);
        close(pipe_fds[0]);
        close(pipe_fds[1]);
        signal(SIGABRT, SIG_DFL); /* cmocka's would jump into the parent's copy */
        signal(SIGSEGV, SIG_DFL);
        body();
        _exit(0);
    }
    close(pipe_fds[1]);
    child_end end = {};
    char buf[4096];
    for (ssize_t n; (n = read(pipe_fds[0], buf, sizeof buf)) > 0;)
        end.said.append(buf, (size_t)n);
    close(pipe_fds[0]);
    assert_int_equal(waitpid(pid, &end.status, 0), pid);
    return end;
}

/* The body must end with a report that holds every one of the words; with AddressSanitizer, its report will do. */
static inline void expect_report(const std::function<void()> &body,
                                 const std::vector<const char *> &words)
{
    child_end end = child_run(body);
    if (end.said.find("ERROR: AddressSanitizer") != std::string::npos)
        return;
    if (!end.aborted())
        fail_msg("no report (status %d), said: %s", end.status, end.said.c_str());
    for (const char *word : words)
        if (end.said.find(word) == std::string::npos)
            fail_msg("the report lacks \"%s\": %s", word, end.said.c_str());
}

static inline void expect_silence(const std::function<void()> &body)
{
    child_end end = child_run(body);
    if (!end.fine() || !end.said.empty())
        fail_msg("status %d, said: %s", end.status, end.said.c_str());
}

static inline void use_schedule(enum simt::schedule s, uint32_t seed = 1)
{
    simt::options o = simt::options_default();
    o.schedule = s;
    o.seed = seed;
    simt::set_options(o);
}

static inline void use_streams(enum simt::stream_order s, uint32_t seed = 1)
{
    simt::options o = simt::options_default();
    o.streams = s;
    o.seed = seed;
    simt::set_options(o);
}

/* Device memory with the host's values; freed by the owner. */
template <class T> static inline T *device_of(const std::vector<T> &host)
{
    T *p;
    CUDA(cudaMalloc(&p, host.size() * sizeof(T)));
    CUDA(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class T> static inline T *device_new(size_t n)
{
    T *p;
    CUDA(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T> static inline std::vector<T> host_of(const T *device, size_t n)
{
    std::vector<T> host(n);
    CUDA(cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

struct test_random {
    uint64_t state;
    uint32_t bits()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return (uint32_t)(z >> 32);
    }
    float unit() { return (float)((int)(bits() >> 8) - (1 << 23)) * 0x1p-23f; } /* in -1 .. 1 */
};
