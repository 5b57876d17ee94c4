/// Pooled, 64-byte-aligned memory with a cap and trim().
///
/// Fresh pages cost more than the arithmetic done on them, so freed buffers are kept for the next call.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace gradquorum {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool pool_keeps = false;  // Reuse would hide a use after free.
#else
inline constexpr bool pool_keeps = true;
#endif

/// Figures of the pool at one moment.
struct PoolStats {
  std::size_t kept_bytes;   ///< Bytes of free buffers waiting for reuse.
  std::size_t live_bytes;   ///< Bytes of buffers in use.
  std::size_t live_buffers; ///< Number of buffers in use.
  std::size_t cap_bytes;    ///< Most bytes kept.
};

/// Free lists by size class (four classes an octave). One per process, never destroyed, so that
/// a result that outlives everything else can still be given back.
class MemoryPool {
 public:
  /// The pool of the process.
  static MemoryPool& instance() {
    static MemoryPool* const pool = make();
    return *pool;
  }

  /// A 64-byte-aligned piece of at least `bytes`, its true size in `capacity`; or std::bad_alloc.
  void* allocate(std::size_t bytes, std::size_t& capacity) {
    fail_if_told();
    const std::size_t index = class_of(bytes, capacity);
    if (pool_keeps) {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (std::size_t i = index; i < index + search_classes && i < num_classes; ++i) {
        if (Free* const piece = free_[i]) {
          free_[i] = piece->next;
          capacity = piece->capacity;
          kept_bytes_ -= capacity;
          used_at_[i] = ++clock_;
          count_live(capacity);
          return piece;
        }
      }
    }
    void* piece = from_system(capacity);
    if (piece == nullptr && trim() > 0) piece = from_system(capacity);
    if (piece == nullptr) throw std::bad_alloc();
    const std::lock_guard<std::mutex> lock(mutex_);
    used_at_[index] = ++clock_;
    count_live(capacity);
    return piece;
  }

