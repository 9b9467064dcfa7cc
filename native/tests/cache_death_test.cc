// The owner of a slot dies at each step of its life: what survivors find, how soon, and that no slot is lost.
#include <chrono>
#include <csignal>

#include "cache_fixture.h"

namespace ucm::testing {
namespace {

using namespace std::chrono_literals;

/// The bound within which the living notice and clean up: the watcher ticks every 50 ms while anybody
/// waits, every 2 s else.
constexpr auto kWaitingBound = 1s;
constexpr auto kIdleBound = 4s;

struct Step {
  const char* name;
  std::function<void(HostTier&)> until_here;
  bool present;  ///< the object is whole afterwards
};

const BlockId kId = id_of(1);

Load claim(HostTier& t) { return load(t, kId, {0, 1}); }
void finish(HostTier& t, const Load& l, std::uint32_t shard, Status status = Status::kOk) {
  fill(t.geometry(), l.slot, kId, shard);
  t.finish_load(l.slot, shard, shard + 1, {status, status == Status::kOk ? 0 : EIO});
}
Slot open_dump(HostTier& t, std::uint32_t shards) {
  Slot slot;
  std::vector<std::uint8_t> have(2);
  (void)t.claim_dump(kId, slot, have);
  for (std::uint32_t s = 0; s < shards; ++s) fill(t.geometry(), slot, kId, s);
  return slot;
}

const std::vector<Step>& steps() {
  static const std::vector<Step> all{
      {"attached", [](HostTier&) {}, false},
      {"owns both shards", [](HostTier& t) { (void)claim(t); }, false},
      {"has read one of two", [](HostTier& t) { finish(t, claim(t), 0); }, false},
      {"one failed", [](HostTier& t) { finish(t, claim(t), 0, Status::kIoError); }, false},
      {"has read both, still pinned",
       [](HostTier& t) {
         const auto l = claim(t);
         finish(t, l, 0);
         finish(t, l, 1);
       },
       true},
      {"has let go",
       [](HostTier& t) {
         const auto l = claim(t);
         finish(t, l, 0);
         finish(t, l, 1);
         t.release(l.slot);
       },
       true},
      {"dumps, nothing in", [](HostTier& t) { (void)open_dump(t, 0); }, false},
      {"dumps, one in", [](HostTier& t) { (void)open_dump(t, 1); }, false},
      {"dumps, all in, not published", [](HostTier& t) { (void)open_dump(t, 2); }, false},
      {"published, still pinned", [](HostTier& t) { t.publish(open_dump(t, 2)); }, true},
      {"gave the dump up", [](HostTier& t) { t.abort_dump(open_dump(t, 1)); }, false},
      {"prefetches",
       [](HostTier& t) {
         (void)load(t, kId, {0, 1}, 3, ClaimUse::kPrefetch);
       },
       false},
  };
  return all;
}

class CacheDeathTest : public CacheTest {
 protected:
  template <class Condition>
  static bool within(std::chrono::milliseconds bound, Condition condition) {
    const auto until = Clock::now() + bound;
    while (!condition()) {
      if (Clock::now() > until) return false;
      std::this_thread::sleep_for(2ms);
    }
    return true;
  }

  /// What was told about a shard, if anything.
  static bool told(Sink& sink, std::uint32_t shard, ShardEvent& event) {
    const std::lock_guard lock(sink.mu);
    for (const Told& t : sink.told) {
      if (shard < t.begin || shard >= t.end) continue;
      event = t.event;
      return true;
    }
    return false;
  }

