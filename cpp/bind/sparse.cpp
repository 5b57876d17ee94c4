#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "common.hpp"
#include "gradquorum/log.hpp"
#include "gradquorum/packed.hpp"
#include "gradquorum/split.hpp"

namespace {

/// A block with its own Python type; immutable, so any thread may read it.
struct SparseBlock {
  gq::Block core;  ///< The block.
};

using SparseLog = Log<SparseBlock, gq::Block>;

/// True if the dims after the first are those of a tuple.
bool ends_in(const ArrayIn& values, nb::handle row_shape) {
  if (!PyTuple_Check(row_shape.ptr()) || values.ndim() != 1 + static_cast<std::size_t>(PyTuple_Size(row_shape.ptr())))
    return false;
  for (std::size_t i = 1; i < values.ndim(); ++i) {
    PyObject* const dim = PyTuple_GetItem(row_shape.ptr(), static_cast<Py_ssize_t>(i - 1));
    const Py_ssize_t size = PyLong_AsSsize_t(dim);
    if (size == -1 && PyErr_Occurred()) throw nb::python_error();
    if (static_cast<std::size_t>(size) != values.dim(i)) return false;
  }
  return true;
}

/// The arithmetic of one sparse member. Immutable.
class SparseReducer {
 public:
  SparseReducer(std::string_view dtype, std::string_view accumulate, std::string_view reduction,
                std::size_t num_threads)
      : bound_(dtype, accumulate, reduction, num_threads) {}

  SparseBlock block(nb::handle indices, nb::handle rows, double weight, bool lends, bool check_finite) const {
    const ArrayIn ids = ids_arg(indices);
    ArrayIn values = values_arg(bound_, rows);
    if (values.ndim() == 0) throw nb::value_error("values: 0-dimensional");
    if (values.dim(0) != ids.dim(0)) throw nb::value_error("values: not as many rows as ids");
    return made(ids, std::move(values), weight, lends, check_finite);
  }

  std::optional<SparseBlock> plain_block(nb::handle indices, nb::handle rows, nb::handle row_shape,
                                         std::int64_t num_table_rows, double weight, bool lends,
                                         bool check_finite) const {
    ArrayIn ids;
    ArrayIn values;
    if (!is_plain_array(indices) || !is_plain_array(rows) || !ids.hold(indices) || !values.hold(rows)) return {};
    if (ids.ndim() != 1 || !ids.is_of(gq::DType::i64, false)) return {};
    if (!values.is_of(bound_.spec.storage, bound_.complex)) return {};
    if (values.ndim() == 0 || values.dim(0) != ids.dim(0) || !ends_in(values, row_shape)) return {};
    return in_table(made(ids, std::move(values), weight, lends, check_finite), num_table_rows);
  }

  std::optional<SparseBlock> packed_block(nb::handle memory, std::size_t num_rows, nb::handle row_shape,
                                          std::int64_t num_table_rows, double weight, bool lends,
                                          bool check_finite) const {
    ArrayIn packed;
    if (!packed.hold(memory) || reinterpret_cast<std::uintptr_t>(packed.data()) % sizeof(std::int64_t) != 0) return {};
    gq::Gradient gradient;
    gradient.width = bound_.parts();
    for (const std::size_t dim : to_shape(row_shape, 0, false)) {
      if (dim != 0 && gradient.width > packed.num_bytes() / dim) return {};
      gradient.width *= dim;
    }
    const std::size_t row_bytes = gq::checked_mul(gradient.width, gq::item_bytes(bound_.spec.storage));
    const auto* const bytes = static_cast<const unsigned char*>(packed.data());
    if (num_rows == 0 || !gq::unpack(bytes, packed.num_bytes(), num_rows, row_bytes, gradient)) return {};
    return in_table(made(gradient, std::move(packed), weight, lends, check_finite), num_table_rows);
  }

