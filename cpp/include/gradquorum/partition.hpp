/// Cuts a log of blocks into ranges of ids that threads can order independently.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>

#include "gradquorum/block.hpp"
#include "gradquorum/pool.hpp"
#include "gradquorum/sort.hpp"
#include "gradquorum/threads.hpp"

namespace gradquorum {

/// Rows that one range should hold: what is needed to order them then fits the second-level cache.
inline constexpr std::size_t range_rows = 8192;

/// The blocks of a log that have rows, and ranges of ids that cut each of them.
class Partition {
 public:
  /// Takes the blocks in log order; throws std::invalid_argument if they do not fit each other.
  Partition(const Spec& spec, const Block* const* blocks, std::size_t num_blocks, std::size_t width) {
    spans_ = Buffer(checked_mul(num_blocks, sizeof(Span)));
    for (std::size_t b = 0; b < num_blocks; ++b) {
      const Block& block = *blocks[b];
      if (block.num_rows == 0) continue;
      if (block.width != width) throw std::invalid_argument("blocks with rows of different widths");
      if (block.dtype != spec.storage && block.dtype != spec.accumulate)
        throw std::invalid_argument("a block of another type");
      Span span;
      span.ids = block.ids.as<std::int64_t>();
      span.count = block.num_rows;
      span.row = reinterpret_cast<RowAddress>(block.values);
      if (block.dtype == spec.accumulate && spec.storage != spec.accumulate) span.row |= accumulated_tag;
      span.stride = width * item_bytes(block.dtype);
      span.counts32 = block.counts32.as<std::uint32_t>();
      span.counts64 = block.counts64.as<std::int64_t>();
      span.weight = static_cast<std::uint32_t>(num_spans_);
      span.weight_value = block.compacted ? 1.0 : block.weight;
      counted_ = counted_ || block.compacted;
      num_rows_ = checked_add(num_rows_, block.num_rows);
      new (spans() + num_spans_++) Span(span);
    }
    if (num_spans_ != 0) cut(spec.num_threads);
  }

  std::size_t num_rows() const { return num_rows_; }      ///< Rows of all blocks.
  std::size_t num_spans() const { return num_spans_; }    ///< Blocks that have rows.
  std::size_t num_ranges() const { return num_ranges_; }  ///< Ranges of ids.
  bool counted() const { return counted_; }               ///< A block has counts of its own.
  const Span& span(std::size_t b) const { return spans()[b]; }  ///< All of a block.

  /// Rows of all blocks that are before a range.
  std::size_t rows_before(std::size_t range) const {
    if (num_ranges_ <= 1) return range == 0 ? 0 : num_rows_;
    return before_.as<std::size_t>()[range];
  }

  /// The part of each block in a range; `memory` must hold num_spans() spans.
  SpanList range(std::size_t range, Span* memory) const {
    SpanList list;
    list.spans = memory;
    for (std::size_t b = 0; b < num_spans_; ++b) {
      Span span = spans()[b];
      if (num_ranges_ > 1) {
        const std::size_t begin = begins(range)[b];
        const std::size_t end = range + 1 < num_ranges_ ? begins(range + 1)[b] : span.count;
        span.ids += begin;
        span.row += begin * span.stride;
        if (span.counts32 != nullptr) span.counts32 += begin;
        if (span.counts64 != nullptr) span.counts64 += begin;
        span.count = end - begin;
      }
      if (span.count == 0) continue;
      const std::int64_t low = span.ids[0];
      const std::int64_t high = span.ids[span.count - 1];
      list.low = list.size == 0 ? low : std::min(list.low, low);
      list.high = list.size == 0 ? high : std::max(list.high, high);
      list.num_rows += span.count;
      new (memory + list.size++) Span(span);
    }
    return list;
  }

  /// Gives the values of a range back to the system: they have been read. If there are merged blocks only theirs, which
  /// are large, so that faulting them in again is cheap: the others' memory is of use as it is to the next round.
  void discard(std::size_t range) const noexcept {
    for (std::size_t b = 0; b < num_spans_; ++b) {
      const Span& span = spans()[b];
      if (counted_ && span.counts32 == nullptr && span.counts64 == nullptr) continue;
      const std::size_t begin = num_ranges_ > 1 ? begins(range)[b] : 0;
      const std::size_t end = num_ranges_ > 1 && range + 1 < num_ranges_ ? begins(range + 1)[b] : span.count;
      const auto* const values = reinterpret_cast<const unsigned char*>(span.row & ~accumulated_tag);
      MemoryPool::discard(values + begin * span.stride, (end - begin) * span.stride);
    }
  }

 private:
  /// All blocks that have rows.
  Span* spans() const { return spans_.as<Span>(); }
  /// Where a range begins in each block.
  std::size_t* begins(std::size_t range) const { return begins_.as<std::size_t>() + range * num_spans_; }

  /// Chooses the borders from a sample, and finds them in every block.
  void cut(std::size_t num_threads) {
    num_ranges_ = std::min({num_rows_ / range_rows, num_rows_ / num_spans_, std::size_t{1} << 14});
    if (num_ranges_ <= 1) {
      num_ranges_ = 1;
      return;
    }
    const std::size_t step = num_rows_ / (num_ranges_ * 8);
    Buffer sample(checked_mul(num_rows_ / step + 1, sizeof(std::int64_t)));
    std::int64_t* const ids = sample.as<std::int64_t>();
    std::size_t size = 0;
    std::size_t next = step / 2;  // Counted through all blocks, so that small ones have their share.
    for (std::size_t b = 0; b < num_spans_; ++b) {
      for (; next < spans()[b].count; next += step) ids[size++] = spans()[b].ids[next];
      next -= spans()[b].count;
    }
    std::sort(ids, ids + size);
    begins_ = Buffer(checked_mul(checked_mul(num_ranges_, num_spans_), sizeof(std::size_t)));
    before_ = Buffer((num_ranges_ + 1) * sizeof(std::size_t));
    std::size_t* const before = before_.as<std::size_t>();
    ThreadPool::run(num_ranges_ * num_spans_ >= 4096 ? num_threads : 1, num_ranges_, [&](std::size_t r) {
      std::size_t sum = 0;
      for (std::size_t b = 0; b < num_spans_; ++b) {
        const Span& span = spans()[b];
        const std::int64_t border = ids[r * size / num_ranges_];
        const std::int64_t* const at = std::lower_bound(span.ids, span.ids + span.count, border);
        begins(r)[b] = r == 0 ? 0 : static_cast<std::size_t>(at - span.ids);
        sum += begins(r)[b];
      }
      before[r] = sum;
    });
    before[num_ranges_] = num_rows_;
  }

  Buffer spans_;                 ///< Span [num_spans_].
  Buffer begins_;                ///< size_t [num_ranges_, num_spans_]: where each range begins in each block.
  Buffer before_;                ///< size_t [num_ranges_ + 1]: rows before each range.
  std::size_t num_spans_ = 0;    ///< Blocks that have rows.
  std::size_t num_rows_ = 0;     ///< Rows of all blocks.
  std::size_t num_ranges_ = 0;   ///< Ranges; 0 if there are no rows.
  bool counted_ = false;         ///< A block has counts of its own.
};

}  // namespace gradquorum
