// Calls the entries of draws.cpp on heap blocks of exact size, so that the sanitizers see a byte too many.
#include "draws.cpp"

#include <cstdio>
#include <initializer_list>
#include <memory>

namespace {

int failures = 0;

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

std::unique_ptr<State> seeded() {
  auto state = std::make_unique<State>();
  state->left = 1;
  uint64_t word = 7;
  for (int i = 0; i < WORDS; ++i) state->words[i] = word = (1812433253u * (word ^ (word >> 30)) + i) & 0xffffffffu;
  return state;
}

using Entry = int (*)(void*, char*, int64_t, int, float, float);

void fills(Entry entry, int64_t count, int kind, int shift) {
  const int64_t nbytes = count * numbers::width(kind);
  auto state = seeded(), again = seeded();
  std::unique_ptr<char[]> first(new char[nbytes + shift]), second(new char[nbytes + shift]);
  expect(entry(state.get(), first.get() + shift, count, kind, 0.5f, 0.75f) == 0, "draws");
  expect(entry(again.get(), second.get() + shift, count, kind, 0.5f, 0.75f) == 0, "draws again");
  expect(!std::memcmp(first.get() + shift, second.get() + shift, size_t(nbytes)), "same values");
  expect(!std::memcmp(state.get(), again.get(), sizeof(State)), "same state");
  expect(state->plausible(), "a state to go on from");
}

}  // namespace

int main() {
  for (int kind = F32; kind <= F16; ++kind)
    for (const int64_t count : {0, 1, 7, 15, 16, 17, 31, 623, 624, 625, 1248, 2047, 2048, 2049, 4100})
      for (const int shift : {0, 1, 2}) {
        fills(ds_uniform, count, kind, shift);
        if (count >= GROUP) fills(ds_normal, count, kind, shift);
      }
  auto state = seeded();
  char out[64];
  expect(ds_normal(state.get(), out, 15, F32, 0, 1) == 1, "too few for a group");
  for (const int32_t left : {0, -1, 626, 5}) {
    state->left = left;
    state->next = 3;
    expect(ds_uniform(state.get(), out, 16, F32, 0, 1) == 1, "no state of a generator");
    expect(ds_normal(state.get(), out, 16, F32, 0, 1) == 1, "no state of a generator");
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
