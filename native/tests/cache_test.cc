// The cache tier in one process: states, owners and waiters, CLOCK, reserve, classes.
#include <cerrno>
#include <random>

#include "cache_fixture.h"

namespace ucm::testing {
namespace {

TEST_F(CacheTest, DumpThenLoadGivesTheBytes) {
  const auto g = geometry_of(3, 5000);
  auto tier = make(g, 8);
  EXPECT_FALSE(present(*tier, id_of(1)));
  ASSERT_TRUE(put(*tier, id_of(1)));
  EXPECT_TRUE(present(*tier, id_of(1)));
  const auto l = load(*tier, id_of(1), {0, 2});
  ASSERT_EQ(l.status, Status::kOk);
  EXPECT_EQ(l.claims, (std::vector{ShardClaim::kReady, ShardClaim::kReady}));
  EXPECT_TRUE(intact(g, l.slot, id_of(1), 0));
  EXPECT_TRUE(intact(g, l.slot, id_of(1), 2));
  tier->release(l.slot);
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
}

TEST_F(CacheTest, UnpublishedDumpIsPresentForNobody) {
  const auto g = geometry_of(2, 4096);
  auto tier = make(g, 4);
  Slot slot;
  std::vector<std::uint8_t> have(2);
  ASSERT_EQ(tier->claim_dump(id_of(1), slot, have), DumpClaim::kFill);
  EXPECT_FALSE(present(*tier, id_of(1)));
  EXPECT_EQ(load(*tier, id_of(1), {0}).status, Status::kMiss);
  Slot second;
  EXPECT_EQ(tier->claim_dump(id_of(1), second, have), DumpClaim::kBusy);
  tier->abort_dump(slot);
  EXPECT_FALSE(present(*tier, id_of(1)));
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
  // The room is back, and the id is free again.
  for (int i = 1; i <= 4; ++i) ASSERT_TRUE(put(*tier, id_of(i)));
}

TEST_F(CacheTest, OnlyReadyCountsAfterAFailedLoad) {
  const auto g = geometry_of(2, 4096);
  auto tier = make(g, 4);
  auto l = load(*tier, id_of(7), {0, 1});
  ASSERT_EQ(l.status, Status::kOk);
  ASSERT_EQ(l.claims, (std::vector{ShardClaim::kOwned, ShardClaim::kOwned}));
  EXPECT_FALSE(present(*tier, id_of(7)));
  fill(g, l.slot, id_of(7), 0);
  tier->finish_load(l.slot, 0, 1, {Status::kOk, 0});
  EXPECT_FALSE(present(*tier, id_of(7)));  // one shard of two
  tier->finish_load(l.slot, 1, 2, {Status::kMiss, 0});
  EXPECT_FALSE(present(*tier, id_of(7)));
  tier->release(l.slot);
  EXPECT_FALSE(present(*tier, id_of(7)));
  // Unreferenced: may be tried again, and what was good still is.
  l = load(*tier, id_of(7), {0, 1});
  ASSERT_EQ(l.claims, (std::vector{ShardClaim::kReady, ShardClaim::kOwned}));
  tier->finish_load(l.slot, 1, 2, {Status::kOk, 0});
  EXPECT_TRUE(present(*tier, id_of(7)));
  tier->release(l.slot);
}

TEST_F(CacheTest, WaitersHearOfReadyShards) {
  const auto g = geometry_of(3, 4096);
  auto tier = make(g, 4);
  const auto owner = load(*tier, id_of(1), {0, 1, 2}, 10);
  const auto waiter = load(*tier, id_of(1), {0, 2}, 11);
  ASSERT_EQ(waiter.claims, (std::vector{ShardClaim::kWaiting, ShardClaim::kWaiting}));
  EXPECT_EQ(owner.slot.data, waiter.slot.data);
  tier->finish_load(owner.slot, 0, 2, {Status::kOk, 0});
  auto told = sinks[0]->wait_for(1);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].cookie, 11u);
  EXPECT_EQ(told[0].begin, 0u);
  EXPECT_EQ(told[0].end, 1u);
  EXPECT_EQ(told[0].event, ShardEvent::kReady);
  tier->finish_load(owner.slot, 2, 3, {Status::kOk, 0});
  told = sinks[0]->wait_for(2);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[1].begin, 2u);
  tier->release(owner.slot);
  tier->release(waiter.slot);
}

