#include "common.hpp"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

struct NamedType {
  std::string_view name;
  gq::DType type;
  bool complex;
};

constexpr NamedType named_types[] = {
    {"float16", gq::DType::f16, false}, {"bfloat16", gq::DType::bf16, false},  {"float32", gq::DType::f32, false},
    {"float64", gq::DType::f64, false}, {"complex64", gq::DType::f32, true},   {"complex128", gq::DType::f64, true},
    {"int32", gq::DType::i32, false},   {"int64", gq::DType::i64, false},
};

NamedType type_of(std::string_view name) {
  for (const NamedType& type : named_types)
    if (type.name == name) return type;
  throw std::invalid_argument("no such dtype: " + std::string(name));
}

gq::Reduction reduction_of(std::string_view name) {
  if (name == "SUM") return gq::Reduction::sum;
  if (name == "MEAN") return gq::Reduction::mean;
  if (name == "MEAN_BY_COUNT") return gq::Reduction::mean_by_count;
  if (name == "MEAN_BY_WEIGHT") return gq::Reduction::mean_by_weight;
  throw std::invalid_argument("no such reduction: " + std::string(name));
}

std::atomic<bool> ending{false};    // The interpreter is about to end.
std::atomic<long> num_unlocked{0};  // Threads that will want the GIL back; changed with the GIL.

PyTypeObject* ndarray_type = nullptr;  // numpy.ndarray, kept for ever.

/// The array, if it is NumPy's own: what other exporters give may lack what nanobind reads.
template <class Array>
Array imported(const char* what, const char* expected, nb::handle array) {
  Array out;
  if (PyObject_TypeCheck(array.ptr(), ndarray_type) == 0 || !nb::try_cast<Array>(array, out, false))
    throw nb::type_error((std::string(what) + ": expected a contiguous NumPy array, " + expected).c_str());
  return out;
}

void check_aligned(const char* what, const void* data, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(data) % bytes != 0) 
    throw nb::value_error((std::string(what) + ": not aligned").c_str());
}

nb::dlpack::dtype dtype_for(nb::dlpack::dtype_code code, std::size_t bytes) {
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bytes * 8), 1};
}

}  // namespace

Unlocked::Unlocked() {
#if defined(__unix__) || defined(__APPLE__)
  static const int prepared = pthread_atfork(nullptr, nullptr, [] { num_unlocked = 0; });  // They did not come along.
  (void)prepared;
#endif
  if (ending) return;
  ++num_unlocked;
  state_ = PyEval_SaveThread();
}

Unlocked::~Unlocked() {
  if (state_ == nullptr) return;
  PyEval_RestoreThread(state_);
  --num_unlocked;
}

void Unlocked::end_calls() {
  ending = true;
  while (num_unlocked != 0) {
    const nb::gil_scoped_release released;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

BoundSpec::BoundSpec(std::string_view dtype, std::string_view accumulate, std::string_view reduction,
                     std::size_t num_threads) {
  const NamedType storage = type_of(dtype);
  const NamedType sums = type_of(accumulate);
  if (storage.complex != sums.complex) throw std::invalid_argument("dtype and accumulate dtype do not go together");
  complex = storage.complex;
  spec.storage = storage.type;
  spec.accumulate = sums.type;
  spec.reduction = reduction_of(reduction);
  spec.num_threads = num_threads == 0 ? 1 : num_threads;
  spec.check();
}

nb::dlpack::dtype result_dtype(const BoundSpec& bound) {
  const std::size_t bytes = gq::item_bytes(bound.spec.storage) * bound.parts();
  switch (bound.spec.storage) {
    case gq::DType::bf16: return dtype_for(nb::dlpack::dtype_code::UInt, bytes);
    case gq::DType::i32:
    case gq::DType::i64: return dtype_for(nb::dlpack::dtype_code::Int, bytes);
    case gq::DType::f16:
    case gq::DType::f32:
    case gq::DType::f64: break;
  }
  return dtype_for(bound.complex ? nb::dlpack::dtype_code::Complex : nb::dlpack::dtype_code::Float, bytes);
}

IdsIn ids_arg(nb::handle array) {
  const IdsIn ids = imported<IdsIn>("indices", "an int64 vector", array);
  check_aligned("indices", ids.data(), sizeof(std::int64_t));
  return ids;
}

ValuesIn values_arg(const BoundSpec& bound, nb::handle array) {
  const ValuesIn values = imported<ValuesIn>("values", "an array", array);
  if (values.dtype() != result_dtype(bound)) throw nb::type_error("values: not of the reducer's dtype");
  check_aligned("values", values.data(), gq::item_bytes(bound.spec.storage));
  return values;
}

void bind_arrays(nb::module_&) {
  ndarray_type = reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr());
}

std::shared_ptr<const void> lend(const ValuesIn& values) {
  auto held = std::make_unique<ValuesIn>(values);
  const ValuesIn* const raw = held.get();
  std::shared_ptr<const void> lender(raw, [](const void* array) {
    if (!Py_IsInitialized()) return;  // The interpreter is gone, and its objects with it.
    const nb::gil_scoped_acquire gil;
    delete static_cast<const ValuesIn*>(array);
  });
  held.release();
  return lender;
}

ArrayOut to_array(gq::Buffer buffer, const std::vector<std::size_t>& shape, nb::dlpack::dtype dtype) {
  static std::int64_t nothing = 0;  // The address of arrays without elements.
  void* const data = buffer.size() != 0 ? static_cast<void*>(buffer.bytes()) : &nothing;
  auto held = std::make_unique<gq::Buffer>(std::move(buffer));
  nb::capsule owner(held.get(), [](void* memory) noexcept { delete static_cast<gq::Buffer*>(memory); });
  held.release();
  return ArrayOut(data, shape.size(), shape.data(), owner, nullptr, dtype);
}

std::vector<std::size_t> to_shape(nb::handle shape, std::size_t first, bool has_first) {
  std::vector<std::size_t> out;
  if (has_first) out.push_back(first);
  const nb::object items = nb::steal(PySequence_Tuple(shape.ptr()));
  if (!items.is_valid()) throw nb::python_error();
  const Py_ssize_t size = PyTuple_Size(items.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Py_ssize_t dim = PyLong_AsSsize_t(PyTuple_GetItem(items.ptr(), i));
    if (dim == -1 && PyErr_Occurred()) throw nb::python_error();
    if (dim < 0) throw nb::value_error("shape: negative");
    out.push_back(static_cast<std::size_t>(dim));
  }
  if (out.size() > 64) throw nb::value_error("shape: more than 64 dims");
  return out;
}

std::size_t product(const std::vector<std::size_t>& shape, std::size_t from) {
  std::size_t out = 1;
  for (std::size_t i = from; i < shape.size(); ++i) out = gq::checked_mul(out, shape[i]);
  return out;
}
