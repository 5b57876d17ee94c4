/// Fails each allocation of an apply, a take and a compaction in turn: std::bad_alloc comes out, nothing
/// leaks, and the same call succeeds afterwards with the right bits.
#include <cstdlib>
#include <new>

#include "model.hpp"

namespace {

bool armed = false;  // Only this thread allocates while it is set: one thread is asked for.

void* counted(std::size_t bytes) {
  if (armed) gq::MemoryPool::instance().fail_if_told();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

/// Calls `work` with the k-th allocation failing, for every k, until it goes through.
template <class Work>
int fail_each(Work&& work) {
  for (int k = 0;; ++k) {
    current_seed = static_cast<std::uint64_t>(k);
    const gq::PoolStats before = gq::MemoryPool::instance().stats();
    bool failed = false;
    gq::MemoryPool::instance().fail_after(k);
    armed = true;
    try {
      work();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    armed = false;
    gq::MemoryPool::instance().fail_after(-1);
    const gq::PoolStats after = gq::MemoryPool::instance().stats();
    CHECK(after.live_buffers == before.live_buffers && after.live_bytes == before.live_bytes);
    if (!failed) return k;
  }
}

void test_spec(const gq::Spec& spec, IdKind kind, std::size_t width) {
  Random random(3);
  std::vector<Offer> offers;
  for (int i = 0; i < 4; ++i) offers.push_back(random_offer(random, spec, 6000, width, kind));
  const Expected expected = model_of(spec, offers, width);
  std::vector<gq::Block> blocks;
  for (const Offer& offer : offers) {
    CHECK(fail_each([&] { block_of(spec, offer, width, false); }) > 0);
    blocks.push_back(block_of(spec, offer, width, false));
  }
  std::vector<const gq::Block*> log;
  for (const gq::Block& block : blocks) log.push_back(&block);
  CHECK(fail_each([&] { gq::merge_log(spec, log.data(), log.size(), width, 4); }) > 5);
  CHECK(fail_each([&] { gq::compact_log(spec, log.data(), log.size()); }) > 5);
  CHECK(fail_each([&] { gq::distinct_bytes(spec, log.data(), log.size()); }) > 0);
  check_merged(spec, gq::merge_log(spec, log.data(), log.size(), width, 4), expected, width);
}

void test_dense() {
  const gq::Spec spec;
  const std::vector<float> values(1000, 1.5f);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  CHECK(fail_each([&] { gq::make_dense(spec, bytes, 1000, 1.0, false, nullptr); }) == 1);
  const gq::DenseBlock block = gq::make_dense(spec, bytes, 1000, 1.0, false, nullptr);
  const gq::DenseBlock* log[] = {&block, &block};
  CHECK(fail_each([&] { gq::merge_dense(spec, log, 2, 1000, 2); }) == 1);
  CHECK(fail_each([&] { gq::compact_dense(spec, log, 2); }) == 1);
}

/// In helpers too: the exception comes back to the caller, whichever thread it hit.
void test_with_helpers() {
  gq::Spec spec;
  spec.num_threads = 3;
  Random random(5);
  std::vector<gq::Block> blocks;
  for (int i = 0; i < 4; ++i)
    blocks.push_back(block_of(spec, random_offer(random, spec, 20000, 8, IdKind::ascending), 8, false));
  std::vector<const gq::Block*> log;
  for (const gq::Block& block : blocks) log.push_back(&block);
  const std::size_t live = gq::MemoryPool::instance().stats().live_buffers;
  for (int k = 0; k < 60; ++k) {
    gq::MemoryPool::instance().fail_after(k);
    try {
      gq::merge_log(spec, log.data(), log.size(), 8, 4);
    } catch (const std::bad_alloc&) {
    }
    gq::MemoryPool::instance().fail_after(-1);
    CHECK(gq::MemoryPool::instance().stats().live_buffers == live);
  }
}

}  // namespace

// Not inlined: the compiler would see malloc meet operator delete, and warn.
__attribute__((noinline)) void* operator new(std::size_t bytes) { return counted(bytes); }
__attribute__((noinline)) void* operator new[](std::size_t bytes) { return counted(bytes); }
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete[](void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
  for (gq::Spec spec : all_specs) {
    for (const IdKind kind : {IdKind::ascending, IdKind::raw, IdKind::sparse_raw, IdKind::sparse_ascending}) {
      if (gq::is_real(spec.storage)) spec.reduction = gq::Reduction::mean_by_weight;
      test_spec(spec, kind, 1);
      test_spec(spec, kind, 9);
    }
  }
  test_dense();
  test_with_helpers();
  std::puts("alloc: good");
}
