// The health wrapper: when it opens and closes, what it refuses, and what a hung medium cannot do.
#include <latch>
#include <thread>

#include "guard/breaker.h"
#include "guard/object_probe.h"
#include "store_fixture.h"
#include "ucm/guard_stage.h"

namespace ucm::test {
namespace {

/// Time that moves when the test says so.
class ManualClock final : public GuardClock {
 public:
  Clock::time_point now() const noexcept override {
    return Clock::time_point(std::chrono::nanoseconds(ns_.load()));
  }
  void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& cv,
            Clock::time_point) override {
    cv.wait_for(lock, 1ms);  // looks at now() again
  }
  void advance(std::chrono::nanoseconds by) { ns_ += by.count(); }

 private:
  std::atomic<std::int64_t> ns_{1};
};

/// Serves everything at once; its probe follows a script.
class ScriptedStage final : public Stage {
 public:
  enum class Probe { kGood, kBad, kHang, kNoMemory };

  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "Scripted"; }
  std::string identity() const override { return "here"; }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool) noexcept override {
    lookups += ids.size();
    std::fill(present.begin(), present.end(), std::uint8_t{1});
  }
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline) noexcept override {
    reads += ops.size();
    for (const ReadOp& op : ops) sink->on_read(op.cookie, op.begin, op.end, {Status::kOk, 0});
  }
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline) noexcept override {
    writes += ops.size();
    for (const WriteOp& op : ops) sink->on_written(op.cookie, {Status::kOk, 0});
  }
  void touch(std::span<const BlockId> ids) noexcept override { touches += ids.size(); }
  void remove(std::span<const BlockId> ids) noexcept override { removes += ids.size(); }
  std::map<std::string, std::uint64_t> stats() const override { return {{"own", 7}}; }
  std::string health() const override { return {}; }
  std::optional<std::string> probe(Deadline) override {
    ++probes;
    std::unique_lock lock(mu_);
    switch (next_) {
      case Probe::kGood:
        return "";
      case Probe::kBad:
        return "write /mnt/x: EIO";
      case Probe::kNoMemory:
        throw std::bad_alloc();
      case Probe::kHang:
        cv_.wait(lock, [&] { return next_ != Probe::kHang; });
        return "";
    }
    return "";
  }
  void shutdown(Deadline) noexcept override { ++shutdowns; }
  void say(Probe next) {
    const std::lock_guard lock(mu_);
    next_ = next;
    cv_.notify_all();
  }

  std::atomic<std::size_t> lookups{0}, reads{0}, writes{0}, touches{0}, removes{0}, probes{0};
  std::atomic<int> shutdowns{0};

 private:
  const Geometry geometry_ = small_geometry();
  std::mutex mu_;
  std::condition_variable cv_;
  Probe next_ = Probe::kGood;
};
using Probe = ScriptedStage::Probe;

// Two classes: GCC 12 inlines a thunk of one with both bases wrongly.
class LastRead final : public ReadSink {
 public:
  void on_read(std::uint64_t, std::uint32_t, std::uint32_t, Outcome o) noexcept override {
    outcome = o;
  }
  Outcome outcome;
};
class LastWrite final : public WriteSink {
 public:
  void on_written(std::uint64_t, Outcome o) noexcept override { outcome = o; }
  Outcome outcome;
};

