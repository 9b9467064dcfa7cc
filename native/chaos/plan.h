// What one round does, drawn from the campaign's seed.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "chaos/hooks.h"

namespace ucm::chaos {

struct Plan {
  bool cache = true;        ///< Cache|Posix, else bare Posix
  bool disk = false;        ///< on the disk of TMPDIR instead of shared memory
  bool slab = false;        ///< layout `slab` instead of `file`
  bool collect = false;     ///< a capacity that makes GC remove things
  bool full = false;        ///< a small file system: ENOSPC by bytes and by inodes
  bool file_limit = false;  ///< RLIMIT_FSIZE below the size of an object, in some workers
  bool io_faults = false;   ///< EIO, EINTR, EAGAIN, short transfers
  bool flips = false;       ///< bits of stored files and of the segment's header flip
  bool clocks = false;      ///< times of leases and temporaries jump
  bool aliens = false;      ///< another build's segment layout is met
  bool removes = false;
  bool keeper = false;  ///< worker 0 is spared, so that one segment sees the deaths of all others
  Bug bug = Bug::kNone;
  std::uint32_t workers = 3;
  std::uint64_t seed = 0;
  std::string root;   ///< directory of the storage
  std::string shm;    ///< directory of the segment
  std::string index;  ///< slab: directory of the index's segment
  [[nodiscard]] bool may_lose() const noexcept {
    return collect || removes || flips || full || slab;
  }
};

using Random = std::mt19937_64;

}  // namespace ucm::chaos
