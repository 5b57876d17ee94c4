#include <nanobind/stl/string_view.h>

#include "common.hpp"
#include "gradquorum/dense.hpp"

namespace {

/// A block with its own Python type; immutable, so any thread may read it.
struct DenseBlock {
  gq::DenseBlock core;  ///< The block.
};

using DenseLog = Log<DenseBlock, gq::DenseBlock>;

/// The arithmetic of one dense member. Immutable.
class DenseReducer {
 public:
  DenseReducer(std::string_view dtype, std::string_view accumulate, std::string_view reduction, std::size_t num_threads)
      : bound_(dtype, accumulate, reduction, num_threads) {}

  DenseBlock block(nb::handle array, double weight, bool lends, bool check_finite) const {
    DenseBlock out;
    out.core.weight = weight;
    if (array.is_none()) return out;
    ArrayIn value = values_arg(bound_, array);
    std::size_t size = bound_.parts();
    for (std::size_t i = 0; i < value.ndim(); ++i) size = gq::checked_mul(size, value.dim(i));
    const auto* const elements = static_cast<const unsigned char*>(value.data());
    std::shared_ptr<const void> lender;
    if (lends) lender = lend(std::move(value));
    const UnlockedFor unlocked(gq::checked_mul(size, gq::item_bytes(bound_.spec.storage)));
    out.core = gq::make_dense(bound_.spec, elements, size, weight, check_finite, std::move(lender));
    return out;
  }

  Memory merge(nb::handle blocks, nb::handle shape, std::int64_t num_gradients) const {
    const DenseLog log(blocks);
    const std::vector<std::size_t> dims = to_shape(shape, 0, false);
    const std::size_t size = gq::checked_mul(product(dims, 0), bound_.parts());
    gq::Buffer out;
    {
      const UnlockedFor unlocked(gq::checked_mul(size, log.size() + 1));
      out = gq::merge_dense(bound_.spec, log.data(), log.size(), size, num_gradients);
    }
    return Memory{std::move(out)};
  }

  DenseBlock compact(nb::handle blocks) const {
    const DenseLog log(blocks);
    DenseBlock out;
    const Unlocked unlocked;
    out.core = gq::compact_dense(bound_.spec, log.data(), log.size());
    return out;
  }

  std::size_t distinct_bytes(nb::handle blocks) const {
    const DenseLog log(blocks);
    std::size_t most = 0;
    for (std::size_t b = 0; b < log.size(); ++b) most = std::max(most, log.data()[b]->num_elements);
    return gq::checked_mul(most, gq::kept_bytes(bound_.spec));
  }

  nb::tuple export_block(const DenseBlock& block) const {
    const gq::DenseBlock& core = block.core;
    return nb::make_tuple(core.num_elements, core.dtype != bound_.spec.storage, core.weight, core.compacted, core.count,
                          Memory{copied(core.values, core.num_bytes())});
  }

  DenseBlock import_block(nb::handle total, bool summed, double weight, bool compacted, std::int64_t count) const {
    DenseBlock out;
    gq::DenseBlock& core = out.core;
    core.weight = weight;
    core.compacted = compacted;
    core.dtype = summed ? bound_.spec.accumulate : bound_.spec.storage;
    core.count = count;
    core.empty = total.is_none();
    if (core.empty != (count == 0) || count < 0) throw nb::value_error("total: expected exactly if some carried it");
    if (core.empty) return out;
    const ArrayIn values = reals_arg("total", total, core.dtype);
    if (values.ndim() != 1) throw nb::value_error("total: expected a vector");
    core.num_elements = values.dim(0);
    core.owned = copied(values.data(), core.num_bytes());
    core.values = core.owned.bytes();
    return out;
  }

 private:
  const BoundSpec bound_;  ///< What it does.
};

}  // namespace

void bind_dense(nb::module_& m) {
  nb::class_<DenseBlock>(m, "DenseBlock", nb::is_final(), nb::is_weak_referenceable(),
                         "One dense gradient, or the running sum of several. Immutable.")
      .def_prop_ro("num_bytes", [](const DenseBlock& self) { return self.core.num_bytes(); })
      .def_prop_ro("lent", [](const DenseBlock& self) { return self.core.lent(); })
      .def_prop_ro("finite", [](const DenseBlock& self) { return self.core.finite; });
  nb::class_<DenseReducer>(m, "DenseReducer", nb::is_final(), "The arithmetic of one dense member.")
      .def(nb::init<std::string_view, std::string_view, std::string_view, std::size_t>(), nb::arg("dtype"),
           nb::arg("accumulate_dtype"), nb::arg("reduction_type"), nb::arg("num_threads"))
      .def("block", &DenseReducer::block, nb::arg("value").none(), nb::arg("weight"), nb::arg("lend"),
           nb::arg("check_finite"))
      .def("merge", &DenseReducer::merge, nb::arg("blocks"), nb::arg("shape"), nb::arg("num_gradients"))
      .def("compact", &DenseReducer::compact, nb::arg("blocks"))
      .def("export_block", &DenseReducer::export_block, nb::arg("block"),
           "Return the elements, whether they are sums, the weight, whether it is compacted, how many carried it, and a "
           "copy of the values.")
      .def("import_block", &DenseReducer::import_block, nb::arg("total").none(), nb::arg("summed"), nb::arg("weight"),
           nb::arg("compacted"), nb::arg("count"),
           "Return a block of what `export_block` of this or another engine has returned.")
      .def("distinct_bytes", &DenseReducer::distinct_bytes, nb::arg("blocks"));
}
