// Real processes on one slab directory: sharing, killed at every step, killed at random, rebuilt.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "slab_kit.h"

namespace ucm {
namespace {

using namespace slab_test;

TEST(SlabProcesses, WhatOneWritesTheOtherReads) {
  const TempDir dir;
  const auto o = slab_options({dir.str()});
  Harness h(o);
  ASSERT_EQ(write_range(h, 0, 10), 10u);
  ASSERT_EQ(end_of(child([&] {
              Harness other(o);
              if (load_range(other, 0, 10) != 10) return 1;
              if (other.stat("slab_processes") != 2) return 2;
              return write_range(other, 10, 20) == 10 ? 0 : 3;
            })),
            0);
  EXPECT_EQ(load_range(h, 0, 20), 20);
  EXPECT_TRUE(eventually([&] { return h.stat("slab_processes") == 1; }));
  EXPECT_EQ(h.stat("slab_recovered_processes_total"), 0u) << "it left by itself";
}

/// The child has some objects stored, then dies at the `nth` time that it passes `point`.
int work_until(PosixOptions o, const std::string& point, int nth) {
  int seen = 0;
  o.faults = std::make_shared<Points>([&](const std::string& at) {
    if (at == point && ++seen == nth) kill(getpid(), SIGKILL);
  });
  Harness h(o);
  for (int i = 0; i < 400; i += 8) {
    (void)write_range(h, i, i + 8);
    (void)h.read(id_of(i));
    const BlockId id = id_of(i + 1);
    h.stage->remove({&id, 1});
  }
  return 0;
}

class SlabKilled : public ::testing::TestWithParam<const char*> {};

// The survivor goes on at once, everything visible is right, and no slot is lost.
TEST_P(SlabKilled, WhileOthersLive) {
  const TempDir dir;
  const auto o = slab_options({dir.str()}, 2u << 20);
  std::uint64_t died = 0;
  for (const int nth : {1, 3, 6}) {
    Harness h(o);
    ASSERT_EQ(h.write(id_of(5'000)).status, Status::kOk);
    const int status = end_of(child([&] { return work_until(o, GetParam(), nth); }));
    ASSERT_TRUE(status == -SIGKILL || status == 0) << status;
    if (status == 0) continue;  // it does not pass the point that often
    ++died;
    (void)h.stage->collect_now(milliseconds(10'000));  // looks for the dead at once
    EXPECT_EQ(h.stat("slab_processes"), 1u);
    EXPECT_EQ(h.stat("slab_recovered_processes_total"), 1u);
    EXPECT_EQ(write_range(h, 6'000, 6'006), 6u);
    EXPECT_EQ(load_range(h, 6'000, 6'006), 6);
    const int left =
        load_range(h, 0, 400) + load_range(h, 5'000, 5'001) + load_range(h, 6'000, 6'006);
    EXPECT_EQ(h.stat("read_corrupt_total"), 0u);
    EXPECT_EQ(h.stat("slab_groups_in_use"), 0u);
    EXPECT_EQ(h.stat("slab_slots_free"), h.stat("slab_slots") - static_cast<std::uint64_t>(left))
        << "a slot is lost";
  }
  EXPECT_GE(died, 1u);
}

// Nobody is left: the next start scans. What was committed is there, half a write is not.
TEST_P(SlabKilled, WhenNobodyIsLeft) {
  const TempDir dir;
  const auto o = slab_options({dir.str()}, 2u << 20);
  std::uint64_t died = 0;
  for (const int nth : {1, 4}) {
    const int status = end_of(child([&] { return work_until(o, GetParam(), nth); }));
    ASSERT_TRUE(status == -SIGKILL || status == 0) << status;
    died += status != 0;
    Harness h(o);
    const int left = load_range(h, 0, 400) + load_range(h, 6'000, 6'010);
    EXPECT_EQ(h.stat("read_corrupt_total"), 0u);
    EXPECT_EQ(h.stat("slab_scanned_corrupt"), 0u);
    EXPECT_EQ(h.stat("slab_processes"), 1u);
    EXPECT_EQ(h.stat("slab_slots_free"), h.stat("slab_slots") - static_cast<std::uint64_t>(left));
    EXPECT_EQ(write_range(h, 6'000, 6'010), 10u);
  }
  EXPECT_GE(died, 1u);
}

// `formatting` and `formatted` are passed once per slab file, four times in all.
INSTANTIATE_TEST_SUITE_P(Points, SlabKilled, ::testing::ValuesIn(slab::point::kAll),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST(SlabProcesses, KilledAtRandomAgainAndAgain) {
  const TempDir dir;
  const auto o = slab_options({dir.str()}, 2u << 20);
  std::mt19937 random(7);
  const pid_t steady = child([&] {
    Harness h(o);
    for (int i = 0; i < 120; ++i) {
      const int first = 10'000 + i * 4 % 100;
      if (write_range(h, first, first + 4) != 4) return 1;
      if (load_range(h, 0, 30) < 0) return 2;
      std::this_thread::sleep_for(milliseconds(3));
    }
    return h.stat("read_corrupt_total") == 0 ? 0 : 3;
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t victim = child([&] { return work_until(o, "never", 1); });
    std::this_thread::sleep_for(milliseconds(random() % 40));
    kill(victim, SIGKILL);
    (void)end_of(victim);
  }
  EXPECT_EQ(end_of(steady), 0);
  Harness h(o);
  const int left = load_range(h, 0, 400) + load_range(h, 10'000, 10'104);
  EXPECT_EQ(h.stat("read_corrupt_total"), 0u);
  EXPECT_EQ(h.stat("slab_slots_free"), h.stat("slab_slots") - static_cast<std::uint64_t>(left));
}

// A slot that is being read keeps its object, whatever else is written; a dead reader lets go.
TEST(SlabProcesses, WhatIsReadIsNotReused) {
  const TempDir dir;
  auto o = slab_options({dir.str()}, 1u << 20);
  Harness h(o);
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t reader = child([&] {
    auto slow = o;
    slow.faults = std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t&) {
      if (step != IoStep::kRead) return 0;
      (void)!write(ready[1], "x", 1);
      for (;;) std::this_thread::sleep_for(milliseconds(50));
    });
    Harness other(slow);
    (void)other.read(id_of(1));
    return 1;
  });
  char c = 0;
  ASSERT_EQ(read(ready[0], &c, 1), 1);
  for (int i = 100; i < 400; i += 10) (void)write_range(h, i, i + 10);
  EXPECT_TRUE(h.present(id_of(1)));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
  const BlockId id = id_of(1);
  h.stage->remove({&id, 1});
  EXPECT_FALSE(h.present(id));
  const auto before = h.stat("slab_slots_free");
  kill(reader, SIGKILL);
  (void)end_of(reader);
  (void)h.stage->collect_now(milliseconds(10'000));
  for (int i = 400; i < 600; i += 10) EXPECT_EQ(write_range(h, i, i + 10), 10u);
  const int left = load_range(h, 100, 600);
  EXPECT_EQ(h.stat("slab_slots_free"), h.stat("slab_slots") - static_cast<std::uint64_t>(left))
      << "before: " << before;
}

// The kernel may still finish a dead writer's I/O: its slots stay closed for a while.
TEST(SlabProcesses, SlotsOfADeadWriterAreQuarantined) {
  const TempDir dir;
  auto o = slab_options({dir.str()}, 1u << 20);
  o.quarantine = milliseconds(1'000);
  {
    Harness h(o);
    ASSERT_EQ(h.write(id_of(5'000)).status, Status::kOk);
    ASSERT_EQ(end_of(child([&] { return work_until(o, "data-written", 1); })), -SIGKILL);
    (void)h.stage->collect_now(milliseconds(1));
    ASSERT_EQ(h.stat("slab_processes"), 1u);
    EXPECT_GE(h.stat("slab_groups_closed"), 1u);
    EXPECT_EQ(write_range(h, 6'000, 6'040), 40u) << "the others take all of it";
    EXPECT_GT(h.stat("slab_slots_free"), 0u);
    EXPECT_TRUE(eventually([&] { return h.stat("slab_groups_closed") == 0; }));
    for (int i = 7'000; i < 7'100; i += 10) EXPECT_EQ(write_range(h, i, i + 10), 10u);
    EXPECT_EQ(h.stat("slab_slots_free"), 0u) << "and then those are used again";
  }
  // The same when nobody is left.
  ASSERT_EQ(end_of(child([&] { return work_until(o, "data-written", 1); })), -SIGKILL);
  Harness h(o);
  EXPECT_GE(h.stat("slab_groups_closed"), 1u);
}

}  // namespace
}  // namespace ucm
