// Life of a store: close, fork, misbehaving stages, other tiers, and everything at once.
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "store_fixture.h"

namespace ucm::test {
namespace {

TEST_F(StoreTest, CloseFinishesWhatRuns) {
  StoreSetup setup;
  setup.fake.latency_us = 2000;
  open(setup);
  Rowset source;
  for (std::uint32_t o = 0; o < 20; ++o) source.add_object(o);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(store->close(20s), 0U);
  EXPECT_EQ(wait_durable(*task), all(source.size(), Status::kOk));
  EXPECT_EQ(medium->size(), 20U);
  EXPECT_THROW(store->load(source.rows()), ClosedError);
  EXPECT_THROW(store->lookup_on_prefix(source.ids), ClosedError);
  EXPECT_EQ(store->close(1s), 0U);
}

TEST_F(StoreTest, CloseAbandonsAndCountsStuckIo) {
  open();
  stored(0, 2);
  fake->inject(id_of(0), true, Fault::kHang, 0, 1);
  fake->inject(id_of(5), false, Fault::kHang, 0, 1);
  Rowset target;
  target.add(0, 0);
  target.blank();
  const auto load = store->load(target.rows());
  Rowset source;
  source.add_object(5);
  const auto dump = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  ASSERT_TRUE(eventually([&] { return fake->hung() == 2; }));
  const auto begin = Clock::now();
  EXPECT_EQ(store->close(200ms), 2U);
  EXPECT_LT(Clock::now() - begin, 10s);
  EXPECT_EQ(wait(*load), all(1, Status::kClosed));
  EXPECT_EQ(wait_durable(*dump), all(kShards, Status::kClosed));
  EXPECT_EQ(stat("store.abandoned_io_total"), 2U);
  store.reset();
  EXPECT_EQ(fake->release_hung(true), 2U);  // the buffers are still there
  EXPECT_TRUE(target.untouched(0));
}

TEST_F(StoreTest, CloseEndsDumpsThatWaitForAnEvent) {
  open();
  const auto never = HostEvent::create();
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), never->handle(), CommitMode::kAuto);
  EXPECT_EQ(store->close(100ms), 0U);
  EXPECT_EQ(wait(*task), all(kShards, Status::kClosed));
  never->fire();
  EXPECT_EQ(medium->size(), 0U);
}

TEST_F(StoreTest, UseAfterForkIsAnErrorAndTheChildEnds) {
  open();
  stored(0, 1);
  Rowset target;
  target.add(0, 0);
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_EQ(wait(*task), all(1, Status::kOk));
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 0;
    const auto closed = [&](int bit, auto&& call) {
      try {
        call();
        code |= bit;
      } catch (const ClosedError&) {
      }
    };
    closed(1, [&] { store->load(target.rows()); });
    closed(2, [&] { store->lookup_on_prefix(target.ids); });
    closed(4, [&] { (void)task->wait_until(Clock::now()); });
    closed(8, [&] { store->close(1s); });
    store.reset();  // leaks instead of joining threads that are not here
    ::_exit(code);
  }
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_TRUE(eventually([&] { return ::waitpid(child, &status, WNOHANG) == child; }));
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

/// A stage of a third party that answers twice, out of range, and with unknown cookies.
class BabblingStage final : public Stage {
 public:
  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "babble"; }
  void lookup(std::span<const BlockId>, std::span<std::uint8_t>, bool) noexcept override {}
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline) noexcept override {
    for (const ReadOp& op : ops) {
      sink->on_read(op.cookie + 77, op.begin, op.end, {Status::kOk, 0});
      sink->on_read(op.cookie, op.begin, op.begin + 1, {Status::kMiss, 0});
      sink->on_read(op.cookie, op.begin, op.begin + 1, {Status::kOk, 0});
      sink->on_read(op.cookie, op.begin + 1, op.end, {Status::kMiss, 0});
      sink->on_read(op.cookie, op.begin, op.end + 9, {Status::kOk, 0});
      sink->on_read(~std::uint64_t{0}, 0, 1, {Status::kOk, 0});
    }
  }
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline) noexcept override {
    for (const WriteOp& op : ops) {
      sink->on_written(op.cookie + 77, {Status::kOk, 0});
      sink->on_written(op.cookie, {Status::kOk, 0});
      sink->on_written(op.cookie, {Status::kIoError, 5});
    }
  }
  void touch(std::span<const BlockId>) noexcept override {}
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override { return {}; }
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override {}

 private:
  const Geometry geometry_ = small_geometry();
};

