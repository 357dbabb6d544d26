// The collectives of the same-host transport: how each cuts its tensor into chunks and what it does with the others'.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "transport_group.h"
#include "transport_sums.h"

namespace ds {

enum Kind : uint32_t { BARRIER = 0, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE, ALL_REDUCE_SMALL };

constexpr size_t CHUNK_BYTES = 256u << 10;  // a chunk is read from the second or third level of cache
constexpr size_t LEAST_PIECE_BYTES = 16u << 10;
// Up to this many bytes times peers every rank sums the whole tensor: one step of latency instead of two.
constexpr size_t SMALL_BYTES = 1u << 20;

// Elements of one rank's piece of a chunk that holds `pieces` of them.
inline size_t piece_numel(size_t pieces, size_t width) {
    size_t nbytes = std::max(LEAST_PIECE_BYTES, CHUNK_BYTES / pieces);
    return std::max<size_t>(64, nbytes / width / 64 * 64);
}

// Place of the piece for rank `to` in a chunk of rank `from` that leaves out its own.
inline size_t place(int from, int to) { return size_t(to < from ? to : to - 1); }

struct Barrier : Op {
    size_t got[MAX_RANKS] = {};
    int missing = 0;

    explicit Barrier(const Group& group) : missing(group.size - 1) { kind = BARRIER; }
    bool post(Group& group) override {
        if (!group.take(0, 0)) return false;
        group.post(0, *this, 0);
        return posts_done = true;
    }
    bool receive(Group& group) override {
        bool moved = false;
        for (int p = 0; p < group.size; ++p) {
            if (!group.other(p) || got[p] || !group.next(p, 0, *this, 0)) continue;
            group.took(p, 0);
            got[p] = 1;
            --missing;
            moved = true;
        }
        return moved;
    }
    bool done() const override { return missing == 0; }
};

// From here on, what the ranks of a host write together goes past their caches. On 2 cores with 32 MiB of third-level
// cache an all-gather of 16 MiB takes 3.7 ms instead of 4.7, of 64 MiB 19 instead of 32, one of 1 MiB longer.
constexpr size_t PAST_CACHES_BYTES = 16u << 20;

#if defined(__AVX2__)
typedef long long Wide __attribute__((vector_size(32), may_alias));
typedef long long Anywhere __attribute__((vector_size(32), aligned(1), may_alias));

inline void past_caches(Wide* to, Wide value) {
#if defined(__clang__)
    __builtin_nontemporal_store(value, to);
#else
    __builtin_ia32_movntdq256(reinterpret_cast<long long __attribute__((vector_size(32)))*>(to), value);
#endif
}
#endif

// memcpy of which the target is not read soon: written past the caches, without reading it first.
inline void copy_past_caches(char* to, const char* from, size_t nbytes) {
#if defined(__AVX2__)
    size_t head = -reinterpret_cast<uintptr_t>(to) & 31;
    if (nbytes < 4096 + head) {
        std::memcpy(to, from, nbytes);
        return;
    }
    std::memcpy(to, from, head);
    size_t at = head;
    for (; at + 128 <= nbytes; at += 128) {
        const Anywhere* in = reinterpret_cast<const Anywhere*>(from + at);
        Wide a = in[0], b = in[1], c = in[2], d = in[3];
        Wide* out = reinterpret_cast<Wide*>(to + at);
        past_caches(out, a);
        past_caches(out + 1, b);
        past_caches(out + 2, c);
        past_caches(out + 3, d);
    }
    std::memcpy(to + at, from + at, nbytes - at);
    __builtin_ia32_sfence();
#else
    std::memcpy(to, from, nbytes);
#endif
}

// Each source's bytes go to everybody: an all-gather (all are sources), or a broadcast.
struct Spread : Op {
    const char* in;
    char* out;
    size_t nbytes, stride;  // bytes of one source; bytes between the places of sources in `out`
    int root;               // -1: all are sources
    char* own = nullptr;    // where this rank's bytes go in `out`
    size_t posted = 0, missing = 0;
    size_t got[MAX_RANKS] = {};
    bool large = false;

