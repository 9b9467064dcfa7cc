// The heart of the Store: queues, threads, and what is in flight.
//
// One mutex guards every structure; copies, stage calls and waits happen outside it. Lock order:
// core mutex, then a task's own (which is only taken to wake sleepers), then the tier's.
//
// Threads: `copiers` copier threads (copy, start queued work), one timer thread (deadlines, events,
// retries, ages). Stage and tier threads enter through the sinks; they only mark and queue.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "store/counters.h"
#include "store/list.h"
#include "store/task.h"
#include "ucm/store.h"

namespace ucm {

/// An object that is being dumped: from its first row until the stage below has answered.
struct DumpObject {
  enum class State : std::uint8_t {
    kFree,
    kWaiting,  ///< for room
    kOpen,     ///< holds a slot, shards come in
    kWriting,  ///< the stage below owes an answer
    kRetry,    ///< the stage refused, waits for the next try
    kOverdue,  ///< forgotten by tasks; the stage still owes its answer, the slot is quarantined
    kDoomed,   ///< discarded while copies run: freed when they end
  };
  enum class Shard : std::uint8_t { kEmpty, kCopying, kIn };

  BlockId id;
  State state = State::kFree;
  bool explicit_mode = false;
  bool committed = false;
  bool lent = false;        ///< its buffer is the caller's; counts as one row being copied
  bool published = false;   ///< visible in the tier, ends with release instead of abort
  std::uint32_t index = 0;  ///< in the pool; with `generation` the cookie of its write
  std::uint32_t generation = 1;
  std::uint32_t in = 0;       ///< shards in place
  std::uint32_t copying = 0;  ///< rows being copied
  std::uint32_t tries = 0;
  Slot slot;
  std::vector<Shard> shards;
  List<Unit, &Unit::of_object> units;
  Clock::time_point activity;  ///< last row attached
  Clock::time_point due;       ///< retry time, or when an answer of the stage is overdue
  Link<DumpObject> link;       ///< in the list of its state

  /// All shards are in and it was handed to the stage below: it cannot be discarded any more.
  [[nodiscard]] bool sent() const noexcept {
    return state == State::kWriting || state == State::kRetry;
  }
};
using DumpList = List<DumpObject, &DumpObject::link>;

/// What is to be done once the core's mutex is free.
struct Actions {
  std::vector<ReadOp> reads;
  std::vector<std::pair<std::size_t, Deadline>> read_groups;  ///< end index, deadline
  struct Write {
    WriteOp op;
    Slot slot;
    bool publish;
  };
  std::vector<Write> writes;
  std::vector<std::shared_ptr<TaskImpl>> released;  ///< last references may die: not under a lock
};

class StoreCore final : public ReadSink,
                        public WriteSink,
                        public TierSink,
                        public std::enable_shared_from_this<StoreCore> {
 public:
  StoreCore(std::shared_ptr<Stage> below, std::shared_ptr<HostTier> tier,
            std::shared_ptr<Device> device, StoreOptions options);
  ~StoreCore() override;
  void start();
  /// False: lookup only, no threads.
  [[nodiscard]] bool moves_data() const noexcept { return tier != nullptr && tier->holds_memory(); }

  void check_usable() const;  ///< throws ClosedError
  std::shared_ptr<TaskImpl> new_task(TaskKind kind, std::size_t rows);
  /// The event of a task that is about to be submitted; throws std::invalid_argument when unknown.
  void set_event(TaskImpl& task, std::uint64_t name) const;
  void submit_load(const std::shared_ptr<TaskImpl>& task);
  void submit_dump(const std::shared_ptr<TaskImpl>& task);
  /// Returns the rows whose object is not open here; the caller finishes them.
  std::vector<std::uint32_t> submit_commit(const std::shared_ptr<TaskImpl>& task);
  void discard(std::span<const BlockId> ids);
  Lent lend(const BlockId& id);
  /// Ends a loan. True: the object is complete and waits for its commit.
  bool end_loan(std::uint64_t handle, bool filled) noexcept;
  void rows_lost(TaskImpl& task, Status why) noexcept;
  std::uint64_t close(std::chrono::milliseconds timeout);
  /// What is wrong with the device; empty when nothing is.
  [[nodiscard]] std::string device_health() const;

  void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
               Outcome outcome) noexcept override;
  void on_written(std::uint64_t cookie, Outcome outcome) noexcept override;
  bool on_shards(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end, ShardEvent event,
                 Outcome outcome) noexcept override;
  void on_room() noexcept override;

  /// Objects that may still be queued for prefetch.
  [[nodiscard]] std::size_t prefetch_room() const;
  void gauges(std::map<std::string, std::uint64_t>& out) const;

  const std::shared_ptr<Stage> below;
  const std::shared_ptr<HostTier> tier;  ///< null: lookup only
  const std::shared_ptr<Device> device;
  const StoreOptions options;
  const Geometry geometry;
  const std::shared_ptr<Counters> counters = std::make_shared<Counters>();
  const pid_t pid;

 private:
  friend class Store;
  using Lock = std::unique_lock<std::mutex>;

