// The I/O threads of one root and direction: started with first use, watched, replaced, joined.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "posix/queue.h"
#include "posix/worker.h"

namespace ucm::posix {

/// Thread-safe. Never holds its lock over I/O.
class WorkerPool {
 public:
  /// Threads stuck in the kernel beyond this many are not replaced any more: the root is taken out.
  static constexpr std::size_t kMaxStuck = 4;

  using Factory = std::function<std::shared_ptr<Worker>()>;

  WorkerPool(std::weak_ptr<Core> core, Root& root, Direction direction, std::size_t threads,
             Factory factory)
      : core_(std::move(core)),
        root_(root),
        direction_(direction),
        threads_(threads),
        factory_(std::move(factory)) {}

  /// Starts the threads unless they run; throws std::system_error / std::bad_alloc.
  /// `enlist` learns of every new worker's waker, `strike` of every one that ends.
  void ensure_started(const std::function<void(std::shared_ptr<Waker>)>& enlist);

  /// Replaces threads that are longer in one step than `stall`, and joins those that came back.
  void watch(Clock::time_point now, std::chrono::nanoseconds stall) noexcept;

  void finish() noexcept;
  /// Joins until `deadline`, then abandons; returns how many threads were left behind.
  std::size_t join(Deadline deadline) noexcept;

 private:
  struct Entry {
    std::shared_ptr<Worker> worker;
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> ended;
    bool stuck = false;
  };
  void add_locked();

  const std::weak_ptr<Core> core_;
  Root& root_;
  const Direction direction_;
  const std::size_t threads_;
  const Factory factory_;
  std::mutex mutex_;
  std::function<void(std::shared_ptr<Waker>)> enlist_;
  std::vector<Entry> entries_;
  bool finishing_ = false;
};

}  // namespace ucm::posix
