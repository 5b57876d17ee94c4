/// Merges a log of blocks: sort the small, gather the big.
///
/// First the rows of each range of ids are put in order, which touches ids only; then every result row is
/// made from its rows, each read once in log order, and written once. Rows so thin that their
/// addresses would weigh more than they do are added up at once instead.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gradquorum/block.hpp"
#include "gradquorum/partition.hpp"
#include "gradquorum/sort.hpp"

namespace gradquorum {

/// What a merge is asked for.
struct MergeOptions {
  std::size_t width = 0;           ///< Elements per row.
  Divide divide = Divide::none;    ///< What sums are divided by.
  std::int64_t count = 1;          ///< The number, if it is a count.
  double number = 0.0;             ///< The number, if it is a weight; 0 otherwise.
  DType result = DType::f32;       ///< Storage or accumulate type.
  bool weighted = false;           ///< Rows are multiplied by the weights of their blocks.
  bool consume = false;            ///< The blocks' values, which nobody lends, are lost if it succeeds: memory is freed.
};

/// A merged log. Ids ascend without repeats.
struct Merged {
  std::size_t num_rows = 0;  ///< Number of ids.
  Buffer ids;                ///< int64 [num_rows].
  Buffer values;             ///< Result type [num_rows, width].
  Buffer counts;             ///< int64 [num_rows], gradients that touched the row.
};

/// Rows of at most so many accumulated bytes are added up while they are ordered.
inline constexpr std::size_t thin_bytes = 16;

/// One merge: the memory between its two phases.
class Merger {
 public:
  /// Takes what is to be merged. Throws std::bad_alloc.
  Merger(const Spec& spec, const Partition& partition, const MergeOptions& options)
      : spec_(spec), partition_(partition), options_(options) {
    const std::size_t n = partition.num_rows();
    row_bytes_ = checked_mul(options.width, item_bytes(options.result));
    sum_bytes_ = checked_mul(options.width, item_bytes(spec.accumulate));
    thin_ = options.width != 0 && sum_bytes_ <= thin_bytes;
    place_bytes_ = thin_ && sum_bytes_ > sizeof(RowAddress) ? thin_bytes : sizeof(RowAddress);
    std::size_t bytes = checked_mul(n, sizeof(std::int64_t) + sizeof(std::uint32_t));
    bytes = checked_add(bytes, checked_mul(n, place_bytes_));
    if (partition.counted()) bytes = checked_add(bytes, checked_mul(n, sizeof(std::int64_t)));
    if (options.weighted) bytes = checked_add(bytes, checked_mul(n, sizeof(std::uint32_t)));
    memory_ = Buffer(bytes);
    std::int64_t* const ids = memory_.as<std::int64_t>();
    all_.ids = ids;
    places_ = reinterpret_cast<unsigned char*>(ids + n);
    unsigned char* rest = places_ + n * place_bytes_;
    if (partition.counted()) {
      all_.touched = reinterpret_cast<std::int64_t*>(rest);
      rest += n * sizeof(std::int64_t);
    }
    all_.ends = reinterpret_cast<std::uint32_t*>(rest);
    if (options.weighted) all_.weight_of = all_.ends + n;
    ranges_ = Buffer(checked_mul(partition.num_ranges(), sizeof(Range)));
    if (options.consume) left_ = Buffer(checked_mul(partition.num_ranges(), sizeof(std::atomic<std::size_t>)));
    if (options.weighted) {
      weights_ = Buffer(checked_mul(partition.num_spans(), sizeof(double)));
      for (std::size_t b = 0; b < partition.num_spans(); ++b)
        weights_.as<double>()[b] = partition.span(b).weight_value;
    }
  }

  /// Does it.
  Merged run() {
    Merged out;
    const std::size_t num_ranges = partition_.num_ranges();
    const std::size_t n = partition_.num_rows();
    ThreadPool::run(n >= 2 * range_rows ? spec_.num_threads : 1, num_ranges, [&](std::size_t r) { order(r); });
    std::size_t num_pieces = 0;
    const std::size_t groups = piece_groups();
    for (std::size_t r = 0; r < num_ranges; ++r) {
      Range& range = ranges_.as<Range>()[r];
      range.first_row = out.num_rows;
      range.first_piece = num_pieces;
      out.num_rows += range.distinct;
      num_pieces += (range.distinct + groups - 1) / groups;
      if (options_.consume) new (left_.as<std::atomic<std::size_t>>() + r) std::atomic(num_pieces - range.first_piece);
    }
    out.ids = Buffer(checked_mul(out.num_rows, sizeof(std::int64_t)));
    out.counts = Buffer(checked_mul(out.num_rows, sizeof(std::int64_t)));
    out.values = Buffer(checked_mul(out.num_rows, row_bytes_));
    stream_ = row_bytes_ % 32 == 0 && out.values.size() >= stream_bytes;
    const bool spread = n * std::max(row_bytes_, sizeof(std::int64_t)) >= spread_bytes;
    ThreadPool::run(spread ? spec_.num_threads : 1, num_pieces, [&](std::size_t i) {  // Nothing throws here.
      const std::size_t r = range_of(i);
      gather(i, r, out);
      // No more than the result takes: pages given back have to be faulted in again by the next round.
      const bool may_discard = options_.consume && (partition_.counted() || partition_.rows_before(r) < out.num_rows);
      if (may_discard && left_.as<std::atomic<std::size_t>>()[r].fetch_sub(1) == 1) partition_.discard(r);
    });
    return out;
  }

