// What the doubles offer to tests and to each other, besides the functions of the libraries that they stand in for.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// A kernel by its name, as it runs on a CPU. Arguments that are pointers arrive as addresses of this process.
typedef void (*fakecuda_kernel)(const unsigned grid[3], const unsigned block[3], void **arguments, void *user);

// Makes a kernel known: the sizes of its arguments, and which of them are pointers. PTX that declares others is refused.
int fakecuda_register(const char *name, uint32_t count, const uint32_t *sizes, const uint8_t *pointers,
                      fakecuda_kernel run, void *user);

// How often something was done: a function by its name, or "kernels", "host synchronizations".
long fakecuda_count(const char *what);
// How much is alive: memory, streams, events, modules and retained contexts.
long fakecuda_alive(void);

// Forgets waits, as a program might: calls of a function (cuStreamWaitEvent, cuStreamSynchronize, cuEventQuery) on a stream,
// or on any other, from the one after `before` of them on, so many times. An event has no stream here: null.
void fakecuda_forget(const char *name, void *stream, int is_other, long before, long times);

// Which of the streams that are made from now on are lazy, as FAKECUDA_SCHED says it (streams.h).
void fakecuda_schedule(long lazy);

// For the double of NCCL: memory of the device as the host sees it, or null if it is not so long; work on a stream; and
// whether the work that is running waits for a peer.
void *fakecuda_host(uint64_t address, size_t bytes);
int fakecuda_push(void *stream, void (*work)(void *), void *argument);
void fakecuda_waiting(int is);
// Waits for a stream, for whoever stands in for torch; it is not counted.
void fakecuda_drain(void *stream);

long fakenccl_count(const char *what);
long fakenccl_alive(void);
}
