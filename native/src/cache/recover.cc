// After a process died, at whatever instruction.
//
// Its locks are broken first; chains are whole at all times, so the others can go on at once. Then
// every slot is looked at: moves it was in the middle of are undone, its pins taken back, shards that
// it was loading become orphans for those who wait, or failures. All steps can be repeated: a
// recoverer that dies is itself recovered from.
#include <algorithm>
#include <cerrno>
#include <vector>

#include "cache/futex.h"
#include "cache/table.h"
#include "chaos/hooks.h"

namespace ucm::cache {
namespace {

class Recovery {
 public:
  Recovery(Segment& segment, std::uint32_t dead, std::uint32_t quarantine_s) noexcept
      : segment_(segment),
        dead_(dead),
        bit_(std::uint64_t{1} << dead),
        closed_until_(monotonic_seconds() + quarantine_s) {}

  /// False when a living process kept a lock for too long: to be tried again.
  bool run() noexcept {
    segment_.break_locks(dead_);
    OwnerLock extents(segment_, segment_.header().extent_lock);
    if (!extents) return false;
    rebuild_extent_lists(segment_);
    for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
      GeometryClass& g = segment_.geometry_class(c);
      if (g.used.load(std::memory_order_acquire) == 0) continue;
      OwnerLock lock(segment_, g.lock);
      if (!lock) return false;
      const ClassView view(segment_, c);
      const std::uint32_t total = view.total();
      for (std::uint32_t i = 0; i < total; ++i) {
        if (!fix(view, view.at(i))) return false;
      }
      g.room_wanted.fetch_and(~bit_);
      wake_ |= g.room_wanted.exchange(0);
    }
    segment_.wake(wake_ & ~bit_);
    return true;
  }

 private:
  bool fix(const ClassView& view, std::uint32_t slot) noexcept {
    SlotMeta& m = segment_.meta(slot);
    if (!concerns(m)) return true;
    Bucket& bucket = segment_.bucket(m.id);
    OwnerLock lock(segment_, bucket.lock);
    if (!lock) return false;
    ShardRow& row = view.row(slot);
    const bool was_its = m.owner.load() == dead_;
    const Phase phase = phase_of(m);
    if (was_its && phase == Phase::kTaken) {
      free_slot(view, bucket, slot);  // the id may be half written: then it is in no chain
    } else {
      recount(view, row);
      if (was_its && phase == Phase::kDumping) {
        if (row.ready.load() != 0) {
          set_phase(m, Phase::kObject);
        } else if ((m.pins.load() & ~bit_) == 0) {
          m.owner.store(segment_.self());
          set_phase(m, Phase::kTaken);
          free_slot(view, bucket, slot);
        } else {
          set_phase(m, Phase::kGarbage);
        }
      } else if (phase == Phase::kObject) {
        orphan_shards(view, m, row);
      }
    }
    row.waiters.fetch_and(~bit_);
    UCM_CHAOS_POINT(kRecovery);
    if (!UCM_CHAOS_BUG(kPinsLeak)) m.pins.fetch_and(~bit_);
    return true;
  }

  [[nodiscard]] bool concerns(const SlotMeta& m) const noexcept {
    const Phase phase = phase_of(m);
    const bool moving = phase == Phase::kTaken || phase == Phase::kDumping;
    return (moving && m.owner.load() == dead_) || (m.pins.load() & bit_) != 0;
  }

  void free_slot(const ClassView& view, Bucket& bucket, std::uint32_t slot) noexcept {
    (void)unlink_slot(segment_, bucket, slot);
    view.access(slot).store(0, std::memory_order_relaxed);
    set_phase(segment_.meta(slot), Phase::kFree);
  }

  /// It may have died between a state and its count.
  static void recount(const ClassView& view, ShardRow& row) noexcept {
    std::uint32_t ready = 0;
    for (std::uint32_t i = 0; i < view.geometry->shard_count; ++i) {
      ready += state_of(row.cells()[i]) == ShardState::kReady ? 1 : 0;
    }
    row.ready.store(ready, std::memory_order_release);
  }

  void orphan_shards(const ClassView& view, SlotMeta& m, ShardRow& row) noexcept {
    const std::uint64_t waiters = row.waiters.load() & ~bit_;
    bool any = false;
    for (std::uint32_t i = 0; i < view.geometry->shard_count; ++i) {
      ShardCell& cell = row.cells()[i];
      if (state_of(cell) != ShardState::kLoading || cell.owner.load() != dead_ + 1) continue;
      any = true;
      if (waiters != 0) {
        cell.owner.store(0);
      } else {
        cell.status.store(static_cast<std::uint32_t>(Status::kIoError), std::memory_order_relaxed);
        cell.error.store(EOWNERDEAD, std::memory_order_relaxed);
        set_state(cell, ShardState::kFailed);
      }
    }
    if (!any) return;
    // Its reads may still land here for a while. The same id may be read again into the same place
    // (the same bytes); another id may not move in.
    m.quarantine.store(closed_until_, std::memory_order_relaxed);
    wake_ |= waiters;
  }

  Segment& segment_;
  const std::uint32_t dead_;
  const std::uint64_t bit_;
  const std::uint32_t closed_until_;
  std::uint64_t wake_ = 0;
};

}  // namespace

void rebuild_extent_lists(Segment& segment) noexcept {
  std::uint32_t free = 0;
  for (std::uint32_t e = 0; e < segment.header().extents; ++e) {
    free += segment.extent_owner(e).load() == 0 ? 1 : 0;
  }
  segment.header().extents_free.store(free);
  for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
    GeometryClass& g = segment.geometry_class(c);
    if (g.used.load(std::memory_order_acquire) == 0) continue;
    OwnerLock lock(segment, g.lock);
    if (!lock) continue;
    // Keep what is right in place (positions are CLOCK's order), append what is missing.
    const std::uint32_t before = g.extents.load();
    std::uint32_t n = 0;
    std::vector<bool> listed(segment.header().extents, false);
    const auto keep = [&](std::uint32_t e) {
      if (e >= listed.size() || listed[e] || segment.extent_owner(e).load() != c + 1) return;
      listed[e] = true;
      segment.class_extent(c, n++).store(e);
    };
    for (std::uint32_t i = 0; i < before; ++i) keep(segment.class_extent(c, i).load());
    for (std::uint32_t e = 0; e < segment.header().extents; ++e) keep(e);
    g.extents.store(n, std::memory_order_release);
  }
}

bool recover(Segment& segment, std::uint32_t process, std::uint32_t quarantine_s) noexcept {
  if (!segment.begin_recovery(process)) return false;
  const bool done = Recovery(segment, process, quarantine_s).run();
  if (done) {
    segment.header().recovered.fetch_add(1, std::memory_order_relaxed);
    segment.end_recovery(process);
  } else {
    segment.abandon_recovery(process);
  }
  return done;
}

std::uint32_t recover_dead(Segment& segment, std::uint32_t quarantine_s) noexcept {
  std::uint32_t done = 0;
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    if (segment.record(p).used.load(std::memory_order_acquire) != 0 && !segment.alive(p) &&
        recover(segment, p, quarantine_s)) {
      ++done;
    }
  }
  return done;
}

}  // namespace ucm::cache
