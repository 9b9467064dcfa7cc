// The Store's side of a task: its rows, their states, and the units they are grouped into.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "store/counters.h"
#include "store/list.h"
#include "ucm/store.h"

namespace ucm {

class StoreCore;
class TaskImpl;
struct DumpObject;

/// States of a row beyond Status, never shown outside.
inline constexpr std::uint8_t kRowReady = 250;      // load: bytes are in the slot, to be copied out
inline constexpr std::uint8_t kRowCopying = 251;    // a copier is on it: cannot be given up
inline constexpr std::uint8_t kRowFinishing = 252;  // between the decision and the final state
inline constexpr std::uint8_t kRowOpen = static_cast<std::uint8_t>(Status::kPending);

/// How a shard of a load unit is being waited for.
enum class Io : std::uint8_t { kNone = 0, kReading = 1, kWaiting = 2 };

/// The rows of one task that name one object. Fields are guarded by the core's mutex.
struct Unit {
  TaskImpl* task = nullptr;
  std::shared_ptr<TaskImpl> keep;  ///< set while the core uses the unit
  BlockId id;
  std::uint32_t begin = 0;  ///< [begin, end) of TaskImpl::order
  std::uint32_t end = 0;
  Link<Unit> queue;  ///< waiting queue, or copy queue

  // loads
  Slot slot;
  std::uint32_t refs = 0;  ///< shards in flight + copy queue entry + users; 0: the pin is released
  std::uint64_t cookie = 0;  ///< 0: holds no slot
  bool queued_copy = false;

  bool event_ready = true;  ///< the prerequisite event has fired

  // dumps and commits
  DumpObject* object = nullptr;
  Link<Unit> of_object;
  std::uint32_t scan = 0;  ///< next position of `order` a copier looks at
};

class TaskImpl final : public Task, public std::enable_shared_from_this<TaskImpl> {
 public:
  TaskImpl(TaskKind kind, std::size_t rows, std::size_t runs_per_shard,
           std::weak_ptr<StoreCore> core, std::shared_ptr<Counters> counters, Deadline deadline,
           Deadline durable_deadline);

  TaskKind kind() const noexcept override { return kind_; }
  std::size_t size() const noexcept override { return rows_; }
  bool done() const override;
  bool durable_done() const override;
  TaskState state() const override;
  Outcome outcome(std::size_t row) const override;
  Outcome durable_outcome(std::size_t row) const override;
  bool wait_until(Deadline until) override;
  bool wait_row_until(std::size_t row, Deadline until) override;
  bool wait_durable_until(Deadline until) override;
  void give_up(Status why) override;
  void give_up_row(std::size_t row, Status why) override;
  void give_up_durable(Status why) override;
  Deadline deadline() const noexcept override { return deadline_; }
  Deadline durable_deadline() const noexcept override { return durable_deadline_; }

  // ---- for the core ----

  /// give_up without waiting for the fence: rows being copied stay open until they end.
  void lose_open(Status why) { lose(-1, why); }

  /// Move an open row from `from` to its final outcome; false when it was not in `from`.
  bool finish(std::uint32_t row, std::uint8_t from, Outcome outcome) noexcept;
  /// Finish a row that is open or ready to copy.
  bool finish_open(std::uint32_t row, Outcome outcome) noexcept {
    return finish(row, kRowOpen, outcome) || finish(row, kRowReady, outcome);
  }
  bool move(std::uint32_t row, std::uint8_t from, std::uint8_t to) noexcept {
    return status_[row].compare_exchange_strong(from, to, std::memory_order_acq_rel);
  }
  [[nodiscard]] std::uint8_t raw(std::uint32_t row) const noexcept {
    return status_[row].load(std::memory_order_acquire);
  }
  void finish_durable(std::uint32_t row, Outcome outcome) noexcept;

  // Set once before submission, read-only after.
  std::vector<BlockId> ids;
  std::vector<std::uint32_t> shards;
  std::vector<std::uint64_t> addresses;  ///< empty: nothing is copied (prefetch)
  std::vector<std::uint32_t> order;      ///< rows, grouped by object, ascending shard inside
  std::vector<Unit> units;
  std::shared_ptr<Event> event;
  CommitMode mode = CommitMode::kAuto;
  /// Loads, per position of `order`; on the first row of each shard. Guarded by the core's mutex.
  std::vector<Io> io;

 private:
  /// `row` < 0: all rows.
  void lose(std::int64_t row, Status why);
  void check_process() const;
  void row_done() noexcept;

  const TaskKind kind_;
  const std::size_t rows_;
  const std::weak_ptr<StoreCore> core_;
  const std::shared_ptr<Counters> counters_;
  const Deadline deadline_;
  const Deadline durable_deadline_;
  const pid_t pid_;

  std::unique_ptr<std::atomic<std::uint8_t>[]> status_;
  std::unique_ptr<std::int32_t[]> errors_;
  std::unique_ptr<std::atomic<std::uint8_t>[]> durable_;  // null for loads
  std::unique_ptr<std::int32_t[]> durable_errors_;
  std::atomic<std::size_t> open_;
  std::atomic<std::size_t> durable_open_;
  std::atomic<bool> failed_{false};
  std::atomic<std::uint32_t> row_waiters_{0};
  mutable std::mutex mu_;  // only for sleeping and waking
  std::condition_variable cv_;
};

}  // namespace ucm
