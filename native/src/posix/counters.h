// Counters of one stage and its latest errors.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace ucm::posix {

/// X(enumerator, name): names carry their unit; `_total` only grows, the others are levels.
#define UCM_POSIX_COUNTERS(X)                    \
  X(kReads, "reads_total")                       \
  X(kReadBytes, "read_bytes_total")              \
  X(kReadMicros, "read_us_total")                \
  X(kReadMisses, "read_misses_total")            \
  X(kReadForeign, "read_foreign_total")          \
  X(kReadsPacked, "reads_packed_total")          \
  X(kReadPackedBytes, "read_packed_bytes_total") \
  X(kReadConverted, "read_converted_total")      \
  X(kConvertReads, "convert_reads_total")        \
  X(kConvertMicros, "convert_us_total")          \
  X(kReadNotRegular, "read_not_regular_total")   \
  X(kReadCorrupt, "read_corrupt_total")          \
  X(kReadErrors, "read_errors_total")            \
  X(kReadTimeouts, "read_timeouts_total")        \
  X(kReadRefused, "read_refused_total")          \
  X(kWrites, "writes_total")                     \
  X(kWriteBytes, "write_bytes_total")            \
  X(kWriteMicros, "write_us_total")              \
  X(kWriteExisting, "write_existing_total")      \
  X(kWriteReplaced, "write_replaced_total")      \
  X(kWriteErrors, "write_errors_total")          \
  X(kWriteNoSpace, "write_no_space_total")       \
  X(kWriteTimeouts, "write_timeouts_total")      \
  X(kWriteRefused, "write_refused_total")        \
  X(kWriteRestarts, "write_restarts_total")      \
  X(kLookups, "lookup_ids_total")                \
  X(kLookupHits, "lookup_hits_total")            \
  X(kLookupErrors, "lookup_errors_total")        \
  X(kLookupTimeouts, "lookup_timeouts_total")    \
  X(kFdLimitWaits, "fd_limit_waits_total")       \
  X(kHealed, "corrupt_removed_total")            \
  X(kRemoved, "removed_total")                   \
  X(kTouches, "touches_total")                   \
  X(kTouchesDropped, "touches_dropped_total")    \
  X(kGcRounds, "gc_rounds_total")                \
  X(kGcRemoved, "gc_removed_total")              \
  X(kGcRemovedBytes, "gc_removed_bytes_total")   \
  X(kGcErrors, "gc_errors_total")                \
  X(kGcUsedBytes, "gc_used_bytes")               \
  X(kGcFiles, "gc_files")                        \
  X(kGcTemporaries, "gc_temporaries")            \
  X(kGcIsCollector, "gc_is_collector")           \
  X(kOrphansRemoved, "orphans_removed_total")    \
  X(kRootsOut, "roots_out")                      \
  X(kRootOutages, "root_outages_total")          \
  X(kStuckThreads, "stuck_threads")              \
  X(kThreadsReplaced, "threads_replaced_total")  \
  X(kAbandoned, "io_abandoned_total")            \
  X(kReadsInFlight, "reads_in_flight")           \
  X(kWritesInFlight, "writes_in_flight")

enum class Counter : std::size_t {
#define X(e, n) e,
  UCM_POSIX_COUNTERS(X)
#undef X
      kCount
};

/// Thread-safe; every update is one relaxed atomic.
class Counters {
 public:
  void add(Counter c, std::uint64_t n = 1) noexcept {
    values_[static_cast<std::size_t>(c)].fetch_add(n, std::memory_order_relaxed);
  }
  void sub(Counter c, std::uint64_t n = 1) noexcept {
    values_[static_cast<std::size_t>(c)].fetch_sub(n, std::memory_order_relaxed);
  }
  void set(Counter c, std::uint64_t n) noexcept {
    values_[static_cast<std::size_t>(c)].store(n, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t get(Counter c) const noexcept {
    return values_[static_cast<std::size_t>(c)].load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::map<std::string, std::uint64_t> snapshot() const;

 private:
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Counter::kCount)> values_{};
};

/// The latest distinct errors (operation, path, errno), each with how often it came. Bounded; a
/// flood of one error costs one entry. Thread-safe; only touched when something failed.
class ErrorRing {
 public:
  static constexpr std::size_t kCapacity = 32;

  void add(std::string_view operation, std::string_view path, int error,
           std::string_view remark = {}) noexcept;
  [[nodiscard]] std::vector<std::string> lines() const;
  [[nodiscard]] std::string latest() const;

 private:
  struct Entry {
    std::string operation;
    std::string path;
    int error = 0;
    std::string remark;
    std::uint64_t count = 0;
    std::chrono::system_clock::time_point last;
  };
  static std::string line(const Entry& entry);

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // oldest first
};

/// "ENOSPC (No space left on device)".
[[nodiscard]] std::string errno_text(int error);

}  // namespace ucm::posix