template <class F>
bool eventually(F&& done) {
  const auto end = Clock::now() + 20s;
  while (!done()) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class GuardTest : public ::testing::Test {
 protected:
  ~GuardTest() override { inner->say(Probe::kGood); }

  /// Let the next probe end as `what`.
  void probe(Probe what) {
    inner->say(what);
    const std::uint64_t before = samples();
    clock->advance(10s);
    ASSERT_TRUE(eventually([&] { return samples() > before; }));
  }
  std::uint64_t stat(const std::string& name) { return guard->stats().at(name); }
  std::uint64_t samples() {
    return stat("health_probes_total") + stat("health_probes_skipped_total");
  }
  Outcome read() {
    const auto sink = std::make_shared<LastRead>();
    const ReadOp op{id_of(1), memory.data(), 0, kShards, 5, true};
    guard->read({&op, 1}, sink, Clock::now() + 20s);
    return sink->outcome;
  }
  Outcome write() {
    const auto sink = std::make_shared<LastWrite>();
    const WriteOp op{id_of(1), memory.data(), 5};
    guard->write({&op, 1}, sink, Clock::now() + 20s);
    return sink->outcome;
  }
  bool found() {
    std::uint8_t present = 9;
    const BlockId id = id_of(1);
    guard->lookup({&id, 1}, {&present, 1}, false);
    return present == 1;
  }

  std::vector<std::byte> memory{small_geometry().object_bytes()};
  std::shared_ptr<ManualClock> clock = std::make_shared<ManualClock>();
  std::shared_ptr<ScriptedStage> inner = std::make_shared<ScriptedStage>();
  std::unique_ptr<GuardStage> guard =
      std::make_unique<GuardStage>(inner, GuardOptions{10s, 3s, 8, 2, clock});
};

TEST(Breaker, OpensAtTheSecondFailureOfAWindowAndClosesAfterACleanOne) {
  guard::Breaker b(8, 2);
  EXPECT_FALSE(b.add(false));
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(b.add(true));
  EXPECT_EQ(b.bad(), 1u);
  EXPECT_FALSE(b.add(true));  // the first failure has left the window
  EXPECT_FALSE(b.add(false));
  EXPECT_FALSE(b.open());
  for (int i = 0; i < 6; ++i) b.add(true);
  EXPECT_TRUE(b.add(false));  // two within eight
  EXPECT_TRUE(b.open());
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(b.add(true));
  EXPECT_EQ(b.good_streak(), 7u);
  EXPECT_TRUE(b.add(true));
  EXPECT_FALSE(b.open());
}

TEST(Breaker, AFailureWhileOpenStartsTheCleanWindowAnew) {
  guard::Breaker b(4, 1);
  EXPECT_TRUE(b.add(false));
  for (int i = 0; i < 3; ++i) b.add(true);
  b.add(false);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(b.add(true));
  EXPECT_TRUE(b.add(true));
}

TEST(Breaker, TheWidestWindow) {
  guard::Breaker b(64, 64);
  for (int i = 0; i < 63; ++i) EXPECT_FALSE(b.add(false));
  EXPECT_TRUE(b.add(false));
  for (int i = 0; i < 63; ++i) EXPECT_FALSE(b.add(true));
  EXPECT_TRUE(b.add(true));
}

TEST_F(GuardTest, PassesEverythingThroughWhileTheMediumWorks) {
  EXPECT_EQ(read().status, Status::kOk);
  EXPECT_EQ(write().status, Status::kOk);
  EXPECT_TRUE(found());
  const BlockId id = id_of(1);
  guard->touch({&id, 1});
  guard->remove({&id, 1});
  EXPECT_EQ(inner->touches, 1u);
  EXPECT_EQ(inner->removes, 1u);
  EXPECT_EQ(guard->name(), "Scripted");
  EXPECT_EQ(guard->identity(), "here");
  EXPECT_EQ(stat("own"), 7u);
  EXPECT_EQ(guard->health(), "");
}

TEST_F(GuardTest, ProbesOncePerInterval) {
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(inner->probes, 0u) << "set-up has just tried the medium";
  for (std::size_t n = 1; n <= 3; ++n) {
    probe(Probe::kGood);
    std::this_thread::sleep_for(10ms);
    EXPECT_EQ(inner->probes, n);
  }
}

TEST_F(GuardTest, OpenRefusesNewWorkAndACleanWindowCloses) {
  probe(Probe::kBad);
  EXPECT_FALSE(guard->open());
  EXPECT_NE(guard->health().find("1 of the last 1 probes failed"), std::string::npos);
  EXPECT_EQ(read().status, Status::kOk);
  probe(Probe::kBad);
  ASSERT_TRUE(guard->open());
  EXPECT_NE(guard->health().find("out of service"), std::string::npos);
  EXPECT_NE(guard->health().find("write /mnt/x: EIO"), std::string::npos);

  const std::size_t reads = inner->reads, writes = inner->writes, lookups = inner->lookups;
  EXPECT_EQ(read().status, Status::kMiss);
  EXPECT_EQ(read().error, kOutOfService);
  EXPECT_EQ(write().status, Status::kRejected);
  EXPECT_EQ(write().error, kOutOfService);
  EXPECT_FALSE(found());
  const BlockId id = id_of(1);
  guard->touch({&id, 1});
  EXPECT_EQ(inner->touches, 0u);
  guard->remove({&id, 1});
  EXPECT_EQ(inner->removes, 1u) << "a removal has no answer that could tell a refusal";
  EXPECT_EQ(inner->reads, reads);
  EXPECT_EQ(inner->writes, writes);
  EXPECT_EQ(inner->lookups, lookups);
  EXPECT_EQ(stat("health_open"), 1u);
  EXPECT_EQ(stat("health_opened_total"), 1u);
  EXPECT_EQ(stat("health_refused_reads_total"), 2u);
  EXPECT_EQ(stat("health_refused_writes_total"), 2u);
  EXPECT_EQ(stat("health_refused_lookups_total"), 1u);

  for (int i = 0; i < 7; ++i) probe(Probe::kGood);
  EXPECT_TRUE(guard->open()) << "the two failures are still in the window";
  EXPECT_EQ(read().status, Status::kMiss);
  probe(Probe::kGood);
  EXPECT_FALSE(guard->open());
  EXPECT_EQ(stat("health_closed_total"), 1u);
  EXPECT_EQ(read().status, Status::kOk);
  EXPECT_EQ(guard->health(), "");
}

TEST_F(GuardTest, ASilentProbeOpensItWhileItsThreadIsStuck) {
  inner->say(Probe::kHang);
  clock->advance(10s);
  ASSERT_TRUE(eventually([&] { return inner->probes == 1; }));
  clock->advance(2999ms);
  EXPECT_EQ(stat("health_probe_failures_total"), 0u);
  clock->advance(1ms);
  EXPECT_EQ(stat("health_probe_failures_total"), 1u);
  EXPECT_EQ(read().status, Status::kOk);
  clock->advance(10s);
  EXPECT_EQ(read().status, Status::kMiss) << "the engine's own call finds out";
  EXPECT_EQ(stat("health_probe_failures_total"), 2u);
  clock->advance(1h);
  EXPECT_EQ(read().status, Status::kMiss);
  EXPECT_LE(stat("health_probe_failures_total"), 2u + 8u)
      << "a long silence costs a window at most";
  EXPECT_EQ(inner->probes, 1u) << "one probe at a time";

  inner->say(Probe::kGood);  // the late answer counts for nothing; the next probe comes at once
  ASSERT_TRUE(eventually([&] { return inner->probes == 2; }));
  EXPECT_TRUE(guard->open());
  for (int i = 0; i < 8; ++i) probe(Probe::kGood);
  EXPECT_FALSE(guard->open());
}

TEST_F(GuardTest, ShutdownLeavesAStuckProbeBehindWithinItsBound) {
  inner->say(Probe::kHang);
  clock->advance(10s);
  ASSERT_TRUE(eventually([&] { return inner->probes == 1; }));
  const auto start = Clock::now();
  guard->shutdown(Clock::now() + 50ms);
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_EQ(inner->shutdowns, 1);
  EXPECT_EQ(stat("health_probe_stuck"), 1u);
  guard.reset();
  const std::weak_ptr<ScriptedStage> alive = inner;
  inner->say(Probe::kGood);
  EXPECT_TRUE(eventually([&] { return alive.use_count() == 1; })) << "the thread lets go at last";
}

TEST_F(GuardTest, WhatThisProcessLacksIsNotTheMediumsFault) {
  for (int i = 0; i < 5; ++i) probe(Probe::kNoMemory);
  EXPECT_EQ(stat("health_probes_skipped_total"), 5u);
  EXPECT_EQ(stat("health_probes_total"), 0u);
  EXPECT_FALSE(guard->open());
  probe(Probe::kGood);  // the thread is still there
  EXPECT_EQ(stat("health_probes_total"), 1u);
}

TEST_F(GuardTest, ImpossibleSettingsAreRefused) {
  const auto refused = [&](GuardOptions o) {
    try {
      const GuardStage bad(inner, o);
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({10s, 3s, 8, 9, clock}).find("failures 9, window 8"), std::string::npos);
  EXPECT_NE(refused({10s, 3s, 65, 2, clock}), "");
  EXPECT_NE(refused({10s, 3s, 8, 0, clock}), "");
  EXPECT_NE(refused({0s, 3s, 8, 2, clock}), "");
}

class ObjectProbeTest : public ::testing::Test {
 protected:
  ~ObjectProbeTest() override { stage.release_hung(true); }
  std::string run(std::chrono::milliseconds timeout = 10s) {
    return probe.run(stage, Clock::now() + timeout);
  }
  std::shared_ptr<FakeMedium> medium = std::make_shared<FakeMedium>();
  FakeStage stage{small_geometry(), medium, {}};
  guard::ObjectProbe probe;
};

TEST_F(ObjectProbeTest, LeavesNothingBehind) {
  EXPECT_EQ(run(), "");
  EXPECT_EQ(run(), "");
  EXPECT_EQ(medium->size(), 0u);
  EXPECT_EQ(stage.stats().at("writes_total"), 2u);
  EXPECT_EQ(stage.stats().at("reads_total"), 2u);
}

TEST_F(ObjectProbeTest, NamesTheStepThatFailed) {
  stage.set_fault(Fault::kIoError, EIO);
  EXPECT_EQ(run(), "write: I/O error (Input/output error)");
  stage.set_fault(Fault::kCorrupt, 0);
  EXPECT_EQ(run(), "read: corrupt");
  stage.set_fault(Fault::kMiss, 0);
  EXPECT_EQ(run(), "read: miss");
  stage.set_fault(Fault::kNone, 0);
  EXPECT_EQ(run(), "");
  EXPECT_EQ(medium->size(), 0u);
}

TEST_F(ObjectProbeTest, AFullMediumStillServes) {
  medium->set_capacity(1);
  ASSERT_TRUE(medium->put(id_of(1), {}));
  EXPECT_EQ(run(), "");
  EXPECT_EQ(stage.stats().at("reads_total"), 0u);
}

/// A stage that says "ok" and returns other bytes than it was given.
class Liar final : public Stage {
 public:
  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "Liar"; }
  void lookup(std::span<const BlockId>, std::span<std::uint8_t>, bool) noexcept override {}
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline) noexcept override {
    sink->on_read(ops[0].cookie, ops[0].begin, ops[0].end, {Status::kOk, 0});
  }
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline) noexcept override {
    sink->on_written(ops[0].cookie, {Status::kOk, 0});
  }
  void touch(std::span<const BlockId>) noexcept override {}
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override { return {}; }
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override {}

 private:
  const Geometry geometry_ = small_geometry();
};

