#include "ucm/canary_stage.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace ucm {
namespace {

/// Changes what the good stage answered on its way to the real sink.
class BadReads final : public ReadSink {
 public:
  BadReads(std::shared_ptr<ReadSink> sink, PlantedBug bug, std::span<const ReadOp> ops,
           const Geometry& geometry)
      : sink_(std::move(sink)), bug_(bug), geometry_(geometry), ops_(ops.begin(), ops.end()) {}

  void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
               Outcome outcome) noexcept override {
    if (bug_ == PlantedBug::kMissAsOk && outcome.status == Status::kMiss)
      outcome = {Status::kOk, 0};
    if (bug_ == PlantedBug::kCorruptAsOk && outcome.status == Status::kCorrupt) {
      outcome = {Status::kOk, 0};
    }
    if (bug_ == PlantedBug::kBatchOutcome) {
      const std::lock_guard lock(mu_);
      if (outcome.status != Status::kOk) spoiled_ = outcome;
      if (spoiled_.status != Status::kPending) outcome = spoiled_;
    }
    if (bug_ == PlantedBug::kWrongShard && outcome.status == Status::kOk)
      reverse(cookie, begin, end);
    sink_->on_read(cookie, begin, end, outcome);
  }

 private:
  void reverse(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end) const noexcept {
    const auto op =
        std::find_if(ops_.begin(), ops_.end(), [&](const ReadOp& o) { return o.cookie == cookie; });
    if (op == ops_.end()) return;
    for (std::uint32_t i = begin, j = end; i + 1 < j; ++i) {
      --j;
      std::byte* const a = op->into + geometry_.shard_offset(i);
      std::swap_ranges(a, a + geometry_.shard_bytes, op->into + geometry_.shard_offset(j));
    }
  }

  const std::shared_ptr<ReadSink> sink_;
  const PlantedBug bug_;
  const Geometry& geometry_;
  const std::vector<ReadOp> ops_;
  std::mutex mu_;
  Outcome spoiled_;
};

/// Keeps torn copies of objects until the good stage has written them.
class TornWrites final : public WriteSink {
 public:
  TornWrites(std::shared_ptr<WriteSink> sink, const Geometry& geometry)
      : sink_(std::move(sink)), geometry_(geometry) {}

  const std::byte* tear(const WriteOp& op) {
    std::vector<std::byte> copy(op.from, op.from + geometry_.object_bytes());
    const std::size_t last = geometry_.shard_offset(geometry_.shard_count - 1);
    std::fill_n(copy.begin() + static_cast<std::ptrdiff_t>(last), geometry_.shard_bytes,
                std::byte{0});
    const std::lock_guard lock(mu_);
    return (copies_[op.cookie] = std::move(copy)).data();
  }
  void on_written(std::uint64_t cookie, Outcome outcome) noexcept override {
    sink_->on_written(cookie, outcome);
  }

 private:
  const std::shared_ptr<WriteSink> sink_;
  const Geometry& geometry_;
  std::mutex mu_;
  std::unordered_map<std::uint64_t, std::vector<std::byte>> copies_;
};

}  // namespace

void CanaryStage::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                         bool stop_at_first_miss) noexcept {
  good_->lookup(ids, present, stop_at_first_miss || bug_ == PlantedBug::kLookupStopsEarly);
  if (bug_ == PlantedBug::kLookupSaysYes)
    std::fill(present.begin(), present.end(), std::uint8_t{1});
  if (bug_ == PlantedBug::kLookupShifted && !present.empty()) {
    std::rotate(present.begin(), present.end() - 1, present.end());
  }
}

void CanaryStage::read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
                       Deadline deadline) noexcept {
  good_->read(ops, std::make_shared<BadReads>(std::move(sink), bug_, ops, good_->geometry()),
              deadline);
}

void CanaryStage::write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
                        Deadline deadline) noexcept {
  if (bug_ == PlantedBug::kLosesWrites) {
    for (const WriteOp& op : ops) sink->on_written(op.cookie, {Status::kOk, 0});
  } else if (bug_ == PlantedBug::kTornWrite) {
    const auto torn = std::make_shared<TornWrites>(std::move(sink), good_->geometry());
    std::vector<WriteOp> bad(ops.begin(), ops.end());
    for (WriteOp& op : bad) op.from = torn->tear(op);
    good_->write(bad, torn, deadline);
  } else {
    good_->write(ops, std::move(sink), deadline);
  }
}

void CanaryStage::remove(std::span<const BlockId> ids) noexcept {
  if (bug_ != PlantedBug::kRemoveIgnored) good_->remove(ids);
}

}  // namespace ucm
