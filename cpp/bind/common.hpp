/// What the bindings share: types by name, arrays in and out, logs of blocks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "gradquorum/dtype.hpp"
#include "gradquorum/pool.hpp"

namespace nb = nanobind;
namespace gq = gradquorum;

/// Values as they come in: never converted, never copied, never written to.
using ValuesIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
/// Ids as they come in.
using IdsIn = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
/// An array as it goes out; its memory comes from the pool and goes back there.
using ArrayOut = nb::ndarray<nb::numpy>;

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

/// The ids in a NumPy array: int64 [n], contiguous, aligned; throws a TypeError or ValueError for anything else.
IdsIn ids_arg(nb::handle array);

/// The values in a NumPy array of the spec's dtype, contiguous and aligned; throws as ids_arg does.
ValuesIn values_arg(const BoundSpec& bound, nb::handle array);

/// Keeps the array alive; gives it up with the GIL, from whichever thread.
std::shared_ptr<const void> lend(const ValuesIn& values);

/// Hands a buffer to NumPy as an array of `dtype`.
ArrayOut to_array(gq::Buffer buffer, const std::vector<std::size_t>& shape, nb::dlpack::dtype dtype);

/// What a reducer's results are in NumPy; bfloat16 goes out as its bits, uint16.
nb::dlpack::dtype result_dtype(const BoundSpec& bound);

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

void bind_arrays(nb::module_& m);  ///< Nothing: finds the type of NumPy's arrays.
void bind_sparse(nb::module_& m);  ///< SparseReducer, SparseBlock.
void bind_dense(nb::module_& m);   ///< DenseReducer, DenseBlock.
void bind_memory(nb::module_& m);  ///< trim_memory, memory_stats, set_memory_cap.