TEST(ObjectProbe, ComparesTheBytes) {
  Liar liar;
  guard::ObjectProbe probe;
  EXPECT_EQ(probe.run(liar, Clock::now() + 10s), "compare: shard 0 came back with other bytes");
}

TEST_F(ObjectProbeTest, AHungStageIsOwedTwoAnswersAtMost) {
  stage.set_fault(Fault::kHang, 0);
  EXPECT_EQ(run(20ms), "write: no answer in time");
  EXPECT_EQ(run(20ms), "write: no answer in time");
  EXPECT_EQ(run(20ms), "the stage has not answered 2 earlier probes");
  EXPECT_EQ(stage.hung(), 2u);
  stage.set_fault(Fault::kNone, 0);
  stage.release_hung(true);  // writes into buffers that the probe gave up: they are still there
  EXPECT_EQ(run(), "");
  EXPECT_EQ(medium->size(), 0u) << "what the late writes left was removed";
}

/// B56: a backend that hangs for ever, then fails fast, then recovers.
class GuardedStoreTest : public StoreTest {
 protected:
  void open_guarded(StoreOptions options, std::chrono::milliseconds interval) {
    fake = std::make_shared<FakeStage>(small_geometry(), medium, FakeOptions{});
    guard = std::make_shared<GuardStage>(fake, GuardOptions{interval, 500ms, 8, 2, nullptr});
    tier = std::make_shared<StagingTier>(small_geometry(), 16, 24);
    store = std::make_unique<Store>(guard, tier, host_device(), options);
  }
  ~GuardedStoreTest() override {
    if (fake != nullptr) fake->release_hung(true);
  }
  std::shared_ptr<GuardStage> guard;
};

