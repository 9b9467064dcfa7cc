// Dumps: object -> room -> shards copied in, any order -> published -> written by the stage below.
#include <algorithm>
#include <array>

#include "store/core.h"

namespace ucm {
namespace {

using State = DumpObject::State;
using Shard = DumpObject::Shard;

constexpr std::size_t kCopyBatch = 16;  // rows between two flushes of the device
/// How long after a write's deadline the stage may still answer before tasks stop waiting for it.
constexpr std::chrono::milliseconds kWriteGrace{1000};

}  // namespace

DumpObject* StoreCore::find(const BlockId& id) const {
  const auto it = objects_.find(id);
  return it == objects_.end() ? nullptr : it->second;
}

DumpList* StoreCore::list_of(State state) noexcept {
  switch (state) {
    case State::kWaiting:
      return &waiting_;
    case State::kOpen:
      return &open_;
    case State::kWriting:
      return &writing_;
    case State::kRetry:
      return &retry_;
    case State::kOverdue:
      return &overdue_;
    case State::kFree:
    case State::kDoomed:
      break;
  }
  return nullptr;
}

void StoreCore::enter(DumpObject& object, State state) noexcept {
  if (object.link.linked) list_of(object.state)->remove(&object);
  object.state = state;
  if (DumpList* const list = list_of(state)) list->push_back(&object);
}

DumpObject* StoreCore::new_object(const BlockId& id) {
  DumpObject* object = nullptr;
  if (!pool_free_.empty()) {
    object = pool_free_.back();
    pool_free_.pop_back();
  } else {
    object = &pool_.emplace_back();
    object->index = static_cast<std::uint32_t>(pool_.size() - 1);
    object->shards.resize(geometry.shard_count);
  }
  object->id = id;
  object->explicit_mode = object->committed = object->published = object->lent = false;
  object->in = object->copying = object->tries = 0;
  object->slot = {};
  std::fill(object->shards.begin(), object->shards.end(), Shard::kEmpty);
  objects_.emplace(id, object);
  return object;
}

DumpClaim StoreCore::open_object(DumpObject& object) {
  scratch_have_.assign(geometry.shard_count, 0);
  const DumpClaim claim = tier->claim_dump(object.id, object.slot, scratch_have_);
  if (claim == DumpClaim::kNoRoom || claim == DumpClaim::kBusy) return claim;
  if (claim == DumpClaim::kPresent) {
    std::fill(object.shards.begin(), object.shards.end(), Shard::kIn);
    object.in = geometry.shard_count;
    object.committed = object.published = true;
  } else {
    for (std::uint32_t s = 0; s < geometry.shard_count; ++s) {
      if (scratch_have_[s] == 0) continue;
      object.shards[s] = Shard::kIn;
      ++object.in;
    }
  }
  object.activity = Clock::now();
  enter(object, State::kOpen);
  arm(object.activity + options.open_age);
  return claim;
}

void StoreCore::queue_open_units(DumpObject& object) {
  for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
    if (u->task->kind() != TaskKind::kDump || !u->event_ready || u->queue.linked) continue;
    copy_dumps_.push_back(u);
    wake_copier();
  }
}

void StoreCore::attach(Unit& unit, DumpObject& object) {
  unit.object = &object;
  unit.scan = unit.begin;
  object.units.push_back(&unit);
  object.activity = Clock::now();
  if (object.state == State::kOpen) enter(object, State::kOpen);  // keeps open_ ordered by activity
}

void StoreCore::submit_dump(const std::shared_ptr<TaskImpl>& task) {
  Actions actions;
  const bool event_ready = task->event == nullptr || task->event->fired();
  {
    Lock lock(mu_);
    if (closing_) throw ClosedError("the store was closed: open a new one");
    counters->tasks[1].fetch_add(1, std::memory_order_relaxed);
    for (Unit& unit : task->units) {
      unit.task = task.get();
      unit.event_ready = event_ready;
      DumpObject* object = find(unit.id);
      if (object == nullptr) {
        object = new_object(unit.id);
        const DumpClaim claim = waiting_.empty() ? open_object(*object) : DumpClaim::kNoRoom;
        if (claim == DumpClaim::kNoRoom || claim == DumpClaim::kBusy) {
          if (waiting_.size() >= options.waiting_depth) {
            free_object(*object);
            for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
              task->finish_open(task->order[pos], {Status::kRejected, 0});
            }
            continue;
          }
          enter(*object, State::kWaiting);
        }
      }
      unit.keep = task;
      attach(unit, *object);
      if (task->mode == CommitMode::kExplicit) object->explicit_mode = true;
      if (object->sent()) {
        for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
          task->finish_open(task->order[pos], {Status::kOk, 0});
        }
      } else if (object->state == State::kOpen) {
        if (complete(*object)) {
          begin_write(*object, actions);
        } else if (event_ready) {
          copy_dumps_.push_back(&unit);
          wake_copier();
        }
      }
    }
    if (!task->done()) {
      active_.push_back(task);
      arm(task->deadline());
      if (!event_ready) event_tasks_.push_back(task);
    }
  }
  if (!event_ready) watch_event(task);
  perform(actions);
}