TEST_F(CacheTest, FailureReachesAllWaitersWithItsErrno) {
  const auto g = geometry_of(1, 4096);
  auto tier = make(g, 4);
  const auto owner = load(*tier, id_of(1), {0}, 1);
  std::vector<Load> waiters;
  for (std::uint64_t c = 2; c < 6; ++c) waiters.push_back(load(*tier, id_of(1), {0}, c));
  tier->finish_load(owner.slot, 0, 1, {Status::kIoError, EIO});
  const auto told = sinks[0]->wait_for(4);
  ASSERT_EQ(told.size(), 4u);
  for (const auto& t : told) {
    EXPECT_EQ(t.event, ShardEvent::kFailed);
    EXPECT_EQ(t.outcome.status, Status::kIoError);
    EXPECT_EQ(t.outcome.error, EIO);
  }
  // Referenced: a late claim shares the failure instead of starting a second read.
  const auto late = load(*tier, id_of(1), {0}, 9);
  EXPECT_EQ(late.claims[0], ShardClaim::kWaiting);
  EXPECT_EQ(sinks[0]->wait_for(5).back().cookie, 9u);
  tier->release(late.slot);
  tier->release(owner.slot);
  for (const auto& w : waiters) tier->release(w.slot);
  const auto retry = load(*tier, id_of(1), {0}, 1);
  EXPECT_EQ(retry.claims[0], ShardClaim::kOwned);
  tier->release(retry.slot);
}

TEST_F(CacheTest, ReleasedWaiterIsForgotten) {
  const auto g = geometry_of(1, 4096);
  auto tier = make(g, 2);
  const auto owner = load(*tier, id_of(1), {0}, 1);
  const auto waiter = load(*tier, id_of(1), {0}, 2);
  tier->release(waiter.slot);
  tier->finish_load(owner.slot, 0, 1, {Status::kOk, 0});
  tier->release(owner.slot);
  ASSERT_TRUE(put(*tier, id_of(2)));  // both slots are free to go
  ASSERT_TRUE(put(*tier, id_of(3)));
  ASSERT_TRUE(put(*tier, id_of(4)));
}

TEST_F(CacheTest, DumpCompletesAPartlyLoadedObject) {
  const auto g = geometry_of(3, 4096);
  auto tier = make(g, 4);
  const auto l = load(*tier, id_of(1), {1});
  Slot slot;
  std::vector<std::uint8_t> have(3);
  EXPECT_EQ(tier->claim_dump(id_of(1), slot, have), DumpClaim::kBusy);  // shard 1 is being read
  fill(g, l.slot, id_of(1), 1);
  tier->finish_load(l.slot, 1, 2, {Status::kOk, 0});
  tier->release(l.slot);
  ASSERT_EQ(tier->claim_dump(id_of(1), slot, have), DumpClaim::kFill);
  EXPECT_EQ(have, (std::vector<std::uint8_t>{0, 1, 0}));
  fill(g, slot, id_of(1), 0);
  fill(g, slot, id_of(1), 2);
  EXPECT_FALSE(present(*tier, id_of(1)));
  tier->publish(slot);
  EXPECT_TRUE(present(*tier, id_of(1)));
  Slot again;
  EXPECT_EQ(tier->claim_dump(id_of(1), again, have), DumpClaim::kPresent);
  EXPECT_EQ(have, (std::vector<std::uint8_t>{1, 1, 1}));
  tier->release(again);
  tier->release(slot);
}

