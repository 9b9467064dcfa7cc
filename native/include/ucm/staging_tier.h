// A host tier that retains nothing: a private bounded pool of object buffers (pipeline `Posix`).
#pragma once

#include <mutex>
#include <vector>

#include "ucm/host_tier.h"

namespace ucm {

class StagingTier final : public HostTier {
 public:
  /// `load_reserve` buffers only loads may take; `shared` buffers anybody may. One private mapping,
  /// every page touched here, by several threads: about as long as copying that much memory once.
  /// Throws std::bad_alloc / std::invalid_argument.
  StagingTier(Geometry geometry, std::uint32_t load_reserve, std::uint32_t shared);
  ~StagingTier() override;
  StagingTier(const StagingTier&) = delete;
  StagingTier& operator=(const StagingTier&) = delete;

  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "staging"; }
  void bind(std::weak_ptr<TierSink>) override {}
  bool retains() const noexcept override { return false; }
  std::vector<std::span<std::byte>> regions() const override {
    return {{base_, geometry_.object_bytes() * total_}};
  }
  Status claim_load(const BlockId&, std::span<const std::uint32_t> shards, ClaimUse use,
                    std::uint64_t cookie, std::span<ShardClaim> claims,
                    Slot& slot) noexcept override;
  void finish_load(const Slot&, std::uint32_t, std::uint32_t, Outcome) noexcept override {}
  DumpClaim claim_dump(const BlockId&, Slot& slot, std::span<std::uint8_t> have) noexcept override;
  void publish(const Slot&) noexcept override {}
  void abort_dump(const Slot& slot) noexcept override { release(slot); }
  void release(const Slot& slot) noexcept override;
  void lookup(std::span<const BlockId>, std::span<std::uint8_t>) noexcept override {}
  void touch(std::span<const BlockId>) noexcept override {}
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override;
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override {}

 private:
  bool take(bool for_load, Slot& slot) noexcept;

  const Geometry geometry_;
  const std::uint32_t load_reserve_;
  const std::uint32_t total_;
  std::byte* base_ = nullptr;
  mutable std::mutex mu_;
  std::vector<std::uint32_t> free_;  // stack: the warmest buffer is used next
};

}  // namespace ucm
