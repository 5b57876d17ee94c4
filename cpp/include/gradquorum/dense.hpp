/// Dense gradients: whole arrays, added up in log order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "gradquorum/copy.hpp"
#include "gradquorum/dispatch.hpp"
#include "gradquorum/pool.hpp"
#include "gradquorum/reduce.hpp"
#include "gradquorum/threads.hpp"

namespace gradquorum {

/// One dense gradient, or the running sum of several. Nothing in it changes once it is made.
struct DenseBlock {
  bool empty = true;                     ///< No gradient in it carried this member.
  std::size_t num_elements = 0;          ///< Elements.
  DType dtype = DType::f32;              ///< Type of the values: storage or accumulate.
  bool compacted = false;                ///< The values are sums, weighted already.
  bool finite = true;                    ///< False if asked for and an element is infinite or NaN.
  double weight = 1.0;                   ///< Of the gradient, or the sum of those of a prefix.
  std::int64_t count = 0;                ///< Gradients that carried this member.
  Buffer owned;                          ///< The values, unless lent.
  const unsigned char* values = nullptr; ///< dtype [num_elements].
  std::shared_ptr<const void> lender;    ///< Keeps lent values alive; null if owned.

  /// True if the values belong to somebody else.
  bool lent() const { return lender != nullptr; }

