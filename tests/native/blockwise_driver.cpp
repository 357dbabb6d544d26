// Calls every entry of blockwise.cpp on heap blocks of exact size, so that the sanitizers see a byte too many.
#include "blockwise.cpp"

#include <cmath>
#include <cstdio>
#include <memory>

namespace {

int failures = 0;

void expect(bool good, const char* what) {
  if (!good) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

struct Memory {
  std::unique_ptr<char[]> memory;
  char* start;
  Memory(int64_t bytes, int shift) : memory(new char[bytes + shift]()), start(memory.get() + shift) {}
};

void fill(char* values, int kind, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = i % 97 == 96 ? INFINITY : float((i * 37 + 11) % 101) / 64.0f - 0.7f;
    if (kind == F32) numbers::put<F32, float>(values, i, value);
    else if (kind == BF16) numbers::put<BF16, float>(values, i, value);
    else numbers::put<F16, float>(values, i, value);
  }
}

void pack_and_sum(int64_t pieces, int64_t numel, int64_t block, int64_t bits, int kind, int error_kind, int shift) {
  const Packing packing{pieces, numel, block, bits};
  const int64_t nbytes = (4 * packing.blocks() + packing.code_bytes(numel) + 3) / 4 * 4, stride = numel + 3;
  const int64_t extent = (pieces - 1) * stride + numel;
  Memory source(extent * width(kind), shift), packed(2 * pieces * nbytes, shift), output(extent * width(kind), shift);
  Memory error(pieces * numel * width(error_kind), shift);
  fill(source.start, kind, extent);
  fill(error.start, error_kind, pieces * numel);
  for (int part = 0; part < 2; ++part)
    ds_blockwise_pack(packed.start + part * pieces * nbytes, nbytes, source.start, stride, kind,
                      part == 0 ? nullptr : error.start, error_kind, 0.8, pieces, numel, block, bits, 3);
  for (int own = -1; own < 3; ++own)
    for (int accumulate = 0; accumulate < 2; ++accumulate)
      ds_blockwise_sum(output.start, stride, kind, packed.start, 2, pieces * nbytes, nbytes,
                       own < 0 ? nullptr : error.start, numel, error_kind, own, 0.5, accumulate, pieces, numel, block, bits, 3);
}

// Units of pieces far larger than memory: every element once, in order, by 64-bit counts.
void huge_pieces() {
  for (int64_t bits = 4; bits <= 8; bits += 4) {
    const Packing packing{2, (int64_t(1) << 33) + 5, 4096, bits};
    int64_t piece = 0, next = 0, codes = 4 * packing.blocks();
    for (int64_t unit = 0; unit < 2 * packing.units(); unit += 1001) {
      const int64_t end = unit + 1001 < 2 * packing.units() ? unit + 1001 : 2 * packing.units();
      for_each_block(packing, unit, end, [&](const Block& block) {
        if (block.piece != piece) {
          expect(next == packing.numel && block.piece == piece + 1, "a piece is whole before the next");
          piece = block.piece;
          next = 0;
          codes = 4 * packing.blocks();
        }
        if (block.first != next || block.codes_at != codes || block.scale_at != 4 * (next / 4096))
          expect(false, "blocks are in order");
        next = block.first + block.count;
        codes += packing.code_bytes(block.count);
      });
    }
    expect(piece == 1 && next == packing.numel, "every element of the last piece");
  }
}

}  // namespace

int main() {
  const int64_t sizes[] = {1, 2, 15, 16, 17, 31, 255, 256, 257, 700};
  for (int64_t bits = 4; bits <= 8; bits += 4)
    for (int shift = 0; shift < 2; ++shift) {
      for (int64_t numel : sizes)
        for (int kind = F32; kind <= F16; ++kind)
          for (int error_kind = F32; error_kind <= F16; ++error_kind)
            pack_and_sum(2, numel, numel % 2 ? 256 : 16, bits, kind, error_kind, shift);
      pack_and_sum(3, 2 * UNIT + 77, 256, bits, BF16, F32, shift);
      pack_and_sum(1, 9001, LARGEST_BLOCK, bits, F32, BF16, shift);
    }
  ds_blockwise_pack(nullptr, 0, nullptr, 0, F32, nullptr, 0, 0.0, 0, 5, 256, 8, 3);
  ds_blockwise_pack(nullptr, 0, nullptr, 0, F32, nullptr, 0, 0.0, 5, 0, 256, 8, 3);
  ds_blockwise_sum(nullptr, 0, F32, nullptr, 0, 0, 0, nullptr, 0, 0, -1, 1.0, 0, 5, 0, 256, 8, 3);
  huge_pieces();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
