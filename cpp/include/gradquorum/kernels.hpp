// The inner loops over values. Included by dispatch.hpp, and only there, once for each instruction set, with
//   GRADQUORUM_ISA      name of the namespace
//   GRADQUORUM_TARGET   attribute of every function
//   GRADQUORUM_VECTOR   bytes of a vector
// No include guard: that is the point. All give the same bits: each only adds, multiplies, divides and converts.

namespace gradquorum {
namespace GRADQUORUM_ISA {

#define GRADQUORUM_FN __attribute__((always_inline)) GRADQUORUM_TARGET inline

/// A vector of N elements.
template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
/// Elements of A in a full vector.
template <class A>
inline constexpr int lanes = GRADQUORUM_VECTOR / static_cast<int>(sizeof(A));
/// Short for the type above.
template <class T, int N>
using Vector = typename VectorOf<T, N>::type;
/// A full vector.
template <class A>
using Wide = typename VectorOf<A, lanes<A>>::type;

/// Reads what may be unaligned. Not with memcpy: GCC copies vectors in halves, which then stall each other.
template <class T>
GRADQUORUM_FN void read(const unsigned char* from, T& to) {
  if constexpr (std::is_class_v<T>) {
    std::memcpy(&to, from, sizeof(T));
  } else {
    typedef T Unaligned __attribute__((aligned(1), may_alias));
    to = *reinterpret_cast<const Unaligned*>(from);
  }
}

/// Writes what may be unaligned.
template <class T>
GRADQUORUM_FN void put(unsigned char* to, const T& from) {
  typedef T Unaligned __attribute__((aligned(1), may_alias));
  *reinterpret_cast<Unaligned*>(to) = from;
}

/// Reads one vector of storage type S into the accumulate type A.
template <class S, class A>
GRADQUORUM_FN void load(const unsigned char* from, Wide<A>& to) {
  constexpr int n = lanes<A>;
  if constexpr (std::is_same_v<S, A>) {
    read(from, to);
  } else if constexpr (std::is_same_v<S, BF16>) {
    Vector<std::uint16_t, n> bits;
    read(from, bits);
    const Vector<std::uint32_t, n> shifted = __builtin_convertvector(bits, Vector<std::uint32_t, n>) << 16;
    to = __builtin_convertvector((Vector<float, n>)shifted, Wide<A>);
  } else if constexpr (std::is_same_v<S, F16>) {
#if GRADQUORUM_VECTOR == 32
    if constexpr (std::is_same_v<A, float>) {
      to = (Wide<A>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    } else {
      to = (Wide<A>)_mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
#else
    for (int i = 0; i < n; ++i) {
      F16 half;
      read(from + 2 * i, half);
      to[i] = widen<F16, A>(half);
    }
#endif
  } else if constexpr (std::is_same_v<S, float>) {
    Vector<float, n> floats;
    read(from, floats);
    to = __builtin_convertvector(floats, Wide<A>);
  } else {
    static_assert(std::is_same_v<S, std::int32_t>, "no such conversion");
    Vector<std::int32_t, n> ints;
    read(from, ints);
    to = (Wide<A>)__builtin_convertvector(ints, Vector<std::int64_t, n>);
  }
}

/// Writes a vector, around the caches if asked; then the address is a multiple of its size.
template <class V>
GRADQUORUM_FN void write(unsigned char* to, const V& from, bool stream) {
#if defined(__x86_64__)
  if (stream) {
#if GRADQUORUM_VECTOR == 32
    if constexpr (sizeof(V) == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)from);
      return;
    }
#endif
    if constexpr (sizeof(V) == 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)from);
      return;
    }
  }
#endif
  (void)stream;
  put(to, from);
}

/// Writes one vector of the accumulate type A as D, rounded once to nearest even.
template <class A, class D>
GRADQUORUM_FN void store(unsigned char* to, const Wide<A>& from, bool stream) {
  constexpr int n = lanes<A>;
  if constexpr (std::is_same_v<A, D>) {
    write(to, from, stream);
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<D, BF16>) {
    const Vector<std::uint32_t, n> bits = (Vector<std::uint32_t, n>)from;
    const Vector<std::uint32_t, n> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Vector<std::uint32_t, n> mask =
        (Vector<std::uint32_t, n>)((bits & 0x7fffffffu) > 0x7f800000u);  // All ones where it is NaN.
    const Vector<std::uint32_t, n> chosen = (rounded & ~mask) | (((bits >> 16) | 0x40u) & mask);
    write(to, __builtin_convertvector(chosen, Vector<std::uint16_t, n>), stream);
#if GRADQUORUM_VECTOR == 32
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<D, F16>) {
    write(to, (Vector<std::uint16_t, n>)_mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT), stream);
#endif
  } else if constexpr (std::is_same_v<D, F16> || std::is_same_v<D, BF16>) {
    for (int i = 0; i < n; ++i) {
      const D half = narrow<A, D>(from[i]);
      std::memcpy(to + 2 * i, &half, 2);
    }
  } else {
    write(to, __builtin_convertvector(from, Vector<D, n>), stream);
  }
}

