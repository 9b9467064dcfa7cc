// Layout slab in one process: what is stored comes back, is rebuilt, is given up by CLOCK.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

#include "slab_kit.h"
#include "ucm/layout.h"

namespace ucm {
namespace {

using namespace slab_test;

class Slab : public ::testing::TestWithParam<const char*> {
 protected:
  PosixOptions options(std::uint64_t capacity = 4u << 20) {
    auto o = slab_options({dir.str()}, capacity);
    o.engine = GetParam();
    return o;
  }
  const TempDir dir;
};

TEST_P(Slab, WhatIsWrittenComesBack) {
  Harness h(options());
  EXPECT_EQ(h.read(id_of(1)).status, Status::kMiss);
  EXPECT_EQ(write_range(h, 0, 60), 60u);
  EXPECT_EQ(load_range(h, 0, 60), 60);
  EXPECT_FALSE(h.present(id_of(60)));
  Region into(h.geometry, id_of(99));
  auto results = std::make_shared<Results>(2);
  const ReadOp ops[] = {{id_of(5), into.data(), 1, 3, 0}, {id_of(6), into.data(), 3, 4, 1}};
  h.stage->read(ops, results, in(milliseconds(20'000)));
  ASSERT_TRUE(results->wait());
  EXPECT_EQ(results->count(Status::kOk), 2u);
  EXPECT_TRUE(into.holds(id_of(99), 0, 1) && into.holds(id_of(5), 1, 3) &&
              into.holds(id_of(6), 3, 4));
  EXPECT_EQ(h.stat("slab_groups_in_use"), 0u) << "a group is owned while it is written only";
}

TEST_P(Slab, ABatchCostsOnePageOfSlotHeads) {
  Harness h(options());
  ASSERT_EQ(write_range(h, 0, 20), 20u);
  EXPECT_LE(h.stat("slab_page_writes_total"), 4u) << "of 20 objects";
  EXPECT_EQ(h.write(id_of(3)).status, Status::kOk);
  EXPECT_EQ(h.stat("write_existing_total"), 1u);
  EXPECT_EQ(h.stat("writes_total"), 20u);
}

TEST_P(Slab, TheIndexIsRebuiltFromTheFiles) {
  for (const bool flushed : {false, true}) {
    auto o = options();
    o.fsync = flushed;
    {
      Harness h(o);
      ASSERT_EQ(write_range(h, 0, 50), 50u);
      const BlockId gone = id_of(7);
      h.stage->remove({&gone, 1});
      EXPECT_FALSE(h.present(gone));
      EXPECT_TRUE(h.stage->collect_now(milliseconds(10'000)));
    }
    Harness h(o);
    EXPECT_EQ(load_range(h, 0, 60), 49);
    EXPECT_FALSE(h.present(id_of(7)));
    EXPECT_EQ(h.stat("slab_scanned_corrupt"), 0u);
    EXPECT_EQ(h.write(id_of(7)).status, Status::kOk);
  }
}

// Four times what fits: the cold go, those that are used stay, nothing is ever wrong or leaked.
TEST_P(Slab, ClockGivesUpTheCold) {
  Harness h(options());
  ASSERT_EQ(h.write(id_of(9'000)).status, Status::kOk);
  const auto slots = h.stat("slab_slots") * 4;  // files are formatted when they are needed
  const int all = static_cast<int>(slots) * 4 / 10 * 10;
  const int full = static_cast<int>(slots) * 2 / 10 * 10;
  std::vector<BlockId> hot;
  for (int i = full; i < full + 10; ++i) hot.push_back(id_of(i));
  for (int i = 0; i < all; i += 10) {
    ASSERT_EQ(write_range(h, i, i + 10), 10u);
    if (i >= full) h.stage->touch(hot);
  }
  EXPECT_EQ(h.stat("slab_slots"), slots);
  EXPECT_GT(h.stat("slab_evictions_total"), slots * 2);
  const int kept = load_range(h, full, full + 10);
  const int left =
      load_range(h, 0, full) + load_range(h, full + 10, all) + load_range(h, 9'000, 9'001);
  EXPECT_GT(left, static_cast<int>(slots) / 2);
  if (std::string(GetParam()) == "psync") {  // several writers move the hand at once: more often
    EXPECT_GT(kept * (all + 1 - 10), left * 10) << "a larger share of the touched stays";
  } else {
    EXPECT_EQ(kept, 10) << "touched all the time";
  }
  EXPECT_EQ(h.stat("slab_slots_free"), slots - static_cast<std::uint64_t>(left + kept));
}

TEST_P(Slab, GeometriesShareTheFiles) {
  const Geometry large = small_geometry(8, 16 * 1024);
  Harness a(small_geometry(), options());
  ASSERT_EQ(write_range(a, 0, 300), 300u);  // more than fits: all files have this geometry
  {
    Harness b(large, options());
    ASSERT_EQ(write_range(b, 1000, 1020), 20u);
    EXPECT_GE(load_range(b, 1000, 1020), 5);
    EXPECT_GE(b.stat("slab_files"), 1u);
    EXPECT_FALSE(b.present(id_of(299))) << "another layout is not ours";
    EXPECT_EQ(a.stat("slab_files"), 3u) << "whoever had none takes one, however many write at once";
    EXPECT_GT(load_range(a, 0, 300), 10);
  }
  a.stage->shutdown(in(milliseconds(5'000)));
  a.stage.reset();
  Harness b(large, options());  // rebuilt with both
  EXPECT_GE(load_range(b, 1000, 1020), 5);
  Harness again(small_geometry(), options());
  EXPECT_GT(load_range(again, 0, 300), 10);
}

TEST_P(Slab, ObjectsInAnotherLayoutAreConverted) {
  const std::string from = "fp32|kv:2,token:32,layer:4,head:2,elem:16";
  const std::string to = "fp32|layer:4,token:32,head:2,kv:2,elem:16";
  const auto geometry_of = [](const std::string& text) {
    std::string error;
    const auto layout = Layout::parse(text, error);
    EXPECT_TRUE(layout) << error;
    Geometry g =
        small_geometry(static_cast<std::uint32_t>(layout->shard_count()), layout->shard_bytes());
    g.layout = layout->text();
    return g;
  };
  Harness writer(geometry_of(from), options());
  ASSERT_EQ(write_range(writer, 0, 3), 3u);
  Harness h(geometry_of(to), options());
  std::string error, why;
  const auto conversion = Conversion::plan(*Layout::parse(from, error), *Layout::parse(to, error),
                                           kIoAlign, kIoAlign, why);
  ASSERT_TRUE(conversion) << why;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(h.present(id_of(i)));
    const Region stored(writer.geometry, id_of(i));
    Region want(h.geometry), into(h.geometry);
    conversion->run(want.data(), stored.data(), 0, conversion->target_shards());
    ASSERT_EQ(h.read(id_of(i), into).status, Status::kOk);
    for (std::uint32_t s = 0; s < h.geometry.shard_count; ++s) {
      EXPECT_EQ(std::memcmp(into.data() + h.geometry.shard_offset(s),
                            want.data() + h.geometry.shard_offset(s), h.geometry.shard_bytes),
                0);
    }
    EXPECT_FALSE(into.holds(id_of(i))) << "the control: the stored bytes would be wrong";
  }
  EXPECT_EQ(h.stat("convert_reads_total"), 3u);
  EXPECT_EQ(h.write(id_of(0)).status, Status::kOk);
  EXPECT_EQ(h.stat("write_existing_total"), 1u) << "one that we can read is as good as ours";
}

TEST_P(Slab, AFailingDirectoryCostsItsShare) {
  const TempDir second;
  auto o = slab_options({dir.str(), second.str()}, 8u << 20);
  o.engine = GetParam();
  o.probe_interval = milliseconds(60'000);
  std::atomic<bool> broken{false};
  o.faults = std::make_shared<Faults>([&](IoStep step, const std::string& path, std::size_t&) {
    const bool io = step == IoStep::kRead || step == IoStep::kWrite;
    return broken && io && path.starts_with(second.str()) ? -EIO : 0;
  });
  Harness h(o);
  ASSERT_EQ(write_range(h, 0, 40), 40u);
  std::set<int> there;
  for (int i = 0; i < 40; ++i) {
    if (place_of(second.path(), id_of(i)).found) there.insert(i);
  }
  ASSERT_GT(there.size(), 5u);
  ASSERT_LT(there.size(), 35u);
  broken = true;
  for (int i = 0; i < 40; ++i) {
    const Status status = h.read(id_of(i)).status;
    EXPECT_EQ(status == Status::kOk, there.count(i) == 0) << i;
  }
  EXPECT_EQ(h.stat("roots_out"), 1u);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(h.present(id_of(i)), there.count(i) == 0) << i;
  (void)write_range(h, 100, 140);  // the first ones meet the broken directory
  EXPECT_EQ(write_range(h, 200, 220), 20u) << "all go to the one that serves";
}

INSTANTIATE_TEST_SUITE_P(Engines, Slab, ::testing::Values("auto", "aio", "psync"));

// Lookups, loads, dumps and removals of the same objects from several threads and two stages.
TEST(SlabThreads, ACrowdOnFewSlots) {
  const TempDir dir;
  const auto o = slab_options({dir.str()}, 2u << 20);
  Harness a(o), b(o);
  std::atomic<int> wrong{0};
  const auto work = [&](Harness& h, unsigned seed) {
    for (unsigned i = 0; i < 150; ++i) {
      const BlockId id = id_of((i * 7 + seed * 13) % 90);
      const Region from(h.geometry, id);
      auto results = std::make_shared<Results>(2);
      Region into(h.geometry);
      const WriteOp w{id, from.data(), 0};
      const ReadOp r{id, into.data(), 0, h.geometry.shard_count, 1};
      h.stage->write({&w, 1}, results, in(milliseconds(20'000)));
      h.stage->read({&r, 1}, results, in(milliseconds(20'000)));
      if (!results->wait()) ++wrong;
      const Status s = results->at(1).status;
      if (s == Status::kOk ? !into.holds(id) : s != Status::kMiss) ++wrong;
      if (i % 10 == 0) h.stage->remove({&id, 1});
      (void)h.present(id);
    }
  };
  std::thread t[] = {std::thread(work, std::ref(a), 0u), std::thread(work, std::ref(a), 1u),
                     std::thread(work, std::ref(b), 2u), std::thread(work, std::ref(b), 3u)};
  for (auto& x : t) x.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(a.stat("read_corrupt_total") + b.stat("read_corrupt_total"), 0u);
  EXPECT_TRUE(eventually([&] { return a.stat("slab_groups_in_use") == 0; }));
  const int left = load_range(a, 0, 90);
  EXPECT_EQ(a.stat("slab_slots_free"), a.stat("slab_slots") - static_cast<std::uint64_t>(left));
}

}  // namespace
}  // namespace ucm