// The vector of the contract: A B C D set; miss: E takes slot 0, the others cleared, hand at 1; hit
// B; the next miss clears B and evicts C.
TEST_F(CacheTest, ClockVector) {
  auto tier = make(geometry_of(1, 4096), 4);
  enum : std::uint64_t { A, B, C, D, E, F };
  for (std::uint64_t k : {A, B, C, D}) ASSERT_TRUE(put(*tier, id_of(k)));
  const auto b = load(*tier, id_of(B), {0});
  tier->release(b.slot);
  ASSERT_TRUE(put(*tier, id_of(E)));
  EXPECT_FALSE(present(*tier, id_of(A)));
  const auto e = load(*tier, id_of(E), {0});
  tier->release(e.slot);
  const auto hit = load(*tier, id_of(B), {0});
  tier->release(hit.slot);
  ASSERT_TRUE(put(*tier, id_of(F)));
  EXPECT_FALSE(present(*tier, id_of(C)));
  for (std::uint64_t k : {B, D, E, F}) EXPECT_TRUE(present(*tier, id_of(k))) << k;
}

TEST_F(CacheTest, LookupSetsNoAccessBitAndTouchDoes) {
  for (const bool touched : {false, true}) {
    auto tier = make(geometry_of(1, 4096), 4);
    for (int k = 0; k < 4; ++k) ASSERT_TRUE(put(*tier, id_of(k)));
    ASSERT_TRUE(put(*tier, id_of(4)));  // 0 goes, bits of 1 2 3 are cleared
    const BlockId one = id_of(1);
    EXPECT_TRUE(present(*tier, one));
    if (touched) tier->touch({&one, 1});
    ASSERT_TRUE(put(*tier, id_of(5)));
    EXPECT_EQ(present(*tier, one), touched);
    tier.reset();
    tiers.clear();
  }
}

TEST_F(CacheTest, LookupsAndPrefetchesPinNothing) {  // B18
  auto tier = make(geometry_of(1, 4096), 8);
  for (int round = 0; round < 1000; ++round) {
    for (int k = 0; k < 8; ++k) {
      (void)present(*tier, id_of(k));
      const auto l = load(*tier, id_of(k), {0}, 1, ClaimUse::kPrefetch);
      ASSERT_EQ(l.status, Status::kOk);
      if (l.claims[0] == ShardClaim::kOwned) tier->finish_load(l.slot, 0, 1, {Status::kOk, 0});
      tier->release(l.slot);
    }
  }
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
  for (int k = 100; k < 108; ++k) ASSERT_TRUE(put(*tier, id_of(k)));
  for (int k = 100; k < 108; ++k) EXPECT_TRUE(present(*tier, id_of(k)));
}

