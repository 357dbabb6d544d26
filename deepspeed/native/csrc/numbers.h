// Numbers of 32 and 16 bits in memory, as fp32 values: one at a time (F = float) or a vector of them (F = Vec).
//
// Owns: bf16 and fp16 to and from fp32, rounding to nearest even; a NaN stays a NaN.
// Invariant: addresses may have any alignment; memory is read and written by copies of bytes, which compilers make one
// instruction.
#pragma once

#include "vectors.h"

namespace numbers {

using vectors::Bits;
using vectors::Halves;
using vectors::LANES;
using vectors::SignedHalves;
using vectors::Vec;
using vectors::load;
using vectors::store;

// The codes of the Python side (deepspeed/ops/native_kernels.py).
enum Kind : int { NONE = 0, F32 = 1, BF16 = 2, F16 = 3 };

constexpr int64_t width(int kind) { return kind == F32 ? 4 : 2; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float value_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// ---- bf16: the upper half of an fp32 number

inline uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(value != value ? 0x7fc0u : rounded);
}

// The results in the upper half of each element, something else in the lower one. For numbers, infinities, and NaN
// whose lower half is 0, as are all that come of bf16 and of 0/0: of others a carry would make something else.
inline Bits bf16_above(Vec value) {
  const Bits bits = (Bits)value;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// The results of `even` in the lower half of each element, those of `odd` in the upper one; as for bf16_above.
inline Bits bf16_pairs(Vec even, Vec odd) {
  const Bits below = bf16_above(even) >> 16, above = bf16_above(odd);
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  typedef short Words __attribute__((vector_size(32)));
  return (Bits)__builtin_ia32_pblendw256((Words)below, (Words)above, 0xaa);
#else
  return below | (above & 0xffff0000u);
#endif
}

// The results in the lower half of each element.
inline Bits bf16_bits(Vec value) {
  const Bits not_a_number = Bits{} + 0x7fc0u;
  return value != value ? not_a_number : bf16_above(value) >> 16;
}

inline Halves bf16_of(Vec value) { return __builtin_convertvector(bf16_bits(value), Halves); }

inline float from_bf16(uint16_t half) { return value_of(uint32_t(half) << 16); }

inline Vec from_bf16(Halves halves) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  return (Vec)((Bits)__builtin_ia32_pmovzxwd256((SignedHalves)halves) << 16);  // GCC 12 makes four instructions of it
#else
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

// ---- fp16

inline float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31u) return value_of(sign | 0x7f800000u | (fraction ? 0x400000u | fraction << 13 : 0u));
  if (exponent == 0u) return value_of(sign | bits_of(float(fraction) * 0x1p-24f));
  return value_of(sign | (exponent + 112u) << 23 | fraction << 13);
}

inline uint16_t f16_of(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u)  // below 2^-14: adding 1/2 leaves the multiple of 2^-24 in the low bits, rounded
    return uint16_t(sign | (bits_of(value_of(magnitude) + 0.5f) - 0x3f000000u));
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
}

inline Vec from_f16(Halves halves) {
#if defined(__AVX512F__)
  return __builtin_ia32_vcvtph2ps512_mask((SignedHalves)halves, Vec{}, -1, 4);
#elif defined(__F16C__) && defined(__clang__)
  typedef _Float16 Numbers __attribute__((vector_size(2 * LANES)));
  return __builtin_convertvector((Numbers)halves, Vec);  // the one instruction, which has no name here
#elif defined(__F16C__)
  return __builtin_ia32_vcvtph2ps256((SignedHalves)halves);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(halves));
#else
  Vec value;
  for (int64_t k = 0; k < LANES; ++k) value[k] = from_f16(halves[k]);
  return value;
#endif
}

inline Halves f16_of(Vec value) {
  // 8: to nearest even, whatever the control word says, without exceptions.
#if defined(__AVX512F__)
  return (Halves)__builtin_ia32_vcvtps2ph512_mask(value, 8, SignedHalves{}, -1);
#elif defined(__F16C__)
  return (Halves)__builtin_ia32_vcvtps2ph256(value, 8);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return vreinterpret_u16_f16(vcvt_f16_f32(value));
#else
  Halves halves;
  for (int64_t k = 0; k < LANES; ++k) halves[k] = f16_of(value[k]);
  return halves;
#endif
}

// ---- memory

template <class F>
struct Packed {
  using Type = uint16_t;
};
template <>
struct Packed<Vec> {
  using Type = Halves;
};

template <class F>
constexpr int64_t count_of() {
  return int64_t(sizeof(F) / sizeof(float));
}

// The numbers of kind KIND that begin at element `i` of `base`.
template <int KIND, class F>
inline F fetch(const char* base, int64_t i) {
  using Half = typename Packed<F>::Type;
  if constexpr (KIND == F32) return load<F>(base + 4 * i);
  else if constexpr (KIND == BF16) return from_bf16(load<Half>(base + 2 * i));
  else return from_f16(load<Half>(base + 2 * i));
}

template <int KIND, class F>
inline void put(char* base, int64_t i, F value) {
  if constexpr (KIND == F32) store(base + 4 * i, value);
  else if constexpr (KIND == BF16) store(base + 2 * i, bf16_of(value));
  else if constexpr (KIND == F16) store(base + 2 * i, f16_of(value));
}

template <int FROM, int TO>
__attribute__((noinline)) void convert_run(const char* from, char* to, int64_t count, float scale) {
  int64_t i = 0;
  const Vec factor = Vec{} + scale;
  for (; i + LANES <= count; i += LANES) put<TO, Vec>(to, i, fetch<FROM, Vec>(from, i) * factor);
  for (; i < count; ++i) put<TO, float>(to, i, fetch<FROM, float>(from, i) * scale);
}

// to[i] = scale * from[i], rounded to the kind of `to`.
inline void convert(const char* from, int from_kind, char* to, int to_kind, int64_t count, float scale) {
  switch (from_kind * 4 + to_kind) {
    case F32 * 4 + F32: return convert_run<F32, F32>(from, to, count, scale);
    case F32 * 4 + BF16: return convert_run<F32, BF16>(from, to, count, scale);
    case F32 * 4 + F16: return convert_run<F32, F16>(from, to, count, scale);
    case BF16 * 4 + F32: return convert_run<BF16, F32>(from, to, count, scale);
    case BF16 * 4 + BF16: return convert_run<BF16, BF16>(from, to, count, scale);
    case BF16 * 4 + F16: return convert_run<BF16, F16>(from, to, count, scale);
    case F16 * 4 + F32: return convert_run<F16, F32>(from, to, count, scale);
    case F16 * 4 + BF16: return convert_run<F16, BF16>(from, to, count, scale);
    default: return convert_run<F16, F16>(from, to, count, scale);
  }
}

}  // namespace numbers
