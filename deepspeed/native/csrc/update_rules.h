// The arithmetic of the optimizers.
//
// Owns: Adam, Adagrad and Lion: what happens to one element, or to a vector of them, in fp32. Does not own: memory,
// dtypes, threads (runs.h, optimizers.cpp).
// Invariant: same operations in the same order as torch's fused kernels (and torch's foreach operations for Lion), so
// that fp32 results are equal bit by bit where torch was compiled for the same instruction set. Those kernels treat the
// last elements of a tensor that do not fill a vector with another order of operations; F = float does the same.
// Compiled with -ffp-contract=off: a multiplication and an addition are one operation only where it is written so.
//
// A rule holds the numbers of a step, made from eight doubles (the order is that of the Python classes). Step<F, FORM>
// is one form of it in registers, in three parts that a loop may do at different times: `first` changes the states and
// returns what `last` is to be given, `denominator` has the long operations (nothing, where not `divides`), `last`
// returns the new parameter. Forms are compiled on their own where they are common; GENERAL decides at run time and
// serves the others, and all tails.
#pragma once

#include "vectors.h"

namespace rules {

using namespace vectors;

constexpr int GENERAL = -1;

template <class F>
constexpr bool is_vector = sizeof(F) > sizeof(float);

template <class F>
inline F all(float value) {
  return F{} + value;
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

template <class F>
inline F lerp(F start, F end, F coefficient, bool small) {
  return multiply_add(coefficient, end - start, small ? start : end);
}

// Correctly rounded division of a square root by a constant b, 0 < b <= 1, in five operations beside the divider.
// With y = 1/b rounded and y + z closer to it, a * y + (a * z) is within one unit in the last place of a / b; then the
// remainder a - q * b is exact, and q + remainder * y is a / b rounded (Markstein, "Computation of elementary functions
// on the IBM RISC System/6000 processor", 1990, theorem 8). Square roots are 0 or between 2^-75 and 2^64, so nothing
// here is subnormal or overflows. Infinity and NaN are their own quotients, while the formula makes NaN of both; a
// quotient is never smaller than `a`, so that the last operation changes nothing else.
template <class F>
struct Divisor {
  F b, y, z;
  explicit Divisor(float divisor) {
    const double exact = 1.0 / double(divisor);
    b = all<F>(divisor);
    y = all<F>(float(exact));
    z = all<F>(float(exact - double(float(exact))));
  }
  inline F under(F a) const {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    const F near = multiply_add(a, y, a * z);
    return larger(multiply_add(multiply_add(-near, b, a), y, near), a);
#else
    return a / b;
#endif
  }
};

struct Adam {
  static constexpr int DECOUPLED = 1, AMSGRAD = 2;        // flags
  static constexpr int NO_DECAY = 0, L2 = 1, SHRINK = 2;  // forms

  Weight average;
  float minus_step_size, beta2, one_minus_beta2, eps, decay, bias2_sqrt;
  int decay_form, form, states;
  bool amsgrad;

  explicit Adam(const double* n) : average(1.0 - n[1]) {
    const double lr = n[0], weight_decay = n[4];
    const int flags = int(n[7]);
    minus_step_size = float(-(lr / n[5]));
    beta2 = float(n[2]);
    one_minus_beta2 = float(1.0 - n[2]);
    eps = float(n[3]);
    bias2_sqrt = float(n[6]);
    decay_form = weight_decay == 0.0 ? NO_DECAY : flags & DECOUPLED ? SHRINK : L2;
    decay = decay_form == SHRINK ? float(1.0 - lr * weight_decay) : float(weight_decay);
    amsgrad = flags & AMSGRAD;
    states = amsgrad ? 3 : 2;
    form = amsgrad || !average.small ? GENERAL : decay_form;
  }

  template <class F, int FORM>
  struct Step {
    static constexpr bool divides = true, last_is_optional = FORM == GENERAL;
    static constexpr int states = last_is_optional ? 3 : 2;
    F weight, b2, c2, e, s, d;
    Divisor<F> bias;
    int decay_form;
    bool small, amsgrad;

    explicit Step(const Adam& a)
        : weight(all<F>(a.average.coefficient)), b2(all<F>(a.beta2)), c2(all<F>(a.one_minus_beta2)), e(all<F>(a.eps)),
          s(all<F>(a.minus_step_size)), d(all<F>(a.decay)), bias(a.bias2_sqrt), decay_form(a.decay_form),
          small(a.average.small), amsgrad(a.amsgrad) {}

    inline F first(F param, F grad, F* state, F& squared) const {
      const F g = (FORM == GENERAL ? decay_form : FORM) == L2 ? multiply_add(param, d, grad) : grad;
      const F mean = lerp(state[0], g, weight, FORM == GENERAL ? small : true), before = state[1];
      const F square = is_vector<F> ? multiply_add(c2 * g, g, b2 * before) : multiply_add(b2, before, c2 * g * g);
      state[0] = mean;
      state[1] = squared = square;
      if constexpr (FORM == GENERAL) {
        // The vector form keeps a NaN of either side, the scalar form that of the maximum alone.
        const F larger = state[2] < square ? square : state[2];
        const F most = !is_vector<F> ? larger : square != square ? square : larger;
        if (amsgrad) squared = most;
        state[2] = most;
      }
      return mean;
    }
    inline F denominator(F squared) const { return bias.under(square_root(squared)) + e; }
    inline F last(F param, F mean, F denominator) const {
      const F w = (FORM == GENERAL ? decay_form : FORM) == SHRINK ? param * d : param;
      return w + s * mean / denominator;
    }
  };

  template <class Visit>
  void with_form(Visit visit) const {
    if (form == NO_DECAY) visit.template of<NO_DECAY>();
    else if (form == L2) visit.template of<L2>();
    else if (form == SHRINK) visit.template of<SHRINK>();
  }
};

struct Adagrad {
  static constexpr int NO_DECAY = 0, DECAY = 1;  // forms
  static constexpr int states = 1;
  float rate, eps, decay;
  int form;

  explicit Adagrad(const double* n)
      : rate(float(n[0])), eps(float(n[1])), decay(float(n[2])), form(n[2] != 0.0 ? DECAY : NO_DECAY) {}

  template <class F, int FORM>
  struct Step {
    static constexpr bool divides = true, last_is_optional = false;
    static constexpr int states = 1;
    F r, e, d;
    int form;

    explicit Step(const Adagrad& a) : r(all<F>(a.rate)), e(all<F>(a.eps)), d(all<F>(a.decay)), form(a.form) {}

    inline F first(F param, F grad, F* state, F& squared) const {
      const F g = (FORM == GENERAL ? form : FORM) == DECAY ? multiply_add(param, d, grad) : grad;
      state[0] = squared = multiply_add(g, g, state[0]);
      return r * g;
    }
    inline F denominator(F squared) const { return square_root(squared) + e; }
    inline F last(F param, F change, F denominator) const { return param - change / denominator; }
  };

  template <class Visit>
  void with_form(Visit visit) const {
    if (form == DECAY) visit.template of<DECAY>();
    else visit.template of<NO_DECAY>();
  }
};

struct Lion {
  static constexpr int COMMON = 0;  // form: both weights below one half
  static constexpr int states = 1;
  Weight direction, momentum;
  float rate, kept;
  int form;

  explicit Lion(const double* n)
      : direction(1.0 - n[1]), momentum(1.0 - n[2]), rate(float(n[0])), kept(float(1.0 - n[0] * n[3])),
        form(direction.small && momentum.small ? COMMON : GENERAL) {}

  template <class F, int FORM>
  struct Step {
    static constexpr bool divides = false, last_is_optional = false;
    static constexpr int states = 1;
    F aim, average, r, k;
    bool small_aim, small_average;

    explicit Step(const Lion& l)
        : aim(all<F>(l.direction.coefficient)), average(all<F>(l.momentum.coefficient)), r(all<F>(l.rate)),
          k(all<F>(l.kept)), small_aim(l.direction.small), small_average(l.momentum.small) {}

    inline F first(F, F grad, F* state, F&) const {
      const F towards = lerp(state[0], grad, aim, FORM == COMMON || small_aim);
      state[0] = lerp(state[0], grad, average, FORM == COMMON || small_average);
      return towards;
    }
    inline F denominator(F none) const { return none; }
    inline F last(F param, F towards, F) const {
      // The sign of 0 and of NaN is 0. Multiplying by 1 changes nothing, so there is no form without decay.
      const F none = all<F>(0.0f);
      return param * k - ((towards > none ? r : none) - (towards < none ? r : none));
    }
  };

  template <class Visit>
  void with_form(Visit visit) const {
    if (form == COMMON) visit.template of<COMMON>();
  }
};

}  // namespace rules
