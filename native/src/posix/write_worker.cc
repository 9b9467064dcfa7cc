#include "posix/write_worker.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "chaos/hooks.h"
#include "posix/collector.h"
#include "posix/housekeeper.h"

namespace ucm::posix {
namespace {

constexpr auto kRetryPause = std::chrono::milliseconds(5);
constexpr std::uint8_t kMaxTries = 16;
constexpr std::uint8_t kMaxRestarts = 3;
/// Of the first writes each is handed over at once: preparing the next takes longer than that.
constexpr std::size_t kFirst = 4;

}  // namespace

WriteWorker::WriteWorker(std::shared_ptr<Core> core, Root& root, EngineKind kind,
                         std::uint32_t depth, WriteQueue& queue)
    : Worker(std::move(core), root, kind, depth),
      queue_(queue),
      // Twice the depth: prepared ahead, and on the medium until closed and renamed.
      slots_(std::size_t{2} * this->depth(), core_->format.packed_header_bytes()) {}

std::size_t WriteWorker::write_depth() const noexcept {
  const bool reads_wait = core_->counters.get(Counter::kReadsInFlight) > 0;
  const std::size_t all = depth();
  return reads_wait ? std::min(all, std::max<std::size_t>(2, all / 4)) : all;
}

bool WriteWorker::has_room() const noexcept { return slots_.any_free() && ahead_ < write_depth(); }

void WriteWorker::refill() noexcept {
  while (!prepared_.empty() && transfers() < write_depth()) start_write(*prepared_.pop());
}

void WriteWorker::admit(bool may_take) noexcept {
  while (may_take && has_room()) {
    WriteItem item;
    if (!queue_.pop(item, false)) return;
    const auto now = Clock::now();
    if (item.deadline <= now) {
      core_->counters.add(Counter::kWriteTimeouts);
      item.answer({Status::kTimeout, 0});
      continue;
    }
    Slot& slot = *slots_.take();
    slot.item = std::move(item);
    slot.path = ObjectPath(slot.item.op.id);
    slot.begun = now;
    slot.restarts = 0;
    slot.ahead = true;
    ++ahead_;
    core_->counters.add(Counter::kWritesInFlight);
    begin_write(slot);
    if (transfers() <= kFirst) flush();
  }
}

void WriteWorker::begin_write(Slot& slot) noexcept {
  beat(slot.item.op.id);
  slot.fd = -1;
  slot.temp_exists = false;
  slot.tries = 0;
  slot.dir = root_.ns_dir();
  core_->housekeeper->drain_removes();
  if (slot.dir && already_stored(slot)) {
    core_->counters.add(Counter::kWriteExisting);
    return end(slot, Status::kOk, 0);
  }
  // A directory that was moved or mounted over still takes files, but nobody would find them: once a
  // second the handle is compared with the path.
  if (slot.dir && root_.revalidate()) slot.dir = root_.ns_dir();
  if (slot.restarts == 0) {
    const WriteOp& op = slot.item.op;
    slot.file_bytes = core_->format.encode(op.id, op.from, op.packed, slot.header);
  }
  create(slot);
}

bool WriteWorker::already_stored(Slot& slot) noexcept {
  struct stat st {};
  if (fstatat(slot.dir->get(), slot.path.c_str(), &st, AT_SYMLINK_NOFOLLOW) < 0) return false;
  const auto bytes = static_cast<std::uint64_t>(st.st_size);
  bool sound = false;
  if (S_ISREG(st.st_mode) && core_->format.judge_size(bytes) != Verdict::kBad) {
    // The size alone does not tell another layout from ours, and one we can read is as good as ours.
    const Verdict verdict =
        ask_header(core_->format, slot.dir->get(), slot.item.op.id, slot.path, bytes);
    sound = verdict == Verdict::kOurs || verdict == Verdict::kConvertible ||
            verdict == Verdict::kPacked;
  }
  if (!sound) core_->counters.add(Counter::kWriteReplaced);
  return sound;
}

void WriteWorker::create(Slot& slot) noexcept {
  if (!slot.dir || !root_.ns_dir()) {
    if (const int error = root_.make_dirs(slot.path); error != 0) return fail(slot, "mkdir", error);
    slot.dir = root_.ns_dir();
    if (!slot.dir) return fail(slot, "mkdir", ENOENT);
  }
  core_->temps.next(slot.path, slot.temp, sizeof slot.temp);
  slot.state = State::kCreating;
  slot.step = Step{};
  slot.step.kind = IoStep::kOpenWrite;
  slot.step.dirfd = slot.dir->get();
  slot.step.path = slot.temp;
  slot.step.flags =
      O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | (root_.direct() ? O_DIRECT : 0);
  slot.step.owner = &slot;
  begin(slot.step);
}

void WriteWorker::advance(Step* step) noexcept {
  Slot& slot = *static_cast<Slot*>(step->owner);
  beat(slot.item.op.id);
  const int r = step->result;
  switch (slot.state) {
    case State::kCreating:
      return created(slot, r);
    case State::kWriting:
      return wrote(slot, r);
    case State::kSyncing:
      return r < 0 ? fail(slot, "fdatasync", -r) : close_temp(slot);
    case State::kClosing:
      // Network file systems report a write that failed late (full, over quota) only here.
      return r < 0 ? fail(slot, "close", -r) : publish(slot);
    case State::kRenaming:
      return renamed(slot, r);
    case State::kFree:
    case State::kParked:
    case State::kPrepared:
      return;
  }
}

void WriteWorker::created(Slot& slot, int r) noexcept {
  if (r >= 0) {
    slot.fd = r;
    slot.temp_exists = true;
    UCM_CHAOS_POINT(kTempCreated);
    if (UCM_CHAOS_BUG(kRenameFirst)) {
      (void)renameat(slot.dir->get(), slot.temp, slot.dir->get(), slot.path.c_str());
    }
    slot.state = State::kPrepared;
    prepared_.push(slot);
    return refill();
  }
  switch (-r) {
    case ENOENT: {
      if (++slot.tries > kMaxRestarts) return fail(slot, "create", -r);
      if (const int error = root_.make_dirs(slot.path); error != 0) {
        return fail(slot, "mkdir", error);
      }
      slot.dir = root_.ns_dir();
      return create(slot);
    }
    case EEXIST:
      return ++slot.tries > kMaxTries ? fail(slot, "create", -r) : create(slot);
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case EAGAIN:
    case EINTR:
      return park(slot, -r);
    default:
      return fail(slot, "create", -r);
  }
}

void WriteWorker::not_ahead(Slot& slot) noexcept {
  if (!slot.ahead) return;
  slot.ahead = false;
  --ahead_;
}

void WriteWorker::start_write(Slot& slot) noexcept {
  const Format& format = core_->format;
  const Geometry& g = format.geometry();
  const WriteOp& op = slot.item.op;
  auto* const data = const_cast<std::byte*>(op.from);
  not_ahead(slot);
  slot.state = State::kWriting;
  slot.tries = 0;
  try {
    slot.iov.resize(op.packed == nullptr ? 2 : g.shard_count + 1);  // kept with the slot
  } catch (...) {
    return fail(slot, "write", ENOMEM);
  }
  if (op.packed == nullptr) {
    slot.iov[0] = {slot.header, format.header_bytes()};
    slot.iov[1] = {data, g.object_bytes()};
  } else {
    slot.iov[0] = {slot.header, format.packed_header_bytes()};
    for (std::uint32_t i = 0; i < g.shard_count; ++i) {
      slot.iov[i + 1] = {data + g.shard_offset(i), format.packed_room(op.packed[i])};
    }
  }
  slot.step = Step{};
  slot.step.kind = IoStep::kWrite;
  slot.step.path = slot.temp;
  slot.step.fd = slot.fd;
  slot.step.iov = slot.iov.data();
  slot.step.iov_count = static_cast<int>(slot.iov.size());
  slot.step.owner = &slot;
  begin(slot.step);
}

void WriteWorker::wrote(Slot& slot, int r) noexcept {
  Step& step = slot.step;
  if (r < 0) {
    if ((-r == EAGAIN || -r == EINTR) && ++slot.tries < kMaxTries) return begin(step);
    return fail(slot, "write", -r);
  }
  std::size_t n = static_cast<std::size_t>(r);
  if (root_.direct()) n -= n % kIoAlign;
  consume(step.iov, step.iov_count, n);
  step.offset += n;
  if (step.iov_count > 0) {
    // Short. The next attempt tells why (ENOSPC, EFBIG); no progress for long is an error itself.
    if (n > 0) slot.tries = 0;
    return ++slot.tries < kMaxTries ? begin(step) : fail(slot, "write", EIO);
  }
  if (!core_->options.fsync) return close_temp(slot);
  slot.state = State::kSyncing;
  step.kind = IoStep::kSync;
  begin(step);
}

void WriteWorker::close_temp(Slot& slot) noexcept {
  slot.state = State::kClosing;
  slot.step.kind = IoStep::kClose;
  slot.step.iov_count = 0;
  slot.fd = -1;  // closed whatever the result
  begin(slot.step);
}

void WriteWorker::publish(Slot& slot) noexcept {
  UCM_CHAOS_POINT(kTempWritten);
  slot.state = State::kRenaming;
  slot.step = Step{};
  slot.step.kind = IoStep::kRename;
  slot.step.dirfd = slot.dir->get();
  slot.step.path = slot.temp;
  slot.step.path2 = slot.path.c_str();
  slot.step.owner = &slot;
  begin(slot.step);
}

void WriteWorker::renamed(Slot& slot, int r) noexcept {
  UCM_CHAOS_POINT(kRenamed);
  if (UCM_CHAOS_BUG(kRenameFirst)) r = 0;
  if (r < 0) {
    // ENOENT: the directory was deleted under us, or somebody took our temporary for an orphan.
    return -r == ENOENT ? restart_or_fail(slot, -r) : fail(slot, "rename", -r);
  }
  slot.temp_exists = false;
  const std::uint64_t bytes = slot.file_bytes;
  const auto took = Clock::now() - slot.begun;
  core_->counters.add(Counter::kWrites);
  core_->counters.add(Counter::kWriteBytes, bytes);
  core_->counters.add(Counter::kWriteMicros,
                      static_cast<std::uint64_t>(
                          std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
  core_->collector->wrote(bytes);
  end(slot, Status::kOk, 0);
}

void WriteWorker::park(Slot& slot, int error) noexcept {
  core_->counters.add(Counter::kFdLimitWaits);
  if (slot.tries == 0) core_->errors.add("create", root_.full_path(slot.path.c_str()), error);
  slot.tries = 1;
  slot.state = State::kParked;
  slot.retry_at = Clock::now() + kRetryPause;
}

void WriteWorker::restart_or_fail(Slot& slot, int error) noexcept {
  drop_temp(slot);
  if (++slot.restarts > kMaxRestarts) return fail(slot, "rename", error);
  core_->counters.add(Counter::kWriteRestarts);
  begin_write(slot);
}

void WriteWorker::drop_temp(Slot& slot) noexcept {
  if (slot.fd >= 0) {
    ::close(slot.fd);
    slot.fd = -1;
  }
  if (slot.temp_exists && slot.dir) (void)unlinkat(slot.dir->get(), slot.temp, 0);
  slot.temp_exists = false;
}

void WriteWorker::fail(Slot& slot, const char* operation, int error) noexcept {
  drop_temp(slot);
  core_->counters.add(Counter::kWriteErrors);
  core_->errors.add(operation, root_.full_path(slot.path.c_str()), error);
  if (error == ENOSPC || error == EDQUOT) {
    core_->counters.add(Counter::kWriteNoSpace);
    core_->collector->no_space();
  }
  root_.note_error(Direction::kWrite, error, slot.item.op.id);
  end(slot, Status::kIoError, error);
}

void WriteWorker::end(Slot& slot, Status status, int error) noexcept {
  if (status == Status::kOk) root_.note_ok(Direction::kWrite);
  core_->counters.sub(Counter::kWritesInFlight);
  not_ahead(slot);
  slot.item.answer({status, error});
  slot.item.sink.reset();
  slot.dir.reset();
  slot.state = State::kFree;
  slots_.give_back(slot);
}

void WriteWorker::drop_prepared() noexcept {
  while (Slot* const slot = prepared_.pop()) {
    drop_temp(*slot);
    end(*slot, Status::kClosed, 0);
  }
}

std::chrono::milliseconds WriteWorker::tick(Clock::time_point now) noexcept {
  // Held back by reads: look again soon, nobody else wakes us when they are through.
  const bool held_back =
      write_depth() < depth() && (!prepared_.empty() || (slots_.any_free() && work_waits()));
  auto due = std::chrono::milliseconds(held_back ? 1 : -1);
  if (slots_.used() == 0) return due;
  for (Slot& slot : slots_) {
    if (slot.state == State::kPrepared && slot.item.deadline <= now) {
      prepared_.remove(slot);
      drop_temp(slot);
      core_->counters.add(Counter::kWriteTimeouts);
      end(slot, Status::kTimeout, 0);
    }
    if (slot.state != State::kParked) continue;
    if (slot.item.deadline <= now) {
      core_->counters.add(Counter::kWriteTimeouts);
      end(slot, Status::kTimeout, -slot.step.result);
    } else if (slot.retry_at <= now) {
      create(slot);
    }
    if (slot.state == State::kParked) due = held_back ? due : kRetryPause;
  }
  return due;
}

}  // namespace ucm::posix
