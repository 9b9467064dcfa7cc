// A model of what several processes do to one slot of the host cache: small enough to try every
// interleaving of their steps, and every death between two steps.
//
// One step is one access to shared memory of the real code. The slot holds one shard; the bucket lock is
// the owner lock of its bucket; each process has its thread of work and, in one of them at a time, a
// recovery (the watch thread). What each step stands for is said beside it (file: function).
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ucm::model {

inline constexpr int kProcesses = 3;

/// What a process does, once.
enum class Role : std::uint8_t {
  kLoad,   ///< claim_load, read or wait, copy out, release
  kDump,   ///< claim_dump, copy in, publish, release
  kEvict,  ///< CLOCK takes the slot for another id and lets go of it
};

/// Mistakes that the model must notice.
enum class Mutation : std::uint8_t {
  kNone,
  kNoWake,             ///< a finished load wakes nobody
  kAnnounceLate,       ///< a waiter looks at the state before it says that it waits
  kTakeoverUnchecked,  ///< a waiter takes a shard over by a plain store
  kPinsKept,           ///< pins of the dead stay
  kEvictPinned,        ///< the pins are not looked at again with the bucket locked
  kOrphanForgotten,    ///< the shard of a dead owner stays as it is
};

enum class Phase : std::uint8_t { kFree, kTaken, kDumping, kObject, kGarbage };
enum class Shard : std::uint8_t { kEmpty, kLoading, kReady, kFailed };

/// Where a process is. Named after what it does next.
enum class At : std::uint8_t {
  // claim_load
  kLock,
  kPin,
  kExamine,
  kOwn,
  kUnlock,
  // ... of an id that has no slot
  kTake,
  kLockFresh,
  kPrepare,
  kLink,
  // finish_load
  kRead,
  kWakeMask,
  kWake,
  // the watch
  kAnnounce,
  kSeen,
  kCheck,
  kSleep,
  kHandOn,
  kHandOnStore,
  kHandOnWake,
  // copy out, release
  kCopy,
  kUnwait,
  kUnpin,
  // claim_dump, publish
  kDumpPhase,
  kFill,
  kPublish,
  kPublishPhase,
  // eviction
  kEvictCheck,
  kEvictPhase,
  kEvictReset,
  kEvictFree,
  kDone,
};
enum class Recovering : std::uint8_t {
  kNo,
  kBreak,
  kConcern,
  kLock,
  kFix,
  kTaken,
  kWaiters,
  kPins,
  kUnlock,
  kWake
};

struct Process {
  At at = At::kLock;
  At then = At::kDone;      ///< after kUnlock
  std::uint8_t mask = 0;    ///< processes still to wake
  bool woken = false;       ///< its version was bumped since it was last read
  bool referenced = false;  ///< somebody else had pins when it pinned
  bool owns = false;        ///< it believes that the shard is its to fill
  bool reads = false;       ///< it copies the shard's bytes out
  bool dead = false;
  bool recovered = false;  ///< after its death
  friend auto operator<=>(const Process&, const Process&) = default;
};

struct State {
  Phase phase = Phase::kFree;
  Shard shard = Shard::kEmpty;
  std::uint8_t lock = 0;        ///< process + 1
  std::uint8_t slot_owner = 0;  ///< SlotMeta::owner, process + 1
  std::uint8_t owner = 0;       ///< ShardCell::owner
  std::uint8_t waiters = 0;
  std::uint8_t pins = 0;
  std::uint8_t deaths = 0;
  Recovering recovering = Recovering::kNo;
  std::uint8_t recoverer = 0, victim = 0, wake = 0;
  bool concerned = false;
  std::array<Process, kProcesses> process;
  friend auto operator<=>(const State&, const State&) = default;
};

struct Scenario {
  std::array<Role, kProcesses> roles{};
  State start;
  int max_deaths = 2;
  Mutation mutation = Mutation::kNone;
};

/// A state that follows. Progress: not a death, not a task that gives up, which nobody may count on.
struct Next {
  State state;
  bool progress = true;
};

void successors(const Scenario& scenario, const State& from, std::vector<Next>& out);

/// Empty, or what is wrong with a state whatever comes next.
[[nodiscard]] std::string broken(const State& state);
/// Every living process has ended and every dead one was recovered from.
[[nodiscard]] bool finished(const State& state);
/// Empty, or why the object cannot be claimed by a process that comes now.
[[nodiscard]] std::string unusable(const State& state);

}  // namespace ucm::model
