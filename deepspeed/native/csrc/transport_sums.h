// Reductions of the same-host transport: N contributions of one element type, folded in rank order.
//
// Floats are folded in fp32 (fp64 when either side is fp64), scaled once and rounded once, so an element's bits depend
// on its N contributions alone. Integers wrap. min and max hand on a nan.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define DS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DS_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ds {

// The numbers are those of comm/shm_channel.py.
enum Dtype : int { F32 = 0, F64, BF16, F16, I8, U8, I16, I32, I64, DTYPES };
enum Fold : int { SUM = 0, PRODUCT, MIN, MAX, BAND, BOR, BXOR, FOLDS };

inline size_t size_of(int dtype) {
    constexpr size_t sizes[DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    return sizes[dtype];
}

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline bf16 narrow_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return bf16{uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

#if defined(__F16C__)
inline float widen(f16 value) { return _cvtsh_ss(value.bits); }
inline f16 narrow_f16(float value) { return f16{uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))}; }
#elif defined(__aarch64__)
inline float widen(f16 value) {
    __fp16 half;
    std::memcpy(&half, &value, 2);
    return float(half);
}
inline f16 narrow_f16(float value) {
    __fp16 half = __fp16(value);
    f16 out;
    std::memcpy(&out, &half, 2);
    return out;
}
#else
inline float widen(f16 value) {
    uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7FFFu, bits;
    float out;
    if (rest >= 0x7C00u) {
        bits = sign | 0x7F800000u | ((rest & 0x3FFu) << 13);
    } else if (rest >= 0x400u) {
        bits = sign | ((rest << 13) + (112u << 23));
    } else {  // zero and subnormals: rest * 2^-24
        out = float(rest) * 5.9604644775390625e-8f;
        return sign ? -out : out;
    }
    std::memcpy(&out, &bits, 4);
    return out;
}
inline f16 narrow_f16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    uint32_t rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return f16{uint16_t(sign | 0x7E00u)};
    if (rest >= 0x47800000u) return f16{uint16_t(sign | 0x7C00u)};  // 65536 and more
    if (rest < 0x38800000u) {                                       // below 2^-14: the sum rounds to a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &rest, 4);
        magnitude += 0.5f;
        std::memcpy(&rest, &magnitude, 4);
        return f16{uint16_t(sign | (rest - 0x3F000000u))};
    }
    rest += 0xFFFu + ((rest >> 13) & 1u);
    return f16{uint16_t(sign | ((rest - (112u << 23)) >> 13))};
}
#endif

// Whole blocks, so that each conversion becomes vector code.
template <class T, class A>
inline void load(A* acc, const T* from, size_t n) {
    if constexpr (std::is_same_v<T, f16> || std::is_same_v<T, bf16>) {
        size_t i = 0;
#if defined(__F16C__)
        if constexpr (std::is_same_v<T, f16> && std::is_same_v<A, float>)
            for (; i + 8 <= n; i += 8)
                _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
        DS_INDEPENDENT
        for (; i < n; ++i) acc[i] = A(widen(from[i]));
    } else {
        DS_INDEPENDENT
        for (size_t i = 0; i < n; ++i) acc[i] = A(from[i]);
    }
}

template <class T, class A>
inline void store(T* to, const A* acc, size_t n) {
    if constexpr (std::is_same_v<T, bf16>) {
        DS_INDEPENDENT
        for (size_t i = 0; i < n; ++i) to[i] = narrow_bf16(float(acc[i]));
    } else if constexpr (std::is_same_v<T, f16>) {
        size_t i = 0;
#if defined(__F16C__)
        if constexpr (std::is_same_v<A, float>)
            for (; i + 8 <= n; i += 8)
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                                 _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT));
#endif
        for (; i < n; ++i) to[i] = narrow_f16(float(acc[i]));
    } else {
        DS_INDEPENDENT
        for (size_t i = 0; i < n; ++i) to[i] = T(acc[i]);
    }
}

template <int fold, class A>
inline A combine(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
        // 64-bit unsigned arithmetic: narrower types would be promoted to int, whose overflow is undefined.
        if constexpr (fold == SUM) return A(uint64_t(a) + uint64_t(b));
        if constexpr (fold == PRODUCT) return A(uint64_t(a) * uint64_t(b));
        if constexpr (fold == BAND) return A(a & b);
        if constexpr (fold == BOR) return A(a | b);
        if constexpr (fold == BXOR) return A(a ^ b);
        if constexpr (fold == MIN) return b < a ? b : a;
        return b > a ? b : a;
    } else {
        if constexpr (fold == SUM) return a + b;
        if constexpr (fold == PRODUCT) return a * b;
        if constexpr (fold == MIN) return (b < a || std::isnan(b)) ? b : a;
        return (b > a || std::isnan(b)) ? b : a;
    }
}

