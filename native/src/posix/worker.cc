#include "posix/worker.h"

#include <algorithm>
#include <cstring>
#include <system_error>

namespace ucm::posix {
namespace {

std::int64_t ticks(Clock::time_point t) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

/// Started steps that are handed over at once: the medium need not wait for the last of a batch.
constexpr std::size_t kBatch = 8;

bool is_transfer(const Step& step) noexcept {
  return step.kind == IoStep::kRead || step.kind == IoStep::kWrite || step.kind == IoStep::kSync;
}

}  // namespace

std::size_t step_bytes(const Step& step) noexcept {
  std::size_t n = 0;
  for (int i = 0; i < step.iov_count; ++i) n += step.iov[i].iov_len;
  return n;
}

void limit_step(Step& step, std::size_t bytes) noexcept {
  for (int i = 0; i < step.iov_count; ++i) {
    if (step.iov[i].iov_len >= bytes) {
      step.iov[i].iov_len = bytes;
      step.iov_count = bytes > 0 ? i + 1 : i;
      return;
    }
    bytes -= step.iov[i].iov_len;
  }
}

void consume(iovec*& iov, int& count, std::size_t n) noexcept {
  while (count > 0 && n >= iov->iov_len) {
    n -= iov->iov_len;
    ++iov;
    --count;
  }
  if (count > 0) {
    iov->iov_base = static_cast<std::byte*>(iov->iov_base) + n;
    iov->iov_len -= n;
  }
}

Worker::Worker(std::shared_ptr<Core> core, Root& root, EngineKind kind, std::uint32_t depth)
    : core_(std::move(core)),
      root_(root),
      kind_(kind),
      depth_(kind == EngineKind::kSync ? 1 : depth),
      waker_(std::make_shared<Waker>()) {}

void Worker::order(Order o) noexcept {
  int now = order_.load();
  while (now < o && !order_.compare_exchange_weak(now, o)) {
  }
  waker_->wake();
}

std::chrono::nanoseconds Worker::busy_for(Clock::time_point now) const noexcept {
  const std::int64_t since = busy_since_.load();
  return std::chrono::nanoseconds(since == 0 ? 0 : ticks(now) - since);
}

void Worker::beat(const BlockId& id) noexcept {
  std::uint64_t words[2];
  std::memcpy(words, id.bytes.data(), sizeof words);
  current_[0].store(words[0], std::memory_order_relaxed);
  current_[1].store(words[1], std::memory_order_relaxed);
  busy_since_.store(ticks(Clock::now()), std::memory_order_relaxed);
}

std::string Worker::doing() const {
  BlockId id;
  const std::uint64_t words[2] = {current_[0].load(), current_[1].load()};
  std::memcpy(id.bytes.data(), words, sizeof words);
  return root_.full_path(ObjectPath(id).c_str());
}

void Worker::begin(Step& step) noexcept {
  std::size_t bytes = step_bytes(step);
  if (core_->options.faults) [[unlikely]] {
    const std::size_t asked = bytes;
    const int spoiled = core_->options.faults->before(step.kind, step.path, bytes);
    if (spoiled < 0) {
      // A close that fails has closed all the same: leaving it out would leak what no real error does.
      if (step.kind == IoStep::kClose) run_step(step);
      step.result = spoiled;
      advance(&step);
      return;
    }
    if (bytes < asked) {  // a short transfer: only part of the list is handed to the kernel
      iovec part[4];
      Step shorter = step;
      shorter.iov_count = std::min(step.iov_count, 4);  // packed objects have more: shorter still
      std::copy_n(step.iov, shorter.iov_count, part);
      shorter.iov = part;
      limit_step(shorter, bytes);
      run_step(shorter);
      step.result = shorter.result;
      advance(&step);
      return;
    }
  }
  // Metadata calls of a local file system are quicker in place than through a kernel worker thread.
  // Opens for reading stay asynchronous: they may have to fetch an inode from the medium.
  const bool in_place =
      root_.local() && (step.kind == IoStep::kOpenWrite || step.kind == IoStep::kClose ||
                        step.kind == IoStep::kRename);
  if (!in_place && engine_->is_async(step.kind)) {
    ++in_flight_;
    if (is_transfer(step)) ++transfers_;
    engine_->start(&step);
    if (++unflushed_ >= kBatch) flush();
    return;
  }
  run_step(step);
  advance(&step);
}

void Worker::flush() noexcept {
  if (unflushed_ == 0) return;
  unflushed_ = 0;
  engine_->flush();
}

void Worker::run() noexcept {
  try {
    try {
      engine_ = make_engine(kind_, depth_, waker_);
    } catch (const std::system_error& e) {
      // Out of rings, contexts or locked memory: slower, but it serves.
      core_->errors.add("start of " + std::string(engine_name(kind_)) + " for", root_.path(),
                        e.code().value(), "this thread uses psync instead");
      engine_ = make_sync_engine(waker_);
      depth_ = 1;
    }
    loop();
  } catch (const std::exception& e) {
    core_->errors.add("I/O thread of", root_.path(), 0, e.what());
  }
  ended_.store(true);
}

void Worker::loop() {
  std::vector<Step*> done;
  done.reserve(depth_ * 3 + 8);
  for (;;) {
    busy_since_.store(ticks(Clock::now()), std::memory_order_relaxed);
    refill();
    admit(order_.load() < kRetire);
    const auto due = tick(Clock::now());  // after admit(): what that has parked must be seen
    const int asked = order_.load();
    if (asked == kAbandon) {
      drop_prepared();
      core_->counters.add(Counter::kAbandoned, open_operations());
      engine_->abandon();
      leak();
      return;
    }
    if (asked >= kFinish && open_operations() == 0 && (asked == kRetire || !work_waits())) return;

    // Sleep, unless work came in between: arm first, then look (the other side pushes, then wakes).
    const bool may_take = asked < kRetire && has_room();
    unflushed_ = 0;  // waiting hands over what was started
    if (may_take) waker_->arm();
    if (may_take && work_waits()) {
      waker_->disarm();
      engine_->wait(std::chrono::milliseconds(0), done);
    } else {
      busy_since_.store(0, std::memory_order_relaxed);
      engine_->wait(due, done);
      waker_->disarm();
    }
    if (done.empty()) continue;
    busy_since_.store(ticks(Clock::now()), std::memory_order_relaxed);
    // A device often answers many at once, and the first of them has woken us: take the others too.
    for (std::size_t known = 0; known < done.size();) {
      for (; known < done.size(); ++known, --in_flight_) {
        transfers_ -= is_transfer(*done[known]) ? 1 : 0;
      }
      refill();
      unflushed_ = 0;
      if (transfers_ > 0) engine_->wait(std::chrono::milliseconds(0), done);
    }
    // Opened files next, so that reads are on the way while finished ones are verified.
    const auto rest = std::partition(
        done.begin(), done.end(), [](const Step* step) { return step->kind == IoStep::kOpenRead; });
    std::for_each(done.begin(), rest, [this](Step* step) { advance(step); });
    flush();
    std::for_each(rest, done.end(), [this](Step* step) { advance(step); });
    done.clear();
  }
}

}  // namespace ucm::posix
