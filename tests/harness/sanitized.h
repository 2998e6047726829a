/* sanitized.h: whether this build runs under a sanitizer. Every instruction takes several times as long there, and what it
 * watches for are wrong accesses and races: tables of cases are shorter, the release build goes through all of them. */
#ifndef BACKCAST_TEST_SANITIZED_H
#define BACKCAST_TEST_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif
#endif
