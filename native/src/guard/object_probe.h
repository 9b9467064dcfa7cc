// A probe for stages that have none of their own: one private object, through the stage's own calls.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "ucm/stage.h"

namespace ucm::guard {

/// Writes, reads, compares and removes an object that no engine can ask for. Used by one thread.
class ObjectProbe {
 public:
  /// Buffers that the stage may owe answers for at one time, one object each way; then a probe fails
  /// without another try.
  static constexpr int kMaxOwed = 2;

  ObjectProbe();
  /// Empty when it worked, else the step that failed and how. Throws std::bad_alloc.
  std::string run(Stage& stage, Deadline deadline);

 private:
  BlockId id_;
  std::shared_ptr<std::atomic<int>> owed_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace ucm::guard
