// B61: threads that load, dump and look up the same keys through a small private pool. Content follows
// from the key, so any byte of another object is seen; run with sanitizers as well.
// UCM_STRESS_S: seconds (3 by default, 60 in the long form).
#include <cstdlib>
#include <random>
#include <thread>

#include "store_fixture.h"
#include "ucm/cache.h"

namespace ucm::test {
namespace {

constexpr std::uint32_t kKeys = 64;
constexpr std::uint32_t kSlots = 16;
constexpr int kThreads = 4;

std::shared_ptr<HostTier> pool(bool cache) {
  if (!cache) return std::make_shared<StagingTier>(small_geometry(), 4, kSlots - 4);
  CacheOptions o;
  o.name = "stress";
  o.shared = false;
  o.capacity_bytes = kSlots * small_geometry().object_bytes();
  o.capacity_explicit = true;
  o.load_reserve = 4 * kShards;
  o.load_reserve_explicit = true;
  return open_cache(small_geometry(), o);
}

struct Totals {
  std::atomic<std::uint64_t> loaded{0}, stored{0}, looked_up{0}, wrong{0}, open{0};
};

void work(Store& store, unsigned seed, Deadline end, Totals& totals) {
  std::mt19937 random(seed);
  while (Clock::now() < end) {
    Rowset rows;
    const std::uint32_t first = random() % kKeys, n = 1 + random() % 12;
    for (std::uint32_t i = 0; i < n; ++i) rows.add_object((first + i * 5) % kKeys);
    std::shared_ptr<Task> task;
    const unsigned what = random() % 8;
    if (what < 4) {
      task = store.load(rows.blank().rows());
    } else if (what < 6) {
      task = store.dump(rows.filled().rows(), 0, CommitMode::kAuto);
    } else if (what == 6) {
      std::vector<std::uint8_t> present(rows.size());
      store.lookup(rows.ids, present);
      (void)store.lookup_on_prefix(rows.ids);
      totals.looked_up += rows.size();
      continue;
    } else {
      store.remove({rows.ids.data(), 1});
      continue;
    }
    if (!task->wait_until(Clock::now() + 20s)) {
      ++totals.open;
      task->give_up(Status::kTimeout);
    }
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (task->outcome(row).status != Status::kOk) continue;
      if (task->kind() == TaskKind::kDump) {
        ++totals.stored;
      } else {
        ++totals.loaded;
        totals.wrong += rows.right(row) ? 0 : 1;
      }
    }
  }
}

class StoreStress : public ::testing::TestWithParam<bool> {};

TEST_P(StoreStress, FourThreadsAndAPoolThatOverflows) {
  const char* const text = std::getenv("UCM_STRESS_S");
  const auto end = Clock::now() + std::chrono::seconds(text != nullptr ? std::atoi(text) : 3);
  const auto medium = std::make_shared<FakeMedium>();
  FakeOptions fake;
  fake.latency_us = 200;
  fake.lanes = 2;
  StoreOptions options;
  options.copiers = 2;
  const auto tier = pool(GetParam());
  Store store(std::make_shared<FakeStage>(small_geometry(), medium, fake), tier, host_device(),
              options);
  Totals totals;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { work(store, 100U + static_cast<unsigned>(t), end, totals); });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(totals.wrong, 0u) << "shards with bytes of another object";
  EXPECT_EQ(totals.open, 0u) << "tasks that did not end";
  EXPECT_GT(totals.loaded, 1'000u);
  EXPECT_GT(totals.stored, 1'000u);
  EXPECT_GT(totals.looked_up, 0u);
  EXPECT_EQ(store.close(20s), 0u);
}

INSTANTIATE_TEST_SUITE_P(Pools, StoreStress, ::testing::Values(true, false),
                         [](const auto& i) { return i.param ? "Cache" : "Staging"; });

}  // namespace
}  // namespace ucm::test