TEST_F(GuardedStoreTest, RequestsFinishAsMissesWhileTheBackendHangs) {
  StoreOptions options;
  options.timeout = 1500ms;
  open_guarded(options, 10ms);
  stored(0, 100);
  fake->set_fault(Fault::kHang, 0);
  Rowset early;
  early.add_object(0);
  const auto hanging = store->load(early.blank().rows());
  ASSERT_TRUE(eventually([&] { return guard->open(); }));

  const auto start = Clock::now();
  for (std::uint32_t n = 0; n < 100; ++n) {
    EXPECT_FALSE(present(n));
    Rowset wanted;
    wanted.add_object(n);
    const auto task = store->load(wanted.blank().rows());
    ASSERT_EQ(wait(*task), all(kShards, Status::kMiss)) << n;
    EXPECT_TRUE(wanted.untouched(0));
  }
  EXPECT_LT(Clock::now() - start, 1500ms) << "none of them waits for the backend";
  EXPECT_EQ(stat("Fake.health_refused_reads_total"), 100u);
  EXPECT_EQ(wait(*hanging), all(kShards, Status::kTimeout)) << "at timeout_ms, not later";
  EXPECT_TRUE(early.untouched(0));

  fake->set_fault(Fault::kIoError, EIO);  // fails fast: still out of service
  fake->release_hung(false);
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(guard->open());
  fake->set_fault(Fault::kNone, 0);
  ASSERT_TRUE(eventually([&] { return !guard->open(); }));
  Rowset again;
  again.add_object(7);
  const auto task = store->load(again.blank().rows());
  EXPECT_EQ(wait(*task), all(kShards, Status::kOk));
  EXPECT_TRUE(again.right(0));
}

TEST_F(GuardedStoreTest, ARefusedDumpIsCountedAndNotRetried) {
  StoreOptions options;
  options.write_retries = 5;
  open_guarded(options, 10ms);
  fake->set_fault(Fault::kIoError, EIO);
  ASSERT_TRUE(eventually([&] { return guard->open(); }));
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kRejected));
  EXPECT_EQ(task->durable_outcome(0).error, kOutOfService);
  EXPECT_EQ(stat("store.backend_dump_retries_total"), 0u);
  EXPECT_EQ(stat("store.backend_dump_errors_total"), 1u);
  EXPECT_EQ(stat("Fake.health_refused_writes_total"), 1u);
}

}  // namespace
}  // namespace ucm::test
