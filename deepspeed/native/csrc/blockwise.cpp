// Blockwise quantization of tensors in host memory: packing with error feedback, and sums of packed parts; plain C
// interface. The format and the numbers are those of deepspeed/comm/blockwise.py.
//
// A call has pieces of equal length, each cut into blocks that share a scale. One block is worked on at a time: its
// values become fp32 in a room that stays in the first-level cache, and every loop after that knows fp32 alone.
// The loops are written for one element; compilers make vectors of them for any instruction set.
// Invariants: no element depends on the number of threads; a product and a sum are two roundings (no contraction);
// addresses may have any alignment; all counts are 64 bits wide.
#include "numbers.h"
#include "pool.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__clang__)
#define DS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DS_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace {

using numbers::BF16;
using numbers::F16;
using numbers::F32;
using numbers::NONE;
using numbers::bits_of;
using numbers::value_of;
using numbers::width;

constexpr int64_t LARGEST_BLOCK = 4096;  // elements: three rooms of fp32 are on the stack
constexpr int64_t UNIT = 32768;          // elements a thread takes at once: some 10 us, what waking it costs
constexpr float SMALLEST_SCALE = 0x1p-126f;
constexpr float ROUND = 0x1.8p23f;  // added to |x| < 2^22, leaves x, rounded to nearest even, in the low bits
constexpr uint32_t SIGN = 0x80000000u, INFINITE = 0x7f800000u, QUIET = 0x7fc00000u;

using Room = char[4 * LARGEST_BLOCK];  // fp32 values

// How pieces are cut; the Python class `Packing`.
struct Packing {
  int64_t pieces, numel, block, bits;

  int64_t blocks() const { return (numel + block - 1) / block; }
  int64_t unit_blocks() const { return block < UNIT ? UNIT / block : 1; }
  int64_t units() const { return (blocks() + unit_blocks() - 1) / unit_blocks(); }
  int64_t code_bytes(int64_t count) const { return bits == 8 ? count : (count + 1) / 2; }
};

// One block of a packed piece.
struct Block {
  int64_t piece, first, count;  // elements of the piece
  int64_t scale_at, codes_at;   // bytes of the packed piece
  int64_t low;                  // int4: elements in the low halves of the bytes; the rest is in the high ones
};

template <class Visit>
void for_each_block(const Packing& packing, int64_t begin_unit, int64_t end_unit, Visit visit) {
  const int64_t blocks = packing.blocks(), step = packing.unit_blocks(), units = packing.units();
  for (int64_t unit = begin_unit; unit < end_unit; ++unit) {
    const int64_t begin = unit % units * step, end = begin + step < blocks ? begin + step : blocks;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * packing.block, left = packing.numel - first;
      const int64_t count = left < packing.block ? left : packing.block;
      visit(Block{unit / units, first, count, 4 * b, 4 * blocks + packing.code_bytes(first), (count + 1) / 2});
    }
  }
}

// ---- loops over the elements of a block

inline float at(const char* values, int64_t i) { return numbers::load<float>(values + 4 * i); }
inline void put(char* values, int64_t i, float value) { numbers::store(values + 4 * i, value); }

// to[i] = from[i] as fp32.
void widen(const char* from, int kind, char* to, int64_t count) {
  if (kind == BF16) numbers::convert_run<BF16, F32>(from, to, count, 1.0f);
  else if (kind == F16) numbers::convert_run<F16, F32>(from, to, count, 1.0f);
  else std::memcpy(to, from, 4 * count);
}

// to[i] = factor * from[i], rounded to the kind of `to`.
void narrow(const char* from, char* to, int kind, int64_t count, float factor) {
  if (kind == BF16) {  // not convert_run, whose vectors GCC 12 narrows in many steps
    DS_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) numbers::store(to + 2 * i, numbers::bf16_of(at(from, i) * factor));
  } else if (kind == F16) numbers::convert_run<F32, F16>(from, to, count, factor);
  else numbers::convert_run<F32, F32>(from, to, count, factor);
}

// The numbers where they are, if they are fp32; else in the room.
inline const char* as_fp32(const char* from, int kind, char* room, int64_t count) {
  if (kind == F32) return from;
  widen(from, kind, room, count);
  return room;
}

void add(char* total, const char* values, int64_t count) {
  DS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) put(total, i, at(total, i) + at(values, i));
}

