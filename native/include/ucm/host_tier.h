// Host memory that holds objects on their way between an engine and the stages below.
//
// The Store (store.h) drives everything: it copies to and from engine memory, submits reads and
// writes to the stage below, retries and reports. A tier only owns memory and the state of what is
// in it. Two tiers exist: StagingTier (a private bounded pool, nothing is retained) and the shared
// host cache (slots of one segment for all ranks of a node, state per shard, CLOCK).
//
//   load   claim_load -> per shard: kReady  copy it out now
//                                   kOwned  Store reads it from the stage below into slot.data, then
//                                           finish_load(READY or failed) - exactly once per shard
//                                   kWaiting somebody else is filling it: TierSink::on_shards follows
//          ... copies done, no I/O in flight ... release
//   dump   claim_dump -> kFill: Store copies shards in, any order; all in and committed -> publish;
//          the stage below reads from slot.data; when it has answered -> release.
//          Given up before publish -> abort_dump.
//
// Pins. Each successful claim pins its slot: address and content stay valid until the one
// release/abort_dump that ends the claim. The Store keeps the pin while a stage may still touch the
// buffer, also long after the task was told "timeout" (quarantine); a tier therefore never takes a
// pinned slot back on its own. Pins that are left at shutdown are I/O that never came back: their
// memory is never reused or unmapped by this process.
//
// Threads. Every call is thread-safe, never throws and never waits for media or other processes
// (short internal locks only). finish_load, release, publish and abort_dump are called from stage
// threads and copier threads; claims from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ucm/block_id.h"
#include "ucm/geometry.h"
#include "ucm/stage.h"
#include "ucm/status.h"

namespace ucm {

/// What happened to a shard that a load claim found kWaiting.
enum class ShardEvent : std::uint8_t {
  kReady,     ///< the bytes are there: copy
  kFailed,    ///< the owner failed; the outcome says how
  kTakeover,  ///< the owner died: the shard is kOwned by this claim now, read it and finish_load
};

/// Receives what concerns claims of this process. Called on the tier's own threads (never from
/// inside a claim), must not block, must not throw.
class TierSink {
 public:
  virtual ~TierSink() = default;
  /// Shards [begin, end) of the load claim made with `cookie`, once per shard that was kWaiting.
  /// May arrive after release. Returns false when the claim is gone (released, task given up): a
  /// kTakeover answered with false is not accepted, the tier hands the shards to the next waiter.
  virtual bool on_shards(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                         ShardEvent event, Outcome outcome) noexcept = 0;
  /// A claim that was refused for lack of room may succeed now. May be spurious. A tier whose room
  /// is only freed by this process's own releases need not call it.
  virtual void on_room() noexcept = 0;
};

/// Pinned memory of one object: Geometry::object_bytes() at `data`, aligned to kIoAlign, shard i at
/// data + shard_offset(i). `handle` is the tier's own (slot index and the like).
struct Slot {
  std::byte* data = nullptr;
  std::uint64_t handle = 0;
};

enum class ShardClaim : std::uint8_t { kReady, kOwned, kWaiting };

enum class ClaimUse : std::uint8_t { kLoad, kPrefetch };

enum class DumpClaim : std::uint8_t {
  kFill,     ///< pinned; copy the shards whose `have` is 0, then publish
  kPresent,  ///< pinned and whole already (all shards readable): hand it to the stage below, release
  kNoRoom,   ///< nothing pinned; try again after a release or on_room
  kBusy,     ///< nothing pinned; somebody else fills this id right now; try again likewise
};

/// Which part of a task's work this process starts with, so that ranks that load the same objects
/// fetch different ones first: slices (rank + k) mod ranks. {0, 1} is natural order.
struct Rotation {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};

class HostTier {
 public:
  virtual ~HostTier() = default;

  [[nodiscard]] virtual const Geometry& geometry() const noexcept = 0;
  [[nodiscard]] virtual std::string name() const = 0;

  /// Called once by the Store, before any claim. Threads of the tier start here at the earliest.
  virtual void bind(std::weak_ptr<TierSink> sink) = 0;

  /// True when objects stay readable after release, so that lookup and prefetch make sense.
  [[nodiscard]] virtual bool retains() const noexcept = 0;
  /// False for a watcher of somebody else's memory: it answers lookup and touch, every claim is
  /// refused. A Store over it only looks up.
  [[nodiscard]] virtual bool holds_memory() const noexcept { return true; }
  /// The memory that all slots lie in, for pinning; valid until the tier is destroyed.
  [[nodiscard]] virtual std::vector<std::span<std::byte>> regions() const { return {}; }
  [[nodiscard]] virtual Rotation rotation() const noexcept { return {}; }

  /// Pin memory for `shards` (ascending, distinct) of `id` and tell per shard what to do (`claims`
  /// has one entry per entry of `shards`). kOk: pinned. kRejected: no room now, nothing pinned.
  /// kMiss: the id is being dumped and not published; nothing pinned. Other statuses: not loadable,
  /// nothing pinned. A shard is claimed as kOwned by one claim at a time in the whole node.
  /// `cookie` comes back in on_shards. kLoad may use all room, kPrefetch only what dumps may use.
  virtual Status claim_load(const BlockId& id, std::span<const std::uint32_t> shards, ClaimUse use,
                            std::uint64_t cookie, std::span<ShardClaim> claims,
                            Slot& slot) noexcept = 0;

  /// Shards [begin, end), owned by the claim that holds `slot`, are in place (kOk) or failed. Wakes
  /// those who wait. The error code is visible before the state.
  virtual void finish_load(const Slot& slot, std::uint32_t begin, std::uint32_t end,
                           Outcome outcome) noexcept = 0;

  /// Reserve room for the whole object, all or nothing, leaving the reserve of loads alone. `have`
  /// (Geometry::shard_count entries) is set to 1 for shards that are readable already and must not
  /// be written again. Until publish the object is not present for anyone.
  virtual DumpClaim claim_dump(const BlockId& id, Slot& slot,
                               std::span<std::uint8_t> have) noexcept = 0;

  /// All shards of a dump claim are in: the object is present from now on. The pin stays.
  virtual void publish(const Slot& slot) noexcept = 0;

  /// End a claim that was not published: nothing of it becomes present. Takes the pin back.
  virtual void abort_dump(const Slot& slot) noexcept = 0;

  /// End a load claim or a published (or kPresent) dump claim. Takes the pin back.
  virtual void release(const Slot& slot) noexcept = 0;

  /// present[i] = 1 where ids[i] is whole and readable in this tier; other entries are left alone,
  /// entries that are 1 already are skipped. Sets no access bits.
  virtual void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present) noexcept = 0;

  /// Heat pulse.
  virtual void touch(std::span<const BlockId> ids) noexcept = 0;

  /// Forget unpinned objects (healing, `ucm clear`).
  virtual void remove(std::span<const BlockId> ids) noexcept = 0;

  /// Counters, names with units; merged by the Store under name().
  [[nodiscard]] virtual std::map<std::string, std::uint64_t> stats() const = 0;
  /// Empty when healthy, else what is wrong and what to do.
  [[nodiscard]] virtual std::string health() const = 0;

  /// End the tier's threads within the deadline. No sink call is made after it returns. Pinned
  /// slots stay mapped. Idempotent.
  virtual void shutdown(Deadline deadline) noexcept = 0;
};

}  // namespace ucm
