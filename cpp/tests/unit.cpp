/// Blocks, merges and compactions against the model, bit for bit; random inputs, fixed seeds.
#include <utility>

#include "gradquorum/packed.hpp"
#include "gradquorum/split.hpp"
#include "model.hpp"

namespace {

/// Merges a log in several ways, all of which must give the model's bits.
void check_log(Random& random, gq::Spec spec, const std::vector<Offer>& offers, std::size_t width) {
  const Expected expected = model_of(spec, offers, width);
  for (const std::size_t threads : {std::size_t{1}, std::size_t{3}}) {
    for (const bool wide : {true, false}) {
      gq::InstructionSet::allow_wide(wide);
      spec.num_threads = threads;
      std::vector<gq::Block> blocks;
      for (const Offer& offer : offers) blocks.push_back(block_of(spec, offer, width, random.one_in(2)));
      const auto pointers = [&] {
        std::vector<const gq::Block*> out;
        for (const gq::Block& block : blocks) out.push_back(&block);
        return out;
      };
      std::vector<const gq::Block*> log = pointers();
      const auto gradients = static_cast<std::int64_t>(offers.size());
      check_merged(spec, gq::merge_log(spec, log.data(), log.size(), width, gradients), expected, width);
      for (int times = 0; times < 2 && blocks.size() > 1; ++times) {  // Compact a random prefix, then again.
        const std::size_t prefix = 1 + random.below(blocks.size());
        log = pointers();
        gq::Block merged = gq::compact_log(spec, log.data(), prefix);
        blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(prefix));
        blocks.insert(blocks.begin(), std::move(merged));
        log = pointers();
        check_merged(spec, gq::merge_log(spec, log.data(), log.size(), width, gradients), expected, width);
      }
    }
  }
  gq::InstructionSet::allow_wide(true);
}

/// A number of its own for each pair of types.
std::uint64_t types_of(const gq::Spec& spec) {
  return static_cast<std::uint64_t>(spec.storage) * 10 + static_cast<std::uint64_t>(spec.accumulate);
}

void test_random_logs() {
  constexpr std::size_t widths[] = {1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100};
  constexpr IdKind kinds[] = {IdKind::ascending, IdKind::raw, IdKind::sparse_raw, IdKind::sparse_ascending,
                              IdKind::few};
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    for (gq::Spec spec : all_specs) {
      current_seed = seed;
      Random random(seed * 100 + types_of(spec));
      if (gq::is_real(spec.storage)) spec.reduction = static_cast<gq::Reduction>(random.below(4));
      spec.check();
      const std::size_t width = widths[random.below(std::size(widths))];
      const std::size_t num = 1 + random.below(random.one_in(4) ? 40 : 6);
      std::vector<Offer> offers;
      const IdKind kind = kinds[random.below(std::size(kinds))];
      for (std::size_t i = 0; i < num; ++i)
        offers.push_back(random_offer(random, spec, random.below(random.one_in(3) ? 300 : 40), width,
                                      random.one_in(3) ? kinds[random.below(std::size(kinds))] : kind));
      check_log(random, spec, offers, width);
    }
  }
}

/// Enough rows for several ranges, threads and streaming stores.
void test_large_logs() {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (gq::Spec spec : all_specs) {
      current_seed = 1000 + seed;
      Random random(seed * 1000 + types_of(spec));
      if (gq::is_real(spec.storage)) spec.reduction = static_cast<gq::Reduction>(random.below(4));
      const std::size_t width = seed == 1 ? 1 : seed == 2 ? 3 : 64;
      std::vector<Offer> offers;
      for (std::size_t i = 0; i < 5; ++i) {
        const IdKind kinds[] = {IdKind::ascending, IdKind::sparse_ascending, IdKind::raw};
        const IdKind kind = kinds[seed == 3 ? 0 : random.below(3)];
        offers.push_back(random_offer(random, spec, seed == 3 ? 6000 : 20000, width, kind));
      }
      check_log(random, spec, offers, width);
    }
  }
}

