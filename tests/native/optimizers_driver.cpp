// Calls every entry of optimizers.cpp on heap blocks of exact size, so that the sanitizers see a byte too many.
#include "optimizers.cpp"
#undef EXPORT
#include "optimizers_columns.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>

namespace {

struct Block {
  std::unique_ptr<char[]> memory;
  char* start;
  Block(int64_t count, int kind, int shift) : memory(new char[count * width(kind) + shift]), start(memory.get() + shift) {
    for (int64_t i = 0; i < count; ++i) {
      const float value = float((i * 37 + 11) % 101) / 64.0f;
      if (kind == F32) numbers::put<F32, float>(start, i, value);
      else if (kind == BF16) numbers::put<BF16, float>(start, i, value);
      else numbers::put<F16, float>(start, i, value);
    }
  }
};

int failures = 0;

void expect(bool good, const char* what) {
  if (!good) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

void updates(int64_t count, int param, int grad, int state, int out, int shift) {
  const double adam[8] = {0.01, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.1, 3}, other[8] = {0.01, 0.4, 0.45, 0.1};
  for (int rule = 0; rule < 3; ++rule) {
    Block p(count, param, shift), g(count, grad, shift), m(count, state, shift), v(count, state, shift);
    Block x(count, state, shift), copy(count, out == NONE ? F32 : out, shift);
    const int states = rule == 0 ? 3 : 1;
    Row rows[3] = {};
    Row& row = rows[1];  // between two empty ones
    char* places[runs::PLACES] = {p.start, g.start, m.start, states > 1 ? v.start : nullptr,
                                  states > 2 ? x.start : nullptr, out == NONE ? nullptr : copy.start};
    for (int place = 0; place < runs::PLACES; ++place) row.at[place] = places[place];
    row.numel = count;
    row.kinds = param | grad << 4 | state << 8 | state << 12 | state << 16 | out << 20;
    int64_t* table = reinterpret_cast<int64_t*>(rows);
    if (rule == 0) ds_adam(table, 3, adam, 0.5, 3);
    else if (rule == 1) ds_adagrad(table, 3, other, 0.5, 3);
    else ds_lion(table, 3, other, 1.0, 3);
  }
}

void norms_and_casts(int64_t count, int from, int to, int shift) {
  Block source(count, from, shift), target(count, to, shift);
  Row row = {};
  row.at[GRAD] = source.start;
  row.at[OUT] = target.start;
  row.numel = count;
  row.kinds = from << 4 | to << 20;
  int64_t* table = reinterpret_cast<int64_t*>(&row);
  const int64_t units = ds_units(table, 1);
  std::unique_ptr<double[]> sums(new double[units + 1]);
  const double total = ds_sumsq(table, 1, sums.get(), 3);
  expect(total >= 0 && std::isfinite(total), "the sum of finite numbers");
  ds_cast(table, 1, 0.5, 3);
}

// Ranges of rows far larger than memory: every element once, in order.
void huge_rows() {
  Row rows[4] = {};
  const int64_t sizes[4] = {(int64_t(1) << 33) + 5, 0, 3, (int64_t(1) << 31) + UNIT - 1};
  for (int r = 0; r < 4; ++r) rows[r].numel = sizes[r];
  Job job{rows, 4, nullptr, 1.0f, nullptr};
  const int64_t units = number_units(rows, 4), piece = 1000003;
  int64_t next[4] = {};
  for (int64_t unit = 0; unit < units; unit += piece) {
    for_each_range(job, unit, unit + piece < units ? unit + piece : units, [&](const Row& row, int64_t begin, int64_t end) {
      int64_t& reached = next[&row - rows];
      expect(begin == reached && end > begin && end <= row.numel, "ranges follow each other");
      reached = end;
    });
  }
  for (int r = 0; r < 4; ++r) expect(next[r] == sizes[r], "every element is visited");
}

// Correctly rounded against the divider, over all mantissas of two binades and the values without a mantissa.
void quotients() {
  unsigned seed = 7;
  for (int k = 0; k < 6; ++k) {
    seed = seed * 1664525u + 1013904223u;
    const float b = k == 0 ? 1.0f : k == 1 ? float(std::sqrt(1 - 0.999)) : numbers::value_of(0x3f000000u | (seed >> 9));
    const rules::Divisor<float> divisor(b);
    for (uint32_t bits = 0x3f800000u + k; bits < 0x40800000u; bits += 37) {
      const float a = numbers::value_of(bits);
      if (divisor.under(a) != a / b) expect(false, "a quotient");
    }
    for (float a : {0.0f, 0x1p-75f, 0x1p64f}) expect(divisor.under(a) == a / b, "a quotient at the end of the range");
    expect(std::isinf(divisor.under(INFINITY)) && std::isnan(divisor.under(NAN)), "infinity and NaN");
  }
}

// Lists whose elements are their own views.
void* element(void* list, intptr_t k) { return static_cast<DLTensor**>(list)[k]; }

int view_of(void* object, DLTensor* view) {
  *view = *static_cast<DLTensor*>(object);
  return view->ndim < 0 ? -1 : 0;
}

void columns() {
  float memory[24];
  int64_t shape[3] = {2, 1, 3}, strides[3] = {3, 77, 1}, transposed[3] = {1, 2, 2}, none[3] = {2, 0, 3};
  DLTensor good{memory, CPU, 0, 3, FLOAT, 32, 1, shape, strides, 8}, bare = good, empty = good, half = good;
  bare.strides = nullptr;
  empty.shape = none;
  half.type = BFLOAT;
  half.bits = 16;
  DLTensor* all[4] = {&good, &bare, &empty, &half};
  int64_t out[12];
  expect(ds_column(view_of, element, all, 3, out) == F32, "one kind");
  expect(out[0] == reinterpret_cast<int64_t>(memory + 2) && out[3] == 6 && out[4] == 6 && out[5] == 0, "addresses and numels");
  expect(ds_column(view_of, element, all, 4, out) == 15 && out[8] == F32 && out[11] == BF16, "mixed kinds");
  for (int fault = 0; fault < 5; ++fault) {
    DLTensor bad = good;
    if (fault == 0) bad.strides = transposed;
    else if (fault == 1) bad.bits = 64;
    else if (fault == 2) bad.device_type = 2;
    else if (fault == 3) bad.lanes = 4;
    else bad.ndim = -1;
    all[1] = &bad;
    expect(ds_column(view_of, element, all, 3, out) == 0, "not for the kernels");
  }
  all[2] = nullptr;
  expect(ds_column(view_of, element, all + 2, 1, out) == 0, "no element");
}

}  // namespace

int main() {
  for (int shift : {0, 1})
    for (int64_t count : {int64_t(0), int64_t(1), LANES - 1, LANES, 2 * LANES + 3, int64_t(1025), UNIT * 9 + 9}) {
      for (int param : {F32, BF16, F16})
        for (int grad : {F32, BF16, F16}) updates(count, param, grad, F32, NONE, shift);
      for (int kind : {BF16, F16}) {
        updates(count, kind, kind, kind, NONE, shift);
        updates(count, F32, kind, F32, kind, shift);
        updates(count, F32, F32, F32, kind, shift);
        updates(count, F32, F32, kind, F32, shift);
      }
      for (int from : {F32, BF16, F16})
        for (int to : {F32, BF16, F16}) norms_and_casts(count, from, to, shift);
    }
  huge_rows();
  quotients();
  columns();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
