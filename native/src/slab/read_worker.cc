#include "slab/read_worker.h"

#include <cerrno>

#include "slab/scribe.h"

namespace ucm::slab {
namespace {

using posix::Counter;
using posix::Format;
using posix::ScratchPool;
using posix::Verdict;

constexpr auto kRetryPause = std::chrono::milliseconds(5);
constexpr std::uint8_t kMaxTries = 16;

}  // namespace

ReadWorker::ReadWorker(std::shared_ptr<Parts> parts, std::uint32_t root, posix::EngineKind kind,
                       std::uint32_t depth, posix::ReadQueue& queue)
    : Worker(parts->core, *parts->core->roots[root], kind, depth),
      parts_(std::move(parts)),
      queue_(queue),
      // Twice the depth: finished reads keep their slot until verified, while new ones are started.
      slots_(std::size_t{2} * this->depth(), core_->format.header_bytes()),
      paths_(parts_->segment->header().extents) {}

const char* ReadWorker::path_of(std::uint32_t extent) {
  if (paths_[extent].empty()) paths_[extent] = parts_->path_of(extent);
  return paths_[extent].c_str();
}

void ReadWorker::admit(bool may_take) noexcept {
  while (may_take && has_room()) {
    posix::ReadItem item;
    const bool urgent_only = background_ * 2 >= depth() && background_ > 0;
    if (!queue_.pop(item, urgent_only)) return;
    const auto now = Clock::now();
    if (item.deadline <= now) {
      core_->counters.add(Counter::kReadTimeouts);
      item.answer({Status::kTimeout, 0});
      continue;
    }
    Slot& slot = *slots_.take();
    slot.item = std::move(item);
    slot.begun = now;
    slot.found = {};
    slot.foreign = nullptr;
    slot.scratch = nullptr;
    slot.tries = 0;
    if (!slot.item.op.urgent) ++background_;
    core_->counters.add(Counter::kReadsInFlight);
    start(slot);
  }
}

void ReadWorker::start(Slot& slot) noexcept {
  beat(slot.item.op.id);
  if (slot.found.slot == kNone) slot.found = parts_->index.pin(slot.item.op.id);
  if (slot.found.slot == kNone) return end(slot, Status::kMiss, 0);
  Segment& s = *parts_->segment;
  const std::uint32_t e = s.extent_of(slot.found.slot);
  const std::uint32_t root = s.root_of(e);
  const int fd = s.files().fd(root, s.number_of(e), core_->roots[root]->direct());
  if (fd < 0) {
    // Limits of the moment, not the loss of a block: try again until the deadline.
    if (-fd == EMFILE || -fd == ENFILE || -fd == ENOMEM) {
      core_->counters.add(Counter::kFdLimitWaits);
      return park(slot);
    }
    return end(slot, Status::kIoError, -fd);
  }
  slot.failed = 0;
  slot.truncated = false;
  slot.tries = 0;
  posix::Step prototype;
  prototype.kind = IoStep::kRead;
  try {
    prototype.path = path_of(e);
  } catch (...) {
    return end(slot, Status::kIoError, ENOMEM);
  }
  prototype.fd = fd;
  prototype.owner = &slot;
  prototype.iov = slot.iov;
  prototype.offset = s.geometry(slot.found.of_class).shape.slot_offset(s.index_of(slot.found.slot));
  slot.foreign = parts_->index.foreign(slot.found.of_class);
  slot.foreign == nullptr ? start_own(slot, prototype) : start_foreign(slot, prototype);
}

void ReadWorker::park(Slot& slot) noexcept {
  slot.state = State::kParked;
  slot.retry_at = Clock::now() + kRetryPause;
}

void ReadWorker::start_own(Slot& slot, const posix::Step& prototype) noexcept {
  const Format& format = core_->format;
  const Geometry& g = format.geometry();
  const ReadOp& op = slot.item.op;
  slot.state = State::kReading;
  slot.iov[0] = {slot.header, format.header_bytes()};
  slot.iov[1] = {op.into + g.shard_offset(op.begin),
                 g.shard_offset(op.end) - g.shard_offset(op.begin)};
  slot.reads[0] = prototype;
  if (op.begin == 0) {
    slot.reads[0].iov_count = 2;
    slot.pending = 1;
    return begin(slot.reads[0]);
  }
  slot.reads[0].iov_count = 1;
  slot.reads[1] = prototype;
  slot.reads[1].iov = slot.iov + 1;
  slot.reads[1].iov_count = 1;
  slot.reads[1].offset += format.shard_file_offset(op.begin);
  slot.pending = 2;  // before the first may end in place, and the slot with it
  begin(slot.reads[0]);
  begin(slot.reads[1]);
}

void ReadWorker::start_foreign(Slot& slot, const posix::Step& prototype) noexcept {
  const std::uint64_t bytes = slot.foreign->geometry.object_bytes();
  const posix::FileVersion version{slot.item.op.id, parts_->segment->extent_of(slot.found.slot),
                                   slot.found.slot,
                                   static_cast<std::int64_t>(slot.found.generation)};
  ScratchPool::Buffer* buffer = nullptr;
  switch (core_->scratch.claim(version, bytes, slot.item, buffer)) {
    case ScratchPool::Claim::kOwner:
      break;
    case ScratchPool::Claim::kVerified:
      convert(slot, buffer->data, slot.item);
      core_->scratch.let_go(*buffer);
      return end(slot, Status::kOk, 0);
    case ScratchPool::Claim::kJoined:
      return give_back(slot);
    case ScratchPool::Claim::kNoBuffer:
      return park(slot);
    case ScratchPool::Claim::kNoMemory:
      return end(slot, Status::kIoError, ENOMEM);
  }
  core_->counters.add(Counter::kConvertReads);
  slot.scratch = buffer;
  slot.state = State::kReadingWhole;
  slot.iov[0] = {slot.header, kIoAlign};  // headers that convert are no longer
  slot.iov[1] = {buffer->data, bytes};
  slot.reads[0] = prototype;
  slot.reads[0].iov_count = 2;
  slot.pending = 1;
  begin(slot.reads[0]);
}

void ReadWorker::advance(posix::Step* step) noexcept {
  Slot& slot = *static_cast<Slot*>(step->owner);
  beat(slot.item.op.id);
  const int r = step->result;
  if (r > 0) {
    std::size_t n = static_cast<std::size_t>(r);
    n -= n % kIoAlign;  // direct I/O goes on at aligned places only; slots are aligned anyway
    posix::consume(step->iov, step->iov_count, n);
    step->offset += n;
    if (step->iov_count > 0) {
      if (n > 0 || ++slot.tries < kMaxTries) return begin(*step);
      slot.truncated = true;
    }
  } else if (r == 0) {
    slot.truncated = true;
  } else if ((-r == EAGAIN || -r == EINTR) && ++slot.tries < kMaxTries) {
    return begin(*step);
  } else if (slot.failed == 0) {
    slot.failed = -r;
  }
  if (--slot.pending > 0) return;
  if (slot.failed != 0) return end(slot, Status::kIoError, slot.failed);
  if (slot.truncated) return corrupt(slot, "its file is too short");
  verify(slot);
}

void ReadWorker::verify(Slot& slot) noexcept {
  const Format& format = core_->format;
  const ReadOp& op = slot.item.op;
  if (Format::blank(slot.header)) return vanished(slot);
  const posix::ForeignLayout* foreign = nullptr;
  const std::uint64_t bytes = parts_->segment->geometry(slot.found.of_class).shape.slot_bytes;
  const Verdict verdict = format.judge(op.id, slot.header, bytes, foreign);
  const Verdict expected = slot.foreign != nullptr ? Verdict::kConvertible : Verdict::kOurs;
  if (verdict != expected || foreign != slot.foreign) {
    return corrupt(slot, "its header is damaged or belongs to another object");
  }
  if (Format::generation(slot.header) != slot.found.generation) {
    return corrupt(slot, "it is of another generation than its slot");
  }
  const Geometry& g = slot.foreign != nullptr ? slot.foreign->geometry : format.geometry();
  const std::byte* const data = slot.foreign != nullptr ? slot.scratch->data : op.into;
  if (core_->options.verify_checksums) {
    const std::uint32_t begin_shard = slot.foreign != nullptr ? 0 : op.begin;
    const std::uint32_t end_shard = slot.foreign != nullptr ? g.shard_count : op.end;
    if (!Format::tail_sound(g, slot.header)) return corrupt(slot, "its checksum table is damaged");
    if (!Format::shards_sound(g, slot.header, data, begin_shard, end_shard)) {
      return corrupt(slot, "a shard does not match its checksum");
    }
  }
  if (slot.foreign != nullptr) return converted(slot);
  end(slot, Status::kOk, 0);
}

void ReadWorker::converted(Slot& slot) noexcept {
  convert(slot, slot.scratch->data, slot.item);
  for (;;) {
    auto joined = core_->scratch.finish(*slot.scratch);
    if (joined.empty()) break;
    for (posix::ReadItem& item : joined) {
      convert(slot, slot.scratch->data, item);
      answer(item, slot.begun, {Status::kOk, 0});
    }
  }
  slot.scratch = nullptr;
  end(slot, Status::kOk, 0);
}

void ReadWorker::convert(const Slot& slot, const std::byte* object,
                         posix::ReadItem& item) noexcept {
  const auto began = Clock::now();
  slot.foreign->conversion.run(item.op.into, object, item.op.begin, item.op.end);
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began);
  core_->counters.add(Counter::kReadConverted);
  core_->counters.add(Counter::kConvertMicros, static_cast<std::uint64_t>(took.count()));
}

