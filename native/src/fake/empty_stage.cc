#include "ucm/empty_stage.h"

#include <algorithm>

namespace ucm {

void EmptyStage::lookup(std::span<const BlockId>, std::span<std::uint8_t> present, bool) noexcept {
  std::fill(present.begin(), present.end(), std::uint8_t{0});
}

void EmptyStage::read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
                      Deadline) noexcept {
  reads_ += ops.size();
  for (const ReadOp& op : ops) {
    sink->on_read(op.cookie, op.begin, op.end, {closed_ ? Status::kClosed : Status::kMiss, 0});
  }
}

void EmptyStage::write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
                       Deadline) noexcept {
  writes_ += ops.size();
  for (const WriteOp& op : ops) {
    sink->on_written(op.cookie, {closed_ ? Status::kClosed : Status::kOk, 0});
  }
}

std::map<std::string, std::uint64_t> EmptyStage::stats() const {
  return {{"reads_total", reads_}, {"writes_total", writes_}};
}

}  // namespace ucm
