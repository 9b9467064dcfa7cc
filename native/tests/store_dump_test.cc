#include <random>

#include "store_fixture.h"

namespace ucm::test {
namespace {

// Spec 3.8 item 1: published when *all* shards are in, whatever their order.
TEST_F(StoreTest, AnObjectIsPublishedByItsLastMissingShard) {
  open();
  std::vector<std::shared_ptr<Task>> tasks;
  std::vector<Rowset> parts(kShards);
  for (const std::uint32_t shard : {3U, 0U, 2U}) {
    parts[shard].add(7, shard);
    tasks.push_back(store->dump(parts[shard].filled().rows(), 0, CommitMode::kAuto));
    EXPECT_EQ(wait(*tasks.back()), all(1, Status::kOk));
    EXPECT_FALSE(present(7));
    EXPECT_EQ(tasks.back()->state(), TaskState::kInBackend);
  }
  Rowset target;
  target.add(7, 3);
  target.blank();
  EXPECT_EQ(wait(*store->load(target.rows())), all(1, Status::kMiss));
  EXPECT_TRUE(target.untouched(0));
  parts[1].add(7, 1);
  tasks.push_back(store->dump(parts[1].filled().rows(), 0, CommitMode::kAuto));
  for (const auto& task : tasks) EXPECT_EQ(wait_durable(*task), all(1, Status::kOk));
  EXPECT_TRUE(present(7));
  Rowset whole;
  whole.add_object(7);
  whole.blank();
  ASSERT_EQ(wait(*store->load(whole.rows())), all(kShards, Status::kOk));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(whole.right(row));
}

TEST_F(StoreTest, ManyThreadsDumpShardsOfTheSameObjects) {
  StoreSetup setup;
  setup.store.copiers = 2;
  setup.shared_buffers = 200;
  open(setup);
  constexpr std::uint32_t kObjects = 100;
  std::vector<std::thread> threads;
  std::atomic<std::uint32_t> failures{0};
  for (std::uint32_t shard = 0; shard < kShards; ++shard) {
    threads.emplace_back([&, shard] {
      std::vector<std::uint32_t> order(kObjects);
      for (std::uint32_t i = 0; i < kObjects; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(shard));
      for (const std::uint32_t o : order) {
        Rowset part;
        part.add(o, shard);
        const auto task = store->dump(part.filled().rows(), 0, CommitMode::kAuto);
        if (wait(*task) != all(1, Status::kOk)) ++failures;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0U);
  ASSERT_TRUE(eventually([&] { return medium->size() == kObjects; }));
  Rowset target;
  for (std::uint32_t o = 0; o < kObjects; ++o) target.add_object(o);
  target.blank();
  ASSERT_EQ(wait(*store->load(target.rows())), all(target.size(), Status::kOk));
  for (std::size_t row = 0; row < target.size(); ++row) ASSERT_TRUE(target.right(row)) << row;
}

TEST_F(StoreTest, ExplicitObjectsWaitForCommit) {
  open();
  Rowset source;
  source.add_object(1);
  source.add_object(2);
  const auto dump = store->dump(source.filled().rows(), 0, CommitMode::kExplicit);
  EXPECT_EQ(wait(*dump), all(source.size(), Status::kOk));
  EXPECT_EQ(medium->size(), 0U);
  const std::vector<BlockId> ids{id_of(2), id_of(5)};
  const auto commit = store->commit(ids);
  EXPECT_EQ(wait_durable(*commit), (std::vector<Status>{Status::kOk, Status::kMiss}));
  EXPECT_TRUE(present(2));
  const BlockId one = id_of(1);
  store->discard({&one, 1});
  auto durable = wait_durable(*dump);
  for (std::size_t row = 0; row < source.size(); ++row) {
    EXPECT_EQ(durable[row], row < kShards ? Status::kCancelled : Status::kOk) << row;
  }
  EXPECT_FALSE(present(1));
  // Commit again: it is stored already.
  const BlockId two = id_of(2);
  EXPECT_EQ(wait_durable(*store->commit({&two, 1})), all(1, Status::kOk));
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

TEST_F(StoreTest, ACommitWaitsForCopiesThatAreOnTheirWay) {
  open();
  const auto event = HostEvent::create();
  Rowset source;
  source.add_object(1);
  const auto dump = store->dump(source.filled().rows(), event->handle(), CommitMode::kExplicit);
  const BlockId id = id_of(1);
  const auto commit = store->commit({&id, 1});
  EXPECT_FALSE(commit->wait_until(Clock::now() + 20ms));
  event->fire();
  EXPECT_EQ(wait_durable(*commit), all(1, Status::kOk));
  EXPECT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
}

TEST_F(StoreTest, ACommitThatTimesOutDiscardsTheObject) {
  open();
  Rowset part;
  part.add(1, 0);
  EXPECT_EQ(wait(*store->dump(part.filled().rows(), 0, CommitMode::kExplicit)),
            all(1, Status::kOk));
  const BlockId id = id_of(1);
  EXPECT_EQ(wait(*store->commit({&id, 1}), 30ms), all(1, Status::kTimeout));
  EXPECT_EQ(stat("store.objects_open"), 0U);
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

// B06: the source is read after the event, not before.
TEST_F(StoreTest, ADumpReadsItsSourceAfterTheEvent) {
  open();
  const auto event = HostEvent::create();
  Rowset source;
  source.add_object(1);
  source.blank();
  const auto task = store->dump(source.rows(), event->handle(), CommitMode::kAuto);
  EXPECT_FALSE(task->wait_until(Clock::now() + 50ms));
  source.filled();
  event->fire();
  ASSERT_EQ(wait_durable(*task), all(kShards, Status::kOk));
  Rowset target;
  target.add_object(1);
  target.blank();
  ASSERT_EQ(wait(*store->load(target.rows())), all(kShards, Status::kOk));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(target.right(row));
}

TEST_F(StoreTest, AnEventThatNeverFiresEndsInATimeoutAndNothingIsStored) {
  open();
  const auto event = HostEvent::create();
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), event->handle(), CommitMode::kAuto);
  EXPECT_EQ(wait(*task, 50ms), all(kShards, Status::kTimeout));
  event->fire();  // too late
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(present(1));
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kTimeout));
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

// One event that does not fire blocks only its own task (spec 3.8 item 12).
TEST_F(StoreTest, ASlowEventDelaysNobodyElse) {
  open();
  const auto slow = HostEvent::create();
  Rowset first;
  first.add_object(1);
  const auto waiting = store->dump(first.filled().rows(), slow->handle(), CommitMode::kAuto);
  Rowset second;
  second.add_object(2);
  EXPECT_EQ(wait_durable(*store->dump(second.filled().rows(), 0, CommitMode::kAuto)),
            all(kShards, Status::kOk));
  EXPECT_FALSE(waiting->done());
  waiting->give_up(Status::kCancelled);
}

class PolledEvent final : public Event {
 public:
  bool fired() noexcept override { return fired_; }
  bool subscribe(std::function<void()>) override { return false; }
  std::atomic<bool> fired_{false};
};

class PollDevice final : public Device {
 public:
  std::string name() const override { return "poll"; }
  void copy_in(std::byte* d, const std::uint64_t* a, std::size_t n,
               const RunShape& r) noexcept override {
    host_device()->copy_in(d, a, n, r);
  }
  void copy_out(const std::byte* s, const std::uint64_t* a, std::size_t n,
                const RunShape& r) noexcept override {
    host_device()->copy_out(s, a, n, r);
  }
  Outcome flush() noexcept override { return {Status::kOk, 0}; }
  std::shared_ptr<Event> event(std::uint64_t) override { return polled; }
  std::shared_ptr<PolledEvent> polled = std::make_shared<PolledEvent>();
};

TEST_F(StoreTest, EventsWithoutACallbackArePolled) {
  const auto device = std::make_shared<PollDevice>();
  StoreSetup setup;
  setup.device = device;
  open(setup);
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 1, CommitMode::kAuto);
  EXPECT_FALSE(task->wait_until(Clock::now() + 20ms));
  device->polled->fired_ = true;
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kOk));
}

// A dump that is given up while its object was not completed leaves nothing behind.
TEST_F(StoreTest, ACancelledPartDiscardsTheObject) {
  open();
  Rowset first;
  first.add(1, 0);
  const auto in = store->dump(first.filled().rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait(*in), all(1, Status::kOk));
  const auto event = HostEvent::create();
  Rowset rest;
  for (std::uint32_t s = 1; s < kShards; ++s) rest.add(1, s);
  const auto late = store->dump(rest.filled().rows(), event->handle(), CommitMode::kAuto);
  late->give_up(Status::kCancelled);
  EXPECT_EQ(wait_durable(*in), all(1, Status::kCancelled));
  EXPECT_EQ(in->state(), TaskState::kFailed);
  EXPECT_EQ(stat("store.objects_open"), 0U);
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
  stored(1, 2);  // and it can be dumped anew
  EXPECT_TRUE(present(1));
}

// Two tasks with the same object: one given up does not take the other's object away.
TEST_F(StoreTest, AnotherSourceOfTheSameShardsSavesTheObject) {
  open();
  const auto never = HostEvent::create();
  const auto soon = HostEvent::create();
  Rowset a;
  Rowset b;
  a.add_object(1);
  b.add_object(1);
  const auto lost = store->dump(a.filled().rows(), never->handle(), CommitMode::kAuto);
  const auto kept = store->dump(b.filled().rows(), soon->handle(), CommitMode::kAuto);
  lost->give_up(Status::kCancelled);
  soon->fire();
  EXPECT_EQ(wait_durable(*kept), all(kShards, Status::kOk));
  EXPECT_TRUE(present(1));
}

TEST_F(StoreTest, ADuplicateDumpSucceedsWithoutWaitingForItsOwnEvent) {
  open();
  const auto never = HostEvent::create();
  Rowset a;
  Rowset b;
  a.add_object(1);
  b.add_object(1);
  const auto waiting = store->dump(a.filled().rows(), never->handle(), CommitMode::kAuto);
  const auto first = store->dump(b.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*first), all(kShards, Status::kOk));
  EXPECT_EQ(wait_durable(*waiting), all(kShards, Status::kOk));
  EXPECT_EQ(wait_durable(*store->dump(a.rows(), 0, CommitMode::kAuto)), all(kShards, Status::kOk));
  EXPECT_EQ(medium->size(), 1U);
}

