// See aio.h. Reading order: Transfer and Block, Ring (io_uring by system call), ds_aio (queues, workers, the ring's
// driver). Locking: everything shared is under ds_aio::mutex; no system call that may block is made while it is held.

#include "aio.h"
#include "sync.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#define DS_HAS_URING 1
#endif

namespace {

constexpr int64_t kPage = 4096;      // offsets and sizes of direct blocks: no disk has larger sectors
constexpr int64_t kMemoryAlign = 512;

struct Block;

struct Transfer {
  int64_t offset = 0;
  int64_t nbytes = 0;
  int64_t blocks_left = 0;
  int64_t code = 0;
  int64_t bad_offset = 0;
  std::vector<Block *> held_up;  // blocks of others, which may start when this has ended
};

struct Block {
  Transfer *transfer;
  char *memory;
  int64_t offset;
  int64_t nbytes;
  int direct;  // -1: through the page cache
  int plain;
  bool write;

  bool aligned_memory() const { return reinterpret_cast<uintptr_t>(memory) % kMemoryAlign == 0; }
};

struct Fault {
  std::atomic<int64_t> after{-1};
  std::atomic<int> code{0};

  // 0: none; an errno; -1: move half.
  int next() {
    if (after.load(std::memory_order_relaxed) < 0) return 0;
    if (code.load() == 0) return -1;
    return after.fetch_sub(1) == 0 ? code.load() : 0;
  }
};

#ifdef DS_HAS_URING

int enter(int ring, unsigned submit, unsigned wait) {
  return static_cast<int>(syscall(__NR_io_uring_enter, ring, submit, wait, wait ? IORING_ENTER_GETEVENTS : 0, nullptr, 0));
}

// One io_uring: pushed to and reaped by one thread.
class Ring {
 public:
  // 0 or an errno.
  int open(unsigned entries) {
    io_uring_params params{};
#ifdef IORING_SETUP_CLAMP
    params.flags = IORING_SETUP_CLAMP;
#endif
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ < 0) return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !knows_read_and_write()) return ENOSYS;
    ring_nbytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_nbytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = map(ring_nbytes_, IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe *>(map(entries_nbytes_, IORING_OFF_SQES));
    if (!ring_ || !entries_) return ENOMEM;
    char *base = static_cast<char *>(ring_);
    sq_tail_ = reinterpret_cast<unsigned *>(base + params.sq_off.tail);
    sq_array_ = reinterpret_cast<unsigned *>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned *>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned *>(base + params.cq_off.tail);
    completions_ = reinterpret_cast<io_uring_cqe *>(base + params.cq_off.cqes);
    sq_mask_ = params.sq_entries - 1;
    cq_mask_ = params.cq_entries - 1;
    capacity_ = params.sq_entries;
    return 0;
  }

  ~Ring() {
    if (entries_) munmap(entries_, entries_nbytes_);
    if (ring_) munmap(ring_, ring_nbytes_);
    if (fd_ >= 0) ::close(fd_);
  }

  unsigned capacity() const { return capacity_; }

  void push_block(const Block *block, int64_t nbytes) {
    io_uring_sqe &entry = fresh();
    entry.opcode = block->write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = block->direct;
    entry.addr = reinterpret_cast<uint64_t>(block->memory);
    entry.len = static_cast<unsigned>(nbytes);
    entry.off = static_cast<uint64_t>(block->offset);
    entry.user_data = reinterpret_cast<uint64_t>(block);
    publish();
  }

  // Completes, with user_data 0, when `event` can be read.
  void push_poll(int event) {
    io_uring_sqe &entry = fresh();
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = event;
    entry.poll_events = POLLIN;
    publish();
  }

  // Hands what was pushed to the kernel and waits until one request has ended. 0, or an errno that is not transient.
  int submit_and_wait(bool wait) {
    for (;;) {
      int taken = enter(fd_, pushed_, wait ? 1 : 0);
      if (taken >= 0) {
        pushed_ -= static_cast<unsigned>(taken);
        if (!pushed_) return 0;
        continue;
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EBUSY) return errno;
      if (ready()) return 0;  // reaping makes room
      sched_yield();
    }
  }

