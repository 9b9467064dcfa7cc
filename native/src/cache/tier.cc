#include "cache/tier.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "cache/registry.h"
#include "chaos/hooks.h"

namespace ucm::cache {

CacheTier::CacheTier(Geometry geometry, CacheOptions options)
    : geometry_(std::move(geometry)), options_(std::move(options)) {
  attached_ = attach();
  if (options_.watcher) return;
  segment_ = attached_->segment.get();
  table_ = &attached_->table;
  watch_ = &segment_->watch();
  class_ = table_->view().geometry;
  // Whoever died before us must not hold room or records.
  (void)recover_dead(*segment_, static_cast<std::uint32_t>(options_.quarantine.count()));
}

CacheTier::~CacheTier() {
  if (segment_ == nullptr || ::getpid() == segment_->pid()) shutdown(Clock::now());
}

std::shared_ptr<CacheTier::Attached> CacheTier::attach() const {
  auto segment = Segment::open(options_, geometry_);
  if (!segment) return nullptr;
  const std::uint32_t c = segment->join_class(geometry_);
  const auto& g = segment->geometry_class(c);
  const std::uint64_t total = std::uint64_t{segment->header().extents} * g.slots_per_extent;
  const std::uint32_t reserve = reserve_slots(options_, geometry_, total);
  return std::make_shared<Attached>(std::move(segment), c, reserve, options_.load_reserve_explicit);
}

void CacheTier::bind(std::weak_ptr<TierSink> sink) {
  if (options_.watcher || client_ != 0) return;
  client_ =
      watch_->add_client(std::move(sink), static_cast<std::uint32_t>(options_.quarantine.count()));
}

void CacheTier::shutdown(Deadline) noexcept {
  if (const Watch::Client client = client_.exchange(0); client != 0) watch_->remove_client(client);
}

std::vector<std::span<std::byte>> CacheTier::regions() const {
  if (segment_ == nullptr) return {};
  return {segment_->data()};
}

Slot CacheTier::slot_of(std::uint32_t slot) const noexcept {
  return {table_->view().data(slot), slot};
}

Status CacheTier::claim_load(const BlockId& id, std::span<const std::uint32_t> shards, ClaimUse use,
                             std::uint64_t cookie, std::span<ShardClaim> claims,
                             Slot& out) noexcept {
  if (segment_ == nullptr) return Status::kRejected;
  Bucket& bucket = segment_->bucket(id);
  std::uint32_t fresh = kNone;
  for (;;) {
    std::uint32_t slot = kNone;
    bool waits = false;
    Status status = Status::kPending;
    {
      OwnerLock lock(*segment_, bucket.lock);
      if (!lock) {
        ++count_.lock_timeouts;
        status = Status::kRejected;
      } else if (slot = table_->find(bucket, id); slot != kNone) {
        status = claim_existing(slot, shards, claims, waits);
      } else if (fresh != kNone) {
        table_->prepare(fresh, id, *watch_);
        claim_fresh(fresh, shards, claims);
        table_->link(bucket, fresh, Phase::kObject);
        slot = std::exchange(fresh, kNone);
        status = Status::kOk;
      }
    }
    if (status != Status::kPending) {
      if (fresh != kNone) table_->give_back(fresh);
      if (status == Status::kRejected) refused();
      if (status != Status::kOk) return status;
      if (waits) start_waiting(slot, shards, claims, cookie);
      out = slot_of(slot);
      return Status::kOk;
    }
    // Never allocate under a bucket lock: the victim has another bucket.
    fresh = table_->allocate(use == ClaimUse::kLoad);
    if (fresh == kNone) {
      ++count_.no_room;
      refused();
      return Status::kRejected;
    }
  }
}

// Bucket locked.
Status CacheTier::claim_existing(std::uint32_t slot, std::span<const std::uint32_t> shards,
                                 std::span<ShardClaim> claims, bool& waits) noexcept {
  SlotMeta& m = table_->meta(slot);
  if (phase_of(m) == Phase::kDumping) return Status::kMiss;
  const bool referenced = m.pins.load() != 0;
  watch_->pin(slot);
  table_->view().access(slot).store(1, std::memory_order_relaxed);
  class_->hits.fetch_add(1, std::memory_order_relaxed);
  ShardRow& row = table_->view().row(slot);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    ShardCell& cell = row.cells()[shards[i]];
    claims[i] = ShardClaim::kOwned;
    switch (state_of(cell)) {
      case ShardState::kReady:
        if (options_.backend_only && !referenced) {
          row.ready.fetch_sub(1);
          own(row, cell);
        } else {
          claims[i] = ShardClaim::kReady;
        }
        break;
      case ShardState::kEmpty:
        own(row, cell);
        break;
      case ShardState::kFailed:
        // With references somebody may not have seen the failure yet: share it.
        if (referenced) {
          claims[i] = ShardClaim::kWaiting;
        } else {
          own(row, cell);
        }
        break;
      case ShardState::kLoading: {
        std::uint32_t orphan = 0;
        if (cell.owner.compare_exchange_strong(orphan, segment_->self() + 1)) {
          segment_->header().takeovers.fetch_add(1, std::memory_order_relaxed);
        } else {
          claims[i] = ShardClaim::kWaiting;
        }
        break;
      }
    }
    waits |= claims[i] == ShardClaim::kWaiting;
    auto& counter = claims[i] == ShardClaim::kReady   ? count_.shards_hit
                    : claims[i] == ShardClaim::kOwned ? count_.shards_owned
                                                      : count_.shards_waited;
    counter.fetch_add(1, std::memory_order_relaxed);
  }
  return Status::kOk;
}