/// Reads a vector of one row, multiplied by `weight` if Weighted.
template <class S, class A, bool Weighted>
GRADQUORUM_FN void load_part(RowAddress row, bool accumulated, std::size_t at, A weight, Wide<A>& to) {
  const unsigned char* const base = reinterpret_cast<const unsigned char*>(row);
  if (std::is_same_v<S, A> || accumulated) load<A, A>(base + at * sizeof(A), to);
  else load<S, A>(base + at * sizeof(S), to);
  if constexpr (Weighted) to *= weight;
  (void)weight;
}

/// Weight of the j-th row of a group.
template <class A, bool Weighted>
GRADQUORUM_FN A weight_at(const RowsTask& task, const std::uint32_t* weight_of, std::size_t j) {
  if constexpr (Weighted) return static_cast<A>(task.weights[weight_of[j]]);
  else return A{};
}

/// K full vectors side by side. A chain and not an array, which would live in memory.
template <class A, int K>
struct Pack {
  Wide<A> head;
  Pack<A, K - 1> tail;
};
template <class A>
struct Pack<A, 1> {
  Wide<A> head;
};

/// Adds a pack of one row to the sums, or starts them with it if First.
template <class S, class A, bool Weighted, bool First, int K>
GRADQUORUM_FN void add_pack(RowAddress row, bool accumulated, std::size_t at, A weight, Pack<A, K>& sums) {
  Wide<A> part;
  load_part<S, A, Weighted>(row, accumulated, at, weight, part);
  if constexpr (First) sums.head = part;
  else sums.head += part;
  if constexpr (K > 1) add_pack<S, A, Weighted, First>(row, accumulated, at + lanes<A>, weight, sums.tail);
}

/// Divides all vectors of a pack.
template <class A, int K>
GRADQUORUM_FN void divide_pack(Pack<A, K>& sums, A divisor) {
  sums.head /= divisor;
  if constexpr (K > 1) divide_pack(sums.tail, divisor);
}

/// Writes a pack as D.
template <class A, class D, int K>
GRADQUORUM_FN void store_pack(unsigned char* to, const Pack<A, K>& sums, bool stream) {
  store<A, D>(to, sums.head, stream);
  if constexpr (K > 1) store_pack<A, D>(to + lanes<A> * sizeof(D), sums.tail, stream);
}

/// Adds up K vectors of each of `count` rows, divides, and writes the result.
template <class S, class A, class D, bool Weighted, int K>
GRADQUORUM_FN void sum_vectors(const RowsTask& task, const RowAddress* rows, const std::uint32_t* weight_of,
                               std::size_t count, std::size_t at, bool divide, A divisor, unsigned char* out) {
  Pack<A, K> sums;
  add_pack<S, A, Weighted, true>(rows[0] & ~accumulated_tag, (rows[0] & accumulated_tag) != 0, at,
                                 weight_at<A, Weighted>(task, weight_of, 0), sums);
  for (std::size_t j = 1; j < count; ++j)
    add_pack<S, A, Weighted, false>(rows[j] & ~accumulated_tag, (rows[j] & accumulated_tag) != 0, at,
                                    weight_at<A, Weighted>(task, weight_of, j), sums);
  if (divide) divide_pack(sums, divisor);
  store_pack<A, D>(out + at * sizeof(D), sums, task.stream);
}

/// One element of a row in the accumulate type.
template <class S, class A>
GRADQUORUM_FN A element(RowAddress row, std::size_t at) {
  const unsigned char* const base = reinterpret_cast<const unsigned char*>(row & ~accumulated_tag);
  if (std::is_same_v<S, A> || (row & accumulated_tag) != 0) {
    A value;
    read(base + at * sizeof(A), value);
    return value;
  }
  S value;
  read(base + at * sizeof(S), value);
  return widen<S, A>(value);
}

/// The same as sum_vectors for one element.
template <class S, class A, class D, bool Weighted>
GRADQUORUM_FN void sum_element(const RowsTask& task, const RowAddress* rows, const std::uint32_t* weight_of,
                               std::size_t count, std::size_t at, bool divide, A divisor, unsigned char* out) {
  A sum{};
  for (std::size_t j = 0; j < count; ++j) {
    A value = element<S, A>(rows[j], at);
    if constexpr (Weighted) value *= static_cast<A>(task.weights[weight_of[j]]);
    sum = j == 0 ? value : static_cast<A>(sum + value);
  }
  if (divide) sum /= divisor;
  const D result = narrow<A, D>(sum);
  std::memcpy(out + at * sizeof(D), &result, sizeof(D));
}

