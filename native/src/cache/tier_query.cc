// What a worker and a watcher have in common beside lookup (lookup.cc): heat, removal, figures.
#include <algorithm>
#include <set>

#include "cache/tier.h"

namespace ucm::cache {
namespace {

/// How often a watcher without a segment looks for one.
constexpr std::int64_t kAttachEveryNs = 1'000'000'000;
constexpr std::size_t kAhead = 8;

void prefetch(const void* p) noexcept { __builtin_prefetch(p, 0, 3); }

}  // namespace

std::shared_ptr<CacheTier::Attached> CacheTier::current() const noexcept {
  if (!options_.watcher) return attached_;
  const std::lock_guard lock(attach_mu_);
  if (attached_ && !attached_->segment->retired()) return attached_;
  attached_ = nullptr;
  const std::int64_t now = Clock::now().time_since_epoch().count();
  if (now < next_attach_ns_) return nullptr;
  next_attach_ns_ = now + kAttachEveryNs;
  try {
    attached_ = attach();
  } catch (...) {  // health() tells
  }
  return attached_;
}

void CacheTier::touch(std::span<const BlockId> ids) noexcept {
  const auto at = current();
  if (!at) return;
  Segment& s = *at->segment;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) prefetch(&s.bucket(ids[i + kAhead]));
    Bucket& bucket = s.bucket(ids[i]);
    if (bucket.head.load(std::memory_order_acquire) == kNone) continue;
    OwnerLock lock(s, bucket.lock);
    if (!lock) continue;
    const std::uint32_t slot = at->table.find(bucket, ids[i]);
    if (slot == kNone) continue;
    at->table.view().access(slot).store(1, std::memory_order_relaxed);
    at->table.view().geometry->hits.fetch_add(1, std::memory_order_relaxed);
  }
}

void CacheTier::remove(std::span<const BlockId> ids) noexcept {
  const auto at = current();
  if (!at) return;
  Segment& s = *at->segment;
  for (const BlockId& id : ids) {
    Bucket& bucket = s.bucket(id);
    std::uint32_t dropped = kNone;
    {
      OwnerLock lock(s, bucket.lock);
      if (!lock) continue;
      const std::uint32_t slot = at->table.find(bucket, id);
      if (slot == kNone || phase_of(s.meta(slot)) != Phase::kObject ||
          s.meta(slot).pins.load() != 0 || s.meta(slot).quarantine.load() != 0) {
        continue;
      }
      at->table.drop(bucket, slot);
      dropped = slot;
    }
    at->table.note_spare(dropped);
  }
}

Rotation CacheTier::rotation() const noexcept {
  if (segment_ == nullptr) return {};
  // Everybody who maps the data takes part; the order (rank, record) is the same for all.
  Rotation rotation{0, 0};
  const auto mine = std::pair(segment_->record(segment_->self()).rank, segment_->self());
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    const ProcessRecord& r = segment_->record(p);
    if (r.used.load(std::memory_order_acquire) == 0 || r.worker.load() == 0) continue;
    ++rotation.ranks;
    if (std::pair(r.rank, p) < mine) ++rotation.rank;
  }
  if (rotation.ranks == 0) return {};
  return rotation;
}

std::string CacheTier::health() const {
  const auto at = current();
  if (!at) return options_.watcher ? "" : "cache: not attached";
  Segment& s = *at->segment;
  if (options_.watcher) return {};
  const auto& own = s.record(s.self());
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    const ProcessRecord& r = s.record(p);
    if (p == s.self() || r.used.load() == 0 || r.worker.load() == 0) continue;
    if (r.rank_size != 0 && own.rank_size != 0 && r.rank_size != own.rank_size) {
      return "cache: local_rank_size is " + std::to_string(own.rank_size) + " here and " +
             std::to_string(r.rank_size) + " in process " + std::to_string(r.pid) +
             "; the number of attached processes is used instead: configure them alike";
    }
  }
  if (count_.lock_timeouts != 0) {
    return "cache: a process keeps a lock of " + s.path() +
           " without moving (stopped in a debugger?); what it blocks is treated as a miss";
  }
  return {};
}

std::map<std::string, std::uint64_t> CacheTier::stats() const {
  std::map<std::string, std::uint64_t> out;
  const auto at = current();
  if (!at) return out;
  Segment& s = *at->segment;
  const ClassView& view = at->table.view();
  std::uint64_t free = 0, ready = 0, partial = 0, dumping = 0, pinned = 0, quarantined = 0;
  {
    OwnerLock lock(s, view.geometry->lock);
    const std::uint32_t total = lock ? view.total() : 0;
    for (std::uint32_t i = 0; i < total; ++i) {
      const std::uint32_t slot = view.at(i);
      const SlotMeta& m = s.meta(slot);
      const Phase phase = phase_of(m, std::memory_order_relaxed);
      if (phase == Phase::kObject) {
        const bool whole = view.row(slot).ready.load() == geometry_.shard_count;
        ++(whole ? ready : partial);
      } else {
        ++(phase == Phase::kDumping ? dumping : free);
      }
      pinned += m.pins.load(std::memory_order_relaxed) != 0 ? 1 : 0;
      quarantined += m.quarantine.load(std::memory_order_relaxed) != 0 ? 1 : 0;
    }
    out["slots"] = total;
  }
  std::uint64_t workers = 0, watchers = 0;
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    if (s.record(p).used.load() == 0) continue;
    ++(s.record(p).worker.load() != 0 ? workers : watchers);
  }
  const Header& h = s.header();
  out["slots_free"] = free;
  out["slots_ready"] = ready;
  out["slots_partial"] = partial;
  out["slots_dumping"] = dumping;
  out["slots_pinned"] = pinned;
  out["slots_quarantined"] = quarantined;
  out["slot_bytes"] = view.geometry->slot_bytes;
  out["slots_max"] = std::uint64_t{h.extents} * view.per_extent;
  out["segment_bytes"] = h.segment_bytes;
  out["capacity_bytes"] = std::uint64_t{h.extents} * h.extent_bytes;
  out["created"] = s.created() ? 1 : 0;
  out["processes_workers"] = workers;
  out["processes_watchers"] = watchers;
  out["processes_recovered_total"] = h.recovered.load();
  out["shards_taken_over_total"] = h.takeovers.load();
  out["evictions_total"] = at->table.evictions();
  out["shards_hit_total"] = count_.shards_hit;
  out["shards_owned_total"] = count_.shards_owned;
  out["shards_waited_total"] = count_.shards_waited;
  out["shards_failed_total"] = count_.shards_failed;
  out["claims_without_room_total"] = count_.no_room;
  out["dumps_busy_total"] = count_.busy;
  out["dumps_total"] = count_.dumps;
  out["dumps_present_total"] = count_.dumps_present;
  out["dumps_aborted_total"] = count_.dumps_aborted;
  out["lock_timeouts_total"] = count_.lock_timeouts;
  return out;
}

}  // namespace ucm::cache
