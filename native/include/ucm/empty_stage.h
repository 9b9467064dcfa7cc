// A last stage that accepts every object and finds none: for measuring everything above it.
#pragma once

#include <atomic>

#include "ucm/stage.h"

namespace ucm {

class EmptyStage final : public Stage {
 public:
  explicit EmptyStage(Geometry geometry) : geometry_(std::move(geometry)) {}
  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "Empty"; }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override;
  /// Answers on the caller's thread: there is nothing to wait for.
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override;
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override;
  void touch(std::span<const BlockId>) noexcept override {}
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override;
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override { closed_ = true; }

 private:
  const Geometry geometry_;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> writes_{0};
  std::atomic<bool> closed_{false};
};

}  // namespace ucm
