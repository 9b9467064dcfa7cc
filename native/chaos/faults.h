// Faults of the medium, drawn per step from a seed.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <thread>

#include "board.h"
#include "plan.h"
#include "ucm/posix.h"

namespace ucm::chaos {

/// One step in `one_in` is spoiled. Thread-safe.
class RandomFaults final : public IoFaults {
 public:
  /// `one_in` 0: none is spoiled. `deadly`: the process may also die between two steps of a slab.
  RandomFaults(std::uint64_t seed, unsigned one_in, bool deadly, Board& board)
      : random_(seed), one_in_(one_in), deadly_(deadly), board_(board) {}

  int before(IoStep step, const char*, std::size_t& bytes) noexcept override {
    if (one_in_ == 0 || off_.load()) return 0;
    const std::lock_guard lock(mu_);
    if (random_() % one_in_ != 0) return 0;
    board_.add(Count::kFaults);
    const bool transfer = step == IoStep::kRead || step == IoStep::kWrite;
    switch (random_() % (transfer ? 4 : 2)) {
      case 0:
        return -EIO;
      case 1:
        return transfer || step == IoStep::kOpenRead || step == IoStep::kOpenWrite ? -EAGAIN : -EIO;
      case 2:
        return -EINTR;
      default:
        bytes = bytes > kAlign ? (1 + random_() % (bytes / kAlign)) * kAlign : bytes;
        return 0;
    }
  }

  /// Steps of the layout slab: one in kSlabLife is the last one.
  void at(const char*) noexcept override {
    if (!deadly_ || off_.load() || board_.calm.load() != 0) return;
    const std::lock_guard lock(mu_);
    if (random_() % kSlabLife == 0) ::kill(::getpid(), SIGKILL);
  }

  /// The medium is well from here on.
  void stop() noexcept { off_.store(true); }

 private:
  static constexpr std::size_t kAlign = 4096;
  static constexpr std::uint64_t kSlabLife = 150;
  std::atomic<bool> off_{false};
  std::mutex mu_;
  Random random_;
  const unsigned one_in_;
  const bool deadly_;
  Board& board_;
};

/// A medium that takes its time for every read.
class SlowReads final : public IoFaults {
 public:
  explicit SlowReads(std::chrono::milliseconds delay) : delay_(delay) {}
  int before(IoStep step, const char*, std::size_t&) noexcept override {
    if (step == IoStep::kRead) std::this_thread::sleep_for(delay_);
    return 0;
  }

 private:
  const std::chrono::milliseconds delay_;
};

}  // namespace ucm::chaos
