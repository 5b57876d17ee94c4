/// Estimates how many distinct ids a log holds, from samples that each block takes of its own ids once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gradquorum/pool.hpp"

namespace gradquorum {

/// A bijection that spreads nearby ids; never 0, which marks a free place of a table.
inline std::uint64_t hash_id(std::int64_t id) {
  std::uint64_t hash = (static_cast<std::uint64_t>(id) + 1) * 0x9e3779b97f4a7c15ull;
  hash ^= hash >> 32;
  hash *= 0xd6e8feb86659fd93ull;
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

/// The hashes of a block's ids that are not above a limit. Small blocks have none: their ids are few enough.
struct IdSample {
  std::size_t size = 0;               ///< Number of hashes; 0 if there is no sample.
  std::uint64_t limit = ~std::uint64_t{0};  ///< Hashes above are left out.
  Buffer hashes;                      ///< uint64 [size], distinct.

  /// Blocks of fewer rows have no sample.
  static constexpr std::size_t from_rows = 2048;

  /// Samples distinct ids. Throws std::bad_alloc.
  static IdSample of(const std::int64_t* ids, std::size_t count) {
    constexpr std::size_t most = 2048;
    IdSample out;
    if (count < from_rows) return out;
    std::uint64_t kept[most + 1];
    out.limit /= count / (most / 2);
    std::uint64_t limit = out.limit;
    std::size_t size = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t hash = hash_id(ids[i]);
      kept[size] = hash;  // Stays if the size grows past it: nothing to predict.
      size += hash <= limit;
      while (size > most) size = halve(kept, size, limit);
    }
    out.size = size;
    out.limit = limit;
    out.hashes = Buffer(out.size * sizeof(std::uint64_t));
    if (out.size != 0) std::memcpy(out.hashes.bytes(), kept, out.hashes.size());
    return out;
  }

 private:
  /// Halves the limit and drops what is above it; returns how many are left.
  static std::size_t halve(std::uint64_t* hashes, std::size_t size, std::uint64_t& limit) {
    limit /= 2;
    std::size_t left = 0;
    for (std::size_t i = 0; i < size; ++i)
      if (hashes[i] <= limit) hashes[left++] = hashes[i];
    return left;
  }
};

/// Counts distinct hashes below a limit that falls as they get many. Exact while there are few ids; the error is
/// a few per cent otherwise.
class DistinctSample {
 public:
  /// Throws std::bad_alloc.
  DistinctSample() : table_(table_size * sizeof(std::uint64_t)) { clear(); }

  /// Leaves out hashes above a limit. To be called before anything is added.
  void lower(std::uint64_t limit) {
    if (limit < limit_) limit_ = limit;
  }

  /// Takes ids in.
  void add(const std::int64_t* ids, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) add_hash(hash_id(ids[i]));
  }

  /// Takes a sample in; its limit must not be below this one's.
  void add(const IdSample& sample) {
    const std::uint64_t* const hashes = sample.hashes.as<std::uint64_t>();
    for (std::size_t i = 0; i < sample.size; ++i) add_hash(hashes[i]);
  }

  /// The estimate.
  std::size_t estimate() const {
    const double share = (static_cast<double>(limit_) + 1.0) / 18446744073709551616.0;
    return static_cast<std::size_t>(static_cast<double>(size_) / share + 0.5);
  }

 private:
  static constexpr std::size_t table_size = 4096;

  void clear() {
    std::memset(table_.bytes(), 0, table_.size());
    size_ = 0;
  }

  void add_hash(std::uint64_t hash) {
    if (hash > limit_) return;
    insert(hash);
    while (size_ * 2 > table_size) halve();
  }

  void insert(std::uint64_t hash) {
    std::uint64_t* const table = table_.as<std::uint64_t>();
    std::size_t at = hash & (table_size - 1);
    while (table[at] != 0 && table[at] != hash) at = (at + 1) & (table_size - 1);
    if (table[at] == hash) return;
    table[at] = hash;
    ++size_;
  }

  /// Halves the limit and drops what is above it; ends, for there are no more hashes than the limit says.
  void halve() {
    std::uint64_t kept[table_size / 2 + 1];
    std::size_t count = 0;
    limit_ /= 2;
    const std::uint64_t* const table = table_.as<std::uint64_t>();
    for (std::size_t i = 0; i < table_size; ++i)
      if (table[i] != 0 && table[i] <= limit_) kept[count++] = table[i];
    clear();
    for (std::size_t i = 0; i < count; ++i) insert(kept[i]);
  }

  Buffer table_;                             ///< uint64 [table_size], open addressing.
  std::size_t size_ = 0;                     ///< Hashes in it.
  std::uint64_t limit_ = ~std::uint64_t{0};  ///< Hashes above are not kept.
};

}  // namespace gradquorum
