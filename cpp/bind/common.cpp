#include "common.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
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
constexpr std::size_t max_dims = 64;   // Of a result.
std::int64_t nothing = 0;              // The address of memory without bytes.

/// What is used of NumPy's C interface, by its stable places in the table of it: no header is needed to build.
/// Source: NumPy, "Array API" (`numpy_api.py`); pybind11 does the same.
struct NumPy {
  using FromType = PyObject* (*)(int);
  using NewFromDescr = PyObject* (*)(PyTypeObject*, PyObject*, int, const Py_intptr_t*, const Py_intptr_t*, void*, int,
                                     PyObject*);
  using SetBase = int (*)(PyObject*, PyObject*);

  FromType from_type = nullptr;          ///< A dtype by its number.
  NewFromDescr new_from_descr = nullptr; ///< An array; takes over the dtype.
  SetBase set_base = nullptr;            ///< Takes over what owns the memory.

  static constexpr int c_array = 0x501;  ///< C-contiguous, aligned, writable.

  /// Finds them.
  static NumPy found() {
    const nb::object table = nb::module_::import_("numpy._core.multiarray").attr("_ARRAY_API");
    void** const api = static_cast<void**>(PyCapsule_GetPointer(table.ptr(), nullptr));
    if (api == nullptr) throw nb::python_error();
    return {reinterpret_cast<FromType>(api[45]), reinterpret_cast<NewFromDescr>(api[94]),
            reinterpret_cast<SetBase>(api[282])};
  }
};

NumPy numpy;  // Found when the module is loaded.

/// NumPy's number of an element type; bfloat16, which it lacks, is uint16.
int number_of(gq::DType type, bool complex) {
  switch (type) {
    case gq::DType::f16: return 23;
    case gq::DType::bf16: return 4;
    case gq::DType::f32: return complex ? 14 : 11;
    case gq::DType::f64: return complex ? 15 : 12;
    case gq::DType::i32: return 5;
    case gq::DType::i64: return sizeof(long) == 8 ? 7 : 9;
  }
  return -1;
}

/// What the buffer protocol calls an element type; the second spelling is that of an equally wide type.
struct Format {
  const char* name;
  const char* other;
};

Format format_of(gq::DType type, bool complex) {
  switch (type) {
    case gq::DType::f16: return {"e", "e"};
    case gq::DType::bf16: return {"H", "H"};
    case gq::DType::f32: return complex ? Format{"Zf", "Zf"} : Format{"f", "f"};
    case gq::DType::f64: return complex ? Format{"Zd", "Zd"} : Format{"d", "d"};
    case gq::DType::i32: return {"i", sizeof(long) == 4 ? "l" : "i"};
    case gq::DType::i64: return {"q", sizeof(long) == 8 ? "l" : "q"};
  }
  return {"", ""};
}

/// The array, if it is NumPy's own (what other exporters give may lack what is read here) and contiguous.
ArrayIn imported(const char* what, const char* expected, nb::handle array) {
  ArrayIn out;
  if (PyObject_TypeCheck(array.ptr(), ndarray_type) == 0 || !out.hold(array))
    throw nb::type_error((std::string(what) + ": expected a contiguous NumPy array, " + expected).c_str());
  return out;
}

/// Throws unless the elements are of this type and aligned.
void check_elements(const char* what, const ArrayIn& array, gq::DType type, bool complex) {
  if (reinterpret_cast<std::uintptr_t>(array.data()) % gq::item_bytes(type) != 0)
    throw nb::value_error((std::string(what) + ": not aligned").c_str());
  if (!array.is_of(type, complex))
    throw nb::type_error((std::string(what) + ": expected a NumPy array of the dtype").c_str());
}

int export_memory(PyObject* self, Py_buffer* view, int flags) {
  if (!nb::inst_ready(self)) {
    view->obj = nullptr;
    PyErr_SetString(PyExc_BufferError, "this memory was never made");
    return -1;
  }
  const gq::Buffer& buffer = nb::inst_ptr<Memory>(self)->buffer;
  void* const data = buffer.size() != 0 ? static_cast<void*>(buffer.bytes()) : &nothing;
  return PyBuffer_FillInfo(view, self, data, static_cast<Py_ssize_t>(buffer.size()), 0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_memory)}, {0, nullptr}};

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

