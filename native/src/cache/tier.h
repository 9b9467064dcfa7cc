// The host tier over a shared segment: claims, states per shard, owner and waiters.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "cache/segment.h"
#include "cache/table.h"
#include "cache/watch.h"
#include "ucm/cache.h"

namespace ucm::cache {

class CacheTier final : public HostTier {
 public:
  CacheTier(Geometry geometry, CacheOptions options);
  ~CacheTier() override;

  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "cache"; }
  void bind(std::weak_ptr<TierSink> sink) override;
  bool retains() const noexcept override { return true; }
  bool holds_memory() const noexcept override { return !options_.watcher; }
  std::vector<std::span<std::byte>> regions() const override;
  Rotation rotation() const noexcept override;
  Status claim_load(const BlockId& id, std::span<const std::uint32_t> shards, ClaimUse use,
                    std::uint64_t cookie, std::span<ShardClaim> claims,
                    Slot& slot) noexcept override;
  void finish_load(const Slot& slot, std::uint32_t begin, std::uint32_t end,
                   Outcome outcome) noexcept override;
  DumpClaim claim_dump(const BlockId& id, Slot& slot,
                       std::span<std::uint8_t> have) noexcept override;
  void publish(const Slot& slot) noexcept override;
  void abort_dump(const Slot& slot) noexcept override;
  void release(const Slot& slot) noexcept override;
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present) noexcept override;
  void touch(std::span<const BlockId> ids) noexcept override;
  void remove(std::span<const BlockId> ids) noexcept override;
  std::map<std::string, std::uint64_t> stats() const override;
  std::string health() const override;
  void shutdown(Deadline deadline) noexcept override;

 private:
  /// A segment and this geometry's place in it. A watcher moves on to a successor.
  struct Attached {
    Attached(std::shared_ptr<Segment> s, std::uint32_t c, std::uint32_t reserve, bool exact)
        : segment(std::move(s)), table(*segment, c, reserve, exact) {}
    std::shared_ptr<Segment> segment;
    Table table;
  };
  struct Counters {
    std::atomic<std::uint64_t> shards_hit{0}, shards_owned{0}, shards_waited{0}, no_room{0},
        busy{0}, dumps{0}, dumps_present{0}, dumps_aborted{0}, shards_failed{0}, lock_timeouts{0};
  };

  [[nodiscard]] std::shared_ptr<Attached> attach() const;
  [[nodiscard]] std::shared_ptr<Attached> current() const noexcept;
  [[nodiscard]] Status claim_existing(std::uint32_t slot, std::span<const std::uint32_t> shards,
                                      std::span<ShardClaim> claims, bool& waits) noexcept;
  void claim_fresh(std::uint32_t slot, std::span<const std::uint32_t> shards,
                   std::span<ShardClaim> claims) noexcept;
  void own(ShardRow& row, ShardCell& cell) noexcept;
  void start_waiting(std::uint32_t slot, std::span<const std::uint32_t> shards,
                     std::span<const ShardClaim> claims, std::uint64_t cookie) noexcept;
  [[nodiscard]] DumpClaim claim_known_dump(std::uint32_t slot,
                                           std::span<std::uint8_t> have) noexcept;
  [[nodiscard]] bool lookup_locked(const Attached& at, const BlockId& id) const noexcept;
  void refused() noexcept;
  void end_claim(std::uint32_t slot) noexcept;
  [[nodiscard]] Slot slot_of(std::uint32_t slot) const noexcept;

  const Geometry geometry_;
  const CacheOptions options_;
  mutable std::mutex attach_mu_;
  mutable std::shared_ptr<Attached> attached_;  // under attach_mu_ in a watcher, else constant
  mutable std::atomic<std::int64_t> next_attach_ns_{0};
  // Shortcuts for workers.
  Segment* segment_ = nullptr;
  Table* table_ = nullptr;
  Watch* watch_ = nullptr;
  GeometryClass* class_ = nullptr;
  std::atomic<Watch::Client> client_{0};
  Counters count_;
};

}  // namespace ucm::cache