 private:
  /// What the first phase finds out about a range.
  struct Range {
    std::size_t distinct;     ///< Distinct ids.
    std::size_t first_row;    ///< Result rows before.
    std::size_t first_piece;  ///< Pieces of the second phase before.
    bool summed;              ///< Added up already.
  };

  /// Groups of a piece of the second phase.
  std::size_t piece_groups() const {
    return std::max<std::size_t>(16, piece_bytes / (row_bytes_ + 2 * sizeof(std::int64_t)));
  }

  /// Scratch memory of a range.
  Ordered part(std::size_t r) const {
    const std::size_t before = partition_.rows_before(r);
    Ordered part = all_;
    part.ids += before;
    part.rows = reinterpret_cast<RowAddress*>(places_ + before * place_bytes_);
    part.ends += before;
    if (part.weight_of != nullptr) part.weight_of += before;
    if (part.touched != nullptr) part.touched += before;
    return part;
  }

  /// Sums of a range of thin rows, where the addresses of other ranges are.
  unsigned char* sums(std::size_t r) const { return places_ + partition_.rows_before(r) * place_bytes_; }

  /// First phase: puts a range in order.
  void order(std::size_t r) {
    const Buffer memory(partition_.num_spans() * sizeof(Span));
    const SpanList list = partition_.range(r, memory.as<Span>());
    Range& range = ranges_.as<Range>()[r];
    range.summed = thin_ && list.num_rows != 0 && list.num_rows < 0x7fffffffu && is_dense(list);
    if (range.summed) {
      with_types(spec_.storage, spec_.accumulate, [&](auto types) {
        using T = decltype(types);
        using A = typename T::A;
        range.distinct = add_thin<typename T::S, A>(list, part(r), reinterpret_cast<A*>(sums(r)));
      });
    } else {
      range.distinct = order_range(list, part(r));
    }
  }

  /// Ranks and adds up a dense range of thin rows; returns the number of distinct ids.
  template <class S, class A>
  std::size_t add_thin(const SpanList& list, const Ordered& out, A* sums) const {
    const RangeBitmap map(list);
    std::size_t longest = 0;
    for (std::size_t s = 0; s < list.size; ++s) longest = std::max(longest, list.spans[s].count);
    const Buffer ranks(longest * sizeof(std::uint32_t));
    const std::size_t distinct = map.list(out.ids);
    std::memset(out.ends, 0, distinct * sizeof(std::uint32_t));
    if (out.touched != nullptr) std::memset(out.touched, 0, distinct * sizeof(std::int64_t));
    const A neutral = std::is_floating_point_v<A> ? static_cast<A>(-0.0) : A{};  // x + -0 is x, also for -0.
    std::fill(sums, sums + distinct * options_.width, neutral);
    std::uint32_t* const rank = ranks.as<std::uint32_t>();
    for (std::size_t s = 0; s < list.size; ++s) {
      const Span& span = list.spans[s];
      map.rank(span, rank, out.ends);
      if (out.touched != nullptr) add_touched(span, rank, out.touched);
      const unsigned char* const from = reinterpret_cast<const unsigned char*>(span.row & ~accumulated_tag);
      if ((span.row & accumulated_tag) != 0) scatter<A, A>(from, rank, span, sums);
      else scatter<S, A>(from, rank, span, sums);
    }
    return distinct;
  }

  /// Adds the rows of a span to the sums.
  template <class S, class A>
  void scatter(const unsigned char* from, const std::uint32_t* rank, const Span& span, A* sums) const {
    const std::size_t width = options_.width;
    if constexpr (std::is_floating_point_v<A>) {
      if (options_.weighted) {
        const A weight = static_cast<A>(span.weight_value);
        GRADQUORUM_DISPATCH(scatter_rows<S, A, true>(from, rank, span.count, width, weight, sums));
        return;
      }
    }
    GRADQUORUM_DISPATCH(scatter_rows<S, A, false>(from, rank, span.count, width, A{}, sums));
  }

