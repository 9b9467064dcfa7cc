// Chains of the index. Every change is one store, so a chain is whole at every instruction; what a
// slot's place in it means is told by its phase.
#include "cache/table.h"
#include "chaos/hooks.h"

namespace ucm::cache {

bool unlink_slot(Segment& segment, Bucket& bucket, std::uint32_t slot) noexcept {
  Shared<std::uint32_t>* link = &bucket.head;
  std::uint32_t steps = segment.slot_limit();  // a chain cannot be longer than all slots
  for (std::uint32_t at = link->load(); at != kNone && steps > 0; --steps) {
    SlotMeta& m = segment.meta(at);
    if (at == slot) {
      link->store(m.next.load(std::memory_order_relaxed), std::memory_order_release);
      return true;
    }
    link = &m.next;
    at = link->load(std::memory_order_relaxed);
  }
  return false;
}

std::uint32_t Table::find(Bucket& bucket, const BlockId& id) const noexcept {
  std::uint32_t steps = segment_.slot_limit();
  for (std::uint32_t at = bucket.head.load(std::memory_order_relaxed); at != kNone && steps > 0;
       --steps) {
    const SlotMeta& m = segment_.meta(at);
    if (m.id == id && segment_.extent_owner(segment_.extent_of(at)).load() == view_.index + 1) {
      const Phase phase = phase_of(m);
      if (phase == Phase::kObject || phase == Phase::kDumping) return at;
    }
    at = m.next.load(std::memory_order_relaxed);
  }
  return kNone;
}

void Table::link(Bucket& bucket, std::uint32_t slot, Phase phase) noexcept {
  SlotMeta& m = segment_.meta(slot);
  // Released: who reads this link without the lock sees the id that came with it.
  m.next.store(bucket.head.load(std::memory_order_relaxed), std::memory_order_release);
  bucket.head.store(slot, std::memory_order_release);
  UCM_CHAOS_POINT(kSlotLinked);
  set_phase(m, phase);
}

void Table::drop(Bucket& bucket, std::uint32_t slot) noexcept {
  SlotMeta& m = segment_.meta(slot);
  m.owner.store(segment_.self(), std::memory_order_relaxed);
  set_phase(m, Phase::kTaken);
  (void)unlink_slot(segment_, bucket, slot);
  view_.access(slot).store(0, std::memory_order_relaxed);
  set_phase(m, Phase::kFree);
}

void Table::give_back(std::uint32_t slot) noexcept {
  view_.access(slot).store(0, std::memory_order_relaxed);
  set_phase(segment_.meta(slot), Phase::kFree);
  note_spare(slot);
}

void Table::prepare(std::uint32_t slot, const BlockId& id, Watch& watch) noexcept {
  SlotMeta& m = segment_.meta(slot);
  ShardRow& row = view_.row(slot);
  store_id(m.id, id);
  m.quarantine.store(0, std::memory_order_relaxed);
  row.ready.store(0, std::memory_order_relaxed);
  row.waiters.store(0, std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < view_.geometry->shard_count; ++i) {
    ShardCell& cell = row.cells()[i];
    cell.owner.store(0, std::memory_order_relaxed);
    cell.state.store(static_cast<std::uint32_t>(ShardState::kEmpty), std::memory_order_relaxed);
  }
  view_.access(slot).store(1, std::memory_order_relaxed);  // survives until the hand comes twice
  watch.pin(slot);
  UCM_CHAOS_POINT(kSlotPrepared);
}

}  // namespace ucm::cache