TEST_F(StoreTest, SecondAnswersOfAStageChangeNothing) {
  tier = std::make_shared<StagingTier>(small_geometry(), 2, 2);
  store = std::make_unique<Store>(std::make_shared<BabblingStage>(), tier, host_device(),
                                  StoreOptions{});
  for (int round = 0; round < 50; ++round) {
    Rowset target;
    target.add_object(1);
    target.blank();
    ASSERT_EQ(wait(*store->load(target.rows())), all(kShards, Status::kMiss));
    for (std::size_t row = 0; row < kShards; ++row) ASSERT_TRUE(target.untouched(row));
    Rowset source;
    source.add_object(2);
    ASSERT_EQ(wait_durable(*store->dump(source.filled().rows(), 0, CommitMode::kAuto)),
              all(kShards, Status::kOk));
  }
  ASSERT_TRUE(eventually([&] { return stat("staging.buffers_free") == 4; }));
}

TEST_F(StoreTest, EmptyAcceptsEverythingAndFindsNothing) {
  tier = std::make_shared<StagingTier>(small_geometry(), 2, 2);
  store = std::make_unique<Store>(std::make_shared<EmptyStage>(small_geometry()), tier,
                                  host_device(), StoreOptions{});
  stored(0, 50);
  EXPECT_FALSE(present(0));
  Rowset target;
  target.add_object(0);
  target.blank();
  EXPECT_EQ(wait(*store->load(target.rows())), all(kShards, Status::kMiss));
}

TEST_F(StoreTest, ALookupOnlyStoreRefusesToMoveBytes) {
  open();
  stored(3, 4);
  fake = std::make_shared<FakeStage>(small_geometry(), medium, FakeOptions{});
  store = std::make_unique<Store>(fake, nullptr, host_device(), StoreOptions{});
  EXPECT_TRUE(present(3));
  Rowset rows;
  rows.add_object(3);
  rows.filled();
  EXPECT_THROW(store->load(rows.rows()), UnsupportedError);
  EXPECT_THROW(store->dump(rows.rows(), 0, CommitMode::kAuto), UnsupportedError);
  store->touch(rows.ids);
  store->prefetch(rows.ids);
  EXPECT_EQ(stat("Fake.touches_total"), kShards);
  EXPECT_EQ(store->close(1s), 0U);
}

// B61: load, dump and lookup overlap on few slots; content is checked by key.
TEST_F(StoreTest, EverythingAtOnceOnFewSlots) {
  StoreSetup setup;
  setup.load_buffers = 4;
  setup.shared_buffers = 12;
  setup.store.copiers = 2;
  setup.store.retry_delay = 1ms;
  setup.fake.lanes = 2;
  setup.fake.fail_nth_read = 50;
  setup.fake.fail_nth_write = 70;
  open(setup);
  std::atomic<std::uint32_t> wrong{0};
  std::atomic<std::uint32_t> loaded{0};
  const auto end = Clock::now() + 2s;
  const auto worker = [&](unsigned seed) {
    std::mt19937 rng(seed);
    while (Clock::now() < end) {
      Rowset rows;
      const std::uint32_t first = rng() % 64;
      for (std::uint32_t o = first; o < first + 1 + rng() % 6; ++o) rows.add_object(o % 64);
      switch (rng() % 6) {
        case 0:
        case 1: {
          const auto task = store->dump(rows.filled().rows(), 0, CommitMode::kAuto);
          if (rng() % 4 == 0) task->give_up(Status::kCancelled);
          (void)wait(*task);
          rows.blank();  // the source is free: overwrite it
          break;
        }
        case 2: {
          const auto task = store->dump(rows.filled().rows(), 0, CommitMode::kExplicit);
          (void)wait(*task);
          if (rng() % 2 == 0) {
            (void)wait(*store->commit(rows.ids));
          } else {
            store->discard(rows.ids);
          }
          break;
        }
        case 3: {
          std::vector<std::uint8_t> present(rows.size());
          store->lookup(rows.ids, present);
          (void)store->lookup_on_prefix(rows.ids);
          if (rng() % 4 == 0) store->remove({rows.ids.data(), 1});
          break;
        }
        default: {
          rows.blank();
          const auto task = store->load(rows.rows());
          if (rng() % 4 == 0) task->give_up(Status::kCancelled);
          const auto result = wait(*task);
          for (std::size_t row = 0; row < rows.size(); ++row) {
            const bool ok = result[row] == Status::kOk;
            loaded += ok ? 1 : 0;
            if (ok ? !rows.right(row) : !rows.untouched(row)) ++wrong;
          }
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(worker, seed);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U);
  EXPECT_GT(loaded, 0U);
  EXPECT_EQ(store->close(20s), 0U);
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

}  // namespace
}  // namespace ucm::test