    Spread(const Group& group, const void* from, void* to, size_t bytes, size_t apart, int source)
        : in(static_cast<const char*>(from)), out(static_cast<char*>(to)), nbytes(bytes), stride(apart), root(source) {
        kind = source < 0 ? ALL_GATHER : BROADCAST;
        large = nbytes * size_t(source < 0 ? group.size : 1) * size_t(group.size) >= PAST_CACHES_BYTES;
        if (root < 0) {
            missing = size_t(group.size - 1) * nbytes;
            own = out + size_t(group.rank) * stride;
        } else if (root != group.rank) {
            missing = nbytes;
            posts_done = true;
        }
        if (nbytes == 0) posts_done = true;  // a chunk of nothing would be read by nobody
    }
    bool post(Group& group) override {
        size_t n = std::min(CHUNK_BYTES, nbytes - posted);
        char* at = group.take(0, n);
        if (!at) return false;
        std::memcpy(at, in + posted, n);
        group.post(0, *this, nbytes);
        if (own && own != in) copy(own + posted, in + posted, n);
        posted += n;
        posts_done = posted == nbytes;
        return true;
    }
    bool receive(Group& group) override {
        if (missing == 0) return false;
        bool moved = false;
        for (int step = 1; step < group.size; ++step) {
            int p = (group.rank + step) % group.size;
            if ((root >= 0 && p != root) || got[p] == nbytes) continue;
            const Desc* desc = group.next(p, 0, *this, nbytes);
            if (!desc) continue;
            size_t n = std::min(CHUNK_BYTES, nbytes - got[p]);
            copy(out + (root < 0 ? size_t(p) * stride : 0) + got[p], group.data(p, 0, desc), n);
            group.took(p, 0);
            got[p] += n;
            missing -= n;
            moved = true;
        }
        return moved;
    }
    bool done() const override { return missing == 0; }

  private:
    void copy(char* to, const char* from, size_t n) const {
        if (large) copy_past_caches(to, from, n);
        else std::memcpy(to, from, n);
    }
};

// Pieces of any size between any two ranks. A chunk tells the sizes of all the pieces of its sender.
struct AllToAll : Op {
    const char* in;
    char* out;
    std::vector<size_t> send_at, send, receive_at, expected;
    size_t piece = 0, posted = 0, longest = 0;
    size_t got[MAX_RANKS] = {};
    bool ended[MAX_RANKS] = {};
    int missing;

    AllToAll(const Group& group, const void* from, void* to, const int64_t* sizes_in, const int64_t* sizes_out)
        : in(static_cast<const char*>(from)), out(static_cast<char*>(to)), missing(group.size - 1) {
        kind = ALL_TO_ALL;
        size_t a = 0, b = 0;
        for (int p = 0; p < group.size; ++p) {
            send_at.push_back(a);
            receive_at.push_back(b);
            send.push_back(size_t(sizes_in[p]));
            expected.push_back(size_t(sizes_out[p]));
            a += send.back();
            b += expected.back();
            if (group.other(p)) longest = std::max(longest, send.back());
        }
        size_t most = std::max(LEAST_PIECE_BYTES, CHUNK_BYTES / size_t(group.size - 1));
        piece = std::min(most, (longest + 63) / 64 * 64);
        size_t own = size_t(group.rank);
        if (send[own]) std::memmove(out + receive_at[own], in + send_at[own], std::min(send[own], expected[own]));
    }
    static size_t head_bytes(const Group& group) { return (size_t(group.size) * 8 + 63) / 64 * 64; }
    bool post(Group& group) override {
        size_t head = head_bytes(group);
        char* at = group.take(0, head + piece * size_t(group.size - 1));
        if (!at) return false;
        std::memcpy(at, send.data(), size_t(group.size) * 8);
        for (int p = 0; p < group.size; ++p) {
            if (!group.other(p) || send[size_t(p)] <= posted) continue;
            size_t n = std::min(piece, send[size_t(p)] - posted);
            std::memcpy(at + head + place(group.rank, p) * piece, in + send_at[size_t(p)] + posted, n);
        }
        posted += piece;
        posts_done = posted >= longest;
        group.post(0, *this, 0, uint32_t(piece), posts_done);
        return true;
    }
    bool receive(Group& group) override {
        bool moved = false;
        for (int p = 0; p < group.size; ++p) {
            if (!group.other(p) || ended[p]) continue;
            const Desc* desc = group.next(p, 0, *this, 0);
            if (!desc) continue;
            const char* chunk = group.data(p, 0, desc);
            uint64_t coming;
            std::memcpy(&coming, chunk + size_t(group.rank) * 8, 8);
            if (coming != expected[size_t(p)]) {
                group.fail(MISMATCH, p);
                return false;
            }
            size_t n = std::min<size_t>(desc->stride, expected[size_t(p)] - got[p]);
            const char* from = chunk + head_bytes(group) + place(p, group.rank) * desc->stride;
            std::memcpy(out + receive_at[size_t(p)] + got[p], from, n);
            got[p] += n;
            ended[p] = desc->last;
            if (ended[p]) --missing;
            group.took(p, 0);
            moved = true;
        }
        return moved;
    }
    bool done() const override { return missing == 0; }
};

// What the reductions share: the contributions of all ranks to a run of elements.
struct Reduction : Op {
    const char* in;
    char* out;
    size_t numel, width;  // elements of the tensor (of a shard: reduce-scatter) and bytes of one
    Rule rule;
    Kernel kernel;
    size_t step = 0;                // elements a chunk moves on by
    size_t posted = 0, summed = 0;  // elements

