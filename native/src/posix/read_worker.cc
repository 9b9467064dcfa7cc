#include "posix/read_worker.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>

#include "chaos/hooks.h"
#include "posix/housekeeper.h"

namespace ucm::posix {
namespace {

constexpr auto kRetryPause = std::chrono::milliseconds(5);
constexpr std::uint8_t kMaxTries = 16;

}  // namespace

ReadWorker::ReadWorker(std::shared_ptr<Core> core, Root& root, EngineKind kind, std::uint32_t depth,
                       ReadQueue& queue)
    : Worker(std::move(core), root, kind, depth),
      queue_(queue),
      // Three times the depth: opened ahead, on the medium, read and not verified yet.
      slots_(std::size_t{3} * this->depth(), core_->format.packed_header_bytes()) {}

bool ReadWorker::has_room() const noexcept { return slots_.any_free() && ahead_ < depth(); }

void ReadWorker::refill() noexcept {
  while (medium_has_room()) {
    Slot* slot = opened_[0].pop();
    if (slot == nullptr) slot = opened_[1].pop();
    if (slot == nullptr) return;
    // Among objects of another layout the shards would be read in vain.
    start_reads(*slot, slot->header_only || expect_foreign_);
  }
}

void ReadWorker::admit(bool may_take) noexcept {
  while (may_take && has_room()) {
    ReadItem item;
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
    slot.path = ObjectPath(slot.item.op.id);
    slot.begun = now;
    slot.fd = -1;
    slot.tries = 0;
    slot.told = false;
    slot.foreign = nullptr;
    slot.scratch = nullptr;
    slot.packed = false;
    slot.ahead = true;
    ++ahead_;
    if (!slot.item.op.urgent) ++background_;
    core_->counters.add(Counter::kReadsInFlight);
    start_open(slot);
  }
}

void ReadWorker::start_open(Slot& slot) noexcept {
  beat(slot.item.op.id);
  slot.dir = root_.ns_dir();
  if (!slot.dir && root_.revalidate()) slot.dir = root_.ns_dir();
  if (!slot.dir) return end(slot, Status::kMiss, ENOENT);
  slot.state = State::kOpening;
  Step& step = slot.open;
  step = Step{};
  step.kind = IoStep::kOpenRead;
  step.dirfd = slot.dir->get();
  step.path = slot.path.c_str();
  // O_NONBLOCK: a FIFO in place of the file must not hold the thread; regular files ignore it.
  step.flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (root_.direct() ? O_DIRECT : 0);
  step.owner = &slot;
  begin(step);
}

void ReadWorker::advance(Step* step) noexcept {
  Slot& slot = *static_cast<Slot*>(step->owner);
  if (step == &slot.open) {
    opened(slot);
  } else {
    transferred(slot, *step);
  }
}

void ReadWorker::opened(Slot& slot) noexcept {
  const int r = slot.open.result;
  if (slot.told) {  // answered long ago; the open has come back at last
    if (r >= 0) slot.fd = r;
    return end(slot, Status::kTimeout, ETIMEDOUT);
  }
  if (r < 0) {
    switch (-r) {
      case ENOENT:
      case ENOTDIR:
        if (slot.tries == 0 && root_.revalidate()) {
          ++slot.tries;
          return start_open(slot);
        }
        return end(slot, Status::kMiss, 0);
      case EMFILE:
      case ENFILE:
      case ENOMEM:
      case EAGAIN:
      case EINTR:
        // Limits of the moment, not the loss of a block: try again until the deadline.
        core_->counters.add(Counter::kFdLimitWaits);
        if (slot.tries == 0) core_->errors.add("open", root_.full_path(slot.path.c_str()), -r);
        slot.tries = 1;
        slot.state = State::kParked;
        slot.retry_at = Clock::now() + kRetryPause;
        return;
      default:
        return is_other_than_file(slot) ? not_regular(slot) : end(slot, Status::kIoError, -r);
    }
  }
  slot.fd = r;
  struct stat st {};
  if (fstat(slot.fd, &st) < 0) return end(slot, Status::kIoError, errno);
  slot.device = st.st_dev;
  slot.inode = st.st_ino;
  slot.mtime_ns = std::int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  if (!S_ISREG(st.st_mode)) return not_regular(slot);
  slot.file_bytes = static_cast<std::uint64_t>(st.st_size);
  const Verdict by_size = core_->format.judge_size(slot.file_bytes);
  const bool likely = by_size == Verdict::kOurs || by_size == Verdict::kPacked;
  if (!likely && !judge_odd_size(slot, slot.file_bytes)) return;
  core_->housekeeper->seen(slot.item.op.id, st.st_atim);
  if (slot.foreign != nullptr) return start_conversion(slot);
  // Where the shards of a packed object lie is in its header.
  slot.header_only = by_size != Verdict::kOurs;
  slot.state = State::kOpened;
  opened_like(slot).push(slot);
  refill();
}

void ReadWorker::not_ahead(Slot& slot) noexcept {
  if (!slot.ahead) return;
  slot.ahead = false;
  --ahead_;
}

bool ReadWorker::is_other_than_file(const Slot& slot) const noexcept {
  struct stat st {};
  return fstatat(slot.dir->get(), slot.path.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 &&
         !S_ISREG(st.st_mode);
}

void ReadWorker::not_regular(Slot& slot) noexcept {
  core_->counters.add(Counter::kReadNotRegular);
  core_->errors.add("read", root_.full_path(slot.path.c_str()), 0, "not a regular file");
  end(slot, Status::kMiss, 0);
}

void ReadWorker::start_reads(Slot& slot, bool header_only) noexcept {
  const Format& format = core_->format;
  const Geometry& g = format.geometry();
  const ReadOp& op = slot.item.op;
  not_ahead(slot);
  slot.state = State::kReading;
  slot.failed = 0;
  slot.truncated = false;
  slot.tries = 0;
  slot.header_bytes = header_only && slot.file_bytes >= format.packed_header_bytes()
                          ? format.packed_header_bytes()
                          : format.header_bytes();
  slot.iov[0] = {slot.header, slot.header_bytes};
  slot.iov[1] = {op.into + g.shard_offset(op.begin),
                 g.shard_offset(op.end) - g.shard_offset(op.begin)};
  Step prototype;
  prototype.kind = IoStep::kRead;
  prototype.path = slot.path.c_str();
  prototype.fd = slot.fd;
  prototype.owner = &slot;
  prototype.iov = slot.iov;
  slot.reads[0] = prototype;
  slot.header_only = header_only;
  if (op.begin == 0 && !header_only) {
    slot.reads[0].iov_count = 2;
    slot.pending = 1;
    begin(slot.reads[0]);
    return;
  }
  slot.reads[0].iov_count = 1;
  slot.reads[1] = prototype;
  slot.reads[1].iov = slot.iov + 1;
  slot.reads[1].iov_count = 1;
  slot.reads[1].offset = format.shard_file_offset(op.begin);
  slot.pending = header_only ? 1 : 2;  // before the first may end in place, and the slot with it
  begin(slot.reads[0]);
  if (!header_only) begin(slot.reads[1]);
}

void ReadWorker::transferred(Slot& slot, Step& step) noexcept {
  beat(slot.item.op.id);
  const int r = step.result;
  if (r > 0) {
    // Direct I/O can only go on at an aligned place; the tail of a short transfer is read again.
    std::size_t n = static_cast<std::size_t>(r);
    if (root_.direct()) n -= n % kIoAlign;
    consume(step.iov, step.iov_count, n);
    step.offset += n;
    if (step.iov_count > 0) {
      if (n > 0 || ++slot.tries < kMaxTries) return begin(step);
      slot.truncated = true;
    }
  } else if (r == 0) {
    slot.truncated = true;
  } else if ((-r == EAGAIN || -r == EINTR) && ++slot.tries < kMaxTries) {
    return begin(step);
  } else if (slot.failed == 0) {
    slot.failed = -r;
  }
  if (--slot.pending > 0) return;
  if (slot.failed != 0) {
    return end(slot, Status::kIoError, slot.failed);
  }
  if (slot.truncated) return corrupt(slot, "the file became shorter while it was read");
  if (slot.packed) return packed_read(slot);
  slot.state == State::kReadingWhole ? converted(slot) : verify(slot);
}

void ReadWorker::verify(Slot& slot) noexcept {
  const Format& format = core_->format;
  const ReadOp& op = slot.item.op;
  const Verdict verdict = format.judge(op.id, slot.header, slot.file_bytes, slot.foreign);
  expect_foreign_ = verdict == Verdict::kConvertible;
  switch (verdict) {
    case Verdict::kBad:
      return corrupt(slot, "its header is damaged or belongs to another object");
    case Verdict::kForeign:
      core_->counters.add(Counter::kReadForeign);
      return end(slot, Status::kMiss, 0);
    case Verdict::kConvertible:
      return start_conversion(slot);
    case Verdict::kPacked:
      return start_packed(slot);
    case Verdict::kOurs:
      break;
  }
  if (slot.header_only) {
    slot.header_only = false;
    slot.pending = 1;
    return begin(slot.reads[1]);
  }
  if (core_->options.verify_checksums) {
    const Geometry& g = format.geometry();
    if (!Format::tail_sound(g, slot.header)) return corrupt(slot, "its checksum table is damaged");
    UCM_CHAOS_POINT(kReadDone);
    if (!Format::shards_sound(g, slot.header, op.into, op.begin, op.end)) {
      return corrupt(slot, "a shard does not match its checksum");
    }
  }
  end(slot, Status::kOk, 0);
}

void ReadWorker::start_packed(Slot& slot) noexcept {
  const Format& format = core_->format;
  const Geometry& g = format.geometry();
  const ReadOp& op = slot.item.op;
  if (op.packed == nullptr) {
    core_->counters.add(Counter::kReadForeign);
    return end(slot, Status::kMiss, 0);
  }
  if (slot.header_bytes < format.packed_header_bytes()) {
    // As long as an object that is not packed, and taken for one: its header again, all of it.
    return start_reads(slot, true);
  }
  if (!format.packed_sound(slot.header, slot.file_bytes)) {
    return corrupt(slot, "the table of its packed shards is damaged");
  }
  slot.parts.clear();
  try {
    slot.parts.reserve(g.shard_count);
  } catch (...) {
    return end(slot, Status::kIoError, ENOMEM);
  }
  std::uint64_t at = format.packed_header_bytes();
  std::uint64_t wanted = 0;
  for (std::uint32_t i = 0; i < op.end; ++i) {
    const std::uint64_t stored = format.packed_bytes(slot.header, i);
    const std::uint64_t room = format.packed_room(stored);
    if (i < op.begin) {
      at += room;
      continue;
    }
    op.packed[i] = stored;
    wanted += room;
    std::byte* const place = op.into + g.shard_offset(i);
    if (!slot.parts.empty() &&
        static_cast<std::byte*>(slot.parts.back().iov_base) + slot.parts.back().iov_len == place) {
      slot.parts.back().iov_len += room;  // behind one that is not packed
    } else {
      slot.parts.push_back({place, room});
    }
  }
  core_->counters.add(Counter::kReadPackedBytes, wanted);
  slot.packed = true;
  slot.tries = 0;
  slot.pending = 1;
  Step& step = slot.reads[0];
  step.iov = slot.parts.data();
  step.iov_count = static_cast<int>(slot.parts.size());
  step.offset = at;
  begin(step);
}

void ReadWorker::packed_read(Slot& slot) noexcept {
  const ReadOp& op = slot.item.op;
  if (core_->options.verify_checksums &&
      !core_->format.packed_shards_sound(slot.header, op.into, op.begin, op.end)) {
    return corrupt(slot, "a packed shard does not match its checksum");
  }
  core_->counters.add(Counter::kReadsPacked);
  end(slot, Status::kOk, 0);
}

bool ReadWorker::judge_odd_size(Slot& slot, std::uint64_t bytes) noexcept {
  // Rare and short: read in place. A sound file of another geometry stays; anything else goes.
  const ssize_t n = bytes < kIoAlign ? 0 : pread(slot.fd, slot.header, kIoAlign, 0);
  if (n < 0) {
    end(slot, Status::kIoError, errno);
    return false;
  }
  if (n == static_cast<ssize_t>(kIoAlign)) {
    const Verdict verdict = core_->format.judge(slot.item.op.id, slot.header, bytes, slot.foreign);
    if (verdict == Verdict::kConvertible || verdict == Verdict::kPacked) return true;
    if (verdict != Verdict::kBad) {
      core_->counters.add(Counter::kReadForeign);
      end(slot, Status::kMiss, 0);
      return false;
    }
  }
  corrupt(slot, "its size is neither ours nor what its header says");
  return false;
}

void ReadWorker::start_conversion(Slot& slot) noexcept {
  const std::uint64_t bytes = slot.foreign->geometry.object_bytes();
  const FileVersion file{slot.item.op.id, slot.device, slot.inode, slot.mtime_ns};
  ScratchPool::Buffer* buffer = nullptr;
  switch (core_->scratch.claim(file, bytes, slot.item, buffer)) {
    case ScratchPool::Claim::kOwner:
      break;
    case ScratchPool::Claim::kVerified:
      convert(slot, buffer->data, slot.item);
      core_->scratch.let_go(*buffer);
      return end(slot, Status::kOk, 0);
    case ScratchPool::Claim::kJoined:
      return give_back(slot);
    case ScratchPool::Claim::kNoBuffer:
      slot.state = State::kNoBuffer;
      slot.retry_at = Clock::now() + kRetryPause;
      return;
    case ScratchPool::Claim::kNoMemory:
      return end(slot, Status::kIoError, ENOMEM);
  }
  core_->counters.add(Counter::kConvertReads);
  not_ahead(slot);
  slot.scratch = buffer;
  slot.state = State::kReadingWhole;
  slot.failed = 0;
  slot.truncated = false;
  slot.tries = 0;
  slot.iov[0] = {buffer->data, bytes};
  Step& step = slot.reads[0];
  step = Step{};
  step.kind = IoStep::kRead;
  step.path = slot.path.c_str();
  step.fd = slot.fd;
  step.owner = &slot;
  step.iov = slot.iov;
  step.iov_count = 1;
  step.offset = kIoAlign;  // behind the header that was judged; longer ones are not convertible
  slot.pending = 1;
  begin(step);
}

void ReadWorker::converted(Slot& slot) noexcept {
  const Geometry& g = slot.foreign->geometry;
  const std::byte* const object = slot.scratch->data;
  if (core_->options.verify_checksums) {
    if (!Format::tail_sound(g, slot.header)) return corrupt(slot, "its checksum table is damaged");
    if (!Format::shards_sound(g, slot.header, object, 0, g.shard_count)) {
      return corrupt(slot, "a shard does not match its checksum");
    }
  }
  convert(slot, object, slot.item);
  for (;;) {
    auto joined = core_->scratch.finish(*slot.scratch);
    if (joined.empty()) break;
    for (ReadItem& item : joined) {
      convert(slot, object, item);
      answer(item, slot.begun, {Status::kOk, 0});
    }
  }
  slot.scratch = nullptr;
  end(slot, Status::kOk, 0);
}

void ReadWorker::convert(const Slot& slot, const std::byte* object, ReadItem& item) noexcept {
  const auto began = Clock::now();
  slot.foreign->conversion.run(item.op.into, object, item.op.begin, item.op.end);
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began);
  core_->counters.add(Counter::kReadConverted);
  core_->counters.add(Counter::kConvertMicros, static_cast<std::uint64_t>(took.count()));
}

void ReadWorker::corrupt(Slot& slot, const char* why) noexcept {
  core_->counters.add(Counter::kReadCorrupt);
  core_->errors.add("verify", root_.full_path(slot.path.c_str()), 0,
                    std::string(why) + "; removed, so that the next dump writes it anew");
  struct stat st {};
  // Only if it is still this very file: a writer may have put a good one in its place.
  if (fstatat(slot.dir->get(), slot.path.c_str(), &st, AT_SYMLINK_NOFOLLOW) == 0 &&
      st.st_dev == slot.device && st.st_ino == slot.inode &&
      unlinkat(slot.dir->get(), slot.path.c_str(), 0) == 0) {
    core_->counters.add(Counter::kHealed);
  }
  end(slot, Status::kCorrupt, 0);
}

void ReadWorker::answer(ReadItem& item, Clock::time_point begun, Outcome outcome) noexcept {
  Counters& counters = core_->counters;
  const ReadOp& op = item.op;
  if (outcome.status == Status::kOk) {
    const auto took = Clock::now() - begun;
    counters.add(Counter::kReads);
    counters.add(Counter::kReadBytes, (op.end - op.begin) * core_->format.geometry().shard_bytes);
    counters.add(Counter::kReadMicros,
                 static_cast<std::uint64_t>(
                     std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
    root_.note_ok(Direction::kRead);
  } else if (outcome.status == Status::kMiss) {
    counters.add(Counter::kReadMisses);
  } else if (outcome.status == Status::kTimeout) {
    counters.add(Counter::kReadTimeouts);
  } else if (outcome.status == Status::kIoError) {
    counters.add(Counter::kReadErrors);
    core_->errors.add("read", root_.full_path(ObjectPath(op.id).c_str()), outcome.error);
    root_.note_error(Direction::kRead, outcome.error, op.id);
  }
  item.answer(outcome);
  item.sink.reset();
}

void ReadWorker::end(Slot& slot, Status status, int error) noexcept {
  close_file(slot);               // who is told that a read has ended finds its descriptor free
  if (slot.scratch != nullptr) {  // what joined this read shares its failure
    for (ReadItem& item : core_->scratch.fail(*slot.scratch)) {
      answer(item, slot.begun, {status, error});
    }
    slot.scratch = nullptr;
  }
  if (!slot.told) answer(slot.item, slot.begun, {status, error});
  give_back(slot);
}

void ReadWorker::close_file(Slot& slot) noexcept {
  if (slot.fd < 0) return;
  ::close(slot.fd);
  slot.fd = -1;
}

void ReadWorker::give_back(Slot& slot) noexcept {
  close_file(slot);
  not_ahead(slot);
  core_->counters.sub(Counter::kReadsInFlight);
  if (!slot.item.op.urgent) --background_;
  slot.item.sink.reset();
  slot.dir.reset();
  slot.state = State::kFree;
  slots_.give_back(slot);
}

void ReadWorker::drop_prepared() noexcept {
  for (auto& fifo : opened_) {
    while (Slot* const slot = fifo.pop()) end(*slot, Status::kClosed, 0);
  }
}

void ReadWorker::leak() noexcept {
  for (Slot& slot : slots_) {
    if (slot.state == State::kReadingWhole) core_->scratch.lose(*slot.scratch);
  }
  slots_.leak();
}

std::chrono::milliseconds ReadWorker::tick(Clock::time_point now) noexcept {
  if (slots_.used() == 0) return std::chrono::milliseconds(-1);
  auto due = std::chrono::milliseconds(250);
  for (Slot& slot : slots_) {
    if (slot.state == State::kParked) {
      if (slot.item.deadline <= now) {
        end(slot, Status::kTimeout, -slot.open.result);
      } else if (slot.retry_at <= now) {
        start_open(slot);
      }
      if (slot.state == State::kParked) due = kRetryPause;
    } else if (slot.state == State::kNoBuffer) {
      if (slot.item.deadline <= now) {
        end(slot, Status::kTimeout, 0);
      } else if (slot.retry_at <= now) {
        start_conversion(slot);
      }
      if (slot.state == State::kNoBuffer) due = kRetryPause;
    } else if (slot.state == State::kOpened && slot.item.deadline <= now) {
      opened_like(slot).remove(slot);
      core_->counters.add(Counter::kReadTimeouts);
      end(slot, Status::kTimeout, 0);
    } else if (slot.state == State::kOpening && !slot.told && slot.item.deadline <= now) {
      // The medium does not even open the file. Its buffer is untouched: answer now, and let the
      // slot wait for the kernel.
      core_->counters.add(Counter::kReadTimeouts);
      core_->errors.add("open", root_.full_path(slot.path.c_str()), ETIMEDOUT);
      root_.note_error(Direction::kRead, ETIMEDOUT, slot.item.op.id);
      slot.item.answer({Status::kTimeout, ETIMEDOUT});
      slot.told = true;
    }
  }
  return due;
}

}  // namespace ucm::posix
