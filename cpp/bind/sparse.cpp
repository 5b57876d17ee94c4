#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "common.hpp"
#include "gradquorum/log.hpp"

namespace {

/// A block with its own Python type; immutable, so any thread may read it.
struct SparseBlock {
  gq::Block core;  ///< The block.
};

using SparseLog = Log<SparseBlock, gq::Block>;

/// The arithmetic of one sparse member. Immutable.
class SparseReducer {
 public:
  SparseReducer(std::string_view dtype, std::string_view accumulate, std::string_view reduction,
                std::size_t num_threads)
      : bound_(dtype, accumulate, reduction, num_threads) {}

  SparseBlock block(nb::handle indices, nb::handle rows, double weight, bool lends, bool check_finite) const {
    const IdsIn ids = ids_arg(indices);
    const ValuesIn values = values_arg(bound_, rows);
    if (values.ndim() == 0) throw nb::value_error("values: 0-dimensional");
    if (values.shape(0) != ids.shape(0)) throw nb::value_error("values: not as many rows as ids");
    gq::Gradient gradient;
    gradient.num_rows = ids.shape(0);
    gradient.width = bound_.parts();
    for (std::size_t i = 1; i < values.ndim(); ++i) gradient.width = gq::checked_mul(gradient.width, values.shape(i));
    gradient.ids = ids.data();
    gradient.values = static_cast<const unsigned char*>(values.data());
    gradient.weight = weight;
    gradient.check_finite = check_finite;
    if (lends) gradient.lender = lend(values);
    SparseBlock out;
    const Unlocked unlocked;
    out.core = gq::make_block(bound_.spec, gradient);
    return out;
  }

  std::tuple<ArrayOut, ArrayOut, ArrayOut> merge(nb::handle blocks, nb::handle row_shape,
                                                 std::int64_t num_gradients) const {
    const SparseLog log(blocks);
    std::vector<std::size_t> shape = to_shape(row_shape, 0, true);
    const std::size_t width = gq::checked_mul(product(shape, 1), bound_.parts());
    gq::Merged merged;
    {
      const Unlocked unlocked;
      merged = gq::merge_log(bound_.spec, log.data(), log.size(), width, num_gradients);
    }
    shape[0] = merged.num_rows;
    const std::vector<std::size_t> rows{merged.num_rows};
    return {to_array(std::move(merged.ids), rows, nb::dtype<std::int64_t>()),
            to_array(std::move(merged.values), shape, result_dtype(bound_)),
            to_array(std::move(merged.counts), rows, nb::dtype<std::int64_t>())};
  }

  SparseBlock compact(nb::handle blocks) const {
    const SparseLog log(blocks);
    SparseBlock out;
    const Unlocked unlocked;
    out.core = gq::compact_log(bound_.spec, log.data(), log.size());
    return out;
  }

  std::size_t distinct_bytes(nb::handle blocks) const {
    const SparseLog log(blocks);
    const Unlocked unlocked;
    return gq::distinct_bytes(bound_.spec, log.data(), log.size());
  }

 private:
  const BoundSpec bound_;  ///< What it does.
};

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<SparseBlock>(m, "SparseBlock", nb::is_final(), nb::is_weak_referenceable(),
                          "One sparse gradient, or the merged prefix of a log. Immutable.")
      .def_prop_ro("num_bytes", [](const SparseBlock& self) { return self.core.num_bytes(); })
      .def_prop_ro("lent", [](const SparseBlock& self) { return self.core.lent(); })
      .def_prop_ro("finite", [](const SparseBlock& self) { return self.core.finite; })
      .def("__len__", [](const SparseBlock& self) { return self.core.num_rows; });
  nb::class_<SparseReducer>(m, "SparseReducer", nb::is_final(), "The arithmetic of one sparse member.")
      .def(nb::init<std::string_view, std::string_view, std::string_view, std::size_t>(), nb::arg("dtype"),
           nb::arg("accumulate_dtype"), nb::arg("reduction_type"), nb::arg("num_threads"))
      .def("block", &SparseReducer::block, nb::arg("indices"), nb::arg("values"),
           nb::arg("weight"), nb::arg("lend"), nb::arg("check_finite"))
      .def("merge", &SparseReducer::merge, nb::arg("blocks"), nb::arg("row_shape"), nb::arg("num_gradients"))
      .def("compact", &SparseReducer::compact, nb::arg("blocks"))
      .def("distinct_bytes", &SparseReducer::distinct_bytes, nb::arg("blocks"));
}
