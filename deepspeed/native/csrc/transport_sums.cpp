// The loops of the reductions; see transport_sums.h.
#include "transport_sums.h"

#include <cstring>
#include <type_traits>

#if defined(__clang__)
#define DS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DS_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ds {
namespace {

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
// The compilers' own names of single instructions: <immintrin.h> would take a second to read.
typedef short Eight16 __attribute__((vector_size(16)));
typedef float Four32 __attribute__((vector_size(16)));
typedef float Eight32 __attribute__((vector_size(32)));

constexpr int NEAREST = 0;  // to nearest even, whatever the control word says

inline Eight32 widen_eight(Eight16 halves) {
#if defined(__clang__)
    typedef _Float16 Numbers __attribute__((vector_size(16)));
    return __builtin_convertvector((Numbers)halves, Eight32);  // the one instruction, which has no name here
#else
    return __builtin_ia32_vcvtph2ps256(halves);
#endif
}
inline float widen(f16 value) { return widen_eight(Eight16{short(value.bits)})[0]; }
inline f16 narrow_f16(float value) { return f16{uint16_t(__builtin_ia32_vcvtps2ph(Four32{value}, NEAREST)[0])}; }
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
            for (; i + 8 <= n; i += 8) {
                Eight16 halves;
                std::memcpy(&halves, from + i, sizeof halves);
                const Eight32 values = widen_eight(halves);
                std::memcpy(acc + i, &values, sizeof values);
            }
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
            for (; i + 8 <= n; i += 8) {
                Eight32 values;
                std::memcpy(&values, acc + i, sizeof values);
                const Eight16 halves = __builtin_ia32_vcvtps2ph256(values, NEAREST);
                std::memcpy(to + i, &halves, sizeof halves);
            }
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
        if constexpr (fold == MIN) return (b < a || b != b) ? b : a;
        return (b > a || b != b) ? b : a;
    }
}

template <int fold, class A>
void fold_block(void* to, const void* left, const void* right, size_t n) {
    A* out = static_cast<A*>(to);
    const A *a = static_cast<const A*>(left), *b = static_cast<const A*>(right);
    DS_INDEPENDENT
    for (size_t i = 0; i < n; ++i) out[i] = combine<fold>(a[i], b[i]);
}

constexpr size_t BLOCK = 2048;  // elements; two blocks of fp64 stay in a first-level cache

template <class T, class A>
void load_as(void* wide, const void* from, size_t n) {
    load(static_cast<A*>(wide), static_cast<const T*>(from), n);
}

template <class T, class A>
void store_as(void* to, const void* wide, size_t n) {
    store(static_cast<T*>(to), static_cast<const A*>(wide), n);
}

template <class A>
void scale_as(void* wide, double factor, size_t n) {
    A* values = static_cast<A*>(wide);
    A by = A(factor);
    DS_INDEPENDENT
    for (size_t i = 0; i < n; ++i) values[i] *= by;
}

template <class A>
Combine pick_fold(int fold) {
    switch (fold) {
        case SUM: return fold_block<SUM, A>;
        case PRODUCT: return fold_block<PRODUCT, A>;
        case MIN: return fold_block<MIN, A>;
        case MAX: return fold_block<MAX, A>;
        default: break;
    }
    if constexpr (std::is_integral_v<A>) {
        if (fold == BAND) return fold_block<BAND, A>;
        if (fold == BOR) return fold_block<BOR, A>;
        if (fold == BXOR) return fold_block<BXOR, A>;
    }
    return nullptr;
}

inline Combine fold_of(int dtype, int fold) {
    switch (dtype) {
        case F32: return pick_fold<float>(fold);
        case F64: return pick_fold<double>(fold);
        case I8: return pick_fold<int8_t>(fold);
        case U8: return pick_fold<uint8_t>(fold);
        case I16: return pick_fold<int16_t>(fold);
        case I32: return pick_fold<int32_t>(fold);
        case I64: return pick_fold<int64_t>(fold);
        default: return nullptr;
    }
}

template <class A>
Load load_of(int dtype) {
    switch (dtype) {
        case F32: return load_as<float, A>;
        case F64: return load_as<double, A>;
        case BF16: return load_as<bf16, A>;
        default: return load_as<f16, A>;
    }
}

template <class A>
Store store_of(int dtype) {
    switch (dtype) {
        case F32: return store_as<float, A>;
        case F64: return store_as<double, A>;
        case BF16: return store_as<bf16, A>;
        default: return store_as<f16, A>;
    }
}

}  // namespace

Kernel::Kernel(const Rule& rule) : rule_(rule), in_width_(size_of(rule.in)), out_width_(size_of(rule.out)) {
    if (rule.in > F16 || rule.out > F16) {  // integers: as they are
        if (rule.in == rule.out && !rule.accumulate && !rule.scaled) fold_ = fold_of(rule.in, rule.fold);
        wide_ = rule.in;
        return;
    }
    bool doubles = rule.in == F64 || rule.out == F64;
    wide_ = doubles ? F64 : F32;
    fold_ = fold_of(wide_, rule.fold);
    add_ = fold_of(wide_, SUM);
    load_ = doubles ? load_of<double>(rule.in) : load_of<float>(rule.in);
    load_out_ = doubles ? load_of<double>(rule.out) : load_of<float>(rule.out);
    store_ = doubles ? store_of<double>(rule.out) : store_of<float>(rule.out);
    scale_ = doubles ? scale_as<double> : scale_as<float>;
}

void Kernel::run(const void* const* parts, int count, void* out, size_t n) const {
    alignas(64) char acc[BLOCK * 8];
    alignas(64) char other[BLOCK * 8];
    // Two parts in the type of the arithmetic and of the result need no memory in between.
    bool direct = count == 2 && rule_.in == wide_ && rule_.out == wide_ && !rule_.accumulate;
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        char* target = static_cast<char*>(out) + at * out_width_;
        char* total = direct ? target : acc;
        const void* first = wide(parts[0], at, m, acc);
        for (int p = 1; p < count; ++p) {
            fold_(total, first, wide(parts[p], at, m, other), m);
            first = total;
        }
        if (rule_.scaled) scale_(total, rule_.factor, m);
        if (rule_.accumulate) {
            load_out_(other, target, m);
            add_(total, total, other, m);
        }
        if (direct) continue;
        if (rule_.out == wide_) std::memcpy(target, total, m * out_width_);
        else store_(target, total, m);
    }
}

const void* Kernel::wide(const void* part, size_t at, size_t n, void* room) const {
    const char* from = static_cast<const char*>(part) + at * in_width_;
    if (rule_.in == wide_) return from;
    load_(room, from, n);
    return room;
}

}  // namespace ds
