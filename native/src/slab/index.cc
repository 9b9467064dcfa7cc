#include "slab/index.h"

#include <algorithm>

#include "slab/kill_points.h"

namespace ucm::slab {
namespace {

constexpr int kRetries = 8;
constexpr std::uint32_t kMaxSteps = 1u
                                    << 16;  // a chain that changes under a reader may lead astray
constexpr std::size_t kAhead = 16;          // ids whose bucket is on its way to the CPU

}  // namespace

Index::Index(std::shared_ptr<Segment> segment, const posix::Format& format, std::uint32_t own_class)
    : segment_(std::move(segment)), format_(format), own_(own_class) {
  verdict_[own_].store(Verdict::kReadable);
}

bool Index::readable(std::uint32_t c) noexcept {
  const Verdict known = verdict_[c].load(std::memory_order_acquire);
  if (known != Verdict::kUnknown) [[likely]]
    return known == Verdict::kReadable;
  const ClassRecord& record = segment_->geometry(c);
  const posix::ForeignLayout* found = nullptr;
  if (record.layout_bytes <= kMaxLayoutText) {
    try {
      found = format_.foreign({record.layout, record.layout_bytes}, record.shard_count,
                              record.shard_bytes);
    } catch (...) {  // no memory to plan with: a miss, asked again
      return false;
    }
  }
  foreign_[c] = found;
  verdict_[c].store(found != nullptr ? Verdict::kReadable : Verdict::kUnreadable,
                    std::memory_order_release);
  return found != nullptr;
}

std::uint32_t Index::walk(const Bucket& bucket, const std::uint64_t (&words)[2]) noexcept {
  std::uint32_t steps = 0;
  for (std::uint32_t at = bucket.head.load(std::memory_order_acquire);
       at != kNone && steps < kMaxSteps; ++steps) {
    const SlotMeta& m = segment_->meta(at);
    if (has_id(m, words) && phase_of(m) == Phase::kObject) {
      const std::uint32_t c = segment_->class_of_extent(segment_->extent_of(at));
      if (c != kNone && readable(c)) return at;
    }
    at = m.next.load(std::memory_order_acquire);
  }
  return kNone;
}

std::uint32_t Index::probe(const BlockId& id) noexcept {
  std::uint64_t words[2];
  split(id, words);
  const Bucket& bucket = segment_->bucket(id);
  for (int i = 0; i < kRetries; ++i) {
    const std::uint32_t before = bucket.changes.load(std::memory_order_acquire);
    const std::uint32_t slot = walk(bucket, words);
    if (slot != kNone) return slot;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (bucket.changes.load(std::memory_order_relaxed) == before) return kNone;
  }
  return kNone;
}

void Index::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                   bool stop_at_first_miss, std::uint32_t serving) noexcept {
  const std::size_t n = ids.size();
  // Two memory latencies an id (bucket, slot), hidden behind those of the ids before it.
  const auto fetch_bucket = [&](std::size_t i) {
    if (i < n) __builtin_prefetch(&segment_->bucket(ids[i]));
  };
  const auto fetch_slot = [&](std::size_t i) {
    if (i >= n) return;
    const std::uint32_t head = segment_->bucket(ids[i]).head.load(std::memory_order_relaxed);
    if (head != kNone) __builtin_prefetch(&segment_->meta(head));
  };
  for (std::size_t i = 0; i < std::min(n, 2 * kAhead); ++i) fetch_bucket(i);
  for (std::size_t i = 0; i < std::min(n, kAhead); ++i) fetch_slot(i);
  for (std::size_t i = 0; i < n; ++i) {
    fetch_bucket(i + 2 * kAhead);
    fetch_slot(i + kAhead);
    const std::uint32_t slot = probe(ids[i]);
    const bool here =
        slot != kNone && (serving >> segment_->root_of(segment_->extent_of(slot)) & 1u) != 0;
    present[i] = here ? 1 : 0;
    if (!here && stop_at_first_miss) {
      std::fill(present.begin() + static_cast<std::ptrdiff_t>(i), present.end(), std::uint8_t{0});
      return;
    }
  }
}

