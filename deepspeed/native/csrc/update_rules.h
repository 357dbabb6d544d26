// The arithmetic of the optimizers on runs of fp32 values.
//
// Owns: Adam, Adagrad and Lion, element by element. Does not own: dtypes, threads, which tensors.
// Invariant: same operations in the same order as torch's fused kernels (and torch's foreach operations for Lion), so
// that fp32 results are equal bit by bit where torch was compiled for the same instruction set. Those kernels treat the
// last elements of a tensor that do not fill a vector with another order of operations; F = float does the same.
// Compiled with -ffp-contract=off: a multiplication and an addition are one operation only where it is written so.
//
// A rule is made from eight doubles (the order is that of the Python classes) and has `apply<F>(param, grad, state,
// count)`, where F is Vec and count a multiple of LANES, or F is float. One copy of each loop: they are called per
// block, and inlining them everywhere would make compiling slow.
#pragma once

#include "vectors.h"

namespace rules {

using namespace vectors;

template <class F>
constexpr int64_t step_of() {
  return int64_t(sizeof(F) / sizeof(float));
}

// torch's lerp: start + weight * (end - start), taken from the nearer end.
struct Weight {
  bool small;
  float coefficient;
  explicit Weight(double w) {
    const float weight = float(w);
    small = __builtin_fabsf(weight) < 0.5f;
    coefficient = small ? weight : weight - 1.0f;
  }
};

template <bool SMALL, class F>
inline F lerp(F start, F end, F coefficient) {
  return multiply_add(coefficient, end - start, SMALL ? start : end);
}

template <class F>
inline F all(float value) {
  return F{} + value;
}

struct Adam {
  static constexpr int DECOUPLED = 1, AMSGRAD = 2;  // flags
  static constexpr int NO_DECAY = 0, L2 = 1, SHRINK = 2;

  Weight average;
  float minus_step_size, beta2, one_minus_beta2, eps, decay, bias2_sqrt;
  int form;
  bool amsgrad;

  explicit Adam(const double* n) : average(1.0 - n[1]) {
    const double lr = n[0], weight_decay = n[4];
    const int flags = int(n[7]);
    minus_step_size = float(-(lr / n[5]));
    beta2 = float(n[2]);
    one_minus_beta2 = float(1.0 - n[2]);
    eps = float(n[3]);
    bias2_sqrt = float(n[6]);
    form = weight_decay == 0.0 ? NO_DECAY : flags & DECOUPLED ? SHRINK : L2;
    decay = form == SHRINK ? float(1.0 - lr * weight_decay) : float(weight_decay);
    amsgrad = flags & AMSGRAD;
  }

  int states() const { return amsgrad ? 3 : 2; }

  template <class F, int FORM, bool WITH_MAXIMUM, bool SMALL>
  __attribute__((noinline)) void loop(float* p, const float* grad, float* m, float* v, float* most,
                                      int64_t count) const {
    constexpr bool tail = step_of<F>() == 1;
    const F weight = all<F>(average.coefficient), b2 = all<F>(beta2), c2 = all<F>(one_minus_beta2);
    const F e = all<F>(eps), s = all<F>(minus_step_size), bias = all<F>(bias2_sqrt), d = all<F>(decay);
    for (int64_t i = 0; i < count; i += step_of<F>()) {
      F g = load<F>(grad + i), w = load<F>(p + i);
      const F before = load<F>(v + i);
      if (FORM == L2) g = multiply_add(w, d, g);
      if (FORM == SHRINK) w = w * d;
      const F mean = lerp<SMALL>(load<F>(m + i), g, weight);
      F square = tail ? multiply_add(b2, before, c2 * g * g) : multiply_add(c2 * g, g, b2 * before);
      store(m + i, mean);
      store(v + i, square);
      if (WITH_MAXIMUM) {
        const F maximum = load<F>(most + i);
        // The vector form keeps a NaN of either side, the scalar form that of the maximum alone.
        const F larger = maximum < square ? square : maximum;
        square = tail ? larger : square != square ? square : larger;
        store(most + i, square);
      }
      store(p + i, w + s * mean / (square_root(square) / bias + e));
    }
  }

  template <class F, int FORM, bool WITH_MAXIMUM>
  void pick(float* p, const float* g, float* const* state, int64_t count) const {
    if (average.small) loop<F, FORM, WITH_MAXIMUM, true>(p, g, state[0], state[1], state[2], count);
    else loop<F, FORM, WITH_MAXIMUM, false>(p, g, state[0], state[1], state[2], count);
  }

  template <class F>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    switch (form * 2 + amsgrad) {
      case NO_DECAY * 2: return pick<F, NO_DECAY, false>(p, g, state, count);
      case NO_DECAY * 2 + 1: return pick<F, NO_DECAY, true>(p, g, state, count);
      case L2 * 2: return pick<F, L2, false>(p, g, state, count);
      case L2 * 2 + 1: return pick<F, L2, true>(p, g, state, count);
      case SHRINK * 2: return pick<F, SHRINK, false>(p, g, state, count);
      default: return pick<F, SHRINK, true>(p, g, state, count);
    }
  }
};

struct Adagrad {
  float rate, eps, decay;

  explicit Adagrad(const double* n) : rate(float(n[0])), eps(float(n[1])), decay(float(n[2])) {}

  int states() const { return 1; }

  template <class F, bool DECAYS>
  __attribute__((noinline)) void loop(float* p, const float* grad, float* sum, int64_t count) const {
    const F r = all<F>(rate), e = all<F>(eps), d = all<F>(decay);
    for (int64_t i = 0; i < count; i += step_of<F>()) {
      const F w = load<F>(p + i);
      F g = load<F>(grad + i);
      if (DECAYS) g = multiply_add(w, d, g);
      const F squares = multiply_add(g, g, load<F>(sum + i));
      store(sum + i, squares);
      store(p + i, w - r * g / (square_root(squares) + e));
    }
  }

  template <class F>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    if (decay != 0.0f) loop<F, true>(p, g, state[0], count);
    else loop<F, false>(p, g, state[0], count);
  }
};

struct Lion {
  Weight direction, momentum;
  float rate, kept;

  explicit Lion(const double* n)
      : direction(1.0 - n[1]), momentum(1.0 - n[2]), rate(float(n[0])), kept(float(1.0 - n[0] * n[3])) {}

  int states() const { return 1; }

  template <class F, bool SMALL_DIRECTION, bool SMALL_MOMENTUM>
  __attribute__((noinline)) void loop(float* p, const float* grad, float* m, int64_t count) const {
    const F aim = all<F>(direction.coefficient), average = all<F>(momentum.coefficient);
    const F r = all<F>(rate), k = all<F>(kept), none = all<F>(0.0f);
    for (int64_t i = 0; i < count; i += step_of<F>()) {
      const F g = load<F>(grad + i), before = load<F>(m + i);
      const F towards = lerp<SMALL_DIRECTION>(before, g, aim);
      // The sign of 0 and of NaN is 0. Multiplying by 1 changes nothing, so there is no form without decay.
      const F step = (towards > none ? r : none) - (towards < none ? r : none);
      store(p + i, load<F>(p + i) * k - step);
      store(m + i, lerp<SMALL_MOMENTUM>(before, g, average));
    }
  }

  template <class F>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    if (direction.small && momentum.small) loop<F, true, true>(p, g, state[0], count);
    else if (direction.small) loop<F, true, false>(p, g, state[0], count);
    else if (momentum.small) loop<F, false, true>(p, g, state[0], count);
    else loop<F, false, false>(p, g, state[0], count);
  }
};

}  // namespace rules