void test_edges() {
  gq::Spec spec;
  const gq::Block nothing = block_of(spec, Offer{}, 4, false);
  const gq::Block* log[] = {&nothing, &nothing};
  CHECK(gq::merge_log(spec, log, 2, 4, 2).num_rows == 0);
  CHECK(gq::merge_log(spec, nullptr, 0, 4, 0).num_rows == 0);
  CHECK(gq::compact_log(spec, log, 2).num_gradients == 2);
  CHECK(gq::distinct_bytes(spec, log, 2) == 0);

  Offer offer;  // Rows without elements have ids and counts all the same.
  offer.ids = std::vector<std::int64_t>{5, 3, 5};
  const gq::Block thin = block_of(spec, offer, 0, false);
  CHECK(thin.num_rows == 2);
  log[1] = &thin;
  const gq::Merged merged = gq::merge_log(spec, log, 2, 0, 2);
  CHECK(merged.num_rows == 2 && merged.ids.as<std::int64_t>()[0] == 3 && merged.counts.as<std::int64_t>()[1] == 1);

  bool threw = false;
  try {
    gq::merge_log(spec, log, 2, 1, 2);
  } catch (const std::invalid_argument&) {
    threw = true;
  }
  CHECK(threw);

  threw = false;
  gq::Gradient huge;
  huge.num_rows = std::size_t{1} << 40;
  huge.width = std::size_t{1} << 40;
  try {
    gq::make_block(spec, huge);
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  CHECK(threw);

  Offer ends;  // The whole range of ids, negative ones too: never asked for, never a crash.
  using Limits = std::numeric_limits<std::int64_t>;
  ends.ids = std::vector<std::int64_t>{Limits::max(), Limits::min(), 0};
  ends.values.assign(3 * sizeof(float), 0);
  const gq::Block wide = block_of(spec, ends, 1, false);
  CHECK(wide.num_rows == 3 && wide.ids.as<std::int64_t>()[0] == Limits::min());
}

void test_finite_is_judged_after_repeats() {
  for (const gq::Spec& spec : all_specs) {
    if (!gq::is_real(spec.storage)) continue;
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
      current_seed = seed;
      Random random(seed);
      const bool tame = random.one_in(2);
      const IdKind kind = random.one_in(2) ? IdKind::raw : IdKind::ascending;
      const Offer offer = random_offer(random, spec, 1 + random.below(100), 5, kind, tame);
      gq::Spec sum = spec;
      sum.reduction = gq::Reduction::sum;
      const gq::Block block = block_of(sum, offer, 5, false, true);
      bool finite = true;
      for (std::size_t i = 0; i < block.num_rows * 5; ++i) {
        const unsigned char* const at = block.values + i * gq::item_bytes(block.dtype);
        double value = 0;
        switch (block.dtype) {
          case gq::DType::f16: value = gq::half_to_float(get<gq::F16>(at, 0)); break;
          case gq::DType::bf16: value = gq::bfloat_to_float(get<gq::BF16>(at, 0)); break;
          case gq::DType::f32: value = get<float>(at, 0); break;
          default: value = get<double>(at, 0); break;
        }
        finite = finite && std::isfinite(value);
      }
      CHECK(block.finite == finite);
      if (kind == IdKind::ascending) CHECK(block_of(sum, offer, 5, true, true).finite == finite);
    }
  }
  gq::Spec half;
  half.storage = gq::DType::f16;
  Offer twice;  // 40000 + 40000 fits float32, and stays there.
  twice.ids = std::vector<std::int64_t>{2, 2};
  const gq::F16 big = gq::float_to_half(40000.0f);
  twice.values.resize(4);
  std::memcpy(twice.values.data(), &big, 2);
  std::memcpy(twice.values.data() + 2, &big, 2);
  CHECK(block_of(half, twice, 1, false, true).finite);
}

