// Which segments this process has open, so that no second descriptor of one file is ever opened (and
// closed: that would drop all record locks), and the names of segment files.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "ucm/cache.h"
#include "ucm/geometry.h"

namespace ucm::cache {

class Segment;

class Registry {
 public:
  using Mutex = std::recursive_mutex;
  static Mutex& mutex() noexcept;
  // All of the following with the mutex held.
  /// The open, usable segment of that path. Waits for one that is being destroyed by another thread;
  /// throws CacheError when one was left behind with I/O in flight.
  static std::shared_ptr<Segment> find(const std::string& path, std::unique_lock<Mutex>& lock);
  static void add(const std::string& path, const std::shared_ptr<Segment>& segment);
  static void remove(const std::string& path);
  /// True when an object of this process, even one being destroyed, has the file open.
  static bool has(const std::string& path);
};

/// <directory>/ucm-cache-<uid>-<name>
[[nodiscard]] std::string segment_path(const CacheOptions& options);

/// Objects of the reserve: cache_load_exclusive_buffer_number counts shards, slots hold objects.
[[nodiscard]] std::uint32_t reserve_slots(const CacheOptions& options, const Geometry& geometry,
                                          std::uint64_t total_slots) noexcept;
/// Least bytes for the configured shards and reserve: the reserve, and two objects beside it.
[[nodiscard]] std::uint64_t minimum_cache_bytes(const CacheOptions& options,
                                                const Geometry& geometry) noexcept;

}  // namespace ucm::cache
