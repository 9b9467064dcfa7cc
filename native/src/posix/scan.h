// Walking a root: how much is there, what is cold, which temporaries are orphans.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "posix/core.h"

namespace ucm::posix {

struct Candidate {
  std::int64_t atime_ns = 0;
  std::uint64_t bytes = 0;
  BlockId id;
  std::uint32_t directory = 0;  ///< index into Usage::directories
};

/// What a walk found. Only namespace directories that carry our mark are entered, only files with
/// names of our form are counted, and only objects (never temporaries) are candidates.
struct Usage {
  std::uint64_t bytes = 0;  ///< temporaries included
  std::uint64_t files = 0;
  std::uint64_t temporaries = 0;
  std::uint64_t fanouts_seen = 0;
  std::uint64_t fanouts_there = 0;
  std::vector<std::string> directories;  ///< absolute, of candidates
  std::vector<Candidate> candidates;
};

struct ScanOptions {
  double keep_share = 1.0;  ///< of each directory the coldest so many are candidates (>= 1)
  bool candidates = true;
  unsigned sample = 1;                 ///< look into every sample-th fan-out directory ...
  unsigned sample_turn = 0;            ///< ... starting here
  std::int64_t orphans_before_ns = 0;  ///< temporaries last written before are removed; 0: none
  /// ... and those written after: by a clock that was set back since.
  std::int64_t orphans_after_ns = INT64_MAX;
  std::function<bool()> stop;  ///< asked between directories
};

/// Adds what lies below `root` to `usage`. Errors are counted and recorded; what is missing or
/// vanishes meanwhile is ignored. Never opens a file, so a FIFO among them cannot hold it.
void scan_root(Core& core, const Root& root, const ScanOptions& options, Usage& usage);

}  // namespace ucm::posix
