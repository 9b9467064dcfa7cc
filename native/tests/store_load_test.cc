#include "store_fixture.h"

namespace ucm::test {
namespace {

TEST_F(StoreTest, DumpedShardsComeBackEqual) {
  open();
  stored(0, 60);
  Rowset target;
  for (std::uint32_t o = 60; o-- > 0;) target.add(o, o % kShards);  // some shards, other order
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_EQ(wait(*task), all(60, Status::kOk));
  for (std::size_t row = 0; row < target.size(); ++row) EXPECT_TRUE(target.right(row)) << row;
  EXPECT_EQ(task->state(), TaskState::kDurable);
  EXPECT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
}

TEST_F(StoreTest, RunsWithoutAnAddressAreSkipped) {
  open();
  stored(1, 2);
  Rowset target;
  target.add_object(1);
  target.blank();
  target.addresses[1] = 0;  // second run of shard 0
  const auto task = store->load(target.rows());
  ASSERT_EQ(wait(*task), all(kShards, Status::kOk));
  EXPECT_FALSE(target.untouched(0));
  for (std::size_t i = kRunBytes; i < 2 * kRunBytes; ++i) ASSERT_EQ(target.memory[i], kUntouched);
  EXPECT_TRUE(target.right(1));
}

TEST_F(StoreTest, OneShardMayBeLoadedToTwoPlaces) {
  open();
  stored(1, 2);
  Rowset target;
  target.add(1, 2);
  target.add(1, 2);
  target.blank();
  ASSERT_EQ(wait(*store->load(target.rows())), all(2, Status::kOk));
  EXPECT_TRUE(target.right(0) && target.right(1));
  EXPECT_EQ(stat("Fake.reads_total"), 1U);
}

// B54: results per block, whatever the batch.
TEST_F(StoreTest, ALoadWritesNothingBeforeItsEvent) {
  open();
  stored(0, 4);
  const auto event = HostEvent::create();
  Rowset wanted;
  for (std::uint32_t n = 0; n < 4; ++n) wanted.add_object(n);
  const auto task = store->load(wanted.blank().rows(), event->handle());
  ASSERT_TRUE(eventually([&] { return stat("Fake.reads_total") == 4; })) << "media do not wait";
  EXPECT_FALSE(task->wait_until(Clock::now() + 30ms));
  for (std::size_t row = 0; row < wanted.size(); ++row) EXPECT_TRUE(wanted.untouched(row));
  event->fire();
  EXPECT_EQ(wait(*task), all(wanted.size(), Status::kOk));
  for (std::size_t row = 0; row < wanted.size(); ++row) EXPECT_TRUE(wanted.right(row));
  EXPECT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
}

TEST_F(StoreTest, ALoadWhoseEventNeverFiresEndsAndFreesItsBuffers) {
  StoreSetup setup;
  setup.store.timeout = 100ms;
  open(setup);
  stored(0, 2);
  const auto event = HostEvent::create();
  Rowset wanted;
  wanted.add_object(0);
  wanted.add_object(1);
  const auto task = store->load(wanted.blank().rows(), event->handle());
  EXPECT_EQ(wait(*task), all(wanted.size(), Status::kTimeout));
  for (std::size_t row = 0; row < wanted.size(); ++row) EXPECT_TRUE(wanted.untouched(row));
  EXPECT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
  event->fire();
  std::this_thread::sleep_for(20ms);
  for (std::size_t row = 0; row < wanted.size(); ++row) EXPECT_TRUE(wanted.untouched(row));
}

TEST_F(StoreTest, ARowGivenUpBeforeTheEventTakesNoOtherAlong) {
  open();
  stored(0, 1);
  const auto event = HostEvent::create();
  Rowset wanted;
  wanted.add_object(0);
  const auto task = store->load(wanted.blank().rows(), event->handle());
  ASSERT_TRUE(eventually([&] { return stat("Fake.reads_total") == 1; }));
  std::this_thread::sleep_for(20ms);
  task->give_up_row(0, Status::kCancelled);
  event->fire();
  std::vector<Status> expected = all(kShards, Status::kOk);
  expected[0] = Status::kCancelled;
  EXPECT_EQ(wait(*task), expected);
  EXPECT_TRUE(wanted.untouched(0));
  for (std::size_t row = 1; row < wanted.size(); ++row) EXPECT_TRUE(wanted.right(row));
}

TEST_F(StoreTest, CloseEndsLoadsThatWaitForAnEvent) {
  open();
  stored(0, 1);
  const auto event = HostEvent::create();
  Rowset wanted;
  wanted.add_object(0);
  const auto task = store->load(wanted.blank().rows(), event->handle());
  ASSERT_TRUE(eventually([&] { return stat("Fake.reads_total") == 1; }));
  EXPECT_EQ(store->close(200ms), 0u);
  EXPECT_EQ(statuses(*task), all(kShards, Status::kClosed));
  EXPECT_TRUE(wanted.untouched(0));
}

TEST_F(StoreTest, FailuresArePerObject) {
  open();
  stored(0, 4);
  fake->inject(id_of(1), true, Fault::kZeroBytes, 0, 1);
  medium->remove(id_of(2));
  Rowset target;
  for (std::uint32_t o = 0; o < 4; ++o) target.add(o, 1);
  target.blank();
  const auto task = store->load(target.rows());
  const std::vector<Status> expected{Status::kOk, Status::kCorrupt, Status::kMiss, Status::kOk};
  EXPECT_EQ(wait(*task), expected);
  EXPECT_EQ(wait(*task), expected);  // waiting twice gives the same answer
  EXPECT_TRUE(target.right(0) && target.right(3));
  EXPECT_TRUE(target.untouched(1) && target.untouched(2));
  EXPECT_EQ(task->state(), TaskState::kFailed);
  EXPECT_EQ(store->lookup_on_prefix(target.ids), 0);  // the corrupt object was removed
  EXPECT_EQ(store->lookup_on_reverse(target.ids), 3);
}

TEST_F(StoreTest, ErrnoIsKept) {
  open();
  stored(0, 1);
  fake->inject(id_of(0), true, Fault::kIoError, 121, 1);
  Rowset target;
  target.add(0, 0);
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_EQ(wait(*task), all(1, Status::kIoError));
  EXPECT_EQ(task->outcome(0).error, 121);
}

TEST_F(StoreTest, NothingLandsAfterATimeoutWasTold) {
  open();
  stored(0, 2);
  fake->inject(id_of(0), true, Fault::kHang, 0, 1);
  Rowset target;
  target.add_object(0);
  target.add(1, 0);
  target.blank();
  const auto task = store->load(target.rows());
  EXPECT_TRUE(task->wait_row_until(kShards, Clock::now() + 20s));  // readiness per shard
  EXPECT_EQ(wait(*task, 50ms).front(), Status::kTimeout);
  EXPECT_TRUE(target.right(kShards));
  EXPECT_EQ(stat("store.buffers_quarantined"), 1U);
  EXPECT_EQ(fake->release_hung(true), 1U);  // the read now succeeds
  ASSERT_TRUE(eventually([&] { return stat("store.loads_running") == 0; }));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(target.untouched(row)) << row;
  EXPECT_EQ(wait(*task).front(), Status::kTimeout);
}

TEST_F(StoreTest, NothingLandsAfterCancel) {
  open();
  stored(0, 1);
  fake->inject(id_of(0), true, Fault::kHang, 0, 1);
  Rowset target;
  target.add_object(0);
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_TRUE(eventually([&] { return fake->hung() == 1; }));
  task->give_up(Status::kCancelled);
  EXPECT_EQ(statuses(*task), all(kShards, Status::kCancelled));
  fake->release_hung(true);
  ASSERT_TRUE(eventually([&] { return stat("store.loads_running") == 0; }));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(target.untouched(row));
}

// Spec 3.8 item 8: a failure does not complete the waiter while other shards are being copied.
TEST_F(StoreTest, AFailureDoesNotOvertakeARunningCopy) {
  auto gate = std::make_shared<GateDevice>();
  StoreSetup setup;
  setup.device = gate;
  open(setup);
  stored(0, 1);
  gate->shut();
  Rowset target;
  target.add(0, 0);
  target.add(9, 0);  // a miss
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_TRUE(gate->wait_inside());
  ASSERT_TRUE(eventually([&] { return task->outcome(1).status == Status::kMiss; }));
  EXPECT_FALSE(task->wait_until(Clock::now() + 30ms));
  EXPECT_EQ(task->outcome(0).status, Status::kPending);
  std::atomic<bool> returned{false};
  std::thread canceller([&] {
    task->give_up(Status::kCancelled);
    returned = true;
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_FALSE(returned);  // cancel waits for the copy, too
  gate->let_go();
  canceller.join();
  EXPECT_EQ(statuses(*task), (std::vector<Status>{Status::kOk, Status::kMiss}));
  EXPECT_TRUE(target.right(0));
}

TEST_F(StoreTest, TheStoresOwnDeadlineEndsATask) {
  StoreSetup setup;
  setup.store.timeout = 60ms;
  open(setup);
  stored(0, 1);
  fake->inject(id_of(0), true, Fault::kHang, 0, 1);
  Rowset target;
  target.add(0, 0);
  target.blank();
  const auto task = store->load(target.rows());
  EXPECT_TRUE(task->wait_until(Clock::now() + 20s));  // nobody gave it up but the store
  EXPECT_EQ(statuses(*task), all(1, Status::kTimeout));
  fake->release_hung(true);
}

// Buffers under hung I/O are not used for anything else; loads wait and time out, visibly.
TEST_F(StoreTest, QuarantinedBuffersAreNotReused) {
  StoreSetup setup;
  setup.load_buffers = 1;
  setup.shared_buffers = 1;
  setup.store.timeout = 200ms;
  open(setup);
  stored(0, 1);
  stored(1, 2);
  stored(2, 3);
  for (std::uint32_t o = 0; o < 2; ++o) fake->inject(id_of(o), true, Fault::kHang, 0, 1);
  Rowset hung;
  hung.add(0, 0);
  hung.add(1, 0);
  hung.blank();
  const auto first = store->load(hung.rows());
  ASSERT_EQ(wait(*first), all(2, Status::kTimeout));
  EXPECT_EQ(stat("staging.buffers_free"), 0U);
  Rowset target;
  target.add(2, 3);
  target.blank();
  EXPECT_EQ(wait(*store->load(target.rows())), all(1, Status::kTimeout));
  EXPECT_EQ(fake->release_hung(true), 2U);
  ASSERT_TRUE(eventually([&] { return stat("staging.buffers_free") == 2; }));
  EXPECT_EQ(wait(*store->load(target.rows())), all(1, Status::kOk));
  EXPECT_TRUE(target.right(0));
}

TEST_F(StoreTest, LoadsBeyondTheWaitingDepthAreRejectedAndCounted) {
  StoreSetup setup;
  setup.fake.manual = true;
  setup.load_buffers = 2;
  setup.shared_buffers = 2;
  setup.store.waiting_depth = 3;
  open(setup);
  Rowset target;
  for (std::uint32_t o = 0; o < 10; ++o) target.add(o, 0);
  target.blank();
  const auto task = store->load(target.rows());
  ASSERT_TRUE(task->wait_row_until(9, Clock::now() + 20s));
  EXPECT_EQ(stat("store.load_rows_rejected_total"), 3U);  // 4 hold buffers, 3 wait
  fake->step(10);
  const auto result = wait(*task);
  EXPECT_EQ(std::count(result.begin(), result.end(), Status::kMiss), 7);
  EXPECT_EQ(std::count(result.begin(), result.end(), Status::kRejected), 3);
}

// B48: one load behind hundreds of dumps is served next.
TEST_F(StoreTest, LoadsGoBeforeDumps) {
  StoreSetup setup;
  setup.fake.manual = true;
  open(setup);
  Rowset source;
  for (std::uint32_t o = 0; o < 200; ++o) source.add_object(o);
  source.filled();
  const auto dump = store->dump(source.rows(), 0, CommitMode::kAuto);
  fake->step(1);
  ASSERT_TRUE(eventually([&] { return medium->size() == 1; }));
  const auto ids = medium->ids();
  ASSERT_TRUE(eventually([&] { return fake->queued() > 15; }));  // dumps wait in the stage
  Rowset target;
  target.add(0, 0);
  target.ids[0] = ids[0];
  target.blank();
  const auto load = store->load(target.rows());
  ASSERT_TRUE(eventually([&] { return stat("store.loads_running") == 1; }));
  fake->step(1);
  EXPECT_EQ(wait(*load), all(1, Status::kOk));
  fake->step(1000);
  EXPECT_EQ(wait(*dump), all(source.size(), Status::kOk));
}

TEST_F(StoreTest, LookupStopsAtTheFirstMiss) {
  open();
  stored(0, 300);
  std::vector<BlockId> ids;
  for (std::uint32_t o = 0; o < 5000; ++o) ids.push_back(id_of(o));
  const auto before = stat("Fake.lookups_total");
  EXPECT_EQ(store->lookup_on_prefix(ids), 299);
  EXPECT_EQ(stat("Fake.lookups_total") - before, 301U);
  EXPECT_EQ(store->lookup_on_prefix(std::span(ids).subspan(300)), -1);
  EXPECT_EQ(store->lookup_on_reverse(ids), 299);
  EXPECT_EQ(store->lookup_on_reverse(std::span(ids).subspan(300)), -1);
  EXPECT_EQ(store->lookup_on_prefix({}), -1);
}

TEST_F(StoreTest, BadRowsAreRefusedWhole) {
  open();
  Rowset rows;
  rows.add(1, 0);
  rows.add(1, kShards);  // out of range
  rows.filled();
  EXPECT_THROW(store->load(rows.rows()), std::invalid_argument);
  rows.shards[1] = 0;
  EXPECT_THROW(store->dump(rows.rows(), 0, CommitMode::kAuto), std::invalid_argument);  // twice
  rows.shards[1] = 1;
  rows.addresses[3] = 0;
  EXPECT_THROW(store->dump(rows.rows(), 0, CommitMode::kAuto), std::invalid_argument);
  rows.filled();
  rows.ids[1] = BlockId{};
  EXPECT_THROW(store->dump(rows.rows(), 0, CommitMode::kAuto), std::invalid_argument);
  EXPECT_THROW(store->lookup_on_prefix(rows.ids), std::invalid_argument);
  rows.ids[1] = id_of(1);
  EXPECT_THROW(store->dump(rows.rows(), 4711, CommitMode::kAuto), std::invalid_argument);  // event
  rows.addresses.pop_back();
  EXPECT_THROW(store->load(rows.rows()), std::invalid_argument);
  EXPECT_EQ(stat("store.dump_tasks_total") + stat("store.load_tasks_total"), 0U);
  EXPECT_EQ(stat("staging.buffers_free"), stat("staging.buffers"));
}

}  // namespace
}  // namespace ucm::test
