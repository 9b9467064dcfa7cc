// An I/O thread: takes operations from a queue and drives their state machines over an engine.
//
// A device may answer a whole batch of transfers at once, and is idle until it gets the next ones.
// So everything that can be done before a transfer (open, create, checksums) is done ahead, while others
// are on the medium: refill() then puts prepared operations in the place of those that have come
// back, before anything else is done for either.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "posix/core.h"
#include "posix/engine.h"

namespace ucm::posix {

/// Base of ReadWorker and WriteWorker. One thread runs run(); the rest is called from others.
class Worker {
 public:
  Worker(std::shared_ptr<Core> core, Root& root, EngineKind kind, std::uint32_t depth);
  virtual ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run() noexcept;

  /// End once the queue is empty and nothing is in flight.
  void finish() noexcept { order(kFinish); }
  /// End once nothing is in flight; take nothing new (a replacement does).
  void retire() noexcept { order(kRetire); }
  /// End now; what is in the kernel stays there for ever, with its memory.
  void abandon() noexcept { order(kAbandon); }

  [[nodiscard]] bool ended() const noexcept { return ended_.load(); }
  [[nodiscard]] const std::shared_ptr<Waker>& waker() const noexcept { return waker_; }
  /// How long the thread has been in one step; 0 while it sleeps.
  [[nodiscard]] std::chrono::nanoseconds busy_for(Clock::time_point now) const noexcept;
  /// What it is doing, for a report about a stuck thread.
  [[nodiscard]] std::string doing() const;

 protected:
  enum Order : int { kRun, kFinish, kRetire, kAbandon };

  /// Put prepared operations on the medium, as far as there is room. Without preparations: new ones.
  virtual void refill() noexcept { admit(order_.load() < kRetire); }
  /// Take operations while there is room. `may_take` is false for a retired thread.
  virtual void admit(bool may_take) noexcept = 0;
  /// A step has finished.
  virtual void advance(Step* step) noexcept = 0;
  /// Operations begun and not answered.
  [[nodiscard]] virtual std::size_t open_operations() const noexcept = 0;
  [[nodiscard]] virtual bool work_waits() const noexcept = 0;
  [[nodiscard]] virtual bool has_room() const noexcept = 0;
  /// Retries that are due, deadlines that have passed; returns when to come back (< 0: no need).
  virtual std::chrono::milliseconds tick(Clock::time_point now) noexcept = 0;
  /// The thread is given up: answer for what has not been put on the medium.
  virtual void drop_prepared() noexcept {}
  /// The engine has run out of the thread's hands: leak what the kernel may still write to.
  virtual void leak() noexcept = 0;

  /// Start a step: through the engine, or in place (advance() is then called before this returns).
  void begin(Step& step) noexcept;
  void beat(const BlockId& id) noexcept;
  [[nodiscard]] std::uint32_t depth() const noexcept { return depth_; }
  [[nodiscard]] std::size_t steps_in_flight() const noexcept { return in_flight_; }
  /// Of these, reads, writes and flushes: what is on the medium.
  [[nodiscard]] std::size_t transfers() const noexcept { return transfers_; }
  [[nodiscard]] bool medium_has_room() const noexcept { return transfers_ < depth_; }
  /// Hand started steps over to the kernel now instead of with the next wait.
  void flush() noexcept;

  const std::shared_ptr<Core> core_;
  Root& root_;

 private:
  void order(Order o) noexcept;
  void loop();

  const EngineKind kind_;
  std::uint32_t depth_;
  std::shared_ptr<Waker> waker_;
  std::unique_ptr<IoEngine> engine_;  // of the running thread
  std::size_t in_flight_ = 0;
  std::size_t transfers_ = 0;
  std::size_t unflushed_ = 0;
  std::atomic<int> order_{kRun};
  std::atomic<bool> ended_{false};
  std::atomic<std::int64_t> busy_since_{0};
  std::atomic<std::uint64_t> current_[2]{};
};

/// Lowers a step to at most `bytes` (short transfers planned by IoFaults).
void limit_step(Step& step, std::size_t bytes) noexcept;
[[nodiscard]] std::size_t step_bytes(const Step& step) noexcept;
/// Moves an iovec list forward by `n` bytes already transferred.
void consume(iovec*& iov, int& count, std::size_t n) noexcept;

}  // namespace ucm::posix