  /// Takes a piece back. Never fails.
  void release(void* piece, std::size_t capacity) noexcept {
    Free* dropped = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      live_bytes_ -= capacity;
      --live_buffers_;
      if (pool_keeps && capacity <= cap_bytes_) {
        std::size_t same = 0;
        const std::size_t index = class_of(capacity, same);
        free_[index] = new (piece) Free{free_[index], capacity};
        kept_bytes_ += capacity;
        if (kept_bytes_ > cap_bytes_) dropped = evict(cap_bytes_);
      } else {
        dropped = new (piece) Free{nullptr, capacity};
      }
    }
    to_system(dropped);
  }

  /// Gives the kept pieces from a size on back to the system; returns how many bytes that were.
  std::size_t trim(std::size_t from_bytes = 0) noexcept {
    Free* dropped = nullptr;
    std::size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      bytes = kept_bytes_;
      for (Free*& pieces : free_)  // Those of a class have one size.
        while (pieces != nullptr && pieces->capacity >= from_bytes) unlink(pieces, dropped);
      bytes -= kept_bytes_;
    }
    to_system(dropped);
    return bytes;
  }

  /// Gives the whole pages of a stretch of a live piece back to the system, where it can. What was in them is lost.
  static void discard([[maybe_unused]] const unsigned char* begin, [[maybe_unused]] std::size_t bytes) noexcept {
#if defined(__linux__)
    static const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uintptr_t first = (address + page - 1) / page * page;
    const std::uintptr_t last = (address + bytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#endif
  }

  /// Sets the most bytes kept, and gives back what is above it.
  void set_cap(std::size_t bytes) noexcept {
    Free* dropped = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      cap_bytes_ = bytes;
      dropped = evict(bytes);
    }
    to_system(dropped);
  }

  /// What is held now.
  PoolStats stats() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    return PoolStats{kept_bytes_, live_bytes_, live_buffers_, cap_bytes_};
  }

  /// For tests: the allocation after `count` more ones fails, once. Negative: none does.
  void fail_after(long count) noexcept { fail_after_.store(count, std::memory_order_relaxed); }

  /// For tests: counts an allocation made elsewhere towards fail_after().
  void fail_if_told() {
    if (fail_after_.load(std::memory_order_relaxed) < 0) return;
    if (fail_after_.fetch_sub(1, std::memory_order_relaxed) == 0) throw std::bad_alloc();
  }

 private:
  /// A free piece, written into the piece itself: keeping it needs no memory.
  struct Free {
    Free* next;            ///< Next free piece of the class.
    std::size_t capacity;  ///< Size of this piece.
  };

  static constexpr std::size_t num_classes = 256;   ///< Enough for 2^56 bytes.
  static constexpr std::size_t search_classes = 3;  ///< A piece up to about 1.7 times too big is taken.
  static constexpr std::size_t huge_bytes = std::size_t{1} << 22;  ///< From here on, huge pages are asked for.

  /// Makes the pool, usable in forked children whatever other threads did at the time of the fork.
  static MemoryPool* make() {
    static MemoryPool* pool = new MemoryPool();  // Reachable for ever: see the class comment.
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
#endif
    return pool;
  }

  /// Class of a size, and the size of the class's pieces.
  static std::size_t class_of(std::size_t bytes, std::size_t& capacity) {
    if (bytes > (std::size_t{1} << 56)) throw std::bad_alloc();
    if (bytes <= 256) {
      const std::size_t units = bytes <= 64 ? 1 : (bytes + 63) / 64;
      capacity = units * 64;
      return units - 1;
    }
    const unsigned log = 63u - static_cast<unsigned>(__builtin_clzll(bytes - 1));  // 8 and up
    const std::size_t step = std::size_t{1} << (log - 2);
    const std::size_t steps = (bytes + step - 1) / step;  // 5 .. 8
    capacity = steps * step;
    return 4 + (log - 8) * 4 + (steps - 5);
  }

  /// New memory, or null.
  static void* from_system(std::size_t capacity) noexcept {
#if defined(__linux__)
    if (capacity >= huge_bytes) {
      void* piece = nullptr;
      if (posix_memalign(&piece, std::size_t{1} << 21, capacity) != 0) return nullptr;
      madvise(piece, capacity, MADV_HUGEPAGE);  // Only a hint: its failure is of no matter.
      return piece;
    }
#endif
    return std::aligned_alloc(64, capacity);
  }

  /// Frees a list of pieces.
  static void to_system(Free* piece) noexcept {
    while (piece != nullptr) {
      Free* const next = piece->next;
      std::free(piece);
      piece = next;
    }
  }

  /// Unlinks pieces, least recently used classes first, until at most `keep` bytes stay. With mutex_ held.
  Free* evict(std::size_t keep) noexcept {
    Free* dropped = nullptr;
    while (kept_bytes_ > keep) {
      std::size_t oldest = num_classes;
      for (std::size_t i = 0; i < num_classes; ++i)
        if (free_[i] != nullptr && (oldest == num_classes || used_at_[i] < used_at_[oldest])) oldest = i;
      if (oldest == num_classes) break;
      while (kept_bytes_ > keep && free_[oldest] != nullptr) unlink(free_[oldest], dropped);
    }
    return dropped;
  }

  /// Moves the first piece of a class to those that are dropped. With mutex_ held.
  void unlink(Free*& pieces, Free*& dropped) noexcept {
    Free* const piece = pieces;
    pieces = piece->next;
    kept_bytes_ -= piece->capacity;
    piece->next = dropped;
    dropped = piece;
  }

  /// Counts a piece as in use. With mutex_ held.
  void count_live(std::size_t capacity) noexcept {
    live_bytes_ += capacity;
    ++live_buffers_;
  }

  std::mutex mutex_;                                 ///< Held for a few steps only.
  std::array<Free*, num_classes> free_{};            // Guarded by: mutex_
  std::array<std::uint64_t, num_classes> used_at_{}; // Guarded by: mutex_
  std::uint64_t clock_ = 0;                          // Guarded by: mutex_
  std::size_t kept_bytes_ = 0;                       // Guarded by: mutex_
  std::size_t live_bytes_ = 0;                       // Guarded by: mutex_
  std::size_t live_buffers_ = 0;                     // Guarded by: mutex_
  std::size_t cap_bytes_ = std::size_t{512} << 20;   // Guarded by: mutex_
  std::atomic<long> fail_after_{-1};                 // Atomic; tests only.
};

/// Owns one piece of the pool. Movable; empty when moved from.
class Buffer {
 public:
  Buffer() = default;

  /// At least `bytes` of uninitialised memory, or std::bad_alloc. No memory for 0 bytes.
  explicit Buffer(std::size_t bytes) : size_(bytes) {
    if (bytes != 0) data_ = MemoryPool::instance().allocate(bytes, capacity_);
  }
  /// Takes over what another owns.
  Buffer(Buffer&& other) noexcept { swap(other); }
  /// Gives back what it owns and takes over what another owns.
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  /// Gives the memory back to the pool.
  ~Buffer() {
    if (data_ != nullptr) MemoryPool::instance().release(data_, capacity_);
  }

  /// Exchanges what two buffers own.
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  /// The memory as elements of T.
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }
  unsigned char* bytes() const noexcept { return static_cast<unsigned char*>(data_); }  ///< The memory.
  std::size_t size() const noexcept { return size_; }                                  ///< Bytes asked for.

 private:
  void* data_ = nullptr;      ///< Start of the piece, or null.
  std::size_t size_ = 0;      ///< Bytes asked for.
  std::size_t capacity_ = 0;  ///< Bytes of the piece.
};

}  // namespace gradquorum
