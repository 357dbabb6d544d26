// One vector register of fp32 values, for every instruction set, written so that one formula serves vectors and floats.
//
// Owns: `Vec` and the few operations that the compiler's vector types lack. The other operators (+ - * / < ?:) are the
// compiler's own (GCC and Clang vector extensions).
// LANES is the width of a register, TORCH_LANES the elements that torch's fused optimizers take at a time on this kind of
// machine (their kernels are not compiled for 512 bits): those beyond the last whole vector are rounded in another order.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace vectors {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__ARM_NEON) && defined(__aarch64__)
constexpr int64_t LANES = 4;
#else
constexpr int64_t LANES = 8;
#endif
constexpr int64_t TORCH_LANES = LANES < 8 ? LANES : 8;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef short SignedHalves __attribute__((vector_size(2 * LANES)));  // the type compilers give to packed fp16

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));  // any alignment; one instruction
  return value;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline float square_root(float value) { return __builtin_sqrtf(value); }

// The compilers' own names of single instructions: <immintrin.h> would take a second to read.
inline Vec square_root(Vec value) {
#if defined(__clang__)
  return __builtin_elementwise_sqrt(value);
#elif defined(__AVX512F__)
  return __builtin_ia32_sqrtps512_mask(value, value, -1, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_sqrtps256(value);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return vsqrtq_f32(value);
#else
  Vec root;
  for (int64_t k = 0; k < LANES; ++k) root[k] = __builtin_sqrtf(value[k]);
  return root;
#endif
}

// a > b ? a : b, and so `b` where either is NaN: one instruction on x86.
inline float larger(float a, float b) { return a > b ? a : b; }

inline Vec larger(Vec a, Vec b) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
  return __builtin_ia32_maxps256(a, b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c, rounded once where the instruction set has that; the kernels of torch do the same.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_vfmaddps256(a, b, c);
#else
  return vfmaq_f32(c, a, b);
#endif
}
#else
inline float multiply_add(float a, float b, float c) { return a * b + c; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
#endif

}  // namespace vectors
