// A write on its way through the stage.
#pragma once

#include <memory>

#include "posix/queue.h"

namespace ucm::posix {

struct WriteItem {
  WriteOp op;
  std::shared_ptr<WriteSink> sink;
  Deadline deadline;

  void answer(Outcome outcome) noexcept { sink->on_written(op.cookie, outcome); }
};
using WriteQueue = IoQueue<WriteItem>;

}  // namespace ucm::posix
