/// The obvious model that the core is compared with: a map from id to sums, one element at a time.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "check.hpp"
#include "gradquorum/dense.hpp"
#include "gradquorum/log.hpp"

namespace gq = gradquorum;

/// A gradient as a caller has it.
struct Offer {
  std::vector<std::int64_t> ids;
  std::vector<unsigned char> values;  // Storage type.
  double weight = 1.0;
};

/// What a merge must give.
struct Expected {
  std::vector<std::int64_t> ids;
  std::vector<unsigned char> values;
  std::vector<std::int64_t> counts;
};

template <class T>
T get(const unsigned char* from, std::size_t at) {
  T value;
  std::memcpy(&value, from + at * sizeof(T), sizeof(T));
  return value;
}

template <class S, class A>
Expected model(const gq::Spec& spec, const std::vector<Offer>& offers, std::size_t width) {
  struct Row {
    std::vector<A> sum;
    std::int64_t count = 0;
  };
  std::map<std::int64_t, Row> rows;
  double weights = 0;
  for (const Offer& offer : offers) {
    std::map<std::int64_t, std::vector<A>> own;
    for (std::size_t i = 0; i < offer.ids.size(); ++i) {
      std::vector<A> row(width);
      for (std::size_t j = 0; j < width; ++j) row[j] = gq::widen<S, A>(get<S>(offer.values.data(), i * width + j));
      const auto [place, fresh] = own.try_emplace(offer.ids[i], row);
      if (!fresh)
        for (std::size_t j = 0; j < width; ++j) place->second[j] += row[j];
    }
    weights += offer.weight;
    for (auto& [id, row] : own) {
      if (spec.reduction == gq::Reduction::mean_by_weight)
        for (A& x : row) x = x * static_cast<A>(offer.weight);
      const auto [place, fresh] = rows.try_emplace(id);
      if (fresh) place->second.sum = row;
      else
        for (std::size_t j = 0; j < width; ++j) place->second.sum[j] += row[j];
      ++place->second.count;
    }
  }
  const auto num_gradients = static_cast<std::int64_t>(offers.size());
  Expected out;
  for (auto& [id, row] : rows) {
    out.ids.push_back(id);
    out.counts.push_back(row.count);
    for (A x : row.sum) {
      if (spec.reduction == gq::Reduction::mean) x = x / static_cast<A>(row.count);
      if (spec.reduction == gq::Reduction::mean_by_count) x = x / static_cast<A>(num_gradients);
      if (spec.reduction == gq::Reduction::mean_by_weight) x = x / static_cast<A>(weights);
      const S stored = gq::narrow<A, S>(x);
      const unsigned char* const bytes = reinterpret_cast<const unsigned char*>(&stored);
      out.values.insert(out.values.end(), bytes, bytes + sizeof(S));
    }
  }
  return out;
}

/// True for NaN, from its bits.
inline bool is_nan(gq::DType type, const unsigned char* at) {
  switch (type) {
    case gq::DType::f16: return std::isnan(gq::half_to_float(get<gq::F16>(at, 0)));
    case gq::DType::bf16: return std::isnan(gq::bfloat_to_float(get<gq::BF16>(at, 0)));
    case gq::DType::f32: return std::isnan(get<float>(at, 0));
    case gq::DType::f64: return std::isnan(get<double>(at, 0));
    default: return false;
  }
}

/// Equal bits, NaN payloads apart.
inline bool same_values(gq::DType type, const unsigned char* a, const unsigned char* b, std::size_t count) {
  const std::size_t item = gq::item_bytes(type);
  for (std::size_t i = 0; i < count; ++i, a += item, b += item)
    if (std::memcmp(a, b, item) != 0 && !(is_nan(type, a) && is_nan(type, b))) return false;
  return true;
}

/// Compares a merge with the model.
inline void check_merged(const gq::Spec& spec, const gq::Merged& merged, const Expected& expected, std::size_t width) {
  CHECK(merged.num_rows == expected.ids.size());
  for (std::size_t i = 0; i < merged.num_rows; ++i) {
    CHECK(merged.ids.as<std::int64_t>()[i] == expected.ids[i]);
    CHECK(merged.counts.as<std::int64_t>()[i] == expected.counts[i]);
  }
  CHECK(same_values(spec.storage, merged.values.bytes(), expected.values.data(), merged.num_rows * width));
}

