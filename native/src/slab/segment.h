// The shared index of one slab directory set in this process: attaching, liveness, locks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache/file_lock.h"
#include "posix/core.h"
#include "slab/files.h"
#include "slab/layout.h"
#include "slab/lease.h"

namespace ucm::slab {

struct LeftBehind;

/// Thread-safe. All stages of a process over the same directories and namespace share one object, for
/// they share its record locks.
class Segment {
 public:
  /// Attach, or create the index by scanning the files when no living process has it. `core` has the
  /// roots, sorted by identity. Throws PosixSetupError.
  static std::shared_ptr<Segment> open(posix::Core& core);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  /// Index of the class of this geometry, added if need be. Throws PosixSetupError.
  std::uint32_t join_class(const posix::Format& format);

  [[nodiscard]] Header& header() const noexcept { return *header_; }
  [[nodiscard]] ClassRecord& geometry(std::uint32_t c) const noexcept {
    return header_->geometry[c];
  }
  [[nodiscard]] ExtentRecord& extent(std::uint32_t e) const noexcept { return extents_[e]; }
  [[nodiscard]] Group& group(std::uint32_t g) const noexcept { return groups_[g]; }
  [[nodiscard]] SlotMeta& meta(std::uint32_t slot) const noexcept { return metas_[slot]; }
  [[nodiscard]] Bucket& bucket(const BlockId& id) const noexcept {
    return buckets_[id.word() & mask_];
  }
  [[nodiscard]] Bucket* buckets() const noexcept { return buckets_; }
  [[nodiscard]] std::uint32_t slot_limit() const noexcept {
    return header_->extents * header_->slot_stride;
  }

  [[nodiscard]] std::uint32_t extent_of(std::uint32_t slot) const noexcept {
    return slot / header_->slot_stride;
  }
  [[nodiscard]] std::uint32_t extent_of_group(std::uint32_t group) const noexcept {
    return group / header_->group_stride;
  }
  [[nodiscard]] std::uint32_t index_of(std::uint32_t slot) const noexcept {
    return slot % header_->slot_stride;
  }
  /// Class of an extent, or kNone while it has none.
  [[nodiscard]] std::uint32_t class_of_extent(std::uint32_t extent) const noexcept {
    const std::uint32_t s = extents_[extent].state.load(std::memory_order_acquire);
    return s >> 16 == static_cast<std::uint32_t>(ExtentState::kClass) ? s & 0xffffU : kNone;
  }
  [[nodiscard]] std::uint32_t group_of(std::uint32_t slot, const SlabShape& shape) const noexcept {
    return extent_of(slot) * header_->group_stride + index_of(slot) / shape.group_slots;
  }
  /// First slot of a group of a class.
  [[nodiscard]] std::uint32_t first_slot(std::uint32_t group,
                                         const SlabShape& shape) const noexcept {
    return extent_of_group(group) * header_->slot_stride +
           group % header_->group_stride * shape.group_slots;
  }
  [[nodiscard]] std::uint32_t root_of(std::uint32_t extent) const noexcept {
    return extents_[extent].root;
  }
  /// Number of the extent's file within its root.
  [[nodiscard]] std::uint32_t number_of(std::uint32_t extent) const noexcept {
    return extent - header_->root[extents_[extent].root].first;
  }
  [[nodiscard]] Files& files() const noexcept { return *files_; }
  [[nodiscard]] Lease& lease(std::uint32_t root) const noexcept { return *leases_[root]; }

  [[nodiscard]] std::uint32_t self() const noexcept { return self_; }
  [[nodiscard]] std::uint64_t self_bit() const noexcept { return std::uint64_t{1} << self_; }
  /// False once the process of that record is dead (or the record is not in use).
  [[nodiscard]] bool alive(std::uint32_t process) const noexcept;

  /// Owner words (cache/owner_word.h): held for microseconds, never across I/O. False: a living
  /// process keeps it for too long.
  [[nodiscard]] bool lock(Shared<std::uint32_t>& word) noexcept;
  void unlock(Shared<std::uint32_t>& word) noexcept;
  void break_locks(std::uint32_t dead) noexcept;

  /// Exclusive right to clean up after a dead process; false when it lives, or another one does it.
  [[nodiscard]] bool begin_recovery(std::uint32_t process) noexcept;
  void end_recovery(std::uint32_t process, bool done) noexcept;

