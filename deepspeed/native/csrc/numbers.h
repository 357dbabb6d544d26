// Numbers of 32 and 16 bits in memory, as fp32 values.
//
// Owns: conversion of runs of bf16 and fp16 to and from fp32, rounding to nearest even; a NaN stays a NaN.
// Invariant: pointers may have any alignment; what is not aligned to its element is copied, never read in place.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

// One copy of each kernel: they are called per block, and inlining them everywhere would make compiling slow.
#define ONE_COPY __attribute__((noinline))

namespace numbers {

// The codes of the Python side (deepspeed/ops/native_kernels.py).
enum Kind : int { NONE = 0, F32 = 1, BF16 = 2, F16 = 3 };

using vectors::load;
using vectors::store;
typedef float EightFloats __attribute__((vector_size(32)));
typedef short EightHalves __attribute__((vector_size(16)));

inline int64_t width(int kind) { return kind == F32 ? 4 : 2; }

inline bool is_aligned(const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

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

ONE_COPY inline void bf16_to_f32(const uint16_t* __restrict from, float* __restrict to, int64_t count) {
  uint32_t* __restrict bits = reinterpret_cast<uint32_t*>(to);
  for (int64_t i = 0; i < count; ++i) bits[i] = uint32_t(from[i]) << 16;
}

inline uint16_t bf16_of(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

ONE_COPY inline void f32_to_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t count) {
  const uint32_t* __restrict bits = reinterpret_cast<const uint32_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = bf16_of(bits[i]);
}

inline float f16_value(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31u) return value_of(sign | 0x7f800000u | (fraction ? 0x400000u | fraction << 13 : 0u));
  if (exponent == 0u) {
    const float magnitude = float(fraction) * 0x1p-24f;
    return value_of(sign | bits_of(magnitude));
  }
  return value_of(sign | (exponent + 112u) << 23 | fraction << 13);
}

inline uint16_t f16_of(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the 2^-24 grid in the low bits, rounded
    return uint16_t(sign | (bits_of(value_of(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
}

ONE_COPY inline void f16_to_f32(const uint16_t* __restrict from, float* __restrict to, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    store(to + i, __builtin_ia32_vcvtph2ps256(load<EightHalves>(from + i)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
  for (; i < count; ++i) to[i] = f16_value(from[i]);
}

ONE_COPY inline void f32_to_f16(const float* __restrict from, uint16_t* __restrict to, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    store(to + i, __builtin_ia32_vcvtps2ph256(load<EightFloats>(from + i), 8));  // 8: to nearest even, no exceptions
#elif defined(__ARM_NEON) && defined(__aarch64__)
  for (; i + 4 <= count; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
  for (; i < count; ++i) to[i] = f16_of(from[i]);
}

constexpr int64_t BLOCK = 1024;  // elements; the fp32 scratch of a block is 4 KiB per tensor and stays in the first cache

// `count` (at most BLOCK) elements at `from` as fp32: in place where that is possible, else in `scratch`.
ONE_COPY inline float* read_block(const void* from, int kind, int64_t count, float* scratch) {
  if (kind == F32) {
    if (is_aligned(from, 4)) return static_cast<float*>(const_cast<void*>(from));
    std::memcpy(scratch, from, size_t(count) * 4);
    return scratch;
  }
  alignas(64) uint16_t copied[BLOCK];
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  if (!is_aligned(from, 2)) {
    std::memcpy(copied, from, size_t(count) * 2);
    halves = copied;
  }
  if (kind == BF16) bf16_to_f32(halves, scratch, count);
  else f16_to_f32(halves, scratch, count);
  return scratch;
}

// Put `count` fp32 values where `read_block` took them from; nothing to do when they were worked on in place.
ONE_COPY inline void write_block(const float* values, void* to, int kind, int64_t count) {
  if (values == to) return;
  if (kind == F32) {
    std::memcpy(to, values, size_t(count) * 4);
    return;
  }
  alignas(64) uint16_t copied[BLOCK];
  const bool direct = is_aligned(to, 2);
  uint16_t* halves = direct ? static_cast<uint16_t*>(to) : copied;
  if (kind == BF16) f32_to_bf16(values, halves, count);
  else f32_to_f16(values, halves, count);
  if (!direct) std::memcpy(to, copied, size_t(count) * 2);
}

}  // namespace numbers
