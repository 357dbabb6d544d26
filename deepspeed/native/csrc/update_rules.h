// The arithmetic of the optimizers on runs of fp32 values.
//
// Owns: Adam, Adagrad and Lion, element by element. Does not own: dtypes, threads, which tensors.
// Invariant: same operations in the same order as torch's fused kernels (and torch's foreach operations for Lion), so
// that fp32 results are equal bit by bit where torch was compiled for the same instruction set. Those kernels treat the
// last elements of a tensor that do not fill a vector with another order of operations; `tail` does the same.
// Compiled with -ffp-contract=off: a multiplication and an addition are one operation only where it is written so.
#pragma once

#include "numbers.h"

namespace rules {

using numbers::multiply_add;

// torch's lerp: start + weight * (end - start), from the nearer end.
struct Lerp {
  bool small;
  float weight, coefficient;
  explicit Lerp(double w) : weight(float(w)) {
    small = std::fabs(weight) < 0.5f;
    coefficient = small ? weight : weight - 1.0f;
  }
  inline float operator()(float start, float end) const {
    return multiply_add(coefficient, end - start, small ? start : end);
  }
};

// Hyper-parameters of one run of rows, as doubles; the order is that of deepspeed/ops/native_kernels.py.
struct AdamNumbers {
  double lr, beta1, beta2, eps, weight_decay, bias1, bias2_sqrt, flags;
};
enum AdamFlags : int { DECOUPLED = 1, AMSGRAD = 2 };

struct Adam {
  static constexpr int STATES = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  float step_size, beta2, one_minus_beta2, eps, weight_decay, shrink, bias2_sqrt;
  Lerp average;
  bool decoupled, decays, amsgrad;

  explicit Adam(const double* numbers)
      : average(1.0 - reinterpret_cast<const AdamNumbers*>(numbers)->beta1) {
    const AdamNumbers& n = *reinterpret_cast<const AdamNumbers*>(numbers);
    step_size = float(-(n.lr / n.bias1));
    beta2 = float(n.beta2);
    one_minus_beta2 = float(1.0 - n.beta2);
    eps = float(n.eps);
    weight_decay = float(n.weight_decay);
    shrink = float(1.0 - n.lr * n.weight_decay);
    bias2_sqrt = float(n.bias2_sqrt);
    decays = n.weight_decay != 0.0;
    decoupled = int(n.flags) & DECOUPLED;
    amsgrad = int(n.flags) & AMSGRAD;
  }

  int states() const { return amsgrad ? 3 : 2; }

  template <int DECAY, bool AMSGRAD_FORM, bool TAIL>
  ONE_COPY void loop(float* __restrict p, const float* __restrict grad, float* __restrict m, float* __restrict v,
            float* __restrict most, int64_t count) const {
    const Lerp lerp = average;
    const float b2 = beta2, c2 = one_minus_beta2, e = eps, s = step_size, bias = bias2_sqrt;
    const float decay = weight_decay, kept = shrink;
    for (int64_t i = 0; i < count; ++i) {
      float g = grad[i], w = p[i];
      if (DECAY == 1) g = multiply_add(w, decay, g);
      if (DECAY == 2) w = w * kept;
      const float mean = lerp(m[i], g);
      const float square = TAIL ? multiply_add(b2, v[i], c2 * g * g) : multiply_add(c2 * g, g, b2 * v[i]);
      m[i] = mean;
      v[i] = square;
      float used = square;
      if (AMSGRAD_FORM) {
        const float before = most[i];
        // The vector form of torch keeps a NaN of either side, the scalar form that of the maximum alone.
        used = before < square ? square : before;
        if (!TAIL) used = square != square ? square : used;
        most[i] = used;
      }
      p[i] = w + s * mean / (std::sqrt(used) / bias + e);
    }
  }

  template <bool TAIL>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    float *m = state[0], *v = state[1], *x = state[2];
    if (amsgrad) {
      if (!decays) loop<0, true, TAIL>(p, g, m, v, x, count);
      else if (decoupled) loop<2, true, TAIL>(p, g, m, v, x, count);
      else loop<1, true, TAIL>(p, g, m, v, x, count);
    } else {
      if (!decays) loop<0, false, TAIL>(p, g, m, v, nullptr, count);
      else if (decoupled) loop<2, false, TAIL>(p, g, m, v, nullptr, count);
      else loop<1, false, TAIL>(p, g, m, v, nullptr, count);
    }
  }
};

struct Adagrad {
  static constexpr int STATES = 1;
  float rate, eps, weight_decay;
  bool decays;

  explicit Adagrad(const double* n)  // lr, eps, weight_decay
      : rate(float(n[0])), eps(float(n[1])), weight_decay(float(n[2])), decays(n[2] != 0.0) {}

  int states() const { return 1; }

  template <bool DECAY>
  ONE_COPY void loop(float* __restrict p, const float* __restrict grad, float* __restrict sum, int64_t count) const {
    const float r = rate, e = eps, decay = weight_decay;
    for (int64_t i = 0; i < count; ++i) {
      const float w = p[i], g = DECAY ? multiply_add(w, decay, grad[i]) : grad[i];
      const float squares = multiply_add(g, g, sum[i]);
      sum[i] = squares;
      p[i] = w - r * g / (std::sqrt(squares) + e);
    }
  }

  template <bool TAIL>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    if (decays) loop<true>(p, g, state[0], count);
    else loop<false>(p, g, state[0], count);
  }
};

struct Lion {
  static constexpr int STATES = 1;
  float rate, shrink;
  Lerp direction, momentum;
  bool decays;

  explicit Lion(const double* n)  // lr, beta1, beta2, weight_decay
      : rate(float(-n[0])), shrink(float(1.0 - n[0] * n[3])), direction(1.0 - n[1]), momentum(1.0 - n[2]),
        decays(n[3] != 0.0) {}

  int states() const { return 1; }

  template <bool DECAY>
  ONE_COPY void loop(float* __restrict p, const float* __restrict grad, float* __restrict m, int64_t count) const {
    const Lerp aim = direction, average = momentum;
    const float r = rate, kept = shrink;
    for (int64_t i = 0; i < count; ++i) {
      const float g = grad[i], before = m[i], w = DECAY ? p[i] * kept : p[i];
      const float towards = aim(before, g);
      // The sign of 0 and of NaN is 0.
      const float step = towards > 0.0f ? r : towards < 0.0f ? -r : 0.0f;
      p[i] = w + step;
      m[i] = average(before, g);
    }
  }

  template <bool TAIL>
  void apply(float* p, const float* g, float* const* state, int64_t count) const {
    if (decays) loop<true>(p, g, state[0], count);
    else loop<false>(p, g, state[0], count);
  }
};

}  // namespace rules