  /// Bytes that the block keeps alive, lent ones included.
  std::size_t num_bytes() const { return num_elements * item_bytes(dtype); }
};

/// Copies a dense gradient, or keeps a lent one.
inline DenseBlock make_dense(const Spec& spec, const unsigned char* values, std::size_t num_elements, double weight,
                             bool check_finite, std::shared_ptr<const void> lender) {
  DenseBlock block;
  const std::size_t bytes = checked_mul(num_elements, item_bytes(spec.storage));
  block.empty = false;
  block.num_elements = num_elements;
  block.dtype = spec.storage;
  block.weight = weight;
  block.count = 1;
  if (lender != nullptr) {
    block.lender = std::move(lender);
    block.values = values;
    block.finite = !check_finite || all_finite(spec.storage, values, num_elements);
    return block;
  }
  block.owned = Buffer(bytes);
  block.values = block.owned.bytes();
  if (bytes != 0) block.finite = copy_values(spec, values, block.owned.bytes(), bytes, check_finite);
  return block;
}

/// Elements that are added up at a time: their sums then stay in the first-level cache.
inline constexpr std::size_t dense_run = 2048;

/// Adds up elements begin .. begin + size of the blocks in log order into sums.
template <class S, class A>
void add_dense(const DenseBlock* const* blocks, std::size_t num_blocks, bool weighted, DType storage, std::size_t begin,
               std::size_t size, A* sums) {
  bool first = true;
  for (std::size_t b = 0; b < num_blocks; ++b) {
    const DenseBlock& block = *blocks[b];
    if (block.empty) continue;
    const bool plain = block.dtype == storage;
    const unsigned char* const from = block.values + begin * item_bytes(block.dtype);
    bool done = false;
    if constexpr (std::is_floating_point_v<A>) {
      if (weighted && !block.compacted) {
        const A weight = static_cast<A>(block.weight);
        if (plain) GRADQUORUM_DISPATCH(add_run<S, A, true>(from, size, weight, first, sums));
        else GRADQUORUM_DISPATCH(add_run<A, A, true>(from, size, weight, first, sums));
        done = true;
      }
    }
    if (!done && plain) GRADQUORUM_DISPATCH(add_run<S, A, false>(from, size, A{}, first, sums));
    else if (!done) GRADQUORUM_DISPATCH(add_run<A, A, false>(from, size, A{}, first, sums));
    first = false;
  }
}

/// The sum of a log of dense blocks, divided if `divide`, in the result type; no memory if all are empty.
inline Buffer sum_dense(const Spec& spec, const DenseBlock* const* blocks, std::size_t num_blocks,
                        std::size_t num_elements, DType result, Divide divide, std::int64_t count, double number) {
  for (std::size_t b = 0; b < num_blocks; ++b) {
    if (blocks[b]->empty) continue;
    if (blocks[b]->num_elements != num_elements) throw std::invalid_argument("blocks of different sizes");
    if (blocks[b]->dtype != spec.storage && blocks[b]->dtype != spec.accumulate)
      throw std::invalid_argument("a block of another type");
  }
  const bool weighted = spec.reduction == Reduction::mean_by_weight;
  const std::size_t item = item_bytes(result);
  Buffer out(checked_mul(num_elements, item));
  const std::size_t run = dense_run * 8;
  const bool spread = out.size() >= spread_bytes / 4;
  ThreadPool::run(spread ? spec.num_threads : 1, (num_elements + run - 1) / run, [&](std::size_t i) {
    with_types(spec.storage, spec.accumulate, [&](auto types) {
      using S = typename decltype(types)::S;
      using A = typename decltype(types)::A;
      alignas(64) A sums[dense_run];
      const std::size_t stop = std::min(num_elements, (i + 1) * run);
      const A divisor = number > 0 ? static_cast<A>(number) : static_cast<A>(count);
      const bool divides = divide != Divide::none;
      for (std::size_t begin = i * run; begin < stop; begin += dense_run) {
        const std::size_t size = std::min(dense_run, stop - begin);
        add_dense<S, A>(blocks, num_blocks, weighted, spec.storage, begin, size, sums);
        unsigned char* const to = out.bytes() + begin * item;
        if (result == spec.accumulate) GRADQUORUM_DISPATCH(finish_run<A, A>(sums, size, divides, divisor, to));
        else GRADQUORUM_DISPATCH(finish_run<A, S>(sums, size, divides, divisor, to));
      }
    });
  });
  return out;
}

/// Gradients of a log that carried this member.
inline std::int64_t dense_count(const DenseBlock* const* blocks, std::size_t num_blocks) {
  std::int64_t count = 0;
  for (std::size_t b = 0; b < num_blocks; ++b) count += blocks[b]->count;
  return count;
}

/// The reduced gradient of a log of dense blocks; zeros if all are empty.
inline Buffer merge_dense(const Spec& spec, const DenseBlock* const* blocks, std::size_t num_blocks,
                          std::size_t num_elements, std::int64_t num_gradients) {
  const FloatModes modes;
  const std::int64_t carried = dense_count(blocks, num_blocks);
  if (carried == 0) {
    Buffer zeros(checked_mul(num_elements, item_bytes(spec.storage)));
    if (zeros.size() != 0) std::memset(zeros.bytes(), 0, zeros.size());
    return zeros;
  }
  Divide divide = Divide::none;
  std::int64_t count = 1;
  double number = 0.0;
  set_denominator(spec, num_gradients, total_weight(blocks, num_blocks), divide, count, number);
  if (divide == Divide::by_touched) count = carried;
  return sum_dense(spec, blocks, num_blocks, num_elements, spec.storage, divide, count, number);
}

/// Adds up a prefix of a log, undivided, into one block that can stand in its place.
inline DenseBlock compact_dense(const Spec& spec, const DenseBlock* const* blocks, std::size_t num_blocks) {
  DenseBlock out;
  out.dtype = spec.accumulate;
  out.compacted = true;
  out.weight = total_weight(blocks, num_blocks);
  out.count = dense_count(blocks, num_blocks);
  for (std::size_t b = 0; b < num_blocks; ++b)
    if (!blocks[b]->empty) out.num_elements = blocks[b]->num_elements;
  out.empty = out.count == 0;
  if (out.empty) return out;
  out.owned = sum_dense(spec, blocks, num_blocks, out.num_elements, spec.accumulate, Divide::none, 1, 0.0);
  out.values = out.owned.bytes();
  return out;
}

}  // namespace gradquorum
