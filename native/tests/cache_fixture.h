// What the cache tests share: small tiers on a directory of their own, and ids with known content.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ucm/cache.h"

namespace ucm::testing {

inline Geometry geometry_of(std::uint32_t shards, std::uint64_t shard_bytes) {
  Geometry g;
  g.shard_count = shards;
  g.shard_bytes = shard_bytes;
  g.runs_per_shard = 1;
  g.runs = {{shard_bytes, 1, 0}};
  g.layout = "test";
  return g;
}

inline BlockId id_of(std::uint64_t n) {
  // Spread as hashes are, and never empty.
  std::uint64_t a = (n + 1) * 0x9E3779B97F4A7C15ULL, b = ~n;
  a ^= a >> 29;
  BlockId id;
  std::memcpy(id.bytes.data(), &a, 8);
  std::memcpy(id.bytes.data() + 8, &b, 8);
  return id;
}

/// Byte of every position of a shard, told by id and shard.
inline int pattern(const BlockId& id, std::uint32_t shard) {
  return static_cast<int>((id.word() >> 7 ^ shard * 37) & 0xff);
}
inline void fill(const Geometry& g, const Slot& slot, const BlockId& id, std::uint32_t shard) {
  std::memset(slot.data + g.shard_offset(shard), pattern(id, shard), g.shard_bytes);
}
inline bool intact(const Geometry& g, const Slot& slot, const BlockId& id, std::uint32_t shard) {
  const std::byte* at = slot.data + g.shard_offset(shard);
  const auto want = static_cast<std::byte>(pattern(id, shard));
  for (std::uint64_t i = 0; i < g.shard_bytes; ++i) {
    if (at[i] != want) return false;
  }
  return true;
}

struct Told {
  std::uint64_t cookie;
  std::uint32_t begin, end;
  ShardEvent event;
  Outcome outcome;
};

/// Remembers what a tier told; answers takeovers with `accept`.
class Sink final : public TierSink {
 public:
  bool on_shards(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end, ShardEvent event,
                 Outcome outcome) noexcept override {
    const std::lock_guard lock(mu);
    told.push_back({cookie, begin, end, event, outcome});
    return accept;
  }
  void on_room() noexcept override { ++rooms; }

  /// Waits until n events came, at most ten seconds.
  std::vector<Told> wait_for(std::size_t n) {
    for (int i = 0; i < 2000; ++i) {
      {
        const std::lock_guard lock(mu);
        if (told.size() >= n) return told;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::lock_guard lock(mu);
    return told;
  }

  std::mutex mu;
  std::vector<Told> told;
  std::atomic<int> rooms{0};
  std::atomic<bool> accept{true};
};

class CacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/dev/shm/ucm-test-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    directory = name;
  }
  void TearDown() override {
    for (const auto& t : tiers) {
      const auto stats = t->stats();
      const auto pinned = stats.find("slots_pinned");
      EXPECT_TRUE(pinned == stats.end() || pinned->second == 0) << "the test left pins";
    }
    tiers.clear();
    std::error_code ec;
    std::filesystem::remove_all(directory, ec);
  }

  CacheOptions options(const Geometry& g, std::uint64_t slots) {
    CacheOptions o;
    o.name = "test";
    o.directory = directory;
    o.capacity_bytes = slots * g.object_bytes();
    o.capacity_explicit = true;
    o.load_reserve = 0;
    o.load_reserve_explicit = true;
    o.quarantine = std::chrono::seconds(0);
    return o;
  }

  std::shared_ptr<HostTier> make(const Geometry& g, const CacheOptions& o) {
    auto tier = open_cache(g, o);
    if (!o.watcher) {
      sinks.push_back(std::make_shared<Sink>());
      tier->bind(sinks.back());
    }
    tiers.push_back(tier);
    return tier;
  }
  std::shared_ptr<HostTier> make(const Geometry& g, std::uint64_t slots) {
    return make(g, options(g, slots));
  }

  /// A segment of this test's directory exists.
  std::vector<std::string> files() {
    std::vector<std::string> out;
    for (const auto& e : std::filesystem::directory_iterator(directory)) {
      out.push_back(e.path().filename());
    }
    return out;
  }

  /// Run in a child; it ends with the returned code. The parent must have no segment open: a child
  /// inherits neither its mapping nor its locks.
  pid_t spawn(const std::function<int()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(body());
    return pid;
  }
  static int wait_exit(pid_t pid) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string directory;
  std::vector<std::shared_ptr<Sink>> sinks;
  std::vector<std::shared_ptr<HostTier>> tiers;
};

/// Dump a whole object and let go of it. False: no room, or busy.
inline bool put(HostTier& tier, const BlockId& id) {
  Slot slot;
  std::vector<std::uint8_t> have(tier.geometry().shard_count);
  const DumpClaim claim = tier.claim_dump(id, slot, have);
  if (claim == DumpClaim::kPresent) {
    tier.release(slot);
    return true;
  }
  if (claim != DumpClaim::kFill) return false;
  for (std::uint32_t s = 0; s < tier.geometry().shard_count; ++s) {
    if (have[s] == 0) fill(tier.geometry(), slot, id, s);
  }
  tier.publish(slot);
  tier.release(slot);
  return true;
}

inline bool present(HostTier& tier, const BlockId& id) {
  std::uint8_t p = 0;
  tier.lookup({&id, 1}, {&p, 1});
  return p != 0;
}

/// A claim of all or some shards.
struct Load {
  Status status = Status::kPending;
  Slot slot;
  std::vector<ShardClaim> claims;
};
inline Load load(HostTier& tier, const BlockId& id, std::vector<std::uint32_t> shards,
                 std::uint64_t cookie = 1, ClaimUse use = ClaimUse::kLoad) {
  Load l;
  l.claims.resize(shards.size());
  l.status = tier.claim_load(id, shards, use, cookie, l.claims, l.slot);
  return l;
}

}  // namespace ucm::testing