/// Asks for the lines of the first bytes of a row that will be read soon. A row need not begin where a line does.
GRADQUORUM_FN void fetch_row(RowAddress row, std::size_t bytes) {
  const RowAddress end = row + bytes;
  for (RowAddress line = row & ~RowAddress{63}; line < end; line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(line), 0, 3);
}

/// Adds up the groups of a task.
template <class S, class A, class D, bool Weighted>
GRADQUORUM_TARGET void sum_rows(const RowsTask& task) {
  constexpr std::size_t n = lanes<A>;
  const std::size_t width = task.width;
  const std::size_t out_bytes = width * sizeof(D);
  const std::size_t fetched = std::min<std::size_t>(width * sizeof(S), 1024);
  const std::size_t ahead = std::max<std::size_t>(2, std::min<std::size_t>(64, 4096 / (fetched + 1)));
  unsigned char* out = task.out;
  std::size_t first = 0;
  for (std::size_t group = 0; group < task.num_groups; ++group) {
    const std::size_t end = task.ends != nullptr ? task.ends[group] - task.skipped : first + 1;
    const std::size_t count = end - first;
    const RowAddress* const rows = task.rows + first;
    const std::uint32_t* const weight_of = Weighted ? task.weight_of + first : nullptr;
    const std::size_t stop = std::min(first + ahead + count, task.num_rows);
    for (std::size_t i = first + ahead; i < stop; ++i) fetch_row(task.rows[i], fetched);
    A divisor{};
    bool divide = task.divide != Divide::none;
    if (task.divide == Divide::by_touched) {
      const std::int64_t touched = task.touched != nullptr ? task.touched[group] : static_cast<std::int64_t>(count);
      divide = touched != 1;  // x / 1 is x.
      divisor = static_cast<A>(touched);
    } else if (task.divide == Divide::by_number) {
      divisor = task.number > 0 ? static_cast<A>(task.number) : static_cast<A>(task.count);
    }
    std::size_t at = 0;
    if constexpr (std::is_same_v<S, A> && !Weighted) {  // In all others it would cost more to compile than it gains.
      for (; at + 8 * n <= width; at += 8 * n)
        sum_vectors<S, A, D, Weighted, 8>(task, rows, weight_of, count, at, divide, divisor, out);
    }
    for (; at + 4 * n <= width; at += 4 * n)
      sum_vectors<S, A, D, Weighted, 4>(task, rows, weight_of, count, at, divide, divisor, out);
    for (; at + n <= width; at += n)
      sum_vectors<S, A, D, Weighted, 1>(task, rows, weight_of, count, at, divide, divisor, out);
    for (; at < width; ++at) sum_element<S, A, D, Weighted>(task, rows, weight_of, count, at, divide, divisor, out);
    first += count;
    out += out_bytes;
  }
#if defined(__x86_64__)
  if (task.stream) _mm_sfence();
#endif
}

/// Adds `rows` thin rows of S to the sums that `rank` names. Sums start from the neutral element, -0 or 0.
template <class S, class A, bool Weighted, int Width>
GRADQUORUM_FN void scatter_fixed(const unsigned char* from, const std::uint32_t* rank, std::size_t rows,
                                 std::size_t width, A weight, A* sums) {
  const std::size_t w = Width > 0 ? static_cast<std::size_t>(Width) : width;
  for (std::size_t i = 0; i < rows; ++i) {
    A* const sum = sums + rank[i] * w;
    for (std::size_t j = 0; j < w; ++j) {
      S value;
      read(from + (i * w + j) * sizeof(S), value);
      if constexpr (Weighted) sum[j] += widen<S, A>(value) * weight;
      else sum[j] += widen<S, A>(value);
    }
  }
}

/// scatter_fixed for any width.
template <class S, class A, bool Weighted>
GRADQUORUM_TARGET void scatter_rows(const unsigned char* from, const std::uint32_t* rank, std::size_t rows,
                                    std::size_t width, A weight, A* sums) {
  switch (width) {
    case 1: scatter_fixed<S, A, Weighted, 1>(from, rank, rows, width, weight, sums); break;
    case 2: scatter_fixed<S, A, Weighted, 2>(from, rank, rows, width, weight, sums); break;
    case 4: scatter_fixed<S, A, Weighted, 4>(from, rank, rows, width, weight, sums); break;
    default: scatter_fixed<S, A, Weighted, 0>(from, rank, rows, width, weight, sums); break;
  }
}

