// The objects of one geometry class in a segment: index, pins, CLOCK, extents.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cache/segment.h"
#include "cache/watch.h"

namespace ucm::cache {

/// Where the control data of a class's slots are.
struct ClassView {
  ClassView(Segment& s, std::uint32_t c) noexcept
      : segment(&s), geometry(&s.geometry_class(c)), index(c) {
    per_extent = geometry->slots_per_extent;
    row_bytes = shard_row_bytes(geometry->shard_count);
    rows_at = align_up(per_extent * (sizeof(SlotMeta) + 1), kCacheLine);
  }

  /// CLOCK's byte: 1 = used since the hand passed.
  [[nodiscard]] Shared<std::uint8_t>& access(std::uint32_t slot) const noexcept {
    std::byte* const at = segment->control(segment->extent_of(slot)) +
                          std::uint64_t{per_extent} * sizeof(SlotMeta) + segment->index_of(slot);
    return *reinterpret_cast<Shared<std::uint8_t>*>(at);
  }
  [[nodiscard]] ShardRow& row(std::uint32_t slot) const noexcept {
    return *reinterpret_cast<ShardRow*>(segment->control(segment->extent_of(slot)) + rows_at +
                                        segment->index_of(slot) * row_bytes);
  }
  [[nodiscard]] std::byte* data(std::uint32_t slot) const noexcept {
    return segment->extent_data(segment->extent_of(slot)) +
           segment->index_of(slot) * geometry->slot_bytes;
  }
  /// Slot at a position of the class: extents in list order. With the class lock.
  [[nodiscard]] std::uint32_t at(std::uint32_t position) const noexcept {
    const std::uint32_t extent =
        segment->class_extent(index, position / per_extent).load(std::memory_order_relaxed);
    return extent * segment->header().slot_stride + position % per_extent;
  }
  [[nodiscard]] std::uint32_t total() const noexcept {
    return geometry->extents.load(std::memory_order_acquire) * per_extent;
  }

  Segment* segment;
  GeometryClass* geometry;
  std::uint32_t index;
  std::uint32_t per_extent;
  std::uint64_t row_bytes;
  std::uint64_t rows_at;
};

inline Phase phase_of(const SlotMeta& m, std::memory_order order = std::memory_order_acquire) {
  return static_cast<Phase>(m.phase.load(order));
}
inline void set_phase(SlotMeta& m, Phase p) noexcept {
  m.phase.store(static_cast<std::uint32_t>(p), std::memory_order_release);
}
inline ShardState state_of(const ShardCell& c,
                           std::memory_order order = std::memory_order_acquire) {
  return static_cast<ShardState>(c.state.load(order));
}
/// Sequentially consistent against the load of ShardRow::waiters that follows a completion.
inline void set_state(ShardCell& c, ShardState s) noexcept {
  c.state.store(static_cast<std::uint32_t>(s), std::memory_order_seq_cst);
}

/// Chains. The bucket's lock is held.
[[nodiscard]] bool unlink_slot(Segment& segment, Bucket& bucket, std::uint32_t slot) noexcept;

/// Clean up after a dead process: locks, half-done moves, pins, shards that it was loading.
/// `quarantine_s`: how long memory it was reading into stays closed to other ids. True if it did.
bool recover(Segment& segment, std::uint32_t process, std::uint32_t quarantine_s) noexcept;
/// recover() for every record whose process is gone. Returns how many.
std::uint32_t recover_dead(Segment& segment, std::uint32_t quarantine_s) noexcept;
/// Lists of extents from their owners, after a death in the middle of a change. Extent lock held.
void rebuild_extent_lists(Segment& segment) noexcept;

class Table {
 public:
  /// `reserve`: slots at the end of the class that only loads take.
  Table(Segment& segment, std::uint32_t class_index, std::uint32_t reserve, bool reserve_explicit);

  [[nodiscard]] const ClassView& view() const noexcept { return view_; }
  [[nodiscard]] SlotMeta& meta(std::uint32_t slot) const noexcept { return segment_.meta(slot); }

  /// The slot of `id` in this class whose phase is kObject or kDumping, else kNone. Bucket locked.
  [[nodiscard]] std::uint32_t find(Bucket& bucket, const BlockId& id) const noexcept;

  /// An unlinked slot (kTaken, this process's), evicting if need be; kNone: all are in use.
  /// No bucket lock may be held. `everything`: the reserve too.
  [[nodiscard]] std::uint32_t allocate(bool everything) noexcept;
  /// Clean a taken slot and give it its id. It has one pin of this process afterwards.
  void prepare(std::uint32_t slot, const BlockId& id, Watch& watch) noexcept;
  /// Into its chain; bucket locked.
  void link(Bucket& bucket, std::uint32_t slot, Phase phase) noexcept;
  /// A taken slot that is not needed after all.
  void give_back(std::uint32_t slot) noexcept;
  /// An unpinned object out of its chain and free; bucket locked.
  void drop(Bucket& bucket, std::uint32_t slot) noexcept;
  /// Hint: this slot holds nothing of use, allocate it before evicting anything.
  void note_spare(std::uint32_t slot) noexcept;

  [[nodiscard]] std::uint64_t evictions() const noexcept { return evictions_.load(); }

 private:
  static constexpr std::size_t kMaxSpares = 64;

  [[nodiscard]] std::uint32_t take_spare() noexcept;
  [[nodiscard]] std::uint32_t scan(bool everything, bool may_grow, bool& grow) noexcept;
  [[nodiscard]] bool try_take(const ClassView& view, std::uint32_t slot) noexcept;
  [[nodiscard]] bool extend() noexcept;
  [[nodiscard]] bool steal() noexcept;
  void adopt(std::uint32_t extent) noexcept;

  Segment& segment_;
  const ClassView view_;
  const std::uint32_t reserve_;
  const bool reserve_explicit_;
  std::atomic<std::uint64_t> evictions_{0};
  std::mutex spare_mu_;
  std::vector<std::uint32_t> spares_;
};

}  // namespace ucm::cache
