/// float16 and bfloat16 to and from float32 and float64: exact one way, nearest even the other.
///
/// Integer work only, so the bits do not depend on the instruction set or on flush-to-zero modes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gradquorum/dtype.hpp"

namespace gradquorum {

/// The bits of a value as another type of the same size.
template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

/// float16 to float32, exact.
inline float half_to_float(F16 half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (half.bits >> 10) & 0x1fu;
  std::uint32_t mantissa = half.bits & 0x3ffu;
  if (exponent == 0x1fu) return bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  if (mantissa == 0) return bit_cast<float>(sign);
  std::uint32_t shift = 0;  // A subnormal half is a normal float.
  while ((mantissa & 0x400u) == 0) {
    mantissa <<= 1;
    ++shift;
  }
  return bit_cast<float>(sign | ((113u - shift) << 23) | ((mantissa & 0x3ffu) << 13));
}

/// bfloat16 to float32, exact.
inline float bfloat_to_float(BF16 value) {
  return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// float32 to float16, nearest even; NaN stays NaN.
inline F16 float_to_half(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return F16{static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return F16{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude >= 0x38800000u) {  // A normal half.
    const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return F16{static_cast<std::uint16_t>(sign | (rounded >> 13))};
  }
  if (magnitude < 0x33000000u) return F16{static_cast<std::uint16_t>(sign)};  // Below half of 2^-24.
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t shift = 126u - exponent;  // 14 .. 24
  const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
  const std::uint32_t middle = 1u << (shift - 1u);
  std::uint32_t out = mantissa >> shift;
  if (rest > middle || (rest == middle && (out & 1u) != 0)) ++out;
  return F16{static_cast<std::uint16_t>(sign | out)};
}

/// float32 to bfloat16, nearest even; NaN stays NaN.
inline BF16 float_to_bfloat(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return BF16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return BF16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// float64 to float32 rounded to odd: a second rounding to 16 bits then equals a single one.
inline float double_to_odd_float(double value) {
  const std::uint64_t bits = bit_cast<std::uint64_t>(value);
  const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 32) & 0x80000000u;
  const std::uint64_t magnitude = bits & 0x7fffffffffffffffull;
  if (magnitude > 0x7ff0000000000000ull) return bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude == 0x7ff0000000000000ull) return bit_cast<float>(sign | 0x7f800000u);
  if (magnitude >= 0x47f0000000000000ull) return bit_cast<float>(sign | 0x7f7fffffu);  // 2^128 and up.
  if (magnitude >= 0x3810000000000000ull) {  // A normal float.
    const std::uint64_t kept = (magnitude - 0x3800000000000000ull) >> 29;
    const std::uint32_t sticky = (magnitude & 0x1fffffffull) != 0 ? 1u : 0u;
    return bit_cast<float>(sign | static_cast<std::uint32_t>(kept) | sticky);
  }
  if (magnitude < 0x3680000000000000ull)  // Below 2^-151: only that it is not zero matters.
    return bit_cast<float>(sign | (magnitude != 0 ? 1u : 0u));
  const std::uint64_t mantissa = (magnitude & 0xfffffffffffffull) | 0x10000000000000ull;
  const std::uint32_t shift = static_cast<std::uint32_t>(926u - (magnitude >> 52));  // 30 .. 54
  const std::uint32_t sticky = (mantissa & ((1ull << shift) - 1ull)) != 0 ? 1u : 0u;
  return bit_cast<float>(sign | static_cast<std::uint32_t>(mantissa >> shift) | sticky);
}

/// float64 to float16, rounded once.
inline F16 double_to_half(double value) { return float_to_half(double_to_odd_float(value)); }

/// float64 to bfloat16, rounded once.
inline BF16 double_to_bfloat(double value) { return float_to_bfloat(double_to_odd_float(value)); }

/// One stored element in the accumulate type; integers accumulate as unsigned to wrap.
template <class S, class A>
inline A widen(S value) {
  if constexpr (std::is_same_v<S, F16>) {
    return static_cast<A>(half_to_float(value));
  } else if constexpr (std::is_same_v<S, BF16>) {
    return static_cast<A>(bfloat_to_float(value));
  } else if constexpr (std::is_same_v<S, std::int32_t>) {
    return static_cast<A>(static_cast<std::int64_t>(value));
  } else {
    return static_cast<A>(value);
  }
}

/// One accumulated element in the storage type, rounded once.
template <class A, class D>
inline D narrow(A value) {
  if constexpr (std::is_same_v<D, F16>) {
    if constexpr (std::is_same_v<A, double>) return double_to_half(value);
    else return float_to_half(value);
  } else if constexpr (std::is_same_v<D, BF16>) {
    if constexpr (std::is_same_v<A, double>) return double_to_bfloat(value);
    else return float_to_bfloat(value);
  } else {
    return static_cast<D>(value);
  }
}

}  // namespace gradquorum
