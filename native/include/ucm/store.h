// The store (L3): block ids and shards in, results per shard out. The C++ face of the contract in
// ucm_core/store/contract.py, with the same words.
//
// The Store owns the copier threads and the only code that touches engine memory. It copies between
// engine memory and slots of a host tier (host_tier.h) and moves whole objects between those slots
// and the stage below (stage.h).
//
// The fence. Every row (one shard of one task) becomes final exactly once. A row that is being
// copied is not final; wait() and cancel() return only when no row of the task is being copied.
// So after any result was told, no byte of that row is read from or written to engine memory.
//
// Fork. A Store belongs to the process that created it: calls from another process throw
// ClosedError, and destroying the object there leaks its memory instead of joining threads that do
// not exist.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "ucm/block_id.h"
#include "ucm/device.h"
#include "ucm/host_tier.h"
#include "ucm/stage.h"
#include "ucm/status.h"

namespace ucm {

/// The store was closed, or is used in a process that did not set it up.
class ClosedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The call needs a capability this store was set up without (loads on a lookup-only store).
class UnsupportedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class TaskKind : std::uint8_t { kLoad = 0, kDump = 1, kCommit = 2 };

/// When a dumped object is published.
enum class CommitMode : std::uint8_t { kAuto = 0, kExplicit = 1 };

/// How far a task has come. Numeric values are part of the Python interface.
enum class TaskState : std::uint8_t {
  kSubmitted = 0,  ///< rows are open
  kInBackend = 1,  ///< dumps: source free, handed on; not yet durable
  kDurable = 2,    ///< dumps: the last stage has it; loads: all rows are in place
  kFailed = 3,     ///< at least one row failed
};

/// A submitted load, dump or commit. Thread-safe. Rows are numbered in order of submission.
class Task {
 public:
  virtual ~Task() = default;
  [[nodiscard]] virtual TaskKind kind() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;
  /// Every row is final (dumps: the source is free and the stage below has accepted it).
  [[nodiscard]] virtual bool done() const = 0;
  /// done(), and for dumps and commits the last stage has answered for every row.
  [[nodiscard]] virtual bool durable_done() const = 0;
  [[nodiscard]] virtual TaskState state() const = 0;
  /// kPending while open.
  [[nodiscard]] virtual Outcome outcome(std::size_t row) const = 0;
  [[nodiscard]] virtual Outcome durable_outcome(std::size_t row) const = 0;

  /// Block until done() or `until`; nothing expires. Returns done().
  virtual bool wait_until(Deadline until) = 0;
  virtual bool wait_row_until(std::size_t row, Deadline until) = 0;
  virtual bool wait_durable_until(Deadline until) = 0;

  /// Open rows become `why` for good (kTimeout, kCancelled); returns after the fence.
  virtual void give_up(Status why) = 0;
  /// As give_up, for one row.
  virtual void give_up_row(std::size_t row, Status why) = 0;
  /// give_up, and durability not yet known becomes `why` for good. The backend may still finish.
  virtual void give_up_durable(Status why) = 0;

  /// When the Store itself gives up.
  [[nodiscard]] virtual Deadline deadline() const noexcept = 0;
  /// A bound by which durability of every row is known.
  [[nodiscard]] virtual Deadline durable_deadline() const noexcept = 0;
};

struct StoreOptions {
  std::chrono::milliseconds timeout{30'000};  ///< of a task, and of each write to the stage below
  std::uint32_t waiting_depth = 16'384;       ///< objects that may wait for a buffer, per direction
  std::uint32_t running_depth = 256;          ///< loads that hold a slot at one time
  std::uint32_t copiers = 1;                  ///< threads that copy
  bool synchronize_dumps = false;             ///< dumps without an event wait for the whole device
  std::uint32_t write_retries = 2;            ///< after the first try
  std::chrono::milliseconds retry_delay{20};  ///< before the first retry; doubles
  std::chrono::milliseconds open_age{
      0};  ///< idle age at which an open object is discarded; 0: timeout
};

/// Rows of a load or dump, all spans of equal length; `addresses` has runs_per_shard per row.
struct Rows {
  std::span<const BlockId> ids;
  std::span<const std::uint32_t> shards;
  std::span<const std::uint64_t> addresses;
};

/// The buffer of one object that is not stored yet, lent to the caller: see Store::lend.
struct Lent {
  std::byte* data =
      nullptr;  ///< Geometry::object_bytes(), shard i at shard_offset(i); null: refused
  std::uint64_t handle = 0;
};

class StoreCore;

class Store {
 public:
  /// Pins the tier's memory for the device and starts the threads. `tier` is null, or holds no memory, for a lookup-only store (role
  /// scheduler): loads and dumps throw UnsupportedError then and no buffer exists. Tier and stage have the same geometry.
  Store(std::shared_ptr<Stage> below, std::shared_ptr<HostTier> tier,
        std::shared_ptr<Device> device, StoreOptions options);
  ~Store();  ///< close(10 s) if still open
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  [[nodiscard]] const Geometry& geometry() const noexcept;

