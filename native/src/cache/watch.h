// What this process waits for in a segment: pins, waiting claims, and the one thread that sleeps on
// this process's futex and tells the tiers' sinks what happened.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "cache/layout.h"
#include "ucm/host_tier.h"

namespace ucm::cache {

class Segment;

/// Thread-safe. One per Segment. The thread runs while there is a client with a sink.
class Watch {
 public:
  explicit Watch(Segment& segment) noexcept : segment_(segment) {}
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  using Client = std::uint32_t;
  /// Sink calls for the client start here, on the watch thread.
  Client add_client(std::weak_ptr<TierSink> sink, std::uint32_t quarantine_s);
  /// No sink call of the client is made after it returns. Never called from a sink.
  void remove_client(Client client) noexcept;
  /// The client was refused: on_room follows when something changed (or soon).
  void want_room(Client client, Shared<std::uint64_t>& wanted) noexcept;
  /// Wake those who were refused. Cheap when nobody was.
  void room_changed(Shared<std::uint64_t>& wanted) noexcept;

  /// One more pin of this process. The bucket is locked, the slot is this process's (kTaken), or it
  /// is pinned already.
  void pin(std::uint32_t slot) noexcept;
  /// One less. The last one ends all waiting on the slot. True: no process has a pin any more.
  bool unpin(std::uint32_t slot, ShardRow& row) noexcept;

  /// Tell `client` once each of `shards` (ascending; pinned) is final, or taken over.
  void wait_for(Client client, std::uint32_t slot, ShardRow& row, std::uint64_t cookie,
                std::vector<std::uint32_t> shards);

  /// End the watch thread's sleep.
  void nudge() noexcept;

 private:
  struct Waiting {
    Client client;
    std::uint32_t slot;
    ShardRow* row;
    std::uint64_t cookie;
    std::vector<std::uint32_t> shards;
  };
  struct Event {
    Client client;
    std::uint32_t slot;
    ShardRow* row;
    std::uint64_t cookie;
    std::uint32_t begin;
    std::uint32_t end;
    ShardEvent kind;
    Outcome outcome;
  };
  struct alignas(kCacheLine) Stripe {
    std::mutex mu;
    std::vector<Waiting> waiting;
  };
  struct ClientState {
    std::weak_ptr<TierSink> sink;
    std::mutex calling;  ///< held while the sink is called: removal waits for it
    bool gone = false;   ///< under calling
    std::atomic<Shared<std::uint64_t>*> wanted{nullptr};  ///< refused: where its bit was set
  };

  void run() noexcept;
  /// Collects what became final into events_, and who owns what is still open into owners.
  void collect(std::uint64_t& owners) noexcept;
  void collect_entry(Waiting& entry, std::uint64_t& owners) noexcept;
  [[nodiscard]] std::shared_ptr<ClientState> client(Client id) noexcept;
  void emit(const Event& event) noexcept;
  void hand_on(const Event& event) noexcept;
  void deliver_room(bool all) noexcept;
  [[nodiscard]] Stripe& stripe(std::uint32_t slot) noexcept { return stripes_[slot % kStripes]; }
  void stop() noexcept;

  static constexpr std::uint32_t kStripes = 64;

  Segment& segment_;
  Stripe stripes_[kStripes];
  std::atomic<std::uint32_t> entries_{0};
  // Never held while a sink is called: sinks take their own locks, under which they call the tier.
  std::mutex client_mu_;
  std::map<Client, std::shared_ptr<ClientState>> clients_;
  Client next_client_ = 1;
  std::atomic<bool> room_pending_{false};
  std::atomic<std::uint32_t> quarantine_s_{60};
  std::mutex thread_mu_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::vector<Event> events_;  // of the thread alone
};

}  // namespace ucm::cache
