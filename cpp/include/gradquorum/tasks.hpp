/// Plain descriptions of work that the kernels do, and the choice of the instruction set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "gradquorum/dtype.hpp"

namespace gradquorum {

/// Address of a row. The lowest bit, free because every element has two bytes or more, is set when
/// the row is in the accumulate type instead of the storage type.
using RowAddress = std::uintptr_t;
inline constexpr RowAddress accumulated_tag = 1;

/// What a sum is divided by.
enum class Divide : std::uint8_t {
  none,       ///< Nothing.
  by_touched, ///< The number of gradients that touched the row.
  by_number   ///< One number for all rows.
};

/// Groups of rows to be added up, each group giving one result row.
struct RowsTask {
  const RowAddress* rows = nullptr;            ///< Rows, group after group, each in log order.
  std::size_t num_rows = 0;                    ///< Number of rows.
  const std::uint32_t* ends = nullptr;         ///< For each group the end of its rows; null: one row each.
  std::uint32_t skipped = 0;                   ///< What `ends` is ahead of `rows` by.
  std::size_t num_groups = 0;                  ///< Number of groups.
  const std::uint32_t* weight_of = nullptr;    ///< For each row the place of its weight, or null.
  const double* weights = nullptr;             ///< Weights, each exact in the accumulate type.
  const std::int64_t* touched = nullptr;       ///< Gradients per group; null: as many as rows.
  Divide divide = Divide::none;                ///< What the sums are divided by.
  std::int64_t count = 1;                      ///< The number, if it is a count.
  double number = 0.0;                         ///< The number, if it is not a count: then above 0.
  std::size_t width = 0;                       ///< Elements per row.
  unsigned char* out = nullptr;                ///< Result rows, one after the other.
  bool stream = false;                         ///< Write around the caches; rows must be multiples of 32 bytes.
};

/// Ids of one range of ids, in a bitmap.
struct Bitmap {
  std::uint64_t* words = nullptr;  ///< One bit for each id from `low` on.
  std::uint32_t* before = nullptr; ///< For each word the number of bits in the words before it.
  std::size_t num_words = 0;       ///< Number of words.
  std::int64_t low = 0;            ///< Id of the first bit.
};

/// What a pass over ids has found.
struct IdScan {
  bool ascending = true;    ///< Each id is above the one before.
  std::int64_t low = 0;     ///< Smallest id; 0 if there is none.
  std::int64_t high = 0;    ///< Largest id; 0 if there is none.
};

/// Whether the kernels for newer processors are used.
class InstructionSet {
 public:
  /// True if this processor has AVX2, BMI, POPCNT and F16C, and nobody has said otherwise.
  static bool wide() { return flag().load(std::memory_order_relaxed); }

  /// For tests: forbids (or allows again) the wide kernels. Results must not depend on it.
  static void allow_wide(bool allowed) { flag().store(allowed && supported(), std::memory_order_relaxed); }

  /// True if this processor can run the wide kernels.
  static bool supported() {
#if defined(__x86_64__)
    // avx2 includes that the system saves the wide registers. Not every compiler knows the names of the last two.
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt") && has_f16c_and_lzcnt();
#else
    return false;
#endif
  }

 private:
#if defined(__x86_64__)
  static bool has_f16c_and_lzcnt() {
    unsigned a = 0, b = 0, basic = 0, extended = 0, d = 0;
    return __get_cpuid(1, &a, &b, &basic, &d) != 0 && __get_cpuid(0x80000001, &a, &b, &extended, &d) != 0 &&
           (basic & (1u << 29)) != 0 && (extended & (1u << 5)) != 0;
  }
#endif

  /// The choice; atomic.
  static std::atomic<bool>& flag() {
    static std::atomic<bool> wide{supported()};
    return wide;
  }
};

}  // namespace gradquorum