  /// All of the following throw ClosedError after close or fork, std::invalid_argument for an empty
  /// id, a shard out of range, spans that disagree.
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present);
  std::int64_t lookup_on_prefix(std::span<const BlockId> ids);
  std::int64_t lookup_on_reverse(std::span<const BlockId> ids);
  void prefetch(std::span<const BlockId> ids);
  void touch(std::span<const BlockId> ids);

  /// The same shard may be asked for by several rows. No byte is written to an address before `event` has
  /// fired (0: at once); reading from the medium does not wait for it. As for dumps, an unknown name is
  /// an error, and the event exists until the task is done.
  std::shared_ptr<Task> load(const Rows& rows, std::uint64_t event = 0);
  /// Address 0, or the same shard twice, refuses the whole submission. `event` 0: none; an unknown
  /// name is an error. Rows for an object that is open join it, whichever task opened it; EXPLICIT
  /// wins over AUTO on the same object. Rows whose shard is in already succeed without a copy. The
  /// event exists until the task is done.
  std::shared_ptr<Task> dump(const Rows& rows, std::uint64_t event, CommitMode mode);
  /// Publish objects when all their shards are in. An id that is not open here is kOk when it is
  /// stored already, else kMiss. An object whose commit times out is discarded.
  std::shared_ptr<Task> commit(std::span<const BlockId> ids);
  /// Throw away open objects (published ones stay); their open rows become kCancelled.
  void discard(std::span<const BlockId> ids);
  /// Lend the buffer of a new object, so that its bytes are produced in place and nothing is copied.
  /// The caller writes every shard and ends with exactly one donate() or give_back(); until then
  /// `data` stays valid and nobody else's, also after close() and after the id was discarded or
  /// expired (open_age). Refused (null) without room, or while the id is being dumped or is whole in
  /// the tier: dump() it then. Never waits. At most one lent buffer an id.
  Lent lend(const BlockId& id);
  /// The bytes are complete: publish the object, as a commit of one row does. kMiss: it expired or
  /// was discarded meanwhile. The caller touches the buffer no more.
  std::shared_ptr<Task> donate(const BlockId& id, std::uint64_t handle);
  /// Take a lent buffer back unused. A handle that was given back already is fine.
  void give_back(std::uint64_t handle) noexcept;
  /// Remove stored objects from every tier (healing, `ucm clear`).
  void remove(std::span<const BlockId> ids);

  /// "store.<name>", "<tier>.<name>", "<stage>.<name>".
  [[nodiscard]] std::map<std::string, std::uint64_t> stats() const;
  [[nodiscard]] std::map<std::string, std::string> health() const;

  /// Refuse new work, let running work end, join; past the bound cancel (kClosed) and abandon what
  /// is stuck below (its buffers stay mapped). Returns the number of abandoned I/O operations.
  /// Idempotent.
  std::uint64_t close(std::chrono::milliseconds timeout);

 private:
  void lookup_some(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                   bool stop_at_first_miss) const;

  std::shared_ptr<StoreCore> core_;
};

}  // namespace ucm
