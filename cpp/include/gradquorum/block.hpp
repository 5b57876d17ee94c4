/// A gradient put in order: ids ascending and unique, repeats summed, values owned or lent.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "gradquorum/copy.hpp"
#include "gradquorum/dispatch.hpp"
#include "gradquorum/dtype.hpp"
#include "gradquorum/pool.hpp"
#include "gradquorum/sample.hpp"
#include "gradquorum/sort.hpp"
#include "gradquorum/threads.hpp"

namespace gradquorum {

/// One gradient, or the merged prefix of a log. Nothing in it changes once it is made.
struct Block {
  std::size_t num_rows = 0;             ///< Number of ids.
  std::size_t width = 0;                ///< Elements per row.
  DType dtype = DType::f32;             ///< Type of the values: storage or accumulate.
  bool compacted = false;               ///< Rows are sums, weighted already.
  bool finite = true;                   ///< False if asked for and an element is infinite or NaN.
  double weight = 1.0;                  ///< Of the gradient, or the sum of those of a prefix.
  std::uint64_t num_gradients = 1;      ///< Gradients in it.
  Buffer ids;                           ///< int64 [num_rows], ascending, unique.
  Buffer owned;                         ///< The values, unless lent.
  IdSample sample;                      ///< Of the ids.
  Buffer counts32;                      ///< uint32 [num_rows], gradients per row of a prefix, or
  Buffer counts64;                      ///< int64 [num_rows], if they might not fit.
  const unsigned char* values = nullptr; ///< dtype [num_rows, width].
  std::shared_ptr<const void> lender;   ///< Keeps lent values alive; null if owned.

  /// True if the values belong to somebody else.
  bool lent() const { return lender != nullptr; }

  /// Bytes that the block keeps alive, lent ones included.
  std::size_t num_bytes() const {
    return ids.size() + sample.hashes.size() + counts32.size() + counts64.size() + num_rows * width * item_bytes(dtype);
  }
};

/// What make_block() is given besides the spec.
struct Gradient {
  const std::int64_t* ids = nullptr;      ///< [num_rows], any order, repeats allowed. Read once.
  const unsigned char* values = nullptr;  ///< Storage type [num_rows, width], aligned to the element.
  std::size_t num_rows = 0;               ///< Number of rows.
  std::size_t width = 0;                  ///< Elements per row.
  double weight = 1.0;                    ///< Exact in the accumulate type.
  bool check_finite = false;              ///< Whether to look for infinities and NaN.
  std::shared_ptr<const void> lender;     ///< If not null, values that need no ordering are lent.
};

/// Sums groups of rows into `out`, spread over threads; true unless `check` finds infinities or NaN.
inline bool sum_groups(const Spec& spec, const Ordered& order, std::size_t distinct, std::size_t width, DType type,
                       unsigned char* out, bool check) {
  const std::size_t row_bytes = width * item_bytes(type);
  const std::size_t groups = std::max<std::size_t>(1, piece_bytes / 4 / (row_bytes + 1));
  const std::size_t total = order.ends[distinct - 1];
  std::atomic<bool> finite{true};
  const bool spread = distinct * row_bytes >= spread_bytes;
  ThreadPool::run(spread ? spec.num_threads : 1, (distinct + groups - 1) / groups, [&](std::size_t i) {
    const std::size_t begin = i * groups;
    RowsTask task;
    task.num_groups = std::min(groups, distinct - begin);
    task.skipped = begin == 0 ? 0 : order.ends[begin - 1];
    task.ends = order.ends + begin;
    task.rows = order.rows + task.skipped;
    task.num_rows = total - task.skipped;
    task.width = width;
    task.out = out + begin * row_bytes;
    with_types(spec.storage, spec.accumulate, [&](auto types) {
      using T = decltype(types);
      sum_rows<typename T::S, typename T::A>(task, type == spec.accumulate);
    });
    if (check && !all_finite(type, task.out, task.num_groups * width)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

/// Fills in ids and values of a gradient whose ids are not in order.
inline void order_block(const Spec& spec, const Gradient& gradient, Buffer ids, Block& block) {
  Span span;
  span.ids = ids.as<std::int64_t>();
  span.count = gradient.num_rows;
  span.row = reinterpret_cast<RowAddress>(gradient.values);
  span.stride = gradient.width * item_bytes(spec.storage);
  SpanList list;
  list.spans = &span;
  list.size = 1;
  list.num_rows = gradient.num_rows;
  list.ascending = false;
  GRADQUORUM_DISPATCH(range_of(span.ids, span.count, list.low, list.high));
  const Buffer places(checked_mul(gradient.num_rows, sizeof(RowAddress) + sizeof(std::uint32_t)));
  Buffer sorted(checked_mul(gradient.num_rows, sizeof(std::int64_t)));
  Ordered order;
  order.ids = sorted.as<std::int64_t>();
  order.rows = places.as<RowAddress>();
  order.ends = reinterpret_cast<std::uint32_t*>(order.rows + gradient.num_rows);
  const std::size_t distinct = order_range(list, order);
  block.num_rows = distinct;
  block.dtype = distinct == gradient.num_rows ? spec.storage : spec.accumulate;
  block.owned = Buffer(checked_mul(checked_mul(distinct, gradient.width), item_bytes(block.dtype)));
  block.ids = Buffer(distinct * sizeof(std::int64_t));
  std::memcpy(block.ids.bytes(), sorted.bytes(), block.ids.size());
  block.values = block.owned.bytes();
  block.sample = IdSample::of(block.ids.as<std::int64_t>(), distinct);
  block.finite =
      sum_groups(spec, order, distinct, gradient.width, block.dtype, block.owned.bytes(), gradient.check_finite);
}

/// Puts a gradient in order and copies it, or keeps lent values. Throws std::bad_alloc; then nothing has changed.
inline Block make_block(const Spec& spec, const Gradient& gradient) {
  const FloatModes modes;
  Block block;
  block.width = gradient.width;
  block.dtype = spec.storage;
  block.weight = gradient.weight;
  const std::size_t bytes = checked_mul(checked_mul(gradient.num_rows, gradient.width), item_bytes(spec.storage));
  Buffer ids(checked_mul(gradient.num_rows, sizeof(std::int64_t)));
  if (!GRADQUORUM_DISPATCH(copy_ids(gradient.ids, gradient.num_rows, ids.as<std::int64_t>()))) {
    order_block(spec, gradient, std::move(ids), block);
    return block;
  }
  block.num_rows = gradient.num_rows;
  block.ids = std::move(ids);
  block.sample = IdSample::of(block.ids.as<std::int64_t>(), block.num_rows);
  if (gradient.lender != nullptr) {
    block.lender = gradient.lender;
    block.values = gradient.values;
    const std::size_t elements = bytes / item_bytes(spec.storage);
    block.finite = !gradient.check_finite || all_finite(spec.storage, gradient.values, elements);
    return block;
  }
  block.owned = Buffer(bytes);
  block.values = block.owned.bytes();
  if (bytes != 0) block.finite = copy_values(spec, gradient.values, block.owned.bytes(), bytes, gradient.check_finite);
  return block;
}

}  // namespace gradquorum
