// Existence of many objects, asked of the file system.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "posix/core.h"

namespace ucm::posix {

/// Some ids of one batch that live on one root; shared by the caller and helper threads.
struct LookupJob {
  std::vector<BlockId> ids;
  std::vector<std::uint8_t> present;
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> done{0};
  std::atomic<std::size_t> stop_before{SIZE_MAX};  ///< what follows a miss is not asked
  bool stop_at_first_miss = false;
  std::mutex mutex;
  std::condition_variable finished;
};

/// Helper threads for one root: latency of a network file system, or of a cold disk, is hidden by
/// asking many at once, and a hung mount holds these threads and not the caller.
class LookupHelpers {
 public:
  static constexpr std::size_t kThreads = 8;
  static constexpr std::size_t kChunk = 16;

  LookupHelpers(std::weak_ptr<Core> core, std::size_t root) : core_(std::move(core)), root_(root) {}
  /// Puts `threads` of them (at most kThreads) to work. False when they are stopped or cannot start.
  bool submit(const std::shared_ptr<LookupJob>& job, std::size_t threads) noexcept;
  bool stop(Deadline deadline) noexcept;

 private:
  struct Thread {
    std::thread thread;
    std::atomic<bool> ended{false};
  };
  void run(Core& core) noexcept;

  const std::weak_ptr<Core> core_;
  const std::size_t root_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::deque<std::shared_ptr<LookupJob>> jobs_;
  std::vector<std::unique_ptr<Thread>> threads_;
  bool stopping_ = false;
};

class Lookup {
 public:
  explicit Lookup(std::shared_ptr<Core> core);
  void run(std::span<const BlockId> ids, std::span<std::uint8_t> present,
           bool stop_at_first_miss) noexcept;
  bool stop(Deadline deadline) noexcept;

 private:
  /// Asks in place; gives up (returning how far it got) when the medium turns out to be slow.
  std::size_t in_place(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                       bool stop_at_first_miss, bool& missed);
  void with_helpers(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                    bool stop_at_first_miss, std::size_t threads);

  std::shared_ptr<Core> core_;
  bool all_local_ = true;
  const std::size_t cores_;
  std::vector<std::unique_ptr<LookupHelpers>> helpers_;  // one per root
};

}  // namespace ucm::posix
