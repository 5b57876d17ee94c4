/// Splits a gradient by its ids into parts that lie packed, each in memory of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gradquorum/packed.hpp"
#include "gradquorum/pool.hpp"

namespace gradquorum {

/// Which part an id belongs to: that of its hash, or that of the range in which it lies.
class PartOf {
 public:
  /// By hash over so many parts, at least one.
  explicit PartOf(std::uint64_t num_parts) : num_parts_(num_parts) {}
  /// By the first ids of all parts but the first, ascending; they must outlive this.
  PartOf(const std::int64_t* bounds, std::size_t num_bounds)
      : num_parts_(num_bounds + 1), bounds_(bounds), num_bounds_(num_bounds) {}

  std::size_t num_parts() const { return num_parts_; }  ///< How many there are.

  /// Below num_parts(), whatever the id.
  std::size_t operator()(std::int64_t id) const {
    if (bounds_ != nullptr) return static_cast<std::size_t>(std::upper_bound(bounds_, bounds_ + num_bounds_, id) - bounds_);
    // 2^64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4) spreads ids that follow each
    // other, or that share a factor.
    return static_cast<std::size_t>(((static_cast<std::uint64_t>(id) * 0x9E3779B97F4A7C15u) >> 32) % num_parts_);
  }

 private:
  std::size_t num_parts_;                 ///< At least one.
  const std::int64_t* bounds_ = nullptr;  ///< Null for parts by hash.
  std::size_t num_bounds_ = 0;            ///< One less than parts.
};

/// Some rows of a gradient, packed.
struct Part {
  std::size_t num_rows = 0;  ///< Rows in it.
  Buffer memory;             ///< Ids and values as `pack` writes them; nothing if there are no rows.
};

/// The rows of every part, in the order in which they are. Ids are read once; throws std::bad_alloc.
inline std::vector<Part> split(const PartOf& part_of, const std::int64_t* ids, const unsigned char* values,
                               std::size_t num_rows, std::size_t row_bytes) {
  struct Row {
    std::int64_t id;   ///< Of the row.
    std::size_t part;  ///< Where it goes.
  };
  const Buffer scratch(checked_mul(num_rows, sizeof(Row)));
  Row* const rows = scratch.as<Row>();
  std::vector<Part> parts(part_of.num_parts());
  for (std::size_t i = 0; i < num_rows; ++i) {
    const std::int64_t id = ids[i];
    rows[i] = Row{id, part_of(id)};
    ++parts[rows[i].part].num_rows;
  }
  struct End {
    std::int64_t* ids;      ///< Where the next id goes.
    unsigned char* values;  ///< Where the next row goes.
  };
  std::vector<End> ends;
  for (Part& part : parts) {
    if (part.num_rows != 0) {
      const std::size_t begin = packed_values_at(part.num_rows);
      part.memory = Buffer(checked_add(begin, checked_mul(part.num_rows, row_bytes)));
      ends.push_back({part.memory.as<std::int64_t>(), part.memory.bytes() + begin});
      const std::size_t id_bytes = part.num_rows * sizeof(std::int64_t);
      std::memset(part.memory.bytes() + id_bytes, 0, begin - id_bytes);  // That travels, too.
    } else {
      ends.push_back({});
    }
  }
  for (std::size_t i = 0; i < num_rows;) {
    const std::size_t part = rows[i].part;
    End& end = ends[part];
    std::size_t next = i;
    do *end.ids++ = rows[next].id;
    while (++next < num_rows && rows[next].part == part);
    const std::size_t bytes = (next - i) * row_bytes;
    if (bytes != 0) std::memcpy(end.values, values + i * row_bytes, bytes);
    end.values += bytes;
    i = next;
  }
  return parts;
}

}  // namespace gradquorum
