// A stage with one planted bug, over a good one: proves that the conformance suite can fail.
#pragma once

#include <atomic>

#include "ucm/stage.h"

namespace ucm {

enum class PlantedBug : std::uint8_t {
  kNone = 0,
  kLookupSaysYes = 1,     ///< every object is reported present
  kLookupShifted = 2,     ///< answers belong to the id before
  kLookupStopsEarly = 3,  ///< stops at the first miss although nobody asked
  kMissAsOk = 4,          ///< reading an absent object succeeds
  kCorruptAsOk = 5,       ///< failed verification is reported as success
  kLosesWrites = 6,       ///< says durable, stores nothing
  kTornWrite = 7,         ///< the last shard of a written object is zeros
  kWrongShard = 8,        ///< shards of a read are delivered in reverse places
  kRemoveIgnored = 9,     ///< removal does nothing
  kBatchOutcome = 10,     ///< one failure of a batch is reported for every operation of it
};
inline constexpr std::uint8_t kPlantedBugs = 11;

class CanaryStage final : public Stage {
 public:
  CanaryStage(std::shared_ptr<Stage> good, PlantedBug bug) : good_(std::move(good)), bug_(bug) {}

  const Geometry& geometry() const noexcept override { return good_->geometry(); }
  std::string name() const override { return "Canary"; }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override;
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override;
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override;
  void touch(std::span<const BlockId> ids) noexcept override { good_->touch(ids); }
  void remove(std::span<const BlockId> ids) noexcept override;
  std::map<std::string, std::uint64_t> stats() const override { return good_->stats(); }
  std::string health() const override { return good_->health(); }
  void shutdown(Deadline deadline) noexcept override { good_->shutdown(deadline); }

 private:
  const std::shared_ptr<Stage> good_;
  const PlantedBug bug_;
};

}  // namespace ucm