TEST_F(StoreTest, AFailedBackendDumpIsRetriedThenReported) {
  StoreSetup setup;
  setup.store.retry_delay = 1ms;
  open(setup);
  fake->inject(id_of(1), false, Fault::kIoError, 28, 2);
  fake->inject(id_of(2), false, Fault::kIoError, 28, 3);
  Rowset source;
  source.add_object(1);
  source.add_object(2);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait(*task), all(source.size(), Status::kOk));  // the source is free
  const auto durable = wait_durable(*task);
  for (std::size_t row = 0; row < source.size(); ++row) {
    EXPECT_EQ(durable[row], row < kShards ? Status::kOk : Status::kIoError);
  }
  EXPECT_EQ(task->durable_outcome(kShards).error, 28);
  EXPECT_EQ(task->state(), TaskState::kFailed);
  EXPECT_EQ(stat("store.backend_dump_retries_total"), 4U);
  EXPECT_EQ(stat("store.backend_dump_errors_total"), 1U);
  EXPECT_TRUE(present(1));
  EXPECT_FALSE(present(2));
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

// B59: a full medium rejects visibly, a later try works, the prefix stops before the hole.
TEST_F(StoreTest, AFullMediumRejectsVisibly) {
  StoreSetup setup;
  setup.store.retry_delay = 1ms;
  open(setup);
  medium->set_capacity(10);
  Rowset source;
  for (std::uint32_t o = 0; o < 12; ++o) source.add_object(o);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  const auto durable = wait_durable(*task);
  EXPECT_EQ(std::count(durable.begin(), durable.end(), Status::kRejected), 2 * kShards);
  std::vector<BlockId> ids;
  for (std::uint32_t o = 0; o < 12; ++o) ids.push_back(id_of(o));
  EXPECT_EQ(store->lookup_on_prefix(ids), 9);
  for (std::uint32_t o = 0; o < 5; ++o) medium->remove(id_of(o));
  stored(10, 12);
  EXPECT_EQ(store->lookup_on_prefix(ids), -1);
  EXPECT_EQ(store->lookup_on_prefix(std::span(ids).subspan(5)), 6);
  EXPECT_EQ(store->lookup_on_reverse(std::span(ids).subspan(0, 5)), -1);
}