template <int fold, class A>
inline void fold_block(A* acc, const A* other, size_t n) {
    DS_INDEPENDENT
    for (size_t i = 0; i < n; ++i) acc[i] = combine<fold>(acc[i], other[i]);
}

// What to do with the N contributions of a run of elements.
struct Rule {
    int in = F32, out = F32, fold = SUM;
    bool accumulate = false;  // add to what `out` holds
    bool scaled = false;
    double factor = 1.0;  // on the folded value of floats, before the one rounding
};

constexpr size_t BLOCK = 2048;  // elements; two blocks of fp32 stay in a first-level cache

template <class T, class O, class A, int fold>
void reduce_as(const void* const* parts, int count, void* out, size_t begin, size_t n, const Rule& rule) {
    alignas(64) A acc[BLOCK];
    alignas(64) A other[BLOCK];
    O* target = static_cast<O*>(out) + begin;
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        load(acc, static_cast<const T*>(parts[0]) + at, m);
        for (int p = 1; p < count; ++p) {
            if constexpr (std::is_same_v<T, A>) {
                fold_block<fold>(acc, static_cast<const A*>(parts[p]) + at, m);
            } else {
                load(other, static_cast<const T*>(parts[p]) + at, m);
                fold_block<fold>(acc, other, m);
            }
        }
        if constexpr (std::is_floating_point_v<A>) {
            if (rule.scaled) {
                A factor = A(rule.factor);
                DS_INDEPENDENT
                for (size_t i = 0; i < m; ++i) acc[i] *= factor;
            }
            if (rule.accumulate) {
                load(other, target + at, m);
                fold_block<SUM>(acc, other, m);
            }
        }
        store(target + at, acc, m);
    }
}

using Reduce = void (*)(const void* const*, int, void*, size_t, size_t, const Rule&);

template <class T, class O, class A>
Reduce pick_fold(int fold) {
    switch (fold) {
        case SUM: return reduce_as<T, O, A, SUM>;
        case PRODUCT: return reduce_as<T, O, A, PRODUCT>;
        case MIN: return reduce_as<T, O, A, MIN>;
        case MAX: return reduce_as<T, O, A, MAX>;
        default: break;
    }
    if constexpr (std::is_integral_v<A>) {
        if (fold == BAND) return reduce_as<T, O, A, BAND>;
        if (fold == BOR) return reduce_as<T, O, A, BOR>;
        if (fold == BXOR) return reduce_as<T, O, A, BXOR>;
    }
    return nullptr;
}

template <class T, int same>
Reduce pick_output(int out, int fold) {
    constexpr bool wide = std::is_same_v<T, double>;
    using A = std::conditional_t<wide, double, float>;
    if (out == same) return pick_fold<T, T, A>(fold);
    if (fold != SUM) return nullptr;
    switch (out) {
        case F32: return reduce_as<T, float, A, SUM>;
        case F64: return reduce_as<T, double, double, SUM>;
        case BF16: return reduce_as<T, bf16, A, SUM>;
        case F16: return reduce_as<T, f16, A, SUM>;
        default: return nullptr;
    }
}

// The kernel of a rule; null when there is none. `parts` of it are at the run's first element, `out` at the tensor's.
inline Reduce kernel_of(const Rule& rule) {
    switch (rule.in) {
        case F32: return pick_output<float, F32>(rule.out, rule.fold);
        case F64: return pick_output<double, F64>(rule.out, rule.fold);
        case BF16: return pick_output<bf16, BF16>(rule.out, rule.fold);
        case F16: return pick_output<f16, F16>(rule.out, rule.fold);
        default: break;
    }
    if (rule.in != rule.out || rule.accumulate || rule.scaled) return nullptr;
    switch (rule.in) {
        case I8: return pick_fold<int8_t, int8_t, int8_t>(rule.fold);
        case U8: return pick_fold<uint8_t, uint8_t, uint8_t>(rule.fold);
        case I16: return pick_fold<int16_t, int16_t, int16_t>(rule.fold);
        case I32: return pick_fold<int32_t, int32_t, int32_t>(rule.fold);
        case I64: return pick_fold<int64_t, int64_t, int64_t>(rule.fold);
        default: return nullptr;
    }
}

}  // namespace ds
