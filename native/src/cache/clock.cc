// CLOCK and extents: where the memory for a new object comes from.
#include <algorithm>
#include <cstring>

#include "cache/futex.h"
#include "cache/table.h"
#include "chaos/hooks.h"

namespace ucm::cache {

Table::Table(Segment& segment, std::uint32_t class_index, std::uint32_t reserve,
             bool reserve_explicit)
    : segment_(segment),
      view_(segment, class_index),
      reserve_(reserve),
      reserve_explicit_(reserve_explicit) {
  spares_.reserve(kMaxSpares);
}

std::uint32_t Table::allocate(bool everything) noexcept {
  if (const std::uint32_t slot = take_spare(); slot != kNone) return slot;
  bool may_grow = true, may_steal = true;
  for (;;) {
    bool grow = false;
    std::uint32_t slot = kNone;
    {
      OwnerLock lock(segment_, view_.geometry->lock);
      if (!lock) return kNone;
      slot = scan(everything, may_grow, grow);
    }
    if (slot != kNone) return slot;
    if (grow) {
      may_grow = extend();
    } else if (may_steal) {
      may_steal = false;
      if (!steal()) return kNone;
    } else {
      return kNone;
    }
  }
}

// At most two sweeps that clear access bytes, then whatever unreferenced slot is at the hand.
std::uint32_t Table::scan(bool everything, bool may_grow, bool& grow) noexcept {
  GeometryClass& g = *view_.geometry;
  const std::uint32_t total = view_.total();
  const std::uint32_t free = may_grow ? segment_.header().extents_free.load() : 0;
  const std::uint32_t potential = total + free * view_.per_extent;
  std::uint32_t cap = potential;
  if (!everything) {
    const std::uint32_t most = reserve_explicit_ ? std::max(potential, 1U) - 1 : potential / 4;
    cap -= std::min(reserve_, most);
  }
  const bool growable = free > 0 && total < cap;
  const std::uint32_t limit = std::min(total, cap);
  if (limit == 0) {
    grow = growable;
    return kNone;
  }
  for (std::uint64_t step = 0; step < 3ULL * limit;) {
    std::uint32_t hand = g.cursor.load(std::memory_order_relaxed);
    if (hand >= total) {
      if (growable) {
        grow = true;
        return kNone;
      }
      hand = 0;
    }
    g.cursor.store(hand + 1, std::memory_order_relaxed);
    if (hand >= limit) continue;  // at most total - limit of these in a row
    const std::uint32_t slot = view_.at(hand);
    const bool forced = step >= 2ULL * limit;
    ++step;
    auto& access = view_.access(slot);
    if (!forced && access.load(std::memory_order_relaxed) != 0) {
      access.store(0, std::memory_order_relaxed);
      continue;
    }
    if (try_take(view_, slot)) return slot;
  }
  return kNone;
}

// The class's lock is held: nobody else takes a slot of it, and its extents stay.
bool Table::try_take(const ClassView& view, std::uint32_t slot) noexcept {
  SlotMeta& m = segment_.meta(slot);
  const Phase seen = phase_of(m);
  if (seen == Phase::kFree) {
    m.owner.store(segment_.self(), std::memory_order_relaxed);
    set_phase(m, Phase::kTaken);
    return true;
  }
  const auto evictable = [&m] {
    const Phase p = phase_of(m);
    if (p != Phase::kObject && p != Phase::kGarbage) return false;
    if (m.pins.load() != 0 && !UCM_CHAOS_BUG(kFreeReferenced)) return false;
    const std::uint32_t closed = m.quarantine.load(std::memory_order_relaxed);
    return closed == 0 || monotonic_seconds() >= closed;
  };
  if (!evictable()) return false;
  Bucket& bucket = segment_.bucket(m.id);
  OwnerLock lock(segment_, bucket.lock);
  if (!lock || !evictable()) return false;  // pins are only added with the bucket locked
  if (view.row(slot).ready.load(std::memory_order_relaxed) != 0) {
    ++evictions_;
    view.geometry->evictions.fetch_add(1, std::memory_order_relaxed);
  }
  m.owner.store(segment_.self(), std::memory_order_relaxed);
  set_phase(m, Phase::kTaken);
  UCM_CHAOS_POINT(kSlotTaken);
  (void)unlink_slot(segment_, bucket, slot);
  return true;
}

void Table::note_spare(std::uint32_t slot) noexcept {
  const std::lock_guard lock(spare_mu_);
  if (spares_.size() < kMaxSpares) spares_.push_back(slot);
}

std::uint32_t Table::take_spare() noexcept {
  for (;;) {
    std::uint32_t slot = kNone;
    {
      const std::lock_guard lock(spare_mu_);
      if (spares_.empty()) return kNone;
      slot = spares_.back();
      spares_.pop_back();
    }
    OwnerLock lock(segment_, view_.geometry->lock);
    if (!lock) return kNone;
    // The note may be old: the slot in use again, even its extent in another class.
    if (segment_.extent_owner(segment_.extent_of(slot)).load() != view_.index + 1) continue;
    const Phase phase = phase_of(segment_.meta(slot));
    const bool useless = phase == Phase::kFree || phase == Phase::kGarbage ||
                         (phase == Phase::kObject && view_.row(slot).ready.load() == 0);
    if (useless && try_take(view_, slot)) return slot;
  }
}

// Extent lock held, class lock not.
void Table::adopt(std::uint32_t extent) noexcept {
  // Nobody looks into the control data of an extent without owner.
  std::memset(static_cast<void*>(segment_.control(extent)), 0, segment_.header().control_bytes);
  OwnerLock lock(segment_, view_.geometry->lock);
  if (!lock) return;
  GeometryClass& g = *view_.geometry;
  const std::uint32_t n = g.extents.load(std::memory_order_relaxed);
  segment_.class_extent(view_.index, n).store(extent, std::memory_order_relaxed);
  segment_.extent_owner(extent).store(view_.index + 1, std::memory_order_release);
  UCM_CHAOS_POINT(kExtentAdopted);
  g.extents.store(n + 1, std::memory_order_release);
  segment_.header().extents_free.fetch_sub(1);
}

bool Table::extend() noexcept {
  OwnerLock lock(segment_, segment_.header().extent_lock);
  if (!lock) return false;
  for (std::uint32_t e = 0; e < segment_.header().extents; ++e) {
    if (segment_.extent_owner(e).load(std::memory_order_relaxed) != 0) continue;
    adopt(e);
    return true;
  }
  return false;
}

// Another class gives an extent back: the one with the most memory, and of that the first extent in
// which nothing is pinned. What was in it is evicted.
bool Table::steal() noexcept {
  OwnerLock lock(segment_, segment_.header().extent_lock);
  if (!lock) return false;
  // Whoever died in here may have left an extent twice in a list, and its lock can be had before the
  // recovery has come by: taken from one place only, it would belong to two classes.
  rebuild_extent_lists(segment_);
  const std::uint32_t own = view_.geometry->extents.load();
  std::uint32_t donor = kNone, most = own == 0 ? 0 : own + 1;
  for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
    const GeometryClass& g = segment_.geometry_class(c);
    if (c == view_.index || g.used.load() == 0) continue;
    const std::uint32_t n = g.extents.load();
    if (n > 1 && n > most) donor = c, most = n;
  }
  if (donor == kNone) return false;
  const ClassView other(segment_, donor);
  GeometryClass& g = *other.geometry;
  std::uint32_t extent = kNone;
  {
    OwnerLock class_lock(segment_, g.lock);
    if (!class_lock) return false;
    const std::uint32_t n = g.extents.load();
    for (std::uint32_t i = 0; i < n && extent == kNone; ++i) {
      const std::uint32_t e = segment_.class_extent(donor, i).load();
      const std::uint32_t first = e * segment_.header().slot_stride;
      std::uint32_t taken = 0;
      for (; taken < other.per_extent; ++taken) {
        if (!try_take(other, first + taken)) break;
      }
      if (taken < other.per_extent) {  // pinned: what was taken is free again, in its old class
        for (std::uint32_t k = 0; k < taken; ++k) set_phase(segment_.meta(first + k), Phase::kFree);
        continue;
      }
      // The last extent of the list moves into the gap, then the list ends earlier.
      segment_.class_extent(donor, i).store(segment_.class_extent(donor, n - 1).load());
      UCM_CHAOS_POINT(kExtentDoubled);
      g.extents.store(n - 1, std::memory_order_release);
      segment_.extent_owner(e).store(0, std::memory_order_release);
      UCM_CHAOS_POINT(kExtentOwnerless);
      segment_.header().extents_free.fetch_add(1);
      extent = e;
    }
  }
  if (extent == kNone) return false;
  adopt(extent);
  return true;
}

}  // namespace ucm::cache
