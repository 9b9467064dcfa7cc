// An object that is being dumped: found or made, given room, given up, freed; its buffer lent.
#include <algorithm>

#include "store/core.h"

namespace ucm {
namespace {

using State = DumpObject::State;
using Shard = DumpObject::Shard;

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

void StoreCore::detach_units(DumpObject& object, Actions& actions) noexcept {
  while (Unit* const unit = object.units.pop_front()) {
    if (unit->queue.linked) copy_dumps_.remove(unit);
    unit->object = nullptr;
    actions.released.push_back(std::move(unit->keep));
  }
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

void StoreCore::expire_open(Clock::time_point now, Actions& actions) {
  while (DumpObject* const object = open_.front()) {
    if (object->activity + options.open_age > now) break;
    ++counters->expired_open_objects;
    drop_object(*object, {Status::kTimeout, 0}, actions);
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