void test_distinct_bytes() {
  const gq::Spec spec;
  for (const std::size_t rows : {std::size_t{10}, std::size_t{1000}, std::size_t{3000}, std::size_t{100000}}) {
    Random random(rows);
    std::vector<gq::Block> blocks;
    std::map<std::int64_t, int> seen;
    for (int i = 0; i < 4; ++i) {
      const Offer offer = random_offer(random, spec, rows, 1, IdKind::raw);
      for (const std::int64_t id : offer.ids) seen[id] = 1;
      blocks.push_back(block_of(spec, offer, 1, false));
    }
    std::vector<const gq::Block*> log;
    for (const gq::Block& block : blocks) log.push_back(&block);
    const auto bytes = static_cast<double>(gq::distinct_bytes(spec, log.data(), log.size()));
    const double ratio = bytes / (12.0 * static_cast<double>(seen.size()));
    CHECK(ratio > 0.88 && ratio < 1.12);
    CHECK(rows > 100 || ratio == 1.0);
  }
}

void test_dense() {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    for (gq::Spec spec : all_specs) {
      current_seed = seed;
      Random random(seed * 31 + static_cast<std::uint64_t>(spec.storage));
      if (gq::is_real(spec.storage)) spec.reduction = static_cast<gq::Reduction>(random.below(4));
      const std::size_t size = random.one_in(5) ? 100000 : random.below(300) + 1;
      const std::size_t num = 1 + random.below(5);
      std::vector<Offer> offers;  // One row with id 0 is the same sum.
      for (std::size_t i = 0; i < num; ++i) {
        Offer offer = random_offer(random, spec, 1, size, IdKind::ascending);
        offer.ids = std::vector<std::int64_t>{0};
        offers.push_back(std::move(offer));
      }
      const Expected expected = model_of(spec, offers, size);
      for (const bool wide : {true, false}) {
        gq::InstructionSet::allow_wide(wide);
        for (std::size_t threads = 1; threads <= 2; ++threads) {
          spec.num_threads = threads;
          std::vector<gq::DenseBlock> blocks;
          for (const Offer& offer : offers)
            blocks.push_back(gq::make_dense(spec, offer.values.data(), size, offer.weight, false,
                                            random.one_in(2) ? std::make_shared<int>(0) : nullptr));
          std::vector<const gq::DenseBlock*> log;
          for (const gq::DenseBlock& block : blocks) log.push_back(&block);
          const auto check = [&] {
            const gq::Buffer out = gq::merge_dense(spec, log.data(), log.size(), size, static_cast<std::int64_t>(num));
            CHECK(same_values(spec.storage, out.bytes(), expected.values.data(), size));
          };
          check();
          const std::size_t prefix = 1 + random.below(num);
          const gq::DenseBlock merged = gq::compact_dense(spec, log.data(), prefix);
          log.erase(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(prefix));
          log.insert(log.begin(), &merged);
          check();
        }
      }
      gq::InstructionSet::allow_wide(true);
    }
  }
  const gq::DenseBlock none;
  const gq::DenseBlock* log[] = {&none};
  const gq::Buffer zeros = gq::merge_dense(gq::Spec{}, log, 1, 3, 1);
  CHECK(get<float>(zeros.bytes(), 2) == 0.0f);
  CHECK(gq::compact_dense(gq::Spec{}, log, 1).empty);
}

/// What is packed comes back, and nothing is read from less memory than that.
void test_packed() {
  for (const gq::Spec& spec : all_specs) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      current_seed = seed;
      Random random(seed);
      const std::size_t width = random.below(9);
      const Offer offer = random_offer(random, spec, 1 + random.below(40), width, IdKind::ascending);
      const gq::Block block = block_of(spec, offer, width, random.one_in(2));
      std::vector<unsigned char> memory(gq::packed_bytes(block));  // Not a byte more.
      gq::pack(spec, block, memory.data());
      gq::Gradient gradient;
      const std::size_t row_bytes = width * gq::item_bytes(spec.storage);
      CHECK(!gq::unpack(memory.data(), memory.size(), block.num_rows + 1 + 64, row_bytes, gradient));
      CHECK(!gq::unpack(memory.data(), memory.size(), std::size_t{1} << 61, row_bytes, gradient));
      CHECK(!gq::unpack(memory.data(), memory.size(), block.num_rows, memory.size(), gradient));
      CHECK(!gq::unpack(memory.data(), memory.size() - 1, block.num_rows, row_bytes, gradient));
      CHECK(gradient.ids == nullptr);
      CHECK(gq::unpack(memory.data(), memory.size(), block.num_rows, row_bytes, gradient));
      CHECK(std::equal(offer.ids.begin(), offer.ids.end(), gradient.ids));
      CHECK(std::equal(offer.values.begin(), offer.values.end(), gradient.values));
    }
  }
}

