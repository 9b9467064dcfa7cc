// The Store over a tier that retains objects: ready, owned and waiting shards, takeover, prefetch.
#include <unordered_map>
#include <unordered_set>

#include "store_fixture.h"

namespace ucm::test {
namespace {

/// A retaining tier whose every answer a test can script. One slot per id, nothing is evicted.
class ScriptedTier final : public HostTier {
 public:
  struct Entry {
    std::vector<std::byte> data;
    std::vector<bool> ready = std::vector<bool>(kShards, false);
    std::uint32_t pins = 0;
  };

  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "scripted"; }
  void bind(std::weak_ptr<TierSink> to) override { sink = std::move(to); }
  bool retains() const noexcept override { return true; }
  Rotation rotation() const noexcept override { return rotate; }

  Status claim_load(const BlockId& id, std::span<const std::uint32_t> shards, ClaimUse use,
                    std::uint64_t cookie, std::span<ShardClaim> claims,
                    Slot& slot) noexcept override {
    const std::lock_guard lock(mu);
    if (full) return Status::kRejected;
    if (dumping.contains(id)) return Status::kMiss;
    Entry& entry = entry_of(id);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      claims[i] = entry.ready[shards[i]] ? ShardClaim::kReady : ShardClaim::kOwned;
      if (others.contains(id) && !entry.ready[shards[i]]) claims[i] = ShardClaim::kWaiting;
      order.push_back({id, shards[i]});
    }
    prefetches += use == ClaimUse::kPrefetch ? 1 : 0;
    cookies[id] = cookie;
    pin(id, entry, slot);
    return Status::kOk;
  }
  void finish_load(const Slot& slot, std::uint32_t begin, std::uint32_t end,
                   Outcome outcome) noexcept override {
    const std::lock_guard lock(mu);
    for (std::uint32_t s = begin; s < end; ++s) {
      ++finished;
      if (outcome.status == Status::kOk) by_handle(slot).ready[s] = true;
    }
  }
  DumpClaim claim_dump(const BlockId& id, Slot& slot,
                       std::span<std::uint8_t> have) noexcept override {
    const std::lock_guard lock(mu);
    if (full) return DumpClaim::kNoRoom;
    if (busy.contains(id)) return DumpClaim::kBusy;
    Entry& entry = entry_of(id);
    pin(id, entry, slot);
    bool whole = true;
    for (std::uint32_t s = 0; s < kShards; ++s) {
      have[s] = entry.ready[s] ? 1 : 0;
      whole = whole && entry.ready[s];
    }
    if (whole) return DumpClaim::kPresent;
    dumping.insert(id);
    return DumpClaim::kFill;
  }
  void publish(const Slot& slot) noexcept override {
    const std::lock_guard lock(mu);
    Entry& entry = by_handle(slot);
    entry.ready.assign(kShards, true);
    dumping.erase(ids_[slot.handle]);
  }
  void abort_dump(const Slot& slot) noexcept override {
    const std::lock_guard lock(mu);
    dumping.erase(ids_[slot.handle]);
    --by_handle(slot).pins;
  }
  void release(const Slot& slot) noexcept override {
    const std::lock_guard lock(mu);
    --by_handle(slot).pins;
  }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present) noexcept override {
    const std::lock_guard lock(mu);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto it = entries_.find(ids[i]);
      if (it == entries_.end() || dumping.contains(ids[i])) continue;
      bool whole = true;
      for (const bool ready : it->second.ready) whole = whole && ready;
      if (whole) present[i] = 1;
    }
  }
  void touch(std::span<const BlockId> ids) noexcept override { touched += ids.size(); }
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override {
    const std::lock_guard lock(mu);
    std::uint64_t pins = 0;
    for (const auto& [id, entry] : entries_) pins += entry.pins;
    return {{"pins", pins}};
  }
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override {}

  std::shared_ptr<TierSink> to() const { return sink.lock(); }
  std::uint64_t cookie(std::uint32_t object) {
    const std::lock_guard lock(mu);
    return cookies[id_of(object)];
  }
  /// Another process has put the object here.
  void put(std::uint32_t object) {
    Rowset rows;
    rows.add_object(object);
    rows.filled();
    const std::lock_guard lock(mu);
    Entry& entry = entry_of(id_of(object));
    for (std::uint32_t s = 0; s < kShards; ++s) {
      std::memcpy(entry.data.data() + geometry_.shard_offset(s),
                  rows.memory.data() + s * kRuns * kRunBytes, kRuns * kRunBytes);
    }
    entry.ready.assign(kShards, true);
  }

  mutable std::mutex mu;
  std::weak_ptr<TierSink> sink;
  Rotation rotate;
  bool full = false;
  std::unordered_set<BlockId, BlockIdHash> busy;
  std::unordered_set<BlockId, BlockIdHash> dumping;
  std::unordered_set<BlockId, BlockIdHash> others;  // what another process fetches
  std::unordered_map<BlockId, std::uint64_t, BlockIdHash> cookies;
  std::vector<std::pair<BlockId, std::uint32_t>> order;
  std::uint32_t finished = 0;
  std::uint32_t prefetches = 0;
  std::atomic<std::uint64_t> touched{0};

 private:
  Entry& entry_of(const BlockId& id) {
    Entry& entry = entries_[id];
    if (entry.data.empty()) entry.data.resize(geometry_.object_bytes());
    return entry;
  }
  Entry& by_handle(const Slot& slot) { return entries_.at(ids_[slot.handle]); }
  void pin(const BlockId& id, Entry& entry, Slot& slot) {
    ++entry.pins;
    ids_.push_back(id);
    slot = {entry.data.data(), ids_.size() - 1};
  }
  const Geometry geometry_ = small_geometry();
  std::unordered_map<BlockId, Entry, BlockIdHash> entries_;
  std::vector<BlockId> ids_;
};

