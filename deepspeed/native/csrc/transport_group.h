// One rank's view of a group: its block, the others' blocks, the operations under way, and how they move on.
//
// Every rank starts the same operations in the same order. Chunks of an operation are posted in order of the operations,
// possibly far ahead; they are received for the oldest unfinished operation alone. Whoever calls `progress` moves all of
// them: a waiting caller, or the helper thread for operations nobody waits for.
#pragma once

#include <deque>
#include <memory>

#include "sync.h"
#include "transport_ring.h"

namespace ds {

enum Status : int {
    DONE = 0,
    TIMED_OUT,
    INTERRUPTED,
    // The rest are for good: the group cannot be used any more.
    PEER_ENDED,   // its process is gone
    PEER_LEFT,    // it has closed the group
    PEER_FAILED,  // it has given up
    MISMATCH,     // it has started another operation
    ABANDONED,    // this rank has given up
};

struct Group;

// One collective of one rank.
struct Op {
    uint32_t id = 0;
    uint32_t kind = 0;
    bool posts_done = false;

    virtual ~Op() = default;
    // Post the next chunk; false when there is no room. Sets `posts_done`.
    virtual bool post(Group& group) = 0;
    // Take what has come; false when nothing could be done.
    virtual bool receive(Group& group) = 0;
    virtual bool done() const = 0;
};

// Chunks a rank posts ahead of its readers while they keep up: little enough to stay in cache.
constexpr uint64_t IN_STEP = 4;

struct Group {
    int rank = 0, size = 0, fd = -1;
    int64_t spin_us = 0;
    Block* own = nullptr;
    Block* peer[MAX_RANKS] = {};
    int pid[MAX_RANKS] = {};
    uint64_t start[MAX_RANKS] = {};
    Ring lanes[LANES];
    uint64_t taken[LANES][MAX_RANKS] = {};

    threads::Mutex mutex;  // guards all below
    std::deque<std::unique_ptr<Op>> ops;
    size_t posting = 0;  // index in `ops` of the first with something to post
    uint32_t started = 0;
    uint64_t finished = 0;  // operations; read without the mutex through `finished_shown`
    int waiters = 0;
    bool eager = false;  // post as far ahead as there is room, not only as far as others keep up
    int status = DONE, culprit = -1;
    uint64_t lacking = 0;  // a bit for each rank whose chunk or reading the last `progress` lacked

    std::atomic<uint64_t> finished_shown{0};

    bool other(int p) const { return p != rank; }

    void fail(int why, int who) {
        if (status != DONE) return;
        status = why;
        culprit = who;
        own->state.store(FAILED);
        for (int p = 0; p < size; ++p)
            if (other(p) && peer[p]) ring_bell(peer[p]);
    }

    // The next chunk of rank p for `op`, or null (then `lacking` or `status` says why).
    const Desc* next(int p, int lane, const Op& op, uint64_t total) {
        Block* block = peer[p];
        if (block->posted[lane].value.load() == taken[lane][p]) {
            if (gone(p) && block->posted[lane].value.load() == taken[lane][p]) fail_by(p);
            lacks(p);
            return nullptr;
        }
        const Desc* desc = &block->descs[lane][taken[lane][p] % DESCS];
        if (desc->op != op.id || desc->kind != op.kind || desc->total != total) {
            fail(MISMATCH, p);
            return nullptr;
        }
        return desc;
    }

    const char* data(int p, int lane, const Desc* desc) const { return lane_of(peer[p], lane) + desc->offset; }

    // The chunk of rank p is no longer needed.
    void took(int p, int lane) {
        own->read[p][lane].value.store(++taken[lane][p]);
        wake(p);
    }

    // Room for a chunk, or null (then `lacking` or `status` says why).
    char* take(int lane, size_t nbytes) {
        Ring& ring = lanes[lane];
        if (ring.asks_for_readers()) count_readers(lane);
        char* at = ring.take(nbytes);
        if (at) return at;
        int slowest = count_readers(lane);
        at = ring.take(nbytes);
        if (!at) {
            if (gone(slowest)) fail_by(slowest);
            lacks(slowest);
        }
        return at;
    }

    void post(int lane, const Op& op, uint64_t total, uint32_t stride = 0, bool last = false) {
        lanes[lane].post(Desc{0, total, op.id, op.kind, stride, last});
        for (int p = 0; p < size; ++p)
            if (other(p)) wake(p);
    }

    // Of a broken group: from here on no memory of the caller is touched.
    void drop_if_broken() {
        if (status == DONE) return;
        ops.clear();
        posting = 0;
    }

    // Move on whatever can move.
    void progress() {
        move();
        drop_if_broken();
    }

