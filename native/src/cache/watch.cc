#include "cache/watch.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>

#include "cache/futex.h"
#include "cache/segment.h"
#include "cache/table.h"
#include "chaos/hooks.h"

namespace ucm::cache {
namespace {

using namespace std::chrono_literals;

/// How soon a dead owner is noticed by those who wait for it.
constexpr auto kWaitingTick = 50ms;
/// How soon pins of dead processes are taken back when nobody waits for anything.
constexpr auto kIdleTick = 2s;

}  // namespace

Watch::~Watch() { stop(); }

Watch::Client Watch::add_client(std::weak_ptr<TierSink> sink, std::uint32_t quarantine_s) {
  Client id = 0;
  {
    const std::lock_guard lock(client_mu_);
    id = next_client_++;
    auto state = std::make_shared<ClientState>();
    state->sink = std::move(sink);
    clients_[id] = std::move(state);
    quarantine_s_ = quarantine_s;
  }
  const std::lock_guard lock(thread_mu_);
  if (!thread_.joinable()) {
    stop_ = false;
    sigset_t all, old;  // signals are the business of the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    pthread_setname_np(thread_.native_handle(), "ucm-cache");
  }
  return id;
}

void Watch::remove_client(Client client) noexcept {
  bool last = false;
  std::shared_ptr<ClientState> state;
  {
    const std::lock_guard lock(client_mu_);
    const auto it = clients_.find(client);
    if (it == clients_.end()) return;
    state = std::move(it->second);
    clients_.erase(it);
    last = clients_.empty();
  }
  {
    const std::lock_guard lock(state->calling);
    state->gone = true;
  }
  for (auto& s : stripes_) {
    const std::lock_guard lock(s.mu);
    entries_ -= static_cast<std::uint32_t>(
        std::erase_if(s.waiting, [client](const Waiting& w) { return w.client == client; }));
  }
  if (last) stop();
}

void Watch::stop() noexcept {
  const std::lock_guard lock(thread_mu_);
  if (!thread_.joinable()) return;
  stop_ = true;
  nudge();
  thread_.join();
}

void Watch::nudge() noexcept { segment_.wake(segment_.self_bit()); }

std::shared_ptr<Watch::ClientState> Watch::client(Client id) noexcept {
  const std::lock_guard lock(client_mu_);
  const auto it = clients_.find(id);
  return it == clients_.end() ? nullptr : it->second;
}

void Watch::want_room(Client id, Shared<std::uint64_t>& wanted) noexcept {
  const auto state = client(id);
  if (!state) return;
  state->wanted = &wanted;
  wanted.fetch_or(segment_.self_bit());
  // What frees room may have happened just before: the thread ticks from now on.
  if (!room_pending_.exchange(true)) nudge();
}

void Watch::room_changed(Shared<std::uint64_t>& wanted) noexcept {
  if (wanted.load() == 0) return;
  segment_.wake(wanted.exchange(0));
}

void Watch::pin(std::uint32_t slot) noexcept {
  const std::lock_guard lock(stripe(slot).mu);
  if (segment_.local_pins(slot)++ == 0) {
    UCM_CHAOS_POINT(kPinned);
    segment_.meta(slot).pins.fetch_or(segment_.self_bit());
  }
  ++segment_.pinned;
}

bool Watch::unpin(std::uint32_t slot, ShardRow& row) noexcept {
  Stripe& s = stripe(slot);
  const std::lock_guard lock(s.mu);
  --segment_.pinned;
  if (--segment_.local_pins(slot) != 0) return false;
  if (!s.waiting.empty()) {
    const auto gone = std::erase_if(s.waiting, [slot](const Waiting& w) { return w.slot == slot; });
    entries_ -= static_cast<std::uint32_t>(gone);
  }
  row.waiters.fetch_and(~segment_.self_bit());
  UCM_CHAOS_POINT(kUnpinned);
  const std::uint64_t before = segment_.meta(slot).pins.fetch_and(~segment_.self_bit());
  return (before & ~segment_.self_bit()) == 0;
}

void Watch::wait_for(Client client, std::uint32_t slot, ShardRow& row, std::uint64_t cookie,
                     std::vector<std::uint32_t> shards) {
  {
    Stripe& s = stripe(slot);
    const std::lock_guard lock(s.mu);
    // Announced before the thread looks at the states: a completion after that look sees the bit.
    row.waiters.fetch_or(segment_.self_bit());
    s.waiting.push_back({client, slot, &row, cookie, std::move(shards)});
    ++entries_;
  }
  nudge();
}

void Watch::run() noexcept {
  Shared<std::uint32_t>& version = segment_.record(segment_.self()).version;
  auto next_reap = std::chrono::steady_clock::now();
  auto next_retry = next_reap;
  bool freed = false;  // by a recovery
  while (!stop_) {
    const std::uint32_t seen = version.load(std::memory_order_acquire);
    std::uint64_t owners = 0;
    collect(owners);
    for (const Event& event : events_) emit(event);
    const auto now = std::chrono::steady_clock::now();
    if (room_pending_) {
      deliver_room(freed || now >= next_retry);
      if (now >= next_retry) next_retry = now + kWaitingTick;
    }
    freed = false;
    for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
      if ((owners >> p & 1) != 0 && !segment_.alive(p)) {
        freed |= recover(segment_, p, quarantine_s_);
      }
    }
    if (now >= next_reap) {
      freed |= recover_dead(segment_, quarantine_s_) != 0;
      next_reap = now + kIdleTick;
    }
    if (freed) continue;
    if (stop_) break;
    const bool busy = entries_ != 0 || room_pending_;
    futex_wait(version, seen,
               busy ? std::chrono::nanoseconds(UCM_CHAOS_TICK(kWaitingTick))
                    : std::chrono::nanoseconds(kIdleTick));
  }
}