/// sums += n elements of S, or sums = them if `first`.
template <class S, class A, bool Weighted>
GRADQUORUM_TARGET void add_run(const unsigned char* from, std::size_t count, A weight, bool first, A* sums) {
  constexpr std::size_t n = lanes<A>;
  std::size_t i = 0;
  for (; i + n <= count; i += n) {
    Wide<A> row;
    load<S, A>(from + i * sizeof(S), row);
    if constexpr (Weighted) row *= weight;
    if (!first) {
      Wide<A> sum;
      read(reinterpret_cast<const unsigned char*>(sums + i), sum);
      row = sum + row;
    }
    put(reinterpret_cast<unsigned char*>(sums + i), row);
  }
  for (; i < count; ++i) {
    S value;
    read(from + i * sizeof(S), value);
    A wide = widen<S, A>(value);
    if constexpr (Weighted) wide *= weight;
    sums[i] = first ? wide : static_cast<A>(sums[i] + wide);
  }
}

/// Divides thin rows by the number of gradients that touched them, or by one number, and writes them as D.
template <class A, class D>
GRADQUORUM_TARGET void finish_thin(const RowsTask& task, const A* sums, const std::uint32_t* sizes) {
  const std::size_t width = task.width;
  if (task.divide == Divide::by_touched && task.touched == nullptr && width == 1) {
    for (std::size_t i = 0; i < task.num_groups; ++i) {  // Fewer blocks than 2^31 touch a row.
      const D result = narrow<A, D>(static_cast<A>(sums[i] / static_cast<A>(static_cast<std::int32_t>(sizes[i]))));
      std::memcpy(task.out + i * sizeof(D), &result, sizeof(D));
    }
    return;
  }
  for (std::size_t i = 0; i < task.num_groups; ++i) {
    A divisor = static_cast<A>(1);
    if (task.divide == Divide::by_touched)
      divisor = static_cast<A>(task.touched != nullptr ? task.touched[i] : static_cast<std::int64_t>(sizes[i]));
    else if (task.divide == Divide::by_number)
      divisor = task.number > 0 ? static_cast<A>(task.number) : static_cast<A>(task.count);
    for (std::size_t j = 0; j < width; ++j) {
      const A sum = sums[i * width + j];
      const D result = narrow<A, D>(task.divide == Divide::none ? sum : static_cast<A>(sum / divisor));
      std::memcpy(task.out + (i * width + j) * sizeof(D), &result, sizeof(D));
    }
  }
}

/// Divides n sums by one number and writes them as D.
template <class A, class D>
GRADQUORUM_TARGET void finish_run(const A* sums, std::size_t count, bool divide, A divisor, unsigned char* out) {
  constexpr std::size_t n = lanes<A>;
  std::size_t i = 0;
  for (; i + n <= count; i += n) {
    Wide<A> sum;
    read(reinterpret_cast<const unsigned char*>(sums + i), sum);
    if (divide) sum /= divisor;
    store<A, D>(out + i * sizeof(D), sum, false);
  }
  for (; i < count; ++i) {
    const D result = narrow<A, D>(divide ? static_cast<A>(sums[i] / divisor) : sums[i]);
    std::memcpy(out + i * sizeof(D), &result, sizeof(D));
  }
}

/// True if no element has all bits of `exponent` (which only infinities and NaN have).
template <class U>
GRADQUORUM_TARGET bool finite_run(const unsigned char* from, std::size_t count, U exponent) {
  constexpr std::size_t n = lanes<U>;
  Wide<U> bad{};
  std::size_t i = 0;
  for (; i + n <= count; i += n) {
    Wide<U> bits;
    read(from + i * sizeof(U), bits);
    bad |= (Wide<U>)((bits & exponent) == exponent);
  }
  U any = 0;
  for (std::size_t k = 0; k < n; ++k) any = static_cast<U>(any | bad[k]);
  for (; i < count; ++i) {
    U bits;
    read(from + i * sizeof(U), bits);
    if ((bits & exponent) == exponent) any = 1;
  }
  return any == 0;
}

/// Copies around the caches; both addresses multiples of 64, the size too.
GRADQUORUM_TARGET inline void stream_copy(unsigned char* to, const unsigned char* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    Wide<std::uint64_t> part[64 / GRADQUORUM_VECTOR];
    for (std::size_t k = 0; k < 64 / GRADQUORUM_VECTOR; ++k) read(from + i + k * GRADQUORUM_VECTOR, part[k]);
    for (std::size_t k = 0; k < 64 / GRADQUORUM_VECTOR; ++k) write(to + i + k * GRADQUORUM_VECTOR, part[k], true);
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

#undef GRADQUORUM_FN

}  // namespace GRADQUORUM_ISA
}  // namespace gradquorum
