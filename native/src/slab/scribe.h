// Writes what nobody waits for: pages of slot heads after removals, heartbeats of the directories.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "slab/parts.h"

namespace ucm::slab {

/// One thread, started by start(). Thread-safe.
class Scribe {
 public:
  explicit Scribe(std::weak_ptr<Parts> parts) : parts_(std::move(parts)) {}
  void start();
  /// The page of this group is out of date. Never blocks; beyond the bound the page is left to who
  /// writes into the group next.
  void page(std::uint32_t group) noexcept;
  /// Waits until what was asked for before is written.
  bool flush(std::chrono::milliseconds timeout) noexcept;
  /// Writes what is left. False when the thread had to be left behind.
  bool stop(Deadline deadline) noexcept;

 private:
  static constexpr std::size_t kLimit = 65'536;

  void run(Parts& parts) noexcept;
  void beat(Parts& parts) noexcept;
  /// False: another one owns the group, or it is closed: later.
  bool write(Parts& parts, std::uint32_t group, std::byte* page) noexcept;

  const std::weak_ptr<Parts> parts_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable progress_;
  std::deque<std::uint32_t> pages_;
  std::uint64_t asked_ = 0;
  std::uint64_t done_ = 0;
  bool stopping_ = false;
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace ucm::slab
