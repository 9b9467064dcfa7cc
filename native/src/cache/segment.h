// One mapping of one shared segment in this process: creation, attaching, liveness, locks.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "cache/file_lock.h"
#include "cache/layout.h"
#include "cache/sizing.h"
#include "ucm/cache.h"

namespace ucm::cache {

class Watch;

/// Thread-safe. All tiers of a process that name the same segment share one object.
class Segment {
 public:
  /// Attach to the segment of `options.name`, or create it. A dead predecessor is removed first.
  /// Null for a watcher when there is none. Throws CacheError.
  static std::shared_ptr<Segment> open(const CacheOptions& options, const Geometry& geometry);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// Index of the class of this geometry, added if need be. Throws CacheError.
  std::uint32_t join_class(const Geometry& geometry);

  [[nodiscard]] Header& header() const noexcept { return *header_; }
  [[nodiscard]] GeometryClass& geometry_class(std::uint32_t c) const noexcept {
    return header_->geometry[c];
  }
  [[nodiscard]] Bucket& bucket(const BlockId& id) const noexcept {
    return buckets_[bucket_index(id.word())];
  }
  [[nodiscard]] std::uint64_t bucket_index(std::uint64_t word) const noexcept {
    return word & bucket_mask_;
  }
  [[nodiscard]] Bucket& bucket_at(std::uint32_t i) const noexcept { return buckets_[i]; }
  /// Class + 1 that has the extent; 0: free.
  [[nodiscard]] Shared<std::uint32_t>& extent_owner(std::uint32_t extent) const noexcept {
    return extent_owner_[extent];
  }
  [[nodiscard]] Shared<std::uint32_t>& class_extent(std::uint32_t c,
                                                    std::uint32_t i) const noexcept {
    return class_extent_[std::uint64_t{c} * header_->extents + i];
  }
  [[nodiscard]] std::byte* control(std::uint32_t extent) const noexcept {
    return controls_ + std::uint64_t{extent} * extent_control_bytes_;
  }
  [[nodiscard]] std::uint32_t extent_of(std::uint32_t slot) const noexcept {
    return static_cast<std::uint32_t>((static_cast<Wide>(stride_inverse_) * slot) >> 64);
  }
  [[nodiscard]] std::uint32_t index_of(std::uint32_t slot) const noexcept {
    return slot - extent_of(slot) * slot_stride_;
  }
  [[nodiscard]] SlotMeta& meta(std::uint32_t slot) const noexcept {
    return reinterpret_cast<SlotMeta*>(control(extent_of(slot)))[index_of(slot)];
  }
  [[nodiscard]] std::uint32_t slot_limit() const noexcept {
    return header_->extents * header_->slot_stride;
  }
  /// Start of the data of an extent; null in a watcher.
  [[nodiscard]] std::byte* extent_data(std::uint32_t extent) const noexcept {
    return data_ == nullptr ? nullptr : data_ + std::uint64_t{extent} * header_->extent_bytes;
  }

  /// All extents; empty in a watcher.
  [[nodiscard]] std::span<std::byte> data() const noexcept {
    if (data_ == nullptr) return {};
    return {data_, header_->segment_bytes - header_->data_offset};
  }

  [[nodiscard]] std::uint32_t self() const noexcept { return self_; }
  [[nodiscard]] ProcessRecord& record(std::uint32_t p) const noexcept {
    return header_->process[p];
  }
  [[nodiscard]] std::uint64_t self_bit() const noexcept { return std::uint64_t{1} << self_; }
  [[nodiscard]] bool worker() const noexcept { return data_ != nullptr; }
  [[nodiscard]] bool retired() const noexcept;
  /// False once the process of that record is dead (or the record is not in use).
  [[nodiscard]] bool alive(std::uint32_t process) const noexcept;

