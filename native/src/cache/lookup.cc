// Lookups without locks, many at a time.
//
// Whoever changes a chain does not know of readers. A reader therefore looks at every slot twice: what it
// read counts if the slot was in this chain before and after. Where it was not (somebody moves it right
// now) the bucket is asked again with its lock, which is rare.
#include <algorithm>
#include <array>

#include "cache/tier.h"

namespace ucm::cache {
namespace {

/// Ids whose cache lines are fetched together: as many as a core has misses under way, and some.
constexpr std::size_t kBatch = 32;
/// A chain longer than this is asked with its lock (buckets are twice as many as slots).
constexpr int kMaxSteps = 16;

void prefetch(const void* p) noexcept { __builtin_prefetch(p, 0, 3); }

/// Found slot of the id, kNone when it is surely absent; `sure` false: ask again with the lock.
std::uint32_t peek(const Segment& s, const ClassView& view, std::uint32_t head, const IdWords& id,
                   bool& sure) noexcept {
  const std::uint64_t home = s.bucket_index(id.first);
  int steps = kMaxSteps;
  for (std::uint32_t at = head; at != kNone;) {
    if (--steps < 0 || at >= s.slot_limit()) return sure = false, kNone;
    const SlotMeta& m = s.meta(at);
    const IdWords is = load_id(m.id);
    const Phase before = phase_of(m);
    if (is == id &&
        s.extent_owner(s.extent_of(at)).load(std::memory_order_relaxed) == view.index + 1) {
      if (before == Phase::kObject) return at;
      if (before == Phase::kDumping) return kNone;
    }
    const std::uint32_t next = m.next.load(std::memory_order_acquire);
    const Phase phase = phase_of(m);
    const bool linked =
        phase == Phase::kObject || phase == Phase::kDumping || phase == Phase::kGarbage;
    if (!linked || s.bucket_index(load_id(m.id).first) != home) return sure = false, kNone;
    at = next;
  }
  return kNone;
}

}  // namespace

bool CacheTier::lookup_locked(const Attached& at, const BlockId& id) const noexcept {
  Segment& s = *at.segment;
  Bucket& bucket = s.bucket(id);
  if (bucket.head.load(std::memory_order_acquire) == kNone) return false;
  OwnerLock lock(s, bucket.lock);
  if (!lock) return false;
  const std::uint32_t slot = at.table.find(bucket, id);
  if (slot == kNone || phase_of(s.meta(slot)) != Phase::kObject) return false;
  const ShardRow& row = at.table.view().row(slot);
  return row.ready.load(std::memory_order_acquire) == geometry_.shard_count;
}

void CacheTier::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present) noexcept {
  const auto at = current();
  if (!at) return;
  Segment& s = *at->segment;
  const ClassView view = at->table.view();
  const std::uint32_t whole = geometry_.shard_count;
  std::array<std::uint32_t, kBatch> slots{};
  const auto prefetch_buckets = [&](std::size_t begin) {
    const std::size_t end = std::min(begin + kBatch, ids.size());
    for (std::size_t i = begin; i < end; ++i) prefetch(&s.bucket(ids[i]));
  };
  prefetch_buckets(0);
  for (std::size_t begin = 0; begin < ids.size(); begin += kBatch) {
    const std::size_t n = std::min(kBatch, ids.size() - begin);
    prefetch_buckets(begin + kBatch);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t head = s.bucket(ids[begin + i]).head.load(std::memory_order_acquire);
      slots[i] = head;
      if (head != kNone) prefetch(&s.meta(head));
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (slots[i] == kNone || present[begin + i] != 0) {
        slots[i] = kNone;
        continue;
      }
      bool sure = true;
      slots[i] = peek(s, view, slots[i], words_of(ids[begin + i]), sure);
      if (!sure) present[begin + i] = lookup_locked(*at, ids[begin + i]) ? 1 : 0;
      if (slots[i] != kNone) prefetch(&view.row(slots[i]));
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (slots[i] == kNone) continue;
      const SlotMeta& m = s.meta(slots[i]);
      const std::uint32_t ready = view.row(slots[i]).ready.load(std::memory_order_acquire);
      const bool same = load_id(m.id) == words_of(ids[begin + i]) && phase_of(m) == Phase::kObject;
      present[begin + i] =
          same ? (ready == whole ? 1 : 0) : (lookup_locked(*at, ids[begin + i]) ? 1 : 0);
    }
  }
}

}  // namespace ucm::cache
