// Where the chaos harness (native/chaos) takes hold of the store: points at which it kills the
// process, and bugs that it can plant to prove that it would notice. Empty in every other build.
//
// Files that use these macros are compiled a second time, with UCM_CHAOS, for the harness alone.
#pragma once

#include <chrono>
#include <cstdint>

namespace ucm::chaos {

/// Instructions between which a death leaves the most behind.
enum class Point : std::uint8_t {
  kNone,
  kSegmentCreate,    ///< segment allocated, header half written
  kSegmentAttach,    ///< record lock taken, record half written
  kSegmentLeave,     ///< record given up, file not yet removed
  kSegmentRetire,    ///< retired, not yet unlinked
  kClassJoin,        ///< geometry class half written
  kLockHeld,         ///< an owner lock was just taken
  kSlotTaken,        ///< slot marked taken, still in its chain
  kSlotPrepared,     ///< slot has its id and a pin, in no chain
  kSlotLinked,       ///< in its chain, phase not yet told
  kPinned,           ///< pin counted here, not yet in the slot
  kUnpinned,         ///< waiters withdrawn, pin still there
  kShardOwned,       ///< shard loading, claim not yet answered
  kShardReady,       ///< shard ready, not yet counted, nobody woken
  kPublishHalf,      ///< some shards of a dump ready
  kPublishUnphased,  ///< all ready, phase still dumping
  kDumpReopened,     ///< owner written over a partial object, phase not yet told
  kTakenOver,        ///< shard taken over from a dead owner, nobody told
  kExtentAdopted,    ///< extent has an owner, not yet listed
  kExtentDoubled,    ///< extent in its list twice, list not yet shorter
  kExtentOwnerless,  ///< extent off its list and without owner, not yet counted
  kRecovery,         ///< in the middle of cleaning up after another death
  kTempCreated,      ///< temporary file empty
  kTempWritten,      ///< temporary file whole, not renamed
  kRenamed,          ///< object visible, nobody told
  kReadDone,         ///< object read, not verified
  kCollecting,       ///< some candidates removed
  kLeaseWritten,     ///< lease in its temporary, not in place
  kRootIdentity,     ///< root identity in its temporary
  kCount,
};

/// What the canary runs plant.
enum class Bug : std::uint8_t {
  kNone,
  kNoChecksum,      ///< reads are not verified
  kRenameFirst,     ///< objects become visible before their bytes are written
  kMissingWake,     ///< a finished load wakes nobody
  kFreeReferenced,  ///< eviction takes slots that somebody has pinned
  kPinsLeak,        ///< pins of the dead are never taken back
  kCount,
};

#ifdef UCM_CHAOS
/// Kills this process at the n-th passage of the armed point.
void pass(Point point) noexcept;
[[nodiscard]] bool planted(Bug bug) noexcept;
/// How often those who wait look without having been woken; a longer one makes a lost wake-up visible.
[[nodiscard]] std::chrono::milliseconds tick(std::chrono::milliseconds usual) noexcept;
#define UCM_CHAOS_POINT(point) ::ucm::chaos::pass(::ucm::chaos::Point::point)
#define UCM_CHAOS_BUG(bug) ::ucm::chaos::planted(::ucm::chaos::Bug::bug)
#define UCM_CHAOS_TICK(usual) ::ucm::chaos::tick(usual)
#else
#define UCM_CHAOS_POINT(point) static_cast<void>(0)
#define UCM_CHAOS_BUG(bug) false
#define UCM_CHAOS_TICK(usual) (usual)
#endif

}  // namespace ucm::chaos
