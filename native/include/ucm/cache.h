// The shared host cache: a host tier whose slots live in one memory segment for all processes of a
// node that use the same namespace, so that what one rank loaded the others find.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ucm/geometry.h"
#include "ucm/host_tier.h"

namespace ucm {

enum class CacheErrorKind : std::uint8_t {
  kTooSmall,  ///< not enough memory for what was asked; a default configuration may do without
  kMismatch,  ///< a live segment of another version, size or geometry
  kSystem,    ///< the operating system refused something
};

/// Set-up failed. The message names what, where, the values and what to do.
class CacheError : public std::runtime_error {
 public:
  CacheError(CacheErrorKind kind, const std::string& what)
      : std::runtime_error(what), kind_(kind) {}
  [[nodiscard]] CacheErrorKind kind() const noexcept { return kind_; }

 private:
  CacheErrorKind kind_;
};

struct CacheOptions {
  std::string name;  ///< of the namespace; [A-Za-z0-9._-]
  std::array<std::uint8_t, 32> namespace_digest{};
  /// Data bytes of the whole segment (all geometries). 0: chosen from the machine.
  std::uint64_t capacity_bytes = 0;
  /// The operator asked for this capacity: a live segment of another one is refused. Otherwise it is
  /// joined as it is.
  bool capacity_explicit = false;
  bool shared = true;  ///< false: a segment of this process alone, gone with it
  /// Buffers (of one shard each) that only loads may take; rounded up to whole objects.
  std::uint32_t load_reserve = 1024;
  bool load_reserve_explicit = false;  ///< false: cut down to a quarter of a small cache
  std::uint32_t rank = 0;
  std::uint32_t rank_size = 0;  ///< as configured; 0: not told. Only compared with who attaches
  bool watcher = false;         ///< maps the control part alone: lookup and touch, no memory
  bool backend_only = false;    ///< diagnosis: loads fetch again what nobody holds
  std::string directory = "/dev/shm";
  /// How long memory that a killed process was reading into stays closed to other objects: the
  /// kernel may still finish its I/O.
  std::chrono::seconds quarantine{60};
  std::uint32_t touch_threads = 0;  ///< for the first touch of the pages; 0: by number of CPUs
};

/// Attach to (or create) the segment and the class of this geometry. Throws CacheError. Several
/// tiers of one process share one mapping. A watcher whose segment does not exist yet finds nothing
/// and looks again later.
[[nodiscard]] std::shared_ptr<HostTier> open_cache(Geometry geometry, CacheOptions options);

/// Data bytes that open_cache would choose for capacity_bytes = 0: a quarter of what is available
/// (memory and cgroup limit), at most half of the free space of `directory`.
[[nodiscard]] std::uint64_t default_cache_bytes(const std::string& directory, bool shared);

/// Remove segments in `directory` whose processes are all gone. Never touches a live one. Returns the
/// names removed.
std::vector<std::string> reclaim_dead_caches(const std::string& directory);

/// The order in which rank r of `ranks` walks n shards: slices (r + k) mod ranks for k = 0.., each
/// s, s + ranks, ... < n. `out` has n entries.
void rotate_order(std::uint32_t n, Rotation rotation, std::uint32_t* out) noexcept;

}  // namespace ucm
