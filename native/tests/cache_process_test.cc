// The cache tier between processes: sharing, death at bad moments, reclaim, set-up checks.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>

#include "cache/layout.h"
#include "cache_fixture.h"

namespace ucm::testing {
namespace {

using namespace std::chrono_literals;

/// One-byte messages between parent and child.
class Pipe {
 public:
  Pipe() { EXPECT_EQ(::pipe(fd_), 0); }
  ~Pipe() { ::close(fd_[0]), ::close(fd_[1]); }
  void send() const {
    const char c = 1;
    ASSERT_EQ(::write(fd_[1], &c, 1), 1);
  }
  /// False when nobody sent within ten seconds (alarm of the test runner aside).
  [[nodiscard]] bool receive() const {
    char c;
    return ::read(fd_[0], &c, 1) == 1;
  }

 private:
  int fd_[2];
};

class CacheProcessTest : public CacheTest {
 protected:
  /// A child that opens a tier, runs `body`, says so, and stays until it is killed (or the parent
  /// says go on and it leaves in an orderly way).
  struct Child {
    pid_t pid;
    void kill() const {
      ::kill(pid, SIGKILL);
      EXPECT_EQ(wait_exit(pid), 128 + SIGKILL);
    }
  };
  Child holder(const Geometry& g, const CacheOptions& o,
               const std::function<void(HostTier&)>& body) {
    Pipe ready;
    const pid_t pid = spawn([&] {
      auto tier = open_cache(g, o);
      auto sink = std::make_shared<Sink>();
      tier->bind(sink);
      body(*tier);
      ready.send();
      for (;;) ::pause();
      return 0;
    });
    EXPECT_TRUE(ready.receive());
    return {pid};
  }

  std::uint64_t shm_bytes() {
    std::uint64_t total = 0;
    for (const auto& f : files()) {
      struct stat s {};
      if (::stat((directory + "/" + f).c_str(), &s) == 0) total += s.st_blocks * 512ULL;
    }
    return total;
  }
};

TEST_F(CacheProcessTest, WhatOneProcessDumpsAnotherLoads) {
  const auto g = geometry_of(2, 6000);
  const auto o = options(g, 8);
  const auto child = holder(g, o, [](HostTier& t) {
    for (int k = 0; k < 4; ++k) put(t, id_of(k));
  });
  auto tier = make(g, o);
  EXPECT_EQ(tier->stats().at("created"), 0u);
  EXPECT_EQ(tier->rotation().ranks, 2u);
  for (int k = 0; k < 4; ++k) {
    ASSERT_TRUE(present(*tier, id_of(k)));
    const auto l = load(*tier, id_of(k), {0, 1});
    ASSERT_EQ(l.claims, (std::vector{ShardClaim::kReady, ShardClaim::kReady}));
    EXPECT_TRUE(intact(g, l.slot, id_of(k), 0) && intact(g, l.slot, id_of(k), 1));
    tier->release(l.slot);
  }
  child.kill();
  for (int k = 0; k < 4; ++k) EXPECT_TRUE(present(*tier, id_of(k)));  // outlives its writer
}

TEST_F(CacheProcessTest, AWaiterTakesOverFromADeadOwner) {
  const auto g = geometry_of(2, 4096);
  const auto o = options(g, 4);
  const auto child = holder(g, o, [](HostTier& t) { (void)load(t, id_of(1), {0, 1}); });
  auto tier = make(g, o);
  const auto first = load(*tier, id_of(1), {0, 1}, 21);
  const auto second = load(*tier, id_of(1), {1}, 22);
  ASSERT_EQ(first.claims, (std::vector{ShardClaim::kWaiting, ShardClaim::kWaiting}));
  const auto before = Clock::now();
  child.kill();
  auto told = sinks[0]->wait_for(2);
  EXPECT_LT(Clock::now() - before, 2s);
  ASSERT_EQ(told.size(), 2u);
  for (const auto& t : told) {
    EXPECT_EQ(t.event, ShardEvent::kTakeover);
    fill(g, first.slot, id_of(1), t.begin);
    tier->finish_load(first.slot, t.begin, t.end, {Status::kOk, 0});
  }
  told = sinks[0]->wait_for(3);  // who did not take shard 1 over hears that it is ready
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told[2].event, ShardEvent::kReady);
  EXPECT_TRUE(present(*tier, id_of(1)));
  tier->release(first.slot);
  tier->release(second.slot);
  const auto stats = tier->stats();
  EXPECT_EQ(stats.at("slots_pinned"), 0u);
  EXPECT_EQ(stats.at("shards_taken_over_total"), 2u);
  EXPECT_EQ(stats.at("processes_recovered_total"), 1u);
}

TEST_F(CacheProcessTest, RefusedTakeoversEndAsFailuresNotAsHangs) {
  const auto g = geometry_of(1, 4096);
  const auto o = options(g, 4);
  const auto child = holder(g, o, [](HostTier& t) { (void)load(t, id_of(1), {0}); });
  auto tier = make(g, o);
  sinks[0]->accept = false;
  const auto a = load(*tier, id_of(1), {0}, 1);
  const auto b = load(*tier, id_of(1), {0}, 2);
  child.kill();
  const auto told = sinks[0]->wait_for(2);  // offered to one, then to the other
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0].event, ShardEvent::kTakeover);
  EXPECT_EQ(told[1].event, ShardEvent::kTakeover);
  tier->release(a.slot);
  tier->release(b.slot);
  for (int i = 0; i < 200 && tier->stats().at("slots_pinned") != 0; ++i) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
  sinks[0]->accept = true;
  const auto retry = load(*tier, id_of(1), {0});
  EXPECT_EQ(retry.claims[0], ShardClaim::kOwned);
  tier->release(retry.slot);
}

