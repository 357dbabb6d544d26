// Threads for one parallel region over many pieces of work.
//
// Owns: the worker threads of this library, how a region is cut over them, fork. Does not own: what a piece is.
// Invariants:
//   - idle workers sleep in the kernel; nothing here spins;
//   - a region ends when its pieces are done, whether or not a worker has woken up yet, so a core that is busy with
//     another process delays a region by one grain at most;
//   - a region has no more threads than the caller may use cores, and they run on those cores alone, also where the
//     program has been bound to others since (Linux);
//   - a second caller (another thread of the program) does its region alone instead of waiting;
//   - after fork the child has no workers and makes its own at its first region.
// No C++ runtime is needed: plain pthreads, static storage.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

namespace pool {

constexpr int MOST_THREADS = 256;
constexpr size_t STACK_BYTES = size_t(1) << 20;

// Called with a range of pieces; ranges of one region do not overlap and cover all pieces.
using Body = void (*)(void* context, int64_t begin, int64_t end);

// Each participant starts with a range of its own, so that its memory is one run, and takes from the others' when done.
struct alignas(64) Slice {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Region {
  Body body;
  void* context;
  int64_t grain;
  int slices;
  unsigned rounding;  // the caller's floating-point control word: flushing of denormals, rounding
  std::atomic<int> joined;
  Slice slice[MOST_THREADS];
};

// The cores that the calling thread may use. Empty where the system does not tell: then nothing follows from it.
struct Cores {
#if defined(__linux__)
  cpu_set_t set;
  Cores() {
    if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);  // more of them than the set can hold
  }
  int count() const { return CPU_COUNT(&set); }
  bool is(const Cores& other) const { return CPU_EQUAL(&set, &other.set); }
  void bind(pthread_t thread) const { pthread_setaffinity_np(thread, sizeof set, &set); }
#else
  int count() const { return 0; }
  bool is(const Cores&) const { return true; }
  void bind(pthread_t) const {}
#endif
};

struct State {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  pthread_cond_t left = PTHREAD_COND_INITIALIZER;
  Region* open = nullptr;
  int wanted = 0;   // workers that may still join the open region
  int inside = 0;   // workers that are in it
  int threads = 0;  // workers that exist
  Cores cores;      // that they may use
  pthread_t worker[MOST_THREADS];
};

inline State& state() {
  static State the_state;
  return the_state;
}

// Storage of the one region that runs on workers; too large for a stack.
inline Region& shared_region() {
  static Region the_region;
  return the_region;
}

inline unsigned control_word() {
#if defined(__SSE2__)
  return __builtin_ia32_stmxcsr();
#else
  return 0;
#endif
}

inline void set_control_word(unsigned word) {
#if defined(__SSE2__)
  __builtin_ia32_ldmxcsr(word);
#else
  (void)word;
#endif
}

inline void take_part(Region& region, int first) {
  for (int k = 0; k < region.slices; ++k) {
    Slice& slice = region.slice[(first + k) % region.slices];
    for (;;) {
      if (slice.next.load(std::memory_order_relaxed) >= slice.end) break;
      const int64_t begin = slice.next.fetch_add(region.grain, std::memory_order_relaxed);
      if (begin >= slice.end) break;
      const int64_t end = begin + region.grain < slice.end ? begin + region.grain : slice.end;
      region.body(region.context, begin, end);
    }
  }
}

inline void* work(void*) {
  State& s = state();
  pthread_mutex_lock(&s.mutex);
  for (;;) {
    while (s.open == nullptr || s.wanted == 0) pthread_cond_wait(&s.wake, &s.mutex);
    Region& region = *s.open;
    --s.wanted;
    ++s.inside;
    pthread_mutex_unlock(&s.mutex);
    set_control_word(region.rounding);
    take_part(region, region.joined.fetch_add(1, std::memory_order_relaxed));
    pthread_mutex_lock(&s.mutex);
    if (--s.inside == 0) pthread_cond_signal(&s.left);
  }
}

// A fork copies the calling thread alone. Holding the mutex over it gives the child a state that nobody was changing.
inline void before_fork() { pthread_mutex_lock(&state().mutex); }
inline void after_fork_in_parent() { pthread_mutex_unlock(&state().mutex); }
inline void after_fork_in_child() { new (&state()) State; }

// Called with the mutex held. Returns how many workers there are, at most `wanted`.
inline int ensure_workers(State& s, int wanted, const Cores& cores) {
  static bool registered = false;
  if (!registered) registered = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
  if (!registered) return 0;
  if (!s.cores.is(cores)) {  // those to come have them from the caller
    s.cores = cores;
    for (int i = 0; cores.count() && i < s.threads; ++i) cores.bind(s.worker[i]);
  }
  if (s.threads < wanted) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigset_t all, before;  // signals are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (s.threads < wanted && pthread_create(&thread, &attributes, work, nullptr) == 0)
      s.worker[s.threads++] = thread;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
  }
  return s.threads < wanted ? s.threads : wanted;
}

// Run `body` over the pieces [0, count) on up to `threads` threads, the caller included, `grain` pieces at a time.
inline void run(int64_t count, int64_t grain, int64_t threads, Body body, void* context) {
  if (grain < 1) grain = 1;
  const int64_t useful = (count + grain - 1) / grain;
  int64_t team = threads < useful ? threads : useful;
  if (team > MOST_THREADS) team = MOST_THREADS;
  State& s = state();
  if (team > 1) {
    const Cores cores;
    if (cores.count() && team > cores.count()) team = cores.count();
    pthread_mutex_lock(&s.mutex);
    team = s.open == nullptr ? 1 + ensure_workers(s, int(team) - 1, cores) : 1;
    if (team < 2) pthread_mutex_unlock(&s.mutex);
  }
  if (team < 2) {
    for (int64_t at = 0; at < count; at += grain) body(context, at, at + grain < count ? at + grain : count);
    return;
  }
  Region& region = shared_region();
  region.body = body;
  region.context = context;
  region.grain = grain;
  region.slices = int(team);
  region.rounding = control_word();
  region.joined.store(1, std::memory_order_relaxed);
  for (int64_t t = 0; t < team; ++t) {
    // Cut at whole grains; products stay far below 2^63: useful * team is at most pieces * 256.
    region.slice[t].next.store(useful * t / team * grain, std::memory_order_relaxed);
    const int64_t end = useful * (t + 1) / team * grain;
    region.slice[t].end = end < count ? end : count;
  }
  s.open = &region;
  s.wanted = int(team) - 1;
  pthread_mutex_unlock(&s.mutex);
  pthread_cond_broadcast(&s.wake);
  take_part(region, 0);
  pthread_mutex_lock(&s.mutex);
  s.wanted = 0;
  while (s.inside > 0) pthread_cond_wait(&s.left, &s.mutex);
  s.open = nullptr;
  pthread_mutex_unlock(&s.mutex);
}

}  // namespace pool
