// The inner loops over ids. Included by dispatch.hpp, and only there, once for each instruction set; see kernels.hpp.

namespace gradquorum {
namespace GRADQUORUM_ISA {

#define GRADQUORUM_FN __attribute__((always_inline)) GRADQUORUM_TARGET inline

/// Copies ids, each read once, and tells whether they ascend without repeats: it is the copy that is looked at.
GRADQUORUM_TARGET inline bool copy_ids(const std::int64_t* from, std::size_t count, std::int64_t* to) {
  constexpr std::size_t run = 512;  // Ids that are still in the first-level cache when they are looked at.
  bool falls = false;
  for (std::size_t begin = 0; begin < count; begin += run) {
    const std::size_t end = std::min(begin + run, count);
    std::memcpy(to + begin, from + begin, (end - begin) * sizeof(std::int64_t));
    std::int64_t any = 0;
    for (std::size_t i = begin == 0 ? 1 : begin; i < end; ++i) any |= to[i] <= to[i - 1] ? -1 : 0;
    falls |= any != 0;
  }
  return !falls;
}

/// Smallest and largest of `count` ids, at least one.
GRADQUORUM_TARGET inline void range_of(const std::int64_t* ids, std::size_t count, std::int64_t& low,
                                       std::int64_t& high) {
  std::int64_t least = ids[0];
  std::int64_t most = ids[0];
  for (std::size_t i = 1; i < count; ++i) {
    least = ids[i] < least ? ids[i] : least;
    most = ids[i] > most ? ids[i] : most;
  }
  low = least;
  high = most;
}

/// Distance of an id from the bitmap's first.
GRADQUORUM_FN std::uint64_t place(const Bitmap& map, std::int64_t id) {
  return static_cast<std::uint64_t>(id) - static_cast<std::uint64_t>(map.low);
}

/// Sets the bits of ids.
GRADQUORUM_TARGET inline void mark_ids(const Bitmap& map, const std::int64_t* ids, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t x = place(map, ids[i]);
    map.words[x >> 6] |= std::uint64_t{1} << (x & 63);
  }
}

/// Counts the bits before each word and lists the ids; returns how many there are.
GRADQUORUM_TARGET inline std::size_t list_ids(const Bitmap& map, std::int64_t* ids) {
  std::size_t found = 0;
  for (std::size_t w = 0; w < map.num_words; ++w) {
    map.before[w] = static_cast<std::uint32_t>(found);
    std::uint64_t word = map.words[w];
    const std::uint64_t base = static_cast<std::uint64_t>(map.low) + (static_cast<std::uint64_t>(w) << 6);
    while (word != 0) {
      ids[found++] = static_cast<std::int64_t>(base + static_cast<std::uint64_t>(__builtin_ctzll(word)));
      word &= word - 1;
    }
  }
  return found;
}

/// For each id its place among the distinct ones; `sizes` of them go up by one.
GRADQUORUM_TARGET inline void rank_ids(const Bitmap& map, const std::int64_t* ids, std::size_t count,
                                       std::uint32_t* rank, std::uint32_t* sizes) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t x = place(map, ids[i]);
    const std::uint64_t below = map.words[x >> 6] & ((std::uint64_t{1} << (x & 63)) - 1);
    const std::uint32_t r = map.before[x >> 6] + static_cast<std::uint32_t>(__builtin_popcountll(below));
    rank[i] = r;
    ++sizes[r];
  }
}

#undef GRADQUORUM_FN

}  // namespace GRADQUORUM_ISA
}  // namespace gradquorum
