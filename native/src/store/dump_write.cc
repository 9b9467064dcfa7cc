// What the stage below owes for a whole object: its answer, tries again, answers that do not come.
#include <algorithm>

#include "store/core.h"

namespace ucm {
namespace {

using State = DumpObject::State;

/// How long after a write's deadline the stage may still answer before tasks stop waiting for it.
constexpr std::chrono::milliseconds kWriteGrace{1000};

}  // namespace

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

void StoreCore::finish_object(DumpObject& object, Outcome outcome, Actions& actions) noexcept {
  for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
    for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
      u->task->finish_durable(u->task->order[pos], outcome);
    }
  }
  detach_units(object, actions);
  free_object(object);
}

}  // namespace ucm