// Spec 3.8 item 4: a queue that is full pushes back, nothing is lost without a result.
TEST_F(StoreTest, MoreDumpsThanBuffersAllSucceed) {
  StoreSetup setup;
  setup.shared_buffers = 3;
  setup.fake.latency_us = 100;
  open(setup);
  std::vector<Rowset> sources(400);
  std::vector<std::shared_ptr<Task>> tasks;
  for (std::uint32_t o = 0; o < 400; ++o) {
    sources[o].add_object(o);
    tasks.push_back(store->dump(sources[o].filled().rows(), 0, CommitMode::kAuto));
  }
  for (const auto& task : tasks) EXPECT_EQ(wait_durable(*task), all(kShards, Status::kOk));
  EXPECT_EQ(medium->size(), 400U);
}

TEST_F(StoreTest, DumpsBeyondTheWaitingDepthAreRejectedAndCounted) {
  StoreSetup setup;
  setup.shared_buffers = 2;
  setup.store.waiting_depth = 3;
  setup.fake.manual = true;
  open(setup);
  Rowset source;
  for (std::uint32_t o = 0; o < 10; ++o) source.add_object(o);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  fake->step(100);
  const auto result = wait(*task);
  for (std::size_t row = 0; row < source.size(); ++row) {
    EXPECT_EQ(result[row], row < 5 * kShards ? Status::kOk : Status::kRejected) << row;
  }
  EXPECT_EQ(stat("store.dump_rows_rejected_total"), 5U * kShards);
}