// The bits of the largest absolute value. Infinities are above all numbers, and NaN above infinities.
uint32_t largest(const char* values, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t size = int32_t(bits_of(at(values, i)) & ~SIGN);
    most = size > most ? size : most;
  }
  return uint32_t(most);
}

// The multiple of the scale that is nearest to the value, in the low bits, as two's complement.
inline uint32_t multiple(const char* values, int64_t i, float inverse) {
  return bits_of(at(values, i) * inverse + ROUND);
}

void encode8(const char* values, char* codes, int64_t count, float inverse) {
  DS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) codes[i] = char(multiple(values, i, inverse));
}

void encode4(const char* values, char* codes, int64_t count, int64_t low, float inverse) {
  const char* high = values + 4 * low;
  DS_INDEPENDENT
  for (int64_t i = 0; i < count - low; ++i)
    codes[i] = char(multiple(values, i, inverse) + 8u + (multiple(high, i, inverse) << 4));
  if (count < 2 * low) codes[low - 1] = char(multiple(values, low - 1, inverse) + 8u);
}

// kept[i] = beta * old[i] + share * (values[i] - what was sent of it); 0 where that is not finite.
void keep_error(const char* values, const char* old, char* kept, int64_t count, float scale, float beta, float share) {
  const float inverse = 1.0f / scale;
  DS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float value = at(values, i), times = value * inverse;
    const float rounded = value_of(bits_of((times + ROUND) - ROUND) | (bits_of(times) & SIGN));
    const float lost = value - rounded * scale;
    const uint32_t mixed = bits_of(at(old, i) * beta + lost * share);
    put(kept, i, value_of((mixed & ~SIGN) < INFINITE ? mixed : 0u));
  }
}

template <bool FIRST>
void decode8(char* total, const char* codes, int64_t count, float scale) {
  DS_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float value = float(int8_t(codes[i])) * scale;
    put(total, i, FIRST ? value : at(total, i) + value);
  }
}

template <bool FIRST>
void decode4(char* total, const char* codes, int64_t count, int64_t low, float scale) {
  char* high = total + 4 * low;
  DS_INDEPENDENT
  for (int64_t i = 0; i < low; ++i) {
    const float value = float(int(uint8_t(codes[i]) & 15) - 8) * scale;
    put(total, i, FIRST ? value : at(total, i) + value);
  }
  DS_INDEPENDENT
  for (int64_t i = 0; i < count - low; ++i) {
    const float value = float(int8_t(codes[i]) >> 4) * scale;
    put(high, i, FIRST ? value : at(high, i) + value);
  }
}

// ---- packing

struct Pack {
  Packing packing;
  char* packed;
  int64_t packed_stride;  // bytes from a piece to the next
  const char* source;
  int64_t source_stride;  // elements
  int source_kind;
  char* error;  // contiguous; null: none
  int error_kind;
  float beta, share;
};

void pack_block(const Pack& job, const Block& block) {
  Room value_room, error_room;
  const int64_t count = block.count;
  const char* source = job.source + (block.piece * job.source_stride + block.first) * width(job.source_kind);
  char* error = nullptr;
  const char *values, *old = nullptr;
  if (job.error == nullptr) {
    values = as_fp32(source, job.source_kind, value_room, count);
  } else {
    error = job.error + (block.piece * job.packing.numel + block.first) * width(job.error_kind);
    widen(source, job.source_kind, value_room, count);
    old = as_fp32(error, job.error_kind, error_room, count);
    add(value_room, old, count);
    values = value_room;
  }
  char* codes = job.packed + block.piece * job.packed_stride + block.codes_at;
  const uint32_t most = largest(values, count);
  float scale = value_of(most) * float(1.0 / (job.packing.bits == 8 ? 127.0 : 7.0));
  scale = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
  if (most >= INFINITE) {
    scale = value_of(QUIET);
    std::memset(codes, 0, job.packing.code_bytes(count));
  } else if (job.packing.bits == 8) {
    encode8(values, codes, count, 1.0f / scale);
  } else {
    encode4(values, codes, count, block.low, 1.0f / scale);
  }
  numbers::store(job.packed + block.piece * job.packed_stride + block.scale_at, scale);
  if (error == nullptr) return;
  char* kept = job.error_kind == F32 ? error : error_room;
  keep_error(values, old, kept, count, scale, job.beta, job.share);
  if (job.error_kind != F32) narrow(kept, error, job.error_kind, count, 1.0f);
}