TEST_F(CacheProcessTest, PinsAndOpenDumpsOfTheDeadComeBack) {
  const auto g = geometry_of(2, 4096);
  const auto o = options(g, 8);
  const auto child = holder(g, o, [](HostTier& t) {
    std::vector<std::uint8_t> have(2);
    Slot slot;
    for (int k = 0; k < 4; ++k) (void)t.claim_dump(id_of(k), slot, have);
    for (int k = 4; k < 8; ++k) {
      put(t, id_of(k));
      (void)load(t, id_of(k), {0});
    }
  });
  auto tier = make(g, o);
  EXPECT_EQ(tier->stats().at("slots_pinned"), 8u);
  EXPECT_FALSE(put(*tier, id_of(100)));
  child.kill();
  for (int i = 0; i < 600 && tier->stats().at("slots_pinned") != 0; ++i) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(tier->stats().at("slots_pinned"), 0u);
  EXPECT_GT(sinks[0]->rooms, 0);
  for (int k = 0; k < 4; ++k) EXPECT_FALSE(present(*tier, id_of(k)));
  for (int k = 4; k < 8; ++k) EXPECT_TRUE(present(*tier, id_of(k)));
  for (int k = 100; k < 108; ++k) EXPECT_TRUE(put(*tier, id_of(k)));
}

