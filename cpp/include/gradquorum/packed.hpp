/// How one gradient lies in memory that processes share: its ids, then its values at the next multiple of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gradquorum/block.hpp"
#include "gradquorum/copy.hpp"
#include "gradquorum/dtype.hpp"
#include "gradquorum/pool.hpp"

namespace gradquorum {

inline constexpr std::size_t packed_alignment = 64;

/// Where the values of so many rows begin, in bytes. Throws std::bad_alloc if that is nowhere.
inline std::size_t packed_values_at(std::size_t num_rows) {
  const std::size_t bytes = checked_mul(num_rows, sizeof(std::int64_t));
  return checked_add(bytes, packed_alignment - 1) / packed_alignment * packed_alignment;
}

/// Bytes that a block takes, its values in the type that they have.
inline std::size_t packed_bytes(const Block& block) {
  return packed_values_at(block.num_rows) + block.num_rows * block.width * item_bytes(block.dtype);
}

/// Writes a block to memory that has room for it.
inline void pack(const Spec& spec, const Block& block, unsigned char* to) {
  std::memcpy(to, block.ids.bytes(), block.num_rows * sizeof(std::int64_t));
  const std::size_t begin = packed_values_at(block.num_rows);
  const std::size_t bytes = packed_bytes(block) - begin;
  if (bytes != 0) copy_values(spec, block.values, to + begin, bytes, false);
}

/// What memory holds of a gradient of so many rows, more than none; false, and nothing is changed, if there is no room.
inline bool unpack(const unsigned char* memory, std::size_t size, std::size_t num_rows, std::size_t row_bytes,
                   Gradient& gradient) {
  if (num_rows > size / sizeof(std::int64_t)) return false;
  const std::size_t begin = packed_values_at(num_rows);
  if (begin > size || (row_bytes != 0 && num_rows > (size - begin) / row_bytes)) return false;
  gradient.ids = reinterpret_cast<const std::int64_t*>(memory);
  gradient.values = memory + begin;
  gradient.num_rows = num_rows;
  return true;
}

}  // namespace gradquorum
