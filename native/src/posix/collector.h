// Garbage collection: keeps the roots below their budget and removes orphan temporaries.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "posix/core.h"
#include "posix/lease.h"
#include "posix/scan.h"

namespace ucm::posix {

/// One thread per stage; only the holder of the lease of every serving root collects.
class Collector {
 public:
  Collector(std::weak_ptr<Core> core, const PosixOptions& options)
      : core_(std::move(core)), options_(options) {}

  /// Takes or checks the leases, starts the thread. Throws PosixSetupError when another live instance
  /// has other settings for a root.
  void start(Core& core);
  /// Bytes published by this process; a burst brings the next round forward.
  void wrote(std::uint64_t bytes) noexcept;
  /// The medium is full: collect now, even below the trigger.
  void no_space() noexcept;
  bool collect_now(std::chrono::milliseconds timeout) noexcept;
  /// Empty, or why this instance's settings are not in force.
  [[nodiscard]] std::string trouble() const;
  bool stop(Deadline deadline) noexcept;

 private:
  void run(Core& core) noexcept;
  void round(Core& core, bool forced);
  bool hold_leases(Core& core);
  Usage estimate(Core& core);
  void collect(Core& core, Usage usage, bool forced);
  std::uint64_t remove_coldest(Core& core, Usage& usage, std::uint64_t need);
  [[nodiscard]] bool stopping() const;

  const std::weak_ptr<Core> core_;
  const PosixOptions& options_;
  std::vector<std::unique_ptr<Lease>> leases_;  // by root
  std::uint64_t rounds_ = 0;                    // of this thread; turns the sample
  bool scanned_ = false;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable progress_;
  std::string trouble_;
  std::uint64_t asked_ = 0;  // collect_now requests
  std::uint64_t answered_ = 0;
  bool last_ran_ = false;
  bool full_ = false;
  bool stopping_ = false;
  std::atomic<std::uint64_t> written_{0};
  std::atomic<bool> burst_{false};
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace ucm::posix
