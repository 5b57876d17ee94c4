/// Turns bytes into small logs of gradients, for the fuzzers, and compares with the model of the unit tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "model.hpp"

/// Reads a fuzzer's bytes; when they are used up, zeros.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  /// One byte below `n`, which is at most 256.
  std::size_t below(std::size_t n) { return at_ == end_ ? 0 : *at_++ % n; }
  bool flag() { return below(2) != 0; }
  /// A number, bit for bit.
  template <class T>
  T take() {
    unsigned char bits[sizeof(T)] = {};
    const std::size_t size = std::min<std::size_t>(sizeof(T), static_cast<std::size_t>(end_ - at_));
    if (size != 0) std::memcpy(bits, at_, size);
    at_ += size;
    T value;
    std::memcpy(&value, bits, sizeof(T));
    return value;
  }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

/// A supported spec.
inline gq::Spec decode_spec(Bytes& bytes) {
  gq::Spec spec = all_specs[bytes.below(std::size(all_specs))];
  if (gq::is_real(spec.storage)) spec.reduction = static_cast<gq::Reduction>(bytes.below(4));
  spec.num_threads = 1 + bytes.below(3);
  gq::InstructionSet::allow_wide(bytes.flag());
  return spec;
}

/// An id: near, far, at the ends of int64, or any bits. Negative ones too: nobody asks for them, nothing may break.
inline std::int64_t decode_id(Bytes& bytes, std::size_t kind) {
  using Limits = std::numeric_limits<std::int64_t>;
  const auto small = static_cast<std::int64_t>(bytes.below(256));
  switch (kind) {
    case 0: return small;
    case 1: return small * 0x0101010101;
    case 2: return Limits::max() - small;
    case 3: return Limits::min() + small;
    case 4: return small - 128;
    default: return bytes.take<std::int64_t>();
  }
}

inline constexpr std::size_t fuzz_widths[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33};

/// One gradient of rows of this width. Values are any bits: NaN, infinities, subnormals.
inline Offer decode_offer(Bytes& bytes, const gq::Spec& spec, std::size_t width) {
  Offer offer;
  const std::size_t kind = bytes.below(6);
  const std::size_t order = bytes.below(3);
  const std::size_t rows = bytes.below(16) * (bytes.below(4) == 0 ? 16 : 1);
  const bool many = rows > 16;  // Then values repeat, so that the input stays short.
  for (std::size_t i = 0; i < rows; ++i)
    offer.ids.push_back(many ? static_cast<std::int64_t>(i * i * 7919 % 251) : decode_id(bytes, kind));
  if (order != 0) {
    std::sort(offer.ids.begin(), offer.ids.end());
    offer.ids.erase(std::unique(offer.ids.begin(), offer.ids.end()), offer.ids.end());
  }
  const std::size_t size = offer.ids.size() * width * gq::item_bytes(spec.storage);
  offer.values.resize(size);
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < size; ++i) {
    if (i % 8 == 0) bits = bytes.empty() ? bits * 6364136223846793005u + 1442695040888963407u : bytes.take<std::uint64_t>();
    offer.values[i] = static_cast<unsigned char>(bits >> (i % 8 * 8));
  }
  if (spec.reduction == gq::Reduction::mean_by_weight) {
    const double weight = gq::round_weight(spec, std::abs(static_cast<double>(bytes.take<float>())));
    offer.weight = weight > 0 && std::isfinite(weight) ? weight : 0.5;
  }
  return offer;
}

/// A small log, with blocks of its own memory or lent.
struct FuzzLog {
  gq::Spec spec;
  std::size_t width = 0;
  std::vector<Offer> offers;
  std::vector<gq::Block> blocks;

  explicit FuzzLog(Bytes& bytes) : spec(decode_spec(bytes)), width(fuzz_widths[bytes.below(std::size(fuzz_widths))]) {
    const std::size_t num = 1 + bytes.below(6);
    for (std::size_t i = 0; i < num; ++i) offers.push_back(decode_offer(bytes, spec, width));
    for (const Offer& offer : offers) blocks.push_back(block_of(spec, offer, width, bytes.flag()));
  }

  /// The blocks as the core takes them.
  std::vector<const gq::Block*> log() const {
    std::vector<const gq::Block*> out;
    for (const gq::Block& block : blocks) out.push_back(&block);
    return out;
  }

  /// Merges what is in the log, and compares with the model.
  void check() const {
    const std::vector<const gq::Block*> all = log();
    check_merged(spec, gq::merge_log(spec, all.data(), all.size(), width, static_cast<std::int64_t>(offers.size())),
                 model_of(spec, offers, width), width);
  }

  /// Puts the compaction of the first blocks in their place.
  void compact(std::size_t prefix) {
    const std::vector<const gq::Block*> all = log();
    gq::Block merged = gq::compact_log(spec, all.data(), prefix);
    CHECK(merged.compacted && !merged.lent());
    blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(prefix));
    blocks.insert(blocks.begin(), std::move(merged));
  }
};

/// Nothing may be in use between two inputs, and nothing kept: what is freed is given back, so that its use is seen.
inline void check_pool() {
  gq::MemoryPool::instance().set_cap(0);
  CHECK(gq::MemoryPool::instance().stats().live_buffers == 0);
}
