// Chains. Every change is one store, so a chain is whole at every instruction.
#include "slab/kill_points.h"
#include "slab/segment.h"

namespace ucm::slab {

bool BucketLock::unlink(std::uint32_t slot) noexcept {
  // First, so that a reader without lock who follows the slot elsewhere sees that it has to start over.
  bucket_.changes.fetch_add(1, std::memory_order_acq_rel);
  Shared<std::uint32_t>* link = &bucket_.head;
  std::uint32_t steps = segment_.slot_limit();  // a chain cannot be longer than all slots
  for (std::uint32_t at = link->load(); at != kNone && steps > 0; --steps) {
    SlotMeta& m = segment_.meta(at);
    if (at == slot) {
      link->store(m.next.load(std::memory_order_relaxed), std::memory_order_release);
      return true;
    }
    link = &m.next;
    at = link->load(std::memory_order_relaxed);
  }
  return false;
}

void BucketLock::take_out(std::uint32_t slot) noexcept {
  bucket_.leaving.store(slot + 1);
  (void)unlink(slot);
  segment_.point(point::kRemoving);
  SlotMeta& m = segment_.meta(slot);
  const std::uint32_t c = segment_.class_of_extent(segment_.extent_of(slot));
  // Pins are only added with the bucket locked.
  const bool read = m.pins.load() != 0;
  set_phase(m, read ? Phase::kDoomed : Phase::kFree);
  if (c != kNone) {
    Group& g = segment_.group(segment_.group_of(slot, segment_.geometry(c).shape));
    if (!read) g.free.fetch_add(1);
    g.dirty.store(1);
  }
  bucket_.leaving.store(0);
}

}  // namespace ucm::slab
