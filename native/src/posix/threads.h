// Joining threads within a bound.
#pragma once

#include <atomic>
#include <thread>

#include "ucm/stage.h"

namespace ucm::posix {

/// Joins once `ended` is set; after `deadline` the thread is left behind (it holds what it uses).
/// Returns whether it was joined.
inline bool join_until(std::thread& thread, const std::atomic<bool>& ended,
                       Deadline deadline) noexcept {
  if (!thread.joinable()) return true;
  while (!ended.load() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (ended.load()) {
    thread.join();
    return true;
  }
  thread.detach();
  return false;
}

}  // namespace ucm::posix
