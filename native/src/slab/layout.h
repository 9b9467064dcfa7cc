// The bytes of the shared index of a slab directory. Read by all processes of the node, possibly of
// another build: fixed-width fields only, and kSegmentVersion changes with any of it.
//
//   Header             sizes, process records, geometry classes, roots
//   ExtentRecord[]     one per slab file
//   Group[]            extents x group_stride: slots whose heads share a page of the file
//   Bucket[]           a power of two
//   SlotMeta[]         extents x slot_stride
//
// It holds nothing that the files do not hold: when no process is left it is thrown away, and the next
// one scans the files.
//
// Crash rule: a process may be killed between any two instructions. A chain is changed by single
// stores that leave it whole. What a process is about to change it owns first (Group::owner,
// ExtentRecord::state), so that recovery (recover.cc) knows what to look at.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "slab/format.h"
#include "ucm/block_id.h"

namespace ucm::slab {

inline constexpr char kSegmentMagic[8] = {'U', 'C', 'M', 'S', 'L', 'I', 'D', 'X'};
inline constexpr std::uint32_t kSegmentVersion = 1;
inline constexpr std::uint32_t kMaxProcesses = 64;  // one bit each in SlotMeta::pins
inline constexpr std::uint32_t kMaxClasses = 16;
inline constexpr std::uint32_t kMaxRoots = 16;
inline constexpr std::uint32_t kMaxLayoutText = 2048;
inline constexpr std::uint32_t kNone = 0xffff'ffffU;
inline constexpr std::size_t kCacheLine = 64;

template <typename T>
using Shared = std::atomic<T>;
static_assert(Shared<std::uint8_t>::is_always_lock_free &&
              Shared<std::uint32_t>::is_always_lock_free &&
              Shared<std::uint64_t>::is_always_lock_free);

enum class SegmentState : std::uint32_t {
  kBuilding = 0,  ///< a creator holds the attach lock, or died with it
  kLive = 1,
};

/// Its owner holds the record lock of the same index (cache/file_lock.h) for as long as it lives.
struct alignas(kCacheLine) ProcessRecord {
  Shared<std::uint32_t> used;
  std::uint32_t pid;         ///< in its own pid namespace: for people, not for decisions
  std::uint64_t start_time;  ///< field 22 of /proc/<pid>/stat
};
static_assert(sizeof(ProcessRecord) == 64);

/// Objects of one shape and layout. Classes are only ever added; everything but the counters is
/// written before `used`.
struct alignas(kCacheLine) ClassRecord {
  Shared<std::uint32_t> used;
  std::uint32_t shard_count;
  std::uint64_t shard_bytes;
  std::uint64_t layout_hash;
  SlabShape shape;
  Shared<std::uint64_t> evictions;
  std::uint32_t layout_bytes;
  char layout[kMaxLayoutText];  ///< a longer text: only its hash is known, nobody converts from it
};

enum class ExtentState : std::uint32_t {
  kFree = 0,
  kFormatting = 1,  ///< `who` is writing the file's head
  kClass = 2,       ///< `who` is the class
  kBroken = 3,      ///< its file cannot be used
};

/// One slab file. `state` holds ExtentState in its high half and `who` in its low half.
struct ExtentRecord {
  Shared<std::uint32_t> state;
  std::uint32_t root;
  Shared<std::uint64_t> epoch;
};
static_assert(sizeof(ExtentRecord) == 16);
[[nodiscard]] constexpr std::uint32_t extent_state(ExtentState s, std::uint32_t who) noexcept {
  return static_cast<std::uint32_t>(s) << 16 | who;
}

/// Slots whose heads share a page. Only the owner takes slots of it, and writes the page.
struct Group {
  Shared<std::uint32_t> owner;         ///< process index + 1; 0: nobody
  Shared<std::uint32_t> dirty;         ///< the page on the medium differs from the slots
  Shared<std::uint32_t> closed_until;  ///< monotonic second; a dead process may still be writing
  Shared<std::uint32_t> free;          ///< about how many slots are free
};
static_assert(sizeof(Group) == 16);

struct Bucket {
  Shared<std::uint32_t> lock;  ///< owner word
  Shared<std::uint32_t> head;  ///< slot, or kNone
  Shared<std::uint32_t>
      changes;  ///< bumped before a slot leaves the chain: readers without lock retry
  /// Slot + 1 that the lock's holder is taking out of the chain. When the holder dies, the next one
  /// finishes that (BucketLock).
  Shared<std::uint32_t> leaving;
};
static_assert(sizeof(Bucket) == 16);

enum class Phase : std::uint32_t {
  kFree = 0,
  kWriting = 1,  ///< the group's owner fills it; in no chain, or just being put into one
  kObject = 2,   ///< in a chain
  kDoomed = 3,   ///< in no chain; free once nobody reads it any more
};

struct alignas(kCacheLine) SlotMeta {
  Shared<std::uint64_t> id[2];  ///< changes only while in no chain
  Shared<std::uint64_t> pins;   ///< bit p: process p reads it
  Shared<std::uint64_t> generation;
  Shared<std::uint64_t> object_check;
  Shared<std::uint32_t> next;
  Shared<std::uint32_t> phase;
  Shared<std::uint8_t> access;  ///< CLOCK: used since the hand passed
  std::uint8_t reserved[15];
};
static_assert(sizeof(SlotMeta) == 64);

struct RootRecord {
  BlockId id;
  std::uint32_t first;  ///< extent
  std::uint32_t extents;
};

struct Header {
  char magic[8];
  std::uint32_t version;
  Shared<std::uint32_t> state;  ///< SegmentState, written last
  std::uint64_t segment_bytes;
  std::uint64_t slab_bytes;
  std::uint64_t capacity_bytes;  ///< as configured
  std::uint32_t extents;
  std::uint32_t slot_stride;   ///< slot number = extent * slot_stride + index
  std::uint32_t group_stride;  ///< likewise
  std::uint32_t buckets;       ///< a power of two
  std::uint32_t roots;
  std::uint32_t creator_pid;
  std::uint64_t creator_start_time;
  std::uint8_t boot_id[16];
  std::uint8_t namespace_digest[32];
  alignas(kCacheLine) Shared<std::uint64_t> generation;  ///< the last one given out
  Shared<std::uint32_t> recovered;                       ///< dead processes cleaned up after
  Shared<std::uint32_t> scanned_corrupt;  ///< slot heads that were damaged at the scan
  RootRecord root[kMaxRoots];
  ProcessRecord process[kMaxProcesses];
  ClassRecord geometry[kMaxClasses];
  /// CLOCK hands, one per class and root: extent (of the root) and group, 32 bits each.
  Shared<std::uint64_t> hand[kMaxClasses][kMaxRoots];
};

[[nodiscard]] inline Phase phase_of(const SlotMeta& m) noexcept {
  return static_cast<Phase>(m.phase.load(std::memory_order_acquire));
}
inline void set_phase(SlotMeta& m, Phase p) noexcept {
  m.phase.store(static_cast<std::uint32_t>(p), std::memory_order_release);
}
[[nodiscard]] inline bool has_id(const SlotMeta& m, const std::uint64_t (&words)[2]) noexcept {
  return m.id[0].load(std::memory_order_relaxed) == words[0] &&
         m.id[1].load(std::memory_order_relaxed) == words[1];
}
inline void split(const BlockId& id, std::uint64_t (&words)[2]) noexcept {
  std::memcpy(words, id.bytes.data(), sizeof words);
}
[[nodiscard]] inline BlockId id_of(const SlotMeta& m) noexcept {
  const std::uint64_t words[2] = {m.id[0].load(std::memory_order_relaxed),
                                  m.id[1].load(std::memory_order_relaxed)};
  BlockId id;
  std::memcpy(id.bytes.data(), words, sizeof words);
  return id;
}

}  // namespace ucm::slab
