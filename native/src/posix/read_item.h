// A read on its way through the stage.
#pragma once

#include <memory>
#include <utility>

#include "posix/queue.h"

namespace ucm::posix {

struct ReadItem {
  ReadOp op;
  std::shared_ptr<ReadSink> sink;
  Deadline deadline;

  void answer(Outcome outcome) noexcept { sink->on_read(op.cookie, op.begin, op.end, outcome); }
};
using ReadQueue = IoQueue<ReadItem>;

}  // namespace ucm::posix
