// The same-host transport: collectives of CPU tensors through shared memory. Plain C interface; see comm/shm_channel.py.
//
// Every call takes a group made by ds_shm_open. Starting calls return the number of the operation (1, 2, ...), or the
// negative status of a group that is broken; memory they name stays untouched by the caller until the wait.
#include "transport_ops.h"

#define DS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ds {
namespace {

// Moves operations nobody waits for, so that ranks that do wait for them are not held up. It looks every millisecond
// while there are any; a sleep costs less than a wake-up for each chunk of each rank.
class Helper {
  public:
    void add(Group* group) {
        threads::Lock lock(mutex_);
        if (std::find(groups_.begin(), groups_.end(), group) == groups_.end()) groups_.push_back(group);
        if (!running_) {
            threads::Thread thread;  // where there can be none, those who wait move everything on
            running_ = thread.start([this] { run(); });
            thread.let_go();
        } else if (idle_) {
            bell_.notify_one();
        }
    }
    // After this the helper does not touch the group.
    void remove(Group* group) {
        threads::Lock lock(mutex_);
        groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
    }

  private:
    void run() {
        constexpr int LINGER = 200;  // looks without work before it sleeps until it is called
        threads::Lock lock(mutex_);
        for (int quiet = 0;;) {
            quiet = groups_.empty() ? quiet + 1 : 0;
            if (quiet > LINGER) {
                idle_ = true;
                bell_.wait(lock, [this] { return !groups_.empty(); });
                idle_ = false;
                quiet = 0;
            }
            bell_.wait_until(lock, threads::now_ns() + 1000000);
            for (size_t i = groups_.size(); i-- > 0;) {
                Group* group = groups_[i];
                threads::Lock inner(group->mutex, group->mutex.try_lock());
                if (!inner.held() || group->waiters) continue;
                group->eager = true;
                group->progress();
                group->eager = false;
                if (group->ops.empty()) groups_.erase(groups_.begin() + long(i));
            }
        }
    }

    threads::Mutex mutex_;
    threads::Condition bell_;
    std::vector<Group*> groups_;
    bool running_ = false, idle_ = false;
};

Helper& helper() {
    static Helper* one = new Helper;  // never destroyed: its thread may outlive the program's destructors
    return *one;
}

int64_t start(Group* group, Op* made) {
    std::unique_ptr<Op> op(made);
    threads::Lock lock(group->mutex);
    if (group->status != DONE) return -group->status;
    op->id = ++group->started;
    group->ops.push_back(std::move(op));
    // The first chunks, so that others can begin; the wait does the rest, in step with them.
    group->post_ahead(2);
    return group->started;
}

}  // namespace
}  // namespace ds

using namespace ds;

// A group of `size` ranks with this rank's block; null with errno when there is no memory or descriptor for it.
DS_EXPORT void* ds_shm_open(int rank, int size, uint64_t nonce, int64_t spin_us) {
    int fd = -1;
    Block* own = make_block(nonce, &fd);
    if (!own) return nullptr;
    Group* group = new Group;
    group->rank = rank;
    group->size = size;
    group->fd = fd;
    group->spin_us = spin_us;
    group->own = own;
    for (int lane = 0; lane < LANES; ++lane) group->lanes[lane].init(own, lane);
    return group;
}

DS_EXPORT int ds_shm_fd(void* handle) { return static_cast<Group*>(handle)->fd; }

// Map the block of another rank; 0, or the errno.
DS_EXPORT int ds_shm_attach(void* handle, int rank, int pid, uint64_t start, int fd, uint64_t nonce) {
    Group* group = static_cast<Group*>(handle);
    group->peer[rank] = open_block(pid, fd, nonce);
    group->pid[rank] = pid;
    group->start[rank] = start;
    return group->peer[rank] ? 0 : errno;
}

// All ranks have attached: the descriptor is not needed any more.
DS_EXPORT void ds_shm_close_fd(void* handle) {
    Group* group = static_cast<Group*>(handle);
    if (group->fd >= 0) close(group->fd);
    group->fd = -1;
}

// Leave the group: others that still need something of this rank are told, operations under way are dropped.
DS_EXPORT void ds_shm_leave(void* handle) {
    Group* group = static_cast<Group*>(handle);
    helper().remove(group);
    {
        threads::Lock lock(group->mutex);
        uint32_t open = OPEN;
        group->own->state.compare_exchange_strong(open, LEFT);
        group->ops.clear();
        for (int p = 0; p < group->size; ++p) {
            if (p == group->rank || !group->peer[p]) continue;
            ring_bell(group->peer[p]);
            munmap(group->peer[p], BLOCK_BYTES);
        }
        munmap(group->own, BLOCK_BYTES);
    }
    ds_shm_close_fd(handle);
    delete group;
}

