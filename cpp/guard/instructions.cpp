/// Fixed work for each kernel, so that its instructions can be counted: see benchmarks/instructions.
///
/// Prints the compiler, then the name of each case in the order in which they are measured. One thread, fixed seeds,
/// and instruction sets by name instead of by processor: the counts depend on the source and the compiler only.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "gradquorum/dense.hpp"
#include "gradquorum/log.hpp"

namespace gq = gradquorum;

/// Everything in here is counted; the counts are written down and begin anew when it returns.
extern "C" __attribute__((noinline)) void measured(const std::function<void()>& work) {
  work();
  asm volatile("" ::: "memory");  // Not the last thing that it does: else a jump would take its place.
}

namespace {

/// Gradients as callers have them, and what a round makes of them.
struct Work {
  gq::Spec spec;
  std::size_t width = 0;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<std::vector<unsigned char>> values;  ///< Storage type.
  std::vector<gq::Block> blocks;                   ///< Lent, unless not in order.

  std::vector<const gq::Block*> log() const {
    std::vector<const gq::Block*> out;
    for (const gq::Block& block : blocks) out.push_back(&block);
    return out;
  }

  gq::Gradient gradient(std::size_t i, bool lend) const {
    gq::Gradient out;
    out.ids = ids[i].data();
    out.values = values[i].data();
    out.num_rows = ids[i].size();
    out.width = width;
    if (lend) out.lender = std::make_shared<int>(0);
    return out;
  }
};

/// What a case looks like.
struct Shape {
  std::size_t num = 8;          ///< Gradients.
  std::size_t rows = 2000;      ///< Rows of each.
  std::size_t width = 32;       ///< Elements per row.
  std::uint64_t space = 20000;  ///< Ids lie below.
  bool ascending = true;        ///< Ids ascend without repeats: rows of the id space, each with the same chance.
};

std::vector<std::int64_t> draw_ids(Random& random, const Shape& shape) {
  std::vector<std::int64_t> ids;
  std::uint64_t wanted = shape.rows;
  for (std::uint64_t id = 0; shape.ascending && wanted > 0; ++id) {
    if (random.below(shape.space - id) >= wanted) continue;
    ids.push_back(static_cast<std::int64_t>(id));
    --wanted;
  }
  while (ids.size() < shape.rows) ids.push_back(static_cast<std::int64_t>(random.below(shape.space)));
  return ids;
}

std::vector<unsigned char> draw_values(Random& random, gq::DType type, std::size_t count) {
  std::vector<unsigned char> out(count * gq::item_bytes(type));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(random.below(4001)) / 1000.0f - 2.0f;
    const gq::F16 half = gq::float_to_half(value);
    if (type == gq::DType::f16) std::memcpy(out.data() + i * 2, &half, 2);
    else std::memcpy(out.data() + i * 4, &value, 4);
  }
  return out;
}

std::shared_ptr<Work> prepare(gq::DType type, const Shape& shape, gq::Reduction reduction = gq::Reduction::mean) {
  auto work = std::make_shared<Work>();
  work->spec = gq::Spec{type, gq::DType::f32, reduction, 1};
  work->width = shape.width;
  Random random(2021);
  for (std::size_t i = 0; i < shape.num; ++i) {
    work->ids.push_back(draw_ids(random, shape));
    work->values.push_back(draw_values(random, type, shape.rows * shape.width));
  }
  for (std::size_t i = 0; i < shape.num; ++i)
    work->blocks.push_back(gq::make_block(work->spec, work->gradient(i, true)));
  return work;
}

/// Makes the blocks of a round, copied and looked through for infinities.
std::function<void()> making(std::shared_ptr<Work> work) {
  return [work] {
    for (std::size_t i = 0; i < work->ids.size(); ++i) {
      gq::Gradient gradient = work->gradient(i, false);
      gradient.check_finite = true;
      CHECK(gq::make_block(work->spec, gradient).num_rows != 0);
    }
  };
}

std::function<void()> merging(std::shared_ptr<Work> work) {
  return [work] {
    const auto log = work->log();
    CHECK(gq::merge_log(work->spec, log.data(), log.size(), work->width, 8).num_rows != 0);
  };
}

/// Compacts half of the log, then that with the rest: plain rows, and sums with counts.
std::function<void()> compacting(std::shared_ptr<Work> work) {
  return [work] {
    auto log = work->log();
    const gq::Block half = gq::compact_log(work->spec, log.data(), log.size() / 2);
    log.erase(log.begin() + 1, log.begin() + static_cast<std::ptrdiff_t>(log.size() / 2));
    log[0] = &half;
    CHECK(gq::compact_log(work->spec, log.data(), log.size()).num_rows != 0);
  };
}

/// Asks after each gradient how many rows are distinct, as applies do.
std::function<void()> estimating(std::shared_ptr<Work> work) {
  return [work] {
    const auto log = work->log();
    for (std::size_t i = 1; i <= log.size(); ++i) CHECK(gq::distinct_bytes(work->spec, log.data(), i) != 0);
  };
}

/// Adds up dense gradients, whose elements are those of all rows.
std::function<void()> summing(std::shared_ptr<Work> work) {
  return [work] {
    std::vector<gq::DenseBlock> blocks;
    std::vector<const gq::DenseBlock*> log;
    const std::size_t count = work->ids[0].size() * work->width;
    for (const auto& values : work->values)
      blocks.push_back(gq::make_dense(work->spec, values.data(), count, 1.0, true, nullptr));
    for (const gq::DenseBlock& block : blocks) log.push_back(&block);
    CHECK(gq::merge_dense(work->spec, log.data(), log.size(), count, 8).size() != 0);
  };
}

/// Runs a case twice: memory and statics are there when it is measured.
void run(const std::string& name, const std::function<void()>& work) {
  work();
  std::printf("%s\n", name.c_str());
  measured(work);
}

void run_all(gq::DType type, const std::string& suffix) {
  const auto ascending = prepare(type, Shape{});
  const auto raw = prepare(type, Shape{8, 2000, 32, 4000, false});
  const auto full = prepare(type, Shape{8, 1900, 32, 2000, true});
  const auto thin = prepare(type, Shape{8, 20000, 1, 100000, true});
  const auto weighted = prepare(type, Shape{}, gq::Reduction::mean_by_weight);
  run("block, " + suffix, making(ascending));
  run("order with repeats, " + suffix, making(raw));
  run("merge, " + suffix, merging(ascending));
  run("merge of most of a table, " + suffix, merging(full));
  run("merge of thin rows, " + suffix, merging(thin));
  run("merge with weights, " + suffix, merging(weighted));
  run("compaction, " + suffix, compacting(full));
  run("distinct rows, " + suffix, estimating(ascending));
  run("dense sum, " + suffix, summing(ascending));
}

}  // namespace

int main() {
#if defined(__clang__)
  const char* const compiler = "clang " __clang_version__;
#else
  const char* const compiler = "gcc " __VERSION__;
#endif
#if defined(__x86_64__)
  const char* const architecture = "x86_64";
#elif defined(__aarch64__)
  const char* const architecture = "aarch64";
#else
  const char* const architecture = "unknown";
#endif
  std::printf("%s %s\n", compiler, architecture);
  for (const bool wide : {false, true}) {
    if (wide && !gq::InstructionSet::supported()) break;
    gq::InstructionSet::allow_wide(wide);
    const std::string set = wide ? " wide" : "";
    run_all(gq::DType::f32, "float32" + set);
    run_all(gq::DType::f16, "float16" + set);
  }
  return 0;
}
