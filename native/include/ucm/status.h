// Outcomes of store operations. A miss is an outcome, not an exception: hot paths never throw.
#pragma once

#include <cerrno>
#include <cstdint>

namespace ucm {

/// Result of one shard (or one object) of a task. The numeric values are part of the Python and C
/// interfaces: never renumber, only append.
enum class Status : std::uint8_t {
  kOk = 0,         ///< done; the bytes are where they were asked to be
  kPending = 1,    ///< not finished yet
  kMiss = 2,       ///< no such object, or not whole
  kCorrupt = 3,    ///< an object was there but its content failed verification; it was removed
  kIoError = 4,    ///< the medium failed; errno is kept beside this status
  kTimeout = 5,    ///< the task's deadline passed first; no byte lands after this was told
  kRejected = 6,   ///< refused without being tried: queue full, no room, breaker open
  kCancelled = 7,  ///< cancelled by the caller
  kClosed = 8,     ///< the store was shut down
};

/// errno beside kMiss and kRejected of a stage that its guard has taken out of service: trying again
/// is of no use until the guard closes.
inline constexpr std::int32_t kOutOfService = EHOSTDOWN;

/// A status with the errno that caused it (0 when there is none).
struct Outcome {
  Status status = Status::kPending;
  std::int32_t error = 0;
};

}  // namespace ucm
