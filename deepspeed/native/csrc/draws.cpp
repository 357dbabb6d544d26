// Random values as torch draws them on the CPU, bit for bit, from the state of its generator.
//
// Owns: the generator (MT19937: Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8, 1998), many words at a time,
// and the way from its words to values. Does not own: which tensors are filled, and the comparison with torch before
// the first use (`runtime/zero/init_draws.py`).
// Invariant: the state afterwards is the one that as many draws of torch would have left.
#include "numbers.h"

namespace {

using numbers::BF16;
using numbers::F16;
using numbers::F32;
using vectors::Bits;
using vectors::LANES;
using vectors::Vec;
using vectors::multiply_add;

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr int WORDS = 624, FAR = 397;
constexpr int64_t GROUP = 16;  // values that come of one another in a normal draw
constexpr int64_t CHUNK = 2048;  // values on their way, in the nearest cache; whole groups

// The bytes of `torch.Generator.get_state()` that a draw changes; more follow.
struct State {
  uint64_t seed;
  int32_t left;  // words not yet drawn, and one
  int32_t seeded;
  uint64_t next;  // the word to draw
  uint64_t words[WORDS];

  bool plausible() const {
    return left == 1 ? next <= WORDS : left > 1 && left <= WORDS && next == uint64_t(WORDS + 1 - left);
  }
};

template <class B>
inline B twisted(B high, B low, B far) {
  return far ^ (((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

template <class B>
inline B tempered(B word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

class Words {
 public:
  explicit Words(State* state) : state_(*state) {
    for (int i = 0; i < WORDS; ++i) words_[i] = uint32_t(state_.words[i]);
  }
  Words(const Words&) = delete;
  ~Words() {
    for (int i = 0; i < WORDS; ++i) state_.words[i] = words_[i];
  }

  // The next `count` numbers in [0, 1), multiples of 2^-24.
  void fractions(float* out, int64_t count) {
    while (count) {
      if (state_.left == 1) renew();
      const int64_t run = state_.left - 1 < count ? state_.left - 1 : count;
      const uint32_t* words = words_ + state_.next;
      int64_t i = 0;
      for (; i + LANES <= run; i += LANES) {
        const Bits low = tempered(vectors::load<Bits>(words + i)) & 0xffffffu;
        vectors::store(out + i, __builtin_convertvector((Ints)low, Vec) * 0x1p-24f);
      }
      for (; i < run; ++i) out[i] = float(int32_t(tempered(words[i]) & 0xffffffu)) * 0x1p-24f;
      out += run;
      count -= run;
      state_.next += uint64_t(run);
      state_.left -= int32_t(run);
    }
  }

 private:
  // The next 624 words, in place.
  void renew() {
    twist(0, WORDS - FAR, FAR);
    twist(WORDS - FAR, WORDS - 1, FAR - WORDS);
    words_[WORDS - 1] = twisted(words_[WORDS - 1], words_[0], words_[FAR - 1]);
    state_.left = WORDS + 1;
    state_.next = 0;
  }

  // Words `begin` to `end`, each with the one `far` from it: at least 227, so a vector reads none that it changes.
  void twist(int begin, int end, int far) {
    uint32_t* word = words_ + begin;
    for (; word + LANES <= words_ + end; word += LANES)
      vectors::store(word, twisted(vectors::load<Bits>(word), vectors::load<Bits>(word + 1),
                                   vectors::load<Bits>(word + far)));
    for (; word < words_ + end; ++word) *word = twisted(word[0], word[1], word[far]);
  }

  State& state_;
  uint32_t words_[WORDS];
};

template <int KIND, class F>
inline F rounded(F value) {
  if constexpr (KIND == BF16) return numbers::from_bf16(numbers::bf16_of(value));
  else if constexpr (KIND == F16) return numbers::from_f16(numbers::f16_of(value));
  else return value;
}

// ---- uniform

template <int KIND>
void uniform(Words& words, char* out, int64_t count, float from, float to) {
  float drawn[CHUNK];
  const float range = to - from, end = rounded<KIND>(to);
  // What rounding has made `to`, which is outside, becomes `from`.
  const auto value = [=](auto x) {
    using F = decltype(x);
    const F start = from - F{};  // a sum would lose the sign of -0
    const F found = rounded<KIND>(multiply_add(x, F{} + range, start));
    return found == F{} + end ? start : found;
  };
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int64_t run = count - begin < CHUNK ? count - begin : CHUNK;
    words.fractions(drawn, run);
    int64_t i = 0;
    for (; i + LANES <= run; i += LANES)
      numbers::put<KIND, Vec>(out, begin + i, value(vectors::load<Vec>(drawn + i)));
    for (; i < run; ++i) numbers::put<KIND, float>(out, begin + i, value(drawn[i]));
  }
}

// ---- normal: the pairs of Box and Muller, "A Note on the Generation of Random Normal Deviates", Ann. Math. Stat. 29,
// 1958. Logarithm, sine and cosine: the polynomials for fp32 of Moshier's Cephes library (logf, sinf, cosf).

// Of x in (0, 1].
inline Vec logarithm(Vec x) {
  const Bits bits = (Bits)x;
  Vec exponent = __builtin_convertvector((Ints)(bits >> 23) - 126, Vec);
  Vec m = (Vec)((bits & 0x7fffffu) | 0x3f000000u);  // in [1/2, 1)
  const auto small = m < 0.707106781186547524f;
  exponent = small ? exponent - 1.0f : exponent;
  m = small ? m - 1.0f + m : m - 1.0f;
  const Vec square = m * m;
  Vec y = Vec{} + 7.0376836292e-2f;
  constexpr float terms[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                             -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
#pragma GCC unroll 8
  for (const float term : terms) y = multiply_add(y, m, Vec{} + term);
  y = multiply_add(y * m, square, exponent * -2.12194440e-4f);
  return multiply_add(exponent, Vec{} + 0.693359375f, m + (y - square * 0.5f));
}

// Of x in [0, 2 pi].
inline void sine_and_cosine(Vec x, Vec* sine, Vec* cosine) {
  const Ints octant = (__builtin_convertvector(x * 1.27323954473516f, Ints) + 1) & ~1;
  const Vec turns = __builtin_convertvector(octant, Vec);
  constexpr float parts[] = {-0.78515625f, -2.4187564849853515625e-4f, -3.77489497744594108e-8f};  // of -pi/4
#pragma GCC unroll 3
  for (const float part : parts) x = multiply_add(turns, Vec{} + part, x);
  const Vec square = x * x;
  Vec c = multiply_add(Vec{} + 2.443315711809948e-5f, square, Vec{} - 1.388731625493765e-3f);
  c = multiply_add(c, square, Vec{} + 4.166664568298827e-2f) * square;
  c = multiply_add(c, square, square * -0.5f) + 1.0f;
  Vec s = multiply_add(Vec{} - 1.9515295891e-4f, square, Vec{} + 8.3321608736e-3f);
  s = multiply_add(s, square, Vec{} - 1.6666654611e-1f) * square;
  s = multiply_add(s, x, x);
  const auto straight = (octant & 2) == 0;
  *sine = (Vec)((Bits)(straight ? s : c) ^ ((Bits)(octant & 4) << 29));
  *cosine = (Vec)((Bits)(straight ? c : s) ^ ((Bits)(~(octant - 2) & 4) << 29));
}

// Groups of 16 numbers in [0, 1), each 8 pairs (i, i + 8), in place; two groups at a time, of which all first ones are
// computed with side by side, so that vectors of any width are filled. `values` ends with a whole pair of groups.
__attribute__((noinline)) void to_normal(float* values, int64_t count, float mean, float deviation) {
  typedef float Run __attribute__((vector_size(4 * GROUP / 2)));
  constexpr int64_t HALF = GROUP / 2;
  float first[GROUP], second[GROUP];
  float* const places[] = {first, second, first + HALF, second + HALF};
  for (const float* end = values + count; values < end; values += 2 * GROUP) {
    for (int i = 0; i < 4; ++i) vectors::store(places[i], vectors::load<Run>(values + i * HALF));
    for (int64_t i = 0; i < GROUP; i += LANES) {
      const Vec radius = vectors::square_root(-2.0f * logarithm(1.0f - vectors::load<Vec>(first + i)));
      Vec sine, cosine;
      sine_and_cosine(6.283185307179586f * vectors::load<Vec>(second + i), &sine, &cosine);
      vectors::store(first + i, multiply_add(radius * cosine, deviation - Vec{}, mean - Vec{}));
      vectors::store(second + i, multiply_add(radius * sine, deviation - Vec{}, mean - Vec{}));
    }
    for (int i = 0; i < 4; ++i) vectors::store(values + i * HALF, vectors::load<Run>(places[i]));
  }
}

// At least 16 values. What is left of whole groups is the end of one more group, drawn over the last values.
template <int KIND>
void normal(Words& words, char* out, int64_t count, float mean, float deviation) {
  float drawn[CHUNK] = {};
  const auto groups = [&](int64_t begin, int64_t run) {
    words.fractions(drawn, run);
    to_normal(drawn, run, mean, deviation);
    for (int64_t i = 0; i < run; i += LANES) numbers::put<KIND, Vec>(out, begin + i, vectors::load<Vec>(drawn + i));
  };
  const int64_t whole = count / GROUP * GROUP;
  for (int64_t begin = 0; begin < whole; begin += CHUNK) groups(begin, whole - begin < CHUNK ? whole - begin : CHUNK);
  if (whole == count) return;
  if (KIND == F32) words.fractions(drawn, count - whole);
  groups(count - GROUP, GROUP);
}

}  // namespace

#define DS_PUBLIC extern "C" __attribute__((visibility("default"))) int

// `count` values of `kind` at `out`. 0: done; 1: nothing is done, since `state` is not one of torch's generator.

// In [from, to).
DS_PUBLIC ds_uniform(void* state, char* out, int64_t count, int kind, float from, float to) {
  if (!static_cast<State*>(state)->plausible()) return 1;
  Words words(static_cast<State*>(state));
  if (kind == BF16) uniform<BF16>(words, out, count, from, to);
  else if (kind == F16) uniform<F16>(words, out, count, from, to);
  else uniform<F32>(words, out, count, from, to);
  return 0;
}

// With this mean and standard deviation; 1 also for fewer than 16 values, which torch draws in another way.
DS_PUBLIC ds_normal(void* state, char* out, int64_t count, int kind, float mean, float deviation) {
  if (count < GROUP || !static_cast<State*>(state)->plausible()) return 1;
  Words words(static_cast<State*>(state));
  if (kind == BF16) normal<BF16>(words, out, count, mean, deviation);
  else if (kind == F16) normal<F16>(words, out, count, mean, deviation);
  else normal<F32>(words, out, count, mean, deviation);
  return 0;
}