bool ReadWorker::take_out(Slot& slot, const char* why) noexcept {
  try {
    Segment& s = *parts_->segment;
    core_->errors.add("verify", path_of(s.extent_of(slot.found.slot)), 0,
                      "slot " + std::to_string(s.index_of(slot.found.slot)) + ": " + why +
                          "; freed, so that the next dump writes it anew");
  } catch (...) {
  }
  // Only if it is still this very object: it may have been written anew.
  const std::uint32_t group = parts_->index.remove(slot.item.op.id, slot.found.generation);
  if (group == kNone) return false;
  parts_->scribe->page(group);
  return true;
}

void ReadWorker::corrupt(Slot& slot, const char* why) noexcept {
  core_->counters.add(Counter::kReadCorrupt);
  if (take_out(slot, why)) core_->counters.add(Counter::kHealed);
  end(slot, Status::kCorrupt, 0);
}

void ReadWorker::vanished(Slot& slot) noexcept {
  (void)take_out(slot, "it holds no object");
  end(slot, Status::kMiss, 0);
}

void ReadWorker::answer(posix::ReadItem& item, Clock::time_point begun, Outcome outcome) noexcept {
  posix::Counters& counters = core_->counters;
  const ReadOp& op = item.op;
  if (outcome.status == Status::kOk) {
    const auto took = Clock::now() - begun;
    counters.add(Counter::kReads);
    counters.add(Counter::kReadBytes, (op.end - op.begin) * core_->format.geometry().shard_bytes);
    counters.add(Counter::kReadMicros,
                 static_cast<std::uint64_t>(
                     std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
    root_.note_ok(posix::Direction::kRead);
  } else if (outcome.status == Status::kMiss) {
    counters.add(Counter::kReadMisses);
  } else if (outcome.status == Status::kTimeout) {
    counters.add(Counter::kReadTimeouts);
  } else if (outcome.status == Status::kIoError) {
    counters.add(Counter::kReadErrors);
    core_->errors.add("read", root_.path(), outcome.error);
    root_.note_error(posix::Direction::kRead, outcome.error, op.id);
  }
  item.answer(outcome);
  item.sink.reset();
}

void ReadWorker::end(Slot& slot, Status status, int error) noexcept {
  // Who is told that a read has ended finds its slot free to be given up.
  if (slot.found.slot != kNone) parts_->index.unpin(slot.found.slot);
  slot.found = {};
  if (slot.scratch != nullptr) {  // what joined this read shares its failure
    for (posix::ReadItem& item : core_->scratch.fail(*slot.scratch)) {
      answer(item, slot.begun, {status, error});
    }
    slot.scratch = nullptr;
  }
  answer(slot.item, slot.begun, {status, error});
  give_back(slot);
}

void ReadWorker::give_back(Slot& slot) noexcept {
  if (slot.found.slot != kNone) parts_->index.unpin(slot.found.slot);
  slot.found = {};
  core_->counters.sub(Counter::kReadsInFlight);
  if (!slot.item.op.urgent) --background_;
  slot.item.sink.reset();
  slot.state = State::kFree;
  slots_.give_back(slot);
}

void ReadWorker::leak() noexcept {
  for (Slot& slot : slots_) {
    if (slot.state == State::kReadingWhole) core_->scratch.lose(*slot.scratch);
  }
  slots_.leak();
}

std::chrono::milliseconds ReadWorker::tick(Clock::time_point now) noexcept {
  auto due = std::chrono::milliseconds(slots_.used() == 0 ? -1 : 250);
  if (slots_.used() == 0) return due;
  for (Slot& slot : slots_) {
    if (slot.state != State::kParked) continue;
    if (slot.item.deadline <= now) {
      end(slot, Status::kTimeout, 0);
    } else if (slot.retry_at <= now) {
      start(slot);
    }
    if (slot.state == State::kParked) due = kRetryPause;
  }
  return due;
}

}  // namespace ucm::slab
