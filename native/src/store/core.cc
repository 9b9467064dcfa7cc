#include "store/core.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

namespace ucm {
namespace {

/// How often events that cannot call back are looked at.
constexpr std::chrono::microseconds kEventPoll{200};
/// How many refused objects one pump looks past: one id that is busy elsewhere blocks no others.
constexpr std::size_t kBusyLookahead = 16;

StoreOptions checked(StoreOptions o) {
  if (o.copiers == 0 || o.running_depth == 0 || o.waiting_depth == 0 || o.timeout.count() <= 0) {
    throw std::invalid_argument(
        "store: timeout, copiers, waiting_queue_depth and running_queue_depth must be at least 1");
  }
  if (o.open_age.count() <= 0) o.open_age = o.timeout;
  return o;
}

/// Signals belong to the threads of the host program.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t old_{};
};

}  // namespace

StoreCore::StoreCore(std::shared_ptr<Stage> below_stage, std::shared_ptr<HostTier> host_tier,
                     std::shared_ptr<Device> engine_device, StoreOptions store_options)
    : below(std::move(below_stage)),
      tier(std::move(host_tier)),
      device(std::move(engine_device)),
      options(checked(store_options)),
      geometry(below->geometry()),
      pid(::getpid()) {
  running_.resize(options.running_depth);
  for (std::uint32_t i = options.running_depth; i > 0; --i) running_free_.push_back(i - 1);
  scratch_shards_.reserve(geometry.shard_count);
  scratch_claims_.reserve(geometry.shard_count);
  scratch_have_.reserve(geometry.shard_count);
}

StoreCore::~StoreCore() = default;

void StoreCore::start() {
  if (!moves_data()) return;
  tier->bind(weak_from_this());
  for (const std::span<std::byte> region : tier->regions()) {
    if (std::string why = device->pin(region); why.empty()) {
      pinned_.push_back(region);
    } else {
      not_pinned_ = std::move(why);
    }
  }
  const SignalsBlocked blocked;
  for (std::uint32_t i = 0; i < options.copiers; ++i) {
    threads_.emplace_back([this] { copier_loop(); });
    pthread_setname_np(threads_.back().native_handle(), "ucm-copy");
  }
  threads_.emplace_back([this] { timer_loop(); });
  pthread_setname_np(threads_.back().native_handle(), "ucm-timer");
}

void StoreCore::check_usable() const {
  if (::getpid() != pid) {
    throw ClosedError("the store was set up by process " + std::to_string(pid) +
                      " and cannot be used after fork: open a store in this process");
  }
  if (closed_) throw ClosedError("the store was closed: open a new one");
}

std::shared_ptr<TaskImpl> StoreCore::new_task(TaskKind kind, std::size_t rows) {
  const Deadline deadline = Clock::now() + options.timeout;
  // Age of an open object, then every try of the write with its grace and delay.
  const Deadline durable =
      deadline + options.open_age +
      (options.write_retries + 1) * (options.timeout + std::chrono::milliseconds(1000)) +
      options.retry_delay * (1U << std::min(options.write_retries, 10U));
  return std::make_shared<TaskImpl>(kind, rows, geometry.runs_per_shard, weak_from_this(), counters,
                                    deadline, durable);
}

void StoreCore::set_event(TaskImpl& task, std::uint64_t name) const {
  if (name == 0) return;
  task.event = device->event(name);
  if (task.event != nullptr) return;
  throw std::invalid_argument("store: event " + std::to_string(name) + " is not known to device " +
                              device->name() + "; nothing was submitted");
}

/// The timer thread looks at all waiting events when one calls back; without a call back it polls.
void StoreCore::watch_event(const std::shared_ptr<TaskImpl>& task) {
  const bool calls_back = task->event->subscribe([self = weak_from_this()] {
    if (const auto core = self.lock()) {
      const std::lock_guard lock(core->mu_);
      core->event_fired_ = true;
      core->timer_cv_.notify_one();
    }
  });
  if (calls_back) return;
  const std::lock_guard lock(mu_);
  ++polled_events_;
  timer_cv_.notify_one();
}

void StoreCore::rows_lost(TaskImpl& task, Status why) noexcept {
  Actions actions;
  {
    Lock lock(mu_);
    task.kind() == TaskKind::kLoad ? loads_lost(task, actions) : dumps_lost(task, why, actions);
  }
  perform(actions);
}

void StoreCore::want_pump() noexcept {
  if (load_queue_.empty() && prefetch_queue_.empty() && waiting_.empty()) return;
  pump_wanted_ = true;
  wake_copier();
}

void StoreCore::on_room() noexcept {
  const std::lock_guard lock(mu_);
  want_pump();
}

void StoreCore::arm(Clock::time_point when) noexcept {
  if (when >= timer_next_) return;
  timer_next_ = when;
  timer_cv_.notify_one();
}

