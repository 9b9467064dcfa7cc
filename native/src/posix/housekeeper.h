// Work that nobody waits for: access times and removals, on one thread that starts with first use.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "posix/core.h"

namespace ucm::posix {

class Housekeeper {
 public:
  static constexpr std::size_t kTouchLimit = 65'536;
  static constexpr std::size_t kRemoveLimit = 1'048'576;

  explicit Housekeeper(std::weak_ptr<Core> core, const PosixOptions& options)
      : core_(std::move(core)), options_(options) {}

  /// Heat. Only kept while a collector uses it (capacity set). Overflow is dropped and counted.
  void touch(std::span<const BlockId> ids) noexcept;
  /// The same for an object whose access time was just seen: no work while it is recent enough.
  void seen(const BlockId& id, const timespec& atime) noexcept {
    if (wants_heat() && is_old(atime)) touch({&id, 1});
  }

  void remove(std::span<const BlockId> ids) noexcept;
  /// Waits (bounded) until removals asked for before are done, so that "remove, then look up or
  /// write" does what it says. Free when there are none.
  void drain_removes() noexcept;

  /// False when the thread had to be left behind.
  bool stop(Deadline deadline) noexcept;

 private:
  [[nodiscard]] bool wants_heat() const noexcept {
    return options_.gc.enabled && options_.gc.capacity_bytes > 0;
  }
  [[nodiscard]] bool is_old(const timespec& atime) const noexcept;
  bool start_locked() noexcept;
  void run(Core& core) noexcept;
  void touch_one(Core& core, const BlockId& id) const noexcept;
  static void remove_one(Core& core, const BlockId& id) noexcept;

  const std::weak_ptr<Core> core_;
  const PosixOptions& options_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable progress_;
  std::vector<BlockId> touches_;
  std::vector<BlockId> removes_;
  std::uint64_t removes_asked_ = 0;
  std::uint64_t removes_done_ = 0;
  bool stopping_ = false;
  std::atomic<bool> removes_open_{false};
  std::atomic<bool> stuck_{false};
  std::atomic<bool> ended_{false};
  std::thread thread_;
};

}  // namespace ucm::posix
