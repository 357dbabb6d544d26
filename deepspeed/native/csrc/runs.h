// A rule applied to a run of elements of one tensor, its gradient, its states and its copy.
//
// Owns: which mixtures of dtypes have a loop of their own, with conversions in registers, and which go by way of fp32
// scratch; what a loop does at the same time; vectors first, then the elements beyond the last whole vector.
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
using vectors::TORCH_LANES;
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

// Not inlined: loops are long, and one copy of each keeps compiling fast. This one: fp32, any form, vectors or floats.
template <class F, class Step>
__attribute__((noinline)) void loop_f32(const Step& given, const Run& whole) {
  const Step step = given;  // bytes written through the addresses below may be anything but a local copy
  const Run run = whole;
  const F scale = rules::all<F>(run.scale);
  // The general form of Adam has room for a state that not every row has.
  const int states = Step::states - (Step::last_is_optional && run.at[STATE + Step::states - 1] == nullptr);
  for (int64_t i = 0; i < run.count; i += numbers::count_of<F>()) {
    F state[Step::states], param = fetch<F32, F>(run.at[PARAM], i), squared{};
#pragma GCC unroll 4
    for (int s = 0; s < Step::states; ++s) state[s] = s < states ? fetch<F32, F>(run.at[STATE + s], i) : F{};
    const F carried = step.first(param, fetch<F32, F>(run.at[GRAD], i) * scale, state, squared);
#pragma GCC unroll 4
    for (int s = 0; s < Step::states; ++s)
      if (s < states) put<F32>(run.at[STATE + s], i, state[s]);
    put<F32>(run.at[PARAM], i, step.last(param, carried, step.denominator(squared)));
  }
}

// Two vectors of numbers that lie side by side in memory. HALVES: of bf16 numbers, one vector has those at even places
// and the other those at odd ones, so that nothing has to be shuffled.
template <int KIND, bool HALVES>
struct Two {
  Vec a, b;

  static inline Two fetched(const char* base, int64_t i) {
    if constexpr (HALVES) {
      const Bits packed = vectors::load<Bits>(base + 2 * i);
      return {(Vec)(packed << 16), (Vec)(packed & 0xffff0000u)};
    } else {
      return {fetch<KIND, Vec>(base, i), fetch<KIND, Vec>(base, i + LANES)};
    }
  }
  inline void store(char* base, int64_t i) const {
    if constexpr (HALVES) {
      vectors::store(base + 2 * i, numbers::bf16_pairs(a, b));
    } else {
      put<KIND>(base, i, a);
      put<KIND>(base, i + LANES, b);
    }
  }
};

constexpr int64_t TURN = 2 * LANES;  // elements
// Memory is asked for this many bytes of each tensor ahead. The processor asks by itself, but stops at ends of pages
// and does not see far ahead while square roots and quotients are under way.
constexpr int64_t AHEAD = 384;

// What waits between the parts of a rule, for some turns.
template <bool DIVIDES>
struct Waiting {
  static constexpr int64_t TURNS = 2;               // from one part to the next
  static constexpr int64_t VECTORS = 8, SLOTS = 8;  // powers of two
  static_assert(SLOTS > 2 * TURNS && VECTORS >= 6, "every turn under way has a slot");
  alignas(64) Vec vectors[SLOTS * VECTORS];
  inline Vec* of(int64_t i) { return vectors + ((i / TURN * VECTORS) & (SLOTS * VECTORS - 1)); }
};
template <>
struct Waiting<false> {
  static constexpr int64_t TURNS = 0;
  Vec vectors[6];
  inline Vec* of(int64_t) { return vectors; }
};

