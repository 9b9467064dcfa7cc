// What all processes of a campaign share and what outlives any of them: counts, findings, and what the
// checker has to know about each key. Anonymous shared memory, made before the first fork.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

namespace ucm::chaos {

inline constexpr std::uint32_t kKeys = 96;    // per shape
inline constexpr std::uint32_t kShapes = 2;   // geometries that share a segment
inline constexpr std::uint32_t kWorkers = 4;  // at most, at one time
inline constexpr std::uint32_t kFindings = 32;

enum class Mode : std::uint32_t {
  kWork,     ///< operations, deaths
  kDrain,    ///< end what runs; all but the inspector leave in an orderly way
  kInspect,  ///< the inspector looks at what is left, then leaves
};

enum class Count : std::uint8_t {
  kDumps,
  kLoads,
  kLookups,
  kDiscards,
  kRemoves,
  kCollections,
  kAttaches,
  kRefusedAttaches,
  kRowsLoaded,
  kRowsMissed,
  kRowsCorrupt,
  kRowsFailed,
  kDumpsFailed,
  kFaults,
  kFlips,
  kClockJumps,
  kTakeovers,
  kRecovered,
  kFilesChecked,
  kBlocksInspected,
  kTemporariesLeft,
  kCount,
};

/// One key's history within a round.
struct KeyState {
  std::atomic<std::uint8_t> stored;   ///< a dump of it was told durable
  std::atomic<std::uint8_t> damaged;  ///< the campaign flipped a bit in its file
};

struct WorkerState {
  std::atomic<std::int64_t> busy_since_ns;  ///< of the running operation; 0: none
  std::atomic<std::uint32_t> operation;
  std::atomic<std::uint32_t> ready;  ///< it has a store open
};

struct Board {
  std::atomic<std::uint32_t> mode;
  std::atomic<std::uint32_t> calm;       ///< nobody dies by a point
  std::atomic<std::uint32_t> inspected;  ///< the round's inspector has opened a store
  std::atomic<std::uint32_t> clean;  ///< the inspector has seen that nothing of the dead is left
  std::atomic<std::uint32_t> findings;
  std::atomic<std::uint64_t> longest_ns;
  std::atomic<std::uint64_t> count[static_cast<std::size_t>(Count::kCount)];
  KeyState key[kShapes][kKeys];
  WorkerState worker[kWorkers];
  char finding[kFindings][256];

  void add(Count what, std::uint64_t n = 1) noexcept { count[static_cast<int>(what)].fetch_add(n); }
  [[nodiscard]] std::uint64_t get(Count what) const noexcept {
    return count[static_cast<int>(what)].load();
  }
  /// Something that must never happen did. The first ones are kept with their words.
  void report(const std::string& text) noexcept {
    const std::uint32_t n = findings.fetch_add(1);
    if (n < kFindings) std::snprintf(finding[n], sizeof finding[n], "%s", text.c_str());
  }
};

}  // namespace ucm::chaos