void CacheTier::own(ShardRow&, ShardCell& cell) noexcept {
  cell.status.store(0, std::memory_order_relaxed);
  cell.error.store(0, std::memory_order_relaxed);
  cell.owner.store(segment_->self() + 1, std::memory_order_relaxed);
  set_state(cell, ShardState::kLoading);
  UCM_CHAOS_POINT(kShardOwned);
}

// Not in a chain yet: nobody sees it.
void CacheTier::claim_fresh(std::uint32_t slot, std::span<const std::uint32_t> shards,
                            std::span<ShardClaim> claims) noexcept {
  ShardRow& row = table_->view().row(slot);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    own(row, row.cells()[shards[i]]);
    claims[i] = ShardClaim::kOwned;
  }
  count_.shards_owned.fetch_add(shards.size(), std::memory_order_relaxed);
}

void CacheTier::start_waiting(std::uint32_t slot, std::span<const std::uint32_t> shards,
                              std::span<const ShardClaim> claims, std::uint64_t cookie) noexcept {
  std::vector<std::uint32_t> waiting;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (claims[i] == ShardClaim::kWaiting) waiting.push_back(shards[i]);
  }
  watch_->wait_for(client_, slot, table_->view().row(slot), cookie, std::move(waiting));
}

void CacheTier::finish_load(const Slot& handle, std::uint32_t begin, std::uint32_t end,
                            Outcome outcome) noexcept {
  const auto slot = static_cast<std::uint32_t>(handle.handle);
  ShardRow& row = table_->view().row(slot);
  const bool ok = outcome.status == Status::kOk;
  for (std::uint32_t i = begin; i < end; ++i) {
    ShardCell& cell = row.cells()[i];
    if (state_of(cell) != ShardState::kLoading || cell.owner.load() != segment_->self() + 1) {
      continue;  // not this process's to finish
    }
    if (ok) {
      set_state(cell, ShardState::kReady);
      UCM_CHAOS_POINT(kShardReady);
      row.ready.fetch_add(1, std::memory_order_release);
    } else {
      cell.status.store(static_cast<std::uint32_t>(outcome.status), std::memory_order_relaxed);
      cell.error.store(outcome.error, std::memory_order_relaxed);
      set_state(cell, ShardState::kFailed);
      count_.shards_failed.fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (const std::uint64_t waiters = row.waiters.load(std::memory_order_seq_cst);
      waiters != 0 && !UCM_CHAOS_BUG(kMissingWake)) {
    segment_->wake(waiters);
  }
  watch_->room_changed(class_->room_wanted);  // a dump may have been told "busy"
}

DumpClaim CacheTier::claim_dump(const BlockId& id, Slot& out,
                                std::span<std::uint8_t> have) noexcept {
  if (segment_ == nullptr) return DumpClaim::kNoRoom;
  Bucket& bucket = segment_->bucket(id);
  std::uint32_t fresh = kNone;
  for (;;) {
    std::uint32_t slot = kNone;
    bool known = false;
    DumpClaim claim = DumpClaim::kBusy;
    {
      OwnerLock lock(*segment_, bucket.lock);
      if (!lock) {
        ++count_.lock_timeouts;
        known = true;
      } else if (slot = table_->find(bucket, id); slot != kNone) {
        claim = claim_known_dump(slot, have);
        known = true;
      } else if (fresh != kNone) {
        table_->prepare(fresh, id, *watch_);
        table_->link(bucket, fresh, Phase::kDumping);
        slot = std::exchange(fresh, kNone);
        std::fill(have.begin(), have.end(), std::uint8_t{0});
        claim = DumpClaim::kFill;
        known = true;
      }
    }
    if (known) {
      if (fresh != kNone) table_->give_back(fresh);
      if (claim == DumpClaim::kBusy) {
        ++count_.busy;
        refused();
        return claim;
      }
      ++(claim == DumpClaim::kFill ? count_.dumps : count_.dumps_present);
      out = slot_of(slot);
      return claim;
    }
    fresh = table_->allocate(false);
    if (fresh == kNone) {
      ++count_.no_room;
      refused();
      return DumpClaim::kNoRoom;
    }
  }
}

// Bucket locked.
DumpClaim CacheTier::claim_known_dump(std::uint32_t slot, std::span<std::uint8_t> have) noexcept {
  SlotMeta& m = table_->meta(slot);
  if (phase_of(m) == Phase::kDumping) return DumpClaim::kBusy;
  ShardRow& row = table_->view().row(slot);
  bool whole = true;
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    const ShardState state = state_of(row.cells()[i]);
    if (state == ShardState::kLoading) return DumpClaim::kBusy;
    have[i] = state == ShardState::kReady ? 1 : 0;
    whole &= have[i] != 0;
  }
  watch_->pin(slot);
  table_->view().access(slot).store(1, std::memory_order_relaxed);
  if (whole) {
    class_->hits.fetch_add(1, std::memory_order_relaxed);
    return DumpClaim::kPresent;
  }
  m.owner.store(segment_->self(), std::memory_order_relaxed);
  UCM_CHAOS_POINT(kDumpReopened);
  set_phase(m, Phase::kDumping);
  return DumpClaim::kFill;
}

void CacheTier::publish(const Slot& handle) noexcept {
  const auto slot = static_cast<std::uint32_t>(handle.handle);
  ShardRow& row = table_->view().row(slot);
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    if (state_of(row.cells()[i]) == ShardState::kReady) continue;
    set_state(row.cells()[i], ShardState::kReady);
    UCM_CHAOS_POINT(kPublishHalf);
    row.ready.fetch_add(1, std::memory_order_release);
  }
  UCM_CHAOS_POINT(kPublishUnphased);
  set_phase(table_->meta(slot), Phase::kObject);
  if (const std::uint64_t waiters = row.waiters.load(std::memory_order_seq_cst);
      waiters != 0 && !UCM_CHAOS_BUG(kMissingWake)) {
    segment_->wake(waiters);
  }
  watch_->room_changed(class_->room_wanted);
}