// Whole turns, of given kinds. From a gradient to its parameter it is a chain of 80 cycles, while a processor has no more
// than two turns under way; so the parts of a rule are done some turns apart, beside other parts of other turns.
template <class Step, int MIXTURE>
__attribute__((noinline)) void loop(const Step& given, const Run& whole) {
  constexpr int param = MIXTURE & 15, grad = MIXTURE >> 4 & 15, kind = MIXTURE >> 8 & 15, out = MIXTURE >> 12;
  constexpr bool halves = MIXTURE == ALL_BF16;
  const Step step = given;
  const Run run = whole;
  const Vec scale = rules::all<Vec>(run.scale);
  Waiting<Step::divides> waiting;
  constexpr int64_t wait = waiting.TURNS * TURN;
  for (int64_t i = 0; i < run.count + 2 * wait; i += TURN) {
    if (i < run.count) {
      const auto value = Two<param, halves>::fetched(run.at[PARAM], i);
      const auto gradient = Two<grad, halves>::fetched(run.at[GRAD], i);
      Vec a[Step::states], b[Step::states], *const slot = waiting.of(i);
#pragma GCC unroll 4
      for (int s = 0; s < Step::states; ++s) {
        const auto state = Two<kind, halves>::fetched(run.at[STATE + s], i);
        __builtin_prefetch(run.at[STATE + s] + i * width(kind) + AHEAD);
        a[s] = state.a;
        b[s] = state.b;
      }
      __builtin_prefetch(run.at[PARAM] + i * width(param) + AHEAD);
      __builtin_prefetch(run.at[GRAD] + i * width(grad) + AHEAD);
      slot[0] = step.first(value.a, gradient.a * scale, a, slot[2]);
      slot[1] = step.first(value.b, gradient.b * scale, b, slot[3]);
#pragma GCC unroll 4
      for (int s = 0; s < Step::states; ++s) Two<kind, halves>{a[s], b[s]}.store(run.at[STATE + s], i);
    }
    if (Step::divides && i >= wait && i - wait < run.count) {
      Vec* const slot = waiting.of(i - wait);
      slot[4] = step.denominator(slot[2]);
      slot[5] = step.denominator(slot[3]);
    }
    if (const int64_t k = i - 2 * wait; k >= 0) {
      Vec* const slot = waiting.of(k);
      auto value = Two<param, halves>::fetched(run.at[PARAM], k);
      value.a = step.last(value.a, slot[0], slot[4]);
      value.b = step.last(value.b, slot[1], slot[5]);
      value.store(run.at[PARAM], k);
      if constexpr (out != NONE) Two<out, false>{value.a, value.b}.store(run.at[OUT], k);
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
    using Step = typename Rule::template Step<Vec, FORM>;
    const Step step(rule);
    switch (mixture) {
      case ALL_F32: return loop<Step, ALL_F32>(step, run);
      case ALL_BF16: return loop<Step, ALL_BF16>(step, run);
      case runs::mixture(F32, BF16, F32, BF16): return loop<Step, runs::mixture(F32, BF16, F32, BF16)>(step, run);
      case runs::mixture(F32, F32, F32, BF16): return loop<Step, runs::mixture(F32, F32, F32, BF16)>(step, run);
    }
  }
};

inline bool has_loop(int mixture) {
  return mixture == ALL_F32 || mixture == ALL_BF16 || mixture == runs::mixture(F32, BF16, F32, BF16) ||
         mixture == runs::mixture(F32, F32, F32, BF16);
}

// fp32 throughout, less than a vector, in a vector of which the rest is thrown away.
template <class Step>
void part_of_a_vector(const Step& step, const Run& run) {
  alignas(64) float elements[OUT][LANES] = {};
  const size_t nbytes = run.count * sizeof(float);
  Run padded = run;
  padded.count = LANES;
  for (int place = 0; place < OUT; ++place)
    if (run.at[place] != nullptr) {
      std::memcpy(elements[place], run.at[place], nbytes);
      padded.at[place] = (char*)elements[place];
    }
  loop_f32<Vec>(step, padded);
  for (int place = 0; place < OUT; ++place)
    if (place != GRAD && run.at[place] != nullptr) std::memcpy(run.at[place], elements[place], nbytes);
}

// fp32 throughout; any count. lanes: elements that torch's kernel takes at a time.
template <class Rule>
void apply_f32(const Rule& rule, const Run& run, int64_t lanes) {
  Run turns = run, vectors = run;
  turns.count = rule.form == GENERAL ? 0 : run.count - run.count % TURN;
  const int64_t as_vectors = run.count - run.count % lanes;
  vectors.count = as_vectors - as_vectors % LANES;
  if (turns.count) rule.with_form(InOneForm<Rule>{rule, turns, ALL_F32});
  if (turns.count < as_vectors) {
    using Step = typename Rule::template Step<Vec, GENERAL>;
    const Step step(rule);
    Run rest = run.from(vectors.count);
    rest.count = as_vectors - vectors.count;
    if (turns.count < vectors.count) loop_f32<Vec>(step, vectors.from(turns.count));
    if (rest.count) part_of_a_vector(step, rest);
  }
  if (as_vectors < run.count) {
    using Step = typename Rule::template Step<float, GENERAL>;
    loop_f32<float>(Step(rule), run.from(as_vectors));
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

// Updates the run, which begins at a multiple of TURN elements of its tensor.
template <class Rule>
void apply(const Rule& rule, const Run& run) {
  const int mixture = mixture_of(run, rule.states), kinds = mixture & 0xfff;
  // Where everything is in the same 16 bits, torch's kernel takes two vectors of fp32 at a time.
  const bool low = mixture >= 0 && (kinds == (ALL_BF16 & 0xfff) || kinds == runs::mixture(F16, F16, F16, 0));
  const int64_t lanes = low ? 2 * TORCH_LANES : TORCH_LANES;
  if (mixture == ALL_F32) return apply_f32(rule, run, lanes);
  if (rule.form == GENERAL || !has_loop(mixture)) return apply_staged(rule, run, lanes);
  Run turns = run;
  turns.count = run.count - run.count % TURN;
  if (turns.count) rule.with_form(InOneForm<Rule>{rule, turns, mixture});
  if (turns.count < run.count) apply_staged(rule, run.from(turns.count), lanes);
}

}  // namespace runs