std::vector<std::uint32_t> StoreCore::submit_commit(const std::shared_ptr<TaskImpl>& task) {
  Actions actions;
  std::vector<std::uint32_t> not_open;
  {
    Lock lock(mu_);
    if (closing_) throw ClosedError("the store was closed: open a new one");
    counters->tasks[2].fetch_add(1, std::memory_order_relaxed);
    for (Unit& unit : task->units) {
      unit.task = task.get();
      const std::uint32_t row = task->order[unit.begin];
      DumpObject* const object = find(unit.id);
      if (object == nullptr) {
        not_open.push_back(row);
        continue;
      }
      unit.keep = task;
      attach(unit, *object);
      object->committed = true;
      if (object->sent()) {
        task->finish_open(row, {Status::kOk, 0});
      } else if (complete(*object)) {
        begin_write(*object, actions);
      }
    }
    if (!task->done()) {
      active_.push_back(task);
      arm(task->deadline());
    }
  }
  perform(actions);
  return not_open;
}

bool StoreCore::complete(const DumpObject& object) const noexcept {
  return object.state == State::kOpen && object.in == geometry.shard_count &&
         (!object.explicit_mode || object.committed);
}

void StoreCore::begin_write(DumpObject& object, Actions& actions) {
  // Rows nobody copied (their shard was in already): the source is free.
  for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
    for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
      u->task->finish_open(u->task->order[pos], {Status::kOk, 0});
    }
  }
  const bool publish = !object.published;
  object.published = true;
  send_write(object, publish, actions);
}

void StoreCore::send_write(DumpObject& object, bool publish, Actions& actions) {
  object.due = Clock::now() + options.timeout + kWriteGrace;
  enter(object, State::kWriting);
  arm(object.due);
  const std::uint64_t cookie = (static_cast<std::uint64_t>(object.generation) << 32) | object.index;
  actions.writes.push_back({{object.id, object.slot.data, cookie}, object.slot, publish});
}

void StoreCore::on_written(std::uint64_t cookie, Outcome outcome) noexcept {
  Actions actions;
  {
    Lock lock(mu_);
    const auto index = static_cast<std::uint32_t>(cookie);
    if (index >= pool_.size()) return;
    DumpObject& object = pool_[index];
    if (object.generation != (cookie >> 32)) return;
    if (object.state != State::kWriting && object.state != State::kOverdue) return;
    const bool ok = outcome.status == Status::kOk;
    const bool final = outcome.status == Status::kClosed || outcome.status == Status::kCancelled ||
                       (outcome.status == Status::kRejected && outcome.error == kOutOfService);
    if (ok) ++counters->written_objects;
    if (ok || object.state == State::kOverdue) {
      finish_object(object, outcome, actions);
    } else if (object.tries < options.write_retries && !closing_ && !final) {
      ++counters->write_retries;
      object.due = Clock::now() + options.retry_delay * (1U << std::min(object.tries, 10U));
      ++object.tries;
      enter(object, State::kRetry);
      arm(object.due);
    } else {
      ++counters->write_failures;
      finish_object(object, outcome, actions);
    }
  }
  perform(actions);
}

void StoreCore::retry_writes(Clock::time_point now, Actions& actions) {
  for (DumpObject* object = retry_.front(); object != nullptr;) {
    DumpObject* const next = retry_.after(object);
    if (object->due <= now) send_write(*object, false, actions);
    object = next;
  }
}

void StoreCore::give_up_overdue(Clock::time_point now, Actions& actions) {
  while (DumpObject* const object = writing_.front()) {
    if (object->due > now) break;
    // The stage may still read the buffer: the slot stays pinned, but nobody waits any more and a
    // new dump of the id may start.
    ++counters->writes_overdue;
    ++counters->write_failures;
    enter(*object, State::kOverdue);
    objects_.erase(object->id);
    for (Unit* u = object->units.front(); u != nullptr; u = object->units.after(u)) {
      for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
        u->task->finish_durable(u->task->order[pos], {Status::kTimeout, 0});
      }
    }
    detach_units(*object, actions);
  }
}

