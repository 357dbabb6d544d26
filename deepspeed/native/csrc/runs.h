// A rule applied to a run of elements of one tensor, its gradient, its states and its copy.
//
// Owns: which mixtures of dtypes have a loop of their own, with conversions in registers, and which go by way of fp32
// scratch; vectors first, then the elements beyond the last whole vector.
// Invariant: the numbers do not depend on the way.
#pragma once

#include "numbers.h"
#include "update_rules.h"

namespace runs {

using numbers::BF16;
using numbers::F16;
using numbers::F32;
using numbers::NONE;
using numbers::convert;
using numbers::fetch;
using numbers::put;
using numbers::width;
using rules::GENERAL;
using vectors::Bits;
using vectors::LANES;
using vectors::Vec;

constexpr int64_t BLOCK = 1024;  // elements; the fp32 scratch of a block is 4 KiB per tensor and stays in the first cache

enum Place : int { PARAM = 0, GRAD = 1, STATE = 2, OUT = 5, PLACES = 6 };

struct Run {
  char* at[PLACES];  // first elements: param, grad, three states, copy (null: none)
  int kind[PLACES];
  int64_t count;
  float scale;  // of the gradients

  Run from(int64_t element) const {
    Run rest = *this;
    for (int place = 0; place < PLACES; ++place)
      if (at[place] != nullptr) rest.at[place] += element * width(kind[place]);
    rest.count -= element;
    return rest;
  }
};

// A mixture of kinds as one number.
constexpr int mixture(int param, int grad, int state, int out) { return param | grad << 4 | state << 8 | out << 12; }
constexpr int ALL_F32 = mixture(F32, F32, F32, NONE);
constexpr int ALL_BF16 = mixture(BF16, BF16, BF16, NONE);

// -1 if the states differ from each other.
inline int mixture_of(const Run& run, int states) {
  for (int s = 1; s < states; ++s)
    if (run.kind[STATE + s] != run.kind[STATE]) return -1;
  const int out = run.at[OUT] == nullptr ? int(NONE) : run.kind[OUT];
  return mixture(run.kind[PARAM], run.kind[GRAD], run.kind[STATE], out);
}

// Not inlined: loops are long, and one copy of each keeps compiling fast.
template <class F, class Step, int MIXTURE>
__attribute__((noinline)) void loop(const Step& given, const Run& whole) {
  const Step step = given;  // bytes written through the addresses below may be anything but a local copy
  constexpr int param = MIXTURE & 15, grad = MIXTURE >> 4 & 15, kind = MIXTURE >> 8 & 15, out = MIXTURE >> 12;
  const F scale = rules::all<F>(whole.scale);
  // The general form of Adam has room for a state that not every row has.
  const int states = Step::states - (Step::last_is_optional && whole.at[STATE + Step::states - 1] == nullptr);
  const Run run = whole;
  for (int64_t i = 0; i < run.count; i += numbers::count_of<F>()) {
    F state[Step::states], value = fetch<param, F>(run.at[PARAM], i);
#pragma GCC unroll 4
    for (int s = 0; s < Step::states; ++s) state[s] = s < states ? fetch<kind, F>(run.at[STATE + s], i) : F{};
    step.template run<false>(value, fetch<grad, F>(run.at[GRAD], i) * scale, state);
#pragma GCC unroll 4
    for (int s = 0; s < Step::states; ++s)
      if (s < states) put<kind>(run.at[STATE + s], i, state[s]);
    put<param>(run.at[PARAM], i, value);
    if (out != NONE) put<out>(run.at[OUT], i, value);
  }
}

// Two vectors of bf16 numbers in the halves of one vector of bits, so that nothing has to be shuffled.
template <class Step>
struct Halves {
  static constexpr int places = 2 + Step::states;
  Bits packed[places];

  // The numbers after the update, of the upper or the lower halves.
  template <bool FINITE>
  inline void update(const Step& step, bool upper, Vec scale, Vec* value) const {
#pragma GCC unroll 8
    for (int place = 0; place < places; ++place)
      value[place] = (Vec)(upper ? packed[place] & 0xffff0000u : packed[place] << 16);
    step.template run<FINITE>(value[PARAM], value[GRAD] * scale, value + STATE);
  }
};

// Rare, and so not part of the loop: with infinities or NaN.
template <class Step>
__attribute__((noinline)) void careful_halves(const Step& step, const Run& run, int64_t i) {
  Halves<Step> halves;
  Vec lower[halves.places], upper[halves.places];
  for (int place = 0; place < halves.places; ++place) halves.packed[place] = vectors::load<Bits>(run.at[place] + 2 * i);
  halves.template update<false>(step, false, rules::all<Vec>(run.scale), lower);
  halves.template update<false>(step, true, rules::all<Vec>(run.scale), upper);
  for (int place = 0; place < halves.places; ++place)
    if (place != GRAD)
      vectors::store(run.at[place] + 2 * i, numbers::bf16_bits(lower[place]) | numbers::bf16_bits(upper[place]) << 16);
}

// All bf16.
template <class Step>
__attribute__((noinline)) void loop_in_halves(const Step& given, const Run& whole) {
  const Step step = given;
  const Run run = whole;
  const Vec scale = rules::all<Vec>(run.scale);
  Halves<Step> halves;
  constexpr int places = halves.places;
  for (int64_t i = 0; i < run.count; i += 2 * LANES) {
#pragma GCC unroll 8
    for (int place = 0; place < places; ++place) halves.packed[place] = vectors::load<Bits>(run.at[place] + 2 * i);
    Vec lower[places], upper[places];
    halves.template update<true>(step, false, scale, lower);
    halves.template update<true>(step, true, scale, upper);
    Vec sum = lower[PARAM] + upper[PARAM];
#pragma GCC unroll 8
    for (int place = STATE; place < places; ++place) sum = sum + (lower[place] + upper[place]);
    if (__builtin_expect(!vectors::all_finite(sum), 0)) {
      careful_halves(given, whole, i);
      continue;
    }
#pragma GCC unroll 8
    for (int place = 0; place < places; ++place) {
      if (place == GRAD) continue;
      const Bits below = numbers::bf16_above(lower[place]) >> 16, above = numbers::bf16_above(upper[place]);
      vectors::store(run.at[place] + 2 * i, below | (above & 0xffff0000u));
    }
  }
}

template <class Rule>
struct InOneForm {
  const Rule& rule;
  const Run& run;
  int mixture;

