// Objects by id, as one stage sees them: those of its own geometry, and those it can convert.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>

#include "slab/segment.h"

namespace ucm::slab {

/// Thread-safe. Nothing here asks the medium.
class Index {
 public:
  Index(std::shared_ptr<Segment> segment, const posix::Format& format, std::uint32_t own_class);

  struct Found {
    std::uint32_t slot = kNone;
    std::uint32_t of_class = kNone;
    std::uint64_t generation = 0;
  };

  /// The object's slot, without a promise; kNone: absent. No lock.
  [[nodiscard]] std::uint32_t probe(const BlockId& id) noexcept;
  /// present[i] = 1 for objects on roots of `serving` (a bit each). No lock.
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss, std::uint32_t serving) noexcept;
  void touch(std::span<const BlockId> ids) noexcept;

  /// With a pin: the slot keeps this object until unpin().
  [[nodiscard]] Found pin(const BlockId& id) noexcept;
  void unpin(std::uint32_t slot) noexcept;

  enum class Linked : std::uint8_t { kLinked, kExisting, kBusy };
  /// Puts a written slot (kWriting, of a group that is ours) into its chain. kExisting: the object is
  /// there already; kBusy: a stopped process keeps the chain. The slot is free then.
  [[nodiscard]] Linked link(std::uint32_t slot) noexcept;
  /// Takes an object out that nobody reads; the slot is free then. Its group is ours.
  [[nodiscard]] bool evict(std::uint32_t slot) noexcept;
  /// Takes the object out wherever it is. Returns its group, whose page is out of date now, or kNone.
  /// `generation`: only if it is still this one; 0: whichever. All of its classes that we can read.
  std::uint32_t remove(const BlockId& id, std::uint64_t generation) noexcept;

  /// May objects of this class be read? Asked first when the class is first met.
  [[nodiscard]] bool readable(std::uint32_t of_class) noexcept;
  /// Null for our own class.
  [[nodiscard]] const posix::ForeignLayout* foreign(std::uint32_t of_class) const noexcept {
    return foreign_[of_class];
  }
  [[nodiscard]] std::uint32_t own_class() const noexcept { return own_; }
  [[nodiscard]] const SlabShape& own_shape() const noexcept {
    return segment_->geometry(own_).shape;
  }
  [[nodiscard]] Segment& segment() const noexcept { return *segment_; }

 private:
  enum class Verdict : std::uint8_t { kUnknown, kReadable, kUnreadable };

  [[nodiscard]] std::uint32_t walk(const Bucket& bucket, const std::uint64_t (&words)[2]) noexcept;

  const std::shared_ptr<Segment> segment_;
  const posix::Format& format_;
  const std::uint32_t own_;
  std::array<std::atomic<Verdict>, kMaxClasses> verdict_{};
  std::array<const posix::ForeignLayout*, kMaxClasses> foreign_{};
};

}  // namespace ucm::slab