void test_split() {
  constexpr std::int64_t bounds[] = {-5, 40};
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    current_seed = seed;
    Random random(seed);
    const std::size_t num_rows = random.below(70);
    const std::size_t row_bytes = random.below(20);
    std::vector<std::int64_t> ids(num_rows);
    for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random.below(100)) - 50;
    std::vector<unsigned char> values(num_rows * row_bytes);
    for (unsigned char& byte : values) byte = static_cast<unsigned char>(random.below(256));
    const gq::PartOf part_of = random.one_in(2) ? gq::PartOf(bounds, 2) : gq::PartOf(1 + random.below(4));
    const std::vector<gq::Part> parts = gq::split(part_of, ids.data(), values.data(), num_rows, row_bytes);
    CHECK(parts.size() == part_of.num_parts());
    std::vector<std::size_t> seen(parts.size());
    for (std::size_t i = 0; i < num_rows; ++i) {
      const std::size_t number = part_of(ids[i]);
      const gq::Part& part = parts[number];
      const std::size_t row = seen[number]++;
      CHECK(row < part.num_rows && part.memory.as<std::int64_t>()[row] == ids[i]);
      const unsigned char* const at = part.memory.bytes() + gq::packed_values_at(part.num_rows) + row * row_bytes;
      CHECK(std::equal(at, at + row_bytes, values.data() + i * row_bytes));
    }
    for (std::size_t number = 0; number < parts.size(); ++number) {
      const gq::Part& part = parts[number];
      CHECK(part.num_rows == seen[number]);
      if (part.num_rows != 0)
        CHECK(part.memory.size() == gq::packed_values_at(part.num_rows) + part.num_rows * row_bytes);
    }
  }
}

void test_pool() {
  gq::MemoryPool& pool = gq::MemoryPool::instance();
  CHECK(pool.stats().live_buffers == 0);
  {
    const gq::Buffer big(std::size_t{5} << 20);
    CHECK(reinterpret_cast<std::uintptr_t>(big.bytes()) % 64 == 0);
    CHECK(pool.stats().live_buffers == 1);
  }
  CHECK(!gq::pool_keeps || pool.stats().kept_bytes >= (std::size_t{5} << 20));
  pool.trim();
  CHECK(pool.stats().kept_bytes == 0);
  { const gq::Buffer big(std::size_t{5} << 20), small(5000); }
  CHECK(pool.trim(std::size_t{4} << 20) == (gq::pool_keeps ? std::size_t{5} << 20 : 0));
  CHECK(pool.stats().kept_bytes == (gq::pool_keeps ? 5120 : 0));
  pool.trim();
  pool.set_cap(1000);
  { const gq::Buffer big(5000); }
  CHECK(pool.stats().kept_bytes == 0);
  { const gq::Buffer a(500), b(500), c(100); }
  CHECK(pool.stats().kept_bytes <= 1000);
  pool.set_cap(std::size_t{512} << 20);
  CHECK(pool.stats().live_bytes == 0);
}

}  // namespace

int main() {
  test_edges();
  test_random_logs();
  test_large_logs();
  test_finite_is_judged_after_repeats();
  test_distinct_bytes();
  test_dense();
  test_packed();
  test_split();
  test_pool();
  std::puts("unit: good");
}
