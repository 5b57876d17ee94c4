/// The kernels for every instruction set, and one call for each that picks the best.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "gradquorum/half.hpp"
#include "gradquorum/tasks.hpp"

// Always there: SSE2 on x86-64, NEON on arm64.
#define GRADQUORUM_ISA base
#define GRADQUORUM_TARGET
#define GRADQUORUM_VECTOR 16
#include "gradquorum/kernels.hpp"
#include "gradquorum/kernels_ids.hpp"
#undef GRADQUORUM_ISA
#undef GRADQUORUM_TARGET
#undef GRADQUORUM_VECTOR

#if defined(__x86_64__)
#define GRADQUORUM_ISA v3
#define GRADQUORUM_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt,f16c")))
#define GRADQUORUM_VECTOR 32
#include "gradquorum/kernels.hpp"
#include "gradquorum/kernels_ids.hpp"
#undef GRADQUORUM_ISA
#undef GRADQUORUM_TARGET
#undef GRADQUORUM_VECTOR
#define GRADQUORUM_DISPATCH(...) (InstructionSet::wide() ? v3::__VA_ARGS__ : base::__VA_ARGS__)
#else
#define GRADQUORUM_DISPATCH(...) (base::__VA_ARGS__)
#endif

namespace gradquorum {

/// A pair of element types as a value, to hand to a generic lambda.
template <class StorageType, class AccumulateType>
struct Types {
  using S = StorageType;     ///< Storage type.
  using A = AccumulateType;  ///< Accumulate type; unsigned for integers, so that sums wrap.
};

/// Calls f(Types<S, A>{}) for a supported pair.
template <class F>
decltype(auto) with_types(DType storage, DType accumulate, F&& f) {
  const bool doubles = accumulate == DType::f64;
  switch (storage) {
    case DType::f16: return doubles ? f(Types<F16, double>{}) : f(Types<F16, float>{});
    case DType::bf16: return doubles ? f(Types<BF16, double>{}) : f(Types<BF16, float>{});
    case DType::f32: return doubles ? f(Types<float, double>{}) : f(Types<float, float>{});
    case DType::f64: return f(Types<double, double>{});
    case DType::i32: return f(Types<std::int32_t, std::uint64_t>{});
    case DType::i64: break;
  }
  return f(Types<std::uint64_t, std::uint64_t>{});
}

/// Adds up groups of rows; the result is in the accumulate type if `keep`, else in the storage type.
template <class S, class A>
void sum_rows(const RowsTask& task, bool keep) {
  const bool weighted = std::is_floating_point_v<A> && task.weight_of != nullptr;
  if constexpr (std::is_floating_point_v<A>) {
    if (weighted && keep) return GRADQUORUM_DISPATCH(sum_rows<S, A, A, true>(task));
    if (weighted) return GRADQUORUM_DISPATCH(sum_rows<S, A, S, true>(task));
  }
  if (keep) return GRADQUORUM_DISPATCH(sum_rows<S, A, A, false>(task));
  return GRADQUORUM_DISPATCH(sum_rows<S, A, S, false>(task));
}

/// True if no element is infinite or NaN.
inline bool all_finite(DType type, const unsigned char* from, std::size_t count) {
  switch (type) {
    case DType::f16: return GRADQUORUM_DISPATCH(finite_run<std::uint16_t>(from, count, 0x7c00));
    case DType::bf16: return GRADQUORUM_DISPATCH(finite_run<std::uint16_t>(from, count, 0x7f80));
    case DType::f32: return GRADQUORUM_DISPATCH(finite_run<std::uint32_t>(from, count, 0x7f800000u));
    case DType::f64: return GRADQUORUM_DISPATCH(finite_run<std::uint64_t>(from, count, 0x7ff0000000000000ull));
    case DType::i32:
    case DType::i64: break;
  }
  return true;
}

}  // namespace gradquorum