  // core.cc: threads and shared machinery
  void copier_loop();
  void timer_loop();
  void timer_tick(Lock& lock);
  void pump_locked(Actions& actions);
  void perform(Actions& actions) noexcept;
  void wake_copier() noexcept { work_cv_.notify_one(); }
  void want_pump() noexcept;
  void arm(Clock::time_point when) noexcept;
  [[nodiscard]] Clock::time_point next_due() const;
  [[nodiscard]] bool idle_locked() const noexcept;

  // load.cc; mu_ held unless said otherwise
  enum class Start : std::uint8_t { kStarted, kNoRoom, kGone };
  Start start_load(Unit& unit, Actions& actions);
  void add_reads(Unit& unit, Actions& actions, bool urgent);
  void queue_copy(Unit& unit);
  void unref_load(Unit& unit, Actions& actions) noexcept;
  [[nodiscard]] Unit* load_of(std::uint64_t cookie) noexcept;
  [[nodiscard]] bool any_in(const Unit& unit, std::uint8_t state) const noexcept;
  [[nodiscard]] bool any_open(const Unit& unit) const noexcept { return any_in(unit, kRowOpen); }
  /// Shards [begin, end) of `unit` have their outcome. Returns shards that were waited for as `how`.
  std::uint32_t settle(Unit& unit, std::uint32_t begin, std::uint32_t end, Io how, Outcome outcome);
  void copy_load(Unit& unit, Lock& lock);
  void copy_shard_out(const std::byte* shard, const std::uint64_t* addresses) noexcept;
  void loads_lost(TaskImpl& task, Actions& actions) noexcept;

  // dump_object.cc; mu_ held
  [[nodiscard]] DumpObject* find(const BlockId& id) const;
  DumpObject* new_object(const BlockId& id);
  [[nodiscard]] DumpList* list_of(DumpObject::State state) noexcept;
  void enter(DumpObject& object, DumpObject::State state) noexcept;  ///< moves between the lists
  DumpClaim open_object(DumpObject& object);
  void drop_object(DumpObject& object, Outcome outcome, Actions& actions) noexcept;
  void detach_units(DumpObject& object, Actions& actions) noexcept;
  void free_object(DumpObject& object) noexcept;
  void expire_open(Clock::time_point now, Actions& actions);

  // dump_write.cc; mu_ held
  void begin_write(DumpObject& object, Actions& actions);
  void send_write(DumpObject& object, bool publish, Actions& actions);
  void retry_writes(Clock::time_point now, Actions& actions);
  void give_up_overdue(Clock::time_point now, Actions& actions);
  void finish_object(DumpObject& object, Outcome outcome, Actions& actions) noexcept;

  // dump.cc; mu_ held
  void queue_open_units(DumpObject& object);
  void attach(Unit& unit, DumpObject& object);
  [[nodiscard]] bool complete(const DumpObject& object) const noexcept;
  void dumps_lost(TaskImpl& task, Status why, Actions& actions) noexcept;
  void copy_dump(Unit& unit, Lock& lock);
  void copy_shard_in(std::byte* shard, const std::uint64_t* addresses) noexcept;
  void mark_events() noexcept;
  void watch_event(const std::shared_ptr<TaskImpl>& task);  // mu_ not held
  void give_up_queued(Actions& actions) noexcept;

  mutable std::mutex mu_;
  std::condition_variable work_cv_;   // copiers
  std::condition_variable timer_cv_;  // timer
  std::condition_variable idle_cv_;   // close
  bool closing_ = false;
  bool stop_ = false;
  bool pump_wanted_ = false;
  bool event_fired_ = false;       // a subscribed event called back
  std::size_t polled_events_ = 0;  // tasks whose event cannot call back
  Clock::time_point timer_next_ = Clock::time_point::max();

  // loads
  List<Unit, &Unit::queue> load_queue_;
  List<Unit, &Unit::queue> prefetch_queue_;
  List<Unit, &Unit::queue> copy_loads_;
  struct Running {
    Unit* unit = nullptr;
    std::uint32_t generation = 1;
  };
  std::vector<Running> running_;  // running_depth entries
  std::vector<std::uint32_t> running_free_;
  std::vector<std::uint32_t> scratch_shards_;
  std::vector<ShardClaim> scratch_claims_;

  // dumps
  std::deque<DumpObject> pool_;  // addresses are stable; grows to waiting_depth + slots at most
  std::vector<DumpObject*> pool_free_;
  std::unordered_map<BlockId, DumpObject*, BlockIdHash> objects_;
  std::size_t lent_ = 0;  // objects whose buffer is lent
  DumpList waiting_;
  DumpList open_;     // oldest activity first
  DumpList writing_;  // oldest first
  DumpList retry_;
  DumpList overdue_;
  List<Unit, &Unit::queue> copy_dumps_;
  std::vector<std::uint8_t> scratch_have_;

  std::vector<std::shared_ptr<TaskImpl>> event_tasks_;
  std::deque<std::weak_ptr<TaskImpl>> active_;  // by deadline: the timeout is one per store

  std::vector<std::span<std::byte>> pinned_;  // set by start(), taken back by close()
  std::string not_pinned_;                    // why, likewise constant in between

  std::mutex close_mu_;
  std::atomic<bool> closed_{false};
  std::uint64_t abandoned_ = 0;  // under close_mu_
  std::vector<std::thread> threads_;
};

}  // namespace ucm