class TierTest : public StoreTest {
 protected:
  void open_tier(StoreOptions options = {}, FakeOptions fake_options = {}) {
    store.reset();
    fake = std::make_shared<FakeStage>(small_geometry(), medium, fake_options);
    scripted = std::make_shared<ScriptedTier>();
    store = std::make_unique<Store>(fake, scripted, host_device(), options);
  }
  bool unpinned() {
    return eventually([&] { return stat("scripted.pins") == 0; });
  }
  std::shared_ptr<ScriptedTier> scripted;
};

TEST_F(TierTest, ASecondLoadReadsNothing) {
  open_tier();
  stored(0, 10);
  open_tier();  // another process: a cold tier over the same medium
  for (int round = 0; round < 2; ++round) {
    Rowset target;
    for (std::uint32_t o = 0; o < 10; ++o) target.add_object(o);
    target.blank();
    ASSERT_EQ(wait(*store->load(target.rows())), all(target.size(), Status::kOk));
    for (std::size_t row = 0; row < target.size(); ++row) ASSERT_TRUE(target.right(row));
    EXPECT_EQ(stat("Fake.reads_total"), 10U);
  }
  EXPECT_EQ(scripted->finished, 10 * kShards);
  EXPECT_TRUE(unpinned());
}

// Spec 3.8 item 2: the tier tells what it holds; durability is another fact.
TEST_F(TierTest, LookupTellsWhatTheTierHoldsOrTheStageBelow) {
  StoreOptions options;
  options.write_retries = 0;
  open_tier(options);
  stored(0, 1);
  medium->clear();
  fake->inject(id_of(1), false, Fault::kIoError, 5, 1);
  Rowset source;
  source.add_object(1);
  const auto task = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kIoError));
  EXPECT_TRUE(present(0) && present(1));
  EXPECT_FALSE(present(2));
  EXPECT_EQ(stat("store.backend_dump_errors_total"), 1U);
  // Dumped again it is not copied, but handed to the stage below again.
  const auto copied = stat("store.dump_copied_bytes_total");
  EXPECT_EQ(wait_durable(*store->dump(source.rows(), 0, CommitMode::kAuto)),
            all(kShards, Status::kOk));
  EXPECT_EQ(stat("store.dump_copied_bytes_total"), copied);
  EXPECT_EQ(medium->size(), 1U);
}