    Reduction(const void* from, void* to, size_t n, const Rule& how)
        : in(static_cast<const char*>(from)),
          out(static_cast<char*>(to)),
          numel(n),
          width(size_of(how.in)),
          rule(how),
          kernel(how) {
        posts_done = n == 0;  // a chunk of nothing would be read by nobody
    }

    // Whether all peers' chunks are here; `parts` then points to their pieces, the own contribution is `mine`.
    bool collect(Group& group, uint64_t total, const char* mine, size_t piece_bytes, bool whole, const void** parts) {
        for (int p = 0; p < group.size; ++p) {
            if (!group.other(p)) {
                parts[p] = mine;
                continue;
            }
            const Desc* desc = group.next(p, 0, *this, total);
            if (!desc) return false;
            parts[p] = group.data(p, 0, desc) + (whole ? 0 : place(p, group.rank) * piece_bytes);
        }
        return true;
    }
    void release(Group& group) {
        for (int p = 0; p < group.size; ++p)
            if (group.other(p)) group.took(p, 0);
    }
};

struct ReduceScatter : Reduction {
    ReduceScatter(const Group& group, const void* from, void* to, size_t shard, const Rule& how)
        : Reduction(from, to, shard, how) {
        kind = REDUCE_SCATTER;
        step = piece_numel(size_t(group.size - 1), width);
    }
    uint64_t total() const { return numel * width * 16 + uint64_t(rule.in); }
    bool post(Group& group) override {
        size_t n = std::min(step, numel - posted), nbytes = n * width;
        char* at = group.take(0, nbytes * size_t(group.size - 1));
        if (!at) return false;
        for (int p = 0; p < group.size; ++p)
            if (group.other(p))
                std::memcpy(at + place(group.rank, p) * nbytes, in + (size_t(p) * numel + posted) * width, nbytes);
        posted += n;
        posts_done = posted == numel;
        group.post(0, *this, total());
        return true;
    }
    bool receive(Group& group) override {
        if (summed == numel || summed == posted) return false;
        size_t n = std::min(step, numel - summed);
        const void* parts[MAX_RANKS];
        const char* mine = in + (size_t(group.rank) * numel + summed) * width;
        if (!collect(group, total(), mine, n * width, false, parts)) return false;
        kernel.run(parts, group.size, out + summed * size_of(rule.out), n);
        release(group);
        summed += n;
        return true;
    }
    bool done() const override { return summed == numel; }
};

// Small tensors: everybody sums everything.
struct AllReduceSmall : Reduction {
    AllReduceSmall(const void* from, void* to, size_t n, const Rule& how) : Reduction(from, to, n, how) {
        kind = ALL_REDUCE_SMALL;
        step = CHUNK_BYTES / width;
    }
    uint64_t total() const { return (numel * width * 16 + uint64_t(rule.in)) * 8 + uint64_t(rule.fold); }
    bool post(Group& group) override {
        size_t n = std::min(step, numel - posted);
        char* at = group.take(0, n * width);
        if (!at) return false;
        std::memcpy(at, in + posted * width, n * width);
        posted += n;
        posts_done = posted == numel;
        group.post(0, *this, total());
        return true;
    }
    bool receive(Group& group) override {
        if (summed == numel || summed == posted) return false;
        size_t n = std::min(step, numel - summed);
        const void* parts[MAX_RANKS];
        if (!collect(group, total(), in + summed * width, 0, true, parts)) return false;
        kernel.run(parts, group.size, out + summed * size_of(rule.out), n);
        release(group);
        summed += n;
        return true;
    }
    bool done() const override { return summed == numel; }
};

// Large tensors: of each run of N pieces every rank sums one, and hands the result to the others on the second lane.
struct AllReduce : Reduction {
    size_t got[MAX_RANKS] = {};
    size_t missing;