  bool ready() const { return __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE) != *cq_head_; }

  // The next request that has ended.
  void pop(Block **block, int *result) {
    const io_uring_cqe &done = completions_[*cq_head_ & cq_mask_];
    *block = reinterpret_cast<Block *>(done.user_data);
    *result = done.res;
    __atomic_store_n(cq_head_, *cq_head_ + 1, __ATOMIC_RELEASE);
  }

 private:
  void *map(size_t nbytes, uint64_t what) {
    void *found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(what));
    return found == MAP_FAILED ? nullptr : found;
  }

  bool knows_read_and_write() const {
#ifdef IO_URING_OP_SUPPORTED
    constexpr unsigned kOps = 64;
    std::vector<uint64_t> room((sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op)) / 8 + 1);
    auto *probe = reinterpret_cast<io_uring_probe *>(room.data());
    if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, kOps) < 0) return false;
    for (unsigned op : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD})
      if (op > probe->last_op || !(probe->ops[op].flags & IO_URING_OP_SUPPORTED)) return false;
    return true;
#else
    return false;
#endif
  }

  io_uring_sqe &fresh() {
    unsigned slot = *sq_tail_ & sq_mask_;
    sq_array_[slot] = slot;
    std::memset(&entries_[slot], 0, sizeof(io_uring_sqe));
    return entries_[slot];
  }

  void publish() {
    __atomic_store_n(sq_tail_, *sq_tail_ + 1, __ATOMIC_RELEASE);
    ++pushed_;
  }

  int fd_ = -1;
  void *ring_ = nullptr;
  size_t ring_nbytes_ = 0, entries_nbytes_ = 0;
  io_uring_sqe *entries_ = nullptr;
  io_uring_cqe *completions_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, capacity_ = 0, pushed_ = 0;
};

#endif  // DS_HAS_URING

}  // namespace

struct ds_aio {
  int64_t block_nbytes;
  unsigned depth;
  int threads;
  int flags;
  Fault fault;

  threads::Mutex mutex;
  threads::Condition work;   // for the pool
  threads::Condition ended;  // for who waits
  std::deque<Block *> for_ring, for_pool;
  std::unordered_map<int64_t, std::unique_ptr<Transfer>> transfers;
  int64_t next_ticket = 1;
  int64_t pending = 0;
  int idle = 0;
  bool closing = false;
  std::vector<threads::Thread> pool;

#ifdef DS_HAS_URING
  std::unique_ptr<Ring> ring;
  int event = -1;
  bool driver_waits = false;  // in the kernel, or about to be
  threads::Thread driver;
#endif

  bool has_ring() const {
#ifdef DS_HAS_URING
    return ring != nullptr;
#else
    return false;
#endif
  }

