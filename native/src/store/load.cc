// Loads: queue -> slot -> read from the stage below (or wait for who reads it) -> copy out.
#include <algorithm>
#include <array>

#include "store/core.h"

namespace ucm {
namespace {

constexpr std::size_t kCopyBatch = 16;  // rows between two flushes of the device

}  // namespace

void StoreCore::submit_load(const std::shared_ptr<TaskImpl>& task) {
  Actions actions;
  const bool event_ready = task->event == nullptr || task->event->fired();
  {
    Lock lock(mu_);
    if (closing_) throw ClosedError("the store was closed: open a new one");
    const bool prefetch = task->addresses.empty();
    counters->tasks[0].fetch_add(prefetch ? 0 : 1, std::memory_order_relaxed);
    auto& queue = prefetch ? prefetch_queue_ : load_queue_;
    for (Unit& unit : task->units) {
      unit.task = task.get();
      unit.keep = task;
      unit.event_ready = event_ready;
      if (queue.empty() && !prefetch && start_load(unit, actions) != Start::kNoRoom) continue;
      if (queue.size() < options.waiting_depth) {
        queue.push_back(&unit);
        continue;
      }
      for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
        task->finish_open(task->order[pos], {Status::kRejected, 0});
      }
      if (prefetch) ++counters->prefetch_dropped_objects;
      unit.keep.reset();
    }
    if (!task->done()) {
      active_.push_back(task);
      arm(task->deadline());
      if (!event_ready) event_tasks_.push_back(task);
    }
    if (prefetch) pump_locked(actions);
  }
  if (!event_ready) watch_event(task);
  perform(actions);
}

bool StoreCore::any_in(const Unit& unit, std::uint8_t state) const noexcept {
  for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
    if (unit.task->raw(unit.task->order[pos]) == state) return true;
  }
  return false;
}

StoreCore::Start StoreCore::start_load(Unit& unit, Actions& actions) {
  TaskImpl& task = *unit.task;
  const bool prefetch = task.addresses.empty();
  scratch_shards_.clear();
  for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
    const std::uint32_t row = task.order[pos];
    if (task.raw(row) != kRowOpen) continue;
    const std::uint32_t shard = task.shards[row];
    if (scratch_shards_.empty() || scratch_shards_.back() != shard)
      scratch_shards_.push_back(shard);
  }
  if (scratch_shards_.empty()) {  // given up while it waited
    actions.released.push_back(std::move(unit.keep));
    return Start::kGone;
  }
  if (running_free_.empty()) return Start::kNoRoom;

  const std::uint32_t index = running_free_.back();
  const std::uint64_t cookie =
      (static_cast<std::uint64_t>(running_[index].generation) << 32) | index;
  scratch_claims_.assign(scratch_shards_.size(), ShardClaim::kOwned);
  const Status claimed =
      tier->claim_load(unit.id, scratch_shards_, prefetch ? ClaimUse::kPrefetch : ClaimUse::kLoad,
                       cookie, scratch_claims_, unit.slot);
  if (claimed == Status::kRejected) return Start::kNoRoom;
  if (claimed != Status::kOk) {
    for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
      task.finish_open(task.order[pos], {claimed, 0});
    }
    actions.released.push_back(std::move(unit.keep));
    return Start::kGone;
  }
  running_free_.pop_back();
  running_[index].unit = &unit;
  unit.cookie = cookie;
  unit.refs = 1;

  bool ready = false;
  std::size_t next = 0;
  for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
    const std::uint32_t row = task.order[pos];
    const std::uint32_t shard = task.shards[row];
    while (next < scratch_shards_.size() && scratch_shards_[next] < shard) ++next;
    if (next == scratch_shards_.size()) break;
    if (scratch_shards_[next] != shard) continue;  // its rows were given up
    const bool first = pos == unit.begin || task.shards[task.order[pos - 1]] != shard;
    if (scratch_claims_[next] == ShardClaim::kReady) {
      ready |= task.move(row, kRowOpen, kRowReady);
    } else if (first) {
      task.io[pos] = scratch_claims_[next] == ShardClaim::kOwned ? Io::kReading : Io::kWaiting;
      ++unit.refs;
    }
  }
  if (ready) queue_copy(unit);
  add_reads(unit, actions, !prefetch);
  unref_load(unit, actions);
  return Start::kStarted;
}

