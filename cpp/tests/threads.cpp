/// Many threads at once: appliers, a taker and a compactor on one log; concurrent callers of the thread pool;
/// a fork. Totals are exact, because all values are small integers.
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "model.hpp"

namespace {

using BlockPtr = std::shared_ptr<const gq::Block>;

/// The log of a round as the layer above keeps it: blocks are immutable, the list is guarded.
struct Round {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<BlockPtr> log;  // Guarded by: mutex
  std::uint64_t epoch = 0;    // Guarded by: mutex
  int appliers = 0;           // Guarded by: mutex
};

std::vector<const gq::Block*> pointers(const std::vector<BlockPtr>& blocks) {
  std::vector<const gq::Block*> out;
  for (const BlockPtr& block : blocks) out.push_back(block.get());
  return out;
}

void apply_many(Round& round, const gq::Spec& spec, int who, int times, std::atomic<std::int64_t>& total) {
  Random random(static_cast<std::uint64_t>(who) + 1);
  for (int t = 0; t < times; ++t) {
    Offer offer;
    const std::size_t rows = 1 + random.below(t % 8 == 0 ? 9000 : 300);
    for (std::size_t i = 0; i < rows; ++i) offer.ids.push_back(static_cast<std::int64_t>(random.below(4000)));
    if (t % 2 == 0) {
      std::sort(offer.ids.begin(), offer.ids.end());
      offer.ids.erase(std::unique(offer.ids.begin(), offer.ids.end()), offer.ids.end());
    }
    std::vector<double> values(offer.ids.size() * 3);
    std::int64_t sum = 0;
    for (double& x : values) {
      x = static_cast<double>(random.below(8));
      sum += static_cast<std::int64_t>(x);
    }
    offer.values.resize(values.size() * sizeof(double));
    std::memcpy(offer.values.data(), values.data(), offer.values.size());
    auto block = std::make_shared<const gq::Block>(block_of(spec, offer, 3, false));
    total += sum;
    const std::lock_guard<std::mutex> lock(round.mutex);
    round.log.push_back(std::move(block));
    round.changed.notify_all();
  }
  const std::lock_guard<std::mutex> lock(round.mutex);
  --round.appliers;
  round.changed.notify_all();
}

void compact_some(Round& round, const gq::Spec& spec) {
  for (;;) {
    std::vector<BlockPtr> prefix;
    std::uint64_t epoch = 0;
    {
      std::unique_lock<std::mutex> lock(round.mutex);
      round.changed.wait(lock, [&] { return round.log.size() >= 6 || round.appliers == 0; });
      if (round.appliers == 0) return;
      prefix.assign(round.log.begin(), round.log.begin() + 5);
      epoch = round.epoch;
    }
    const std::vector<const gq::Block*> log = pointers(prefix);
    CHECK(gq::distinct_bytes(spec, log.data(), log.size()) > 0);
    auto block = std::make_shared<const gq::Block>(gq::compact_log(spec, log.data(), log.size()));
    const std::lock_guard<std::mutex> lock(round.mutex);
    if (round.epoch != epoch) continue;  // A take came meanwhile and has the old blocks.
    round.log.erase(round.log.begin(), round.log.begin() + 5);
    round.log.insert(round.log.begin(), std::move(block));
  }
}

void take_all(Round& round, const gq::Spec& spec, std::int64_t& total) {
  for (bool last = false; !last;) {
    std::vector<BlockPtr> taken;
    {
      std::unique_lock<std::mutex> lock(round.mutex);
      round.changed.wait(lock, [&] { return round.log.size() >= 12 || round.appliers == 0; });
      last = round.appliers == 0;
      taken.swap(round.log);
      ++round.epoch;
    }
    const std::vector<const gq::Block*> log = pointers(taken);
    const gq::Merged merged = gq::merge_log(spec, log.data(), log.size(), 3, 1);
    const double* const values = merged.values.as<double>();
    for (std::size_t i = 0; i < merged.num_rows * 3; ++i) total += static_cast<std::int64_t>(values[i]);
  }
}

void test_round() {
  gq::Spec spec;
  spec.storage = spec.accumulate = gq::DType::f64;
  spec.reduction = gq::Reduction::sum;
  spec.num_threads = 3;
  Round round;
  round.appliers = 8;
  std::atomic<std::int64_t> offered{0};
  std::int64_t taken = 0;
  std::vector<std::thread> threads;
  for (int who = 0; who < 8; ++who) threads.emplace_back([&, who] { apply_many(round, spec, who, 40, offered); });
  threads.emplace_back([&] { compact_some(round, spec); });
  take_all(round, spec, taken);
  for (std::thread& thread : threads) thread.join();
  CHECK(taken == offered.load());
}

void test_concurrent_callers() {
  std::vector<std::thread> callers;
  std::atomic<std::uint64_t> total{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        std::atomic<std::uint64_t> sum{0};
        gq::ThreadPool::run(4, 37, [&](std::size_t k) { sum += k; });
        CHECK(sum == 36 * 37 / 2);
        total += sum;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 600 * 36 * 37 / 2);
}

void test_exceptions_reach_the_caller() {
  for (int i = 0; i < 50; ++i) {
    bool threw = false;
    try {
      gq::ThreadPool::run(3, 20, [&](std::size_t k) {
        if (k == 11) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    CHECK(threw);
  }
}

/// The child has none of the helpers, and starts its own.
[[maybe_unused]] void test_fork() {
  gq::ThreadPool::run(3, 8, [](std::size_t) {});
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    std::atomic<int> done{0};
    gq::ThreadPool::run(3, 100, [&](std::size_t) { ++done; });
    const gq::Buffer buffer(100000);
    std::_Exit(done == 100 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  test_concurrent_callers();
  test_exceptions_reach_the_caller();
  test_round();
#if !defined(__SANITIZE_THREAD__)  // Which cannot follow a process with threads through a fork.
  test_fork();
#endif
  std::puts("threads: good");
}
