// Optimizer updates, norms and casts over many tensors in one parallel region; plain C interface.
//
// A call gets a table with one row of int64 per tensor and a list of rules (hyper-parameters as doubles). Rows are cut
// into units of UNIT elements; threads take ranges of units, so that a thousand small tensors and one large one cost
// alike. Nothing is allocated and nothing is kept between calls, except the sleeping threads of pool.h.
#include "numbers.h"
#include "pool.h"
#include "update_rules.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using numbers::BLOCK;
using vectors::LANES;

constexpr int64_t UNIT = 4096;    // elements; a multiple of BLOCK
constexpr int64_t GRAIN = 8;      // units a thread takes at once
constexpr int RULE_DOUBLES = 8;

// One tensor. Kinds are those of numbers::Kind; `out` may be null.
struct Row {
  void* param;
  const void* grad;
  void* state[3];
  void* out;
  int64_t numel;
  int64_t kinds;  // param | grad << 4 | state << 8 (three times four bits) | out << 20
  int64_t rule;
  int64_t first_unit;  // filled here
};
static_assert(sizeof(Row) == 10 * sizeof(int64_t), "the Python side writes rows of ten int64");

int64_t number_units(Row* rows, int64_t count) {
  int64_t units = 0;
  for (int64_t r = 0; r < count; ++r) {
    rows[r].first_unit = units;
    units += (rows[r].numel + UNIT - 1) / UNIT;
  }
  return units;
}

// Index of the row that holds the unit: the last one that begins at it or before, skipping empty rows.
int64_t row_of(const Row* rows, int64_t count, int64_t unit) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (rows[middle].first_unit <= unit) low = middle;
    else high = middle;
  }
  return low;
}

// Calls visit(row, begin, end) with the element ranges behind the units [begin_unit, end_unit).
template <class Visit>
void for_each_range(const Row* rows, int64_t count, int64_t begin_unit, int64_t end_unit, Visit visit) {
  int64_t r = row_of(rows, count, begin_unit);
  for (int64_t unit = begin_unit; unit < end_unit; ++r) {
    const Row& row = rows[r];
    const int64_t begin = (unit - row.first_unit) * UNIT;
    const int64_t left = (end_unit - unit) * UNIT;
    const int64_t end = row.numel - begin < left ? row.numel : begin + left;
    if (end <= begin) continue;
    visit(row, begin, end);
    unit += (end - begin + UNIT - 1) / UNIT;
  }
}

struct Update {
  Row* rows;
  int64_t count;
  const double* rules;
  float scale;
};

inline char* at(const void* base, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(base)) + bytes;
}

// fp32 gradients of a block, multiplied by the scale.
inline const float* read_grad(const void* from, int kind, int64_t count, float scale, float* scratch) {
  const float* grad = numbers::read_block(from, kind, count, scratch);
  if (scale != 1.0f) {
    for (int64_t i = 0; i < count; ++i) scratch[i] = grad[i] * scale;
    grad = scratch;
  }
  return grad;
}

template <class Rule>
void update_range(const Row& row, const double* numbers_of_rule, float scale, int64_t begin, int64_t end) {
  using namespace numbers;
  const Rule rule(numbers_of_rule);
  const int states = rule.states();
  const int param_kind = int(row.kinds & 15), grad_kind = int(row.kinds >> 4 & 15), out_kind = int(row.kinds >> 20 & 15);
  int kinds[3];
  bool one_low_kind = param_kind != F32 && grad_kind == param_kind;
  for (int s = 0; s < states; ++s) {
    kinds[s] = int(row.kinds >> (8 + 4 * s) & 15);
    one_low_kind = one_low_kind && kinds[s] == param_kind;
  }
  const int64_t lanes = one_low_kind ? 2 * LANES : LANES;
  alignas(64) float scratch[6][BLOCK];
  for (int64_t start = begin; start < end; start += BLOCK) {
    const int64_t count = end - start < BLOCK ? end - start : BLOCK;
    void* param_at = at(row.param, start * width(param_kind));
    float* param = read_block(param_at, param_kind, count, scratch[0]);
    const float* grad =
        read_grad(at(row.grad, start * width(grad_kind)), grad_kind, count, scale, scratch[1]);
    float* state[3] = {nullptr, nullptr, nullptr};
    for (int s = 0; s < states; ++s)
      state[s] = read_block(at(row.state[s], start * width(kinds[s])), kinds[s], count, scratch[2 + s]);
    const int64_t whole = count - count % lanes;
    rule.template apply<vectors::Vec>(param, grad, state, whole);
    if (whole < count) {
      float* rest[3] = {nullptr, nullptr, nullptr};
      for (int s = 0; s < states; ++s) rest[s] = state[s] + whole;
      rule.template apply<float>(param + whole, grad + whole, rest, count - whole);
    }
    write_block(param, param_at, param_kind, count);
    for (int s = 0; s < states; ++s)
      write_block(state[s], at(row.state[s], start * width(kinds[s])), kinds[s], count);
    if (row.out == nullptr) continue;
    void* out_at = at(row.out, start * width(out_kind));
    if (param_kind != F32) {  // the new value of the parameter is the rounded one
      param = read_block(param_at, param_kind, count, scratch[0]);
    }
    write_block(param, out_at, out_kind, count);
  }
}