/// One ReadOp per run of adjacent shards that this unit reads.
void StoreCore::add_reads(Unit& unit, Actions& actions, bool urgent) {
  const TaskImpl& task = *unit.task;
  bool open_run = false;
  const std::size_t before = actions.reads.size();
  for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
    if (task.io[pos] != Io::kReading) continue;
    const std::uint32_t shard = task.shards[task.order[pos]];
    if (open_run && actions.reads.back().end == shard) {
      ++actions.reads.back().end;
    } else {
      actions.reads.push_back({unit.id, unit.slot.data, shard, shard + 1, unit.cookie, urgent});
      open_run = true;
    }
  }
  if (actions.reads.size() == before) return;
  const Deadline deadline = task.deadline();
  if (actions.read_groups.empty() || actions.read_groups.back().second != deadline) {
    actions.read_groups.emplace_back(0, deadline);
  }
  actions.read_groups.back().first = actions.reads.size();
}

void StoreCore::queue_copy(Unit& unit) {
  if (unit.queued_copy) return;
  unit.queued_copy = true;
  ++unit.refs;
  if (!unit.event_ready) return;  // mark_events() goes on
  copy_loads_.push_back(&unit);
  wake_copier();
}

void StoreCore::unref_load(Unit& unit, Actions& actions) noexcept {
  if (--unit.refs != 0) return;
  const auto index = static_cast<std::uint32_t>(unit.cookie);
  tier->release(unit.slot);
  running_[index].unit = nullptr;
  if (++running_[index].generation == 0) running_[index].generation = 1;
  running_free_.push_back(index);
  unit.cookie = 0;
  actions.released.push_back(std::move(unit.keep));
  want_pump();
  if (idle_locked()) idle_cv_.notify_all();
}

Unit* StoreCore::load_of(std::uint64_t cookie) noexcept {
  const auto index = static_cast<std::uint32_t>(cookie);
  if (index >= running_.size() || running_[index].generation != (cookie >> 32)) return nullptr;
  return running_[index].unit;
}

std::uint32_t StoreCore::settle(Unit& unit, std::uint32_t begin, std::uint32_t end, Io how,
                                Outcome outcome) {
  TaskImpl& task = *unit.task;
  const auto first = task.order.begin() + unit.begin;
  const auto last = task.order.begin() + unit.end;
  auto it = std::lower_bound(first, last, begin, [&](std::uint32_t row, std::uint32_t shard) {
    return task.shards[row] < shard;
  });
  std::uint32_t settled = 0;
  bool ready = false;
  bool mine = false;
  for (; it != last && task.shards[*it] < end; ++it) {
    Io& io = task.io[static_cast<std::size_t>(it - task.order.begin())];
    const bool first_of_shard = it == first || task.shards[*it] != task.shards[*(it - 1)];
    if (first_of_shard) {
      mine = io == how;  // a shard is answered once; a second answer changes nothing
      if (mine) {
        io = Io::kNone;
        ++settled;
      }
    }
    if (!mine) continue;
    if (outcome.status == Status::kOk) {
      ready |= task.move(*it, kRowOpen, kRowReady);
    } else {
      task.finish(*it, kRowOpen, outcome);
    }
  }
  if (ready) queue_copy(unit);
  return settled;
}

void StoreCore::on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                        Outcome outcome) noexcept {
  Actions actions;
  {
    Lock lock(mu_);
    Unit* const unit = load_of(cookie);
    if (unit == nullptr) return;
    ++unit->refs;
    const std::uint32_t settled = settle(*unit, begin, end, Io::kReading, outcome);
    if (settled != 0) tier->finish_load(unit->slot, begin, end, outcome);
    unit->refs -= settled;
    unref_load(*unit, actions);
  }
  perform(actions);
}

