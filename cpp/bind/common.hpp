/// What the bindings share: types by name, arrays in and out, logs of blocks.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "gradquorum/dtype.hpp"
#include "gradquorum/pool.hpp"

namespace nb = nanobind;
namespace gq = gradquorum;

/// A reducer's spec, and whether its elements are pairs of reals.
struct BoundSpec {
  gq::Spec spec;         ///< Types are real.
  bool complex = false;  ///< The dtype is complex: rows are twice as wide in reals.

  /// Throws std::invalid_argument for names or pairs that there are none of.
  BoundSpec(std::string_view dtype, std::string_view accumulate, std::string_view reduction, std::size_t num_threads);

  /// Reals per element.
  std::size_t parts() const { return complex ? 2 : 1; }
};

/// Releases the GIL for its lifetime, unless the interpreter is about to end.
///
/// Taking the GIL back while the interpreter ends makes CPython before 3.14 unwind the thread, which C++ answers with
/// std::terminate: a daemon thread in here would abort a program that has succeeded. So end_calls(), which runs at the
/// beginning of the end, waits for those that are in here, and from then on nobody lets go of the GIL.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  /// For `atexit`. With the GIL.
  static void end_calls();

 private:
  PyThreadState* state_ = nullptr;  ///< To be restored; null if the GIL was kept.
};

/// Releases the GIL for its lifetime if that is worth it: who lets go of it may wait milliseconds to get it back.
class UnlockedFor {
 public:
  /// For work on so many bytes.
  explicit UnlockedFor(std::size_t bytes) {
    if (bytes > locked_bytes) unlocked_.emplace();
  }

 private:
  static constexpr std::size_t locked_bytes = 8192;  ///< So many take about a microsecond.
  std::optional<Unlocked> unlocked_;                 ///< If it is worth it.
};

/// The memory of a NumPy array, held for as long as this lives: never converted, never copied, never written to.
/// To be made, moved and destroyed with the GIL.
class ArrayIn {
 public:
  ArrayIn() = default;
  ~ArrayIn();
  ArrayIn(ArrayIn&& other) noexcept;
  ArrayIn& operator=(ArrayIn&&) = delete;
  ArrayIn(const ArrayIn&) = delete;
  ArrayIn& operator=(const ArrayIn&) = delete;

  /// Takes hold of an array; false, and no Python error, if it is not C-contiguous or exports no memory.
  bool hold(nb::handle array);

  const void* data() const { return view_.buf; }                                        ///< First element.
  std::size_t ndim() const { return static_cast<std::size_t>(view_.ndim); }              ///< Number of dims.
  std::size_t dim(std::size_t i) const { return static_cast<std::size_t>(view_.shape[i]); }  ///< Size of a dim.
  std::size_t num_bytes() const { return static_cast<std::size_t>(view_.len); }          ///< Of all elements.
  /// True if the elements are of this type, in native byte order, each at a multiple of its (real) size.
  bool is_of(gq::DType type, bool complex) const;

 private:
  Py_buffer view_{};  ///< Its obj is null if nothing is held.
};

/// Writable memory of Python's, held by the buffer protocol while this lives. Made and destroyed with the GIL.
class WritableBytes {
 public:
  /// Throws what the object raises if it has no contiguous writable memory.
  explicit WritableBytes(nb::handle object);
  ~WritableBytes();
  WritableBytes(const WritableBytes&) = delete;
  WritableBytes& operator=(const WritableBytes&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(view_.buf); }    ///< First byte.
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }          ///< Number of bytes.

 private:
  Py_buffer view_{};  ///< What is held.
};

/// True for an object of exactly NumPy's type, false for subclasses (they may say something else of themselves), and
/// for the memory of a tensor.
bool is_plain_array(nb::handle object);

/// True for what coo_memory() returns.
bool is_tensor_memory(nb::handle object);

/// The ids in a NumPy array: int64 [n], contiguous, aligned; throws a TypeError or ValueError for anything else.
ArrayIn ids_arg(nb::handle array);

/// The values in a NumPy array of the spec's dtype, bfloat16 as uint16, contiguous, aligned; throws as ids_arg does.
ArrayIn values_arg(const BoundSpec& bound, nb::handle array);

/// Real values of a block, in the storage or else the accumulate type; throws as ids_arg does.
ArrayIn reals_arg(const char* what, nb::handle array, gq::DType type);

/// A copy of memory for NumPy to build an array on.
gq::Buffer copied(const void* from, std::size_t bytes);

/// Keeps the array alive; gives it up with the GIL, from whichever thread.
std::shared_ptr<const void> lend(ArrayIn array);

/// A piece of the pool for NumPy to build an array on, by the buffer protocol. Goes back when the array dies.
struct Memory {
  gq::Buffer buffer;  ///< What it owns.
};

/// A NumPy array on a piece of the pool, which it owns: of a spec's elements, bfloat16 as uint16. With the GIL.
nb::object array_on(gq::Buffer buffer, gq::DType type, bool complex, const std::vector<std::size_t>& shape);

/// A shape from a sequence of integers; throws for negative ones and for sizes that nothing can have.
std::vector<std::size_t> to_shape(nb::handle shape, std::size_t first, bool has_first);

/// Product of the dims from `from` on, or std::bad_alloc.
std::size_t product(const std::vector<std::size_t>& shape, std::size_t from);

/// Blocks of a log, held for the call: the caller's list may change while the GIL is released.
template <class Bound, class Core>
class Log {
 public:
  /// Throws a TypeError unless every item is a block of this kind.
  explicit Log(nb::handle blocks) {
    items_ = nb::steal(PySequence_Tuple(blocks.ptr()));
    if (!items_.is_valid()) throw nb::python_error();
    const Py_ssize_t size = PyTuple_Size(items_.ptr());
    pointers_.reserve(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Bound* block = nullptr;
      if (!nb::try_cast<const Bound*>(nb::handle(PyTuple_GetItem(items_.ptr(), i)), block, false) || block == nullptr)
        throw nb::type_error("blocks: expected blocks made by a reducer of this kind");
      pointers_.push_back(&block->core);
    }
  }
  const Core* const* data() const { return pointers_.data(); }  ///< In log order.
  std::size_t size() const { return pointers_.size(); }         ///< Number of blocks.

 private:
  nb::object items_;                   ///< Owns the blocks.
  std::vector<const Core*> pointers_;  ///< What they wrap.
};

void bind_arrays(nb::module_& m);  ///< Memory; finds the type of NumPy's arrays.
void bind_tensors(nb::module_& m);  ///< TensorMemory, coo_memory.
void bind_sparse(nb::module_& m);  ///< SparseReducer, SparseBlock.
void bind_dense(nb::module_& m);   ///< DenseReducer, DenseBlock.
void bind_memory(nb::module_& m);  ///< trim_memory, memory_stats, set_memory_cap.