bool StoreCore::idle_locked() const noexcept {
  return load_queue_.empty() && prefetch_queue_.empty() &&
         running_free_.size() == running_.size() && pool_free_.size() + lent_ == pool_.size();
}

/// Start what was waiting for room: loads, then dumps, then prefetches.
void StoreCore::pump_locked(Actions& actions) {
  while (Unit* const unit = load_queue_.pop_front()) {
    if (start_load(*unit, actions) == Start::kNoRoom) {
      load_queue_.push_front(unit);
      break;
    }
  }
  std::size_t refused = 0;
  for (DumpObject* object = waiting_.front(); object != nullptr && refused < kBusyLookahead;) {
    DumpObject* const next = waiting_.after(object);
    const DumpClaim claim = open_object(*object);
    if (claim == DumpClaim::kNoRoom) break;
    if (claim == DumpClaim::kBusy) {
      ++refused;
    } else if (complete(*object)) {
      begin_write(*object, actions);
    } else {
      queue_open_units(*object);
    }
    object = next;
  }
  while (load_queue_.empty() && !prefetch_queue_.empty() &&
         running_free_.size() > running_.size() / 2) {
    Unit* const unit = prefetch_queue_.pop_front();
    if (start_load(*unit, actions) == Start::kNoRoom) {
      prefetch_queue_.push_front(unit);
      break;
    }
  }
}

void StoreCore::perform(Actions& actions) noexcept {
  if (!actions.reads.empty()) {
    const std::shared_ptr<ReadSink> self = shared_from_this();
    std::size_t begin = 0;
    for (const auto& [end, deadline] : actions.read_groups) {
      below->read(std::span(actions.reads).subspan(begin, end - begin), self, deadline);
      begin = end;
    }
  }
  if (!actions.writes.empty()) {
    std::vector<WriteOp> ops;
    ops.reserve(actions.writes.size());
    for (const Actions::Write& write : actions.writes) {
      if (write.publish) tier->publish(write.slot);
      ops.push_back(write.op);
    }
    below->write(ops, shared_from_this(), Clock::now() + options.timeout);
  }
  actions.reads.clear();
  actions.read_groups.clear();
  actions.writes.clear();
  actions.released.clear();
}

void StoreCore::copier_loop() {
  Lock lock(mu_);
  while (true) {
    work_cv_.wait(lock, [&] {
      return stop_ || pump_wanted_ || !copy_loads_.empty() || !copy_dumps_.empty();
    });
    if (pump_wanted_) {  // first: it starts I/O that runs while we copy
      pump_wanted_ = false;
      Actions actions;
      pump_locked(actions);
      lock.unlock();
      perform(actions);
      lock.lock();
    } else if (Unit* const load = copy_loads_.pop_front()) {
      copy_load(*load, lock);
    } else if (Unit* const dump = copy_dumps_.pop_front()) {
      copy_dump(*dump, lock);
    } else if (stop_) {
      return;
    }
  }
}

Clock::time_point StoreCore::next_due() const {
  Clock::time_point due = Clock::time_point::max();
  if (!active_.empty()) {
    const auto task = active_.front().lock();
    due = task == nullptr ? Clock::now() : task->deadline();
  }
  if (open_.front() != nullptr) due = std::min(due, open_.front()->activity + options.open_age);
  if (writing_.front() != nullptr) due = std::min(due, writing_.front()->due);
  for (const DumpObject* o = retry_.front(); o != nullptr; o = retry_.after(o)) {
    due = std::min(due, o->due);
  }
  if (polled_events_ != 0 && !event_tasks_.empty()) due = std::min(due, Clock::now() + kEventPoll);
  return due;
}

void StoreCore::timer_loop() {
  Lock lock(mu_);
  while (!stop_) {
    timer_tick(lock);
    timer_next_ = next_due();
    if (stop_ || event_fired_) continue;
    const auto woken = [&] { return stop_ || event_fired_ || Clock::now() >= timer_next_; };
    if (woken()) continue;
    if (timer_next_ == Clock::time_point::max()) {
      timer_cv_.wait(lock);
    } else {
      timer_cv_.wait_until(lock, timer_next_);
    }
  }
}

void StoreCore::timer_tick(Lock& lock) {
  if (event_tasks_.empty()) {
    polled_events_ = 0;
  } else {
    mark_events();
  }
  event_fired_ = false;
  const auto now = Clock::now();
  Actions actions;
  std::vector<std::shared_ptr<TaskImpl>> expired;
  while (!active_.empty()) {
    std::shared_ptr<TaskImpl> task = active_.front().lock();
    if (task != nullptr && !task->done()) {
      if (task->deadline() > now) break;
      expired.push_back(std::move(task));
    } else if (task != nullptr) {
      actions.released.push_back(std::move(task));
    }
    active_.pop_front();
  }
  retry_writes(now, actions);
  give_up_overdue(now, actions);
  expire_open(now, actions);
  if (expired.empty() && actions.writes.empty() && actions.released.empty()) return;
  lock.unlock();
  for (const auto& task : expired) task->lose_open(Status::kTimeout);
  expired.clear();
  perform(actions);
  lock.lock();
}

