/// Brings the rows of a range of ids in order: by id, and for one id in the order given.
///
/// Dense ranges are ranked by a bitmap, sparse ones sorted by radix, or merged where runs ascend already.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "gradquorum/dispatch.hpp"
#include "gradquorum/pool.hpp"
#include "gradquorum/tasks.hpp"

namespace gradquorum {

/// A stretch of the rows of one block.
struct Span {
  const std::int64_t* ids = nullptr;         ///< Ids of the rows.
  std::size_t count = 0;                     ///< Number of rows.
  RowAddress row = 0;                        ///< Tagged address of the first row.
  std::size_t stride = 0;                    ///< Bytes from row to row.
  const std::uint32_t* counts32 = nullptr;   ///< Gradients per row; if both are null, one.
  const std::int64_t* counts64 = nullptr;    ///< The same, wide.
  std::uint32_t weight = 0;                  ///< Place of the weight of these rows.
  double weight_value = 1.0;                 ///< The weight itself.

  /// Gradients in row i.
  std::int64_t touched(std::size_t i) const {
    if (counts32 != nullptr) return counts32[i];
    return counts64 != nullptr ? counts64[i] : 1;
  }
};

/// The spans of one range of ids.
struct SpanList {
  const Span* spans = nullptr;     ///< In log order, none empty.
  std::size_t size = 0;            ///< Number of spans.
  std::size_t num_rows = 0;        ///< Rows of all spans.
  bool ascending = true;           ///< The ids of each span ascend without repeats.
  std::int64_t low = 0;            ///< No id is below.
  std::int64_t high = 0;           ///< No id is above.
};

/// Where the order goes. Each array has room for all rows of the range.
struct Ordered {
  std::int64_t* ids = nullptr;        ///< Distinct ids, ascending.
  std::uint32_t* ends = nullptr;      ///< For each of them the end of its rows; for thin sums the number of rows.
  RowAddress* rows = nullptr;         ///< Rows, by id, then in log order.
  std::uint32_t* weight_of = nullptr; ///< Place of the weight of each row, or null if nobody asks.
  std::int64_t* touched = nullptr;    ///< Gradients per id, or null if nobody asks.
};

/// Most words of a bitmap: with its counts it then stays in the caches.
inline constexpr std::size_t max_bitmap_words = std::size_t{1} << 17;

/// Words of the bitmap from low to high.
inline std::uint64_t bitmap_words(std::int64_t low, std::int64_t high) {
  return ((static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low)) >> 6) + 1;
}

/// True if a bitmap orders the range faster than sorting: up to about 100 ids of the range for each row if ids are
/// spread evenly, some hundreds if they are in clusters, where sorting by leading bits fails.
inline bool is_dense(const SpanList& list) {
  const std::uint64_t words = bitmap_words(list.low, list.high);
  return words <= max_bitmap_words && words <= 64 + 2 * static_cast<std::uint64_t>(list.num_rows);
}

/// The bitmap of a range, with its memory.
class RangeBitmap {
 public:
  /// Marks all ids of the spans.
  explicit RangeBitmap(const SpanList& list) {
    map_.num_words = static_cast<std::size_t>(bitmap_words(list.low, list.high));
    map_.low = list.low;
    memory_ = Buffer(map_.num_words * (sizeof(std::uint64_t) + sizeof(std::uint32_t)));
    map_.words = memory_.as<std::uint64_t>();
    map_.before = reinterpret_cast<std::uint32_t*>(map_.words + map_.num_words);
    std::memset(map_.words, 0, map_.num_words * sizeof(std::uint64_t));
    for (std::size_t s = 0; s < list.size; ++s)
      GRADQUORUM_DISPATCH(mark_ids(map_, list.spans[s].ids, list.spans[s].count));
  }

  /// Lists the distinct ids; returns how many there are. To be called once, before rank().
  std::size_t list(std::int64_t* ids) const { return GRADQUORUM_DISPATCH(list_ids(map_, ids)); }

  /// The place of each id among the distinct ones, counted in `sizes`.
  void rank(const Span& span, std::uint32_t* ranks, std::uint32_t* sizes) const {
    GRADQUORUM_DISPATCH(rank_ids(map_, span.ids, span.count, ranks, sizes));
  }

 private:
  Buffer memory_;  ///< Words, then the counts before them.
  Bitmap map_;     ///< Points into memory_.
};

/// Adds up the gradients per id.
inline void add_touched(const Span& span, const std::uint32_t* ranks, std::int64_t* touched) {
  for (std::size_t i = 0; i < span.count; ++i) touched[ranks[i]] += span.touched(i);
}