    AllReduce(const Group& group, const void* from, void* to, size_t n, const Rule& how) : Reduction(from, to, n, how) {
        kind = ALL_REDUCE;
        step = piece_numel(size_t(group.size - 1), width) * size_t(group.size);
        missing = size_t(group.size - 1) * n;
    }
    uint64_t total() const { return (numel * width * 16 + uint64_t(rule.in)) * 8 + uint64_t(rule.fold); }

    // The run at `begin`: its length, and what each rank but the last ones sums of it.
    size_t run(size_t begin) const { return std::min(step, numel - begin); }
    static size_t share(size_t run, int size) { return ((run + size_t(size) - 1) / size_t(size) + 15) / 16 * 16; }
    static size_t from(size_t run, size_t share, int p) { return std::min(run, share * size_t(p)); }
    static size_t length(size_t run, size_t share, int p) { return from(run, share, p + 1) - from(run, share, p); }

    bool post(Group& group) override {
        size_t n = run(posted), each = share(n, group.size);
        char* at = group.take(0, each * width * size_t(group.size - 1));
        if (!at) return false;
        for (int p = 0; p < group.size; ++p)
            if (group.other(p))
                std::memcpy(at + place(group.rank, p) * each * width, in + (posted + from(n, each, p)) * width,
                            length(n, each, p) * width);
        posted += n;
        posts_done = posted == numel;
        group.post(0, *this, total());
        return true;
    }
    bool receive(Group& group) override {
        bool moved = sum(group);
        if (group.status != DONE) return false;
        for (int p = 0; p < group.size; ++p) {
            if (!group.other(p) || got[p] == numel) continue;
            const Desc* desc = group.next(p, 1, *this, total());
            if (!desc) continue;
            size_t n = run(got[p]), each = share(n, group.size);
            std::memcpy(out + (got[p] + from(n, each, p)) * width, group.data(p, 1, desc), length(n, each, p) * width);
            group.took(p, 1);
            got[p] += n;
            missing -= n;
            moved = true;
        }
        return moved;
    }
    bool done() const override { return summed == numel && missing == 0; }

  private:
    bool sum(Group& group) {
        if (summed == numel || summed == posted) return false;
        size_t n = run(summed), each = share(n, group.size);
        size_t begin = summed + from(n, each, group.rank), mine = length(n, each, group.rank);
        const void* parts[MAX_RANKS];
        if (!collect(group, total(), in + begin * width, each * width, false, parts)) return false;
        char* at = group.take(1, mine * width);
        if (!at) return false;
        kernel.run(parts, group.size, at, mine);
        std::memcpy(out + begin * width, at, mine * width);
        group.post(1, *this, total());
        release(group);
        summed += n;
        return true;
    }
};

}  // namespace ds
