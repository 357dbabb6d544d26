// Reductions of the same-host transport: N contributions of one element type, folded in rank order.
//
// Floats are folded in fp32 (fp64 when either side is fp64), scaled once and rounded once, so an element's bits depend
// on its N contributions alone. Integers wrap. min and max hand on a nan. The loops are in transport_sums.cpp, which is
// compiled beside the rest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds {

// The numbers are those of comm/shm_channel.py.
enum Dtype : int { F32 = 0, F64, BF16, F16, I8, U8, I16, I32, I64, DTYPES };
enum Fold : int { SUM = 0, PRODUCT, MIN, MAX, BAND, BOR, BXOR, FOLDS };

inline size_t size_of(int dtype) {
    constexpr size_t sizes[DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
    return sizes[dtype];
}

// What to do with the N contributions of a run of elements.
struct Rule {
    int in = F32, out = F32, fold = SUM;
    bool accumulate = false;  // add to what `out` holds
    bool scaled = false;
    double factor = 1.0;  // on the folded value of floats, before the one rounding
};

using Load = void (*)(void* wide, const void* from, size_t n);
using Store = void (*)(void* to, const void* wide, size_t n);
using Combine = void (*)(void* to, const void* left, const void* right, size_t n);
using Scale = void (*)(void* wide, double factor, size_t n);

// The arithmetic of one rule: the type it runs in and the steps of a block.
class Kernel {
  public:
    explicit Kernel(const Rule& rule);

    bool exists() const { return fold_ != nullptr; }

    // Fold `n` elements of each of `parts` (2 or more) into `out`, which may be the memory of one of them.
    void run(const void* const* parts, int count, void* out, size_t n) const;

  private:
    const void* wide(const void* part, size_t at, size_t n, void* room) const;

    Rule rule_;
    int wide_ = F32;
    size_t in_width_, out_width_;
    Combine fold_ = nullptr, add_ = nullptr;
    Load load_ = nullptr, load_out_ = nullptr;
    Store store_ = nullptr;
    Scale scale_ = nullptr;
};

}  // namespace ds