  /// Pins of this process per slot. Guarded by the lock of the slot's bucket.
  [[nodiscard]] std::uint32_t& local_pins(std::uint32_t slot) const noexcept {
    return local_pins_[slot];
  }

  /// Held by the thread of this process that takes a file of `root` from another class.
  [[nodiscard]] std::mutex& stealing(std::uint32_t root) noexcept { return stealing_[root]; }

  /// Tests only: told where this process is (kill_points.h).
  void set_faults(std::shared_ptr<IoFaults> faults) noexcept {
    if (faults) faults_ = std::move(faults);
  }
  void point(const char* name) const noexcept {
    if (faults_) [[unlikely]]
      faults_->at(name);
  }

  /// Pins and owned groups of this process.
  std::atomic<std::int64_t> held{0};

  [[nodiscard]] bool created() const noexcept { return created_; }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  Segment(std::string path, int fd);

  static std::unique_ptr<Segment> attach(const std::string& path, posix::Core& core);
  void open_leases(posix::Core& core);
  void create(posix::Core& core, const LeftBehind& left);
  void check(posix::Core& core) const;
  void map(std::uint64_t bytes);
  void place_tables() noexcept;
  void open_files(posix::Core& core, std::vector<std::uint32_t> counts, std::uint64_t slab_bytes);
  void take_record();
  void leave() noexcept;

  const std::string path_;
  const int fd_;
  const pid_t pid_;
  cache::FileLocks locks_;
  bool attach_locked_ = false;
  bool created_ = false;
  Header* header_ = nullptr;
  std::uint64_t mapped_ = 0;
  ExtentRecord* extents_ = nullptr;
  Group* groups_ = nullptr;
  Bucket* buckets_ = nullptr;
  SlotMeta* metas_ = nullptr;
  std::uint64_t mask_ = 0;
  std::uint32_t self_ = kNone;
  std::uint32_t* local_pins_ = nullptr;
  std::uint64_t local_pins_bytes_ = 0;
  std::mutex recovery_mu_;
  std::mutex stealing_[kMaxRoots];
  std::unique_ptr<Files> files_;
  std::vector<std::unique_ptr<Lease>> leases_;
  std::shared_ptr<IoFaults> faults_;
};

/// Holds a bucket's lock for a scope; finishes first what a holder that died was doing.
class [[nodiscard]] BucketLock {
 public:
  BucketLock(Segment& segment, Bucket& bucket) noexcept
      : segment_(segment), bucket_(bucket), held_(segment.lock(bucket.lock)) {
    if (held_ && bucket_.leaving.load() != 0) [[unlikely]]
      take_out(bucket_.leaving.load() - 1);
  }
  ~BucketLock() {
    if (held_) segment_.unlock(bucket_.lock);
  }
  BucketLock(const BucketLock&) = delete;
  BucketLock& operator=(const BucketLock&) = delete;
  explicit operator bool() const noexcept { return held_; }

  /// Unlinks a slot; it is free afterwards, or kDoomed while somebody reads it.
  void take_out(std::uint32_t slot) noexcept;
  /// False: it is not in the chain.
  bool unlink(std::uint32_t slot) noexcept;

 private:
  Segment& segment_;
  Bucket& bucket_;
  bool held_;
};

/// Fills an empty index from the files. Throws PosixSetupError when a file cannot be read.
void scan_files(Segment& segment, posix::Core& core);

/// Groups that the processes of an index owned when the last of them died: the kernel may still finish
/// their writes.
struct LeftBehind {
  std::uint64_t slab_bytes = 0;
  std::uint32_t extents = 0;
  std::uint32_t group_stride = 0;
  std::vector<std::uint32_t> groups;
};
/// Of the index file `fd`, of whatever version; empty unless it is one of ours and of this boot.
[[nodiscard]] LeftBehind left_behind(int fd);
/// Closes these groups in an index that was made anew, if the files are still the same.
void close_left_behind(Segment& segment, const LeftBehind& left,
                       std::chrono::milliseconds quarantine) noexcept;

/// Clean up after every process that is gone. Returns how many.
std::uint32_t recover_dead(Segment& segment, std::chrono::milliseconds quarantine) noexcept;

}  // namespace ucm::slab
