// Exercises the same-host transport with ranks that are threads of this process, for sanitizers:
//
//   g++ -std=c++17 -O1 -g -fsanitize=thread -pthread -I deepspeed/native/csrc
//       tests/native/transport_driver.cpp deepspeed/native/csrc/transport_sums.cpp
//   g++ ... -fsanitize=address,undefined ...
//
// Every rank draws the same operations, starts several at once, waits for them in an order of its own and checks the
// results. Ends with 0 and "ok" when all was right.
#include "transport.cpp"

#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

static void need(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::abort();
}

static void rank_main(void* handle, int rank, int size, int rounds) {
    std::mt19937 same(5), own(unsigned(100 + rank));
    struct Started {
        int64_t id;
        int kind;
        size_t n;
        std::vector<float> in, out;
    };
    for (int round = 0; round < rounds; ++round) {
        std::vector<Started> started(1 + same() % 4);
        for (Started& s : started) {
            s.kind = int(same() % 5);
            const size_t sizes[] = {1, 17, 3000, 70001, 400003};
            s.n = sizes[same() % 5];
            int root = int(same() % unsigned(size));
            if (s.kind == 0) {
                s.in.assign(s.n * size_t(size), float(rank + 1));
                s.out.assign(s.n, 0);
                s.id = ds_shm_reduce_scatter(handle, s.in.data(), s.out.data(), int64_t(s.n), 0, 1.0);
            } else if (s.kind == 1) {
                s.in.assign(s.n, float(rank + 1));
                s.out.assign(s.n * size_t(size), 0);
                s.id = ds_shm_all_gather(handle, s.in.data(), s.out.data(), int64_t(s.n * 4), int64_t(s.n * 4));
            } else if (s.kind == 2) {
                s.out.assign(s.n, float(rank + 1));
                s.id = ds_shm_all_reduce(handle, s.out.data(), int64_t(s.n), 0, 1.0);
            } else if (s.kind == 3) {
                s.out.assign(s.n, float(rank == root ? size : -1));
                s.id = ds_shm_broadcast(handle, s.out.data(), int64_t(s.n * 4), root);
            } else {
                s.in.assign(s.n * size_t(size), float(rank + 1));
                s.out.assign(s.n * size_t(size), 0);
                std::vector<int64_t> sizes_of(size_t(2 * size), int64_t(s.n * 4));
                s.id = ds_shm_all_to_all(handle, s.in.data(), s.out.data(), sizes_of.data());
            }
            need(s.id > 0, "start");
        }
        if (same() % 2) ds_shm_background(handle);
        if (own() % 8 == 0) usleep(own() % 3000);
        std::vector<size_t> order(started.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), own);
        for (size_t i : order) {
            Started& s = started[i];
            need(ds_shm_wait(handle, s.id, 60000000) == DONE, "wait");
            float sum = float(size * (size + 1)) / 2;
            for (size_t at = 0; at < s.out.size(); ++at) {
                float right = s.kind == 0 || s.kind == 2 ? sum : s.kind == 3 ? float(size) : float(at / s.n + 1);
                need(s.out[at] == right, "value");
            }
        }
    }
}

int main(int count, char** arguments) {
    int size = count > 1 ? std::atoi(arguments[1]) : 3, rounds = count > 2 ? std::atoi(arguments[2]) : 30;
    std::vector<void*> handles;
    for (int r = 0; r < size; ++r) handles.push_back(ds_shm_open(r, size, uint64_t(r + 1), 20));
    for (int r = 0; r < size; ++r)
        for (int p = 0; p < size; ++p)
            if (p != r) need(ds_shm_attach(handles[size_t(r)], p, getpid(), 0, ds_shm_fd(handles[size_t(p)]), uint64_t(p + 1)) == 0, "attach");
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) threads.emplace_back(rank_main, handles[size_t(r)], r, size, rounds);
    for (std::thread& thread : threads) thread.join();
    for (void* handle : handles) ds_shm_leave(handle);
    std::puts("ok");
}