void pack_units(void* context, int64_t begin, int64_t end) {
  const Pack& job = *static_cast<const Pack*>(context);
  for_each_block(job.packing, begin, end, [&](const Block& block) { pack_block(job, block); });
}

// ---- sums

struct Sum {
  Packing packing;
  char* output;
  int64_t output_stride;  // elements from a piece to the next
  int output_kind;
  const char* parts;
  int64_t count, part_stride, packed_stride;  // bytes from a part, and from a piece, to the next
  const char* own;                            // null: none
  int64_t own_stride;                         // elements
  int own_kind;
  int64_t own_place;
  float factor;
  bool accumulate;
};

template <bool FIRST>
void decode_block(const Sum& job, const Block& block, const char* packed, char* total) {
  const float scale = numbers::load<float>(packed + block.scale_at);
  if (job.packing.bits == 8) decode8<FIRST>(total, packed + block.codes_at, block.count, scale);
  else decode4<FIRST>(total, packed + block.codes_at, block.count, block.low, scale);
}

void sum_block(const Sum& job, const Block& block) {
  Room total, room;
  const int64_t count = block.count, contributions = job.count + (job.own != nullptr);
  const char* packed = job.parts + block.piece * job.packed_stride;
  for (int64_t place = 0; place < contributions; ++place) {
    if (job.own != nullptr && place == job.own_place) {
      const char* own = job.own + (block.piece * job.own_stride + block.first) * width(job.own_kind);
      if (place == 0) widen(own, job.own_kind, total, count);
      else add(total, as_fp32(own, job.own_kind, room, count), count);
      continue;
    }
    if (place == 0) decode_block<true>(job, block, packed, total);
    else decode_block<false>(job, block, packed, total);
    packed += job.part_stride;
  }
  char* output = job.output + (block.piece * job.output_stride + block.first) * width(job.output_kind);
  if (!job.accumulate) return narrow(total, output, job.output_kind, count, job.factor);
  narrow(total, total, F32, count, job.factor);
  add(total, as_fp32(output, job.output_kind, room, count), count);
  narrow(total, output, job.output_kind, count, 1.0f);
}

void sum_units(void* context, int64_t begin, int64_t end) {
  const Sum& job = *static_cast<const Sum*>(context);
  for_each_block(job.packing, begin, end, [&](const Block& block) { sum_block(job, block); });
}

}  // namespace

// The largest block, in elements, that the two functions take.
EXPORT int64_t ds_blockwise_largest_block() { return LARGEST_BLOCK; }

// Pack `pieces` of `numel` elements. Kinds are numbers::Kind; strides count elements, `packed_stride` bytes.
EXPORT void ds_blockwise_pack(char* packed, int64_t packed_stride, const char* source, int64_t source_stride,
                              int64_t source_kind, char* error, int64_t error_kind, double beta, int64_t pieces,
                              int64_t numel, int64_t block, int64_t bits, int64_t threads) {
  Pack job{{pieces, numel, block, bits}, packed, packed_stride, source, source_stride, int(source_kind), error,
           int(error_kind), float(beta), float(1.0 - beta)};
  if (pieces > 0 && numel > 0) pool::run(pieces * job.packing.units(), 1, threads, pack_units, &job);
}

// output (+)= factor * (part 0 + part 1 + ..., and `own` at its place), in fp32, rounded once.
EXPORT void ds_blockwise_sum(char* output, int64_t output_stride, int64_t output_kind, const char* parts, int64_t count,
                             int64_t part_stride, int64_t packed_stride, const char* own, int64_t own_stride,
                             int64_t own_kind, int64_t own_place, double factor, int64_t accumulate, int64_t pieces,
                             int64_t numel, int64_t block, int64_t bits, int64_t threads) {
  Sum job{{pieces, numel, block, bits}, output, output_stride, int(output_kind), parts, count, part_stride,
          packed_stride, own, own_stride, int(own_kind), own_place, float(factor), accumulate != 0};
  if (pieces > 0 && numel > 0) pool::run(pieces * job.packing.units(), 1, threads, sum_units, &job);
}