void StoreCore::expire_open(Clock::time_point now, Actions& actions) {
  while (DumpObject* const object = open_.front()) {
    if (object->activity + options.open_age > now) break;
    ++counters->expired_open_objects;
    drop_object(*object, {Status::kTimeout, 0}, actions);
  }
}

void StoreCore::finish_object(DumpObject& object, Outcome outcome, Actions& actions) noexcept {
  for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
    for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
      u->task->finish_durable(u->task->order[pos], outcome);
    }
  }
  detach_units(object, actions);
  free_object(object);
}

void StoreCore::detach_units(DumpObject& object, Actions& actions) noexcept {
  while (Unit* const unit = object.units.pop_front()) {
    if (unit->queue.linked) copy_dumps_.remove(unit);
    unit->object = nullptr;
    actions.released.push_back(std::move(unit->keep));
  }
}

void StoreCore::drop_object(DumpObject& object, Outcome outcome, Actions& actions) noexcept {
  ++counters->discarded_objects;
  for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
    for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
      const std::uint32_t row = u->task->order[pos];
      u->task->finish_durable(row, outcome);
      u->task->finish_open(row, outcome);
    }
  }
  detach_units(object, actions);
  if (object.copying == 0) {
    free_object(object);
    return;
  }
  // Copiers write into the slot right now: the last of them frees it.
  enter(object, State::kDoomed);
  objects_.erase(object.id);
}

void StoreCore::free_object(DumpObject& object) noexcept {
  if (object.slot.data != nullptr) {
    object.published ? tier->release(object.slot) : tier->abort_dump(object.slot);
  }
  enter(object, State::kFree);
  const auto it = objects_.find(object.id);
  if (it != objects_.end() && it->second == &object) objects_.erase(it);
  object.slot = {};
  if (++object.generation == 0) object.generation = 1;
  pool_free_.push_back(&object);
  want_pump();
  if (idle_locked()) idle_cv_.notify_all();
}

void StoreCore::copy_shard_in(std::byte* shard, const std::uint64_t* addresses) noexcept {
  if (geometry.runs.size() == 1) {
    return device->copy_in(shard, addresses, geometry.runs_per_shard, geometry.runs[0]);
  }
  for (std::uint32_t r = 0; r < geometry.runs_per_shard; ++r) {
    const RunShape& run = geometry.runs[r % geometry.runs.size()];
    device->copy_in(shard, addresses + r, 1, run);
    shard += run.total();
  }
}

void StoreCore::copy_dump(Unit& unit, Lock& lock) {
  const std::shared_ptr<TaskImpl> task = unit.keep;
  DumpObject* const object = unit.object;
  while (unit.object == object && object->state == State::kOpen) {
    std::array<std::uint32_t, kCopyBatch> batch;
    std::size_t n = 0;
    for (; unit.scan < unit.end && n < batch.size(); ++unit.scan) {
      const std::uint32_t row = task->order[unit.scan];
      Shard& shard = object->shards[task->shards[row]];
      if (shard != Shard::kEmpty) {  // in, or certain to be: this source is not needed
        task->finish_open(row, {Status::kOk, 0});
      } else if (task->move(row, kRowOpen, kRowCopying)) {
        shard = Shard::kCopying;
        batch[n++] = row;
      }
    }
    if (n == 0) return;
    object->copying += static_cast<std::uint32_t>(n);
    std::byte* const data = object->slot.data;
    lock.unlock();
    const auto started = Clock::now();
    Outcome done{Status::kOk, 0};
    if (task->event != nullptr) {
      device->order_after(*task->event);
    } else if (options.synchronize_dumps) {
      done = device->synchronize();
    }
    for (std::size_t i = 0; i < n && done.status == Status::kOk; ++i) {
      copy_shard_in(data + geometry.shard_offset(task->shards[batch[i]]),
                    task->addresses.data() + std::size_t{batch[i]} * geometry.runs_per_shard);
    }
    const Outcome flushed = device->flush();
    if (done.status == Status::kOk) done = flushed;
    const bool ok = done.status == Status::kOk;
    (ok ? counters->copied_in_bytes : counters->copy_errors) += ok ? n * geometry.shard_bytes : n;
    counters->copy_in_ns +=
        static_cast<std::uint64_t>((Clock::now() - started) / std::chrono::nanoseconds(1));
    Actions actions;
    lock.lock();
    object->copying -= static_cast<std::uint32_t>(n);
    if (ok) object->in += static_cast<std::uint32_t>(n);
    for (std::size_t i = 0; i < n; ++i) {
      object->shards[task->shards[batch[i]]] = ok ? Shard::kIn : Shard::kEmpty;
    }
    if (object->state == State::kDoomed) {
      if (object->copying == 0) free_object(*object);
    } else if (!ok) {
      drop_object(*object, done, actions);  // a shard lost its source: it can never be whole
    } else if (complete(*object)) {
      begin_write(*object, actions);
    }
    lock.unlock();
    perform(actions);
    // Only now: "done" says that the source is free and that the stage below has the object.
    for (std::size_t i = 0; i < n; ++i) task->finish(batch[i], kRowCopying, done);
    lock.lock();
  }
}