  void pack(const SparseBlock& block, nb::handle memory) const {
    const WritableBytes to(memory);
    const std::size_t bytes = gq::packed_bytes(block.core);
    if (to.size() < bytes) throw nb::value_error("memory: no room for the block");
    const UnlockedFor unlocked(bytes);
    gq::pack(bound_.spec, block.core, to.data());
  }

  std::tuple<nb::object, nb::object, nb::object> merge(nb::handle blocks, nb::handle row_shape,
                                                       std::int64_t num_gradients) const {
    const SparseLog log(blocks);
    std::vector<std::size_t> shape = to_shape(row_shape, 0, true);
    const std::size_t width = gq::checked_mul(product(shape, 1), bound_.parts());
    std::size_t bytes = 0;
    for (std::size_t b = 0; b < log.size(); ++b) bytes += log.data()[b]->num_bytes();
    gq::Merged merged;
    {
      const UnlockedFor unlocked(bytes);
      merged = gq::merge_log(bound_.spec, log.data(), log.size(), width, num_gradients);
    }
    shape[0] = merged.num_rows;
    return {array_on(std::move(merged.ids), gq::DType::i64, false, {merged.num_rows}),
            array_on(std::move(merged.values), bound_.spec.storage, bound_.complex, shape),
            array_on(std::move(merged.counts), gq::DType::i64, false, {merged.num_rows})};
  }