bool StoreCore::on_shards(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                          ShardEvent event, Outcome outcome) noexcept {
  Actions actions;
  {
    Lock lock(mu_);
    Unit* const unit = load_of(cookie);
    if (unit == nullptr) return false;
    if (event == ShardEvent::kTakeover) {
      TaskImpl& task = *unit->task;
      bool taken = false;
      for (std::uint32_t pos = unit->begin; pos < unit->end; ++pos) {
        const std::uint32_t shard = task.shards[task.order[pos]];
        if (shard < begin || shard >= end || task.io[pos] != Io::kWaiting) continue;
        task.io[pos] = Io::kReading;
        actions.reads.push_back({unit->id, unit->slot.data, shard, shard + 1, cookie, true});
        taken = true;
      }
      if (!taken) return false;
      actions.read_groups.emplace_back(actions.reads.size(), task.deadline());
    } else {
      const Outcome result = event == ShardEvent::kReady ? Outcome{Status::kOk, 0} : outcome;
      ++unit->refs;
      unit->refs -= settle(*unit, begin, end, Io::kWaiting, result);
      unref_load(*unit, actions);
    }
  }
  perform(actions);
  return true;
}

void StoreCore::copy_shard_out(const std::byte* shard, const std::uint64_t* addresses) noexcept {
  if (geometry.runs.size() == 1) {
    return device->copy_out(shard, addresses, geometry.runs_per_shard, geometry.runs[0]);
  }
  for (std::uint32_t r = 0; r < geometry.runs_per_shard; ++r) {
    const RunShape& run = geometry.runs[r % geometry.runs.size()];
    device->copy_out(shard, addresses + r, 1, run);
    shard += run.total();
  }
}

void StoreCore::copy_load(Unit& unit, Lock& lock) {
  const std::shared_ptr<TaskImpl> task = unit.keep;
  unit.queued_copy = false;  // rows that become ready from here on queue the unit again
  lock.unlock();
  const auto started = Clock::now();
  std::array<std::uint32_t, kCopyBatch> batch;
  std::size_t copied = 0;
  if (task->event != nullptr) device->order_after(*task->event);
  for (std::uint32_t pos = unit.begin; pos < unit.end;) {
    std::size_t n = 0;
    for (; pos < unit.end && n < batch.size(); ++pos) {
      const std::uint32_t row = task->order[pos];
      if (!task->move(row, kRowReady, kRowCopying)) continue;
      if (!task->addresses.empty()) {
        copy_shard_out(unit.slot.data + geometry.shard_offset(task->shards[row]),
                       task->addresses.data() + std::size_t{row} * geometry.runs_per_shard);
      }
      batch[n++] = row;
    }
    if (n == 0) continue;
    const Outcome done = device->flush();
    for (std::size_t i = 0; i < n; ++i) task->finish(batch[i], kRowCopying, done);
    if (done.status == Status::kOk) {
      copied += n;
    } else {
      counters->copy_errors += n;
    }
  }
  if (!task->addresses.empty()) {
    counters->copied_out_bytes += copied * geometry.shard_bytes;
    counters->copy_out_ns +=
        static_cast<std::uint64_t>((Clock::now() - started) / std::chrono::nanoseconds(1));
  } else if (copied != 0) {
    ++counters->prefetched_objects;
  }
  Actions actions;
  lock.lock();
  unref_load(unit, actions);
  lock.unlock();
  perform(actions);
  lock.lock();
}

void StoreCore::loads_lost(TaskImpl& task, Actions& actions) noexcept {
  for (Unit& unit : task.units) {
    if (unit.keep == nullptr || any_open(unit)) continue;
    if (unit.cookie == 0) {  // still in a waiting queue
      if (unit.queue.linked) (task.addresses.empty() ? prefetch_queue_ : load_queue_).remove(&unit);
      actions.released.push_back(std::move(unit.keep));
      continue;
    }
    // Shards that others fetch are no longer waited for; those we read stay quarantined.
    ++unit.refs;
    if (unit.queued_copy && !unit.event_ready && !any_in(unit, kRowReady)) {  // no copy will come
      unit.queued_copy = false;
      --unit.refs;
    }
    for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
      if (task.io[pos] != Io::kWaiting) continue;
      task.io[pos] = Io::kNone;
      --unit.refs;
    }
    unref_load(unit, actions);
  }
}

}  // namespace ucm
