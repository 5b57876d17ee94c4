/// Copies values at the memory's speed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "gradquorum/dispatch.hpp"
#include "gradquorum/dtype.hpp"
#include "gradquorum/threads.hpp"

namespace gradquorum {

/// Bytes that one thread handles at a time.
inline constexpr std::size_t piece_bytes = std::size_t{1} << 18;
/// From this many bytes on, results are written around the caches.
inline constexpr std::size_t stream_bytes = std::size_t{1} << 22;
/// From this many bytes on, work on a result is spread over threads.
inline constexpr std::size_t spread_bytes = std::size_t{1} << 20;
/// From this many bytes on, copying a gradient is: the other cores are those of other workers.
inline constexpr std::size_t spread_copy_bytes = std::size_t{1} << 22;

/// Copies, and if asked looks for infinities and NaN; true if there is none.
inline bool copy_values(const Spec& spec, const unsigned char* from, unsigned char* to, std::size_t bytes, bool check) {
  const std::size_t pieces = bytes / piece_bytes + 1;
  const bool stream = bytes >= stream_bytes && !check;
  std::atomic<bool> finite{true};
  ThreadPool::run(bytes >= spread_copy_bytes ? spec.num_threads : 1, pieces, [&](std::size_t i) {
    const std::size_t begin = i * piece_bytes;
    const std::size_t size = std::min(piece_bytes, bytes - begin);
    if (size == 0) return;
    const std::size_t whole = stream ? size / 64 * 64 : 0;
    if (whole != 0) GRADQUORUM_DISPATCH(stream_copy(to + begin, from + begin, whole));
    if (whole != size) std::memcpy(to + begin + whole, from + begin + whole, size - whole);
    if (check && !all_finite(spec.storage, to + begin, size / item_bytes(spec.storage)))
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

}  // namespace gradquorum
