#include "store/task.h"

#include <unistd.h>

#include "store/core.h"

namespace ucm {
namespace {

std::unique_ptr<std::atomic<std::uint8_t>[]> open_rows(std::size_t n) {
  std::unique_ptr<std::atomic<std::uint8_t>[]> rows(new std::atomic<std::uint8_t>[n]);
  for (std::size_t i = 0; i < n; ++i) rows[i].store(kRowOpen, std::memory_order_relaxed);
  return rows;
}

bool final(std::uint8_t raw) noexcept {
  return raw != kRowOpen && raw < kRowReady;
}

}  // namespace

TaskImpl::TaskImpl(TaskKind kind, std::size_t rows, std::size_t runs_per_shard,
                   std::weak_ptr<StoreCore> core, std::shared_ptr<Counters> counters,
                   Deadline deadline, Deadline durable_deadline)
    : kind_(kind),
      rows_(rows),
      core_(std::move(core)),
      counters_(std::move(counters)),
      deadline_(deadline),
      durable_deadline_(durable_deadline),
      pid_(::getpid()),
      status_(open_rows(rows)),
      errors_(new std::int32_t[rows]()),
      open_(rows),
      durable_open_(kind == TaskKind::kLoad ? 0 : rows) {
  ids.reserve(rows);
  shards.reserve(rows);
  addresses.reserve(rows * runs_per_shard);
  if (kind != TaskKind::kLoad) {
    durable_ = open_rows(rows);
    durable_errors_.reset(new std::int32_t[rows]());
  }
}

void TaskImpl::check_process() const {
  if (::getpid() != pid_) {
    throw ClosedError("the task belongs to process " + std::to_string(pid_) +
                      "; tasks and stores cannot be used after fork: open a store in this process");
  }
}

bool TaskImpl::done() const {
  check_process();
  return open_.load(std::memory_order_acquire) == 0;
}

bool TaskImpl::durable_done() const {
  return done() && durable_open_.load(std::memory_order_acquire) == 0;
}

TaskState TaskImpl::state() const {
  if (!done()) return TaskState::kSubmitted;
  if (failed_.load(std::memory_order_acquire)) return TaskState::kFailed;
  return durable_open_.load(std::memory_order_acquire) == 0 ? TaskState::kDurable
                                                            : TaskState::kInBackend;
}

Outcome TaskImpl::outcome(std::size_t row) const {
  const std::uint8_t raw = status_[row].load(std::memory_order_acquire);
  if (!final(raw)) return {};
  return {static_cast<Status>(raw), errors_[row]};
}

Outcome TaskImpl::durable_outcome(std::size_t row) const {
  if (durable_ == nullptr) return outcome(row);
  const std::uint8_t raw = durable_[row].load(std::memory_order_acquire);
  if (!final(raw)) return {};
  return {static_cast<Status>(raw), durable_errors_[row]};
}

bool TaskImpl::wait_until(Deadline until) {
  check_process();
  std::unique_lock lock(mu_);
  return cv_.wait_until(lock, until, [&] { return open_.load(std::memory_order_acquire) == 0; });
}

bool TaskImpl::wait_row_until(std::size_t row, Deadline until) {
  check_process();
  const auto is_final = [&] { return final(status_[row].load(std::memory_order_seq_cst)); };
  if (is_final()) return true;
  // Announce first, look second: finish() stores the state first and looks for waiters second.
  row_waiters_.fetch_add(1, std::memory_order_seq_cst);
  bool ok = false;
  {
    std::unique_lock lock(mu_);
    ok = cv_.wait_until(lock, until, is_final);
  }
  row_waiters_.fetch_sub(1, std::memory_order_relaxed);
  return ok;
}

bool TaskImpl::wait_durable_until(Deadline until) {
  check_process();
  std::unique_lock lock(mu_);
  return cv_.wait_until(lock, until, [&] {
    return open_.load(std::memory_order_acquire) == 0 &&
           durable_open_.load(std::memory_order_acquire) == 0;
  });
}

void TaskImpl::row_done() noexcept {
  const bool last = open_.fetch_sub(1, std::memory_order_seq_cst) == 1;
  if (last || row_waiters_.load(std::memory_order_seq_cst) != 0) {
    { const std::lock_guard lock(mu_); }
    cv_.notify_all();
  }
}

bool TaskImpl::finish(std::uint32_t row, std::uint8_t from, Outcome outcome) noexcept {
  if (!move(row, from, kRowFinishing)) return false;
  errors_[row] = outcome.error;
  if (outcome.status != Status::kOk) {
    failed_.store(true, std::memory_order_release);
    finish_durable(row, outcome);
  }
  if (kind_ != TaskKind::kLoad || !addresses.empty()) counters_->row(kind_, outcome.status);
  status_[row].store(static_cast<std::uint8_t>(outcome.status), std::memory_order_seq_cst);
  row_done();
  return true;
}

void TaskImpl::finish_durable(std::uint32_t row, Outcome outcome) noexcept {
  if (durable_ == nullptr) return;
  std::uint8_t from = kRowOpen;
  if (!durable_[row].compare_exchange_strong(from, kRowFinishing, std::memory_order_acq_rel))
    return;
  durable_errors_[row] = outcome.error;
  if (outcome.status != Status::kOk) failed_.store(true, std::memory_order_release);
  durable_[row].store(static_cast<std::uint8_t>(outcome.status), std::memory_order_seq_cst);
  if (durable_open_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    { const std::lock_guard lock(mu_); }
    cv_.notify_all();
  }
}

void TaskImpl::lose(std::int64_t row, Status why) {
  bool lost = false;
  const std::size_t first = row < 0 ? 0 : static_cast<std::size_t>(row);
  const std::size_t last = row < 0 ? rows_ : first + 1;
  for (std::size_t i = first; i < last; ++i) {
    lost |= finish_open(static_cast<std::uint32_t>(i), {why, 0});
  }
  if (!lost) return;
  if (const auto core = core_.lock()) core->rows_lost(*this, why);
}

void TaskImpl::give_up(Status why) {
  check_process();
  lose(-1, why);
  // The fence: what is left is being copied right now and ends by itself.
  std::unique_lock lock(mu_);
  cv_.wait(lock, [&] { return open_.load(std::memory_order_acquire) == 0; });
}

void TaskImpl::give_up_row(std::size_t row, Status why) {
  check_process();
  lose(static_cast<std::int64_t>(row), why);
  while (!wait_row_until(row, Clock::now() + std::chrono::seconds(1))) {
  }
}

void TaskImpl::give_up_durable(Status why) {
  give_up(why);
  for (std::size_t i = 0; i < rows_; ++i) finish_durable(static_cast<std::uint32_t>(i), {why, 0});
}

}  // namespace ucm
