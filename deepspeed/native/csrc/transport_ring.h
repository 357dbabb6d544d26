// What the ranks of a group share: one block of memory per rank, written by its owner and read by the others.
//
// A block is an anonymous file (memfd): it has no name, needs no room in /dev/shm, and the kernel frees it with the last
// process that has it open, however that ends. Others open it through /proc/<pid>/fd/<n> and check its nonce.
//
// A block holds two lanes, each a byte ring of chunks and the descriptions of the last of them. Chunks are counted; the
// owner counts what it has posted, each reader, in its own block, what it has read of every owner. A chunk is described
// before the count that makes it visible, so a reader that sees the count sees the chunk. Counts and the words of the
// bell are sequentially consistent: whoever changes a count and then sees no sleeper may rely on the next sleeper to see
// the count.
#pragma once

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ds {

constexpr int MAX_RANKS = 64;
constexpr int LANES = 2;
constexpr uint64_t DESCS = 256;  // chunks of a lane that can be under way
constexpr uint64_t MAGIC = 0x6473'7472'616e'0001;
constexpr size_t LANE_BYTES[LANES] = {16u << 20, 8u << 20};
// A lane goes back to its first byte as soon as it can when it has gone further than this: the same lines stay in cache.
constexpr size_t WARM_BYTES = 1u << 20;

enum State : uint32_t { OPEN = 0, LEFT, FAILED };

struct Desc {
    uint64_t offset;  // of the chunk in its lane
    uint64_t total;   // what all ranks must agree on: bytes of the whole operation
    uint32_t op;      // number of the operation in its group
    uint32_t kind;
    uint32_t stride;  // all-to-all: bytes between the pieces of the chunk
    uint32_t last;    // the operation's last chunk of this owner
};

struct alignas(64) Count {
    std::atomic<uint64_t> value;
};

struct Block {
    uint64_t magic, nonce;
    alignas(64) std::atomic<uint32_t> bell;
    alignas(64) std::atomic<int32_t> sleepers;
    std::atomic<int32_t> waits_for;  // rank whose chunk the sleeper needs; -1: anybody's
    std::atomic<uint32_t> state;
    Count posted[LANES];
    Count read[MAX_RANKS][LANES];
    Desc descs[LANES][DESCS];
};

constexpr size_t HEAD_BYTES = (sizeof(Block) + 4095) / 4096 * 4096;
constexpr size_t BLOCK_BYTES = HEAD_BYTES + LANE_BYTES[0] + LANE_BYTES[1];

inline char* lane_of(Block* block, int lane) {
    return reinterpret_cast<char*>(block) + HEAD_BYTES + (lane ? LANE_BYTES[0] : 0);
}

inline long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* limit) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, limit, nullptr, 0);
}

inline void ring_bell(Block* block) {
    block->bell.fetch_add(1, std::memory_order_release);
    futex(&block->bell, FUTEX_WAKE, INT_MAX, nullptr);
}

inline int64_t now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000 + t.tv_nsec / 1000;
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Maps a block, which its file must hold whole. Not handed on by fork: a child has no part in the group.
inline Block* map_block(int fd) {
    void* at = mmap(nullptr, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, BLOCK_BYTES, MADV_DONTFORK);
    return static_cast<Block*>(at);
}

// A new block; `fd` is set. Null with errno when there is no memory or descriptor for it.
inline Block* make_block(uint64_t nonce, int* fd) {
    *fd = int(syscall(SYS_memfd_create, "deepspeed-transport", 1u /* MFD_CLOEXEC */));
    if (*fd < 0) return nullptr;
    Block* block = ftruncate(*fd, off_t(BLOCK_BYTES)) == 0 ? map_block(*fd) : nullptr;
    if (!block) {
        int problem = errno;
        close(*fd);
        *fd = -1;
        errno = problem;
        return nullptr;
    }
    block->waits_for.store(-1);
    block->nonce = nonce;
    block->magic = MAGIC;
    return block;
}

// The block of another process, or null with errno; ESTALE when the descriptor is no longer the one that was told.
inline Block* open_block(int pid, int fd_there, uint64_t nonce) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd_there);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat facts;
    Block* block = nullptr;
    errno = ESTALE;
    if (fstat(fd, &facts) == 0 && size_t(facts.st_size) == BLOCK_BYTES) block = map_block(fd);
    int problem = errno;
    close(fd);
    if (block && (block->magic != MAGIC || block->nonce != nonce)) {
        munmap(block, BLOCK_BYTES);
        block = nullptr;
        problem = ESTALE;
    }
    errno = problem;
    return block;
}

// Whether the process has ended, also where its parent has not yet asked for its exit code. `start`: its start time in
// clock ticks as /proc tells it, so that a later process of the same number is not taken for it; 0: not known.
inline bool process_ended(int pid, uint64_t start) {
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return n == 0 || errno == ESRCH;
    text[n] = 0;
    const char* after_name = std::strrchr(text, ')');
    char state = 0;
    unsigned long long began = 0;
    if (!after_name || std::sscanf(after_name + 2,
                                   "%c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                                   &state, &began) != 2)
        return false;
    return state == 'Z' || state == 'X' || (start != 0 && began != start);
}

// The owner's side of a lane: where the next chunk goes.
class Ring {
  public:
    void init(Block* own, int lane) {
        block_ = own;
        lane_ = lane;
        data_ = lane_of(own, lane);
        size_ = LANE_BYTES[lane];
    }

    uint64_t posted() const { return posted_; }
    uint64_t freed() const { return freed_; }
    bool asks_for_readers() const { return head_ > WARM_BYTES || posted_ - freed_ >= DESCS - 8; }

    // All readers have read this many chunks.
    void set_freed(uint64_t chunks) {
        freed_ = chunks;
        if (freed_ == posted_) head_ = 0;
    }

    // Room for `nbytes`, or null until readers have read more.
    char* take(size_t nbytes) {
        if (posted_ - freed_ >= DESCS) return nullptr;
        size_t need = (nbytes + 63) & ~size_t(63);
        if (posted_ == freed_) {
            if (head_ + need > size_) head_ = 0;
            at_ = head_;
        } else {
            size_t tail = block_->descs[lane_][freed_ % DESCS].offset;
            if (head_ >= tail) {  // equal: nothing but empty chunks is under way
                bool back = need < tail;
                if (head_ + need <= (back ? WARM_BYTES : size_)) at_ = head_;
                else if (back) at_ = 0;
                else return nullptr;
            } else if (head_ + need < tail) {
                at_ = head_;
            } else {
                return nullptr;
            }
        }
        next_head_ = at_ + need;
        return data_ + at_;
    }

    // Make the chunk last taken visible.
    void post(Desc desc) {
        desc.offset = at_;
        block_->descs[lane_][posted_ % DESCS] = desc;
        head_ = next_head_;
        block_->posted[lane_].value.store(++posted_);
    }

  private:
    Block* block_ = nullptr;
    int lane_ = 0;
    char* data_ = nullptr;
    size_t size_ = 0, head_ = 0, at_ = 0, next_head_ = 0;
    uint64_t posted_ = 0, freed_ = 0;
};

}  // namespace ds
