#include "ucm/guard_stage.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "guard/breaker.h"
#include "guard/object_probe.h"

namespace ucm {
namespace {

using std::chrono::milliseconds;

constexpr std::int64_t kNever = INT64_MAX;

std::int64_t ticks(Clock::time_point t) noexcept { return t.time_since_epoch().count(); }

GuardOptions checked(GuardOptions o) {
  if (o.interval.count() <= 0 || o.timeout.count() <= 0) {
    throw std::invalid_argument("store_health: interval and timeout must be at least 1 ms");
  }
  if (o.window == 0 || o.window > guard::Breaker::kMaxWindow || o.failures == 0 ||
      o.failures > o.window) {
    throw std::invalid_argument(
        "store_health: expected 1 <= failures <= window <= 64, got failures " +
        std::to_string(o.failures) + ", window " + std::to_string(o.window));
  }
  if (o.clock == nullptr) o.clock = std::make_shared<GuardClock>();
  return o;
}

}  // namespace

/// What the probe thread shares with the stage; a thread that is left behind keeps it alive.
struct GuardStage::State {
  State(std::shared_ptr<Stage> stage, GuardOptions o)
      : inner(std::move(stage)),
        options(checked(std::move(o))),
        breaker(options.window, options.failures) {}

  void run() noexcept;
  std::string probe(bool& skipped) noexcept;
  /// Samples of a probe that is silent for too long. Needs `mu`.
  void charge(Clock::time_point now) noexcept;
  void add(bool good, std::string text) noexcept;
  /// True when new work is to be refused.
  bool refuses() noexcept {
    const std::int64_t due = charge_at.load(std::memory_order_relaxed);
    if (due != kNever && ticks(options.clock->now()) >= due) {
      const std::lock_guard lock(mu);
      charge(options.clock->now());
    }
    return is_open.load(std::memory_order_relaxed);
  }

  const std::shared_ptr<Stage> inner;
  const GuardOptions options;
  std::atomic<bool> is_open{false};
  std::atomic<std::int64_t> charge_at{kNever};  ///< when silence is the next bad sample
  std::atomic<std::uint64_t> lookups{0};
  std::atomic<std::uint64_t> reads{0};
  std::atomic<std::uint64_t> writes{0};
  std::atomic<bool> ended{false};

  std::mutex mu;
  std::condition_variable cv;
  guard::Breaker breaker;
  guard::ObjectProbe object;                                         ///< probe thread only
  Clock::time_point next = options.clock->now() + options.interval;  ///< probe
  Clock::time_point since{};                                         ///< of the running probe
  bool charged = false;  ///< the running probe has failed by its silence
  bool stop = false;
  std::string why;  ///< of the latest bad sample
  std::uint64_t probes = 0;
  std::uint64_t bad = 0;
  std::uint64_t skipped = 0;
  std::uint64_t opened = 0;
  std::uint64_t closed = 0;
  std::uint64_t stuck = 0;
  std::thread thread;
};

void GuardStage::State::add(bool good, std::string text) noexcept {
  ++probes;
  if (!good) {
    ++bad;
    why = std::move(text);
  }
  if (!breaker.add(good)) return;
  is_open.store(breaker.open());
  ++(breaker.open() ? opened : closed);
}

void GuardStage::State::charge(Clock::time_point now) noexcept {
  std::int64_t due = charge_at.load();
  // A window of silence says all there is to say, however long nobody has asked.
  for (std::uint32_t n = 0; due != kNever && ticks(now) >= due && n < options.window; ++n) {
    const auto silent = std::chrono::duration_cast<milliseconds>(now - since).count();
    add(false, "no answer to a probe for " + std::to_string(silent) + " ms");
    charged = true;
    due += ticks(Clock::time_point(options.interval));
  }
  if (due != kNever && ticks(now) >= due) {
    due = ticks(now) + ticks(Clock::time_point(options.interval));
  }
  charge_at.store(due);
}

std::string GuardStage::State::probe(bool& was_skipped) noexcept {
  try {
    const Deadline deadline = Clock::now() + options.timeout;
    if (auto own = inner->probe(deadline)) return std::move(*own);
    return object.run(*inner, deadline);
  } catch (...) {
    was_skipped = true;  // no memory, no thread: that says nothing of the medium
    return {};
  }
}

void GuardStage::State::run() noexcept {
  std::unique_lock lock(mu);
  GuardClock& clock = *options.clock;
  while (!stop) {
    if (clock.now() < next) {
      clock.wait(lock, cv, next);
      continue;
    }
    since = clock.now();
    charged = false;
    charge_at.store(ticks(since + options.timeout));
    lock.unlock();
    bool was_skipped = false;
    std::string failed = probe(was_skipped);
    lock.lock();
    if (stop) break;
    charge(clock.now());  // an answer that comes too late is none
    charge_at.store(kNever);
    if (was_skipped) {
      ++skipped;
    } else if (!charged) {
      const bool good = failed.empty();
      add(good, std::move(failed));
    }
    next = std::max(clock.now(), since + options.interval);
  }
  ended.store(true);
}

GuardStage::GuardStage(std::shared_ptr<Stage> inner, GuardOptions options)
    : state_(std::make_shared<State>(std::move(inner), std::move(options))) {
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // signals belong to the threads of the host program
  state_->thread = std::thread([state = state_] { state->run(); });
  pthread_setname_np(state_->thread.native_handle(), "ucm-health");
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

GuardStage::~GuardStage() { shutdown(Clock::now() + std::chrono::seconds(1)); }

const Geometry& GuardStage::geometry() const noexcept { return state_->inner->geometry(); }
std::string GuardStage::name() const { return state_->inner->name(); }
std::string GuardStage::identity() const { return state_->inner->identity(); }
bool GuardStage::keep_packed() noexcept { return state_->inner->keep_packed(); }

void GuardStage::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                        bool stop_at_first_miss) noexcept {
  if (state_->refuses()) {
    state_->lookups += ids.size();
    std::fill(present.begin(), present.end(), std::uint8_t{0});
    return;
  }
  state_->inner->lookup(ids, present, stop_at_first_miss);
}

void GuardStage::read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
                      Deadline deadline) noexcept {
  if (state_->refuses()) {
    state_->reads += ops.size();
    for (const ReadOp& op : ops) {
      sink->on_read(op.cookie, op.begin, op.end, {Status::kMiss, kOutOfService});
    }
    return;
  }
  state_->inner->read(ops, std::move(sink), deadline);
}