/// A random element of the type: mostly ordinary, some special. `tame` avoids NaN and infinities.
inline void random_element(Random& random, gq::DType type, unsigned char* to, bool tame) {
  const std::uint64_t bits = random.bits();
  const bool special = random.one_in(20);
  double value = static_cast<double>(static_cast<std::int64_t>(bits)) / 9.2e18 * (special ? 1e-40 : 3.0);
  if (special && (bits & 7) == 0) value = -0.0;
  if (special && (bits & 7) == 1 && !tame) value = (bits & 8) != 0 ? HUGE_VAL : -HUGE_VAL;
  if (special && (bits & 7) == 2 && !tame) value = std::nan("");
  if (special && (bits & 7) == 3) value = 60000.0;
  switch (type) {
    case gq::DType::f16: { const gq::F16 x = gq::double_to_half(value); std::memcpy(to, &x, 2); break; }
    case gq::DType::bf16: { const gq::BF16 x = gq::double_to_bfloat(value); std::memcpy(to, &x, 2); break; }
    case gq::DType::f32: { const float x = static_cast<float>(value); std::memcpy(to, &x, 4); break; }
    case gq::DType::f64: std::memcpy(to, &value, 8); break;
    case gq::DType::i32: std::memcpy(to, &bits, 4); break;
    case gq::DType::i64: std::memcpy(to, &bits, 8); break;
  }
}

/// How ids are drawn.
enum class IdKind { ascending, raw, sparse_raw, sparse_ascending, few };

/// A random gradient.
inline Offer random_offer(Random& random, const gq::Spec& spec, std::size_t rows, std::size_t width, IdKind kind,
                          bool tame = false) {
  Offer offer;
  const bool sparse = kind == IdKind::sparse_raw || kind == IdKind::sparse_ascending;
  const std::uint64_t space = kind == IdKind::few ? 7 : sparse ? (std::uint64_t{1} << 63) : rows * 3 + 1;
  for (std::size_t i = 0; i < rows; ++i) {
    std::uint64_t id = random.below(space);
    if (sparse && random.one_in(2)) id = 0x7ffffffffffffff0ull + random.below(16);
    offer.ids.push_back(static_cast<std::int64_t>(id));
  }
  if (kind == IdKind::ascending || kind == IdKind::sparse_ascending) {
    std::sort(offer.ids.begin(), offer.ids.end());
    offer.ids.erase(std::unique(offer.ids.begin(), offer.ids.end()), offer.ids.end());
  }
  const std::size_t item = gq::item_bytes(spec.storage);
  offer.values.resize(offer.ids.size() * width * item);
  for (std::size_t i = 0; i < offer.ids.size() * width; ++i)
    random_element(random, spec.storage, offer.values.data() + i * item, tame);
  const double weight = static_cast<double>(random.below(1000) + 1) / 97.0;
  offer.weight = spec.reduction == gq::Reduction::mean_by_weight ? gq::round_weight(spec, weight) : 1.0;
  return offer;
}

/// A block of an offer, copied or lent.
inline gq::Block block_of(const gq::Spec& spec, const Offer& offer, std::size_t width, bool lend, bool check = false) {
  gq::Gradient gradient;
  gradient.ids = offer.ids.data();
  gradient.values = offer.values.data();
  gradient.num_rows = offer.ids.size();
  gradient.width = width;
  gradient.weight = offer.weight;
  gradient.check_finite = check;
  if (lend) gradient.lender = std::make_shared<int>(0);
  return gq::make_block(spec, gradient);
}

/// The model of any spec.
inline Expected model_of(const gq::Spec& spec, const std::vector<Offer>& offers, std::size_t width) {
  return gq::with_types(spec.storage, spec.accumulate, [&](auto types) {
    using T = decltype(types);
    return model<typename T::S, typename T::A>(spec, offers, width);
  });
}

inline const gq::Spec all_specs[] = {
    {gq::DType::f16, gq::DType::f32, gq::Reduction::mean, 1},
    {gq::DType::f16, gq::DType::f64, gq::Reduction::mean, 1},
    {gq::DType::bf16, gq::DType::f32, gq::Reduction::mean, 1},
    {gq::DType::bf16, gq::DType::f64, gq::Reduction::mean, 1},
    {gq::DType::f32, gq::DType::f32, gq::Reduction::mean, 1},
    {gq::DType::f32, gq::DType::f64, gq::Reduction::mean, 1},
    {gq::DType::f64, gq::DType::f64, gq::Reduction::mean, 1},
    {gq::DType::i32, gq::DType::i64, gq::Reduction::sum, 1},
    {gq::DType::i64, gq::DType::i64, gq::Reduction::sum, 1}};
