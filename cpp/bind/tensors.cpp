/// Tensors of frameworks, where they lie: read by DLPack's exchange interface in C, which makes no Python object.
///
/// Source: DLPack 1.3, "C exchange API".
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <memory>

#include "common.hpp"

namespace {

using Tensor = nb::dlpack::dltensor;

constexpr const char* api_name = "dlpack_exchange_api";      // What the capsule is called.
constexpr std::uint32_t api_major = 1;                       // Another one has another layout.
constexpr std::uint32_t api_minor = 3;                       // Older ones have no such interface.
constexpr std::int32_t cpu = 1;                              // This machine's own memory.
constexpr std::int32_t max_dims = 8;                         // Of what is read here; others go the general way.

/// A tensor that is handed over with its memory, as DLPack lays it out.
struct Managed {
  std::uint32_t major;            ///< Version of the layout.
  std::uint32_t minor;            ///< Version of what there is.
  void* context;                  ///< Of who made it.
  void (*deleter)(Managed* self); ///< Gives up the memory, and this.
  std::uint64_t flags;            ///< None.
  Tensor tensor;                  ///< What it is.
};

/// What a framework offers, as DLPack lays it out. It lives as long as the process.
struct ExchangeApi {
  std::uint32_t major;                    ///< Version of the layout.
  std::uint32_t minor;                    ///< Version of what there is.
  const ExchangeApi* previous;            ///< Of an older version.
  void* allocate;                         ///< Not used here, like the next one.
  void* managed_from_object;              ///<
  int (*make)(Managed* managed, void** object); ///< Makes a tensor; the argument is taken over in any case.
  int (*read)(void* object, Tensor* out); ///< Fills in a view that is valid as long as the object is; may be null.
  void* current_stream;                   ///< Not used here.
};

/// What a type of tensors offers; null if that is not of use.
const ExchangeApi* api_of(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;  // The type that was looked at last, kept alive; with the GIL.
  static const ExchangeApi* api = nullptr;
  if (type == known) return api;
  const nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  const ExchangeApi* found = nullptr;
  if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), api_name) != 0) {
    found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), api_name));
    if (found->major != api_major || found->minor < api_minor || found->read == nullptr || found->make == nullptr)
      found = nullptr;
  }
  PyErr_Clear();
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(known));
  known = type;
  api = found;
  return api;
}

/// What the buffer protocol calls an element type; null for those that NumPy lacks.
const char* format_of(nb::dlpack::dtype type) {
  if (type.lanes != 1) return nullptr;
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  if (code == nb::dlpack::dtype_code::Int && type.bits == 64) return "q";
  if (code == nb::dlpack::dtype_code::Float && type.bits == 16) return "e";
  if (code == nb::dlpack::dtype_code::Float && type.bits == 32) return "f";
  if (code == nb::dlpack::dtype_code::Float && type.bits == 64) return "d";
  return nullptr;
}

/// True if the elements lie one after the other, the last dim running fastest.
bool is_contiguous(const Tensor& tensor) {
  std::int64_t stride = 1;
  for (std::int32_t i = tensor.ndim; tensor.strides != nullptr && i-- > 0; stride *= tensor.shape[i])
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
  return true;
}

/// The memory of a tensor without its first `skip` dims, by the buffer protocol. Keeps the tensor alive.
struct TensorMemory {
  nb::object tensor;              ///< Owns the memory.
  void* data = nullptr;           ///< First element.
  const char* format = nullptr;   ///< Of an element.
  Py_ssize_t item_bytes = 0;      ///< Of an element.
  Py_ssize_t num_bytes = 0;       ///< Of all.
  int ndim = 0;                   ///< Number of dims.
  Py_ssize_t shape[max_dims];     ///< Sizes.
  Py_ssize_t strides[max_dims];   ///< Bytes.
};

std::optional<TensorMemory> memory_of(nb::handle tensor, std::int32_t skip) {
  const ExchangeApi* const api = api_of(Py_TYPE(tensor.ptr()));
  Tensor seen;
  if (api == nullptr) return {};
  if (api->read(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return {};
  }
  const char* const format = format_of(seen.dtype);
  if (format == nullptr || seen.device.device_type != cpu || seen.data == nullptr) return {};
  if (seen.ndim <= skip || seen.ndim - skip > max_dims || !is_contiguous(seen)) return {};
  for (std::int32_t i = 0; i < skip; ++i)
    if (seen.shape[i] != 1) return {};
  TensorMemory out;
  out.tensor = nb::borrow(tensor);
  out.data = static_cast<unsigned char*>(seen.data) + seen.byte_offset;
  out.format = format;
  out.item_bytes = seen.dtype.bits / 8;
  out.ndim = seen.ndim - skip;
  out.num_bytes = out.item_bytes;
  for (int i = out.ndim; i-- > 0; out.num_bytes *= out.shape[i]) {
    out.shape[i] = static_cast<Py_ssize_t>(seen.shape[i + skip]);
    out.strides[i] = out.num_bytes;
  }
  return out;
}

int export_tensor(PyObject* self, Py_buffer* view, int flags) {
  if (!nb::inst_ready(self)) {
    view->obj = nullptr;
    PyErr_SetString(PyExc_BufferError, "this memory was never made");
    return -1;
  }
  TensorMemory& memory = *nb::inst_ptr<TensorMemory>(self);
  *view = Py_buffer{};
  view->buf = memory.data;
  view->obj = Py_NewRef(self);
  view->len = memory.num_bytes;
  view->itemsize = memory.item_bytes;
  view->ndim = memory.ndim;
  view->format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? const_cast<char*>(memory.format) : nullptr;
  view->shape = (flags & PyBUF_ND) == PyBUF_ND ? memory.shape : nullptr;
  view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? memory.strides : nullptr;
  return 0;
}

PyType_Slot tensor_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&export_tensor)}, {0, nullptr}};
PyTypeObject* tensor_memory_type = nullptr;  // Kept for ever.

