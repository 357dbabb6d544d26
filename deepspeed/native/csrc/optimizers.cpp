// Optimizer updates, norms and casts over many tensors in one parallel region; plain C interface.
//
// A call gets a table with one row of int64 per tensor and a list of rules (hyper-parameters as doubles). Rows are cut
// into units of UNIT elements; threads take ranges of units, so that a thousand small tensors and one large one cost
// alike. Nothing is allocated and nothing is kept between calls, except the sleeping threads of pool.h.
#include "pool.h"
#include "runs.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using numbers::BF16;
using numbers::F16;
using numbers::F32;
using numbers::NONE;
using numbers::width;
using runs::GRAD;
using runs::OUT;
using vectors::LANES;
using vectors::Vec;

constexpr int64_t UNIT = 4096;  // elements; a multiple of runs::BLOCK
constexpr int64_t GRAIN = 8;    // units a thread takes at once
constexpr int RULE_DOUBLES = 8;

// One tensor.
struct Row {
  char* at[runs::PLACES];  // as in runs::Run
  int64_t numel;
  int64_t kinds;  // numbers::Kind, four bits for each place
  int64_t rule;
  int64_t first_unit;  // filled here

  int kind(int place) const { return int(kinds >> (4 * place) & 15); }
};
static_assert(sizeof(Row) == 10 * sizeof(int64_t), "the Python side writes rows of ten int64");

struct Job {
  Row* rows;
  int64_t count;
  const double* rules;
  float scale;
  double* sums;
};

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
void for_each_range(const Job& job, int64_t begin_unit, int64_t end_unit, Visit visit) {
  int64_t r = row_of(job.rows, job.count, begin_unit);
  for (int64_t unit = begin_unit; unit < end_unit; ++r) {
    const Row& row = job.rows[r];
    const int64_t begin = (unit - row.first_unit) * UNIT;
    const int64_t left = (end_unit - unit) * UNIT;
    const int64_t end = row.numel - begin < left ? row.numel : begin + left;
    if (end <= begin) continue;
    visit(row, begin, end);
    unit += (end - begin + UNIT - 1) / UNIT;
  }
}

// ---- updates

// One NaN for all there are: bf16_above counts on its lower bits.
double number(double given) { return given == given ? given : double(__builtin_nanf("")); }

template <class Rule>
void update_range(const Row& row, const double* numbers_of_rule, float scale, int64_t begin, int64_t end) {
  double numbers[RULE_DOUBLES];
  for (int k = 0; k < RULE_DOUBLES; ++k) numbers[k] = number(numbers_of_rule[k]);
  const Rule rule(numbers);
  runs::Run run{};
  run.scale = scale;
  run.count = row.numel;
  for (int place = 0; place < runs::PLACES; ++place) {
    const bool used = place < runs::STATE + rule.states || (place == runs::OUT && row.at[place] != nullptr);
    run.at[place] = used ? row.at[place] : nullptr;
    run.kind[place] = used ? row.kind(place) : int(NONE);
  }
  run = run.from(begin);
  run.count = end - begin;
  runs::apply(rule, run);
}

template <class Rule>
void update_units(void* context, int64_t begin, int64_t end) {
  const Job& job = *static_cast<const Job*>(context);
  for_each_range(job, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    update_range<Rule>(row, job.rules + RULE_DOUBLES * row.rule, job.scale, first, last);
  });
}

template <class Rule>
void update_all(int64_t* table, int64_t count, const double* rules, double scale, int64_t threads) {
  Job job{reinterpret_cast<Row*>(table), count, rules, float(number(scale)), nullptr};
  pool::run(number_units(job.rows, count), GRAIN, threads, update_units<Rule>, &job);
}

// ---- norms and casts

template <int KIND>
double sum_of_squares(const char* values, int64_t count) {
  double parts[LANES] = {}, sum = 0.0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec value = numbers::fetch<KIND, Vec>(values, i);
    for (int64_t k = 0; k < LANES; ++k) parts[k] += double(value[k]) * double(value[k]);
  }
  for (; i < count; ++i) {
    const double value = double(numbers::fetch<KIND, float>(values, i));
    parts[i % LANES] += value * value;
  }
  for (double part : parts) sum += part;
  return sum;
}

// A sum per unit, so that the number of threads changes no bit of the total.
void norm_units(void* context, int64_t begin, int64_t end) {
  const Job& job = *static_cast<const Job*>(context);
  for_each_range(job, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    const int kind = row.kind(GRAD);
    for (int64_t start = first; start < last; start += UNIT) {
      const char* values = row.at[GRAD] + start * width(kind);
      const int64_t count = last - start < UNIT ? last - start : UNIT;
      job.sums[row.first_unit + start / UNIT] = kind == F32    ? sum_of_squares<F32>(values, count)
                                                : kind == BF16 ? sum_of_squares<BF16>(values, count)
                                                               : sum_of_squares<F16>(values, count);
    }
  });
}

void cast_units(void* context, int64_t begin, int64_t end) {
  const Job& job = *static_cast<const Job*>(context);
  for_each_range(job, begin, end, [&](const Row& row, int64_t first, int64_t last) {
    const int from = row.kind(GRAD), to = row.kind(OUT);
    numbers::convert(row.at[GRAD] + first * width(from), from, row.at[OUT] + first * width(to), to, last - first, job.scale);
  });
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

// How many units (and so how many sums of ds_sumsq) the rows have.
EXPORT int64_t ds_units(int64_t* table, int64_t count) { return number_units(reinterpret_cast<Row*>(table), count); }

// Sum of the squares of all `grad`s in double precision; `sums` has room for ds_units doubles. Not finite if any
// element is not: squares of fp32 numbers do not overflow a double.
EXPORT double ds_sumsq(int64_t* table, int64_t count, double* sums, int64_t threads) {
  Job job{reinterpret_cast<Row*>(table), count, nullptr, 1.0f, sums};
  const int64_t units = number_units(job.rows, count);
  pool::run(units, GRAIN, threads, norm_units, &job);
  double total = 0.0;
  for (int64_t unit = 0; unit < units; ++unit) total += sums[unit];
  return total;
}

// out = scale * grad, rounded to the kind of `out`.
EXPORT void ds_cast(int64_t* table, int64_t count, double scale, int64_t threads) {
  Job job{reinterpret_cast<Row*>(table), count, nullptr, float(scale), nullptr};
  pool::run(number_units(job.rows, count), GRAIN, threads, cast_units, &job);
}
