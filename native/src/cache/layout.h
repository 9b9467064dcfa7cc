// The bytes of the shared cache segment. Everything here is read by other processes, possibly of
// another build: fixed-width fields only, offsets asserted, and kLayoutVersion changes with any of it.
//
//   header page(s)   Header: magic, version, sizes, process records, geometry classes
//   extent tables    u32 owner[extents], then u32 list[kMaxClasses][extents]
//   buckets          Bucket[buckets]
//   extent controls  extents x control_bytes: per slot SlotMeta, access byte, shard row
//   data             extents x extent_bytes, page aligned
//
// Everything before `data_offset` is the control part, all that a watcher maps.
//
// Crash rule: a process may be killed between any two instructions. Chains and lists are changed by
// single stores that leave them whole; what takes several stores is marked in the slot (phase,
// owner) so that recovery (recover.cc) can finish or undo it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ucm/block_id.h"

namespace ucm::cache {

inline constexpr char kMagic[8] = {'U', 'C', 'M', 'C', 'A', 'C', 'H', 'E'};
inline constexpr std::uint32_t kLayoutVersion = 1;
inline constexpr std::uint32_t kMaxProcesses = 64;  // one bit each in SlotMeta::pins
inline constexpr std::uint32_t kMaxClasses = 16;
inline constexpr std::uint32_t kNone = 0xffff'ffffU;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kPage = 4096;

/// Where the record locks of file_lock.h sit: beyond any file size, equal in every layout version,
/// so that a process of any version can tell whether a segment is alive.
inline constexpr std::int64_t kLockBase = std::int64_t{1} << 40;

template <typename T>
using Shared = std::atomic<T>;
static_assert(Shared<std::uint8_t>::is_always_lock_free);
static_assert(Shared<std::uint32_t>::is_always_lock_free);
static_assert(Shared<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(Shared<std::uint8_t>) == 1 && sizeof(Shared<std::uint32_t>) == 4 &&
              sizeof(Shared<std::uint64_t>) == 8);

enum class SegmentState : std::uint32_t {
  kBuilding = 0,  ///< a creator holds the attach lock, or died with it
  kLive = 1,
  kRetired = 2,  ///< unlinked: nobody attaches any more, watchers look for the successor
};

enum class ShardState : std::uint32_t { kEmpty = 0, kLoading = 1, kReady = 2, kFailed = 3 };

enum class Phase : std::uint32_t {
  kFree = 0,     ///< not in a chain, nobody's
  kTaken = 1,    ///< `owner` is moving it in or out of a chain; it may be in one or not
  kDumping = 2,  ///< in a chain; `owner` fills it, nobody else reads the shards that it fills
  kObject = 3,   ///< in a chain; readable per shard
  kGarbage = 4,  ///< in a chain; matches nothing, taken by the next allocation that meets it
};

/// One attached process. Its owner holds the record lock of the same index for as long as it lives:
/// the kernel gives the lock back when it dies, however it dies, after its memory is gone.
struct alignas(kCacheLine) ProcessRecord {
  Shared<std::uint32_t> used;
  Shared<std::uint32_t> version;  ///< futex: bumped when something this process waits for happened
  Shared<std::uint32_t> worker;   ///< 1: maps the data; 0: a watcher
  std::uint32_t pid;              ///< in its own pid namespace: for people, not for decisions
  std::uint64_t start_time;       ///< field 22 of /proc/<pid>/stat
  std::uint32_t rank;
  std::uint32_t rank_size;
  std::uint8_t reserved[32];
};
static_assert(sizeof(ProcessRecord) == 64);

/// Objects of one shape. Classes are only ever added.
struct alignas(kCacheLine) GeometryClass {
  Shared<std::uint32_t> used;
  std::uint32_t shard_count;
  std::uint64_t shard_bytes;
  std::uint64_t slot_bytes;
  std::uint32_t slots_per_extent;
  std::uint32_t reserved0;
  std::uint8_t layout_digest[32];  ///< SHA-256 of the layout descriptor
  // Second line: changes all the time.
  alignas(kCacheLine) Shared<std::uint32_t> lock;  ///< owner lock: cursor, list
  Shared<std::uint32_t> extents;                   ///< length of the class's extent list
  Shared<std::uint32_t> cursor;                    ///< CLOCK hand, slots
  Shared<std::uint32_t> reserved1;
  Shared<std::uint64_t> room_wanted;  ///< processes that were refused room
  Shared<std::uint64_t> hits;         ///< claims and touches that found their object
  Shared<std::uint64_t> evictions;
  Shared<std::uint64_t> hits_seen;  ///< `hits` when extents were last balanced
  std::uint8_t reserved2[16];
};
static_assert(sizeof(GeometryClass) == 128);

struct Bucket {
  Shared<std::uint32_t> lock;  ///< owner lock
  Shared<std::uint32_t> head;  ///< slot, or kNone
};
static_assert(sizeof(Bucket) == 8);

/// One line per slot, beside nothing that changes at the pace of shard states.
struct alignas(kCacheLine) SlotMeta {
  BlockId id;                        ///< written only while kTaken and in no chain
  Shared<std::uint64_t> pins;        ///< bit p: process p holds at least one pin
  Shared<std::uint32_t> next;        ///< chain
  Shared<std::uint32_t> phase;       ///< Phase
  Shared<std::uint32_t> owner;       ///< process index of kTaken / kDumping
  Shared<std::uint32_t> quarantine;  ///< monotonic second before which other ids may not move in
  std::uint8_t reserved[24];
};
static_assert(sizeof(SlotMeta) == 64);

/// An id as two words, read and written piece by piece: a reader without the lock may see half of each
/// of two ids, which is neither.
struct IdWords {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  friend bool operator==(const IdWords&, const IdWords&) = default;
};
using IdWord __attribute__((may_alias)) = std::uint64_t;

[[nodiscard]] inline IdWords words_of(const BlockId& id) noexcept {
  IdWords words;
  std::memcpy(&words, id.bytes.data(), sizeof words);
  return words;
}
/// Of a slot: its ids lie at multiples of a cache line.
[[nodiscard]] inline IdWords load_id(const BlockId& shared) noexcept {
  const auto* const at = reinterpret_cast<const IdWord*>(&shared);
  return {__atomic_load_n(at, __ATOMIC_ACQUIRE), __atomic_load_n(at + 1, __ATOMIC_ACQUIRE)};
}
inline void store_id(BlockId& shared, const BlockId& id) noexcept {
  const IdWords words = words_of(id);
  auto* const at = reinterpret_cast<IdWord*>(&shared);
  __atomic_store_n(at, words.first, __ATOMIC_RELAXED);
  __atomic_store_n(at + 1, words.second, __ATOMIC_RELAXED);
}

struct ShardCell {
  Shared<std::uint32_t> state;  ///< ShardState; error is written before it
  Shared<std::uint32_t>
      owner;  ///< while kLoading: process index + 1; 0: orphan, anyone may take it
  Shared<std::uint32_t> status;  ///< ucm::Status of a failure
  Shared<std::int32_t> error;    ///< its errno
};
static_assert(sizeof(ShardCell) == 16);

/// States of a slot's shards, on lines of their own.
struct ShardRow {
  Shared<std::uint32_t> ready;  ///< shards that are kReady
  Shared<std::uint32_t> reserved;
  Shared<std::uint64_t> waiters;  ///< processes to wake when a shard changes
  // ShardCell[shard_count] follows
  [[nodiscard]] ShardCell* cells() noexcept { return reinterpret_cast<ShardCell*>(this + 1); }
};
static_assert(sizeof(ShardRow) == 16);

struct Header {
  char magic[8];
  std::uint32_t layout_version;
  Shared<std::uint32_t> state;  ///< SegmentState, written last
  // Line 0, second half: sizes; fixed when the segment is made.
  std::uint64_t segment_bytes;
  std::uint64_t data_offset;
  std::uint64_t extent_bytes;
  std::uint32_t extents;
  std::uint32_t control_bytes;  ///< per extent
  std::uint64_t controls_offset;
  std::uint32_t buckets;  ///< a power of two
  std::uint32_t max_processes;
  std::uint32_t max_classes;
  std::uint32_t slot_stride;  ///< slot number = extent * slot_stride + index
  std::uint8_t boot_id[16];
  std::uint64_t capacity_bytes;  ///< what the creator was configured with, before rounding
  std::uint64_t creator_start_time;
  std::uint32_t creator_pid;
  std::uint32_t reserved0;
  std::uint8_t namespace_digest[32];
  alignas(
      kCacheLine) Shared<std::uint32_t> extent_lock;  ///< owner lock: extent owners; before class
  Shared<std::uint32_t> extents_free;                 ///< under extent_lock; read by anyone
  Shared<std::uint32_t> takeovers;                    ///< shards taken over from dead owners
  Shared<std::uint32_t> recovered;                    ///< dead processes cleaned up after
  ProcessRecord process[kMaxProcesses];
  GeometryClass geometry[kMaxClasses];
};
static_assert(offsetof(Header, layout_version) == 8);
static_assert(offsetof(Header, state) == 12);
static_assert(offsetof(Header, segment_bytes) == 16);
static_assert(offsetof(Header, extent_lock) == 192);
static_assert(offsetof(Header, process) == 256);
static_assert(offsetof(Header, geometry) == 256 + 64 * 64);
static_assert(sizeof(Header) == 256 + 64 * 64 + 16 * 128);

/// Bytes of control per slot of a class with that many shards (access byte included).
[[nodiscard]] constexpr std::uint64_t shard_row_bytes(std::uint32_t shards) noexcept {
  return (sizeof(ShardRow) + std::uint64_t{shards} * sizeof(ShardCell) + kCacheLine - 1) /
         kCacheLine * kCacheLine;
}
[[nodiscard]] constexpr std::uint64_t control_per_slot(std::uint32_t shards) noexcept {
  return sizeof(SlotMeta) + 1 + shard_row_bytes(shards);
}

}  // namespace ucm::cache
