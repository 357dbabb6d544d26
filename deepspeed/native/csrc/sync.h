// Mutexes, conditions and threads as plain POSIX ones.
//
// The standard's <mutex>, <condition_variable> and <thread> do the same and cost every library that includes them about
// half a second of compiling, which users wait for at the first use of an op.
// Invariant: threads made here take no signals; those are for the program's own threads.
#pragma once

#include <cerrno>
#include <cstdint>
#include <ctime>

#include <pthread.h>
#include <signal.h>

namespace threads {

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }
  bool try_lock() { return pthread_mutex_trylock(&mutex_) == 0; }

 private:
  friend class Condition;
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

// Holds a mutex to the end of its scope; may let go of it and take it again in between.
class Lock {
 public:
  explicit Lock(Mutex& mutex) : mutex_(mutex), held_(true) { mutex.lock(); }
  Lock(Mutex& mutex, bool held) : mutex_(mutex), held_(held) {}  // of one that the caller has, or has not, locked
  Lock(const Lock&) = delete;
  ~Lock() {
    if (held_) mutex_.unlock();
  }
  void lock() {
    mutex_.lock();
    held_ = true;
  }
  void unlock() {
    held_ = false;
    mutex_.unlock();
  }
  bool held() const { return held_; }

 private:
  friend class Condition;
  Mutex& mutex_;
  bool held_;
};

// Nanoseconds of a clock that nobody sets.
inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

class Condition {
 public:
  Condition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  Condition(const Condition&) = delete;
  ~Condition() { pthread_cond_destroy(&condition_); }

  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }
  void wait(Lock& lock) { pthread_cond_wait(&condition_, &lock.mutex_.mutex_); }

  template <class Ready>
  void wait(Lock& lock, Ready ready) {
    while (!ready()) wait(lock);
  }

  // Until `end` in `now_ns()`; false when it has come. May wake up for nothing, as all of these.
  bool wait_until(Lock& lock, int64_t end) {
#if defined(__APPLE__)
    const int64_t left = end - now_ns();
    if (left <= 0) return false;
    const timespec limit{time_t(left / 1000000000), long(left % 1000000000)};
    return pthread_cond_timedwait_relative_np(&condition_, &lock.mutex_.mutex_, &limit) != ETIMEDOUT;
#else
    const timespec limit{time_t(end / 1000000000), long(end % 1000000000)};
    return pthread_cond_timedwait(&condition_, &lock.mutex_.mutex_, &limit) != ETIMEDOUT;
#endif
  }

 private:
  pthread_cond_t condition_;
};

// A thread that runs `body()`, made by `start`; nothing before. Joined by the owner, or by nobody (`let_go`).
class Thread {
 public:
  // False, and nothing runs, where the system allows no more threads. `body` is copied.
  template <class Body>
  bool start(const Body& body) {
    Body* copy = new Body(body);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    running_ = pthread_create(&thread_, nullptr, run<Body>, copy) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!running_) delete copy;
    return running_;
  }
  bool running() const { return running_; }
  void join() {
    if (running_) pthread_join(thread_, nullptr);
    running_ = false;
  }
  void let_go() {
    if (running_) pthread_detach(thread_);
    running_ = false;
  }

 private:
  template <class Body>
  static void* run(void* copy) {
    Body* body = static_cast<Body*>(copy);
    (*body)();
    delete body;
    return nullptr;
  }

  pthread_t thread_ = {};
  bool running_ = false;
};

}  // namespace threads
