// Dumps: object -> room -> shards copied in, any order -> published -> written by the stage below.
#include <array>

#include "store/core.h"

namespace ucm {
namespace {

using State = DumpObject::State;
using Shard = DumpObject::Shard;

constexpr std::size_t kCopyBatch = 16;  // rows between two flushes of the device

}  // namespace

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

}  // namespace ucm
