/// Tensors of frameworks, where they lie: read by DLPack's exchange interface in C, which makes no Python object.
///
/// Source: DLPack 1.3, "C exchange API".
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>

#include "common.hpp"

namespace {

using Tensor = nb::dlpack::dltensor;

constexpr const char* api_name = "dlpack_exchange_api";      // What the capsule is called.
constexpr std::uint32_t api_major = 1;                       // Another one has another layout.
constexpr std::uint32_t api_minor = 3;                       // Older ones have no such interface.
constexpr std::int32_t cpu = 1;                              // This machine's own memory.
constexpr std::int32_t max_dims = 8;                         // Of what is read here; others go the general way.

/// What a framework offers, as DLPack lays it out. It lives as long as the process.
struct ExchangeApi {
  std::uint32_t major;                    ///< Version of the layout.
  std::uint32_t minor;                    ///< Version of what there is.
  const ExchangeApi* previous;            ///< Of an older version.
  void* allocate;                         ///< Not used here, like the next two.
  void* managed_from_object;              ///<
  void* managed_to_object;                ///<
  int (*read)(void* object, Tensor* out); ///< Fills in a view that is valid as long as the object is; may be null.
  void* current_stream;                   ///< Not used here.
};

/// What the type of a tensor offers; null if that is not of use.
const ExchangeApi* api_of(nb::handle tensor) {
  static PyTypeObject* known = nullptr;  // The type that was looked at last, kept alive; with the GIL.
  static const ExchangeApi* api = nullptr;
  PyTypeObject* const type = Py_TYPE(tensor.ptr());
  if (type == known) return api;
  const nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  const ExchangeApi* found = nullptr;
  if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), api_name) != 0) {
    found = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), api_name));
    if (found->major != api_major || found->minor < api_minor || found->read == nullptr) found = nullptr;
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
  const ExchangeApi* const api = api_of(tensor);
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
std::optional<std::pair<TensorMemory, TensorMemory>> coo_memory(nb::handle indices, nb::handle values) {
  std::optional<TensorMemory> ids = memory_of(indices, 1);
  if (!ids) return {};
  std::optional<TensorMemory> rows = memory_of(values, 0);
  if (!rows) return {};
  return std::pair{std::move(*ids), std::move(*rows)};
}

}  // namespace

bool is_tensor_memory(nb::handle object) { return Py_TYPE(object.ptr()) == tensor_memory_type; }

void bind_tensors(nb::module_& m) {
  const nb::class_<TensorMemory> type(m, "TensorMemory", nb::is_final(), nb::type_slots(tensor_slots),
                                      "The memory of a framework's tensor, by the buffer protocol.");
  tensor_memory_type = reinterpret_cast<PyTypeObject*>(nb::object(type).release().ptr());
  m.def("coo_memory", &coo_memory, nb::arg("indices"), nb::arg("values"),
        "Return the memory of ids `[1, n]`, as `[n]`, and of values `[n, *row]`; None unless both are contiguous in this "
        "machine's memory, of types that NumPy has, and their framework has DLPack's exchange interface in C.");
}
