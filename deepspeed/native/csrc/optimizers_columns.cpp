// Lists of tensors as columns of addresses, by DLPack's exchange interface: one call for a list instead of five for a
// tensor. Neither Python's headers nor torch's are needed; the caller passes the two functions that know them.
//
// The layouts are those of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2, BFLOAT = 4;

// Fills a view of the tensor; not 0 with a Python error. (DLPackDLTensorFromPyObjectNoSync)
using View = int (*)(void* object, DLTensor* view);
// An element of a list, borrowed. (PyList_GetItem)
using Item = void* (*)(void* list, intptr_t index);

// As numbers::Kind; 0: one the kernels do not know.
int64_t kind_of(const DLTensor& view) {
  if (view.lanes != 1) return 0;
  if (view.type == FLOAT) return view.bits == 32 ? 1 : view.bits == 16 ? 3 : 0;
  return view.type == BFLOAT && view.bits == 16 ? 2 : 0;
}

// The number of elements, or -1 where they do not lie side by side in order.
int64_t run_of(const DLTensor& view) {
  int64_t numel = 1, expected = 1;
  for (int32_t d = 0; d < view.ndim; ++d) numel *= view.shape[d];
  if (numel == 0 || view.strides == nullptr) return numel;
  for (int32_t d = view.ndim; d-- > 0;) {
    if (view.shape[d] != 1 && view.strides[d] != expected) return -1;
    expected *= view.shape[d];
  }
  return numel;
}

}  // namespace

// Of the `count` tensors of a list: `count` addresses, then their numels, then their kinds. Returns the kind of all, MIXED
// where they differ, 0 where one of them is none that the kernels can walk. Needs the interpreter's lock.
EXPORT int64_t ds_column(View view_of, Item item, void* list, int64_t count, int64_t* out) {
  constexpr int64_t MIXED = 15;
  int64_t common = 0;
  for (int64_t k = 0; k < count; ++k) {
    DLTensor view{};
    void* object = item(list, intptr_t(k));
    if (object == nullptr || view_of(object, &view) != 0) return 0;
    const int64_t kind = kind_of(view), numel = view.device_type == CPU ? run_of(view) : -1;
    if (kind == 0 || numel < 0) return 0;
    out[k] = reinterpret_cast<int64_t>(static_cast<char*>(view.data) + view.byte_offset);
    out[count + k] = numel;
    out[2 * count + k] = kind;
    common = common == 0 || common == kind ? kind : MIXED;
  }
  return common;
}