void StoreCore::give_up_queued(Actions& actions) noexcept {
  for (auto* queue : {&load_queue_, &prefetch_queue_}) {
    while (Unit* const unit = queue->pop_front()) {
      for (std::uint32_t pos = unit->begin; pos < unit->end; ++pos) {
        unit->task->finish_open(unit->task->order[pos], {Status::kClosed, 0});
      }
      actions.released.push_back(std::move(unit->keep));
    }
  }
  // Open objects that nothing submitted can complete any more.
  for (DumpObject* object = open_.front(); object != nullptr;) {
    DumpObject* const next = open_.after(object);
    bool pending = object->copying != (object->lent ? 1U : 0U);
    for (Unit* u = object->units.front(); u != nullptr && !pending; u = object->units.after(u)) {
      pending = any_open(*u);
    }
    if (!pending) drop_object(*object, {Status::kClosed, 0}, actions);
    object = next;
  }
}

std::uint64_t StoreCore::close(std::chrono::milliseconds timeout) {
  const std::lock_guard one_closer(close_mu_);
  if (closed_.exchange(true)) return abandoned_;
  const auto start = Clock::now();
  const Deadline deadline = start + timeout;
  Actions actions;
  std::vector<std::shared_ptr<TaskImpl>> open_tasks;
  {
    Lock lock(mu_);
    closing_ = true;
    give_up_queued(actions);
    lock.unlock();
    perform(actions);
    lock.lock();
    // Part of the bound is kept for the stages' own shutdown.
    idle_cv_.wait_until(lock, start + timeout * 3 / 4, [&] { return idle_locked(); });
    for (const auto& weak : active_) {
      if (auto task = weak.lock()) open_tasks.push_back(std::move(task));
    }
    active_.clear();
    event_tasks_.clear();
  }
  for (const auto& task : open_tasks) task->lose_open(Status::kClosed);
  below->shutdown(std::max(deadline, Clock::now() + std::chrono::milliseconds(10)));
  if (tier != nullptr)
    tier->shutdown(std::max(deadline, Clock::now() + std::chrono::milliseconds(10)));
  {
    const std::lock_guard lock(mu_);
    stop_ = true;
    work_cv_.notify_all();
    timer_cv_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const std::span<std::byte> region : pinned_) device->unpin(region);
  {
    Lock lock(mu_);
    abandoned_ = running_.size() - running_free_.size();
    for (DumpObject& object : pool_) {
      using State = DumpObject::State;
      if (object.state == State::kWriting || object.state == State::kOverdue) {
        ++abandoned_;  // the stage still owes an answer: the slot stays pinned
        for (Unit* u = object.units.front(); u != nullptr; u = object.units.after(u)) {
          for (std::uint32_t pos = u->begin; pos < u->end; ++pos) {
            u->task->finish_durable(u->task->order[pos], {Status::kClosed, 0});
          }
        }
        detach_units(object, actions);
      } else if (object.state == State::kRetry) {
        finish_object(object, {Status::kClosed, 0}, actions);
      } else if (object.state != State::kFree) {
        drop_object(object, {Status::kClosed, 0}, actions);
      }
    }
    counters->abandoned_io = abandoned_;
  }
  perform(actions);
  return abandoned_;
}

std::string StoreCore::device_health() const {
  std::string out = device->health();
  if (!not_pinned_.empty()) {
    out += (out.empty() ? "" : "; ") + std::string("host buffers are not pinned (") + not_pinned_ +
           "): copies work, but more slowly";
  }
  return out;
}

std::size_t StoreCore::prefetch_room() const {
  const std::lock_guard lock(mu_);
  return options.waiting_depth -
         std::min<std::size_t>(prefetch_queue_.size(), options.waiting_depth);
}

void StoreCore::gauges(std::map<std::string, std::uint64_t>& out) const {
  const std::lock_guard lock(mu_);
  std::uint64_t quarantined = overdue_.size();
  for (const Running& running : running_) {
    if (running.unit != nullptr && !any_open(*running.unit) && !running.unit->queued_copy) {
      ++quarantined;
    }
  }
  out["store.loads_waiting"] = load_queue_.size();
  out["store.loads_running"] = running_.size() - running_free_.size();
  out["store.prefetches_waiting"] = prefetch_queue_.size();
  out["store.dumps_waiting"] = waiting_.size();
  out["store.objects_open"] = open_.size();
  out["store.buffers_lent"] = lent_;
  out["store.objects_writing"] = writing_.size() + retry_.size();
  out["store.buffers_quarantined"] = quarantined;
}

}  // namespace ucm