// Objects that wait for room open as a whole: parts cannot fill the buffers and block each other.
TEST_F(StoreTest, InterleavedPartsOfManyObjectsDoNotDeadlock) {
  StoreSetup setup;
  setup.shared_buffers = 2;
  open(setup);
  std::vector<Rowset> parts(20 * kShards);
  std::vector<std::shared_ptr<Task>> tasks;
  for (std::uint32_t s = 0; s < kShards; ++s) {
    for (std::uint32_t o = 0; o < 20; ++o) {
      Rowset& part = parts[s * 20 + o];
      part.add(o, s);
      tasks.push_back(store->dump(part.filled().rows(), 0, CommitMode::kAuto));
    }
  }
  for (const auto& task : tasks) ASSERT_EQ(wait_durable(*task), all(1, Status::kOk));
  EXPECT_EQ(medium->size(), 20U);
}

TEST_F(StoreTest, AnOpenObjectThatNobodyCompletesExpires) {
  StoreSetup setup;
  setup.store.open_age = 30ms;
  open(setup);
  Rowset part;
  part.add(1, 0);
  const auto task = store->dump(part.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(1, Status::kTimeout));
  EXPECT_EQ(stat("store.expired_open_objects_total"), 1U);
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

// A stage that never answers a write: tasks end, the buffer stays away, a new dump may start.
TEST_F(StoreTest, AHungWriteIsOverdueAndQuarantined) {
  StoreSetup setup;
  setup.store.timeout = 50ms;
  open(setup);
  fake->inject(id_of(1), false, Fault::kHang, 0, 1);
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kTimeout));
  EXPECT_EQ(stat("store.backend_dumps_overdue_total"), 1U);
  EXPECT_EQ(stat("store.buffers_quarantined"), 1U);
  stored(1, 2);
  fake->release_hung(true);
  ASSERT_TRUE(eventually([&] { return stat("store.buffers_quarantined") == 0; }));
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

TEST_F(StoreTest, WaitDurableThatExpiresIsFinal) {
  open();
  fake->inject(id_of(1), false, Fault::kHang, 0, 1);
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task, 30ms), all(kShards, Status::kTimeout));
  EXPECT_EQ(statuses(*task), all(kShards, Status::kOk));
  fake->release_hung(true);
  ASSERT_TRUE(eventually([&] { return present(1); }));
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kTimeout));
}

TEST_F(StoreTest, TheSourceIsNotReadAfterCancelWasTold) {
  auto gate = std::make_shared<GateDevice>();
  StoreSetup setup;
  setup.device = gate;
  open(setup);
  gate->shut();
  Rowset source;
  source.add_object(1);
  source.add_object(2);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  ASSERT_TRUE(gate->wait_inside());
  std::atomic<bool> returned{false};
  std::thread canceller([&] {
    task->give_up(Status::kCancelled);
    returned = true;
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(returned);
  gate->let_go();
  canceller.join();
  source.memory.assign(source.memory.size(), kUntouched);  // the engine takes its memory back
  ASSERT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
  for (const BlockId& id : medium->ids()) {  // what was completed has the old bytes
    const auto object = medium->get(id);
    EXPECT_NE(object->data[0], kUntouched);
  }
}

// Discarded while a copier writes into its buffer: the buffer comes back when the copy has ended.
TEST_F(StoreTest, DiscardDuringACopyFreesTheBufferAfterIt) {
  auto gate = std::make_shared<GateDevice>();
  StoreSetup setup;
  setup.device = gate;
  open(setup);
  gate->shut();
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kExplicit);
  ASSERT_TRUE(gate->wait_inside());
  const BlockId id = id_of(1);
  store->discard({&id, 1});
  EXPECT_EQ(task->durable_outcome(0).status, Status::kCancelled);
  EXPECT_FALSE(task->wait_until(Clock::now() + 20ms));
  EXPECT_LT(stat("staging.buffers_free"), stat("staging.buffers"));
  gate->let_go();
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kCancelled));
  ASSERT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
  EXPECT_EQ(wait(*store->commit({&id, 1})), all(1, Status::kMiss));
}

}  // namespace
}  // namespace ucm::test