void Watch::collect(std::uint64_t& owners) noexcept {
  events_.clear();
  if (entries_ == 0) return;
  for (auto& s : stripes_) {
    const std::lock_guard lock(s.mu);
    for (Waiting& entry : s.waiting) collect_entry(entry, owners);
    entries_ -= static_cast<std::uint32_t>(
        std::erase_if(s.waiting, [](const Waiting& w) { return w.shards.empty(); }));
  }
}

// The entry exists, so this process has a pin on the slot: its states are those of that object.
void Watch::collect_entry(Waiting& entry, std::uint64_t& owners) noexcept {
  const auto note = [&](std::uint32_t shard, ShardEvent kind, Outcome outcome) {
    if (!events_.empty()) {
      Event& last = events_.back();
      if (last.cookie == entry.cookie && last.client == entry.client && last.slot == entry.slot &&
          last.end == shard && last.kind == kind && last.outcome.status == outcome.status &&
          last.outcome.error == outcome.error && kind != ShardEvent::kTakeover) {
        last.end = shard + 1;
        return;
      }
    }
    events_.push_back(
        {entry.client, entry.slot, entry.row, entry.cookie, shard, shard + 1, kind, outcome});
  };
  std::erase_if(entry.shards, [&](std::uint32_t shard) {
    ShardCell& cell = entry.row->cells()[shard];
    switch (static_cast<ShardState>(cell.state.load(std::memory_order_seq_cst))) {
      case ShardState::kReady:
        note(shard, ShardEvent::kReady, {Status::kOk, 0});
        return true;
      case ShardState::kFailed:
        note(shard, ShardEvent::kFailed,
             {static_cast<Status>(cell.status.load(std::memory_order_relaxed)),
              cell.error.load(std::memory_order_relaxed)});
        return true;
      case ShardState::kEmpty:  // a dump that was given up in between
        note(shard, ShardEvent::kFailed, {Status::kMiss, 0});
        return true;
      case ShardState::kLoading:
        break;
    }
    std::uint32_t owner = 0;
    if (cell.owner.compare_exchange_strong(owner, segment_.self() + 1)) {
      UCM_CHAOS_POINT(kTakenOver);
      // The claim may be released before its sink answers: keep the slot until then.
      ++segment_.local_pins(entry.slot);
      ++segment_.pinned;
      note(shard, ShardEvent::kTakeover, {Status::kOk, 0});
      return true;
    }
    owners |= std::uint64_t{1} << (owner - 1);
    return false;
  });
}

void Watch::emit(const Event& event) noexcept {
  bool taken = false;
  if (const auto state = client(event.client)) {
    const std::lock_guard lock(state->calling);
    if (const auto sink = state->gone ? nullptr : state->sink.lock()) {
      taken = sink->on_shards(event.cookie, event.begin, event.end, event.kind, event.outcome);
    }
  }
  if (event.kind != ShardEvent::kTakeover) return;
  if (taken) {
    segment_.header().takeovers.fetch_add(1, std::memory_order_relaxed);
  } else {
    hand_on(event);
  }
  (void)unpin(event.slot, *event.row);
}

// The claim that should have taken the shard over is gone: the next one that waits gets it; nobody
// left, and it has failed.
void Watch::hand_on(const Event& event) noexcept {
  ShardCell& cell = event.row->cells()[event.begin];
  bool here = false;
  {
    Stripe& s = stripe(event.slot);
    const std::lock_guard lock(s.mu);
    for (const Waiting& w : s.waiting) {
      here |= w.slot == event.slot &&
              std::find(w.shards.begin(), w.shards.end(), event.begin) != w.shards.end();
    }
  }
  const std::uint64_t others = event.row->waiters.load() & ~segment_.self_bit();
  if (!here && others == 0) {
    cell.status.store(static_cast<std::uint32_t>(Status::kIoError), std::memory_order_relaxed);
    cell.error.store(EOWNERDEAD, std::memory_order_relaxed);
    set_state(cell, ShardState::kFailed);
  } else {
    cell.owner.store(0);
  }
  segment_.wake(event.row->waiters.load() | segment_.self_bit());
}

// A client whose bit was taken away was meant by somebody who freed room; on a tick all try again.
void Watch::deliver_room(bool all) noexcept {
  std::vector<std::shared_ptr<ClientState>> clients;
  room_pending_ = false;  // first: a refusal from here on sets it again
  {
    const std::lock_guard lock(client_mu_);
    for (auto& [id, state] : clients_) clients.push_back(state);
  }
  for (const auto& state : clients) {
    Shared<std::uint64_t>* const wanted = state->wanted.load();
    if (wanted == nullptr) continue;
    if (!all && (wanted->load() & segment_.self_bit()) != 0) {
      room_pending_ = true;
      continue;
    }
    state->wanted = nullptr;
    const std::lock_guard lock(state->calling);
    if (const auto sink = state->gone ? nullptr : state->sink.lock()) sink->on_room();
  }
}

}  // namespace ucm::cache