  int start_ring() {
#ifdef DS_HAS_URING
    auto made = std::make_unique<Ring>();
    // One entry more, for the poll that wakes the driver.
    int problem = made->open(depth + 1);
    if (problem) return problem;
    event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) return errno;
    depth = std::min(depth, made->capacity() - 1);
    ring = std::move(made);
    if (driver.start([this] { drive(); })) return 0;
    ring.reset();
    return EAGAIN;
#else
    return ENOSYS;
#endif
  }

  // ---- blocks ----

  // Both callers hold the mutex.
  void enqueue(Block *block) {
    if (has_ring() && block->direct >= 0 && block->aligned_memory()) {
      for_ring.push_back(block);
      return;
    }
    if (idle <= static_cast<int>(for_pool.size()) && static_cast<int>(pool.size()) < threads) {
      threads::Thread fresh;
      if (fresh.start([this] { serve(); })) pool.push_back(fresh);
      else if (pool.empty()) return finish_locked(block, EAGAIN);  // fewer than allowed do, none does not
    }
    for_pool.push_back(block);
    work.notify_one();
  }

  // Nothing behind a failure is moved. What lies before it is: the first byte that is missing is to be found.
  static bool is_doomed(const Block *block) {
    return block->transfer->code && block->offset > block->transfer->bad_offset;
  }

  void finish_locked(Block *block, int64_t code) {
    Transfer *transfer = block->transfer;
    if (code && (!transfer->code || block->offset < transfer->bad_offset)) {
      transfer->code = code;
      transfer->bad_offset = block->offset;
    }
    delete block;
    if (--transfer->blocks_left) return;
    --pending;
    std::vector<Block *> freed = std::move(transfer->held_up);
    transfer->held_up.clear();
    bool was_empty = for_ring.empty();
    for (Block *next : freed) enqueue(next);
    if (was_empty && !for_ring.empty()) wake_driver_locked();
    ended.notify_all();
  }

  // What is left of a block after `moved` bytes, or after the file system refused direct access, takes the page cache
  // unless it is whole pages again.
  static void advance(Block *block, int64_t moved) {
    block->memory += moved;
    block->offset += moved;
    block->nbytes -= moved;
    if (block->offset % kPage || block->nbytes % kPage) block->direct = -1;
  }

  // ---- the pool ----

  // The size of the next system call, after a fault that shortens it.
  int64_t piece(const Block *block, int fault_code) const {
    if (fault_code != -1 || block->nbytes < 2) return block->nbytes;
    int64_t half = block->nbytes / 2;
    return half >= kPage ? half / kPage * kPage : half;
  }

  void serve() {
    char *bounce = nullptr;
    threads::Lock hold(mutex);
    for (;;) {
      ++idle;
      work.wait(hold, [this] { return closing || !for_pool.empty(); });
      --idle;
      if (for_pool.empty()) break;
      Block *block = for_pool.front();
      for_pool.pop_front();
      bool doomed = is_doomed(block);
      hold.unlock();
      int64_t code = doomed ? 0 : move(block, &bounce);
      hold.lock();
      finish_locked(block, code);
    }
    hold.unlock();
    std::free(bounce);
  }

  // Room for one block; disks take huge pages in fewer pieces.
  char *new_bounce() const {
    constexpr int64_t kHuge = 2 << 20;
    bool huge = block_nbytes >= kHuge / 2;
    int64_t nbytes = huge ? (block_nbytes + kHuge - 1) / kHuge * kHuge : block_nbytes;
    void *room = nullptr;
    if (posix_memalign(&room, huge ? kHuge : kPage, nbytes)) return nullptr;
#ifdef MADV_HUGEPAGE
    if (huge) madvise(room, nbytes, MADV_HUGEPAGE);
#endif
    return static_cast<char *>(room);
  }

  // All of one block, by blocking calls. 0, an errno or DS_AIO_SHORT; block->offset is then where it stopped.
  int64_t move(Block *block, char **bounce) {
    while (block->nbytes > 0) {
      int injected = fault.next();
      if (injected > 0) return injected;
      bool direct = block->direct >= 0;
      bool bounced = direct && !block->aligned_memory();
      if (bounced && !*bounce && !(*bounce = new_bounce())) return ENOMEM;
      int fd = direct ? block->direct : block->plain;
      int64_t size = piece(block, injected);
      char *memory = bounced ? *bounce : block->memory;
      if (bounced && block->write) std::memcpy(memory, block->memory, size);
      int64_t moved = block->write ? pwrite(fd, memory, size, block->offset) : pread(fd, memory, size, block->offset);
      if (moved < 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (!(errno == EINVAL && direct)) return errno;
        block->direct = -1;
        continue;
      }
      if (moved == 0) return block->write ? EIO : DS_AIO_SHORT;
      if (bounced && !block->write) std::memcpy(block->memory, memory, moved);
      advance(block, moved);
    }
    return 0;
  }

  // ---- the ring ----