  /// A child that came to `step` and waits to be killed.
  pid_t victim(const Geometry& g, const CacheOptions& o, const Step& step) {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    const pid_t pid = spawn([&] {
      auto tier = open_cache(g, o);
      tier->bind(std::make_shared<Sink>());
      step.until_here(*tier);
      (void)!::write(ready[1], "x", 1);
      for (;;) ::pause();
      return 0;
    });
    char c;
    EXPECT_EQ(::read(ready[0], &c, 1), 1);
    ::close(ready[0]), ::close(ready[1]);
    return pid;
  }
};

TEST_F(CacheDeathTest, AtEveryStepTheLivingGoOnAndNoSlotIsLost) {
  const auto g = geometry_of(2, 4096);
  const auto o = options(g, 4);
  for (const Step& step : steps()) {
    SCOPED_TRACE(step.name);
    const pid_t child = victim(g, o, step);  // before the survivor: it inherits nothing
    auto tier = open_cache(g, o);
    auto sink = std::make_shared<Sink>();
    tier->bind(sink);
    // Somebody asks while the owner lives: what it gets may have to be taken over.
    const auto before = load(*tier, kId, {0, 1}, 9);
    const bool waits =
        before.status == Status::kOk && std::find(before.claims.begin(), before.claims.end(),
                                                  ShardClaim::kWaiting) != before.claims.end();
    bool failed = false;
    const auto died = Clock::now();
    ::kill(child, SIGKILL);
    EXPECT_EQ(wait_exit(child), 128 + SIGKILL);

    if (before.status == Status::kOk) {
      for (std::size_t i = 0; i < before.claims.size(); ++i) {
        const auto shard = static_cast<std::uint32_t>(i);
        if (before.claims[i] == ShardClaim::kReady) {
          EXPECT_TRUE(intact(g, before.slot, kId, shard));
        } else if (before.claims[i] == ShardClaim::kOwned) {
          finish(*tier, before, shard);
        } else {
          // Takes over what the dead did not finish, hears of what failed before it died.
          ShardEvent event = ShardEvent::kReady;
          ASSERT_TRUE(within(kWaitingBound, [&] { return told(*sink, shard, event); })) << shard;
          ASSERT_NE(event, ShardEvent::kReady);
          failed |= event == ShardEvent::kFailed;
          if (event == ShardEvent::kTakeover) finish(*tier, before, shard);
        }
      }
      if (waits) {
        EXPECT_LT(Clock::now() - died, kWaitingBound);
      }
      tier->release(before.slot);
      EXPECT_NE(present(*tier, kId), failed);
    }
    // Whoever attaches cleans up at once; without that the living do it within their bound, tried once.
    if (&step != &steps()[4]) (void)open_cache(g, o);
    ASSERT_TRUE(within(kIdleBound, [&] {
      const auto s = tier->stats();
      return s.at("slots_pinned") == 0 && s.at("slots_dumping") == 0 &&
             s.at("processes_workers") == 1;
    })) << "something of the dead stayed";
    if (before.status != Status::kOk) {
      EXPECT_EQ(present(*tier, kId), step.present);
    }
    if (step.present) {
      const auto l = load(*tier, kId, {0, 1});
      EXPECT_TRUE(intact(g, l.slot, kId, 0) && intact(g, l.slot, kId, 1));
      tier->release(l.slot);
    }
    // All four slots can be had at once.
    std::vector<Slot> held;
    for (int k = 10; k < 14; ++k) {
      const auto l = load(*tier, id_of(static_cast<std::uint64_t>(k)), {0});
      ASSERT_EQ(l.status, Status::kOk) << "slot " << k - 10 << " of 4 is lost";
      held.push_back(l.slot);
    }
    for (const Slot& s : held) {
      tier->finish_load(s, 0, 1, {Status::kMiss, 0});
      tier->release(s);
    }
    tier.reset();  // the last one: the next step starts with a new segment
    EXPECT_TRUE(files().empty());
  }
}

// Who waits for a living owner that does not move is told so by its own deadline, not by this layer; but
// when every waiter but one dies as well, the one left is served.
TEST_F(CacheDeathTest, AWaiterOutlivesOwnerAndOtherWaiters) {
  const auto g = geometry_of(2, 4096);
  const auto o = options(g, 4);
  const pid_t owner = victim(g, o, steps()[1]);
  const pid_t other = victim(g, o, steps()[1]);  // finds both loading: it waits
  auto tier = make(g, o);
  const auto mine = load(*tier, kId, {0, 1}, 5);
  ASSERT_EQ(mine.claims, (std::vector{ShardClaim::kWaiting, ShardClaim::kWaiting}));
  ::kill(other, SIGKILL);
  ::kill(owner, SIGKILL);
  EXPECT_EQ(wait_exit(other), 128 + SIGKILL);
  EXPECT_EQ(wait_exit(owner), 128 + SIGKILL);
  const auto told = sinks[0]->wait_for(2);
  ASSERT_EQ(told.size(), 2u);
  for (const Told& t : told) {
    EXPECT_EQ(t.event, ShardEvent::kTakeover);
    finish(*tier, mine, t.begin);
  }
  tier->release(mine.slot);
  EXPECT_TRUE(present(*tier, kId));
  EXPECT_TRUE(within(kIdleBound, [&] {
    return tier->stats().at("slots_pinned") == 0 && tier->stats().at("processes_workers") == 1;
  }));
}

}  // namespace
}  // namespace ucm::testing