void StoreCore::mark_events() noexcept {
  event_fired_ = false;
  std::erase_if(event_tasks_, [&](const std::shared_ptr<TaskImpl>& task) {
    if (!task->event->fired()) return task->done();  // given up
    for (Unit& unit : task->units) {
      unit.event_ready = true;
      if (task->kind() == TaskKind::kLoad) {
        if (unit.queued_copy && !unit.queue.linked) {
          copy_loads_.push_back(&unit);
          wake_copier();
        }
        continue;
      }
      if (unit.object == nullptr || unit.object->state != State::kOpen || unit.queue.linked)
        continue;
      copy_dumps_.push_back(&unit);
      wake_copier();
    }
    return true;
  });
  if (event_tasks_.empty()) polled_events_ = 0;
}

/// Rows of `task` were given up. An object that thereby lost its only source of a shard can never
/// be completed by what was submitted: it is discarded at once instead of holding room.
void StoreCore::dumps_lost(TaskImpl& task, Status why, Actions& actions) noexcept {
  const auto covered = [&](const DumpObject& object, std::uint32_t shard) {
    for (const Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
      if (u->task->kind() != TaskKind::kDump) continue;
      for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
        const std::uint32_t row = u->task->order[pos];
        if (u->task->shards[row] == shard && u->task->raw(row) == kRowOpen) return true;
      }
    }
    return false;
  };
  for (Unit& unit : task.units) {
    DumpObject* const object = unit.object;
    if (object == nullptr || object->sent()) continue;
    for (std::uint32_t pos = unit.begin; pos < unit.end; ++pos) {
      const std::uint32_t row = task.order[pos];
      const std::uint8_t raw = task.raw(row);
      if (raw == kRowOpen || raw == kRowCopying || raw == static_cast<std::uint8_t>(Status::kOk)) {
        continue;
      }
      if (task.kind() == TaskKind::kDump && (object->shards[task.shards[row]] != Shard::kEmpty ||
                                             covered(*object, task.shards[row]))) {
        continue;
      }
      drop_object(*object, {why, 0}, actions);
      break;
    }
  }
}

Lent StoreCore::lend(const BlockId& id) {
  const Lock lock(mu_);
  if (closing_) throw ClosedError("the store was closed: open a new one");
  if (find(id) != nullptr || !waiting_.empty()) return {};
  DumpObject* const object = new_object(id);
  const DumpClaim claim = open_object(*object);
  if (claim != DumpClaim::kFill || object->in != 0) {
    free_object(*object);
    return {};
  }
  // From here on it is an object into which somebody copies all shards at once.
  std::fill(object->shards.begin(), object->shards.end(), Shard::kCopying);
  object->explicit_mode = object->lent = true;
  object->copying = 1;
  ++lent_;
  const std::uint64_t handle =
      (static_cast<std::uint64_t>(object->generation) << 32) | object->index;
  return {object->slot.data, handle};
}

bool StoreCore::end_loan(std::uint64_t handle, bool filled) noexcept {
  Actions actions;
  bool whole = false;
  {
    const Lock lock(mu_);
    const auto index = static_cast<std::uint32_t>(handle);
    if (index >= pool_.size()) return false;
    DumpObject& object = pool_[index];
    if (object.generation != (handle >> 32) || !object.lent) return false;
    object.lent = false;
    --object.copying;
    --lent_;
    if (object.state == State::kDoomed) {
      if (object.copying == 0) free_object(object);
    } else if (filled) {
      std::fill(object.shards.begin(), object.shards.end(), Shard::kIn);
      object.in = geometry.shard_count;
      whole = true;
    } else {
      drop_object(object, {Status::kCancelled, 0}, actions);
    }
  }
  perform(actions);
  return whole;
}

void StoreCore::discard(std::span<const BlockId> ids) {
  Actions actions;
  {
    Lock lock(mu_);
    for (const BlockId& id : ids) {
      DumpObject* const object = find(id);
      if (object == nullptr || object->sent()) continue;
      drop_object(*object, {Status::kCancelled, 0}, actions);
    }
  }
  perform(actions);
}

}  // namespace ucm
