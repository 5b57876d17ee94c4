/// Element types, reductions and the checked pairs of them.
///
/// Invariant: a `Spec` that exists names a supported pair (storage, accumulate).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>

namespace gradquorum {

/// A half as its 16 bits; arithmetic never happens in it.
struct F16 {
  std::uint16_t bits;  ///< IEEE binary16 pattern.
};

/// A bfloat16 as its 16 bits; arithmetic never happens in it.
struct BF16 {
  std::uint16_t bits;  ///< The upper half of a binary32 pattern.
};

/// Element type of an array. Complex arrays pass as their real type, twice as wide.
enum class DType : std::uint8_t { f16, bf16, f32, f64, i32, i64 };

/// What is done to the sum of a row.
enum class Reduction : std::uint8_t {
  sum,            ///< Nothing.
  mean,           ///< Divided by the number of gradients that touched the row.
  mean_by_count,  ///< Divided by the number of gradients of the round.
  mean_by_weight  ///< Rows weighted, divided by the sum of the weights of the round.
};

/// Bytes of one element.
constexpr std::size_t item_bytes(DType type) {
  switch (type) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 8;
}

/// True for the types that have infinities and NaN.
constexpr bool is_real(DType type) { return type != DType::i32 && type != DType::i64; }

/// a * b, or std::bad_alloc: a size that does not fit cannot be allocated either.
inline std::size_t checked_mul(std::size_t a, std::size_t b) {
  std::size_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) throw std::bad_alloc();
  return out;
}

/// a + b, or std::bad_alloc.
inline std::size_t checked_add(std::size_t a, std::size_t b) {
  std::size_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) throw std::bad_alloc();
  return out;
}

/// What a reducer does; fixed at construction and checked there.
struct Spec {
  DType storage = DType::f32;             ///< Type of gradients and results.
  DType accumulate = DType::f32;          ///< Type of sums.
  Reduction reduction = Reduction::mean;  ///< What is done to the sums.
  std::size_t num_threads = 1;            ///< Threads of one call, the caller included.

  /// Throws std::invalid_argument unless the pair of types and the reduction go together.
  void check() const {
    bool good = false;
    switch (storage) {
      case DType::f16:
      case DType::bf16:
      case DType::f32: good = accumulate == DType::f32 || accumulate == DType::f64; break;
      case DType::f64: good = accumulate == DType::f64; break;
      case DType::i32:
      case DType::i64: good = accumulate == DType::i64; break;
    }
    if (!good) throw std::invalid_argument("unsupported pair of storage and accumulate types");
    if (!is_real(storage) && reduction != Reduction::sum)
      throw std::invalid_argument("integers can only be summed");
  }
};

/// Bytes that an element of a distinct row counts for when it is asked whether a log should be compacted.
inline std::size_t kept_bytes(const Spec& spec) {
  const std::size_t half_sum = item_bytes(spec.accumulate) / 2;
  return item_bytes(spec.storage) > half_sum ? item_bytes(spec.storage) : half_sum;
}

}  // namespace gradquorum