void CacheTier::abort_dump(const Slot& handle) noexcept {
  const auto slot = static_cast<std::uint32_t>(handle.handle);
  ++count_.dumps_aborted;
  const bool keeps = table_->view().row(slot).ready.load() != 0;
  set_phase(table_->meta(slot), keeps ? Phase::kObject : Phase::kGarbage);
  end_claim(slot);
}

void CacheTier::release(const Slot& handle) noexcept {
  end_claim(static_cast<std::uint32_t>(handle.handle));
}

void CacheTier::end_claim(std::uint32_t slot) noexcept {
  ShardRow& row = table_->view().row(slot);
  const bool useless = row.ready.load() == 0;
  if (useless) table_->view().access(slot).store(0, std::memory_order_relaxed);
  if (!watch_->unpin(slot, row)) return;
  if (useless) table_->note_spare(slot);
  watch_->room_changed(class_->room_wanted);
}

void CacheTier::refused() noexcept {
  if (const Watch::Client client = client_; client != 0) {
    watch_->want_room(client, class_->room_wanted);
  }
}

}  // namespace ucm::cache

namespace ucm {

std::shared_ptr<HostTier> open_cache(Geometry geometry, CacheOptions options) {
  return std::make_shared<cache::CacheTier>(std::move(geometry), std::move(options));
}

}  // namespace ucm