/// Orders a dense range; returns the number of distinct ids.
inline std::size_t order_dense(const SpanList& list, const Ordered& out) {
  const RangeBitmap map(list);
  const Buffer ranks(list.num_rows * sizeof(std::uint32_t));
  const std::size_t distinct = map.list(out.ids);
  std::memset(out.ends, 0, distinct * sizeof(std::uint32_t));
  if (out.touched != nullptr) std::memset(out.touched, 0, distinct * sizeof(std::int64_t));
  std::uint32_t* rank = ranks.as<std::uint32_t>();
  for (std::size_t s = 0; s < list.size; ++s) {
    map.rank(list.spans[s], rank, out.ends);
    if (out.touched != nullptr) add_touched(list.spans[s], rank, out.touched);
    rank += list.spans[s].count;
  }
  std::uint32_t start = 0;
  for (std::size_t r = 0; r < distinct; ++r) {
    const std::uint32_t size = out.ends[r];
    out.ends[r] = start;
    start += size;
  }
  rank = ranks.as<std::uint32_t>();
  for (std::size_t s = 0; s < list.size; ++s) {
    const Span& span = list.spans[s];
    RowAddress row = span.row;
    if (out.weight_of == nullptr) {
      for (std::size_t i = 0; i < span.count; ++i, row += span.stride) out.rows[out.ends[rank[i]]++] = row;
    } else {
      for (std::size_t i = 0; i < span.count; ++i, row += span.stride) {
        const std::uint32_t at = out.ends[rank[i]]++;
        out.rows[at] = row;
        out.weight_of[at] = span.weight;
      }
    }
    rank += span.count;
  }
  return distinct;
}

/// A row on its way to its place.
struct Entry {
  std::uint64_t key;  ///< Distance of the id from the lowest.
  std::uint32_t at;   ///< Row, counted through all spans.
};

/// Merges the sorted runs that end at `ends`, two by two, stably; returns where the result is.
inline Entry* merge_runs(Entry* from, Entry* to, std::size_t* ends, std::size_t num_runs) {
  while (num_runs > 1) {
    std::size_t begin = 0;
    std::size_t kept = 0;
    for (std::size_t run = 0; run < num_runs; run += 2) {
      const std::size_t middle = ends[run];
      const std::size_t end = run + 1 < num_runs ? ends[run + 1] : middle;
      std::size_t a = begin;
      std::size_t b = middle;
      std::size_t o = begin;
      while (a < middle && b < end) {
        const bool right = from[b].key < from[a].key;
        to[o++] = from[right ? b : a];
        b += right;
        a += !right;
      }
      if (a < middle) std::memcpy(to + o, from + a, (middle - a) * sizeof(Entry));
      else if (b < end) std::memcpy(to + o, from + b, (end - b) * sizeof(Entry));
      ends[kept++] = end;
      begin = end;
    }
    num_runs = kept;
    std::swap(from, to);
  }
  return from;
}

