/// What is asked of a log of sparse blocks: its result, its compaction, its number of distinct rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "gradquorum/block.hpp"
#include "gradquorum/merge.hpp"
#include "gradquorum/reduce.hpp"
#include "gradquorum/sample.hpp"

namespace gradquorum {

/// The reduced gradient of a log: ids, values in the storage type, counts. If it consumes the blocks, their values are
/// lost where it succeeds, but for lent ones; that is for who is the only one to have them.
inline Merged merge_log(const Spec& spec, const Block* const* blocks, std::size_t num_blocks, std::size_t width,
                        std::int64_t num_gradients, bool consume = false) {
  const FloatModes modes;
  MergeOptions options;
  options.width = width;
  options.consume = consume && std::none_of(blocks, blocks + num_blocks, [](const Block* b) { return b->lent(); });
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
  out.sample = IdSample::of(out.ids.as<std::int64_t>(), out.num_rows);
  return out;
}

/// Estimates the bytes of the distinct rows of a log: an id and a row each.
inline std::size_t distinct_bytes(const Spec& spec, const Block* const* blocks, std::size_t num_blocks) {
  DistinctSample sample;
  std::size_t width = 0;
  for (std::size_t b = 0; b < num_blocks; ++b) sample.lower(blocks[b]->sample.limit);
  for (std::size_t b = num_blocks; b-- > 0;) {
    const Block& block = *blocks[b];
    if (block.num_rows != 0) width = block.width;
    if (block.num_rows >= IdSample::from_rows) sample.add(block.sample);
    else sample.add(block.ids.as<std::int64_t>(), block.num_rows);
  }
  const std::size_t row = checked_add(sizeof(std::int64_t), checked_mul(width, kept_bytes(spec)));
  return checked_mul(sample.estimate(), row);
}

}  // namespace gradquorum