void GuardStage::write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
                       Deadline deadline) noexcept {
  if (state_->refuses()) {
    state_->writes += ops.size();
    for (const WriteOp& op : ops) sink->on_written(op.cookie, {Status::kRejected, kOutOfService});
    return;
  }
  state_->inner->write(ops, std::move(sink), deadline);
}

void GuardStage::touch(std::span<const BlockId> ids) noexcept {
  if (!state_->refuses()) state_->inner->touch(ids);
}

// A removal has no answer in which a refusal could be told, and a damaged object must not stay.
void GuardStage::remove(std::span<const BlockId> ids) noexcept { state_->inner->remove(ids); }

std::map<std::string, std::uint64_t> GuardStage::stats() const {
  std::map<std::string, std::uint64_t> out = state_->inner->stats();
  out["health_open"] = state_->refuses() ? 1 : 0;
  out["health_refused_lookups_total"] = state_->lookups;
  out["health_refused_reads_total"] = state_->reads;
  out["health_refused_writes_total"] = state_->writes;
  const std::lock_guard lock(state_->mu);
  out["health_probes_total"] = state_->probes;
  out["health_probe_failures_total"] = state_->bad;
  out["health_probes_skipped_total"] = state_->skipped;
  out["health_opened_total"] = state_->opened;
  out["health_closed_total"] = state_->closed;
  out["health_probe_stuck"] = state_->stuck;
  return out;
}

std::string GuardStage::health() const {
  std::string out = state_->inner->health();
  (void)state_->refuses();
  const std::lock_guard lock(state_->mu);
  const guard::Breaker& breaker = state_->breaker;
  std::string mine;
  if (breaker.open()) {
    mine = "out of service: loads are misses and dumps are refused until " +
           std::to_string(state_->options.window) + " probes in a row succeed (" +
           std::to_string(breaker.good_streak()) + " so far); latest failure: " + state_->why;
  } else if (breaker.bad() != 0) {
    mine = std::to_string(breaker.bad()) + " of the last " + std::to_string(breaker.samples()) +
           " probes failed (" + std::to_string(state_->options.failures) +
           " take the stage out of service); latest failure: " + state_->why;
  }
  if (!mine.empty()) out = out.empty() ? mine : mine + "; " + out;
  return out;
}

bool GuardStage::open() const noexcept { return state_->refuses(); }

void GuardStage::shutdown(Deadline deadline) noexcept {
  {
    const std::lock_guard lock(state_->mu);
    state_->stop = true;
    state_->cv.notify_all();
  }
  state_->inner->shutdown(deadline);  // answers what the probe may be waiting for
  std::thread& thread = state_->thread;
  if (!thread.joinable()) return;
  const Deadline grace = std::max(deadline, Clock::now() + milliseconds(10));
  while (!state_->ended.load() && Clock::now() < grace) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  if (state_->ended.load()) {
    thread.join();
    return;
  }
  thread.detach();
  const std::lock_guard lock(state_->mu);
  state_->stuck = 1;
}

}  // namespace ucm