  /// Owner locks: a word that holds process index + 1 (and a bit for waiters). Bounded: false when a
  /// living process (stopped, starved) keeps it for longer than kLockPatience. Held for microseconds,
  /// never across I/O, copies or callbacks. Order: extents, then one class, then one bucket.
  [[nodiscard]] bool lock(Shared<std::uint32_t>& word) noexcept;
  [[nodiscard]] bool try_lock(Shared<std::uint32_t>& word) noexcept;
  void unlock(Shared<std::uint32_t>& word) noexcept;
  /// Free every lock word that a dead process holds. Its slots are left to recover().
  void break_locks(std::uint32_t dead) noexcept;

  /// Bump the version of every process in `mask` and wake it.
  void wake(std::uint64_t mask) noexcept;

  /// Claims the exclusive right to clean up after a dead process; false when it lives, or somebody
  /// else does it. end_recovery() gives the record free, abandon_recovery() leaves it for later.
  [[nodiscard]] bool begin_recovery(std::uint32_t process) noexcept;
  void end_recovery(std::uint32_t process) noexcept;
  void abandon_recovery(std::uint32_t process) noexcept;

  [[nodiscard]] Watch& watch() noexcept { return *watch_; }

  /// Pins of this process per slot. Guarded by the slot's stripe (watch.h).
  [[nodiscard]] std::uint32_t& local_pins(std::uint32_t slot) const noexcept {
    return local_pins_[slot];
  }
  /// Sum of local pins; a segment with pins is never unmapped.
  std::atomic<std::int64_t> pinned{0};

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool created() const noexcept { return created_; }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  __extension__ using Wide = unsigned __int128;

  Segment(std::string path, int fd, bool shared);

  static std::shared_ptr<Segment> attach(const CacheOptions& options, const Geometry& geometry);
  void create(const CacheOptions& options, const Geometry& geometry);
  void check(const CacheOptions& options) const;
  void map_control(std::uint64_t bytes);
  void map_data(const CacheOptions& options);
  void add_data(const CacheOptions& options);
  void take_record(const CacheOptions& options);
  [[nodiscard]] bool other_workers() const noexcept;
  void retire() noexcept;
  void leave() noexcept;

  const std::string path_;
  const int fd_;
  const bool shared_;
  const pid_t pid_;
  FileLocks locks_;
  bool attach_locked_ = false;
  bool created_ = false;
  Header* header_ = nullptr;
  std::uint64_t control_bytes_ = 0;
  Shared<std::uint32_t>* extent_owner_ = nullptr;
  Shared<std::uint32_t>* class_extent_ = nullptr;
  Bucket* buckets_ = nullptr;
  // Of the header, where they never change once the segment lives; a division is the slowest of a lookup.
  std::uint64_t bucket_mask_ = 0;
  std::uint64_t extent_control_bytes_ = 0;
  std::uint64_t stride_inverse_ = 0;  ///< 2^64 / slot_stride, rounded up: exact for 32 bits
  std::uint32_t slot_stride_ = 0;
  std::byte* controls_ = nullptr;
  std::byte* data_ = nullptr;
  std::uint32_t self_ = kNone;
  std::uint32_t* local_pins_ = nullptr;
  std::uint64_t local_pins_bytes_ = 0;
  std::mutex recovery_mu_;
  std::unique_ptr<Watch> watch_;
  bool registered_ = false;
};

/// Holds an owner lock for a scope.
class [[nodiscard]] OwnerLock {
 public:
  OwnerLock(Segment& segment, Shared<std::uint32_t>& word) noexcept
      : segment_(segment), word_(word), held_(segment.lock(word)) {}
  ~OwnerLock() { release(); }
  OwnerLock(const OwnerLock&) = delete;
  OwnerLock& operator=(const OwnerLock&) = delete;
  explicit operator bool() const noexcept { return held_; }
  void release() noexcept {
    if (held_) segment_.unlock(word_);
    held_ = false;
  }

 private:
  Segment& segment_;
  Shared<std::uint32_t>& word_;
  bool held_;
};

}  // namespace ucm::cache
