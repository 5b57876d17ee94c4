/// Conversions of 16-bit floats: every pattern one way; the other way against arithmetic in exact numbers.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "gradquorum/dispatch.hpp"

namespace gq = gradquorum;

namespace {

/// What a 16-bit pattern is worth: `exponent_bits` of exponent, the rest mantissa. NaN for NaN.
double worth(std::uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// The nearest pattern of a positive value, by searching the positive ones, which ascend; ties to even.
std::uint16_t nearest(double value, int exponent_bits) {
  const int infinity = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
  int low = 0;
  int high = infinity;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (worth(static_cast<std::uint16_t>(middle), exponent_bits) <= value ? low : high) = middle;
  }
  const double below = worth(static_cast<std::uint16_t>(low), exponent_bits);
  // Beyond the largest number, the next step is what the infinity stands for.
  const double step = below - worth(static_cast<std::uint16_t>(low - 1), exponent_bits);
  const double above = high == infinity ? below + step : worth(static_cast<std::uint16_t>(high), exponent_bits);
  if (value == below) return static_cast<std::uint16_t>(low);
  if (std::isinf(value)) return static_cast<std::uint16_t>(infinity);
  const double left = value - below;
  const double right = above - value;
  if (left < right || (left == right && (low & 1) == 0)) return static_cast<std::uint16_t>(low);
  return static_cast<std::uint16_t>(high);
}

/// Converts through every kernel, whole vectors and rests, and checks that all agree with `expected`.
template <class S, class A>
void check_narrow(A value, std::uint16_t expected) {
  constexpr std::size_t width = 37;
  std::vector<A> values(width, value);
  std::vector<std::uint16_t> out(width);
  const gq::RowAddress row = reinterpret_cast<gq::RowAddress>(values.data()) | gq::accumulated_tag;
  gq::RowsTask task;
  task.rows = &row;
  task.num_rows = task.num_groups = 1;
  task.width = width;
  task.out = reinterpret_cast<unsigned char*>(out.data());
  for (const bool wide : {true, false}) {
    gq::InstructionSet::allow_wide(wide);
    gq::sum_rows<S, A>(task, false);
    for (const std::uint16_t bits : out) CHECK(bits == expected);
  }
  gq::InstructionSet::allow_wide(true);
}

template <class S>
void test_type(int exponent_bits) {
  const gq::DType type = std::is_same_v<S, gq::F16> ? gq::DType::f16 : gq::DType::bf16;
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (const bool wide : {true, false}) {
    gq::InstructionSet::allow_wide(wide);
    for (const gq::DType accumulate : {gq::DType::f32, gq::DType::f64}) {
      gq::with_types(type, accumulate, [&](auto types) {
        using T = typename decltype(types)::S;
        using A = typename decltype(types)::A;
        if constexpr (std::is_same_v<T, S>) {
          std::vector<A> widened(all.size());
          std::vector<std::uint16_t> back(all.size());
          gq::RowAddress row = reinterpret_cast<gq::RowAddress>(all.data());
          gq::RowsTask task;
          task.rows = &row;
          task.num_rows = task.num_groups = 1;
          task.width = all.size();
          task.out = reinterpret_cast<unsigned char*>(widened.data());
          gq::sum_rows<S, A>(task, true);
          row = reinterpret_cast<gq::RowAddress>(widened.data()) | gq::accumulated_tag;
          task.out = reinterpret_cast<unsigned char*>(back.data());
          gq::sum_rows<S, A>(task, false);
          for (std::size_t i = 0; i < all.size(); ++i) {
            current_seed = i;
            const double expected = worth(all[i], exponent_bits);
            const double got = static_cast<double>(widened[i]);
            if (std::isnan(expected)) {
              CHECK(std::isnan(got));
              CHECK(std::isnan(worth(back[i], exponent_bits)));
            } else {
              CHECK(got == expected && std::signbit(got) == std::signbit(expected));
              CHECK(back[i] == all[i]);
            }
          }
        }
      });
    }
  }
  gq::InstructionSet::allow_wide(true);

  // Around every number and every middle of two, from both types; and the middle only just missed.
  const int infinity = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
  for (int i = 0; i < infinity; i += (i < 40 || i > infinity - 40) ? 1 : 13) {
    const double below = worth(static_cast<std::uint16_t>(i), exponent_bits);
    const double above = i + 1 == infinity ? below + (below - worth(static_cast<std::uint16_t>(i - 1), exponent_bits))
                                           : worth(static_cast<std::uint16_t>(i + 1), exponent_bits);
    for (const double base : {below, (below + above) / 2}) {
      for (const double value : {base, std::nextafter(base, 0.0), std::nextafter(base, HUGE_VAL)}) {
        current_seed = static_cast<std::uint64_t>(i);
        const std::uint16_t expected = nearest(value, exponent_bits);
        check_narrow<S, double>(value, expected);
        check_narrow<S, double>(-value, static_cast<std::uint16_t>(expected | 0x8000));
      }
      const float middle = static_cast<float>(base);
      for (const float value : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, HUGE_VALF)}) {
        const std::uint16_t expected = nearest(static_cast<double>(value), exponent_bits);
        check_narrow<S, float>(value, expected);
        check_narrow<S, float>(-value, static_cast<std::uint16_t>(expected | 0x8000));
      }
    }
  }
  for (const double value :
       {1e300, 3.5e38, 3.4028235677973366e38, 1e-300, 5e-324, 1e-46, 65519.999, 65520.0, HUGE_VAL}) {
    check_narrow<S, double>(value, nearest(value, exponent_bits));
    const float single = static_cast<float>(value);
    check_narrow<S, float>(single, nearest(static_cast<double>(single), exponent_bits));
  }
  Random random(11);
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t bits = random.bits();
    const double value = std::fabs(gq::bit_cast<double>(bits));
    const double mantissa = 1.0 + static_cast<double>(bits >> 12) / 4503599627370496.0;
    const double scaled = std::ldexp(mantissa, static_cast<int>(bits & 63) - 40);
    if (!std::isnan(value)) check_narrow<S, double>(value, nearest(value, exponent_bits));
    check_narrow<S, double>(scaled, nearest(scaled, exponent_bits));
    const float single = static_cast<float>(scaled);
    check_narrow<S, float>(single, nearest(static_cast<double>(single), exponent_bits));
  }
}

}  // namespace

int main() {
  test_type<gq::F16>(5);
  test_type<gq::BF16>(8);
  std::puts("half: good");
}
