/// The whole test framework: CHECK ends the program with the place and the seed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// What is printed when a check fails.
inline std::uint64_t current_seed = 0;

#define CHECK(condition)                                                                             \
  do {                                                                                               \
    if (!(condition)) {                                                                              \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed, seed %llu\n", __FILE__, __LINE__, #condition,   \
                   static_cast<unsigned long long>(current_seed));                                   \
      std::exit(1);                                                                                  \
    }                                                                                                \
  } while (false)

/// A small generator, the same everywhere (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  /// 64 random bits.
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform below n, which is above 0.
  std::uint64_t below(std::uint64_t n) { return bits() % n; }
  /// True with probability 1 / n.
  bool one_in(std::uint64_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};