/// Ids and values of a sparse tensor with one sparse dim.
std::optional<std::pair<TensorMemory, TensorMemory>> coo_memory(nb::handle indices, nb::handle values, char format) {
  std::optional<TensorMemory> rows = memory_of(values, 0);
  if (!rows || *rows->format != format) return {};
  std::optional<TensorMemory> ids = memory_of(indices, 1);
  if (!ids) return {};
  return std::pair{std::move(*ids), std::move(*rows)};
}

/// An array that a tensor lives on.
struct Lent {
  Managed managed;                   ///< What the framework gets.
  ArrayIn array;                     ///< Owns the memory.
  std::int64_t shape[max_dims + 1];  ///< Sizes.
  std::int64_t strides[max_dims + 1]; ///< Elements.
};

/// A framework's tensor on an array of these elements, with one more dim of 1 in front if asked for; none if there can be
/// none without a closer look.
nb::object tensor_on(const ExchangeApi& api, nb::handle array, nb::dlpack::dtype type, bool wrap) {
  ArrayIn held;
  if (!is_plain_array(array) || !held.hold(array) || held.ndim() > max_dims) return {};
  auto lent = std::make_unique<Lent>(Lent{{}, std::move(held), {}, {}});
  const std::size_t first = wrap ? 1 : 0;
  const std::size_t ndim = lent->array.ndim() + first;
  std::int64_t stride = 1;
  for (std::size_t i = ndim; i-- > 0; stride *= lent->shape[i]) {
    lent->shape[i] = i < first ? 1 : static_cast<std::int64_t>(lent->array.dim(i - first));
    lent->strides[i] = stride;
  }
  lent->managed.major = api.major;
  lent->managed.minor = api.minor;
  lent->managed.context = lent.get();
  lent->managed.deleter = [](Managed* self) {
    if (!Py_IsInitialized()) return;  // The interpreter is gone, and its objects with it.
    const nb::gil_scoped_acquire gil;
    delete static_cast<Lent*>(self->context);
  };
  Tensor& tensor = lent->managed.tensor;
  tensor.data = const_cast<void*>(lent->array.data());
  tensor.device.device_type = cpu;
  tensor.ndim = static_cast<std::int32_t>(ndim);
  tensor.dtype = type;
  tensor.shape = lent->shape;
  tensor.strides = lent->strides;
  void* made = nullptr;
  if (api.make(&lent.release()->managed, &made) != 0) throw nb::python_error();
  return nb::steal(static_cast<PyObject*>(made));
}

/// Ids `[1, n]` and values as a framework's tensors, on the memory of arrays.
std::optional<std::pair<nb::object, nb::object>> coo_tensors(nb::handle type, nb::handle indices, nb::handle values) {
  if (!PyType_Check(type.ptr())) throw nb::type_error("type: expected that of tensors");
  const ExchangeApi* const api = api_of(reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (api == nullptr) return {};
  constexpr auto kind = [](nb::dlpack::dtype_code code) { return static_cast<std::uint8_t>(code); };
  const auto real = kind(nb::dlpack::dtype_code::Float);
  std::optional<std::uint8_t> bits;
  {
    ArrayIn ids, rows;
    if (!is_plain_array(indices) || !is_plain_array(values) || !ids.hold(indices) || !rows.hold(values)) return {};
    if (ids.ndim() != 1 || !ids.is_of(gq::DType::i64, false)) return {};
    for (const gq::DType each : {gq::DType::f16, gq::DType::f32, gq::DType::f64})
      if (rows.is_of(each, false)) bits = static_cast<std::uint8_t>(8 * gq::item_bytes(each));
  }
  if (!bits) return {};
  nb::object ids = tensor_on(*api, indices, {kind(nb::dlpack::dtype_code::Int), 64, 1}, true);
  nb::object rows = tensor_on(*api, values, {real, *bits, 1}, false);
  if (!ids.is_valid() || !rows.is_valid()) return {};
  return std::pair{std::move(ids), std::move(rows)};
}

}  // namespace

bool is_tensor_memory(nb::handle object) { return Py_TYPE(object.ptr()) == tensor_memory_type; }

void bind_tensors(nb::module_& m) {
  const nb::class_<TensorMemory> type(m, "TensorMemory", nb::is_final(), nb::type_slots(tensor_slots),
                                      "The memory of a framework's tensor, by the buffer protocol.");
  tensor_memory_type = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr());
  m.def("coo_memory", &coo_memory, nb::arg("indices"), nb::arg("values"), nb::arg("format"),
        "Return the memory of ids `[1, n]`, as `[n]`, and of values `[n, *row]` of that format; None unless both are "
        "contiguous in this machine's memory, and their framework has DLPack's exchange interface in C.");
  m.def("coo_tensors", &coo_tensors, nb::arg("type"), nb::arg("indices"), nb::arg("values"),
        "Return ids `[n]`, as `[1, n]`, and values `[n, *row]` of floats as tensors of that type on their memory; None "
        "where that takes a closer look.");
}
