// Tries the roots for the health wrapper, each on a thread of its own, so that a hung one keeps nobody.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "posix/core.h"

namespace ucm::posix {

class MediumProbe {
 public:
  explicit MediumProbe(std::shared_ptr<Core> core);
  MediumProbe(const MediumProbe&) = delete;
  MediumProbe& operator=(const MediumProbe&) = delete;

  /// Empty as soon as one root works: which of several serve is the stage's own affair. A root whose
  /// last try still hangs is not tried again. Waits until `deadline` at most. Throws when this process
  /// lacks threads, descriptors or memory for a try. One caller at a time.
  std::string run(Deadline deadline);

  /// Joins; returns how many hang and were left behind.
  std::size_t stop(Deadline deadline) noexcept;

 private:
  struct Lane {
    std::thread thread;
    bool busy = false;   // this and the rest under Shared::mutex
    bool ours = false;   // it failed for want of descriptors or memory of this process
    std::string failed;  // step, path and errno
  };
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    std::vector<Lane> lanes;  // never resized after construction
    bool stopping = false;
  };

  const std::shared_ptr<Core> core_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace ucm::posix