  /// The range that a piece of the second phase is in.
  std::size_t range_of(std::size_t piece) const {
    const Range* const ranges = ranges_.as<Range>();
    const Range* const next = std::upper_bound(ranges, ranges + partition_.num_ranges(), piece,
                                               [](std::size_t p, const Range& range) { return p < range.first_piece; });
    return static_cast<std::size_t>(next - ranges) - 1;
  }

  /// Second phase: makes the result rows of a piece.
  void gather(std::size_t piece, std::size_t r, Merged& out) const {
    const Range& range = ranges_.as<Range>()[r];
    const std::size_t begin = (piece - range.first_piece) * piece_groups();
    const std::size_t size = std::min(piece_groups(), range.distinct - begin);
    const std::size_t row = range.first_row + begin;
    const Ordered order = part(r);
    std::memcpy(out.ids.as<std::int64_t>() + row, order.ids + begin, size * sizeof(std::int64_t));
    std::int64_t* const counts = out.counts.as<std::int64_t>() + row;
    const std::uint32_t* const ends = order.ends + begin;
    const std::uint32_t first = begin == 0 || range.summed ? 0 : ends[-1];
    if (order.touched != nullptr) {
      std::memcpy(counts, order.touched + begin, size * sizeof(std::int64_t));
    } else if (range.summed) {
      for (std::size_t i = 0; i < size; ++i) counts[i] = ends[i];
    } else {
      counts[0] = ends[0] - first;
      for (std::size_t i = 1; i < size; ++i) counts[i] = ends[i] - ends[i - 1];
    }
    RowsTask task;
    task.num_groups = size;
    task.touched = order.touched != nullptr ? order.touched + begin : nullptr;
    task.divide = options_.divide;
    task.count = options_.count;
    task.number = options_.number;
    task.width = options_.width;
    task.out = out.values.bytes() + row * row_bytes_;
    task.stream = stream_;
    const bool keep = options_.result == spec_.accumulate;
    if (!range.summed) {
      task.ends = ends;
      task.skipped = first;
      task.rows = order.rows + first;
      task.num_rows = order.ends[range.distinct - 1] - first;
      if (options_.weighted) {
        task.weight_of = order.weight_of + first;
        task.weights = weights_.as<double>();
      }
    }
    if (options_.width == 0) return;
    with_types(spec_.storage, spec_.accumulate, [&](auto types) {
      using S = typename decltype(types)::S;
      using A = typename decltype(types)::A;
      if (!range.summed) return sum_rows<S, A>(task, keep);
      const A* const from = reinterpret_cast<const A*>(sums(r)) + begin * options_.width;
      if (keep) return GRADQUORUM_DISPATCH(finish_thin<A, A>(task, from, ends));
      return GRADQUORUM_DISPATCH(finish_thin<A, S>(task, from, ends));
    });
  }

  const Spec& spec_;             ///< Types and threads.
  const Partition& partition_;   ///< The log, cut into ranges.
  const MergeOptions options_;   ///< What is asked for.
  std::size_t row_bytes_ = 0;    ///< Bytes of a result row.
  std::size_t sum_bytes_ = 0;    ///< Bytes of a row of sums.
  bool thin_ = false;            ///< Rows are thin.
  bool stream_ = false;          ///< Results are written around the caches.
  std::size_t place_bytes_ = 0;  ///< Bytes per row in places_, a multiple of 8.
  Buffer memory_;                ///< What all_ and places_ point into.
  Ordered all_;                  ///< Scratch for all rows; a range uses what its rows leave room for.
  unsigned char* places_ = nullptr; ///< Row addresses of a range, or its thin sums.
  Buffer weights_;               ///< double, one for each block that has rows.
  Buffer ranges_;                ///< Range, each written by the thread that orders it.
  Buffer left_;                  ///< std::atomic<size_t>, pieces of each range that are not made yet, if asked to consume.
};

/// Merges blocks as the options say. Throws std::bad_alloc or std::invalid_argument; then nothing has changed.
inline Merged merge_blocks(const Spec& spec, const Block* const* blocks, std::size_t num_blocks,
                           const MergeOptions& options) {
  const FloatModes modes;
  const Partition partition(spec, blocks, num_blocks, options.width);
  if (partition.num_rows() == 0) return Merged{};
  return Merger(spec, partition, options).run();
}

}  // namespace gradquorum
