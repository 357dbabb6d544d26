// Exercises aio.cpp by itself, for sanitizers: both engines, odd sizes, faults, chained transfers, closing while busy.
//
//   g++ -std=c++17 -O1 -g -fsanitize=address,undefined -pthread -I deepspeed/native/csrc tests/native/aio_driver.cpp
//   ./a.out [FOLDER]
//
// Prints the engines it ran and ends with 0, or stops at the first thing that is wrong.
#pragma GCC diagnostic ignored "-Wsubobject-linkage"  // of types in an included .cpp
#include "aio.cpp"

#include <fcntl.h>

#include <cstdio>
#include <string>
#include <thread>

namespace {

void expect(bool right, const char *what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

ds_aio_result ended(ds_aio *handle, int64_t ticket) {
  ds_aio_result result{};
  int32_t answer;
  while ((answer = ds_aio_wait(handle, ticket, 1000, &result)) == 0) {
  }
  expect(answer == 1, "a ticket is known");
  return result;
}

struct File {
  explicit File(const std::string &path) : name(path) {
    plain = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
#ifdef O_DIRECT
    direct = open(path.c_str(), O_RDWR | O_DIRECT);
#endif
    expect(plain >= 0, "the folder can be written");
  }
  ~File() {
    if (direct >= 0) ::close(direct);
    ::close(plain);
    unlink(name.c_str());
  }
  std::string name;
  int plain = -1, direct = -1;
};

void round_trips(ds_aio *handle, File &file, char *memory) {
  for (int64_t nbytes : {0, 1, 511, 4096, 4097, 70000, 200001})
    for (int64_t offset : {0, 1, 4096, 9999})
      for (int shift : {0, 1, 64}) {
        char *source = memory + shift, *target = memory + (1 << 19) + shift;
        for (int64_t index = 0; index < nbytes; ++index) source[index] = static_cast<char>(index * 31 + offset + shift);
        std::memset(target, 0, nbytes);
        int64_t write = ds_aio_submit(handle, 1, file.direct, file.plain, source, nbytes, offset, 0);
        int64_t read = ds_aio_submit(handle, 0, file.direct, file.plain, target, nbytes, offset, write);
        expect(ended(handle, read).code == 0, "a read that follows a write ends well");
        ds_aio_result result = ended(handle, write);
        expect(result.code == 0 && result.found == nbytes && result.expected == nbytes, "a write ends well");
        expect(std::memcmp(source, target, nbytes) == 0, "what was written is read");
      }
}

void run(int32_t engine, int32_t flags, const std::string &folder) {
  int32_t reason = 0;
  ds_aio *handle = ds_aio_open(16384, 4, 3, engine, flags, &reason);
  if (!handle) {
    std::printf("engine %d: not here (errno %d)\n", engine, reason);
    return;
  }
  void *room = nullptr;
  expect(posix_memalign(&room, 4096, 1 << 20) == 0, "memory");
  char *memory = static_cast<char *>(room);
  std::memset(memory, 7, 1 << 20);
  File file(folder + "/file"), buffered(folder + "/buffered");
  ::close(buffered.direct);
  buffered.direct = -1;
  round_trips(handle, file, memory);
  round_trips(handle, buffered, memory);
  ds_aio_fault(handle, 0, 0);  // every block moves half
  round_trips(handle, file, memory);
  ds_aio_fault(handle, 3, EIO);
  ds_aio_result result = ended(handle, ds_aio_submit(handle, 1, file.direct, file.plain, memory, 200000, 0, 0));
  expect(result.code == EIO && result.found < 200000, "an error of the disk is heard of");
  ds_aio_fault(handle, -1, 0);
  expect(ftruncate(file.plain, 10000) == 0, "the file can be cut");
  result = ended(handle, ds_aio_submit(handle, 0, file.direct, file.plain, memory, 200000, 0, 0));
  expect(result.code == DS_AIO_SHORT && result.offset == 10000 && result.found == 10000, "the end of the file is found");
  expect(ds_aio_wait(handle, 123456, 0, &result) == -1, "a ticket nobody has is unknown");
  std::vector<std::thread> users;
  for (int user = 0; user < 4; ++user)
    users.emplace_back([&, user] {
      for (int turn = 0; turn < 30; ++turn) {
        char *part = memory + user * 65536;
        expect(ended(handle, ds_aio_submit(handle, 1, file.direct, file.plain, part, 65536, user * 65536, 0)).code == 0,
               "threads share a handle");
      }
    });
  for (auto &user : users) user.join();
  ds_aio_copy(memory + (1 << 19), memory, (1 << 19) - 3, 4);
  int64_t before = 0;
  for (int turn = 0; turn < 20; ++turn)  // nobody waits for these
    before = ds_aio_submit(handle, turn % 2, file.direct, file.plain, memory, 65536 + turn, turn * 4096, before);
  std::printf("engine %d, flags %d: well\n", ds_aio_engine(handle), flags);
  ds_aio_close(handle);
  std::free(room);
}

}  // namespace

int main(int argc, char **argv) {
  for (int32_t flags : {0, static_cast<int>(DS_AIO_SINGLE_SUBMIT), static_cast<int>(DS_AIO_NO_OVERLAP)})
    for (int32_t engine : {DS_AIO_URING, DS_AIO_THREADS}) run(engine, flags, argc > 1 ? argv[1] : ".");
  return 0;
}