TEST_F(TierTest, ShardsThatOthersFetchAreWaitedFor) {
  open_tier();
  scripted->others.insert(id_of(1));
  scripted->others.insert(id_of(2));
  Rowset target;
  target.add_object(1);
  target.add_object(2);
  target.blank();
  const auto task = store->load(target.rows());
  EXPECT_FALSE(task->wait_until(Clock::now() + 20ms));
  EXPECT_EQ(stat("Fake.reads_total"), 0U);
  scripted->put(1);
  EXPECT_TRUE(scripted->to()->on_shards(scripted->cookie(1), 0, 2, ShardEvent::kReady, {}));
  EXPECT_TRUE(scripted->to()->on_shards(scripted->cookie(1), 2, 4, ShardEvent::kReady, {}));
  EXPECT_TRUE(scripted->to()->on_shards(scripted->cookie(2), 0, 4, ShardEvent::kFailed,
                                        {Status::kIoError, 7}));
  const auto result = wait(*task);
  for (std::size_t row = 0; row < 2 * kShards; ++row) {
    EXPECT_EQ(result[row], row < kShards ? Status::kOk : Status::kIoError);
    EXPECT_TRUE(row < kShards ? target.right(row) : target.untouched(row));
  }
  EXPECT_EQ(task->outcome(kShards).error, 7);
  EXPECT_TRUE(unpinned());
  EXPECT_FALSE(scripted->to()->on_shards(scripted->cookie(1), 0, 4, ShardEvent::kReady, {}));
}

TEST_F(TierTest, AWaiterTakesOverFromADeadOwner) {
  open_tier();
  stored(1, 2);
  open_tier();
  scripted->others.insert(id_of(1));
  Rowset target;
  target.add_object(1);
  target.blank();
  const auto task = store->load(target.rows());
  EXPECT_TRUE(scripted->to()->on_shards(scripted->cookie(1), 0, 4, ShardEvent::kTakeover, {}));
  ASSERT_EQ(wait(*task), all(kShards, Status::kOk));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(target.right(row));
  EXPECT_EQ(scripted->finished, kShards);
  EXPECT_TRUE(unpinned());
}

// A waiter returns when its own task failed or was cancelled, and takes nothing over after that.
TEST_F(TierTest, AWaiterLeavesWithItsTask) {
  open_tier();
  scripted->others.insert(id_of(1));
  Rowset target;
  target.add_object(1);
  target.blank();
  const auto task = store->load(target.rows());
  EXPECT_EQ(wait(*task, 20ms), all(kShards, Status::kTimeout));
  EXPECT_TRUE(unpinned());
  EXPECT_FALSE(scripted->to()->on_shards(scripted->cookie(1), 0, 4, ShardEvent::kTakeover, {}));
  scripted->put(1);
  EXPECT_FALSE(scripted->to()->on_shards(scripted->cookie(1), 0, 4, ShardEvent::kReady, {}));
  for (std::size_t row = 0; row < kShards; ++row) EXPECT_TRUE(target.untouched(row));
}

TEST_F(TierTest, RoomThatAnotherProcessFreesIsUsed) {
  open_tier();
  scripted->full = true;
  Rowset source;
  source.add_object(1);
  const auto dump = store->dump(source.filled().rows(), 0, CommitMode::kAuto);
  Rowset target;
  target.add_object(9);
  target.blank();
  const auto load = store->load(target.rows());
  EXPECT_FALSE(dump->wait_until(Clock::now() + 20ms));
  {
    const std::lock_guard lock(scripted->mu);
    scripted->full = false;
  }
  scripted->to()->on_room();
  EXPECT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
  EXPECT_EQ(wait(*load), all(kShards, Status::kMiss));
  EXPECT_TRUE(unpinned());
}

// One id that is busy elsewhere blocks no other (B18: it ends with its own timeout).
TEST_F(TierTest, ABusyObjectBlocksNoOther) {
  open_tier();
  scripted->busy.insert(id_of(1));
  std::vector<Rowset> sources(3);
  std::vector<std::shared_ptr<Task>> tasks;
  for (std::uint32_t o = 1; o < 4; ++o) {
    sources[o - 1].add_object(o);
    tasks.push_back(store->dump(sources[o - 1].filled().rows(), 0, CommitMode::kAuto));
  }
  scripted->to()->on_room();
  EXPECT_EQ(wait_durable(*tasks[1]), all(kShards, Status::kOk));
  EXPECT_EQ(wait_durable(*tasks[2]), all(kShards, Status::kOk));
  EXPECT_EQ(wait(*tasks[0], 10ms), all(kShards, Status::kTimeout));
  EXPECT_EQ(stat("store.dumps_waiting"), 0U);
}