TEST_F(CacheProcessTest, MemoryAKilledReaderMayStillWriteIsQuarantined) {
  const auto g = geometry_of(1, 4096);
  auto o = options(g, 2);
  o.quarantine = 3600s;
  const auto child = holder(g, o, [](HostTier& t) { (void)load(t, id_of(1), {0}); });
  auto tier = make(g, o);
  child.kill();
  for (int i = 0; i < 600 && tier->stats().at("processes_recovered_total") == 0; ++i) {
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(tier->stats().at("slots_quarantined"), 1u);
  ASSERT_TRUE(put(*tier, id_of(2)));
  ASSERT_TRUE(put(*tier, id_of(3)));  // into the other slot, never into the closed one
  EXPECT_FALSE(present(*tier, id_of(2)));
  EXPECT_EQ(tier->stats().at("slots_quarantined"), 1u);
  // The same id may be read into it again.
  const auto l = load(*tier, id_of(1), {0});
  EXPECT_EQ(l.claims, (std::vector{ShardClaim::kOwned}));
  tier->finish_load(l.slot, 0, 1, {Status::kOk, 0});
  tier->release(l.slot);
  EXPECT_TRUE(present(*tier, id_of(1)));
}

TEST_F(CacheProcessTest, LastOneOutRemovesTheFile) {
  const auto g = geometry_of(1, 4096);
  const auto o = options(g, 4);
  const pid_t pid = spawn([&] {
    auto tier = open_cache(g, o);
    ::_exit(put(*tier, id_of(1)) ? 0 : 1);  // no destructor runs
    return 2;
  });
  EXPECT_EQ(wait_exit(pid), 0);
  EXPECT_EQ(files().size(), 1u);
  auto tier = make(g, o);
  EXPECT_EQ(tier->stats().at("created"), 1u);  // the dead one was not joined
  EXPECT_FALSE(present(*tier, id_of(1)));
  EXPECT_EQ(files().size(), 1u);
  tier.reset();
  tiers.clear();
  EXPECT_TRUE(files().empty());
}

TEST_F(CacheProcessTest, RestartsAfterSigkillNeverPileUp) {  // B19
  const auto g = geometry_of(2, 4096);
  const auto small = options(g, 64), large = options(g, 96);
  std::uint64_t one = 0;
  for (int round = 0; round < 5; ++round) {
    const auto a = holder(g, small, [](HostTier& t) {
      put(t, id_of(1));
      (void)load(t, id_of(1), {0});
    });
    a.kill();
    const auto b = holder(g, large, [](HostTier& t) { put(t, id_of(1)); });
    EXPECT_EQ(files().size(), 1u);
    if (round == 0) one = shm_bytes();
    EXPECT_EQ(shm_bytes(), one);
    b.kill();
  }
  EXPECT_EQ(reclaim_dead_caches(directory).size(), 1u);
  EXPECT_TRUE(files().empty());
}

TEST_F(CacheProcessTest, ReclaimNeverTakesALiveSegment) {
  const auto g = geometry_of(1, 4096);
  auto live = options(g, 4), dead = options(g, 4);
  live.name = "live", dead.name = "dead";
  const auto d = holder(g, dead, [](HostTier&) {});
  const auto l = holder(g, live, [](HostTier& t) { put(t, id_of(1)); });
  d.kill();
  EXPECT_EQ(files().size(), 2u);
  const auto removed = reclaim_dead_caches(directory);
  ASSERT_EQ(removed.size(), 1u);
  EXPECT_NE(removed[0].find("dead"), std::string::npos);
  auto tier = make(g, live);
  EXPECT_TRUE(present(*tier, id_of(1)));
  EXPECT_TRUE(reclaim_dead_caches(directory).empty());  // its own descriptor is left alone
  l.kill();
  EXPECT_TRUE(reclaim_dead_caches(directory).empty());  // this process still has it
  EXPECT_TRUE(present(*tier, id_of(1)));
}

TEST_F(CacheProcessTest, SimultaneousStartsAndACleanerAgree) {  // B19, second half
  const auto g = geometry_of(1, 4096);
  const auto o = options(g, 32);
  for (int round = 0; round < 10; ++round) {
    std::vector<pid_t> children;
    for (int c = 0; c < 4; ++c) {
      children.push_back(spawn([&, c] {
        if (c == 3) {
          for (int i = 0; i < 50; ++i) (void)reclaim_dead_caches(directory);
          return 0;
        }
        auto tier = open_cache(g, o);
        if (!put(*tier, id_of(c))) return 1;
        if (!present(*tier, id_of(c))) return 2;
        struct stat s {};
        const auto path = directory + "/ucm-cache-" + std::to_string(::getuid()) + "-test";
        return ::stat(path.c_str(), &s) == 0 ? 0 : 3;  // nobody removed it under us
      }));
    }
    for (const pid_t pid : children) EXPECT_EQ(wait_exit(pid), 0);
  }
}

TEST_F(CacheProcessTest, AnotherLayoutVersionIsRefusedWhileAlive) {
  const auto g = geometry_of(1, 4096);
  const auto o = options(g, 4);
  const auto child = holder(g, o, [](HostTier&) {});
  const std::string path = directory + "/" + files().at(0);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const std::uint32_t other = 77;
  ASSERT_EQ(::pwrite(fd, &other, 4, 8), 4);
  ::close(fd);
  try {
    (void)open_cache(g, o);
    FAIL() << "joined a segment of another version";
  } catch (const CacheError& e) {
    EXPECT_EQ(e.kind(), CacheErrorKind::kMismatch);
    EXPECT_NE(std::string(e.what()).find("77"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find(" 1"), std::string::npos) << e.what();
  }
  child.kill();
  EXPECT_TRUE(put(*make(g, o), id_of(1)));  // dead: reclaimed whatever its version
}

// A damaged header of a segment in use is refused in words, whatever bit it is: nothing is mapped or
// written by its numbers. Bits that mean nothing to a reader do no harm.
TEST_F(CacheProcessTest, AnyBitOfTheHeaderMayFlip) {
  const auto g = geometry_of(1, 4096);
  const auto o = options(g, 64);
  const auto child = holder(g, o, [](HostTier& t) { put(t, id_of(1)); });
  const std::string path = directory + "/" + files().at(0);
  // In a process of its own, so that a crash is seen as one.
  const pid_t visitor = spawn([&] {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    int refused = 0;
    const auto flip = [fd](off_t at, int bit) {
      unsigned char c = 0;
      if (::pread(fd, &c, 1, at) != 1) ::_exit(3);
      c = static_cast<unsigned char>(c ^ (1U << bit));
      if (::pwrite(fd, &c, 1, at) != 1) ::_exit(3);
    };
    for (off_t at = 0; at < static_cast<off_t>(offsetof(cache::Header, extent_lock)); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        flip(at, bit);
        try {
          (void)open_cache(g, o);
        } catch (const CacheError& e) {
          if (e.kind() != CacheErrorKind::kMismatch) return 4;
          ++refused;
        }
        flip(at, bit);
      }
    }
    return refused < 8 * 100 ? 5 : 0;
  });
  EXPECT_EQ(wait_exit(visitor), 0);
  auto tier = make(g, o);
  EXPECT_TRUE(present(*tier, id_of(1)));
  child.kill();
}

// A process dies while an extent changes hands and leaves it twice in a list. Whoever takes it from there
// must not leave it in two classes: they would write into each other's objects.
TEST_F(CacheProcessTest, AnExtentListedTwiceIsNotSharedByTwoClasses) {
  const auto g = geometry_of(1, 4096), other = geometry_of(2, 4096);
  const auto o = options(g, 64);
  auto tier = make(g, o);
  for (int k = 0; k < 64; ++k) ASSERT_TRUE(put(*tier, id_of(k)));
  const std::string path = directory + "/" + files().at(0);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const std::size_t bytes = sizeof(cache::Header) + 4 * 64 * (1 + cache::kMaxClasses);
  void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(p, MAP_FAILED);
  auto& h = *static_cast<cache::Header*>(p);
  auto* const owner = reinterpret_cast<cache::Shared<std::uint32_t>*>(&h + 1);
  auto* const list = owner + h.extents;
  const std::uint32_t n = h.geometry[0].extents;
  ASSERT_GE(n, 4u);
  list[0].store(list[n - 1]);  // moved into the gap, the list not yet shorter
  auto second = make(other, o);
  for (int k = 100; k < 200; ++k) (void)put(*second, id_of(k));
  std::vector<int> seen(h.extents);
  for (std::uint32_t c = 0; c < 2; ++c) {
    for (std::uint32_t i = 0; i < h.geometry[c].extents; ++i) {
      const std::uint32_t e = list[c * h.extents + i];
      EXPECT_EQ(owner[e].load(), c + 1)
          << "extent " << e << " is listed in a class that has it not";
      EXPECT_EQ(seen.at(e)++, 0) << "extent " << e << " is listed twice";
    }
  }
  ::munmap(p, bytes);
  ::close(
      fd);  // and with it this process's locks: nothing is asked of the tiers any more but to go
}

TEST_F(CacheProcessTest, AnotherCapacityIsRefusedUnlessItWasOnlyADefault) {
  const auto g = geometry_of(1, 4096);
  const auto child = holder(g, options(g, 64), [](HostTier& t) { put(t, id_of(1)); });
  try {
    (void)open_cache(g, options(g, 128));
    FAIL();
  } catch (const CacheError& e) {
    EXPECT_EQ(e.kind(), CacheErrorKind::kMismatch);
    const std::string what = e.what();
    EXPECT_NE(what.find("0.25 MiB"), std::string::npos) << what;
    EXPECT_NE(what.find("0.50 MiB"), std::string::npos) << what;
  }
  auto o = options(g, 128);
  o.capacity_explicit = false;
  auto tier = make(g, o);
  EXPECT_TRUE(present(*tier, id_of(1)));
  child.kill();
}

TEST_F(CacheProcessTest, TooSmallIsFoundAtStartWithTheNumbers) {
  const auto g = geometry_of(4, 1 << 20);
  auto o = options(g, 1);
  o.load_reserve = 8;
  try {
    (void)open_cache(g, o);
    FAIL();
  } catch (const CacheError& e) {
    EXPECT_EQ(e.kind(), CacheErrorKind::kTooSmall);
    EXPECT_NE(std::string(e.what()).find("minimum 16.00 MiB"), std::string::npos) << e.what();
  }
  o.capacity_bytes = 1ULL << 50;
  try {
    (void)open_cache(g, o);
    FAIL();
  } catch (const CacheError& e) {
    EXPECT_EQ(e.kind(), CacheErrorKind::kTooSmall);
    EXPECT_NE(std::string(e.what()).find("needed"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("available"), std::string::npos);
  }
  EXPECT_TRUE(files().empty());  // nothing half made stays
}

TEST_F(CacheProcessTest, AWatcherSeesButHoldsNothing) {
  const auto g = geometry_of(1, 4096);
  auto o = options(g, 4);
  o.watcher = true;
  auto watcher = make(g, o);
  EXPECT_FALSE(present(*watcher, id_of(1)));  // nothing there yet, and nothing is made
  EXPECT_TRUE(files().empty());
  const auto first = holder(g, options(g, 4), [](HostTier& t) { put(t, id_of(1)); });
  const auto until = Clock::now() + 5s;
  while (!present(*watcher, id_of(1)) && Clock::now() < until) std::this_thread::sleep_for(20ms);
  ASSERT_TRUE(present(*watcher, id_of(1)));
  EXPECT_EQ(load(*watcher, id_of(1), {0}).status, Status::kRejected);
  EXPECT_FALSE(put(*watcher, id_of(2)));
  EXPECT_EQ(watcher->stats().at("processes_watchers"), 1u);
  first.kill();
  // A new life of the workers is a new segment: the watcher follows.
  const auto second = holder(g, options(g, 4), [](HostTier& t) { put(t, id_of(9)); });
  const auto again = Clock::now() + 5s;
  while (!present(*watcher, id_of(9)) && Clock::now() < again) std::this_thread::sleep_for(20ms);
  EXPECT_TRUE(present(*watcher, id_of(9)));
  EXPECT_FALSE(present(*watcher, id_of(1)));
  const BlockId nine = id_of(9);
  watcher->touch({&nine, 1});
  second.kill();
}

TEST_F(CacheProcessTest, ContradictingRankSizesAreReported) {
  const auto g = geometry_of(1, 4096);
  auto o = options(g, 4);
  o.rank = 1, o.rank_size = 4;
  const auto child = holder(g, o, [](HostTier&) {});
  o.rank = 0, o.rank_size = 2;
  auto tier = make(g, o);
  EXPECT_NE(tier->health().find("local_rank_size is 2 here and 4"), std::string::npos);
  EXPECT_EQ(tier->rotation().ranks, 2u);
  EXPECT_EQ(tier->rotation().rank, 0u);
  child.kill();
}

/// Random work until killed, or a file "stop" appears; content is checked wherever it is read. Returns 1 on a wrong byte.
int churn(const Geometry& g, const CacheOptions& o, unsigned seed) {
  auto tier = open_cache(g, o);
  auto sink = std::make_shared<Sink>();
  sink->accept = false;
  tier->bind(sink);
  std::mt19937 rng(seed);
  const std::string stop = o.directory + "/stop";
  std::vector<BlockId> few(8);
  std::vector<std::uint8_t> p(8);
  while (::access(stop.c_str(), F_OK) != 0) {
    const BlockId id = id_of(rng() % 48);
    switch (rng() % 5) {
      case 0:
      case 1:
        (void)put(*tier, id);
        break;
      case 2: {
        for (auto& f : few) f = id_of(rng() % 48);
        std::fill(p.begin(), p.end(), 0);
        tier->lookup(few, p);
        tier->touch(few);
        if (rng() % 8 == 0) tier->remove({few.data(), 1});
        break;
      }
      default: {
        const std::uint32_t shard = rng() % 2;
        const auto l = load(*tier, id, {shard}, rng());
        if (l.status != Status::kOk) break;
        if (l.claims[0] == ShardClaim::kReady && !intact(g, l.slot, id, shard)) return 1;
        if (l.claims[0] == ShardClaim::kOwned) {
          fill(g, l.slot, id, shard);
          tier->finish_load(l.slot, shard, shard + 1,
                            {rng() % 6 == 0 ? Status::kIoError : Status::kOk, EIO});
        }
        tier->release(l.slot);
      }
    }
  }
  return 0;
}

TEST_F(CacheProcessTest, KillsAtAnyMomentLeaveNoWrongByteAndNoLeak) {
  const auto g = geometry_of(2, 3000);
  const auto o = options(g, 16);
  std::mt19937 rng(5);
  // One survivor keeps the segment alive throughout.
  const pid_t survivor = spawn([&] { return churn(g, o, 1000); });
  std::this_thread::sleep_for(100ms);
  for (int round = 0; round < 40; ++round) {
    const pid_t victim = spawn([&] { return churn(g, o, 1 + round); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + rng() % 60));
    ::kill(victim, SIGKILL);
    EXPECT_EQ(wait_exit(victim), 128 + SIGKILL) << "a wrong byte";
  }
  auto tier = make(g, o);  // attach while the survivor is still at work
  ::close(::open((directory + "/stop").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  EXPECT_EQ(wait_exit(survivor), 0) << "a wrong byte";
  const auto until = Clock::now() + 10s;
  while (tier->stats().at("slots_pinned") != 0 && Clock::now() < until) {
    std::this_thread::sleep_for(20ms);
  }
  const auto stats = tier->stats();
  EXPECT_EQ(stats.at("slots_pinned"), 0u);
  EXPECT_EQ(stats.at("slots_dumping"), 0u);
  EXPECT_EQ(stats.at("slots"), 16u);
  EXPECT_GE(stats.at("processes_recovered_total"), 20u);  // some die before they attach
  // Every slot can be used, and only 16 at a time.
  std::vector<Slot> held;
  for (int k = 1000; k < 1016; ++k) {
    const auto l = load(*tier, id_of(k), {0});
    ASSERT_EQ(l.status, Status::kOk) << k;
    held.push_back(l.slot);
  }
  EXPECT_EQ(load(*tier, id_of(2000), {0}).status, Status::kRejected);
  std::sort(held.begin(), held.end(), [](auto& a, auto& b) { return a.data < b.data; });
  for (std::size_t i = 1; i < held.size(); ++i) EXPECT_NE(held[i - 1].data, held[i].data);
  for (const auto& s : held) {
    tier->finish_load(s, 0, 1, {Status::kMiss, 0});
    tier->release(s);
  }
}

}  // namespace
}  // namespace ucm::testing