void Index::touch(std::span<const BlockId> ids) noexcept {
  for (const BlockId& id : ids) {
    const std::uint32_t slot = probe(id);
    if (slot == kNone) continue;
    auto& access = segment_->meta(slot).access;
    if (access.load(std::memory_order_relaxed) == 0) access.store(1, std::memory_order_relaxed);
  }
}

Index::Found Index::pin(const BlockId& id) noexcept {
  std::uint64_t words[2];
  split(id, words);
  Bucket& bucket = segment_->bucket(id);
  BucketLock lock(*segment_, bucket);
  if (!lock) return {};
  const std::uint32_t slot = walk(bucket, words);
  if (slot == kNone) return {};
  SlotMeta& m = segment_->meta(slot);
  if (segment_->local_pins(slot)++ == 0) m.pins.fetch_or(segment_->self_bit());
  segment_->held.fetch_add(1);
  m.access.store(1, std::memory_order_relaxed);
  segment_->point(point::kPinned);
  return {slot, segment_->class_of_extent(segment_->extent_of(slot)), m.generation.load()};
}

void Index::unpin(std::uint32_t slot) noexcept {
  SlotMeta& m = segment_->meta(slot);
  Bucket& bucket = segment_->bucket(id_of(m));  // a pinned slot keeps its id
  BucketLock lock(*segment_, bucket);
  if (!lock) return;  // somebody is stopped with it: the pin stays until this process ends
  segment_->held.fetch_sub(1);
  if (--segment_->local_pins(slot) != 0) return;
  const std::uint64_t left = m.pins.fetch_and(~segment_->self_bit()) & ~segment_->self_bit();
  if (left == 0 && phase_of(m) == Phase::kDoomed) {
    set_phase(m, Phase::kFree);
    const std::uint32_t c = segment_->class_of_extent(segment_->extent_of(slot));
    if (c != kNone) {
      segment_->group(segment_->group_of(slot, segment_->geometry(c).shape)).free.fetch_add(1);
    }
  }
}

Index::Linked Index::link(std::uint32_t slot) noexcept {
  SlotMeta& m = segment_->meta(slot);
  const BlockId id = id_of(m);
  std::uint64_t words[2];
  split(id, words);
  Bucket& bucket = segment_->bucket(id);
  BucketLock lock(*segment_, bucket);
  if (!lock || walk(bucket, words) != kNone) {
    set_phase(m, Phase::kFree);
    return lock ? Linked::kExisting : Linked::kBusy;
  }
  segment_->point(point::kLinking);
  m.access.store(1, std::memory_order_relaxed);  // fresh: survives until the hand comes twice
  m.next.store(bucket.head.load(std::memory_order_relaxed), std::memory_order_relaxed);
  bucket.head.store(slot, std::memory_order_release);
  segment_->point(point::kLinked);
  set_phase(m, Phase::kObject);
  return Linked::kLinked;
}

bool Index::evict(std::uint32_t slot) noexcept {
  SlotMeta& m = segment_->meta(slot);
  if (phase_of(m) != Phase::kObject || m.pins.load() != 0) return false;
  Bucket& bucket = segment_->bucket(id_of(m));
  BucketLock lock(*segment_, bucket);
  if (!lock || phase_of(m) != Phase::kObject || m.pins.load() != 0) return false;
  lock.take_out(slot);
  return true;
}

std::uint32_t Index::remove(const BlockId& id, std::uint64_t generation) noexcept {
  std::uint64_t words[2];
  split(id, words);
  Bucket& bucket = segment_->bucket(id);
  BucketLock lock(*segment_, bucket);
  if (!lock) return kNone;
  const std::uint32_t slot = walk(bucket, words);
  if (slot == kNone) return kNone;
  SlotMeta& m = segment_->meta(slot);
  if (generation != 0 && m.generation.load() != generation) return kNone;
  const std::uint32_t c = segment_->class_of_extent(segment_->extent_of(slot));
  const std::uint32_t g = segment_->group_of(slot, segment_->geometry(c).shape);
  lock.take_out(slot);
  return g;
}

}  // namespace ucm::slab