TEST_F(TierTest, ShardsThatAreReadableAlreadyAreNotWrittenAgain) {
  open_tier();
  stored(1, 2);
  open_tier();
  Rowset part;
  part.add(1, 2);
  part.blank();
  ASSERT_EQ(wait(*store->load(part.rows())), all(1, Status::kOk));  // shard 2 is ready now
  Rowset source;
  source.add_object(1);
  EXPECT_EQ(wait_durable(*store->dump(source.filled().rows(), 0, CommitMode::kAuto)),
            all(kShards, Status::kOk));
  EXPECT_EQ(stat("store.dump_copied_bytes_total"), 3 * kRuns * kRunBytes);
  EXPECT_TRUE(unpinned());
}

TEST_F(TierTest, WhatIsBeingDumpedIsAMiss) {
  open_tier();
  Rowset source;
  source.add_object(1);
  const auto dump = store->dump(source.filled().rows(), 0, CommitMode::kExplicit);
  ASSERT_EQ(wait(*dump), all(kShards, Status::kOk));
  EXPECT_FALSE(present(1));
  Rowset target;
  target.add_object(1);
  target.blank();
  EXPECT_EQ(wait(*store->load(target.rows())), all(kShards, Status::kMiss));
  const BlockId id = id_of(1);
  store->discard({&id, 1});
  EXPECT_TRUE(unpinned());
}

// B18: prefetches and lookups pin nothing.
TEST_F(TierTest, PrefetchMovesUpAndPinsNothing) {
  open_tier();
  stored(0, 4);
  open_tier();
  std::vector<BlockId> ids;
  for (std::uint32_t o = 0; o < 5; ++o) ids.push_back(id_of(o));
  for (int round = 0; round < 100; ++round) store->prefetch(ids);
  ASSERT_TRUE(eventually([&] { return stat("store.prefetched_objects_total") >= 4; }));
  EXPECT_TRUE(unpinned());
  ASSERT_TRUE(eventually(
      [&] { return stat("store.prefetches_waiting") == 0 && stat("store.loads_running") == 0; }));
  medium->clear();
  Rowset target;
  for (std::uint32_t o = 0; o < 4; ++o) target.add_object(o);
  target.blank();
  EXPECT_EQ(wait(*store->load(target.rows())), all(target.size(), Status::kOk));
  EXPECT_EQ(stat("store.load_rows_ok_total"), target.size());  // prefetched rows do not count
  EXPECT_GE(scripted->prefetches, 4U);
}

// Ranks that load the same start with different parts: k-th step of rank r is slice (r + k) mod N.
TEST_F(TierTest, LoadsAreRotatedByRank) {
  const auto starts = [&](std::uint32_t objects, std::uint32_t rank, std::uint32_t ranks) {
    open_tier();
    scripted->rotate = {rank, ranks};
    Rowset target;
    for (std::uint32_t o = 0; o < objects; ++o) target.add_object(o + 1);
    target.blank();
    (void)wait(*store->load(target.rows()));
    return scripted->order;
  };
  std::vector<std::uint32_t> walk;
  for (const auto& [id, shard] : starts(12, 1, 4)) {
    if (shard != 0) continue;
    std::uint32_t object = 0;
    std::memcpy(&object, id.bytes.data() + 4, sizeof object);
    walk.push_back(object - 1);
  }
  EXPECT_EQ(walk, (std::vector<std::uint32_t>{1, 5, 9, 2, 6, 10, 3, 7, 11, 0, 4, 8}));
  // Fewer objects than ranks: the shards of each object are dealt out.
  std::vector<std::uint32_t> shards;
  for (const auto& [id, shard] : starts(1, 2, 4)) shards.push_back(shard);
  EXPECT_EQ(shards, (std::vector<std::uint32_t>{2, 3, 0, 1}));
  walk.clear();
  for (const auto& [id, shard] : starts(3, 0, 1)) walk.push_back(shard);
  EXPECT_EQ(walk.size(), 12U);  // natural order
}

}  // namespace
}  // namespace ucm::test