#ifdef DS_HAS_URING
  void drive() {
    unsigned in_flight = 0;
    bool polled = false;
    for (;;) {
      bool more_room;
      {
        threads::Lock hold(mutex);
        driver_waits = false;
        if (closing && for_ring.empty() && in_flight == 0) return;
        bool may_add = !(flags & DS_AIO_NO_OVERLAP) || in_flight == 0;
        while (may_add && in_flight < depth && !for_ring.empty()) {
          Block *block = for_ring.front();
          for_ring.pop_front();
          if (is_doomed(block)) {
            finish_locked(block, 0);
            continue;
          }
          int injected = fault.next();
          if (injected > 0) {
            finish_locked(block, injected);
            continue;
          }
          ring->push_block(block, piece(block, injected));
          ++in_flight;
          if (flags & DS_AIO_SINGLE_SUBMIT) break;
        }
        more_room = in_flight < depth && may_add;
        driver_waits = more_room;
        if ((flags & DS_AIO_SINGLE_SUBMIT) && more_room && !for_ring.empty()) {
          driver_waits = false;
          more_room = false;  // submit this one, come back at once for the next
          hold.unlock();
          int problem = ring->submit_and_wait(false);
          if (problem) std::abort();
          reap(&in_flight, &polled);
          continue;
        }
      }
      if (more_room && !polled) {
        ring->push_poll(event);
        polled = true;
      }
      if (ring->submit_and_wait(true)) std::abort();  // a broken ring: the kernel still owns the caller's memory
      reap(&in_flight, &polled);
    }
  }

  void reap(unsigned *in_flight, bool *polled) {
    while (ring->ready()) {
      Block *block;
      int result;
      ring->pop(&block, &result);
      if (!block) {
        *polled = false;
        uint64_t count;
        if (read(event, &count, sizeof count) < 0 && errno != EAGAIN) std::abort();
        continue;
      }
      --*in_flight;
      settle(block, result);
    }
  }

  void settle(Block *block, int result) {
    threads::Lock hold(mutex);
    if (result == block->nbytes) return finish_locked(block, 0);
    if (result == -EINTR || result == -EAGAIN) return enqueue(block);
    if (result == -EINVAL || result == -EOPNOTSUPP) {
      block->direct = -1;
      return enqueue(block);
    }
    if (result < 0) return finish_locked(block, -result);
    if (result == 0) return finish_locked(block, block->write ? EIO : static_cast<int64_t>(DS_AIO_SHORT));
    advance(block, result);
    enqueue(block);
  }
#endif

  // Where the driver is in the kernel with room in the ring, it is told of new blocks. (An event never blocks.)
  void wake_driver_locked() {
#ifdef DS_HAS_URING
    if (!driver_waits) return;
    driver_waits = false;
    wake_driver();
#endif
  }

  void wake_driver() {
#ifdef DS_HAS_URING
    uint64_t one = 1;
    if (event >= 0 && write(event, &one, sizeof one) < 0 && errno != EAGAIN) std::abort();
#endif
  }

  // ---- transfers ----

  int64_t submit(bool write, int direct, int plain, char *memory, int64_t nbytes, int64_t offset, int64_t after) {
    threads::Lock hold(mutex);
    int64_t ticket = next_ticket++;
    auto &transfer = transfers[ticket] = std::make_unique<Transfer>();
    transfer->offset = offset;
    transfer->nbytes = nbytes;
    if (nbytes <= 0) return ticket;
    ++pending;
    int64_t end = offset + nbytes;
    int64_t first = direct < 0 ? end : std::min(end, (offset + kPage - 1) / kPage * kPage);
    int64_t last = std::max(first, end / kPage * kPage);
    std::vector<Block *> cut;
    auto add = [&](int64_t from, int64_t to, int fd) {
      for (; from < to; from += block_nbytes)
        cut.push_back(new Block{transfer.get(), memory + (from - offset), from, std::min(block_nbytes, to - from), fd,
                                plain, write});
    };
    add(offset, first, -1);
    add(first, last, direct);
    add(last, end, -1);
    transfer->blocks_left = static_cast<int64_t>(cut.size());
    auto first_one = transfers.find(after);
    if (first_one != transfers.end() && first_one->second->blocks_left) {
      auto &held_up = first_one->second->held_up;
      held_up.insert(held_up.end(), cut.begin(), cut.end());
      return ticket;
    }
    for (Block *block : cut) enqueue(block);
    if (!for_ring.empty()) wake_driver_locked();
    return ticket;
  }

  int wait(int64_t ticket, int timeout_ms, ds_aio_result *result) {
    threads::Lock hold(mutex);
    auto found = transfers.find(ticket);
    if (found == transfers.end()) return -1;
    Transfer *transfer = found->second.get();
    const int64_t until = threads::now_ns() + int64_t(timeout_ms) * 1000000;
    while (transfer->blocks_left)
      if (!ended.wait_until(hold, until) && transfer->blocks_left) return 0;
    result->code = transfer->code;
    result->offset = transfer->code ? transfer->bad_offset : transfer->offset + transfer->nbytes;
    result->expected = transfer->nbytes;
    result->found = result->offset - transfer->offset;
    transfers.erase(ticket);
    return 1;
  }

  ~ds_aio() {
    {
      threads::Lock hold(mutex);
      ended.wait(hold, [this] { return pending == 0; });
      closing = true;
    }
    work.notify_all();
    for (auto &thread : pool) thread.join();
#ifdef DS_HAS_URING
    if (driver.running()) {
      wake_driver();
      driver.join();
    }
    ring.reset();
    if (event >= 0) ::close(event);
#endif
  }
};