TEST_F(CacheTest, PinnedSlotsAreNeverVictimsAndRoomIsTold) {
  auto tier = make(geometry_of(1, 4096), 8);
  std::vector<Slot> pins;
  for (int k = 0; k < 8; ++k) {
    ASSERT_TRUE(put(*tier, id_of(k)));
    const auto l = load(*tier, id_of(k), {0});
    pins.push_back(l.slot);
  }
  EXPECT_FALSE(put(*tier, id_of(50)));
  EXPECT_EQ(load(*tier, id_of(51), {0}).status, Status::kRejected);
  sinks[0]->rooms = 0;
  tier->release(pins[3]);
  for (int i = 0; i < 400 && sinks[0]->rooms == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GT(sinks[0]->rooms, 0);
  EXPECT_TRUE(put(*tier, id_of(50)));
  EXPECT_FALSE(present(*tier, id_of(3)));
  for (int k : {0, 1, 2, 4, 5, 6, 7}) EXPECT_TRUE(present(*tier, id_of(k))) << k;
  for (int k : {0, 1, 2, 4, 5, 6, 7}) tier->release(pins[k]);
}

TEST_F(CacheTest, ReserveIsForLoadsAlone) {
  const auto g = geometry_of(2, 4096);
  auto o = options(g, 8);
  o.load_reserve = 5;  // shards: three objects of two
  auto tier = make(g, o);
  std::vector<Slot> held;
  std::vector<std::uint8_t> have(2);
  Slot slot;
  int dumps = 0;
  while (tier->claim_dump(id_of(dumps), slot, have) == DumpClaim::kFill) {
    held.push_back(slot);
    ASSERT_LE(++dumps, 8);
  }
  EXPECT_EQ(dumps, 5);
  EXPECT_EQ(load(*tier, id_of(60), {0}, 1, ClaimUse::kPrefetch).status, Status::kRejected);
  std::vector<Slot> loads;
  for (int k = 100; k < 103; ++k) {
    const auto l = load(*tier, id_of(k), {0});
    ASSERT_EQ(l.status, Status::kOk) << k;
    loads.push_back(l.slot);
  }
  EXPECT_EQ(load(*tier, id_of(103), {0}).status, Status::kRejected);
  for (const auto& s : held) tier->abort_dump(s);
  for (const auto& s : loads) tier->release(s);
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
}

TEST_F(CacheTest, BackendOnlyFetchesAgainWhatNobodyHolds) {
  const auto g = geometry_of(2, 4096);
  auto o = options(g, 4);
  o.backend_only = true;
  auto tier = make(g, o);
  ASSERT_TRUE(put(*tier, id_of(1)));
  const auto first = load(*tier, id_of(1), {0, 1});
  EXPECT_EQ(first.claims, (std::vector{ShardClaim::kOwned, ShardClaim::kOwned}));
  const auto second = load(*tier, id_of(1), {0});
  EXPECT_EQ(second.claims, (std::vector{ShardClaim::kWaiting}));
  tier->finish_load(first.slot, 0, 2, {Status::kOk, 0});
  const auto third = load(*tier, id_of(1), {0});
  EXPECT_EQ(third.claims, (std::vector{ShardClaim::kReady}));  // held by the others
  for (const auto& l : {first, second, third}) tier->release(l.slot);
  EXPECT_TRUE(present(*tier, id_of(1)));
}

TEST_F(CacheTest, RemoveForgetsWhatIsNotPinned) {
  auto tier = make(geometry_of(1, 4096), 4);
  ASSERT_TRUE(put(*tier, id_of(1)));
  ASSERT_TRUE(put(*tier, id_of(2)));
  const auto pin = load(*tier, id_of(2), {0});
  const BlockId both[] = {id_of(1), id_of(2)};
  tier->remove(both);
  EXPECT_FALSE(present(*tier, id_of(1)));
  EXPECT_TRUE(present(*tier, id_of(2)));
  tier->release(pin.slot);
  for (int k = 10; k < 14; ++k) ASSERT_TRUE(put(*tier, id_of(k)));
}

TEST_F(CacheTest, GroupsShareOneSegmentAndGiveMemoryBack) {
  const auto big = geometry_of(4, 16384), small = geometry_of(1, 4096);
  auto o = options(big, 16);
  auto a = make(big, o);
  auto b = make(small, o);
  EXPECT_EQ(files().size(), 1u);
  for (int k = 0; k < 16; ++k) ASSERT_TRUE(put(*a, id_of(k)));
  EXPECT_EQ(a->stats().at("slots"), 16u);
  // Everything is taken; the second group still gets an extent.
  ASSERT_TRUE(put(*b, id_of(0)));
  EXPECT_TRUE(present(*b, id_of(0)));
  EXPECT_EQ(a->stats().at("slots"), 14u);
  EXPECT_GE(b->stats().at("slots"), 8u);
  int left = 0;
  for (int k = 0; k < 16; ++k) {
    if (!present(*a, id_of(k))) continue;
    ++left;
    const auto l = load(*a, id_of(k), {0, 1, 2, 3});
    for (std::uint32_t s = 0; s < 4; ++s) EXPECT_TRUE(intact(big, l.slot, id_of(k), s));
    a->release(l.slot);
  }
  EXPECT_EQ(left, 14);
  EXPECT_FALSE(present(*b, id_of(1)));  // same ids, other class
}

TEST_F(CacheTest, ExtentsWithPinsStayWhereTheyAre) {
  const auto big = geometry_of(1, 16384), small = geometry_of(1, 4096);
  auto o = options(big, 8);
  auto a = make(big, o);
  auto b = make(small, o);
  std::vector<Slot> pins;
  for (int k = 0; k < 8; ++k) {
    ASSERT_TRUE(put(*a, id_of(k)));
    pins.push_back(load(*a, id_of(k), {0}).slot);
  }
  EXPECT_FALSE(put(*b, id_of(1)));
  a->release(pins[5]);
  EXPECT_TRUE(put(*b, id_of(1)));
  EXPECT_FALSE(present(*a, id_of(5)));
  for (int k : {0, 1, 2, 3, 4, 6, 7}) {
    EXPECT_TRUE(intact(big, pins[k], id_of(k), 0));
    a->release(pins[k]);
  }
}

TEST_F(CacheTest, RotationVector) {
  std::vector<std::uint32_t> out(12);
  rotate_order(12, {1, 4}, out.data());
  EXPECT_EQ(out, (std::vector<std::uint32_t>{1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 4, 8}));
  rotate_order(12, {0, 1}, out.data());
  for (std::uint32_t i = 0; i < 12; ++i) EXPECT_EQ(out[i], i);
  for (std::uint32_t n : {1u, 5u, 7u}) {  // every shard exactly once, also when ranks > n
    for (std::uint32_t r = 0; r < 9; ++r) {
      std::vector<std::uint32_t> o(n, 99);
      rotate_order(n, {r, 9}, o.data());
      std::sort(o.begin(), o.end());
      for (std::uint32_t i = 0; i < n; ++i) ASSERT_EQ(o[i], i);
    }
  }
}

TEST_F(CacheTest, PrivateSegmentsLeaveNoNameAndShareNothing) {
  const auto g = geometry_of(1, 4096);
  auto o = options(g, 4);
  o.shared = false;
  auto a = make(g, o);
  auto b = make(g, o);
  ASSERT_TRUE(put(*a, id_of(1)));
  EXPECT_TRUE(present(*a, id_of(1)));
  EXPECT_FALSE(present(*b, id_of(1)));
  EXPECT_TRUE(files().empty());
}

TEST_F(CacheTest, PinsLeftBehindKeepTheMapping) {
  const auto g = geometry_of(1, 4096);
  auto o = options(g, 4);
  o.shared = false;
  auto tier = open_cache(g, o);
  const auto l = load(*tier, id_of(1), {0});
  tier->shutdown(Clock::now());
  tier.reset();
  std::memset(l.slot.data, 0x5A, 4096);  // I/O that comes back late: must not crash
  EXPECT_EQ(static_cast<int>(l.slot.data[4095]), 0x5A);
}

// B61: more keys than slots, every kind of call at once, content told by the key.
TEST_F(CacheTest, ThreadsSeeNoWrongByte) {
  const auto g = geometry_of(2, 1000);
  auto tier = make(g, 16);
  std::atomic<int> wrong{0}, loaded{0}, dumped{0};
  std::vector<std::thread> team;
  for (unsigned t = 0; t < 4; ++t) {
    team.emplace_back([&, t] {
      std::mt19937 rng(t);
      const auto until = Clock::now() + std::chrono::milliseconds(1500);
      while (Clock::now() < until) {
        const BlockId id = id_of(rng() % 64);
        switch (rng() % 4) {
          case 0:
            dumped += put(*tier, id) ? 1 : 0;
            break;
          case 1:
          case 2: {
            const std::uint32_t shard = rng() % 2;
            const auto l = load(*tier, id, {shard}, t);
            if (l.status != Status::kOk) break;
            if (l.claims[0] == ShardClaim::kReady) {
              ++loaded;
              wrong += intact(g, l.slot, id, shard) ? 0 : 1;
            } else if (l.claims[0] == ShardClaim::kOwned) {
              fill(g, l.slot, id, shard);
              tier->finish_load(l.slot, shard, shard + 1,
                                {rng() % 8 == 0 ? Status::kMiss : Status::kOk, 0});
            }
            tier->release(l.slot);
            break;
          }
          default: {
            std::vector<BlockId> ids;
            for (int k = 0; k < 16; ++k) ids.push_back(id_of(rng() % 64));
            std::vector<std::uint8_t> p(16);
            tier->lookup(ids, p);
            tier->touch(ids);
            if (rng() % 16 == 0) tier->remove({ids.data(), 2});
          }
        }
      }
    });
  }
  for (auto& t : team) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(loaded, 100);
  EXPECT_GT(dumped, 100);
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
  EXPECT_EQ(tier->stats().at("lock_timeouts_total"), 0u);
}

}  // namespace
}  // namespace ucm::testing