ArrayIn::~ArrayIn() {
  if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

ArrayIn::ArrayIn(ArrayIn&& other) noexcept : view_(other.view_) { other.view_ = Py_buffer{}; }

bool ArrayIn::hold(nb::handle array) {
  if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0) return true;
  PyErr_Clear();
  view_ = Py_buffer{};
  return false;
}

WritableBytes::WritableBytes(nb::handle object) {
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) throw nb::python_error();
}

WritableBytes::~WritableBytes() { PyBuffer_Release(&view_); }

bool ArrayIn::is_of(gq::DType type, bool complex) const {
  const Format format = format_of(type, complex);
  const char* const have = view_.format;
  return have != nullptr && (std::strcmp(have, format.name) == 0 || std::strcmp(have, format.other) == 0) &&
         reinterpret_cast<std::uintptr_t>(view_.buf) % gq::item_bytes(type) == 0;
}

bool is_plain_array(nb::handle object) { return Py_TYPE(object.ptr()) == ndarray_type || is_tensor_memory(object); }

ArrayIn ids_arg(nb::handle array) {
  ArrayIn ids = imported("indices", "an int64 vector", array);
  check_elements("indices", ids, gq::DType::i64, false);
  if (ids.ndim() != 1) throw nb::type_error("indices: expected a vector");
  return ids;
}

ArrayIn values_arg(const BoundSpec& bound, nb::handle array) {
  ArrayIn values = imported("values", "an array", array);
  check_elements("values", values, bound.spec.storage, bound.complex);
  return values;
}

ArrayIn reals_arg(const char* what, nb::handle array, gq::DType type) {
  ArrayIn values = imported(what, "of reals", array);
  check_elements(what, values, type, false);
  return values;
}

gq::Buffer copied(const void* from, std::size_t bytes) {
  gq::Buffer out(bytes);
  if (bytes != 0) std::memcpy(out.bytes(), from, bytes);
  return out;
}

nb::object array_on(gq::Buffer buffer, gq::DType type, bool complex, const std::vector<std::size_t>& shape) {
  std::size_t bytes = gq::item_bytes(type) * (complex ? 2 : 1);
  Py_intptr_t dims[max_dims];
  if (shape.size() > max_dims) throw nb::value_error("shape: too many dims");
  for (std::size_t i = 0; i < shape.size(); ++i) {
    dims[i] = static_cast<Py_intptr_t>(shape[i]);
    bytes = gq::checked_mul(bytes, shape[i]);
  }
  if (bytes > buffer.size()) throw nb::value_error("shape: more than there is memory");
  void* const data = buffer.size() != 0 ? static_cast<void*>(buffer.bytes()) : &nothing;
  nb::object owner = nb::cast(Memory{std::move(buffer)});
  PyObject* const dtype = numpy.from_type(number_of(type, complex));
  if (dtype == nullptr) throw nb::python_error();
  nb::object array = nb::steal(numpy.new_from_descr(ndarray_type, dtype, static_cast<int>(shape.size()), dims, nullptr,
                                                    data, NumPy::c_array, nullptr));
  if (!array.is_valid() || numpy.set_base(array.ptr(), owner.release().ptr()) != 0) throw nb::python_error();
  return array;
}

void bind_arrays(nb::module_& m) {
  numpy = NumPy::found();
  ndarray_type = reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr());
  nb::class_<Memory>(m, "Memory", nb::is_final(), nb::type_slots(memory_slots),
                     "Memory of a result, for NumPy to build an array on; its bytes are writable.")
      .def("__len__", [](const Memory& self) { return self.buffer.size(); });
}

std::shared_ptr<const void> lend(ArrayIn array) {
  auto held = std::make_unique<ArrayIn>(std::move(array));
  const ArrayIn* const raw = held.get();
  std::shared_ptr<const void> lender(raw, [](const void* lent) {
    if (!Py_IsInitialized()) return;  // The interpreter is gone, and its objects with it.
    const nb::gil_scoped_acquire gil;
    delete static_cast<const ArrayIn*>(lent);
  });
  held.release();
  return lender;
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
