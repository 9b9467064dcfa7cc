#include "slab/write_worker.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "slab/kill_points.h"
#include "slab/scribe.h"

namespace ucm::slab {
namespace {

using posix::Counter;

constexpr std::uint8_t kMaxTries = 16;
constexpr std::size_t kMinSlots = 32;  // psync writes one by one, and commits several at once
constexpr std::size_t kMaxBatches = 64;
constexpr auto kSlotPatience = std::chrono::seconds(1);
constexpr auto kRetryPause = std::chrono::milliseconds(2);

/// Prepared ahead, on the medium, and written but not committed.
std::size_t slots_for(std::size_t depth) { return std::max(3 * depth, kMinSlots); }

std::size_t batch_count(std::size_t slots, std::uint32_t group_slots) {
  return std::clamp<std::size_t>(slots / group_slots + 2, 4, kMaxBatches);
}

}  // namespace

WriteWorker::WriteWorker(std::shared_ptr<Parts> parts, std::uint32_t root, posix::EngineKind kind,
                         std::uint32_t depth, posix::WriteQueue& queue)
    : Worker(parts->core, *parts->core->roots[root], kind, depth),
      parts_(std::move(parts)),
      root_index_(root),
      queue_(queue),
      slots_(slots_for(this->depth()), core_->format.header_bytes()),
      batches_(batch_count(slots_for(this->depth()), parts_->index.own_shape().group_slots),
               kPage) {
  for (Batch& batch : batches_) {
    batch.is_batch = true;
    batch.waiting.reserve(kMaxGroupSlots);
    batch.written.reserve(kMaxGroupSlots);
    batch.slots.reserve(kMaxGroupSlots);
  }
}

std::size_t WriteWorker::write_depth() const noexcept {
  const bool reads_wait = core_->counters.get(Counter::kReadsInFlight) > 0;
  const std::size_t all = depth();
  return reads_wait ? std::min(all, std::max<std::size_t>(2, all / 4)) : all;
}

bool WriteWorker::has_room() const noexcept {
  return parked_ == nullptr && slots_.any_free() && batches_.any_free() && ahead_ < write_depth();
}

void WriteWorker::refill() noexcept {
  while (!prepared_.empty() && steps_in_flight() < write_depth()) start_data(*prepared_.pop());
}

void WriteWorker::not_ahead(Slot& slot) noexcept {
  if (!slot.ahead) return;
  slot.ahead = false;
  --ahead_;
}

void WriteWorker::drop_prepared() noexcept {
  while (!prepared_.empty()) {
    Slot& slot = *prepared_.pop();
    --slot.batch->open;
    free_slot(slot);
    end(slot, {Status::kClosed, 0});
  }
}

void WriteWorker::admit(bool may_take) noexcept {
  if (Slot* const again = std::exchange(parked_, nullptr)) place(*again);
  while (may_take && has_room()) {
    posix::WriteItem item;
    if (!queue_.pop(item, false)) break;
    const auto now = Clock::now();
    if (item.deadline <= now) {
      core_->counters.add(Counter::kWriteTimeouts);
      item.answer({Status::kTimeout, 0});
      continue;
    }
    begin_write(std::move(item), now);
  }
  settle(may_take);
}

void WriteWorker::begin_write(posix::WriteItem&& item, Clock::time_point now) noexcept {
  beat(item.op.id);
  Slot& slot = *slots_.take();
  slot.item = std::move(item);
  slot.begun = now;
  slot.slot = kNone;
  slot.batch = nullptr;
  slot.tries = 0;
  slot.ahead = true;
  ++ahead_;
  core_->counters.add(Counter::kWritesInFlight);
  place(slot);
}

void WriteWorker::place(Slot& slot) noexcept {
  if (parts_->index.probe(slot.item.op.id) != kNone) {
    core_->counters.add(Counter::kWriteExisting);
    return end(slot, {Status::kOk, 0});
  }
  Batch* batch = batch_with_room();
  if (batch == nullptr) {
    int error = 0;
    batch = open_batch(error);
    if (batch == nullptr && error != 0) return fail(slot, "take a slot in", error);
    if (batch == nullptr) {
      const auto now = Clock::now();
      if (now < slot.item.deadline && now - slot.begun < kSlotPatience) {
        parked_ = &slot;
        return;
      }
      parts_->no_slot.fetch_add(1, std::memory_order_relaxed);
      core_->counters.add(Counter::kWriteRefused);
      return end(slot, {Status::kRejected, ENOBUFS});
    }
  }
  const BlockId& id = slot.item.op.id;
  slot.batch = batch;
  slot.slot = batch->owned.free.back();
  batch->owned.free.pop_back();
  const std::uint64_t generation = parts_->allocator.begin(slot.slot, id);
  (void)core_->format.encode(id, slot.item.op.from, nullptr, slot.header);
  parts_->segment->meta(slot.slot).object_check.store(posix::Format::stamp(slot.header, generation),
                                                      std::memory_order_relaxed);
  ++batch->open;
  if (batch->state == State::kInvalidating) {
    batch->waiting.push_back(&slot);
  } else {
    Slot* at = &slot;
    prepared_.push(std::move(at));
    refill();
  }
}

WriteWorker::Batch* WriteWorker::batch_with_room() noexcept {
  for (Batch& b : batches_) {
    if ((b.state == State::kFilling || b.state == State::kInvalidating) && !b.owned.free.empty()) {
      return &b;
    }
  }
  return nullptr;
}

WriteWorker::Batch* WriteWorker::open_batch(int& error) noexcept {
  Batch* const batch = batches_.take();
  Batch& b = *batch;
  Segment& s = *parts_->segment;
  const auto wanted =
      static_cast<std::uint32_t>(std::min<std::size_t>(queue_.size() + 1, kMaxGroupSlots));
  if (!parts_->allocator.take(root_index_, wanted, b.owned, error)) {
    batches_.give_back(b);
    return nullptr;
  }
  const std::uint32_t e = s.extent_of_group(b.owned.group);
  try {
    b.path = parts_->path_of(e);
  } catch (...) {
    error = ENOMEM;
  }
  b.fd = s.files().fd(root_index_, s.number_of(e), root_.direct());
  if (b.fd < 0) error = -b.fd;
  // Data written into a file that was deleted or mounted over would be found by nobody.
  if (error == 0) error = s.files().still_there(root_index_, s.number_of(e));
  if (error == ENOENT) {
    parts_->gone.fetch_or(1u << root_index_);
    for (const auto d : {posix::Direction::kRead, posix::Direction::kWrite}) {
      root_.take_out(d, ENOENT, "a slab file is gone from its directory");
    }
  }
  b.waiting.clear();
  b.written.clear();
  b.slots.clear();
  b.open = 0;
  b.state = State::kFilling;
  if (error != 0) {
    release(b);
    return nullptr;
  }
  if (b.owned.page_first) start_page(b, State::kInvalidating);
  if (b.state == State::kUnused) {  // it failed in place
    error = EIO;
    return nullptr;
  }
  return batch;
}

void WriteWorker::start_page(Batch& b, State state) noexcept {
  Segment& s = *parts_->segment;
  b.state = state;
  b.tries = 0;
  // Before the slots are looked at: what changes later makes the page dirty again.
  s.group(b.owned.group).dirty.store(0);
  compose_page(s, b.owned.group, b.slots, b.header);
  b.iov[0] = {b.header, kPage};
  b.step = posix::Step{};
  b.step.kind = IoStep::kWrite;
  b.step.path = b.path.c_str();
  b.step.fd = b.fd;
  b.step.iov = b.iov;
  b.step.iov_count = 1;
  b.step.offset = parts_->index.own_shape().group_offset(b.owned.group % s.header().group_stride);
  b.step.owner = static_cast<StepOwner*>(&b);
  begin(b.step);
}

void WriteWorker::start_data(Slot& slot) noexcept {
  Batch& b = *slot.batch;
  Segment& s = *parts_->segment;
  not_ahead(slot);
  if (slot.item.deadline <= Clock::now()) {
    --b.open;
    free_slot(slot);
    core_->counters.add(Counter::kWriteTimeouts);
    return end(slot, {Status::kTimeout, 0});
  }
  slot.iov[0] = {slot.header, core_->format.header_bytes()};
  slot.iov[1] = {const_cast<std::byte*>(slot.item.op.from),
                 core_->format.geometry().object_bytes()};
  slot.step = posix::Step{};
  slot.step.kind = IoStep::kWrite;
  slot.step.path = b.path.c_str();
  slot.step.fd = b.fd;
  slot.step.iov = slot.iov;
  slot.step.iov_count = 2;
  slot.step.offset = parts_->index.own_shape().slot_offset(s.index_of(slot.slot));
  slot.step.owner = static_cast<StepOwner*>(&slot);
  begin(slot.step);
}

void WriteWorker::start_sync(Batch& b, State state) noexcept {
  b.state = state;
  b.step = posix::Step{};
  b.step.kind = IoStep::kSync;
  b.step.path = b.path.c_str();
  b.step.fd = b.fd;
  b.step.owner = static_cast<StepOwner*>(&b);
  begin(b.step);
}

void WriteWorker::advance(posix::Step* step) noexcept {
  auto* const owner = static_cast<StepOwner*>(step->owner);
  if (owner->is_batch) return batch_advanced(*static_cast<Batch*>(owner));
  Slot& slot = *static_cast<Slot*>(owner);
  beat(slot.item.op.id);
  const int r = step->result;
  if (r < 0) {
    if ((-r == EAGAIN || -r == EINTR) && ++slot.tries < kMaxTries) return begin(*step);
    --slot.batch->open;
    free_slot(slot);
    return fail(slot, "write", -r);
  }
  std::size_t n = static_cast<std::size_t>(r);
  if (root_.direct()) n -= n % kIoAlign;
  posix::consume(step->iov, step->iov_count, n);
  step->offset += n;
  if (step->iov_count > 0) {
    // Short. The next attempt tells why; no progress for long is an error itself.
    if (n > 0) slot.tries = 0;
    if (++slot.tries < kMaxTries) return begin(*step);
    --slot.batch->open;
    free_slot(slot);
    return fail(slot, "write", EIO);
  }
  data_written(slot);
}

void WriteWorker::data_written(Slot& slot) noexcept {
  Batch& b = *slot.batch;
  --b.open;
  b.written.push_back(&slot);
  b.slots.push_back(slot.slot);
  parts_->segment->point(point::kDataWritten);
}

void WriteWorker::batch_advanced(Batch& b) noexcept {
  const int r = b.step.result;
  const bool page = b.state == State::kInvalidating || b.state == State::kCommitting;
  const bool whole = page ? r == static_cast<int>(kPage) : r >= 0;
  if (!whole) {
    const bool transient = r >= 0 || -r == EAGAIN || -r == EINTR;
    if (transient && ++b.tries < kMaxTries) return begin(b.step);
    return fail_batch(b, page ? "write slot heads" : "fdatasync", r < 0 ? -r : EIO);
  }
  switch (b.state) {
    case State::kInvalidating: {
      parts_->page_writes.fetch_add(1, std::memory_order_relaxed);
      parts_->segment->point(point::kInvalidated);
      b.state = State::kFilling;
      std::vector<Slot*> ready;
      ready.swap(b.waiting);
      for (Slot* slot : ready) prepared_.push(std::move(slot));
      return refill();
    }
    case State::kFlushing:
      return start_page(b, State::kCommitting);
    case State::kCommitting:
      parts_->page_writes.fetch_add(1, std::memory_order_relaxed);
      return core_->options.fsync ? start_sync(b, State::kSealing) : publish(b);
    case State::kSealing:
      return publish(b);
    case State::kFilling:
    case State::kUnused:
      return;
  }
}

void WriteWorker::settle(bool may_take) noexcept {
  for (Batch& b : batches_) {
    if (b.state != State::kFilling || b.open > 0) continue;
    if (!b.written.empty()) {
      core_->options.fsync ? start_sync(b, State::kFlushing) : start_page(b, State::kCommitting);
    } else if (!may_take || b.owned.free.empty() || !work_waits()) {
      release(b);
    }
  }
}

void WriteWorker::publish(Batch& b) noexcept {
  parts_->segment->point(point::kHeaderWritten);
  parts_->commits.fetch_add(1, std::memory_order_relaxed);
  Segment& s = *parts_->segment;
  std::vector<Slot*> done;
  done.swap(b.written);
  b.slots.clear();
  const std::uint64_t bytes = core_->format.file_bytes();
  std::vector<Slot*> busy;
  for (Slot* slot : done) {
    switch (parts_->index.link(slot->slot)) {
      case Index::Linked::kLinked: {
        const auto took = Clock::now() - slot->begun;
        core_->counters.add(Counter::kWrites);
        core_->counters.add(Counter::kWriteBytes, bytes);
        core_->counters.add(
            Counter::kWriteMicros,
            static_cast<std::uint64_t>(
                std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
        break;
      }
      case Index::Linked::kExisting:
        // Another process was quicker. The page says that this slot holds it too: once more.
        s.group(b.owned.group).dirty.store(1);
        core_->counters.add(Counter::kWriteExisting);
        break;
      case Index::Linked::kBusy:
        s.group(b.owned.group).dirty.store(1);
        busy.push_back(slot);
        break;
    }
  }
  parts_->segment->point(point::kCommitted);
  b.state = State::kFilling;
  if (b.owned.free.empty() || !work_waits()) release(b);
  for (Slot* slot : done) {
    if (std::find(busy.begin(), busy.end(), slot) != busy.end()) {
      fail(*slot, "lock the index for", EBUSY);
    } else {
      end(*slot, {Status::kOk, 0});
    }
  }
}

void WriteWorker::fail_batch(Batch& b, const char* operation, int error) noexcept {
  // The page on the medium may say anything now; nobody may write data before it is right again.
  std::vector<Slot*> members;
  members.swap(b.written);
  b.open -= b.waiting.size();
  members.insert(members.end(), b.waiting.begin(), b.waiting.end());
  b.waiting.clear();
  b.slots.clear();
  for (Slot* slot : members) free_slot(*slot);
  parts_->segment->group(b.owned.group).dirty.store(1);
  release(b);
  for (Slot* slot : members) fail(*slot, operation, error);
  if (members.empty()) {
    core_->errors.add(operation, root_.path(), error);
    root_.note_error(posix::Direction::kWrite, error, BlockId{});
  }
}

void WriteWorker::release(Batch& b) noexcept {
  b.state = State::kUnused;
  if (parts_->allocator.give_back(b.owned.group)) parts_->scribe->page(b.owned.group);
  batches_.give_back(b);
}

void WriteWorker::free_slot(Slot& slot) noexcept {
  set_phase(parts_->segment->meta(slot.slot), Phase::kFree);
  slot.batch->owned.free.push_back(slot.slot);
}

void WriteWorker::fail(Slot& slot, const char* operation, int error) noexcept {
  core_->counters.add(Counter::kWriteErrors);
  if (error == ENOSPC || error == EDQUOT) core_->counters.add(Counter::kWriteNoSpace);
  core_->errors.add(operation, slot.batch != nullptr ? slot.batch->path : root_.path(), error);
  root_.note_error(posix::Direction::kWrite, error, slot.item.op.id);
  end(slot, {Status::kIoError, error});
}

void WriteWorker::end(Slot& slot, Outcome outcome) noexcept {
  if (outcome.status == Status::kOk) root_.note_ok(posix::Direction::kWrite);
  core_->counters.sub(Counter::kWritesInFlight);
  not_ahead(slot);
  slot.item.answer(outcome);
  slot.item.sink.reset();
  slots_.give_back(slot);
}

void WriteWorker::leak() noexcept {
  slots_.leak();
  batches_.leak();
}

std::chrono::milliseconds WriteWorker::tick(Clock::time_point) noexcept {
  if (parked_ != nullptr) return kRetryPause;
  // Held back by reads: look again soon, nobody else wakes us when they are through.
  const bool held_back =
      write_depth() < depth() && (!prepared_.empty() || (slots_.any_free() && work_waits()));
  return std::chrono::milliseconds(held_back ? 1 : -1);
}

}  // namespace ucm::slab