    // Post chunks in the order of the operations, `most` at most.
    void post_ahead(int most) {
        while (most-- > 0 && status == DONE && post_next()) {
        }
        drop_if_broken();
    }

  private:
    void lacks(int p) { lacking |= uint64_t(1) << p; }

    void move() {
        bool moved = true;
        while (moved && status == DONE && !ops.empty()) {
            lacking = 0;
            moved = ops.front()->receive(*this);
            if (status != DONE) return;
            if (ops.front()->done() && ops.front()->posts_done) {
                ops.pop_front();
                if (posting) --posting;
                finished_shown.store(++finished);
                moved = true;
                continue;
            }
            if (eager || lanes[0].posted() - posted_before() < IN_STEP) moved = post_next() || moved;
        }
    }

    // Chunks the slowest reader is known to have read.
    uint64_t posted_before() {
        if (lanes[0].posted() - lanes[0].freed() >= IN_STEP) count_readers(0);
        return lanes[0].freed();
    }

    bool post_next() {
        while (posting < ops.size() && ops[posting]->posts_done) ++posting;
        return posting < ops.size() && ops[posting]->post(*this);
    }

    bool gone(int p) const { return peer[p]->state.load() != OPEN; }
    void fail_by(int p) { fail(peer[p]->state.load() == LEFT ? PEER_LEFT : PEER_FAILED, p); }

    int count_readers(int lane) {
        uint64_t least = UINT64_MAX;
        int slowest = -1;
        for (int p = 0; p < size; ++p) {
            if (!other(p)) continue;
            uint64_t count = peer[p]->read[rank][lane].value.load();
            if (count < least) least = count, slowest = p;
        }
        lanes[lane].set_freed(least);
        return slowest;
    }

    void wake(int p) {
        Block* block = peer[p];
        if (block->sleepers.load() <= 0) return;
        int wanted = block->waits_for.load();
        if (wanted == -1 || wanted == rank) ring_bell(block);
    }
};

// Wait until operation `id` has finished; microseconds.
inline int wait_for(Group& group, uint64_t id, int64_t limit_us) {
    constexpr int64_t LOOK_US = 100000;  // how often a sleeper looks whether the rank it waits for is alive
    int64_t end = 0, spin_end = 0, look_at = 0;
    threads::Lock lock(group.mutex);
    ++group.waiters;
    int result = DONE;
    for (;;) {
        uint64_t before = group.finished;
        uint64_t lacked = group.lacking;
        group.progress();
        if (group.finished >= id) break;
        if (group.status != DONE) {
            result = group.status;
            break;
        }
        int64_t now = now_us();
        if (end == 0) end = now + limit_us, look_at = now + LOOK_US;
        if (before != group.finished || lacked != group.lacking || spin_end == 0) spin_end = now + group.spin_us;
        if (now < spin_end) {
            for (int i = 0; i < 16; ++i) relax();
            continue;
        }
        if (now >= end) {
            result = TIMED_OUT;
            break;
        }
        if (now >= look_at) {
            look_at = now + LOOK_US;
            for (int p = 0; p < group.size; ++p) {
                if (!(group.lacking >> p & 1) || !process_ended(group.pid[p], group.start[p])) continue;
                group.progress();  // what it had posted before it ended counts
                if (group.finished < id && group.lacking >> p & 1) group.fail(PEER_ENDED, p);
                look_at = now;
                break;
            }
            if (look_at == now) continue;
        }
        // Sleep until the rank in question rings; look once more after saying so.
        Block* own = group.own;
        bool alone = own->sleepers.fetch_add(1) == 0;
        uint32_t rung = own->bell.load();
        uint64_t finished = group.finished;
        lacked = group.lacking;
        bool one = lacked && !(lacked & (lacked - 1));
        own->waits_for.store(alone && one ? __builtin_ctzll(lacked) : -1);
        group.eager = true;  // nobody keeps up: let the others find all there is
        group.progress();
        group.eager = false;
        bool stuck = group.finished == finished && (!one || group.lacking == lacked) && group.status == DONE;
        lock.unlock();
        long slept = 0;
        if (stuck) {
            int64_t nap = end - now < look_at - now ? end - now : look_at - now;
            timespec limit{time_t(nap / 1000000), long(nap % 1000000) * 1000};
            slept = futex(&own->bell, FUTEX_WAIT, rung, &limit);
        }
        int problem = errno;
        lock.lock();
        if (own->sleepers.fetch_sub(1) > 1) own->waits_for.store(-1);
        if (slept < 0 && problem == EINTR) {
            group.progress();
            result = group.finished >= id ? DONE : INTERRUPTED;
            break;
        }
        spin_end = 1;  // awake: look, then sleep again rather than spin
    }
    --group.waiters;
    return result;
}

}  // namespace ds
