// Asynchronous reads and writes of files, by io_uring (system calls alone) or by a pool of threads.
//
// A handle has one queue. A transfer is cut into blocks: whole pages at aligned offsets of a file opened with O_DIRECT
// are direct blocks, everything else (heads and tails of odd sizes, files without O_DIRECT) is plain and goes through
// the page cache. Direct blocks from aligned memory go to the ring, where there is one; the pool does all the others.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define DS_EXPORT extern "C" __declspec(dllexport)
#else
#define DS_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// How a transfer ended. code: 0, an errno, or DS_AIO_SHORT. offset: file offset of the first byte that is missing;
// expected, found: bytes of the whole transfer, bytes there are from its start on.
struct ds_aio_result {
  int64_t code;
  int64_t offset;
  int64_t expected;
  int64_t found;
};

enum { DS_AIO_SHORT = -1 };
enum { DS_AIO_AUTO = 0, DS_AIO_URING = 1, DS_AIO_THREADS = 2 };
enum { DS_AIO_SINGLE_SUBMIT = 1, DS_AIO_NO_OVERLAP = 2 };

struct ds_aio;

// Null when `engine` asks for io_uring and there is none; *reason is then an errno. depth: direct blocks in flight;
// threads: size of the pool (started when needed).
DS_EXPORT ds_aio *ds_aio_open(int64_t block_nbytes, int32_t depth, int32_t threads, int32_t engine, int32_t flags,
                              int32_t *reason);
// DS_AIO_URING or DS_AIO_THREADS.
DS_EXPORT int32_t ds_aio_engine(const ds_aio *handle);
// Starts a transfer; returns its ticket (> 0). direct: descriptor opened with O_DIRECT, or -1; plain: the same file
// without it. Memory and descriptors must stay until the ticket was waited for. after: a ticket that must have ended,
// well or not, before this transfer touches memory or file; 0: none.
DS_EXPORT int64_t ds_aio_submit(ds_aio *handle, int32_t write, int32_t direct, int32_t plain, void *memory,
                                int64_t nbytes, int64_t offset, int64_t after);
// 1: ended, *result is filled and the ticket is forgotten; 0: not within timeout_ms; -1: no such ticket.
DS_EXPORT int32_t ds_aio_wait(ds_aio *handle, int64_t ticket, int32_t timeout_ms, ds_aio_result *result);
// Transfers that were started and have not ended.
DS_EXPORT int64_t ds_aio_pending(ds_aio *handle);
// Waits for everything that was started, then frees the handle.
DS_EXPORT void ds_aio_close(ds_aio *handle);
// For tests: after `after` more blocks, one block ends with errno `code`; code 0: every block moves half of its bytes.
DS_EXPORT void ds_aio_fault(ds_aio *handle, int64_t after, int32_t code);
// memcpy by `threads` threads, for copies that should not hold up an interpreter.
DS_EXPORT void ds_aio_copy(void *target, const void *source, int64_t nbytes, int32_t threads);
