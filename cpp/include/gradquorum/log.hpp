/// What is asked of a log of sparse blocks: its result, its compaction, its number of distinct rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "gradquorum/block.hpp"
#include "gradquorum/merge.hpp"
#include "gradquorum/reduce.hpp"

namespace gradquorum {

/// The reduced gradient of a log: ids, values in the storage type, counts.
inline Merged merge_log(const Spec& spec, const Block* const* blocks, std::size_t num_blocks, std::size_t width,
                        std::int64_t num_gradients) {
  const FloatModes modes;
  MergeOptions options;
  options.width = width;
  options.result = spec.storage;
  options.weighted = spec.reduction == Reduction::mean_by_weight;
  set_denominator(spec, num_gradients, total_weight(blocks, num_blocks), options.divide, options.count, options.number);
  return merge_blocks(spec, blocks, num_blocks, options);
}

/// Merges a prefix of a log, undivided, into one block that can stand in its place.
inline Block compact_log(const Spec& spec, const Block* const* blocks, std::size_t num_blocks) {
  MergeOptions options;
  options.result = spec.accumulate;
  options.weighted = spec.reduction == Reduction::mean_by_weight;
  Block out;
  out.num_gradients = 0;
  for (std::size_t b = num_blocks; b-- > 0;) {
    out.num_gradients += blocks[b]->num_gradients;
    if (blocks[b]->num_rows != 0) options.width = blocks[b]->width;
  }
  Merged merged = merge_blocks(spec, blocks, num_blocks, options);
  if (out.num_gradients <= std::numeric_limits<std::uint32_t>::max()) {
    out.counts32 = Buffer(merged.num_rows * sizeof(std::uint32_t));
    for (std::size_t i = 0; i < merged.num_rows; ++i)
      out.counts32.as<std::uint32_t>()[i] = static_cast<std::uint32_t>(merged.counts.as<std::int64_t>()[i]);
  } else {
    out.counts64 = std::move(merged.counts);
  }
  out.num_rows = merged.num_rows;
  out.width = options.width;
  out.dtype = spec.accumulate;
  out.compacted = true;
  out.weight = total_weight(blocks, num_blocks);
  out.ids = std::move(merged.ids);
  out.owned = std::move(merged.values);
  out.values = out.owned.bytes();
  return out;
}

/// Estimates how many distinct ids there are: keeps the ids whose hashes are below a limit that falls as they
/// get many. Exact while there are few; the error is a few per cent otherwise. Reads every id once.
class DistinctSample {
 public:
  /// Throws std::bad_alloc.
  DistinctSample() : table_(table_size * sizeof(std::uint64_t)) { clear(); }

  /// Takes ids in.
  void add(const std::int64_t* ids, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t hash = mix(static_cast<std::uint64_t>(ids[i]));
      if (hash > limit_) continue;
      insert(hash);
      while (size_ * 2 > table_size) halve();
    }
  }

  /// The estimate.
  std::size_t estimate() const {
    const double share = (static_cast<double>(limit_) + 1.0) / 18446744073709551616.0;
    return static_cast<std::size_t>(static_cast<double>(size_) / share + 0.5);
  }

 private:
  static constexpr std::size_t table_size = 4096;  ///< A power of two.

  /// A bijection that spreads nearby ids; 0 stays 0, which marks a free place, so 0 is moved.
  static std::uint64_t mix(std::uint64_t id) {
    std::uint64_t hash = (id + 1) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93ull;
    hash ^= hash >> 32;
    return hash == 0 ? 1 : hash;
  }

  /// Forgets all hashes.
  void clear() {
    for (std::size_t i = 0; i < table_size; ++i) table_.as<std::uint64_t>()[i] = 0;
    size_ = 0;
  }

  /// Adds a hash, once; there is room.
  void insert(std::uint64_t hash) {
    std::uint64_t* const table = table_.as<std::uint64_t>();
    std::size_t at = hash & (table_size - 1);
    while (table[at] != 0 && table[at] != hash) at = (at + 1) & (table_size - 1);
    if (table[at] == hash) return;
    table[at] = hash;
    ++size_;
  }

  /// Lowers the limit and drops what is above it; ends, for there are no more hashes than the limit says.
  void halve() {
    std::uint64_t kept[table_size / 2 + 1];
    std::size_t count = 0;
    limit_ /= 2;
    std::uint64_t* const table = table_.as<std::uint64_t>();
    for (std::size_t i = 0; i < table_size; ++i)
      if (table[i] != 0 && table[i] <= limit_) kept[count++] = table[i];
    clear();
    for (std::size_t i = 0; i < count; ++i) insert(kept[i]);
  }

  Buffer table_;                       ///< uint64 [table_size], open addressing.
  std::size_t size_ = 0;               ///< Hashes in it.
  std::uint64_t limit_ = ~std::uint64_t{0};  ///< Hashes above are not kept.
};

/// Estimates the bytes of the distinct rows of a log: an id and a row each.
inline std::size_t distinct_bytes(const Spec& spec, const Block* const* blocks, std::size_t num_blocks) {
  DistinctSample sample;
  std::size_t width = 0;
  for (std::size_t b = num_blocks; b-- > 0;) {
    if (blocks[b]->num_rows != 0) width = blocks[b]->width;
    sample.add(blocks[b]->ids.as<std::int64_t>(), blocks[b]->num_rows);
  }
  const std::size_t row = checked_add(sizeof(std::int64_t), checked_mul(width, kept_bytes(spec)));
  return checked_mul(sample.estimate(), row);
}

}  // namespace gradquorum