template <class Rule>
void update_units(void* context, int64_t begin, int64_t end) {
  const Update& update = *static_cast<const Update*>(context);
  for_each_range(update.rows, update.count, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    update_range<Rule>(row, update.rules + RULE_DOUBLES * row.rule, update.scale, first, last);
  });
}

template <class Rule>
void update_all(int64_t* table, int64_t count, const double* rules, double scale, int64_t threads) {
  Update update{reinterpret_cast<Row*>(table), count, rules, float(scale)};
  pool::run(number_units(update.rows, count), GRAIN, threads, update_units<Rule>, &update);
}

}  // namespace

// Each: `table` of `count` rows as struct Row, `rules` of eight doubles each, gradients are multiplied by `scale`.
EXPORT void ds_adam(int64_t* table, int64_t count, const double* rules, double scale, int64_t threads) {
  update_all<rules::Adam>(table, count, rules, scale, threads);
}

EXPORT void ds_adagrad(int64_t* table, int64_t count, const double* rules, double scale, int64_t threads) {
  update_all<rules::Adagrad>(table, count, rules, scale, threads);
}

EXPORT void ds_lion(int64_t* table, int64_t count, const double* rules, double scale, int64_t threads) {
  update_all<rules::Lion>(table, count, rules, scale, threads);
}

namespace {

// Sum of squares in double precision: of the elements of `grad`, per unit, so that threads change no bit of the sum.
struct Norm {
  Row* rows;
  int64_t count;
  double* sums;
};

void norm_units(void* context, int64_t begin, int64_t end) {
  const Norm& norm = *static_cast<const Norm*>(context);
  alignas(64) float scratch[BLOCK];
  for_each_range(norm.rows, norm.count, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    const int kind = int(row.kinds >> 4 & 15);
    for (int64_t start = first; start < last; start += UNIT) {
      const int64_t stop = last - start < UNIT ? last : start + UNIT;
      double parts[16] = {};
      for (int64_t from = start; from < stop; from += BLOCK) {
        const int64_t count = stop - from < BLOCK ? stop - from : BLOCK;
        const float* values =
            numbers::read_block(at(row.grad, from * numbers::width(kind)), kind, count, scratch);
        int64_t i = 0;
        for (; i + 16 <= count; i += 16)
          for (int k = 0; k < 16; ++k) parts[k] += double(values[i + k]) * double(values[i + k]);
        for (; i < count; ++i) parts[i % 16] += double(values[i]) * double(values[i]);
      }
      double sum = 0.0;
      for (double part : parts) sum += part;
      norm.sums[row.first_unit + start / UNIT] = sum;
    }
  });
}

void cast_units(void* context, int64_t begin, int64_t end) {
  const Update& cast = *static_cast<const Update*>(context);
  alignas(64) float scratch[BLOCK];
  for_each_range(cast.rows, cast.count, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    const int kind = int(row.kinds >> 4 & 15), out_kind = int(row.kinds >> 20 & 15);
    for (int64_t start = first; start < last; start += BLOCK) {
      const int64_t count = last - start < BLOCK ? last - start : BLOCK;
      const float* values = read_grad(at(row.grad, start * numbers::width(kind)), kind, count, cast.scale, scratch);
      numbers::write_block(values, at(row.out, start * numbers::width(out_kind)), out_kind, count);
    }
  });
}

}  // namespace

// How many units (and so how many sums of ds_sumsq) the rows have.
EXPORT int64_t ds_units(int64_t* table, int64_t count) {
  return number_units(reinterpret_cast<Row*>(table), count);
}

// Sum of the squares of all `grad`s; `sums` has room for ds_units doubles. Not finite if any element is not.
EXPORT double ds_sumsq(int64_t* table, int64_t count, double* sums, int64_t threads) {
  Norm norm{reinterpret_cast<Row*>(table), count, sums};
  const int64_t units = number_units(norm.rows, count);
  pool::run(units, GRAIN, threads, norm_units, &norm);
  double total = 0.0;
  for (int64_t unit = 0; unit < units; ++unit) total += sums[unit];
  return total;
}

// out = scale * grad, rounded to the kind of `out`.
EXPORT void ds_cast(int64_t* table, int64_t count, double scale, int64_t threads) {
  Update cast{reinterpret_cast<Row*>(table), count, nullptr, float(scale)};
  pool::run(number_units(cast.rows, count), GRAIN, threads, cast_units, &cast);
}