ds_aio *ds_aio_open(int64_t block_nbytes, int32_t depth, int32_t threads, int32_t engine, int32_t flags,
                    int32_t *reason) {
  auto handle = std::make_unique<ds_aio>();
  constexpr int64_t kLargest = int64_t{1} << 30;  // a system call moves less than 2 GiB
  handle->block_nbytes = std::min(kLargest, std::max(kPage, (block_nbytes + kPage - 1) / kPage * kPage));
  handle->depth = static_cast<unsigned>(std::min(std::max(depth, 1), 4095));
  handle->threads = std::max(threads, 1);
  handle->flags = flags;
  *reason = engine == DS_AIO_THREADS ? 0 : handle->start_ring();
  if (engine == DS_AIO_URING && !handle->has_ring()) return nullptr;
  return handle.release();
}

int32_t ds_aio_engine(const ds_aio *handle) { return handle->has_ring() ? DS_AIO_URING : DS_AIO_THREADS; }

int64_t ds_aio_submit(ds_aio *handle, int32_t write, int32_t direct, int32_t plain, void *memory, int64_t nbytes,
                      int64_t offset, int64_t after) {
  return handle->submit(write != 0, direct, plain, static_cast<char *>(memory), nbytes, offset, after);
}

int32_t ds_aio_wait(ds_aio *handle, int64_t ticket, int32_t timeout_ms, ds_aio_result *result) {
  return handle->wait(ticket, timeout_ms, result);
}

int64_t ds_aio_pending(ds_aio *handle) {
  threads::Lock hold(handle->mutex);
  return handle->pending;
}

void ds_aio_close(ds_aio *handle) { delete handle; }

void ds_aio_fault(ds_aio *handle, int64_t after, int32_t code) {
  handle->fault.code.store(code);
  handle->fault.after.store(after);
}

void ds_aio_copy(void *target, const void *source, int64_t nbytes, int32_t threads) {
  constexpr int64_t kWorthAThread = 1 << 20;
  int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, nbytes / kWorthAThread));
  int64_t part = (nbytes + parts - 1) / parts;
  std::vector<threads::Thread> helpers;
  auto copy = [=](int64_t from) {
    std::memcpy(static_cast<char *>(target) + from, static_cast<const char *>(source) + from,
                static_cast<size_t>(std::min(part, nbytes - from)));
  };
  for (int64_t from = part; from < nbytes; from += part) {
    threads::Thread helper;
    if (helper.start([=] { copy(from); })) helpers.push_back(helper);
    else copy(from);
  }
  if (nbytes > 0) copy(0);
  for (auto &helper : helpers) helper.join();
}