  void consume(nb::handle blocks, nb::handle row_shape, std::int64_t num_gradients, nb::list results) const {
    const SparseLog log(blocks);
    const std::size_t width = gq::checked_mul(product(to_shape(row_shape, 0, false), 0), bound_.parts());
    // All objects are made before: once the values are lost, nothing may fail.
    const nb::object made[] = {nb::cast(Memory{}), nb::cast(Memory{}), nb::cast(Memory{})};
    results.append(nb::make_tuple(made[0], made[1], made[2]));
    try {
      gq::Merged merged;
      {
        const Unlocked unlocked;
        merged = gq::merge_log(bound_.spec, log.data(), log.size(), width, num_gradients, true);
      }
      gq::Buffer* const buffers[] = {&merged.ids, &merged.values, &merged.counts};
      for (std::size_t i = 0; i < 3; ++i) nb::inst_ptr<Memory>(made[i])->buffer = std::move(*buffers[i]);
    } catch (...) {
      nb::del(results[results.size() - 1]);
      throw;
    }
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

  nb::tuple export_block(const SparseBlock& block) const {
    const gq::Block& core = block.core;
    const std::size_t n = core.num_rows;
    Memory ids{copied(core.ids.bytes(), n * sizeof(std::int64_t))};
    Memory values{copied(core.values, n * core.width * gq::item_bytes(core.dtype))};
    nb::object counts = nb::none();
    if (core.compacted) {
      gq::Buffer wide(n * sizeof(std::int64_t));
      const auto* const narrow = core.counts32.as<std::uint32_t>();
      for (std::size_t i = 0; i < n; ++i)
        wide.as<std::int64_t>()[i] = narrow != nullptr ? std::int64_t{narrow[i]} : core.counts64.as<std::int64_t>()[i];
      counts = nb::cast(Memory{std::move(wide)});
    }
    return nb::make_tuple(n, core.width, core.dtype != bound_.spec.storage, core.weight, std::move(ids),
                          std::move(values), counts);
  }

  SparseBlock import_block(nb::handle indices, nb::handle rows, bool summed, nb::handle counts, double weight,
                           std::uint64_t num_gradients) const {
    const gq::DType type = summed ? bound_.spec.accumulate : bound_.spec.storage;
    const ArrayIn ids = ids_arg(indices);
    const ArrayIn values = reals_arg("rows", rows, type);
    const std::size_t n = ids.dim(0);
    const auto* const ordered = static_cast<const std::int64_t*>(ids.data());
    if (values.ndim() != 2 || values.dim(0) != n) throw nb::value_error("rows: not as many as ids");
    for (std::size_t i = 0; i < n; ++i)
      if (ordered[i] < 0 || (i != 0 && ordered[i] <= ordered[i - 1]))
        throw nb::value_error("indices: not ascending from 0 on");
    SparseBlock out;
    gq::Block& core = out.core;
    core.num_rows = n;
    core.width = values.dim(1);
    core.dtype = type;
    core.weight = weight;
    core.num_gradients = num_gradients;
    core.compacted = !counts.is_none();
    if (core.compacted) {
      const ArrayIn touched = reals_arg("counts", counts, gq::DType::i64);
      if (touched.ndim() != 1 || touched.dim(0) != n) throw nb::value_error("counts: not as many as ids");
      core.counts64 = copied(touched.data(), n * sizeof(std::int64_t));
    }
    core.ids = copied(ordered, n * sizeof(std::int64_t));
    core.owned = copied(values.data(), gq::checked_mul(gq::checked_mul(n, core.width), gq::item_bytes(type)));
    core.values = core.owned.bytes();
    core.sample = gq::IdSample::of(core.ids.as<std::int64_t>(), n);
    return out;
  }

 private:
  SparseBlock made(const ArrayIn& ids, ArrayIn values, double weight, bool lends, bool check_finite) const {
    gq::Gradient gradient;
    gradient.num_rows = ids.dim(0);
    gradient.width = bound_.parts();
    for (std::size_t i = 1; i < values.ndim(); ++i) gradient.width = gq::checked_mul(gradient.width, values.dim(i));
    gradient.ids = static_cast<const std::int64_t*>(ids.data());
    gradient.values = static_cast<const unsigned char*>(values.data());
    return made(gradient, std::move(values), weight, lends, check_finite);
  }

  /// A block of a gradient whose values lie in `memory`.
  SparseBlock made(gq::Gradient& gradient, ArrayIn memory, double weight, bool lends, bool check_finite) const {
    gradient.weight = weight;
    gradient.check_finite = check_finite;
    const std::size_t row_bytes = gq::checked_mul(gradient.width, gq::item_bytes(bound_.spec.storage));
    const std::size_t bytes = gq::checked_mul(gradient.num_rows, gq::checked_add(row_bytes, sizeof(std::int64_t)));
    if (lends) gradient.lender = lend(std::move(memory));
    SparseBlock out;
    const UnlockedFor unlocked(bytes);
    out.core = gq::make_block(bound_.spec, gradient);
    return out;
  }

  /// The block, if it has ids and all of them are rows of the table.
  static std::optional<SparseBlock> in_table(SparseBlock block, std::int64_t num_table_rows) {
    if (block.core.num_rows == 0) return {};
    const std::int64_t* const ordered = block.core.ids.as<std::int64_t>();
    if (ordered[0] < 0 || ordered[block.core.num_rows - 1] >= num_table_rows) return {};
    return block;
  }

  const BoundSpec bound_;  ///< What it does.
};

/// For each part of a gradient its number of rows and where they lie packed.
nb::list split(nb::handle indices, nb::handle rows, std::size_t num_parts, nb::handle bounds) {
  const ArrayIn ids = ids_arg(indices);
  ArrayIn values;
  if (!values.hold(rows)) throw nb::type_error("values: expected a contiguous array");
  if (values.ndim() == 0 || values.dim(0) != ids.dim(0)) throw nb::value_error("values: not as many rows as ids");
  if (num_parts == 0) throw nb::value_error("num_parts: expected at least 1");
  std::optional<ArrayIn> firsts;
  if (!bounds.is_none()) firsts.emplace(ids_arg(bounds));
  if (firsts && firsts->dim(0) + 1 != num_parts) throw nb::value_error("bounds: expected one less than parts");
  const gq::PartOf part_of = firsts ? gq::PartOf(static_cast<const std::int64_t*>(firsts->data()), num_parts - 1)
                                    : gq::PartOf(num_parts);
  const std::size_t n = ids.dim(0);
  std::vector<gq::Part> parts;
  {
    const UnlockedFor unlocked(values.num_bytes());
    parts = gq::split(part_of, static_cast<const std::int64_t*>(ids.data()),
                      static_cast<const unsigned char*>(values.data()), n, n == 0 ? 0 : values.num_bytes() / n);
  }
  nb::list out;
  for (gq::Part& part : parts) out.append(nb::make_tuple(part.num_rows, Memory{std::move(part.memory)}));
  return out;
}

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<SparseBlock>(m, "SparseBlock", nb::is_final(), nb::is_weak_referenceable(),
                          "One sparse gradient, or the merged prefix of a log. Immutable.")
      .def_prop_ro("num_bytes", [](const SparseBlock& self) { return self.core.num_bytes(); })
      .def_prop_ro("lent", [](const SparseBlock& self) { return self.core.lent(); })
      .def_prop_ro("finite", [](const SparseBlock& self) { return self.core.finite; })
      .def_prop_ro("packed_bytes", [](const SparseBlock& self) { return gq::packed_bytes(self.core); },
                   "What `pack` takes.")
      .def("__len__", [](const SparseBlock& self) { return self.core.num_rows; });
  nb::class_<SparseReducer>(m, "SparseReducer", nb::is_final(), "The arithmetic of one sparse member.")
      .def(nb::init<std::string_view, std::string_view, std::string_view, std::size_t>(), nb::arg("dtype"),
           nb::arg("accumulate_dtype"), nb::arg("reduction_type"), nb::arg("num_threads"))
      .def("block", &SparseReducer::block, nb::arg("indices"), nb::arg("values"),
           nb::arg("weight"), nb::arg("lend"), nb::arg("check_finite"))
      .def("plain_block", &SparseReducer::plain_block, nb::arg("indices").none(), nb::arg("values").none(),
           nb::arg("row_shape"), nb::arg("num_table_rows"), nb::arg("weight"), nb::arg("lend"), nb::arg("check_finite"),
           "Return None for whatever `block` would refuse, and for anything else that needs a second look.")
      .def("packed_block", &SparseReducer::packed_block, nb::arg("memory"), nb::arg("num_rows"), nb::arg("row_shape"),
           nb::arg("num_table_rows"), nb::arg("weight"), nb::arg("lend"), nb::arg("check_finite"),
           "Return what `plain_block` returns for the ids and values that lie in memory as `pack` writes them.")
      .def("pack", &SparseReducer::pack, nb::arg("block"), nb::arg("memory"),
           "Write ids and values to writable memory: the ids, then the values at the next multiple of 64 bytes.")
      .def("merge", &SparseReducer::merge, nb::arg("blocks"), nb::arg("row_shape"), nb::arg("num_gradients"))
      .def("consume", &SparseReducer::consume, nb::arg("blocks"), nb::arg("row_shape"), nb::arg("num_gradients"),
           nb::arg("results"),
           "Append what `merge` returns, without the number of rows, to a list in the same call. Then the values of the "
           "blocks are lost, but for lent ones.")
      .def("compact", &SparseReducer::compact, nb::arg("blocks"))
      .def("export_block", &SparseReducer::export_block, nb::arg("block"),
           "Return rows, width, whether they are sums, the weight, and copies of ids, values and counts (None for one "
           "gradient).")
      .def("import_block", &SparseReducer::import_block, nb::arg("indices"), nb::arg("rows"), nb::arg("summed"),
           nb::arg("counts").none(), nb::arg("weight"), nb::arg("num_gradients"),
           "Return a block of what `export_block` of this or another engine has returned.")
      .def("distinct_bytes", &SparseReducer::distinct_bytes, nb::arg("blocks"));
  m.def("split", &split, nb::arg("indices"), nb::arg("values"), nb::arg("num_parts"), nb::arg("bounds").none(),
        "Return for each part its number of rows, and memory in which they lie as `pack` writes them.");
}