/// Sorts stably by the bytes of the key that vary; returns where the result is.
inline Entry* radix_sort(Entry* from, Entry* to, std::size_t count, std::uint64_t max_key) {
  for (unsigned shift = 0; shift < 64 && (max_key >> shift) != 0; shift += 8) {
    std::size_t places[256] = {};
    for (std::size_t i = 0; i < count; ++i) ++places[(from[i].key >> shift) & 255u];
    if (places[(from[0].key >> shift) & 255u] == count) continue;  // All the same: nothing to do.
    std::size_t place = 0;
    for (std::size_t& entry : places) {
      const std::size_t size = entry;
      entry = place;
      place += size;
    }
    for (std::size_t i = 0; i < count; ++i) to[places[(from[i].key >> shift) & 255u]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

/// True if merging runs takes fewer steps than sorting by bytes.
inline bool prefer_merge(const SpanList& list) {
  if (!list.ascending) return false;
  std::size_t levels = 0;
  while ((std::size_t{1} << levels) < list.size) ++levels;
  std::size_t digits = 0;
  const std::uint64_t range = static_cast<std::uint64_t>(list.high) - static_cast<std::uint64_t>(list.low);
  while (digits < 8 && (range >> (8 * digits)) != 0) ++digits;
  return levels <= digits;
}

/// Sorts stably: by leading bits into about as many buckets as entries, then within each. Returns where the
/// result is, or null if too many keys share their leading bits; then nothing has moved.
inline Entry* bucket_sort(const Entry* from, Entry* to, std::size_t count, std::uint64_t max_key) {
  unsigned shift = 0;
  while ((max_key >> shift) >= 2 * static_cast<std::uint64_t>(count)) ++shift;
  const std::size_t num_buckets = static_cast<std::size_t>(max_key >> shift) + 1;
  const Buffer memory(num_buckets * sizeof(std::uint32_t));
  std::uint32_t* const places = memory.as<std::uint32_t>();
  std::memset(places, 0, num_buckets * sizeof(std::uint32_t));
  std::uint64_t pairs = 0;  // Steps that sorting within buckets may take.
  for (std::size_t i = 0; i < count; ++i) pairs += places[from[i].key >> shift]++;
  if (pairs > 8 * static_cast<std::uint64_t>(count)) return nullptr;
  std::uint32_t place = 0;
  for (std::size_t b = 0; b < num_buckets; ++b) {
    const std::uint32_t size = places[b];
    places[b] = place;
    place += size;
  }
  for (std::size_t i = 0; i < count; ++i) to[places[from[i].key >> shift]++] = from[i];
  for (std::size_t i = 1; i < count; ++i) {  // Nobody is further from his place than his bucket is long.
    const Entry entry = to[i];
    std::size_t hole = i;
    for (; hole > 0 && to[hole - 1].key > entry.key; --hole) to[hole] = to[hole - 1];
    to[hole] = entry;
  }
  return to;
}

/// Orders a sparse range; returns the number of distinct ids.
inline std::size_t order_sparse(const SpanList& list, const Ordered& out) {
  const std::size_t n = list.num_rows;
  const Buffer entries(checked_mul(2 * sizeof(Entry), n));
  const Buffer sources(checked_mul(list.size, sizeof(std::size_t)));
  Entry* const first = entries.as<Entry>();
  std::size_t* const ends = sources.as<std::size_t>();
  std::size_t e = 0;
  for (std::size_t s = 0; s < list.size; ++s) {
    const Span& span = list.spans[s];
    for (std::size_t i = 0; i < span.count; ++i, ++e)
      first[e] = Entry{static_cast<std::uint64_t>(span.ids[i]) - static_cast<std::uint64_t>(list.low),
                       static_cast<std::uint32_t>(e)};
    ends[s] = e;
  }
  const Buffer places(n * (sizeof(RowAddress) + 2 * sizeof(std::uint32_t)));  // By row, through all spans.
  RowAddress* const rows = places.as<RowAddress>();
  std::uint32_t* const span_of = reinterpret_cast<std::uint32_t*>(rows + n);
  e = 0;
  for (std::size_t s = 0; s < list.size; ++s) {
    RowAddress row = list.spans[s].row;
    for (; e < ends[s]; ++e, row += list.spans[s].stride) {
      rows[e] = row;
      span_of[e] = static_cast<std::uint32_t>(s);
    }
  }
  std::uint32_t* const index = span_of + n;  // Row within its span; only used for counts.
  if (out.touched != nullptr)
    for (std::size_t s = 0, at = 0; s < list.size; ++s)
      for (std::size_t i = 0; i < list.spans[s].count; ++i) index[at++] = static_cast<std::uint32_t>(i);
  const std::uint64_t range = static_cast<std::uint64_t>(list.high) - static_cast<std::uint64_t>(list.low);
  const Entry* sorted = bucket_sort(first, first + n, n, range);
  if (sorted == nullptr && prefer_merge(list)) sorted = merge_runs(first, first + n, ends, list.size);
  if (sorted == nullptr) sorted = radix_sort(first, first + n, n, range);
  std::size_t distinct = 0;
  for (std::size_t p = 0; p < n; ++p) {
    const bool fresh = p == 0 || sorted[p].key != sorted[p - 1].key;
    const std::uint32_t at = sorted[p].at;
    if (fresh) {
      out.ids[distinct] = static_cast<std::int64_t>(sorted[p].key + static_cast<std::uint64_t>(list.low));
      if (out.touched != nullptr) out.touched[distinct] = 0;
      ++distinct;
    }
    out.ends[distinct - 1] = static_cast<std::uint32_t>(p + 1);
    out.rows[p] = rows[at];
    const Span& span = list.spans[span_of[at]];
    if (out.weight_of != nullptr) out.weight_of[p] = span.weight;
    if (out.touched != nullptr) out.touched[distinct - 1] += span.touched(index[at]);
  }
  return distinct;
}

/// Orders a range that one ascending span fills.
inline std::size_t order_single(const Span& span, const Ordered& out) {
  std::memcpy(out.ids, span.ids, span.count * sizeof(std::int64_t));
  RowAddress row = span.row;
  for (std::size_t i = 0; i < span.count; ++i, row += span.stride) {
    out.rows[i] = row;
    out.ends[i] = static_cast<std::uint32_t>(i + 1);
    if (out.weight_of != nullptr) out.weight_of[i] = span.weight;
    if (out.touched != nullptr) out.touched[i] = span.touched(i);
  }
  return span.count;
}

/// Orders a range of ids; returns the number of distinct ones.
inline std::size_t order_range(const SpanList& list, const Ordered& out) {
  if (list.num_rows == 0) return 0;
  if (list.num_rows >= std::numeric_limits<std::uint32_t>::max())
    throw std::length_error("more than 4294967294 rows to order at once");
  if (list.size == 1 && list.ascending) return order_single(list.spans[0], out);
  return is_dense(list) ? order_dense(list, out) : order_sparse(list, out);
}

}  // namespace gradquorum