  template <int FORM>
  void of() const {
    const typename Rule::template Step<Vec, FORM> step(rule);
    using Step = typename Rule::template Step<Vec, FORM>;
    switch (mixture) {
      case ALL_F32: return loop<Vec, Step, ALL_F32>(step, run);
      case ALL_BF16: return loop_in_halves(step, run);
      case runs::mixture(F32, BF16, F32, BF16): return loop<Vec, Step, runs::mixture(F32, BF16, F32, BF16)>(step, run);
      case runs::mixture(F32, F32, F32, BF16): return loop<Vec, Step, runs::mixture(F32, F32, F32, BF16)>(step, run);
    }
  }
};

inline bool has_loop(int mixture) {
  return mixture == ALL_F32 || mixture == ALL_BF16 || mixture == runs::mixture(F32, BF16, F32, BF16) ||
         mixture == runs::mixture(F32, F32, F32, BF16);
}

// fp32 throughout; any count.
template <class Rule>
void apply_f32(const Rule& rule, const Run& run, int64_t lanes) {
  Run vectors = run;
  vectors.count = run.count - run.count % lanes;
  if (vectors.count) {
    if (rule.form != GENERAL) {
      rule.with_form(InOneForm<Rule>{rule, vectors, ALL_F32});
    } else {
      using Step = typename Rule::template Step<Vec, GENERAL>;
      loop<Vec, Step, ALL_F32>(Step(rule), vectors);
    }
  }
  if (vectors.count < run.count) {
    using Step = typename Rule::template Step<float, GENERAL>;
    loop<float, Step, ALL_F32>(Step(rule), run.from(vectors.count));
  }
}

// Any mixture of kinds, by way of fp32 scratch, a block at a time.
template <class Rule>
__attribute__((noinline)) void apply_staged(const Rule& rule, const Run& run, int64_t lanes) {
  alignas(64) char scratch[OUT][4 * BLOCK];
  const int used = STATE + rule.states;
  for (int64_t start = 0; start < run.count; start += BLOCK) {
    Run block = run.from(start);
    if (block.count > BLOCK) block.count = BLOCK;
    Run staged = block;
    staged.at[OUT] = nullptr;
    for (int place = 0; place < used; ++place) {
      if (block.kind[place] == F32) continue;
      staged.at[place] = scratch[place];
      staged.kind[place] = F32;
      convert(block.at[place], block.kind[place], scratch[place], F32, block.count, 1.0f);
    }
    apply_f32(rule, staged, lanes);
    for (int place = 0; place < used; ++place)
      if (place != GRAD && block.kind[place] != F32)
        convert(scratch[place], F32, block.at[place], block.kind[place], block.count, 1.0f);
    // Of what was stored: the new value of a bf16 parameter is the rounded one.
    if (block.at[OUT] != nullptr)
      convert(block.at[PARAM], block.kind[PARAM], block.at[OUT], block.kind[OUT], block.count, 1.0f);
  }
}

// Updates the run, which begins at a multiple of 2 * LANES elements of its tensor.
template <class Rule>
void apply(const Rule& rule, const Run& run) {
  const int mixture = mixture_of(run, rule.states), kinds = mixture & 0xfff;
  // Where everything is in the same 16 bits, torch's kernel takes two vectors of fp32 at a time.
  const bool low = mixture >= 0 && (kinds == (ALL_BF16 & 0xfff) || kinds == runs::mixture(F16, F16, F16, 0));
  const int64_t lanes = low ? 2 * LANES : LANES;
  if (mixture == ALL_F32) return apply_f32(rule, run, lanes);
  if (rule.form == GENERAL || !has_loop(mixture)) return apply_staged(rule, run, lanes);
  Run vectors = run;
  vectors.count = run.count - run.count % lanes;
  rule.with_form(InOneForm<Rule>{rule, vectors, mixture});
  if (vectors.count < run.count) apply_staged(rule, run.from(vectors.count), lanes);
}

}  // namespace runs
