// The interface of a storage stage (L4): whole objects out of and into store-owned memory.
//
// A pipeline is a stack of stages. Engine addresses never reach a stage: the copy between engine
// memory and store-owned buffers is the store's own (store.h), so a stage can neither write into an
// engine late nor read from it early.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ucm/block_id.h"
#include "ucm/geometry.h"
#include "ucm/status.h"

namespace ucm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

/// Receives results of reads. Methods are called on the stage's own threads, must not block, and
/// must not throw.
class ReadSink {
 public:
  virtual ~ReadSink() = default;
  /// Shards [begin, end) of the operation submitted with `cookie` are final. Called exactly once
  /// per shard of the operation. Until then the stage may still write into the buffer, so its owner
  /// keeps it (quarantined) even when the caller has already been told "timeout".
  virtual void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                       Outcome outcome) noexcept = 0;
};

/// Receives results of writes; the same rules as ReadSink.
class WriteSink {
 public:
  virtual ~WriteSink() = default;
  /// The object submitted with `cookie` is durable on the last stage (kOk) or is not stored.
  /// Called exactly once per operation; `from` is free afterwards.
  virtual void on_written(std::uint64_t cookie, Outcome outcome) noexcept = 0;
};

/// Read shards [begin, end) of `id` into `into` + shard_offset(shard). `into` is the start of a data
/// region of Geometry::object_bytes(), aligned to kIoAlign, owned by the caller of read().
struct ReadOp {
  BlockId id;
  std::byte* into = nullptr;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint64_t cookie = 0;
  bool urgent = true;  ///< loads go before writes; prefetches set this to false
  /// Null: packed objects are misses. Else one entry per shard of the geometry, of which those of
  /// [begin, end) are set before on_read says kOk: the bytes that the shard has packed, which then lie
  /// at its place instead of it; 0: the shard itself.
  std::uint64_t* packed = nullptr;
};

/// Store the whole object `id` from the data region `from`.
struct WriteOp {
  BlockId id;
  const std::byte* from = nullptr;
  std::uint64_t cookie = 0;
  /// Null: shards as they are. Else, per shard of the geometry, the bytes that it has packed, at its
  /// place in `from` (which is zero-padded to kIoAlign); 0: the shard itself. At most packed_limit().
  /// Owned by the caller as `from` is.
  const std::uint64_t* packed = nullptr;
};

/// One storage stage, bound to one geometry. All calls are thread-safe and none throws after
/// construction; none of them waits for the medium except lookup().
class Stage {
 public:
  virtual ~Stage() = default;

  [[nodiscard]] virtual const Geometry& geometry() const noexcept = 0;
  [[nodiscard]] virtual std::string name() const = 0;

  /// Equal for stages (of any process) that serve the same objects, different for others: the
  /// identities of its directories, addresses of its servers. A host cache above is shared by the
  /// processes that have the same storage below, and by nobody else. Empty: no such distinction.
  [[nodiscard]] virtual std::string identity() const { return {}; }

  /// present[i] = 1 when ids[i] is whole and committed, else 0. Asks the medium, keeps no index that
  /// could lie when others share it. `stop_at_first_miss`: what follows the first miss may be left 0.
  virtual void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                      bool stop_at_first_miss) noexcept = 0;

  /// A stage above asks, once and before any operation, for objects whose shards may be packed (shorter
  /// in a form of its own; see ReadOp::packed). True: they take only the room they need and count as
  /// present from now on. False: this stage has no such objects, `packed` must stay null.
  virtual bool keep_packed() noexcept { return false; }

  /// Start the reads. Bytes are verified before on_read says kOk. `sink` outlives the stage's use.
  /// An operation not started by `deadline` ends as kTimeout without touching its buffer.
  virtual void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
                    Deadline deadline) noexcept = 0;

  /// Start the writes. An object that is already stored is success. An object becomes visible whole
  /// or not at all.
  virtual void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
                     Deadline deadline) noexcept = 0;

  /// Heat pulse; batched and throttled by the stage, forwarded down.
  virtual void touch(std::span<const BlockId> ids) noexcept = 0;

  /// Remove objects (a hint for stages that cannot). Used by discard, by healing and by `ucm clear`.
  virtual void remove(std::span<const BlockId> ids) noexcept = 0;

  /// Counters, names with units (`read_bytes_total`); merged by the store under the stage's name.
  [[nodiscard]] virtual std::map<std::string, std::uint64_t> stats() const = 0;

  /// Empty when healthy, else what is wrong and what to do.
  [[nodiscard]] virtual std::string health() const = 0;

  /// Try the medium by the way objects take, beside the queues: write, read back, compare and delete a
  /// small private file or entry that is no object. Blocks until `deadline` at most, or longer where
  /// the medium hangs and the stage cannot help it; called by one thread at a time. Returns empty when
  /// it worked, else the step that failed, with path and errno; a full medium works. Nothing: the stage
  /// has no probe, the caller tries a private object instead (through the queues, so it also fails while
  /// they hold more than it can wait for). Throws when this process could not try (memory, threads,
  /// descriptors), which says nothing of the medium.
  virtual std::optional<std::string> probe(Deadline deadline) {
    (void)deadline;
    return std::nullopt;
  }

  /// Refuse new work, let running I/O end, join threads; after `deadline` abandon and count them
  /// (their buffers stay quarantined). Idempotent.
  virtual void shutdown(Deadline deadline) noexcept = 0;
};

}  // namespace ucm