// Give up: this rank's operations are dropped and the others' waits end.
DS_EXPORT void ds_shm_abandon(void* handle) {
    Group* group = static_cast<Group*>(handle);
    threads::Lock lock(group->mutex);
    group->fail(ABANDONED, group->rank);
    group->drop_if_broken();
}

// Wait for an operation; `limit_us` 0 only looks.
DS_EXPORT int ds_shm_wait(void* handle, int64_t id, int64_t limit_us) {
    Group* group = static_cast<Group*>(handle);
    if (group->finished_shown.load() >= uint64_t(id)) return DONE;
    return wait_for(*group, uint64_t(id), limit_us);
}

// Operations finished so far; with `move`, after moving on what can be moved.
DS_EXPORT int64_t ds_shm_finished(void* handle, int move) {
    Group* group = static_cast<Group*>(handle);
    if (move) {
        threads::Lock lock(group->mutex);
        group->progress();
    }
    return int64_t(group->finished_shown.load());
}

// Let what has been started go on while the program does something else.
DS_EXPORT void ds_shm_background(void* handle) {
    Group* group = static_cast<Group*>(handle);
    {
        threads::Lock lock(group->mutex);
        group->post_ahead(INT_MAX);
        if (group->ops.empty()) return;
    }
    helper().add(group);
}

// The ranks to blame, a bit each: of a broken group, or those whose chunks are missing.
DS_EXPORT uint64_t ds_shm_culprits(void* handle) {
    Group* group = static_cast<Group*>(handle);
    threads::Lock lock(group->mutex);
    return group->status == DONE ? group->lacking : uint64_t(1) << group->culprit;
}

DS_EXPORT int64_t ds_shm_barrier(void* handle) {
    Group* group = static_cast<Group*>(handle);
    return start(group, new Barrier(*group));
}

DS_EXPORT int64_t ds_shm_broadcast(void* handle, void* data, int64_t nbytes, int root) {
    Group* group = static_cast<Group*>(handle);
    return start(group, new Spread(*group, data, data, size_t(nbytes), 0, root));
}

// Rank r's `nbytes` at `in` land at `out + r * stride` on all ranks.
DS_EXPORT int64_t ds_shm_all_gather(void* handle, const void* in, void* out, int64_t nbytes, int64_t stride) {
    Group* group = static_cast<Group*>(handle);
    return start(group, new Spread(*group, in, out, size_t(nbytes), size_t(stride), -1));
}

// `sizes`: bytes of the pieces sent to each rank, then of those received from each; pieces lie end to end.
DS_EXPORT int64_t ds_shm_all_to_all(void* handle, const void* in, void* out, const int64_t* sizes) {
    Group* group = static_cast<Group*>(handle);
    return start(group, new AllToAll(*group, in, out, sizes, sizes + group->size));
}

// `code`: dtype of the contributions + 16 * dtype of the result + 256 * fold + 4096 * accumulate; factor 1 is none.
static Rule rule_of(int code, double factor) {
    Rule rule;
    rule.in = code & 15;
    rule.out = code >> 4 & 15;
    rule.fold = code >> 8 & 15;
    rule.accumulate = code >> 12 & 1;
    rule.scaled = factor != 1.0;
    rule.factor = factor;
    return rule;
}

DS_EXPORT int ds_shm_knows(int code) { return Kernel(rule_of(code, 1.0)).exists(); }

// `in` holds size * shard elements; `out` receives the shard of this rank.
DS_EXPORT int64_t ds_shm_reduce_scatter(void* handle, const void* in, void* out, int64_t shard, int code, double factor) {
    Group* group = static_cast<Group*>(handle);
    return start(group, new ReduceScatter(*group, in, out, size_t(shard), rule_of(code, factor)));
}

DS_EXPORT int64_t ds_shm_all_reduce(void* handle, void* data, int64_t numel, int code, double factor) {
    Group* group = static_cast<Group*>(handle);
    Rule rule = rule_of(code, factor);
    size_t nbytes = size_t(numel) * size_of(rule.in);
    Op* op = nullptr;
    if (nbytes * size_t(group->size - 1) <= SMALL_BYTES) op = new AllReduceSmall(data, data, size_t(numel), rule);
    else op = new AllReduce(*group, data, data, size_t(numel), rule);
    return start(group, op);
}

// Bytes of memory every rank lends to a group, at most.
DS_EXPORT int64_t ds_shm_block_bytes() { return int64_t(BLOCK_BYTES); }
